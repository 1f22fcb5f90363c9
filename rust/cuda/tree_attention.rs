// SPDX-License-Identifier: Apache-2.0
//! Launches the kernels of `cuda/tree_attention.cu`, and of `cuda/tree_attention_sm90.cu` where they can be used.

mod sm90;

use std::ffi::c_void;
use std::ptr::null_mut;

use super::params::{
    DDT_CUDA_TREE_ATTENTION_COMBINE_THREADS, DDT_CUDA_TREE_ATTENTION_GENERIC_SHARED_BYTES,
    DDT_CUDA_TREE_ATTENTION_GENERIC_TILE_ROWS, DDT_CUDA_TREE_ATTENTION_GENERIC_TILE_TOKENS,
    DDT_CUDA_TREE_ATTENTION_GRANULE, DDT_CUDA_TREE_ATTENTION_MAX_STAGES,
    DDT_CUDA_TREE_ATTENTION_MAX_TILE_ROWS, DDT_CUDA_TREE_ATTENTION_MIN_WARPS,
    DDT_CUDA_TREE_ATTENTION_SHARED_BYTES, DDT_CUDA_TREE_ATTENTION_SM90_SHARED_BYTES,
    DDT_CUDA_TREE_ATTENTION_SM90_TILE_TOKENS, DDT_CUDA_TREE_ATTENTION_TILE_TOKENS_128,
    DDT_CUDA_TREE_ATTENTION_TILE_TOKENS_256, ddt_cuda_tree_attention,
};
use super::{Device, Kernel, Launch, Loader, View, tree_params};
use crate::dtype::DType;
use crate::error::Result;
use crate::ffi::{ddt_tree_attention_params, ptr};
use crate::tensor::TensorRef;
use crate::tree_attention::{Dims, Tensors};

/// Fewest KV tiles that are worth a CTA: what another CTA saves in time, the combine kernel pays
/// for its partial result.
const MIN_TILES: u32 = 2;
/// CTAs of the combine kernel that an SM runs at a time, and about how many it gets at most: with more rows,
/// a CTA takes more heads of a row.
const COMBINE_CTAS_AT_A_TIME: usize = 3;
const COMBINE_CTAS: u32 = 12;
/// Columns of a line that a thread of the combine kernel adds up.
const COMBINE_COLUMNS: usize = 4;
/// Threads of the kernels for every dtype and stride.
const GENERIC_THREADS: u32 = 256;

/// The kernels of this operation.
pub(crate) struct Kernels {
    /// Head dims 64, 128, 256.
    bf16: [Kernel; 3],
    f16: [Kernel; 3],
    /// Head dims 32, 64, 128, 256.
    generic: [Kernel; 4],
    combine: Kernel,
    sm90: Option<sm90::Kernels>,
}

impl Kernels {
    pub(super) fn load(loader: &Loader<'_>, sm90: Option<&Loader<'_>>) -> Result<Self> {
        let fast = |name| loader.kernel(name, DDT_CUDA_TREE_ATTENTION_SHARED_BYTES);
        let generic = |name| loader.kernel(name, DDT_CUDA_TREE_ATTENTION_GENERIC_SHARED_BYTES);
        Ok(Self {
            bf16: [
                fast("ddt_tree_attention_attend_bf16_64")?,
                fast("ddt_tree_attention_attend_bf16_128")?,
                fast("ddt_tree_attention_attend_bf16_256")?,
            ],
            f16: [
                fast("ddt_tree_attention_attend_f16_64")?,
                fast("ddt_tree_attention_attend_f16_128")?,
                fast("ddt_tree_attention_attend_f16_256")?,
            ],
            generic: [
                generic("ddt_tree_attention_attend_any_32")?,
                generic("ddt_tree_attention_attend_any_64")?,
                generic("ddt_tree_attention_attend_any_128")?,
                generic("ddt_tree_attention_attend_any_256")?,
            ],
            combine: loader.kernel("ddt_tree_attention_combine", 0)?,
            sm90: sm90.map(sm90::Kernels::load).transpose()?,
        })
    }
}

/// A checked call: which kernel, how it is launched, and its parameters without the workspace.
struct Plan<'a> {
    attend: &'a Kernel,
    is_sm90: bool,
    launch: Launch,
    params: ddt_cuda_tree_attention,
}

