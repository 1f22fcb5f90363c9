// SPDX-License-Identifier: Apache-2.0
//! A GPU with all kernels loaded.

use std::cell::RefCell;
use std::ffi::{CString, c_int};
use std::ptr::null_mut;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute as Attribute, CUfunction_attribute, CUmodule,
};

use super::driver::check;
use super::launch::{Current, Kernel};
use super::{ARCHS, Kernels, fatbins};
use crate::error::{Error, Result, Status, bail};

/// The oldest CUDA version whose driver runs what nvcc 13 compiles.
const MIN_DRIVER: c_int = 13000;

/// One GPU: its primary context, which it shares with the CUDA runtime and so with PyTorch, and
/// the kernels in it. Immutable once it is open.
pub(crate) struct Device {
    context: PrimaryContext,
    modules: Vec<CUmodule>,
    kernels: Kernels,
}

// SAFETY: handles of the driver, which any thread may use.
unsafe impl Send for Device {}
// SAFETY: as above; nothing is changed after `open`.
unsafe impl Sync for Device {}

/// A retained primary context, and what is known about its GPU.
pub(super) struct PrimaryContext {
    device: CUdevice,
    pub(super) handle: CUcontext,
    compute_capability: (i32, i32),
    sm_count: u32,
    shared_bytes_per_block: u32,
    portable_only: bool,
}

impl Device {
    /// Opens GPU `index` and loads every kernel. `portable_only`: without the kernels that only
    /// some architectures can run.
    ///
    /// # Errors
    /// `NoDevice`: no driver or no such GPU. `CudaError`: a driver that is too old, or its error.
    /// `ArchNotBuilt`: the GPU can run none of the compiled code. `Unsupported`: too little shared memory.
    pub(crate) fn open(index: i32, portable_only: bool) -> Result<Self> {
        let context = PrimaryContext::retain(find(index)?, portable_only)?;
        let _current = Current::new(&context)?;
        let modules = Modules { context: &context, handles: RefCell::new(Vec::new()) };
        let kernels = Kernels::load(&modules)?;
        // from here on the modules are the device's to unload
        let handles = modules.handles.take();
        drop(modules);
        drop(_current);
        Ok(Self { context, modules: handles, kernels })
    }

    pub(crate) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    pub(crate) fn compute_capability(&self) -> (i32, i32) {
        self.context.compute_capability
    }

    pub(crate) fn sm_count(&self) -> u32 {
        self.context.sm_count
    }

    pub(super) fn context(&self) -> &PrimaryContext {
        &self.context
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // failures at this point have nobody to hear of them
        if let Ok(_current) = Current::new(&self.context) {
            unload(&self.modules);
        }
    }
}

/// Unloads modules of the current context.
fn unload(modules: &[CUmodule]) {
    for &module in modules {
        // SAFETY: loaded once, and unloaded once by its only owner.
        let _ = unsafe { sys::cuModuleUnload(module) };
    }
}

impl PrimaryContext {
    fn retain(device: CUdevice, portable_only: bool) -> Result<Self> {
        let attribute = |attribute| {
            let mut value: c_int = 0;
            // SAFETY: a valid device, and room for the answer.
            let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, device) };
            check(result, "cuDeviceGetAttribute").map(|()| value)
        };
        let compute_capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let sm_count = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let mut handle = null_mut();
        // SAFETY: a valid device, and room for the answer.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut handle, device) }, "cuDevicePrimaryCtxRetain")?;
        Ok(Self {
            device,
            handle,
            compute_capability,
            sm_count: sm_count.unsigned_abs(),
            shared_bytes_per_block: shared.unsigned_abs(),
            portable_only,
        })
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: retained once. A failure at this point has nobody to hear of it.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Loads the driver and finds a GPU.
fn find(index: i32) -> Result<CUdevice> {
    // SAFETY: opening the driver's library runs nothing but its initialisers.
    if !unsafe { sys::is_culib_present() } {
        bail!(NoDevice, "CUDA driver: got none, want libcuda.so.1; install NVIDIA's driver or use the CPU");
    }
    let mut version: c_int = 0;
    // SAFETY: room for the answer.
    check(unsafe { sys::cuDriverGetVersion(&raw mut version) }, "cuDriverGetVersion")?;
    if version < MIN_DRIVER {
        let dotted = |version: c_int| format!("{}.{}", version / 1000, version % 1000 / 10);
        bail!(
            CudaError,
            "CUDA driver: got one for CUDA {}, want {} or later; update NVIDIA's driver or use the CPU",
            dotted(version),
            dotted(MIN_DRIVER)
        );
    }
    // SAFETY: no pointers.
    check(unsafe { sys::cuInit(0) }, "cuInit")?;
    let mut count: c_int = 0;
    // SAFETY: room for the answer.
    check(unsafe { sys::cuDeviceGetCount(&raw mut count) }, "cuDeviceGetCount")?;
    if !(0..count).contains(&index) {
        bail!(NoDevice, "params.device_index: got {index}, want one of the {count} visible GPUs");
    }
    let mut device = 0;
    // SAFETY: room for the answer.
    check(unsafe { sys::cuDeviceGet(&raw mut device, index) }, "cuDeviceGet")?;
    Ok(device)
}

