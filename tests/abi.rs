// SPDX-License-Identifier: Apache-2.0
//! What all operations share: contexts, versions, constants, layout of the structs.

mod common;

use std::ffi::CStr;
use std::ptr::{null, null_mut};

use common::buffers::{Context, last_error};
use ddtree::ffi::*;

fn create(change: impl FnOnce(&mut ddt_context_params)) -> ddt_status {
    let mut params = ddt_context_params {
        struct_size: size_of::<ddt_context_params>() as u32,
        abi_version: DDT_ABI_VERSION,
        device: DDT_DEVICE_CPU,
        device_index: 0,
        flags: 0,
    };
    change(&mut params);
    let poison = std::ptr::dangling_mut::<ddt_context>();
    let mut context = poison;
    // SAFETY: both pointers are valid.
    let status = unsafe { ddt_context_create(&params, &mut context) };
    assert_eq!(context == poison, status != DDT_OK, "out is written on success only");
    if status == DDT_OK {
        // SAFETY: just created.
        unsafe { ddt_context_free(context) };
    }
    status
}

#[test]
fn contexts() {
    assert_eq!(create(|_| {}), DDT_OK);
    assert_eq!(last_error(), "");
    // device fields are optional
    assert_eq!(create(|params| (params.struct_size, params.device) = (8, 77)), DDT_OK);
    assert_eq!(create(|params| params.struct_size = 4), DDT_INVALID_STRUCT);
    assert_eq!(create(|params| params.abi_version = 0), DDT_ABI_MISMATCH);
    assert_eq!(last_error(), "context_create: params.abi_version: got 0, want 1");
    assert_eq!(create(|params| params.abi_version = 2), DDT_ABI_MISMATCH);
    // tests/c/run.sh has the statuses of all kinds of machines
    let gpu = create(|params| params.device = DDT_DEVICE_CUDA);
    let possible: &[_] =
        if cfg!(feature = "cuda") { &[DDT_OK, DDT_NO_DEVICE, DDT_CUDA_ERROR] } else { &[DDT_UNSUPPORTED] };
    assert!(possible.contains(&gpu), "{gpu}: {}", last_error());
    assert_eq!(create(|params| params.flags = DDT_CONTEXT_PORTABLE_KERNELS), DDT_OK);
    assert_eq!(create(|params| params.flags = 2), DDT_UNSUPPORTED);
    // before there were flags
    assert_eq!(create(|params| (params.struct_size, params.flags) = (16, 2)), DDT_OK);
    assert_eq!(create(|params| params.device = 2), DDT_INVALID_VALUE);
    assert_eq!(create(|params| params.device_index = 1), DDT_INVALID_VALUE);
    assert_eq!(last_error(), "context_create: params.device_index: got 1, want 0 for the CPU");
    let mut context = null_mut();
    // SAFETY: NULL is what these calls are about.
    unsafe {
        assert_eq!(ddt_context_create(null(), &mut context), DDT_NULL_POINTER);
        ddt_context_free(null_mut());
    }
    // threads may share one
    let shared = Context::new();
    let address = shared.0 as usize;
    let threads: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                let mut bytes = 1;
                let context = address as *const ddt_context;
                // SAFETY: the context outlives the threads; NULL parameters are refused.
                unsafe { ddt_tree_accept_workspace_size(context, null(), &mut bytes) }
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().expect("no panic"), DDT_NULL_POINTER);
    }
}

#[test]
fn versions() {
    // SAFETY: the functions return static strings.
    let text = |pointer| unsafe { CStr::from_ptr(pointer) }.to_str().expect("UTF-8");
    assert_eq!(ddt_abi_version(), DDT_ABI_VERSION);
    assert_eq!(text(ddt_version()), env!("CARGO_PKG_VERSION"));
    let info = text(ddt_build_info());
    assert!(
        info.starts_with(&format!("ddtree/{} abi/{DDT_ABI_VERSION} git/", env!("CARGO_PKG_VERSION"))),
        "{info}"
    );
    assert!(
        info.contains(if cfg!(feature = "cuda") { " backends/cpu,cuda archs/sm_" } else { " backends/cpu" }),
        "{info}"
    );
    assert_eq!(text(ddt_status_name(DDT_MISALIGNED)), "DDT_MISALIGNED");
    assert_eq!(text(ddt_status_name(12345)), "DDT_STATUS_UNKNOWN");
}

#[test]
fn constants_of_the_header_are_those_of_the_crate() {
    assert_eq!(DDT_MAX_NODE_BUDGET as usize, ddtree::MAX_NODE_BUDGET);
    assert_eq!(DDT_MAX_DEPTH as usize, ddtree::MAX_DEPTH);
    assert_eq!(DDT_FLAG_NO_CANDIDATES, ddtree::FLAG_NO_CANDIDATES);
    assert_eq!(DDT_FLAG_NONFINITE, ddtree::FLAG_NONFINITE);
    assert_eq!(DDT_FLAG_CANDIDATES_EXHAUSTED, ddtree::FLAG_CANDIDATES_EXHAUSTED);
    use ddtree::DType;
    for (number, dtype, size) in [
        (DDT_DTYPE_F32, DType::F32, 4),
        (DDT_DTYPE_F16, DType::F16, 2),
        (DDT_DTYPE_BF16, DType::BF16, 2),
        (DDT_DTYPE_I32, DType::I32, 4),
        (DDT_DTYPE_I64, DType::I64, 8),
        (DDT_DTYPE_U8, DType::U8, 1),
    ] {
        assert_eq!((DType::from_abi(number), dtype as u32, dtype.size()), (Some(dtype), number, size));
    }
    assert_eq!((DType::from_abi(0), DType::from_abi(7)), (None, None));
}

#[test]
fn last_error_arguments() {
    let mut byte = 7u8;
    let buf = (&raw mut byte).cast();
    let mut needed = 0;
    assert_eq!(create(|params| params.device = 9), DDT_INVALID_VALUE);
    let text = last_error();
    // SAFETY: the buffers are as long as said.
    unsafe {
        assert_eq!(ddt_last_error(null_mut(), 1, &mut needed), DDT_NULL_POINTER);
        assert_eq!(needed, 0);
        assert_eq!(ddt_last_error(null_mut(), 0, &mut needed), DDT_OK);
        assert_eq!(needed, text.len() + 1);
        assert_eq!(ddt_last_error(buf, 0, null_mut()), DDT_OK);
        assert_eq!(byte, 7);
        assert_eq!(ddt_last_error(buf, 1, null_mut()), DDT_OK);
        assert_eq!(byte, 0);
    }
    assert_eq!(last_error(), text, "reading does not clear it");
}
