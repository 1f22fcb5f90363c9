// SPDX-License-Identifier: Apache-2.0
//! Contexts: which device a call runs on.

use super::guard::guard;
use super::ptr;
use super::status::ddt_status;
use super::types::{DDT_CONTEXT_PORTABLE_KERNELS, DDT_DEVICE_CPU, DDT_DEVICE_CUDA, ddt_context_params};
use super::version::DDT_ABI_VERSION;
#[cfg(feature = "cuda")]
use crate::cuda::Device;
use crate::error::{Result, bail};

/// A device and what the library keeps for it. Immutable: any number of threads may use one
/// context at the same time.
#[allow(non_camel_case_types)]
pub struct ddt_context {
    backend: Backend,
}

/// Where the operations of a context run.
pub(super) enum Backend {
    /// On the calling thread. (The byte makes each context a distinct allocation.)
    Cpu(#[allow(dead_code)] u8),
    /// On a stream of a GPU.
    #[cfg(feature = "cuda")]
    Cuda(Box<Device>),
}

/// Makes a context for a device. For a GPU this loads all kernels, and retains the primary context
/// of the device, which is also that of the CUDA runtime. It may run on other streams' time: do not
/// call it while a stream is being captured.
///
/// Writes: `*out`, to be freed with `ddt_context_free`.
///
/// Errors: DDT_NULL_POINTER, DDT_INVALID_STRUCT, DDT_ABI_MISMATCH (abi_version is not the
/// library's), DDT_INVALID_VALUE (unknown device, or a device_index other than 0 for the CPU),
/// DDT_UNSUPPORTED (a device that this build has no backend for, unknown flags, a GPU with too
/// little shared memory), DDT_NO_DEVICE (no driver, or no such GPU), DDT_ARCH_NOT_BUILT,
/// DDT_CUDA_ERROR (also a driver that is too old), DDT_OUT_OF_MEMORY.
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
        let backend = open(&params)?;
        out.write(0, Box::into_raw(Box::new(ddt_context { backend })));
        Ok(())
    })
}

fn open(params: &ddt_context_params) -> Result<Backend> {
    if params.flags & !DDT_CONTEXT_PORTABLE_KERNELS != 0 {
        bail!(
            Unsupported,
            "params.flags: got {:#x}, want 0 or {DDT_CONTEXT_PORTABLE_KERNELS:#x} (DDT_CONTEXT_PORTABLE_KERNELS)",
            params.flags
        );
    }
    match params.device {
        DDT_DEVICE_CPU if params.device_index != 0 => {
            bail!(InvalidValue, "params.device_index: got {}, want 0 for the CPU", params.device_index)
        }
        DDT_DEVICE_CPU => Ok(Backend::Cpu(0)),
        #[cfg(feature = "cuda")]
        DDT_DEVICE_CUDA => {
            let portable_only = params.flags & DDT_CONTEXT_PORTABLE_KERNELS != 0;
            Ok(Backend::Cuda(Box::new(Device::open(params.device_index, portable_only)?)))
        }
        #[cfg(not(feature = "cuda"))]
        DDT_DEVICE_CUDA => {
            bail!(Unsupported, "params.device: got CUDA, want CPU, the only backend of this build")
        }
        other => bail!(
            InvalidValue,
            "params.device: got {other}, want {DDT_DEVICE_CPU} (CPU) or {DDT_DEVICE_CUDA} (CUDA)"
        ),
    }
}

/// Frees a context; NULL is allowed. No call may be using it, and on a GPU no stream may still have
/// work of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ddt_context_free(context: *mut ddt_context) {
    if !context.is_null() {
        // SAFETY: the caller gives back what `Box::into_raw` gave out.
        drop(unsafe { Box::from_raw(context) });
    }
}

/// The backend of a context, which must not be NULL.
///
/// # Safety
/// `context` must be NULL or a context that lives for as long as the result is used.
pub(super) unsafe fn backend<'a>(context: *const ddt_context) -> Result<&'a Backend> {
    // SAFETY: the caller's promise.
    match unsafe { context.as_ref() } {
        Some(context) => Ok(&context.backend),
        None => bail!(NullPointer, "context: got NULL, want a context of ddt_context_create"),
    }
}
