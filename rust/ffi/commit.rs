// SPDX-License-Identifier: Apache-2.0
//! The C entry of [`commit`].

use std::ffi::c_void;

use super::context::{Backend, backend, ddt_context};
use super::guard::guard;
use super::ptr::{self, TreeDims};
use super::status::ddt_status;
use super::types::{ddt_commit_params, ddt_gdn_layer, ddt_kv_layer, ddt_tree};
use crate::commit::{Commit, CommitGdnLayer, CommitKvLayer, commit};
use crate::error::{Result, bail};

/// Makes the accepted path of every tree permanent. conv_state and ssm_state of each recurrent
/// layer become those after plain decoding of the root and the accepted nodes, replayed from the
/// stash in f32, token by token: `S = e^g S; u = beta * (v - S^T k); S += k u^T`. In each
/// attention layer the KV row of the j-th accepted node moves to the row of node j.
///
/// Shapes: see ddt_commit_params, ddt_gdn_layer and ddt_kv_layer.
///
/// Writes: the states of each request's slot, and of its snapshot slot if it has one; the KV rows
/// that move. A request is skipped if num_nodes is 0 or num_accepted is -1, and by a recurrent
/// layer also if its slot there is negative.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_INVALID_SHAPE,
/// DDT_INVALID_DTYPE; DDT_INVALID_VALUE (a row, node, slot or snapshot_tokens out of range,
/// accepted nodes that do not ascend, a KV row that moves from or to no slot, a state or KV slot
/// that would be written twice); DDT_UNSUPPORTED (flags). Nothing has been written then.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_commit(
    context: *const ddt_context,
    params: *const ddt_commit_params,
    stream: *mut c_void,
) -> ddt_status {
    guard("commit", || {
        // SAFETY: the caller vouches for the context, `params` and every pointer and tensor in it.
        unsafe {
            let backend = backend(context)?;
            let params = ptr::versioned(params, "params")?;
            match backend {
                Backend::Cpu(_) => run(&params),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::commit::launch(device, &params, stream),
            }
        }
    })
}

/// # Safety
/// What the parameters point to must be as the header says.
unsafe fn run(params: &ddt_commit_params) -> Result<()> {
    // SAFETY: the caller's promise, for every pointer and tensor.
    unsafe {
        let CommitLayers { tree, dims, gdn_layers, kv_layers } = commit_layers(params)?;
        let query_start = ptr::input(params.query_start, dims.num_reqs + 1, "query_start")?;
        let num_rows = query_start[dims.num_reqs].max(0) as usize;
        commit(Commit {
            gdn_layers: in_each(gdn_layers, "gdn_layers", |layer| {
                Ok(CommitGdnLayer {
                    state_slots: ptr::input(layer.state_slots, dims.num_reqs, "state_slots")?,
                    snapshot_slots: ptr::optional_input(
                        layer.snapshot_slots,
                        dims.num_reqs,
                        "snapshot_slots",
                    )?,
                    ..gdn_layer_tensors(layer)?
                })
            })?,
            kv_layers: in_each(kv_layers, "kv_layers", |layer| {
                Ok(CommitKvLayer {
                    row_slots: ptr::input(layer.row_slots, num_rows, "row_slots")?,
                    ..kv_layer_tensors(layer)?
                })
            })?,
            query_start,
            num_nodes: ptr::input(tree.num_nodes, dims.num_reqs, "tree.num_nodes")?,
            max_depth: dims.max_depth,
            num_accepted: ptr::input(params.num_accepted, dims.num_reqs, "num_accepted")?,
            accepted_nodes: ptr::input(
                params.accepted_nodes,
                dims.num_reqs * dims.max_depth,
                "accepted_nodes",
            )?,
            snapshot_tokens: ptr::optional_input(params.snapshot_tokens, dims.num_reqs, "snapshot_tokens")?,
            norm_eps: params.norm_eps,
        })
    }
}

/// The parts of the parameters that the host can read on every device.
pub(crate) struct CommitLayers<'a> {
    pub(crate) tree: ddt_tree,
    pub(crate) dims: TreeDims,
    pub(crate) gdn_layers: &'a [ddt_gdn_layer],
    pub(crate) kv_layers: &'a [ddt_kv_layer],
}

