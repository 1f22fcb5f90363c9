// SPDX-License-Identifier: Apache-2.0
//! Enqueueing a kernel.

use std::ffi::c_void;
use std::ptr::null_mut;

use cudarc::driver::sys::{
    self, CUfunction, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue, CUlaunchConfig,
};

use super::device::{Device, PrimaryContext};
use super::driver::check;
use crate::error::{Result, bail};

/// A kernel that takes one parameter struct.
pub(crate) struct Kernel {
    name: &'static str,
    function: CUfunction,
    max_dynamic_shared_bytes: u32,
}

impl Kernel {
    pub(super) fn new(name: &'static str, function: CUfunction, max_dynamic_shared_bytes: u32) -> Self {
        Self { name, function, max_dynamic_shared_bytes }
    }
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    /// Blocks; a launch without any is left out.
    pub(crate) grid: [u32; 3],
    /// Threads per block.
    pub(crate) block: u32,
    /// Dynamic shared memory per block.
    pub(crate) shared_bytes: u32,
    /// The kernel may start before the one ahead of it in the stream has ended, which must be
    /// of the same call; it waits with `wait_for_previous_kernel()` of `cuda/common.cuh`.
    pub(crate) overlaps_previous: bool,
}

impl Device {
    /// Enqueues a kernel on a stream of this device, NULL for the default one.
    ///
    /// # Safety
    /// `params` must be the struct that the kernel takes, and what it points to must stay valid
    /// until the stream has passed the kernel.
    pub(crate) unsafe fn launch<P: Copy>(
        &self,
        kernel: &Kernel,
        launch: &Launch,
        params: &P,
        stream: *mut c_void,
    ) -> Result<()> {
        let [x, y, z] = launch.grid;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        if launch.shared_bytes > kernel.max_dynamic_shared_bytes {
            bail!(
                Internal,
                "{} shared memory: got {}, want at most {}",
                kernel.name,
                launch.shared_bytes,
                kernel.max_dynamic_shared_bytes
            );
        }
        // before sm_90 the driver refuses the attribute, and the kernel's wait is no instruction
        let overlaps = launch.overlaps_previous && self.compute_capability().0 >= 9;
        let mut overlap = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared_bytes,
            hStream: stream.cast(),
            attrs: &raw mut overlap,
            numAttrs: u32::from(overlaps),
        };
        let mut arguments = [(&raw const *params).cast_mut().cast::<c_void>()];
        let _current = Current::new(self.context())?;
        // SAFETY: the caller's promise; the driver copies the parameter before it returns.
        let result =
            unsafe { sys::cuLaunchKernelEx(&config, kernel.function, arguments.as_mut_ptr(), null_mut()) };
        check(result, kernel.name)
    }
}

/// Makes a context the current one of this thread for as long as it lives. The caller's thread
/// may have another one, or none.
pub(super) struct Current {
    is_pushed: bool,
}

impl Current {
    pub(super) fn new(context: &PrimaryContext) -> Result<Self> {
        let mut current = null_mut();
        // SAFETY: room for the answer.
        check(unsafe { sys::cuCtxGetCurrent(&raw mut current) }, "cuCtxGetCurrent")?;
        let is_pushed = current != context.handle;
        if is_pushed {
            // SAFETY: a retained context.
            check(unsafe { sys::cuCtxPushCurrent_v2(context.handle) }, "cuCtxPushCurrent")?;
        }
        Ok(Self { is_pushed })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.is_pushed {
            let mut popped = null_mut();
            // SAFETY: pushed by `new` on this thread. A failure has nobody to hear of it.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}