/// How an attend kernel cuts the work, and what a CTA of it takes.
struct Tiling<'a> {
    kernel: &'a Kernel,
    is_sm90: bool,
    tile_rows: u32,
    tile_tokens: u32,
    min_tiles: u32,
    stages: u32,
    threads: u32,
    shared_bytes: u32,
    ctas_per_sm: u32,
}

impl<'a> Tiling<'a> {
    fn new(device: &'a Device, tensors: &Tensors<'_>, dims: &Dims, most_rows: usize) -> Self {
        let kernels = &device.kernels().tree_attention;
        let by_dim = |dims: &[usize]| dims.iter().position(|&dim| dim == tensors.query.shape()[2]);
        let fast = match tensors.query.dtype() {
            DType::BF16 => Some(&kernels.bf16),
            DType::F16 => Some(&kernels.f16),
            _ => None,
        };
        if let (Some(fast), Some(i), true) = (fast, by_dim(&[64, 128, 256]), is_aligned(tensors)) {
            if let Some(kernel) = kernels.sm90.as_ref().and_then(|sm90| sm90.find(tensors, dims)) {
                return Self::wgmma(kernel, dims, most_rows);
            }
            return Self::mma(device, &fast[i], dims, most_rows);
        }
        let i = by_dim(&[32, 64, 128, 256]).unwrap_or_else(|| unreachable!("a checked head dim"));
        Self {
            kernel: &kernels.generic[i],
            is_sm90: false,
            tile_rows: DDT_CUDA_TREE_ATTENTION_GENERIC_TILE_ROWS,
            tile_tokens: DDT_CUDA_TREE_ATTENTION_GENERIC_TILE_TOKENS,
            min_tiles: MIN_TILES,
            stages: 0,
            threads: GENERIC_THREADS,
            shared_bytes: DDT_CUDA_TREE_ATTENTION_GENERIC_SHARED_BYTES,
            ctas_per_sm: 1,
        }
    }

    fn mma(device: &Device, kernel: &'a Kernel, dims: &Dims, most_rows: usize) -> Self {
        let tile_rows = tile_rows(dims, most_rows);
        let tile_tokens = match dims.head_dim {
            256 => DDT_CUDA_TREE_ATTENTION_TILE_TOKENS_256,
            _ => DDT_CUDA_TREE_ATTENTION_TILE_TOKENS_128,
        };
        let row_bytes = dims.head_dim as u32 * 2;
        let tile_bytes = tile_tokens * row_bytes;
        let left = DDT_CUDA_TREE_ATTENTION_SHARED_BYTES - tile_rows * row_bytes;
        let stages = (left / tile_bytes).min(DDT_CUDA_TREE_ATTENTION_MAX_STAGES);
        let warps = (tile_rows / 16).max(DDT_CUDA_TREE_ATTENTION_MIN_WARPS);
        let shared_bytes = tile_rows * row_bytes + stages * tile_bytes;
        // an SM has registers for 8 such warps, and mostly about 100 or above 160 KB of shared memory
        let has_shared =
            shared_bytes <= 48 << 10 || matches!(device.compute_capability(), (8, 0) | (9 | 10, _));
        let fits_twice = warps <= 4 && has_shared;
        Self {
            kernel,
            is_sm90: false,
            tile_rows,
            tile_tokens,
            min_tiles: MIN_TILES,
            stages,
            threads: warps * 32,
            shared_bytes,
            ctas_per_sm: if fits_twice { 2 } else { 1 },
        }
    }

    fn wgmma(kernel: &'a Kernel, dims: &Dims, most_rows: usize) -> Self {
        Self {
            kernel,
            is_sm90: true,
            tile_rows: tile_rows(dims, most_rows),
            tile_tokens: DDT_CUDA_TREE_ATTENTION_SM90_TILE_TOKENS,
            min_tiles: sm90::MIN_TILES,
            stages: 0,
            threads: sm90::THREADS,
            shared_bytes: DDT_CUDA_TREE_ATTENTION_SM90_SHARED_BYTES,
            ctas_per_sm: 1,
        }
    }
}

/// Lines of a row tile: as few row tiles as can hold the lines of a request, and no larger than needed.
fn tile_rows(dims: &Dims, most_rows: usize) -> u32 {
    let lines = (most_rows * dims.group).max(1);
    let row_tiles = lines.div_ceil(DDT_CUDA_TREE_ATTENTION_MAX_TILE_ROWS as usize);
    lines.div_ceil(row_tiles).next_multiple_of(16) as u32
}

