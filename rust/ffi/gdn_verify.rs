// SPDX-License-Identifier: Apache-2.0
//! The C entry of [`gdn_verify`].

use std::ffi::c_void;

use super::context::{Backend, backend, ddt_context};
use super::guard::guard;
use super::ptr::{self, TreeDims};
use super::status::ddt_status;
use super::types::ddt_gdn_verify_params;
use crate::error::Result;
use crate::gdn_verify::{GdnVerify, gdn_verify};

/// Computes the outputs of one gated-delta-net layer for every node of every tree, from one read
/// of the layer's state, and writes to the stash what ddt_commit replays. No state is written.
///
/// Convolution along the ancestors, silu and rounding to the dtype of mixed_qkv give q, k and v;
/// q and k become `x * rsqrt(sum(x^2) + norm_eps)`; the log decay g is
/// `-exp(a_log) * softplus(a + dt_bias)` and beta is `sigmoid(b)`. With S the state of the parent,
/// a node's output is `scale * S'^T q` of `S' = e^g S + k u^T, u = beta * (v - e^g S^T k)`.
/// All of it is f32.
///
/// Shapes: see ddt_gdn_verify_params. Floating-point tensors are f32, f16 or bf16; conv_state has
/// the dtype of mixed_qkv or is f32; ssm_state and stash_gates are f32. Value head h uses key head
/// `h / (Hv / Hk)`. Two requests may name the same slot. On a GPU nodes must be in depth-first
/// order, as ddt_tree says: other orders give wrong outputs for trees of more than 48 nodes.
///
/// Writes: out and the stash at the rows of nodes; zeros to out, and nothing to the stash, at
/// idle rows. Rows of a padding request (num_nodes 0 or a negative slot) are not written.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_INVALID_SHAPE,
/// DDT_INVALID_DTYPE; DDT_INVALID_VALUE (a slot, row or node out of range, parents, depths and
/// ancestors that do not agree, a scale or norm_eps that is not finite); DDT_UNSUPPORTED (flags).
/// Nothing has been written then.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_gdn_verify(
    context: *const ddt_context,
    params: *const ddt_gdn_verify_params,
    stream: *mut c_void,
) -> ddt_status {
    guard("gdn_verify", || {
        // SAFETY: the caller vouches for the context, `params` and every pointer and tensor in it.
        unsafe {
            let backend = backend(context)?;
            let params = ptr::versioned(params, "params")?;
            match backend {
                Backend::Cpu(_) => run(&params),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::gdn_verify::launch(device, &params, stream),
            }
        }
    })
}

/// # Safety
/// What the parameters point to must be as the header says.
unsafe fn run(params: &ddt_gdn_verify_params) -> Result<()> {
    // SAFETY: the caller's promise, for every pointer and tensor.
    unsafe {
        let (tree, dims) = ptr::tree(params.tree, "tree")?;
        gdn_verify(GdnVerify {
            state_slots: ptr::input(params.layer.state_slots, dims.num_reqs, "state_slots")?,
            query_start: ptr::input(params.query_start, dims.num_reqs + 1, "query_start")?,
            num_nodes: ptr::input(tree.num_nodes, dims.num_reqs, "tree.num_nodes")?,
            parents: ptr::input(tree.parents, dims.num_slots(), "tree.parents")?,
            depths: ptr::input(tree.depths, dims.num_slots(), "tree.depths")?,
            ancestors: ptr::input(tree.ancestors, dims.ancestors_len(), "tree.ancestors")?,
            ..gdn_verify_tensors(params, dims)?
        })
    }
}

/// The arguments without their arrays, which are empty; no tensor's data is read.
///
/// # Safety
/// As for [`ptr::tensor`] and [`ptr::tensor_mut`].
pub(crate) unsafe fn gdn_verify_tensors<'a>(
    params: &ddt_gdn_verify_params,
    dims: TreeDims,
) -> Result<GdnVerify<'a>> {
    ptr::no_flags(params.flags)?;
    let layer = &params.layer;
    // SAFETY: the caller's promise, for every tensor.
    unsafe {
        Ok(GdnVerify {
            conv_weight: ptr::tensor(&layer.conv_weight, 2, "conv_weight")?,
            conv_bias: ptr::optional_tensor(&layer.conv_bias, 1, "conv_bias")?,
            conv_state: ptr::tensor(&layer.conv_state, 3, "conv_state")?,
            ssm_state: ptr::tensor(&layer.ssm_state, 4, "ssm_state")?,
            state_slots: &[],
            mixed_qkv: ptr::tensor(&params.mixed_qkv, 2, "mixed_qkv")?,
            a: ptr::tensor(&params.a, 2, "a")?,
            b: ptr::tensor(&params.b, 2, "b")?,
            a_log: ptr::tensor(&params.a_log, 1, "a_log")?,
            dt_bias: ptr::tensor(&params.dt_bias, 1, "dt_bias")?,
            query_start: &[],
            max_nodes: dims.max_nodes,
            max_depth: dims.max_depth,
            num_nodes: &[],
            parents: &[],
            depths: &[],
            ancestors: &[],
            scale: params.scale,
            norm_eps: params.norm_eps,
            stash_qkv: ptr::tensor_mut(&layer.stash_qkv, 2, "stash_qkv")?,
            stash_gates: ptr::tensor_mut(&layer.stash_gates, 3, "stash_gates")?,
            out: ptr::tensor_mut(&params.out, 3, "out")?,
        })
    }
}

/// Bytes of workspace that ddt_gdn_verify needs for these parameters; 0 on the CPU.
///
/// Writes: `*out`.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_UNSUPPORTED.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_gdn_verify_workspace_size(
    context: *const ddt_context,
    params: *const ddt_gdn_verify_params,
    out: *mut usize,
) -> ddt_status {
    guard("gdn_verify_workspace_size", || {
        // SAFETY: the caller vouches for the context, the parameters and `out`.
        unsafe {
            let backend = backend(context)?;
            ptr::workspace_size(params, out, |params| match backend {
                Backend::Cpu(_) => Ok(0),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::gdn_verify::workspace_bytes(device, params),
            })
        }
    })
}
