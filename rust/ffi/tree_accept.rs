// SPDX-License-Identifier: Apache-2.0
//! `ddt_tree_accept`.

use std::ffi::c_void;

use super::context::{Backend, backend, ddt_context};
use super::guard::guard;
use super::ptr::{self, TreeDims};
use super::status::ddt_status;
use super::types::{ddt_tree, ddt_tree_accept_params};
use crate::dtype::DType;
use crate::error::{Error, Result, bail};
use crate::tensor::TensorRef;
use crate::tree::{FLAG_NONFINITE, RequestRows, request_rows};
use crate::tree_accept::{AcceptedPath, TreeLinks, greedy_choice, tree_accept};

/// Walks each tree from its root along the target's choices until no child has the chosen token,
/// which is then the bonus token.
///
/// A choice is the largest logit of the node's row, or the caller's sampled token: with tokens
/// sampled from the target, the output is what the target alone would have produced.
///
/// Writes: num_accepted, accepted_nodes, output_tokens, padding included. Sets DDT_FLAG_NONFINITE
/// in tree.flags, if that is not NULL, for a request with a visited row that has a NaN or nothing
/// above -inf.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT. DDT_INVALID_SHAPE (V not in 1 to
/// 2^31 - 1). DDT_INVALID_DTYPE. DDT_INVALID_VALUE (both or neither of logits and node_tokens;
/// query_start or num_nodes out of range; links that do not lead to a later node; an accepted
/// path longer than max_depth). DDT_UNSUPPORTED (unknown flags).
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_tree_accept(
    context: *const ddt_context,
    params: *const ddt_tree_accept_params,
    stream: *mut c_void,
) -> ddt_status {
    guard("tree_accept", || {
        // SAFETY: the caller vouches for the context, the parameters and what they point to.
        unsafe {
            let backend = backend(context)?;
            let params = ptr::versioned(params, "params")?;
            match backend {
                Backend::Cpu(_) => run(&params),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::tree_accept::launch(device, &params, stream),
            }
        }
    })
}

/// Bytes of workspace that ddt_tree_accept needs for these parameters; 0 on the CPU.
///
/// Writes: `*out`.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_UNSUPPORTED.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_tree_accept_workspace_size(
    context: *const ddt_context,
    params: *const ddt_tree_accept_params,
    out: *mut usize,
) -> ddt_status {
    guard("tree_accept_workspace_size", || {
        // SAFETY: the caller vouches for the context, the parameters and `out`.
        unsafe {
            let backend = backend(context)?;
            ptr::workspace_size(params, out, |params| match backend {
                Backend::Cpu(_) => Ok(0),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::tree_accept::workspace_bytes(device, params),
            })
        }
    })
}

/// What the target chose.
enum Choices<'a> {
    /// `[T, V]`
    Logits(TensorRef<'a>),
    /// `[T]`
    Tokens(&'a [i64]),
}

/// Everything that a call reads.
struct Inputs<'a> {
    dims: TreeDims,
    rows: Vec<RequestRows>,
    links: TreeLinks<'a>,
    choices: Choices<'a>,
}

