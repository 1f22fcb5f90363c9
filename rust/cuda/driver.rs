// SPDX-License-Identifier: Apache-2.0
//! The driver's errors as ours.

use std::ffi::CStr;
use std::ptr::null;

use cudarc::driver::sys::{self, CUresult};

use crate::error::{Error, Result, Status};

/// Turns a driver's answer into a result; `call` names the function for the message.
pub(super) fn check(result: CUresult, call: &str) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let status = match result {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Status::OutOfMemory,
        CUresult::CUDA_ERROR_NO_DEVICE | CUresult::CUDA_ERROR_INVALID_DEVICE => Status::NoDevice,
        CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            Status::ArchNotBuilt
        }
        _ => Status::CudaError,
    };
    Err(Error::new(status, format!("{call}: got {}, want success", describe(result))))
}

/// `CUDA_ERROR_NAME (explanation)`.
fn describe(result: CUresult) -> String {
    let text = |ask: unsafe fn(CUresult, *mut *const std::ffi::c_char) -> CUresult| {
        let mut text = null();
        // SAFETY: the driver is loaded, since it gave an answer, and writes a static string or NULL.
        unsafe {
            let _ = ask(result, &raw mut text);
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        }
    };
    let name = text(sys::cuGetErrorName).unwrap_or_else(|| format!("driver error {}", result as u32));
    match text(sys::cuGetErrorString) {
        Some(explanation) => format!("{name} ({explanation})"),
        None => name,
    }
}
