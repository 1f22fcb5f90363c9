// SPDX-License-Identifier: Apache-2.0
//! Status numbers and the text of the last error.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};

use crate::error::Status;

/// Result of a call: DDT_OK, or why nothing was written. 1xx: the caller's mistake, 2xx: the
/// environment, 9xx: a bug in the library. `ddt_last_error` has the sentence.
#[allow(non_camel_case_types)]
pub type ddt_status = i32;

/// Success.
pub const DDT_OK: ddt_status = 0;
/// A required pointer is NULL.
pub const DDT_NULL_POINTER: ddt_status = 100;
/// struct_size is too small, too large or not a multiple of the struct's alignment.
pub const DDT_INVALID_STRUCT: ddt_status = 101;
/// A shape, stride or length is negative, overflows or disagrees with another one.
pub const DDT_INVALID_SHAPE: ddt_status = 102;
/// A tensor has a dtype that the argument does not accept.
pub const DDT_INVALID_DTYPE: ddt_status = 103;
/// A value lies outside of its documented range.
pub const DDT_INVALID_VALUE: ddt_status = 104;
/// The workspace is smaller than the size query says.
pub const DDT_WORKSPACE_TOO_SMALL: ddt_status = 105;
/// The caller was compiled against another DDT_ABI_VERSION.
pub const DDT_ABI_MISMATCH: ddt_status = 106;
/// A pointer is not aligned to its element.
pub const DDT_MISALIGNED: ddt_status = 107;
/// This build or this version cannot do what was asked.
pub const DDT_UNSUPPORTED: ddt_status = 200;
/// No such device.
pub const DDT_NO_DEVICE: ddt_status = 201;
/// The build contains no code for the device's architecture.
pub const DDT_ARCH_NOT_BUILT: ddt_status = 202;
/// The CUDA driver reported an error.
pub const DDT_CUDA_ERROR: ddt_status = 203;
/// Memory ran out.
pub const DDT_OUT_OF_MEMORY: ddt_status = 204;
/// A panic was caught: a bug in the library.
pub const DDT_PANIC: ddt_status = 900;
/// Any other bug in the library.
pub const DDT_INTERNAL: ddt_status = 901;

impl From<Status> for ddt_status {
    fn from(status: Status) -> Self {
        status as ddt_status
    }
}

fn name(status: ddt_status) -> &'static CStr {
    match status {
        DDT_OK => c"DDT_OK",
        DDT_NULL_POINTER => c"DDT_NULL_POINTER",
        DDT_INVALID_STRUCT => c"DDT_INVALID_STRUCT",
        DDT_INVALID_SHAPE => c"DDT_INVALID_SHAPE",
        DDT_INVALID_DTYPE => c"DDT_INVALID_DTYPE",
        DDT_INVALID_VALUE => c"DDT_INVALID_VALUE",
        DDT_WORKSPACE_TOO_SMALL => c"DDT_WORKSPACE_TOO_SMALL",
        DDT_ABI_MISMATCH => c"DDT_ABI_MISMATCH",
        DDT_MISALIGNED => c"DDT_MISALIGNED",
        DDT_UNSUPPORTED => c"DDT_UNSUPPORTED",
        DDT_NO_DEVICE => c"DDT_NO_DEVICE",
        DDT_ARCH_NOT_BUILT => c"DDT_ARCH_NOT_BUILT",
        DDT_CUDA_ERROR => c"DDT_CUDA_ERROR",
        DDT_OUT_OF_MEMORY => c"DDT_OUT_OF_MEMORY",
        DDT_PANIC => c"DDT_PANIC",
        DDT_INTERNAL => c"DDT_INTERNAL",
        _ => c"DDT_STATUS_UNKNOWN",
    }
}

/// Name of a status, such as "DDT_INVALID_SHAPE"; "DDT_STATUS_UNKNOWN" for any other number.
/// The string is static.
#[unsafe(no_mangle)]
pub extern "C" fn ddt_status_name(status: ddt_status) -> *const c_char {
    name(status).as_ptr()
}

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

pub(super) fn clear_last_error() {
    LAST_ERROR.with_borrow_mut(String::clear);
}

pub(super) fn set_last_error(text: String) {
    LAST_ERROR.with_borrow_mut(|last| *last = text);
}

/// Copies the message of this thread's most recent call that can fail: `op: what was wrong: got
/// X, want Y`, or the empty string if that call succeeded. Reading does not clear it.
///
/// Writes: up to `len` bytes to `buf`, NUL-terminated and cut between UTF-8 characters; the size
/// of the whole message with its NUL to `needed`. Either pointer may be NULL, `buf` only with
/// `len` 0.
///
/// Errors: DDT_NULL_POINTER (buf is NULL and len is not 0), without a message of its own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ddt_last_error(buf: *mut c_char, len: usize, needed: *mut usize) -> ddt_status {
    if buf.is_null() && len > 0 {
        return DDT_NULL_POINTER;
    }
    LAST_ERROR.with_borrow(|text| {
        if !needed.is_null() {
            // SAFETY: the caller vouches for `needed`; it may be unaligned without harm.
            unsafe { needed.write_unaligned(text.len() + 1) };
        }
        if len > 0 {
            let fits = |&count: &usize| text.is_char_boundary(count);
            let count = (0..=text.len().min(len - 1)).rev().find(fits).unwrap_or(0);
            // SAFETY: `count + 1 <= len` bytes of `buf` are the caller's to give.
            unsafe {
                buf.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), count);
                buf.add(count).write(0);
            }
        }
    });
    DDT_OK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_match_the_rust_enum() {
        let all = [
            (Status::NullPointer, DDT_NULL_POINTER, "DDT_NULL_POINTER"),
            (Status::InvalidStruct, DDT_INVALID_STRUCT, "DDT_INVALID_STRUCT"),
            (Status::InvalidShape, DDT_INVALID_SHAPE, "DDT_INVALID_SHAPE"),
            (Status::InvalidDtype, DDT_INVALID_DTYPE, "DDT_INVALID_DTYPE"),
            (Status::InvalidValue, DDT_INVALID_VALUE, "DDT_INVALID_VALUE"),
            (Status::WorkspaceTooSmall, DDT_WORKSPACE_TOO_SMALL, "DDT_WORKSPACE_TOO_SMALL"),
            (Status::AbiMismatch, DDT_ABI_MISMATCH, "DDT_ABI_MISMATCH"),
            (Status::Misaligned, DDT_MISALIGNED, "DDT_MISALIGNED"),
            (Status::Unsupported, DDT_UNSUPPORTED, "DDT_UNSUPPORTED"),
            (Status::NoDevice, DDT_NO_DEVICE, "DDT_NO_DEVICE"),
            (Status::ArchNotBuilt, DDT_ARCH_NOT_BUILT, "DDT_ARCH_NOT_BUILT"),
            (Status::CudaError, DDT_CUDA_ERROR, "DDT_CUDA_ERROR"),
            (Status::OutOfMemory, DDT_OUT_OF_MEMORY, "DDT_OUT_OF_MEMORY"),
            (Status::Panic, DDT_PANIC, "DDT_PANIC"),
            (Status::Internal, DDT_INTERNAL, "DDT_INTERNAL"),
        ];
        for (status, number, text) in all {
            assert_eq!(ddt_status::from(status), number);
            assert_eq!(name(number).to_str(), Ok(text));
        }
        for number in [-1, 1, 99, 108, i32::MAX, i32::MIN] {
            assert_eq!(name(number), c"DDT_STATUS_UNKNOWN");
        }
    }
}
