// SPDX-License-Identifier: Apache-2.0
//! The C entry of [`tree_attention`].

use std::ffi::c_void;

use super::context::{Backend, backend, ddt_context};
use super::guard::guard;
use super::ptr;
use super::status::ddt_status;
use super::types::ddt_tree_attention_params;
use crate::error::Result;
use crate::tree_attention::{TreeAttention, tree_attention};

/// Attends every row to a paged KV cache that already holds this step's rows: a row before the
/// root to all tokens up to itself, a node to all tokens before the root and to its path.
///
/// One online softmax in f32 per row and head; the KV of tokens that a row does not see never
/// reaches it, NaN included. Query head h uses KV head `h / (Hq / Hkv)`; head dims 32, 64, 128 and
/// 256, at most 16 query heads per KV head.
///
/// Shapes: see ddt_tree_attention_params. K may be stored dim-major (token stride 1).
///
/// Writes: out at the rows before the root and of nodes; zeros at idle rows. Rows of a padding
/// request (num_nodes 0) and of no request are not written.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_INVALID_SHAPE,
/// DDT_INVALID_DTYPE; DDT_INVALID_VALUE (rows, seq_lens or blocks out of range, ancestor_bits
/// with a later node or without the node itself, a softmax_scale that is not finite, a
/// logit_softcap that is negative or not finite); DDT_UNSUPPORTED (head dim, query heads per KV
/// head, flags). Nothing has been written then.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_tree_attention(
    context: *const ddt_context,
    params: *const ddt_tree_attention_params,
    stream: *mut c_void,
) -> ddt_status {
    guard("tree_attention", || {
        // SAFETY: the caller vouches for the context, `params` and every pointer and tensor in it.
        unsafe {
            let backend = backend(context)?;
            let params = ptr::versioned(params, "params")?;
            match backend {
                Backend::Cpu(_) => run(&params),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::tree_attention::launch(device, &params, stream),
            }
        }
    })
}

/// # Safety
/// What the parameters point to must be as the header says.
unsafe fn run(params: &ddt_tree_attention_params) -> Result<()> {
    // SAFETY: the caller's promise, for every pointer and tensor.
    unsafe {
        ptr::no_flags(params.flags)?;
        let (tree, dims) = ptr::tree(params.tree, "tree")?;
        tree_attention(TreeAttention {
            query: ptr::tensor(&params.query, 3, "query")?,
            key_cache: ptr::tensor(&params.key_cache, 4, "key_cache")?,
            value_cache: ptr::tensor(&params.value_cache, 4, "value_cache")?,
            block_table: ptr::tensor(&params.block_table, 2, "block_table")?,
            query_start: ptr::input(params.query_start, dims.num_reqs + 1, "query_start")?,
            prefix_rows: ptr::optional_input(params.prefix_rows, dims.num_reqs, "prefix_rows")?,
            seq_lens: ptr::input(params.seq_lens, dims.num_reqs, "seq_lens")?,
            max_nodes: dims.max_nodes,
            num_nodes: ptr::input(tree.num_nodes, dims.num_reqs, "tree.num_nodes")?,
            ancestor_bits: ptr::input(tree.ancestor_bits, dims.bits_len(), "tree.ancestor_bits")?,
            softmax_scale: params.softmax_scale,
            logit_softcap: params.logit_softcap,
            out: ptr::tensor_mut(&params.out, 3, "out")?,
        })
    }
}

/// Bytes of workspace that ddt_tree_attention needs for these parameters; 0 on the CPU.
///
/// Writes: `*out`.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_UNSUPPORTED.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_tree_attention_workspace_size(
    context: *const ddt_context,
    params: *const ddt_tree_attention_params,
    out: *mut usize,
) -> ddt_status {
    guard("tree_attention_workspace_size", || {
        // SAFETY: the caller vouches for the context, the parameters and `out`.
        unsafe {
            let backend = backend(context)?;
            ptr::workspace_size(params, out, |params| match backend {
                Backend::Cpu(_) => Ok(0),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::tree_attention::workspace_bytes(device, params),
            })
        }
    })
}