impl<'a> Inputs<'a> {
    /// # Safety
    /// What the parameters point to must be as the header says.
    unsafe fn new(params: &ddt_tree_accept_params, tree: &ddt_tree, dims: TreeDims) -> Result<Self> {
        ptr::no_flags(params.flags)?;
        let has_tokens = !params.node_tokens.is_null();
        if has_tokens != ptr::is_absent(&params.logits) {
            let got = if has_tokens { "both" } else { "neither" };
            bail!(InvalidValue, "logits and node_tokens: got {got}, want exactly one");
        }
        let slots = dims.num_slots();
        // SAFETY: the caller's promise, for every pointer.
        unsafe {
            let num_nodes = ptr::num_nodes(tree, dims)?;
            let query_start = ptr::input(params.query_start, dims.num_reqs + 1, "query_start")?;
            let links = TreeLinks {
                tokens: ptr::input(tree.tokens, slots, "tree.tokens")?,
                first_child: ptr::input(tree.first_child, slots, "tree.first_child")?,
                next_sibling: ptr::input(tree.next_sibling, slots, "tree.next_sibling")?,
            };
            if has_tokens {
                // the caller's array is as long as the last row that query_start names
                let rows = request_rows(query_start, num_nodes, i32::MAX as usize)?;
                let num_rows = rows.last().map_or(0, |rows| rows.end);
                let tokens = ptr::input(params.node_tokens, num_rows, "node_tokens")?;
                return Ok(Self { dims, rows, links, choices: Choices::Tokens(tokens) });
            }
            let logits = ptr::tensor(&params.logits, 2, "logits")?;
            logits.want_dtype("logits", DType::FLOATS)?;
            let (num_rows, vocab) = (logits.shape()[0], logits.shape()[1]);
            if !(1..=i32::MAX as usize).contains(&vocab) {
                bail!(InvalidShape, "logits vocabulary: got {vocab}, want 1..2^31 (token ids are i32)");
            }
            let rows = request_rows(query_start, num_nodes, num_rows)?;
            Ok(Self { dims, rows, links, choices: Choices::Logits(logits) })
        }
    }

    /// Path and flag bits of request `r`, `None` for a padding request.
    fn accept(&self, r: usize) -> Result<Option<(AcceptedPath, u32)>> {
        let rows = self.rows[r];
        if rows.num_nodes == 0 {
            return Ok(None);
        }
        let row = |values: &'a [i32]| &values[r * self.dims.max_nodes..][..rows.num_nodes];
        let links = TreeLinks {
            tokens: row(self.links.tokens),
            first_child: row(self.links.first_child),
            next_sibling: row(self.links.next_sibling),
        };
        let mut flags = 0;
        let path = tree_accept(&links, self.dims.max_depth, |node| match self.choices {
            Choices::Tokens(tokens) => tokens[rows.of_node(node)],
            Choices::Logits(logits) => {
                let choice = greedy_choice(logits.at(rows.of_node(node)));
                if choice.is_nonfinite {
                    flags |= FLAG_NONFINITE;
                }
                choice.token
            }
        })
        .map_err(|error| Error::new(error.status(), format!("request {r}: {error}")))?;
        Ok(Some((path, flags)))
    }
}

/// # Safety
/// What the parameters point to must be as the header says.
unsafe fn run(params: &ddt_tree_accept_params) -> Result<()> {
    // SAFETY: the caller's promise.
    let (inputs, mut num_accepted, mut accepted_nodes, mut output_tokens, mut tree_flags) = unsafe {
        let (tree, dims) = ptr::tree(params.tree)?;
        let TreeDims { num_reqs, max_depth, .. } = dims;
        (
            Inputs::new(params, &tree, dims)?,
            ptr::output(params.num_accepted, num_reqs, "num_accepted")?,
            ptr::output(params.accepted_nodes, num_reqs * max_depth, "accepted_nodes")?,
            ptr::output(params.output_tokens, num_reqs * (max_depth + 1), "output_tokens")?,
            ptr::optional_output(tree.flags, num_reqs, "tree.flags")?,
        )
    };
    let TreeDims { num_reqs, max_depth, .. } = inputs.dims;
    // all requests first: an error in the last one must leave the first one's row alone
    let paths = (0..num_reqs).map(|r| inputs.accept(r)).collect::<Result<Vec<_>>>()?;
    for (r, accepted) in paths.iter().enumerate() {
        let path = accepted.as_ref().map(|(path, _)| path);
        num_accepted.write(r, path.map_or(-1, |path| path.nodes.len() as i32));
        let nodes = path.iter().flat_map(|path| path.nodes.iter().copied());
        accepted_nodes.write_row(r * max_depth, max_depth, nodes, -1);
        let tokens = path.iter().flat_map(|path| path.tokens.iter().copied());
        output_tokens.write_row(r * (max_depth + 1), max_depth + 1, tokens, -1);
        if let (Some(tree_flags), Some((_, flags))) = (&mut tree_flags, accepted) {
            tree_flags.set_bits(r, *flags);
        }
    }
    Ok(())
}
