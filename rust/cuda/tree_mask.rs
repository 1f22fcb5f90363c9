// SPDX-License-Identifier: Apache-2.0
//! Launches `cuda/tree_mask.cu`.

use std::ffi::c_void;

use super::params::{DDT_CUDA_MAX_NODES, ddt_cuda_tree_mask};
use super::{Device, Kernel, Launch, Loader, tree_params};
use crate::error::Result;
use crate::ffi::ddt_tree_mask_params;
use crate::ffi::ptr;
use crate::ffi::tree::TreeOutput;
use crate::ffi::tree_mask::check_scalars;

/// The kernel of this operation.
pub(crate) struct Kernels {
    mask: Kernel,
}

impl Kernels {
    pub(super) fn load(loader: &Loader<'_>) -> Result<Self> {
        Ok(Self { mask: loader.kernel("ddt_tree_mask", 0)? })
    }
}

/// Enqueues `ddt_tree_mask`.
///
/// # Safety
/// What the parameters point to must be as the header says, and `stream` one of the device.
pub(crate) unsafe fn launch(
    device: &Device,
    params: &ddt_tree_mask_params,
    stream: *mut c_void,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let (tree, dims) = unsafe { ptr::tree(params.tree, "tree") }?;
    // SAFETY: pointers are only checked.
    unsafe { TreeOutput::new(&tree, dims) }?;
    let order = ptr::optional_device_output(params.order, dims.num_slots(), "order")?;
    check_scalars(params, dims)?;
    let (num_reqs, slots) = (dims.num_reqs, dims.num_slots());
    let kernel_params = ddt_cuda_tree_mask {
        num_nodes: ptr::device_array(params.num_nodes, num_reqs, "num_nodes")?,
        tokens: ptr::optional_device_array(params.tokens, slots, "tokens")?,
        parents: ptr::device_array(params.parents, slots, "parents")?,
        priorities: ptr::optional_device_array(params.priorities, slots, "priorities")?,
        root_positions: ptr::optional_device_array(params.root_positions, num_reqs, "root_positions")?,
        order,
        tree: tree_params(&tree, dims),
    };
    let shape = Launch {
        grid: [num_reqs as u32, 1, 1],
        block: DDT_CUDA_MAX_NODES,
        shared_bytes: 0,
        overlaps_previous: false,
    };
    // SAFETY: the kernel takes this struct; the caller's promise about what it points to.
    unsafe { device.launch(&device.kernels().tree_mask.mask, &shape, &kernel_params, stream) }
}
