// SPDX-License-Identifier: Apache-2.0
//! Launches `cuda/gdn_verify.cu`.

use std::ffi::c_void;

use super::{Device, Kernel, Launch, Loader, View, params, tree_params};
use crate::dtype::DType;
use crate::error::{Result, bail};
use crate::ffi::{ddt_gdn_verify_params, gdn_verify_tensors, ptr};
use crate::gdn::GDN_HEAD_DIM;
use crate::gdn_verify::Checked;
use crate::tensor::TensorRef;

/// Rows from which on a block has more warps.
const SMALL_NODES: usize = 32;

/// The kernels of this operation: one per dtype of `mixed_qkv`, and of the one that serving uses
/// a second with fewer warps for small trees.
pub(crate) struct Kernels {
    f32: Kernel,
    f16: Kernel,
    bf16: Kernel,
    bf16_small: Kernel,
}

impl Kernels {
    pub(super) fn load(loader: &Loader<'_>) -> Result<Self> {
        let kernel = |name| loader.kernel(name, params::DDT_CUDA_GDN_VERIFY_SHARED_BYTES as u32);
        Ok(Self {
            f32: kernel("ddt_gdn_verify_f32")?,
            f16: kernel("ddt_gdn_verify_f16")?,
            bf16: kernel("ddt_gdn_verify_bf16")?,
            bf16_small: kernel("ddt_gdn_verify_bf16_small")?,
        })
    }
}

#[allow(clippy::unnecessary_wraps, reason = "the signature that all operations share")]
pub(crate) unsafe fn workspace_bytes(_device: &Device, _params: &ddt_gdn_verify_params) -> Result<usize> {
    Ok(0)
}

/// # Safety
/// What the parameters point to must be as the header says, in the device's memory.
pub(crate) unsafe fn launch(
    device: &Device,
    raw: &ddt_gdn_verify_params,
    stream: *mut c_void,
) -> Result<()> {
    // SAFETY: the caller's promise; data is not read here.
    let (tree, dims) = unsafe { ptr::tree(raw.tree) }?;
    // SAFETY: as above.
    let args = unsafe { gdn_verify_tensors(raw, dims) }?;
    let Checked { heads, num_rows, scale, norm_eps } = args.check()?;
    let state_slots = ptr::device_array(raw.layer.state_slots, dims.num_reqs, "state_slots")?;
    let query_start = ptr::device_array(raw.query_start, dims.num_reqs + 1, "query_start")?;
    ptr::device_array(tree.num_nodes, dims.num_reqs, "tree.num_nodes")?;
    ptr::device_array(tree.parents, dims.num_slots(), "tree.parents")?;
    ptr::device_array(tree.depths, dims.num_slots(), "tree.depths")?;
    ptr::device_array(tree.ancestors, dims.ancestors_len(), "tree.ancestors")?;

    let dtype = args.mixed_qkv.dtype();
    let exact = dtype == DType::BF16;
    let (row_bytes, max_rows) = if exact {
        (params::DDT_CUDA_GDN_VERIFY_ROW_BYTES_BF16, params::DDT_CUDA_GDN_VERIFY_MAX_ROWS_BF16)
    } else {
        (params::DDT_CUDA_GDN_VERIFY_ROW_BYTES, params::DDT_CUDA_GDN_VERIFY_MAX_ROWS)
    };
    let row_capacity = dims.max_nodes.next_multiple_of(16).min(max_rows as usize);
    let (kernel, groups) = match dtype {
        DType::F16 => (&device.kernels().gdn_verify.f16, 4),
        DType::BF16 if dims.max_nodes <= SMALL_NODES => (&device.kernels().gdn_verify.bf16_small, 2),
        DType::BF16 => (&device.kernels().gdn_verify.bf16, 4),
        _ => (&device.kernels().gdn_verify.f32, 4),
    };
    let tiles = params::DDT_CUDA_GDN_VERIFY_TILES as usize;
    let num_slices = (heads.num_v / heads.num_k * (GDN_HEAD_DIM / 16)).div_ceil(tiles);
    let blocks = dims.num_reqs * heads.num_k * num_slices;
    if blocks > i32::MAX as usize {
        bail!(InvalidShape, "tree.num_reqs: got {}, want fewer", dims.num_reqs);
    }

    let mut vectors = 0;
    for (bit, tensor, dim, bytes) in [
        (params::DDT_CUDA_GDN_VERIFY_STATE, &args.ssm_state, 3, 16),
        (params::DDT_CUDA_GDN_VERIFY_ROWS, &args.mixed_qkv, 1, 16),
        (params::DDT_CUDA_GDN_VERIFY_STASH, &args.stash_qkv.view(), 1, 4 * dtype.size()),
        (params::DDT_CUDA_GDN_VERIFY_WEIGHT, &args.conv_weight, 1, 4 * args.conv_weight.dtype().size()),
        (params::DDT_CUDA_GDN_VERIFY_WINDOW, &args.conv_state, 1, 4 * args.conv_state.dtype().size()),
        (params::DDT_CUDA_GDN_VERIFY_OUT, &args.out.view(), 2, 4 * args.out.dtype().size()),
    ] {
        if is_vectorizable(tensor, dim, bytes) {
            vectors |= bit as u32;
        }
    }

    let kernel_params = params::ddt_cuda_gdn_verify {
        conv_weight: View::new(&args.conv_weight),
        conv_bias: View::optional(args.conv_bias.as_ref()),
        conv_state: View::new(&args.conv_state),
        ssm_state: View::new(&args.ssm_state),
        stash_qkv: View::new(&args.stash_qkv.view()),
        stash_gates: View::new(&args.stash_gates.view()),
        mixed_qkv: View::new(&args.mixed_qkv),
        a: View::new(&args.a),
        b: View::new(&args.b),
        a_log: View::new(&args.a_log),
        dt_bias: View::new(&args.dt_bias),
        out: View::new(&args.out.view()),
        tree: tree_params(&tree, dims),
        state_slots,
        query_start,
        num_slots: args.conv_state.shape()[0].min(args.ssm_state.shape()[0]) as i64,
        // query_start cannot name later rows
        num_rows: num_rows.min(i32::MAX as usize) as i32,
        num_k_heads: heads.num_k as i32,
        num_v_heads: heads.num_v as i32,
        num_slices: num_slices as i32,
        row_capacity: row_capacity as i32,
        vectors,
        scale,
        norm_eps,
    };
    let launch = Launch {
        grid: [blocks as u32, 1, 1],
        block: 32 * tiles as u32 * groups,
        shared_bytes: row_capacity as u32 * row_bytes as u32 + params::DDT_CUDA_GDN_VERIFY_EXTRA_BYTES as u32,
        overlaps_previous: false,
    };
    // SAFETY: the caller's promise.
    unsafe { device.launch(kernel, &launch, &kernel_params, stream) }
}

/// Whether `bytes` along `dim` can be accessed at once, from every multiple of that on.
fn is_vectorizable(tensor: &TensorRef, dim: usize, bytes: usize) -> bool {
    let size = tensor.dtype().size();
    (tensor.data() as usize).is_multiple_of(bytes)
        && tensor.strides().iter().enumerate().all(|(i, &stride)| {
            if i == dim { stride == 1 } else { (stride * size).is_multiple_of(bytes) }
        })
}
