// SPDX-License-Identifier: Apache-2.0
//! The committed C header is what cbindgen makes of rust/ffi.

use std::path::Path;

#[test]
fn header_is_up_to_date() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml");
    let mut header = Vec::new();
    cbindgen::Builder::new()
        .with_config(config)
        .with_src(root.join("rust/ffi/mod.rs"))
        .generate()
        .expect("rust/ffi parses")
        .write(&mut header);

    let path = root.join("include/ddtree.h");
    if std::env::var_os("DDTREE_WRITE_HEADER").is_some() {
        std::fs::write(&path, &header).expect("include/ddtree.h is writable");
    }
    let committed = std::fs::read(&path).unwrap_or_default();
    assert!(
        committed == header,
        "include/ddtree.h is stale: run `DDTREE_WRITE_HEADER=1 cargo test --test header` and commit it"
    );
}
