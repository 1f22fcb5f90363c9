// SPDX-License-Identifier: Apache-2.0
//! rust/cuda/params.rs is what bindgen makes of cuda/params.h. With DDTREE_WRITE_PARAMS=1 this
//! rewrites the file instead. bindgen loads libclang at run time; LIBCLANG_PATH names its folder.

use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn rust_params_are_those_of_the_kernels() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let committed = root.join("rust/cuda/params.rs");
    if std::env::var_os("LIBCLANG_PATH").is_none() && std::env::var_os("DDTREE_WRITE_PARAMS").is_none() {
        eprintln!("skipped: LIBCLANG_PATH is not set (`pip install libclang` has one in clang/native)");
        return;
    }
    // libclang from a wheel comes without the headers of a compiler, so the C compiler lends its own
    let include = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()))
        .arg("-print-file-name=include")
        .output()
        .expect("a C compiler");
    let include = String::from_utf8(include.stdout).expect("a path");
    let bindings = bindgen::Builder::default()
        .header(root.join("cuda/params.h").display().to_string())
        .clang_arg(format!("-I{}", include.trim()))
        .raw_line("// SPDX-License-Identifier: Apache-2.0")
        .raw_line("// Generated from cuda/params.h by bindgen; do not edit. `DDTREE_WRITE_PARAMS=1 cargo test --test kernel_params` rewrites it.")
        .raw_line("#![allow(missing_docs, non_camel_case_types, non_upper_case_globals, dead_code, clippy::all)]")
        .disable_header_comment()
        .allowlist_item("(ddt_cuda|DDT_CUDA)_.*")
        .prepend_enum_name(false)
        .layout_tests(true)
        .derive_default(false)
        .formatter(bindgen::Formatter::Prettyplease)
        .generate()
        .expect("bindings");
    let text = bindings.to_string();
    if std::env::var_os("DDTREE_WRITE_PARAMS").is_some() {
        fs::write(&committed, text).expect("writable");
        return;
    }
    let want = fs::read_to_string(&committed).expect("rust/cuda/params.rs");
    assert!(
        text == want,
        "rust/cuda/params.rs is stale: run `DDTREE_WRITE_PARAMS=1 cargo test --test kernel_params`"
    );
}
