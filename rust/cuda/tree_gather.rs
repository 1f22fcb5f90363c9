// SPDX-License-Identifier: Apache-2.0
//! Launches `cuda/tree_gather.cu`.

use std::ffi::c_void;

use super::params::{DDT_CUDA_TREE_GATHER_THREADS, ddt_cuda_tree_gather};
use super::{Device, Kernel, Launch, Loader, View, tree_params};
use crate::error::{Result, bail};
use crate::ffi::ddt_tree_gather_params;
use crate::ffi::ptr;
use crate::ffi::tree::TreeOutput;
use crate::ffi::tree_gather::Gather;

/// The kernel of this operation.
pub(crate) struct Kernels {
    gather: Kernel,
}

impl Kernels {
    pub(super) fn load(loader: &Loader<'_>) -> Result<Self> {
        Ok(Self { gather: loader.kernel("ddt_tree_gather", 0)? })
    }
}

/// Enqueues `ddt_tree_gather`.
///
/// # Safety
/// What the parameters point to must be as the header says, and `stream` one of the device.
pub(crate) unsafe fn launch(
    device: &Device,
    params: &ddt_tree_gather_params,
    stream: *mut c_void,
) -> Result<()> {
    // SAFETY: the caller's promise; device pointers are only checked.
    let gather = unsafe {
        let gather = Gather::new(params)?;
        TreeOutput::new(&gather.tree, gather.dims)?;
        gather.check_source()?;
        gather
    };
    let num_trees = gather.tree_index.shape()[0];
    let Ok(num_rows) = i32::try_from(gather.num_rows().unwrap_or(i32::MAX as usize)) else {
        bail!(InvalidShape, "positions shape[0]: got {:?}, want less than 2^31", gather.num_rows());
    };
    let mrope_positions = gather.mrope_positions.as_ref().map(|positions| positions.view());
    let kernel_params = ddt_cuda_tree_gather {
        source: tree_params(&gather.source, gather.source_dims),
        tree: tree_params(&gather.tree, gather.dims),
        tree_index: View::of(&gather.tree_index),
        query_start: ptr::device_array(params.query_start, num_trees + 1, "query_start")?,
        positions: View::optional(gather.positions.as_ref().map(|positions| positions.view()).as_ref()),
        mrope_positions: View::optional(mrope_positions.as_ref()),
        num_trees: num_trees as i32,
        num_rows,
        num_axes: mrope_positions.map_or(0, |positions| positions.shape()[0] as i32),
        reserved: 0,
    };
    let shape = Launch {
        grid: [num_trees as u32 + 1, 1, 1],
        block: DDT_CUDA_TREE_GATHER_THREADS,
        shared_bytes: 0,
        overlaps_previous: false,
    };
    // SAFETY: the kernel takes this struct; the caller's promise about what it points to.
    unsafe { device.launch(&device.kernels().tree_gather.gather, &shape, &kernel_params, stream) }
}
