// SPDX-License-Identifier: Apache-2.0
//! Launches `cuda/tree_accept.cu`.

use std::ffi::c_void;
use std::ptr::null_mut;

use super::params::{
    DDT_CUDA_TREE_ACCEPT_BLOCKS_PER_SM, DDT_CUDA_TREE_ACCEPT_CHOOSE_THREADS, DDT_CUDA_TREE_ACCEPT_LOAD_BYTES,
    DDT_CUDA_TREE_ACCEPT_WALK_THREADS, ddt_cuda_tree_accept,
};
use super::{Device, Kernel, Launch, Loader, View, tree_params};
use crate::dtype::DType;
use crate::error::{Result, bail};
use crate::ffi::ptr::{self, TreeDims};
use crate::ffi::{ddt_tree_accept_params, tree_accept_logits};
use crate::tensor::TensorRef;

/// The kernels of this operation.
pub(crate) struct Kernels {
    choose_f32: Kernel,
    choose_f16: Kernel,
    choose_bf16: Kernel,
    walk: Kernel,
}

impl Kernels {
    pub(super) fn load(loader: &Loader<'_>) -> Result<Self> {
        Ok(Self {
            choose_f32: loader.kernel("ddt_tree_accept_choose_f32", 0)?,
            choose_f16: loader.kernel("ddt_tree_accept_choose_f16", 0)?,
            choose_bf16: loader.kernel("ddt_tree_accept_choose_bf16", 0)?,
            walk: loader.kernel("ddt_tree_accept_walk", 0)?,
        })
    }
}

/// Parts of a row below which a grid of several waves would end in a long one.
const MIN_PART_TOKENS: usize = 65_536;

/// How a row of logits is cut into parts, one block each.
struct Split {
    num_splits: usize,
    split_tokens: usize,
}

impl Split {
    /// Whole waves of blocks: one if the parts are short enough in that, else as many as it takes.
    fn new(device: &Device, logits: &TensorRef<'_>) -> Self {
        let vocab = logits.shape()[1];
        let rows = logits.shape()[0].max(1);
        let per_wave = device.sm_count() as usize * DDT_CUDA_TREE_ACCEPT_BLOCKS_PER_SM as usize;
        let waves = (rows * vocab.div_ceil(MIN_PART_TOKENS)).div_ceil(per_wave);
        let num_splits = (waves * per_wave / rows).max(1);
        // parts are whole loads of a warp, and not less than what keeps a block busy
        let per_load = DDT_CUDA_TREE_ACCEPT_LOAD_BYTES as usize / logits.dtype().size();
        let least = DDT_CUDA_TREE_ACCEPT_CHOOSE_THREADS as usize * per_load;
        let split_tokens = vocab.div_ceil(num_splits).max(least).next_multiple_of(32 * per_load);
        Self { num_splits: vocab.div_ceil(split_tokens), split_tokens }
    }

    /// Bytes of the parts' results.
    fn workspace_bytes(&self, logits: &TensorRef<'_>) -> usize {
        logits.shape()[0] * self.num_splits * size_of::<u64>()
    }
}

/// # Safety
/// The parameters must be as the header says.
pub(crate) unsafe fn workspace_bytes(device: &Device, params: &ddt_tree_accept_params) -> Result<usize> {
    // SAFETY: the caller's promise.
    let logits = unsafe { tree_accept_logits(params) }?;
    Ok(logits.map_or(0, |logits| Split::new(device, &logits).workspace_bytes(&logits)))
}

/// # Safety
/// The parameters must be as the header says.
pub(crate) unsafe fn launch(
    device: &Device,
    params: &ddt_tree_accept_params,
    stream: *mut c_void,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let ((tree, dims), logits) = unsafe { (ptr::tree(params.tree, "tree")?, tree_accept_logits(params)?) };
    let TreeDims { num_reqs, max_depth, .. } = dims;
    let path_len = num_reqs * (max_depth + 1);
    for (field, name) in [
        (tree.tokens, "tree.tokens"),
        (tree.first_child, "tree.first_child"),
        (tree.next_sibling, "tree.next_sibling"),
    ] {
        ptr::device_array(field, dims.num_slots(), name)?;
    }
    ptr::device_array(tree.num_nodes, num_reqs, "tree.num_nodes")?;
    ptr::optional_device_array(tree.flags, num_reqs, "tree.flags")?;
    if !params.temperatures.is_null() || !params.next_positions.is_null() {
        ptr::device_array(tree.positions, dims.num_slots(), "tree.positions")?;
    }
    let mut kernel_params = ddt_cuda_tree_accept {
        tree: tree_params(&tree, dims),
        query_start: ptr::device_array(params.query_start, num_reqs + 1, "query_start")?,
        logits: View::optional(logits.as_ref()),
        node_tokens: ptr::optional_device_array(params.node_tokens, 1, "node_tokens")?,
        temperatures: ptr::optional_device_array(params.temperatures, num_reqs, "temperatures")?,
        seeds: ptr::optional_device_array(params.seeds, num_reqs, "seeds")?,
        num_accepted: ptr::device_output(params.num_accepted, num_reqs, "num_accepted")?,
        accepted_nodes: ptr::device_output(params.accepted_nodes, num_reqs * max_depth, "accepted_nodes")?,
        output_tokens: ptr::device_output(params.output_tokens, path_len, "output_tokens")?,
        accepted_rows: ptr::optional_device_output(params.accepted_rows, path_len, "accepted_rows")?,
        next_positions: ptr::optional_device_output(params.next_positions, num_reqs, "next_positions")?,
        num_rejected: ptr::optional_device_output(params.num_rejected, num_reqs, "num_rejected")?,
        partials: null_mut(),
        // the caller's tokens are as many as query_start says
        num_rows: i32::MAX,
        vocab: 0,
        num_splits: 0,
        split_tokens: 0,
    };
    let kernels = &device.kernels().tree_accept;
    if let Some(logits) = &logits {
        let split = Split::new(device, logits);
        let Ok(num_rows) = i32::try_from(logits.shape()[0]) else {
            bail!(InvalidShape, "logits rows: got {}, want less than 2^31", logits.shape()[0]);
        };
        kernel_params.partials =
            ptr::workspace(params.workspace, params.workspace_bytes, split.workspace_bytes(logits))?.cast();
        kernel_params.num_rows = num_rows;
        kernel_params.vocab = logits.shape()[1] as i32;
        kernel_params.num_splits = split.num_splits as i32;
        kernel_params.split_tokens = split.split_tokens as i32;
        let kernel = match logits.dtype() {
            DType::F16 => &kernels.choose_f16,
            DType::BF16 => &kernels.choose_bf16,
            _ => &kernels.choose_f32,
        };
        let choose = Launch {
            grid: [num_rows as u32, split.num_splits as u32, 1],
            block: DDT_CUDA_TREE_ACCEPT_CHOOSE_THREADS,
            shared_bytes: 0,
            overlaps_previous: false,
        };
        // SAFETY: the kernel takes this struct, and the caller vouches for what it points to.
        unsafe { device.launch(kernel, &choose, &kernel_params, stream)? };
    }
    let walk = Launch {
        grid: [num_reqs as u32, 1, 1],
        block: DDT_CUDA_TREE_ACCEPT_WALK_THREADS,
        shared_bytes: 0,
        overlaps_previous: logits.is_some(),
    };
    // SAFETY: as above.
    unsafe { device.launch(&kernels.walk, &walk, &kernel_params, stream) }
}