/// The modules of a device that is being opened; its context is current.
pub(super) struct Modules<'a> {
    context: &'a PrimaryContext,
    handles: RefCell<Vec<CUmodule>>,
}

impl Drop for Modules<'_> {
    fn drop(&mut self) {
        unload(&self.handles.take());
    }
}

impl Modules<'_> {
    /// Loads `cuda/<stem>.cu`.
    pub(super) fn load(&self, stem: &str) -> Result<Loader<'_>> {
        let Some(image) = fatbins::fatbin(stem) else {
            bail!(ArchNotBuilt, "cuda/{stem}.cu: got a build for {ARCHS}, want one that has it");
        };
        let mut module = null_mut();
        // SAFETY: the image is a whole fatbin, and the context is current.
        let result = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
        check(result, "cuModuleLoadData").map_err(|error| match error.status() {
            Status::ArchNotBuilt => {
                let (major, minor) = self.context.compute_capability;
                Error::new(
                    Status::ArchNotBuilt,
                    format!(
                        "GPU: got compute capability {major}.{minor}, want one that {ARCHS} covers ({error})"
                    ),
                )
            }
            _ => error,
        })?;
        self.handles.borrow_mut().push(module);
        Ok(Loader { context: self.context, module })
    }

    /// Loads `cuda/<stem>.cu` of kernels for one compute capability; `None` if the GPU is another,
    /// the build left it out or only portable kernels are wanted.
    pub(super) fn load_for(&self, stem: &str, compute_capability: (i32, i32)) -> Result<Option<Loader<'_>>> {
        let is_usable = !self.context.portable_only
            && self.context.compute_capability == compute_capability
            && fatbins::fatbin(stem).is_some();
        if is_usable { self.load(stem).map(Some) } else { Ok(None) }
    }
}

/// Finds the kernels of one module.
pub(crate) struct Loader<'a> {
    context: &'a PrimaryContext,
    module: CUmodule,
}

impl Loader<'_> {
    /// The kernel `name`, allowed to use `max_dynamic_shared_bytes` per block.
    pub(crate) fn kernel(&self, name: &'static str, max_dynamic_shared_bytes: u32) -> Result<Kernel> {
        let Ok(c_name) = CString::new(name) else {
            bail!(Internal, "kernel name {name:?}: got a NUL in it, want none");
        };
        let mut function = null_mut();
        // SAFETY: a loaded module, a C string, and room for the answer.
        let result = unsafe { sys::cuModuleGetFunction(&raw mut function, self.module, c_name.as_ptr()) };
        check(result, &format!("cuModuleGetFunction({name})"))?;
        let available = self.context.shared_bytes_per_block;
        let mut fixed: c_int = 0;
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: a valid function, and room for the answer.
        let result = unsafe { sys::cuFuncGetAttribute(&raw mut fixed, attribute, function) };
        check(result, "cuFuncGetAttribute")?;
        let needed = max_dynamic_shared_bytes + fixed.unsigned_abs();
        if needed > available {
            bail!(
                Unsupported,
                "GPU: got {available} bytes of shared memory per block, want {needed} for {name}"
            );
        }
        let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: a valid function; the limit was checked.
        let result =
            unsafe { sys::cuFuncSetAttribute(function, attribute, max_dynamic_shared_bytes as c_int) };
        check(result, &format!("cuFuncSetAttribute({name})"))?;
        Ok(Kernel::new(name, function, max_dynamic_shared_bytes))
    }
}
