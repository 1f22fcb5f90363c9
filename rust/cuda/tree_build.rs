// SPDX-License-Identifier: Apache-2.0
//! Launches `cuda/tree_build.cu`.

use std::ffi::c_void;
use std::ptr::null_mut;

use super::params::{
    DDT_CUDA_MAX_NODES, DDT_CUDA_TREE_BUILD_BLOCK, DDT_CUDA_TREE_BUILD_CHUNK,
    DDT_CUDA_TREE_BUILD_LISTS_SHARED_BYTES, DDT_CUDA_TREE_BUILD_SEARCH_SHARED_BYTES,
    DDT_CUDA_TREE_BUILD_SELECT_SHARED_BYTES, DDT_CUDA_TREE_BUILD_SELECT_THREADS, ddt_cuda_child_list,
    ddt_cuda_tree_build,
};
use super::{Device, Kernel, Launch, Loader, View, tree_params};
use crate::dtype::DType;
use crate::error::Result;
use crate::ffi::ddt_tree_build_params;
use crate::ffi::ptr::{self, TreeDims};
use crate::ffi::tree::TreeOutput;
use crate::ffi::tree_build::{BatchScores, batch, check_scalars};
use crate::tree::MAX_DEPTH;

const SUMMARIZE_THREADS: u32 = 256;
const SELECT_THREADS: u32 = DDT_CUDA_TREE_BUILD_SELECT_THREADS + 32;
const LISTS_THREADS: u32 = 128;

/// The kernels of this operation, one per dtype of logits where there are three.
pub(crate) struct Kernels {
    summarize: [Kernel; 3],
    select: [Kernel; 3],
    lists: Kernel,
    search: Kernel,
}

impl Kernels {
    pub(super) fn load(loader: &Loader<'_>) -> Result<Self> {
        let select = |name| loader.kernel(name, DDT_CUDA_TREE_BUILD_SELECT_SHARED_BYTES);
        Ok(Self {
            summarize: [
                loader.kernel("ddt_tree_build_summarize_f32", 0)?,
                loader.kernel("ddt_tree_build_summarize_f16", 0)?,
                loader.kernel("ddt_tree_build_summarize_bf16", 0)?,
            ],
            select: [
                select("ddt_tree_build_select_f32")?,
                select("ddt_tree_build_select_f16")?,
                select("ddt_tree_build_select_bf16")?,
            ],
            lists: loader.kernel("ddt_tree_build_lists", DDT_CUDA_TREE_BUILD_LISTS_SHARED_BYTES)?,
            search: loader.kernel("ddt_tree_build_search", DDT_CUDA_TREE_BUILD_SEARCH_SHARED_BYTES)?,
        })
    }
}

/// Extents that the launches and the workspace follow from.
#[derive(Clone, Copy, Debug)]
struct Extents {
    num_reqs: usize,
    /// Depths that a tree of the batch can have.
    rows: usize,
    chunks: usize,
    blocks: usize,
    /// Child lists of each row but the first.
    lists_per_row: usize,
    /// Entries of a child list.
    list_capacity: usize,
    has_columns: bool,
}

impl Extents {
    fn new(scores: &BatchScores<'_>, max_candidates: i32, dims: TreeDims, num_reqs: usize) -> Self {
        let budget = dims.max_nodes - 1;
        let rows = scores.num_depths().min(dims.max_depth).min(budget).min(MAX_DEPTH);
        let of = |vocab: usize, lists_per_row, list_capacity, has_columns| Self {
            num_reqs,
            rows,
            chunks: vocab.div_ceil(DDT_CUDA_TREE_BUILD_CHUNK as usize),
            blocks: vocab.div_ceil(DDT_CUDA_TREE_BUILD_BLOCK as usize),
            lists_per_row,
            list_capacity,
            has_columns,
        };
        match scores {
            BatchScores::Logits { logits, .. } => {
                let limit = if max_candidates > 0 { max_candidates as usize } else { budget };
                of(logits.shape()[2], 1, budget.min(limit), false)
            }
            BatchScores::Lattice { tokens, transitions, .. } => {
                let width = tokens.shape()[2];
                of(0, if transitions.is_some() { width.max(1) } else { 1 }, budget.min(width), true)
            }
        }
    }

    /// Child lists of one request.
    fn lists(&self) -> usize {
        if self.rows == 0 { 0 } else { 1 + (self.rows - 1) * self.lists_per_row }
    }