/// Among how many threads the partial results of a line are divided, per column: as many as run at a time.
fn combine_parts(device: &Device, dims: &Dims) -> usize {
    let threads = DDT_CUDA_TREE_ATTENTION_COMBINE_THREADS as usize;
    let per_line = dims.head_dim / COMBINE_COLUMNS;
    let at_a_time = device.sm_count() as usize * COMBINE_CTAS_AT_A_TIME * threads;
    let lines = (dims.num_rows * dims.num_heads).max(1);
    let most = threads / per_line;
    1 << (at_a_time / (lines * per_line)).clamp(1, most).ilog2()
}

/// Whether the rows of a tensor have neighbouring elements and start at multiples of `bytes`.
fn rows_are_aligned(tensor: &TensorRef<'_>, bytes: usize) -> bool {
    let (&last, outer) = tensor.strides().split_last().unwrap_or_else(|| unreachable!("ndim is 3 or 4"));
    last == 1
        && (tensor.data() as usize).is_multiple_of(bytes)
        && outer.iter().all(|stride| (stride * tensor.dtype().size()).is_multiple_of(bytes))
}

/// Whether the tensor core kernels can read and write these tensors: one dtype, rows of neighbouring
/// elements that start at multiples of 16 bytes, and blocks of whole granules.
fn is_aligned(tensors: &Tensors<'_>) -> bool {
    let dtype = tensors.query.dtype();
    tensors.key_cache.shape()[2].is_multiple_of(DDT_CUDA_TREE_ATTENTION_GRANULE as usize)
        && tensors.key_cache.dtype() == dtype
        && tensors.value_cache.dtype() == dtype
        && rows_are_aligned(tensors.query, 16)
        && rows_are_aligned(tensors.key_cache, 16)
        && rows_are_aligned(tensors.value_cache, 16)
        && rows_are_aligned(tensors.out, 2 * tensors.out.dtype().size())
}

/// An extent for a kernel; device values that could reach beyond i32 do not exist.
fn extent(value: usize) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

impl<'a> Plan<'a> {
    /// # Safety
    /// As for [`launch`].
    unsafe fn new(device: &'a Device, params: &ddt_tree_attention_params) -> Result<Self> {
        ptr::no_flags(params.flags)?;
        // SAFETY: the caller's promise. The tensors' data stays unread.
        let (tree, tree_dims, query, key_cache, value_cache, block_table, out) = unsafe {
            let (tree, tree_dims) = ptr::tree(params.tree, "tree")?;
            (
                tree,
                tree_dims,
                ptr::tensor(&params.query, 3, "query")?,
                ptr::tensor(&params.key_cache, 4, "key_cache")?,
                ptr::tensor(&params.value_cache, 4, "value_cache")?,
                ptr::tensor(&params.block_table, 2, "block_table")?,
                ptr::tensor_mut(&params.out, 3, "out")?,
            )
        };
        let num_reqs = tree_dims.num_reqs;
        let query_start = ptr::device_array(params.query_start, num_reqs + 1, "query_start")?;
        let prefix_rows = ptr::optional_device_array(params.prefix_rows, num_reqs, "prefix_rows")?;
        let seq_lens = ptr::device_array(params.seq_lens, num_reqs, "seq_lens")?;
        ptr::device_array(tree.num_nodes, num_reqs, "tree.num_nodes")?;
        ptr::device_array(tree.ancestor_bits, tree_dims.bits_len(), "tree.ancestor_bits")?;
        let tensors = Tensors {
            query: &query,
            key_cache: &key_cache,
            value_cache: &value_cache,
            block_table: &block_table,
            out: &out.view(),
            softmax_scale: params.softmax_scale,
            logit_softcap: params.logit_softcap,
        };
        let dims = tensors.check(num_reqs)?;
        let most_nodes = tree_dims.max_nodes.min(dims.num_rows);
        let most_rows = if prefix_rows.is_null() { most_nodes } else { dims.num_rows };
        let tiling = Tiling::new(device, &tensors, &dims, most_rows);
        let num_ctas = device.sm_count() * tiling.ctas_per_sm;
        let has_softcap = params.logit_softcap > 0.0;
        let log2_e = std::f32::consts::LOG2_E;
        Ok(Self {
            attend: tiling.kernel,
            is_sm90: tiling.is_sm90,
            launch: Launch {
                grid: [if num_reqs == 0 || dims.num_rows == 0 { 0 } else { num_ctas }, 1, 1],
                block: tiling.threads,
                shared_bytes: tiling.shared_bytes,
                overlaps_previous: false,
            },
            params: ddt_cuda_tree_attention {
                query: View::of(&query),
                key_cache: View::of(&key_cache),
                value_cache: View::of(&value_cache),
                block_table: View::of(&block_table),
                out: View::of(&out.view()),
                query_start,
                seq_lens,
                prefix_rows,
                tree: tree_params(&tree, tree_dims),
                partial_stats: null_mut(),
                partial_out: null_mut(),
                num_rows: extent(dims.num_rows),
                num_heads: extent(dims.num_heads),
                num_kv_heads: extent(dims.num_kv_heads),
                group: extent(dims.group),
                head_dim: extent(dims.head_dim),
                num_blocks: extent(dims.num_blocks),
                block_size: extent(dims.block_size),
                max_blocks: extent(dims.max_blocks),
                tile_rows: tiling.tile_rows as i32,
                tile_tokens: tiling.tile_tokens as i32,
                num_ctas: num_ctas as i32,
                min_tiles: tiling.min_tiles as i32,
                stages: tiling.stages as i32,
                score_scale: if has_softcap {
                    params.softmax_scale / params.logit_softcap
                } else {
                    params.softmax_scale * log2_e
                },
                softcap: params.logit_softcap * log2_e,
                combine_parts: combine_parts(device, &dims) as i32,
                out_has_pairs: rows_are_aligned(tensors.out, 2 * tensors.out.dtype().size()).into(),
                reserved: 0,
            },
        })
    }

