// SPDX-License-Identifier: Apache-2.0
//! Contexts: which device a call runs on.

use super::guard::guard;
use super::ptr;
use super::status::ddt_status;
use super::types::{DDT_DEVICE_CPU, DDT_DEVICE_CUDA, ddt_context_params};
use super::version::DDT_ABI_VERSION;
use crate::error::{Result, bail};

/// A device and what the library keeps for it. Immutable: any number of threads may use one
/// context at the same time.
#[allow(non_camel_case_types)]
pub struct ddt_context {
    // the CPU backend keeps nothing; a field makes each context a distinct allocation
    _device: u32,
}

/// Makes a context for a device.
///
/// Writes: `*out`, to be freed with `ddt_context_free`.
///
/// Errors: DDT_NULL_POINTER, DDT_INVALID_STRUCT, DDT_ABI_MISMATCH (abi_version is not the
/// library's), DDT_INVALID_VALUE (unknown device, or a device_index other than 0 for the CPU),
/// DDT_UNSUPPORTED (a device that this build has no backend for).
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_context_create(
    params: *const ddt_context_params,
    out: *mut *mut ddt_context,
) -> ddt_status {
    guard("context_create", || {
        // SAFETY: the caller vouches for `params`.
        let params = unsafe { ptr::versioned(params, "params") }?;
        // SAFETY: the caller vouches for `out`.
        let mut out = unsafe { ptr::output(out, 1, "out") }?;
        if params.abi_version != DDT_ABI_VERSION {
            bail!(AbiMismatch, "params.abi_version: got {}, want {DDT_ABI_VERSION}", params.abi_version);
        }
        match params.device {
            DDT_DEVICE_CPU if params.device_index != 0 => {
                bail!(InvalidValue, "params.device_index: got {}, want 0 for the CPU", params.device_index)
            }
            DDT_DEVICE_CPU => {}
            DDT_DEVICE_CUDA => {
                bail!(Unsupported, "params.device: got CUDA, want CPU, the only backend of this build")
            }
            other => bail!(
                InvalidValue,
                "params.device: got {other}, want {DDT_DEVICE_CPU} (CPU) or {DDT_DEVICE_CUDA} (CUDA)"
            ),
        }
        out.write(0, Box::into_raw(Box::new(ddt_context { _device: params.device })));
        Ok(())
    })
}

/// Frees a context; NULL is allowed. No call may be using it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ddt_context_free(context: *mut ddt_context) {
    if !context.is_null() {
        // SAFETY: the caller gives back what `Box::into_raw` gave out.
        drop(unsafe { Box::from_raw(context) });
    }
}

/// Refuses a NULL context.
pub(super) fn check(context: *const ddt_context) -> Result<()> {
    if context.is_null() {
        bail!(NullPointer, "context: got NULL, want a context of ddt_context_create");
    }
    Ok(())
}
