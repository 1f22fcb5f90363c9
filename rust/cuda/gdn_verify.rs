// SPDX-License-Identifier: Apache-2.0
//! Launches `cuda/gdn_verify.cu`.

use std::ffi::c_void;

use super::{Device, Kernel, Launch, Loader, View, params, tree_params};
use crate::dtype::DType;
use crate::error::{Result, bail};
use crate::ffi::{ddt_gdn_verify_params, gdn_verify_tensors, ptr};
use crate::gdn::GDN_HEAD_DIM;
use crate::gdn_verify::{Checked, GdnVerify};
use crate::tensor::TensorRef;

/// Blocks of "solve" for small trees that a GPU has room for at once, or thereabouts.
const SMALL_BLOCKS: usize = 256;
/// What the kernel for packed tensors takes for granted.
const PACKED_FLAGS: u32 = params::DDT_CUDA_GDN_VERIFY_ROWS
    | params::DDT_CUDA_GDN_VERIFY_STASH
    | params::DDT_CUDA_GDN_VERIFY_WEIGHT
    | params::DDT_CUDA_GDN_VERIFY_WINDOW;
/// What each array of the workspace starts at a multiple of.
const ALIGNMENT: usize = 256;

/// The kernels of this operation by dtype of `mixed_qkv`; of the one that serving
/// uses also variants for its memory layout and for small trees.
pub(crate) struct Kernels {
    prepare_f32: Kernel,
    prepare_f16: Kernel,
    prepare_bf16: Kernel,
    prepare_bf16_packed: Kernel,
    solve_f32: Kernel,
    solve_f16: Kernel,
    solve_bf16: Kernel,
    solve_bf16_medium: Kernel,
    solve_bf16_small: Kernel,
}

impl Kernels {
    pub(super) fn load(loader: &Loader<'_>) -> Result<Self> {
        let prepare = |name| loader.kernel(name, 0);
        let solve = |name| loader.kernel(name, params::DDT_CUDA_GDN_VERIFY_SHARED_BYTES);
        Ok(Self {
            prepare_f32: prepare("ddt_gdn_verify_prepare_f32")?,
            prepare_f16: prepare("ddt_gdn_verify_prepare_f16")?,
            prepare_bf16: prepare("ddt_gdn_verify_prepare_bf16")?,
            prepare_bf16_packed: prepare("ddt_gdn_verify_prepare_bf16_packed")?,
            solve_f32: solve("ddt_gdn_verify_solve_f32")?,
            solve_f16: solve("ddt_gdn_verify_solve_f16")?,
            solve_bf16: solve("ddt_gdn_verify_solve_bf16")?,
            solve_bf16_medium: solve("ddt_gdn_verify_solve_bf16_medium")?,
            solve_bf16_small: solve("ddt_gdn_verify_solve_bf16_small")?,
        })
    }
}

/// Where the arrays of the workspace start, in bytes. Their contents are in `cuda/params/gdn_verify.h`.
struct Workspace {
    values: usize,
    norms: usize,
    gates: usize,
    bytes: usize,
}

impl Workspace {
    fn new(args: &GdnVerify, checked: &Checked) -> Result<Self> {
        let Checked { heads, num_rows, .. } = *checked;
        let dtype = args.mixed_qkv.dtype();
        let key_elements = 2 * heads.num_k * GDN_HEAD_DIM * parts(dtype);
        let mut end = 0usize;
        let mut array = |row_bytes: usize| {
            let start = end;
            let bytes = row_bytes.checked_mul(num_rows)?.checked_next_multiple_of(ALIGNMENT)?;
            end = end.checked_add(bytes)?;
            Some(start)
        };
        let mut place = || {
            array(key_elements * DType::BF16.size())?;
            let values = array(heads.num_v * GDN_HEAD_DIM * dtype.size())?;
            let norms = array(2 * heads.num_k * size_of::<f32>())?;
            let gates = array(3 * heads.num_v * size_of::<f32>())?;
            Some((values, norms, gates))
        };
        let Some((values, norms, gates)) = place() else {
            bail!(InvalidShape, "mixed_qkv rows: got {num_rows}, want fewer");
        };
        Ok(Self { values, norms, gates, bytes: end })
    }
}

/// bf16 numbers that together hold a value of `dtype`, of f32 its first 16 bits.
fn parts(dtype: DType) -> usize {
    if dtype == DType::BF16 { 1 } else { 2 }
}