    /// Heads of a row that a CTA of the combine kernel takes at a time.
    fn combine_heads(&self) -> u32 {
        let threads = self.params.head_dim / COMBINE_COLUMNS as i32 * self.params.combine_parts;
        DDT_CUDA_TREE_ATTENTION_COMBINE_THREADS / threads as u32
    }

    /// Bytes of statistics and outputs, each a multiple of the workspace's alignment.
    fn workspace_parts(&self) -> [usize; 2] {
        let lines = 2 * self.params.num_ctas as usize * self.params.tile_rows as usize;
        let parts = [lines * 2 * size_of::<f32>(), lines * self.params.head_dim as usize * size_of::<f32>()];
        parts.map(|bytes| bytes.next_multiple_of(256))
    }
}

/// Bytes of workspace for a call.
///
/// # Safety
/// As for [`launch`].
pub(crate) unsafe fn workspace_bytes(device: &Device, params: &ddt_tree_attention_params) -> Result<usize> {
    // SAFETY: the caller's promise.
    let plan = unsafe { Plan::new(device, params) }?;
    Ok(plan.workspace_parts().iter().sum())
}

/// Checks what the host can see and enqueues.
///
/// # Safety
/// What the parameters point to must be as the header says.
pub(crate) unsafe fn launch(
    device: &Device,
    params: &ddt_tree_attention_params,
    stream: *mut c_void,
) -> Result<()> {
    // SAFETY: the caller's promise.
    let mut plan = unsafe { Plan::new(device, params) }?;
    let [stats, out] = plan.workspace_parts();
    let workspace = ptr::workspace(params.workspace, params.workspace_bytes, stats + out)?;
    plan.params.partial_stats = workspace.cast();
    plan.params.partial_out = workspace.wrapping_byte_add(stats).cast();
    let rows = if plan.launch.grid[0] == 0 { 0 } else { plan.params.num_rows as u32 };
    let heads_in_turn = (plan.params.num_heads as u32).div_ceil(plan.combine_heads());
    let ctas_per_row = (device.sm_count() * COMBINE_CTAS).div_ceil(rows.max(1)).min(heads_in_turn);
    let combine = Launch {
        grid: [rows, ctas_per_row, 1],
        block: DDT_CUDA_TREE_ATTENTION_COMBINE_THREADS,
        shared_bytes: 0,
        overlaps_previous: true,
    };
    let kernels = &device.kernels().tree_attention;
    let sm90_params = plan.is_sm90.then(|| sm90::params(plan.params)).transpose()?;
    // SAFETY: the kernels take these structs; the pointers are the caller's promise.
    unsafe {
        match &sm90_params {
            Some(params) => device.launch(plan.attend, &plan.launch, params, stream)?,
            None => device.launch(plan.attend, &plan.launch, &plan.params, stream)?,
        }
        device.launch(&kernels.combine, &combine, &plan.params, stream)
    }
}