/// # Safety
/// The tree and the layer tables must be as the header says.
pub(crate) unsafe fn commit_layers(params: &ddt_commit_params) -> Result<CommitLayers<'_>> {
    ptr::no_flags(params.flags)?;
    if params.reserved0 != 0 {
        bail!(Unsupported, "params.reserved0: got {}, want 0", params.reserved0);
    }
    let num_gdn_layers = layer_count(params.num_gdn_layers, "num_gdn_layers")?;
    let num_kv_layers = layer_count(params.num_kv_layers, "num_kv_layers")?;
    // SAFETY: the caller's promise.
    unsafe {
        let (tree, dims) = ptr::tree(params.tree, "tree")?;
        Ok(CommitLayers {
            tree,
            dims,
            gdn_layers: ptr::input(params.gdn_layers, num_gdn_layers, "gdn_layers")?,
            kv_layers: ptr::input(params.kv_layers, num_kv_layers, "kv_layers")?,
        })
    }
}

fn layer_count(count: i32, name: &str) -> Result<usize> {
    match usize::try_from(count) {
        Ok(count) => Ok(count),
        Err(_) => bail!(InvalidValue, "params.{name}: got {count}, want >= 0"),
    }
}

/// Converts each layer, and says in errors which one was wrong.
fn in_each<T, U>(layers: &[T], name: &str, convert: impl Fn(&T) -> Result<U>) -> Result<Vec<U>> {
    layers
        .iter()
        .enumerate()
        .map(|(i, layer)| convert(layer).map_err(|error| error.context(format!("{name}[{i}]"))))
        .collect()
}

/// The layer without its slots, which may lie in a GPU's memory.
///
/// # Safety
/// The caller must vouch for every tensor of the layer.
pub(crate) unsafe fn gdn_layer_tensors<'a>(layer: &ddt_gdn_layer) -> Result<CommitGdnLayer<'a>> {
    // SAFETY: the caller's promise.
    unsafe {
        Ok(CommitGdnLayer {
            conv_weight: ptr::tensor(&layer.conv_weight, 2, "conv_weight")?,
            conv_bias: ptr::optional_tensor(&layer.conv_bias, 1, "conv_bias")?,
            conv_state: ptr::tensor_mut(&layer.conv_state, 3, "conv_state")?,
            ssm_state: ptr::tensor_mut(&layer.ssm_state, 4, "ssm_state")?,
            stash_qkv: ptr::tensor(&layer.stash_qkv, 2, "stash_qkv")?,
            stash_gates: ptr::tensor(&layer.stash_gates, 3, "stash_gates")?,
            state_slots: &[],
            snapshot_slots: None,
        })
    }
}

/// The layer without its slots, which may lie in a GPU's memory.
///
/// # Safety
/// The caller must vouch for every tensor of the layer.
pub(crate) unsafe fn kv_layer_tensors<'a>(layer: &ddt_kv_layer) -> Result<CommitKvLayer<'a>> {
    // SAFETY: the caller's promise.
    unsafe {
        Ok(CommitKvLayer {
            key_cache: ptr::tensor_mut(&layer.key_cache, 4, "key_cache")?,
            value_cache: ptr::tensor_mut(&layer.value_cache, 4, "value_cache")?,
            row_slots: &[],
        })
    }
}

/// Bytes of workspace that ddt_commit needs for these parameters; 0 on the CPU.
///
/// Writes: `*out`.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_UNSUPPORTED.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_commit_workspace_size(
    context: *const ddt_context,
    params: *const ddt_commit_params,
    out: *mut usize,
) -> ddt_status {
    guard("commit_workspace_size", || {
        // SAFETY: the caller vouches for the context, the parameters and `out`.
        unsafe {
            let backend = backend(context)?;
            ptr::workspace_size(params, out, |params| match backend {
                Backend::Cpu(_) => Ok(0),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::commit::workspace_bytes(device, params),
            })
        }
    })
}