/// # Safety
/// What the parameters point to must be as the header says; no tensor's data is read.
pub(crate) unsafe fn workspace_bytes(_device: &Device, params: &ddt_gdn_verify_params) -> Result<usize> {
    // SAFETY: the caller's promise.
    let args = unsafe { gdn_verify_tensors(params, ptr::tree(params.tree, "tree")?.1) }?;
    Ok(Workspace::new(&args, &args.check()?)?.bytes)
}

/// # Safety
/// What the parameters point to must be as the header says, in the device's memory.
pub(crate) unsafe fn launch(device: &Device, raw: &ddt_gdn_verify_params, stream: *mut c_void) -> Result<()> {
    // SAFETY: the caller's promise; data is not read here.
    let (tree, dims) = unsafe { ptr::tree(raw.tree, "tree") }?;
    // SAFETY: as above.
    let args = unsafe { gdn_verify_tensors(raw, dims) }?;
    let checked = args.check()?;
    let Checked { heads, num_rows, scale, norm_eps } = checked;
    let state_slots = ptr::device_array(raw.layer.state_slots, dims.num_reqs, "state_slots")?;
    let query_start = ptr::device_array(raw.query_start, dims.num_reqs + 1, "query_start")?;
    ptr::device_array(tree.num_nodes, dims.num_reqs, "tree.num_nodes")?;
    ptr::device_array(tree.parents, dims.num_slots(), "tree.parents")?;
    ptr::device_array(tree.depths, dims.num_slots(), "tree.depths")?;
    ptr::device_array(tree.ancestors, dims.ancestors_len(), "tree.ancestors")?;
    let layout = Workspace::new(&args, &checked)?;
    let workspace = ptr::workspace(raw.workspace, raw.workspace_bytes, layout.bytes)?.cast::<u8>();

    let dtype = args.mixed_qkv.dtype();
    let kernels = &device.kernels().gdn_verify;
    let mut flags = 0;
    for (bit, tensor, dim, elements) in [
        (params::DDT_CUDA_GDN_VERIFY_STATE, &args.ssm_state, 3, 4),
        (params::DDT_CUDA_GDN_VERIFY_ROWS, &args.mixed_qkv, 1, 4),
        (params::DDT_CUDA_GDN_VERIFY_STASH, &args.stash_qkv.view(), 1, 4),
        (params::DDT_CUDA_GDN_VERIFY_WEIGHT, &args.conv_weight, 1, 4),
        (params::DDT_CUDA_GDN_VERIFY_WINDOW, &args.conv_state, 1, 4),
        (params::DDT_CUDA_GDN_VERIFY_OUT, &args.out.view(), 2, 4),
    ] {
        if is_vectorizable(tensor, dim, elements) {
            flags |= bit;
        }
    }
    let group = heads.num_v / heads.num_k;
    let tiles = params::DDT_CUDA_GDN_VERIFY_TILES as usize;
    let head_tiles = group * (GDN_HEAD_DIM / 16);
    let is_packed = dtype == DType::BF16
        && args.conv_weight.dtype() == dtype
        && args.conv_state.dtype() == dtype
        && args.conv_bias.is_none()
        && PACKED_FLAGS & !flags == 0
        && [&args.mixed_qkv, &args.conv_weight, &args.conv_state, &args.stash_qkv.view()].iter().all(
            |tensor| {
                tensor
                    .strides()
                    .iter()
                    .skip(tensor.strides().len() - 2)
                    .all(|&stride| i32::try_from(stride).is_ok())
            },
        );
    let prepare = match dtype {
        DType::F16 => &kernels.prepare_f16,
        DType::BF16 if is_packed => &kernels.prepare_bf16_packed,
        DType::BF16 => &kernels.prepare_bf16,
        _ => &kernels.prepare_f32,
    };
    // a block's tiles, its parts of the state in shared memory, its warps
    let (solve, block_tiles, buffers, warps) = match dtype {
        DType::F16 => (&kernels.solve_f16, tiles, tiles, 4 * tiles),
        DType::BF16
            if dims.max_nodes <= params::DDT_CUDA_GDN_VERIFY_SMALL_NODES as usize && group <= tiles =>
        {
            let warps = params::DDT_CUDA_GDN_VERIFY_SMALL_WARPS as usize;
            let slices =
                (SMALL_BLOCKS / (dims.num_reqs * heads.num_k).max(1)).clamp(1, head_tiles.div_ceil(tiles));
            (&kernels.solve_bf16_small, head_tiles.div_ceil(slices), warps, warps)
        }
        DType::BF16 if dims.max_nodes <= params::DDT_CUDA_GDN_VERIFY_MEDIUM_NODES as usize => {
            (&kernels.solve_bf16_medium, tiles, tiles, 2 * tiles)
        }
        DType::BF16 => (&kernels.solve_bf16, tiles, tiles, 4 * tiles),
        _ => (&kernels.solve_f32, tiles, tiles, 4 * tiles),
    };
    let (row_bytes, max_rows) = if parts(dtype) == 1 {
        (params::DDT_CUDA_GDN_VERIFY_ROW_BYTES_BF16, params::DDT_CUDA_GDN_VERIFY_MAX_ROWS_BF16)
    } else {
        (params::DDT_CUDA_GDN_VERIFY_ROW_BYTES, params::DDT_CUDA_GDN_VERIFY_MAX_ROWS)
    };
    let row_capacity = dims.max_nodes.next_multiple_of(16).min(max_rows as usize);

    let kernel_params = params::ddt_cuda_gdn_verify {
        conv_weight: View::of(&args.conv_weight),
        conv_bias: View::optional(args.conv_bias.as_ref()),
        conv_state: View::of(&args.conv_state),
        ssm_state: View::of(&args.ssm_state),
        stash_qkv: View::of(&args.stash_qkv.view()),
        stash_gates: View::of(&args.stash_gates.view()),
        mixed_qkv: View::of(&args.mixed_qkv),
        a: View::of(&args.a),
        b: View::of(&args.b),
        a_log: View::of(&args.a_log),
        dt_bias: View::of(&args.dt_bias),
        out: View::of(&args.out.view()),
        tree: tree_params(&tree, dims),
        state_slots,
        query_start,
        heads: workspace.cast(),
        values: workspace.wrapping_add(layout.values).cast(),
        norms: workspace.wrapping_add(layout.norms).cast(),
        gates: workspace.wrapping_add(layout.gates).cast(),
        num_slots: args.conv_state.shape()[0].min(args.ssm_state.shape()[0]) as i64,
        // query_start cannot name later rows
        num_rows: num_rows.min(i32::MAX as usize) as i32,
        num_k_heads: heads.num_k as i32,
        num_v_heads: heads.num_v as i32,
        block_tiles: block_tiles as i32,
        row_capacity: row_capacity as i32,
        flags,
        scale,
        norm_eps,
    };
    let grid = |heads: usize, parts: usize| [dims.num_reqs as u32, heads as u32, parts as u32];
    let gate_blocks = heads.num_v.div_ceil(params::DDT_CUDA_GDN_VERIFY_GATE_HEADS as usize);
    let node_groups = dims.max_nodes.div_ceil(params::DDT_CUDA_GDN_VERIFY_PREPARE_NODES as usize);
    let prepare_launch = Launch {
        grid: grid(2 * heads.num_k + heads.num_v + gate_blocks, node_groups),
        block: params::DDT_CUDA_GDN_VERIFY_PREPARE_THREADS,
        shared_bytes: 0,
        overlaps_previous: false,
    };
    let solve_launch = Launch {
        grid: grid(heads.num_k, head_tiles.div_ceil(block_tiles)),
        block: 32 * warps as u32,
        shared_bytes: row_capacity as u32 * row_bytes
            + buffers as u32 * params::DDT_CUDA_GDN_VERIFY_TILE_BYTES
            + params::DDT_CUDA_GDN_VERIFY_EXTRA_BYTES,
        overlaps_previous: true,
    };
    // SAFETY: the caller's promise.
    unsafe {
        device.launch(prepare, &prepare_launch, &kernel_params, stream)?;
        device.launch(solve, &solve_launch, &kernel_params, stream)
    }
}

/// Whether so many elements along `dim` can be accessed at once, from every multiple of that on.
fn is_vectorizable(tensor: &TensorRef, dim: usize, elements: usize) -> bool {
    let bytes = elements * tensor.dtype().size();
    (tensor.data() as usize).is_multiple_of(bytes)
        && tensor
            .strides()
            .iter()
            .enumerate()
            .all(|(i, &stride)| if i == dim { stride == 1 } else { stride.is_multiple_of(elements) })
}