    /// Bytes of shared memory that all lists of a request take.
    fn list_bytes(&self) -> usize {
        self.lists() * (self.list_capacity + 1) * if self.has_columns { 10 } else { 8 }
    }
}

/// The parts of the workspace, one after the other.
#[derive(Clone, Copy, Debug)]
struct Workspace {
    bytes: usize,
}

impl Workspace {
    /// Offset of the next part.
    fn take<T>(&mut self, len: usize) -> usize {
        let offset = self.bytes;
        self.bytes = (offset + len * size_of::<T>()).next_multiple_of(256);
        offset
    }
}

struct Offsets {
    arrived: usize,
    chunk_max: usize,
    chunk_sum: usize,
    chunk_usable: usize,
    block_max: usize,
    lists: usize,
    keys: usize,
    columns: usize,
    bytes: usize,
}

impl Offsets {
    fn new(extents: &Extents) -> Self {
        let mut workspace = Workspace { bytes: 0 };
        let rows = extents.num_reqs * extents.rows;
        let lists = extents.num_reqs * extents.lists();
        let entries = lists * (extents.list_capacity + 1);
        Self {
            arrived: workspace.take::<u32>(extents.num_reqs),
            chunk_max: workspace.take::<f32>(rows * extents.chunks),
            chunk_sum: workspace.take::<f32>(rows * extents.chunks),
            chunk_usable: workspace.take::<u32>(rows * extents.chunks),
            block_max: workspace.take::<f32>(rows * extents.blocks),
            lists: workspace.take::<ddt_cuda_child_list>(lists),
            keys: workspace.take::<u64>(entries),
            columns: workspace.take::<u16>(if extents.has_columns { entries } else { 0 }),
            bytes: workspace.bytes,
        }
    }
}

/// Bytes of workspace that [`launch`] needs.
///
/// # Safety
/// What the parameters point to must be as the header says.
pub(crate) unsafe fn workspace_bytes(_device: &Device, params: &ddt_tree_build_params) -> Result<usize> {
    // SAFETY: the caller's promise.
    unsafe {
        let (_, dims) = ptr::tree(params.tree, "tree")?;
        check_scalars(params)?;
        let (_, num_reqs) = batch(params, dims)?;
        let scores = BatchScores::new(params, num_reqs)?;
        Ok(Offsets::new(&Extents::new(&scores, params.max_candidates, dims, num_reqs)).bytes)
    }
}

/// Enqueues `ddt_tree_build`: two kernels.
///
/// # Safety
/// What the parameters point to must be as the header says, and `stream` one of the device.
pub(crate) unsafe fn launch(
    device: &Device,
    params: &ddt_tree_build_params,
    stream: *mut c_void,
) -> Result<()> {
    // SAFETY: the caller's promise; device pointers are only checked.
    let (tree, dims, tree_index, num_reqs, scores) = unsafe {
        let (tree, dims) = ptr::tree(params.tree, "tree")?;
        TreeOutput::new(&tree, dims)?;
        check_scalars(params)?;
        let (tree_index, num_reqs) = batch(params, dims)?;
        (tree, dims, tree_index, num_reqs, BatchScores::new(params, num_reqs)?)
    };
    let extents = Extents::new(&scores, params.max_candidates, dims, num_reqs);
    let offsets = Offsets::new(&extents);
    let num_stop_tokens = num_reqs * params.max_stop_tokens as usize;
    let per_request = |pointer, name| ptr::optional_device_array(pointer, num_reqs, name);
    let mut kernel_params = ddt_cuda_tree_build {
        logits: View::absent(),
        candidate_tokens: View::absent(),
        candidate_scores: View::absent(),
        transition_scores: View::absent(),
        vocab: 0,
        num_chunks: extents.chunks as i32,
        num_blocks: extents.blocks as i32,
        num_candidates: 0,
        num_rows: extents.rows as i32,
        max_candidates: params.max_candidates,
        list_capacity: extents.list_capacity as i32,
        lists_per_row: extents.lists_per_row as i32,
        max_stop_tokens: params.max_stop_tokens,
        vector: 0,
        lists_in_shared: 0,
        reserved: 0,
        tree_index: View::optional(tree_index.as_ref()),
        depth_scales: ptr::optional_device_array(params.depth_scales, scores.num_depths(), "depth_scales")?,
        root_tokens: ptr::device_array(params.root_tokens, num_reqs, "root_tokens")?,
        root_positions: ptr::device_array(params.root_positions, num_reqs, "root_positions")?,
        node_budgets: per_request(params.node_budgets, "node_budgets")?,
        depth_caps: per_request(params.depth_caps, "depth_caps")?,
        candidate_caps: per_request(params.candidate_caps, "candidate_caps")?,
        spine_depths: per_request(params.spine_depths, "spine_depths")?,
        stop_tokens: ptr::device_array(params.stop_tokens, num_stop_tokens, "stop_tokens")?,
        stop_min_depths: per_request(params.stop_min_depths, "stop_min_depths")?,
        seeds: ptr::optional_device_array(params.seeds, num_reqs, "seeds")?,
        temperatures: ptr::optional_device_array(params.temperatures, num_reqs, "temperatures")?,
        arrived: null_mut(),
        chunk_max: null_mut(),
        chunk_sum: null_mut(),
        chunk_usable: null_mut(),
        block_max: null_mut(),
        lists: null_mut(),
        keys: null_mut(),
        columns: null_mut(),
        tree: tree_params(&tree, dims),
    };
    let base = ptr::workspace(params.workspace, params.workspace_bytes, offsets.bytes)?;
    let at = |offset: usize| base.wrapping_byte_add(offset);
    kernel_params.arrived = at(offsets.arrived).cast();
    kernel_params.chunk_max = at(offsets.chunk_max).cast();
    kernel_params.chunk_sum = at(offsets.chunk_sum).cast();
    kernel_params.chunk_usable = at(offsets.chunk_usable).cast();
    kernel_params.block_max = at(offsets.block_max).cast();
    kernel_params.lists = at(offsets.lists).cast();
    kernel_params.keys = at(offsets.keys).cast();
    if extents.has_columns {
        kernel_params.columns = at(offsets.columns).cast();
    }
    let shared_limit = DDT_CUDA_TREE_BUILD_SEARCH_SHARED_BYTES as usize;
    kernel_params.lists_in_shared = i32::from(extents.list_bytes() <= shared_limit);
    let search_bytes = if kernel_params.lists_in_shared == 1 { extents.list_bytes() as u32 } else { 0 };
    let rows = extents.rows.max(1) as u32;
    let kernels = &device.kernels().tree_build;

    let (first, second, shapes) = match &scores {
        BatchScores::Logits { logits, .. } => {
            kernel_params.logits = View::of(logits);
            kernel_params.vocab = logits.shape()[2] as i32;
            let is_aligned = |elements: usize| (elements * logits.dtype().size()).is_multiple_of(16);
            let [by_request, by_depth, by_token] = logits.strides() else { unreachable!("ndim is 3") };
            kernel_params.vector = i32::from(
                *by_token == 1
                    && is_aligned(*by_request)
                    && is_aligned(*by_depth)
                    && (logits.data() as usize).is_multiple_of(16),
            );
            let dtype = match logits.dtype() {
                DType::F32 => 0,
                DType::F16 => 1,
                _ => 2,
            };
            let summarize = Launch {
                grid: [extents.chunks.max(1) as u32, rows, num_reqs as u32],
                block: SUMMARIZE_THREADS,
                shared_bytes: 0,
                overlaps_previous: false,
            };
            let select = Launch {
                grid: [rows, num_reqs as u32, 1],
                block: SELECT_THREADS,
                shared_bytes: search_bytes,
                overlaps_previous: true,
            };
            (&kernels.summarize[dtype], &kernels.select[dtype], [summarize, select])
        }
        BatchScores::Lattice { tokens, scores, transitions } => {
            kernel_params.candidate_tokens = View::of(tokens);
            kernel_params.candidate_scores = View::optional(scores.as_ref());
            kernel_params.transition_scores = View::optional(transitions.as_ref());
            let width = tokens.shape()[2];
            kernel_params.num_candidates = width as i32;
            let lists = Launch {
                grid: [extents.lists_per_row as u32, rows, num_reqs as u32],
                block: LISTS_THREADS,
                shared_bytes: width as u32 * 12,
                overlaps_previous: false,
            };
            let search = Launch {
                grid: [num_reqs as u32, 1, 1],
                block: DDT_CUDA_MAX_NODES,
                shared_bytes: search_bytes,
                overlaps_previous: true,
            };
            (&kernels.lists, &kernels.search, [lists, search])
        }
    };
    // SAFETY: both kernels take this struct; the caller's promise about what it points to.
    unsafe {
        device.launch(first, &shapes[0], &kernel_params, stream)?;
        device.launch(second, &shapes[1], &kernel_params, stream)
    }
}
