// SPDX-License-Identifier: Apache-2.0
//! `ddt_tree_accept`.

use std::ffi::c_void;

use super::context::{Backend, backend, ddt_context};
use super::guard::guard;
use super::ptr::{self, Output, TreeDims};
use super::status::ddt_status;
use super::types::{ddt_tree, ddt_tree_accept_params};
use crate::dtype::DType;
use crate::error::{Error, Result, bail};
use crate::gumbel::GumbelNoise;
use crate::tensor::TensorRef;
use crate::tree::{FLAG_NONFINITE, RequestRows, request_rows};
use crate::tree_accept::{AcceptedPath, TreeLinks, greedy_choice, sampled_choice, tree_accept};

/// Walks each tree from its root along the target's choices until no child has the chosen token,
/// which is then the bonus token.
///
/// A choice is the largest logit of the node's row, a token sampled from the row by its seed and
/// position, or the caller's sampled token: with tokens sampled from the target, the output is what
/// the target alone would have produced.
///
/// Writes: num_accepted, accepted_nodes, output_tokens, accepted_rows, next_positions and
/// num_rejected, padding included. Sets DDT_FLAG_NONFINITE in tree.flags, if that is not NULL, for
/// a request with a visited row that has a NaN or nothing above -inf.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT. DDT_INVALID_SHAPE (V not in 1 to
/// 2^31 - 1). DDT_INVALID_DTYPE. DDT_INVALID_VALUE (both or neither of logits and node_tokens;
/// temperatures with node_tokens; one of temperatures and seeds without the other; query_start or
/// num_nodes out of range; links that do not lead to a later node; an accepted path longer than
/// max_depth). DDT_UNSUPPORTED (unknown flags).
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

/// Checks what does not depend on values: the logits, `None` if the caller chose.
///
/// # Safety
/// As for [`ptr::tensor`].
pub(crate) unsafe fn tree_accept_logits<'a>(
    params: &ddt_tree_accept_params,
) -> Result<Option<TensorRef<'a>>> {
    ptr::no_flags(params.flags)?;
    let has_tokens = !params.node_tokens.is_null();
    if has_tokens != ptr::is_absent(&params.logits) {
        let got = if has_tokens { "both" } else { "neither" };
        bail!(InvalidValue, "logits and node_tokens: got {got}, want exactly one");
    }
    if params.temperatures.is_null() != params.seeds.is_null() {
        let got = if params.seeds.is_null() { "temperatures" } else { "seeds" };
        bail!(InvalidValue, "temperatures and seeds: got {got} alone, want both or neither");
    }
    if has_tokens {
        if !params.temperatures.is_null() {
            bail!(InvalidValue, "temperatures: got them with node_tokens, want logits to sample from");
        }
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let logits = unsafe { ptr::tensor(&params.logits, 2, "logits") }?;
    logits.want_dtype("logits", DType::FLOATS)?;
    let vocab = logits.shape()[1];
    if !(1..=i32::MAX as usize).contains(&vocab) {
        bail!(InvalidShape, "logits vocabulary: got {vocab}, want 1..2^31 (token ids are i32)");
    }
    Ok(Some(logits))
}

/// What the target chose, or chooses from.
enum Choices<'a> {
    /// `[T, V]`, and how to sample from it.
    Logits(TensorRef<'a>, Option<Sampling<'a>>),
    /// `[T]`
    Tokens(&'a [i64]),
}

/// `[R]` each.
#[derive(Clone, Copy)]
struct Sampling<'a> {
    temperatures: &'a [f32],
    seeds: &'a [i64],
}

/// Everything that a call reads.
struct Inputs<'a> {
    dims: TreeDims,
    rows: Vec<RequestRows>,
    links: TreeLinks<'a>,
    /// `[R][N]`, present if anything needs them.
    positions: Option<&'a [i64]>,
    choices: Choices<'a>,
}

impl<'a> Inputs<'a> {
    /// # Safety
    /// What the parameters point to must be as the header says.
    unsafe fn new(params: &ddt_tree_accept_params, tree: &ddt_tree, dims: TreeDims) -> Result<Self> {
        let slots = dims.num_slots();
        // SAFETY: the caller's promise, for every pointer.
        unsafe {
            let logits = tree_accept_logits(params)?;
            let num_nodes = ptr::num_nodes(tree, dims, "tree")?;
            let query_start = ptr::input(params.query_start, dims.num_reqs + 1, "query_start")?;
            let links = TreeLinks {
                tokens: ptr::input(tree.tokens, slots, "tree.tokens")?,
                first_child: ptr::input(tree.first_child, slots, "tree.first_child")?,
                next_sibling: ptr::input(tree.next_sibling, slots, "tree.next_sibling")?,
            };
            let needs_positions = !params.temperatures.is_null() || !params.next_positions.is_null();
            let positions =
                needs_positions.then(|| ptr::input(tree.positions, slots, "tree.positions")).transpose()?;
            let num_rows = logits.map_or(i32::MAX as usize, |logits| logits.shape()[0]);
            let rows = request_rows(query_start, num_nodes, num_rows)?;
            let choices = match logits {
                None => {
                    // the caller's array is as long as the last row that query_start names
                    let num_rows = rows.last().map_or(0, |rows| rows.end);
                    Choices::Tokens(ptr::input(params.node_tokens, num_rows, "node_tokens")?)
                }
                Some(logits) if params.temperatures.is_null() => Choices::Logits(logits, None),
                Some(logits) => {
                    let temperatures = ptr::input(params.temperatures, dims.num_reqs, "temperatures")?;
                    let seeds = ptr::input(params.seeds, dims.num_reqs, "seeds")?;
                    Choices::Logits(logits, Some(Sampling { temperatures, seeds }))
                }
            };
            Ok(Self { dims, rows, links, positions, choices })
        }
    }

    /// Position of a node of request `r`.
    fn position(&self, r: usize, node: usize) -> i64 {
        self.positions.map_or(0, |positions| positions[r * self.dims.max_nodes + node])
    }

    /// The noise of a node's row, `None` if the request is greedy.
    fn noise(&self, sampling: Option<Sampling<'a>>, r: usize, node: usize) -> Option<GumbelNoise> {
        let sampling = sampling.filter(|sampling| sampling.temperatures[r] != 0.0)?;
        Some(GumbelNoise::new(sampling.seeds[r], self.position(r, node)))
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
            Choices::Logits(logits, sampling) => {
                let row = logits.at(rows.of_node(node));
                let choice = match self.noise(sampling, r, node) {
                    Some(noise) => sampled_choice(row, noise),
                    None => greedy_choice(row),
                };
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
    let (inputs, mut outputs) = unsafe {
        let (tree, dims) = ptr::tree(params.tree, "tree")?;
        let TreeDims { num_reqs, max_depth, .. } = dims;
        let path_len = num_reqs * (max_depth + 1);
        (
            Inputs::new(params, &tree, dims)?,
            Outputs {
                num_accepted: ptr::output(params.num_accepted, num_reqs, "num_accepted")?,
                accepted_nodes: ptr::output(params.accepted_nodes, num_reqs * max_depth, "accepted_nodes")?,
                output_tokens: ptr::output(params.output_tokens, path_len, "output_tokens")?,
                accepted_rows: ptr::optional_output(params.accepted_rows, path_len, "accepted_rows")?,
                next_positions: ptr::optional_output(params.next_positions, num_reqs, "next_positions")?,
                num_rejected: ptr::optional_output(params.num_rejected, num_reqs, "num_rejected")?,
                tree_flags: ptr::optional_output(tree.flags, num_reqs, "tree.flags")?,
            },
        )
    };
    // all requests first: an error in the last one must leave the first one's row alone
    let paths = (0..inputs.dims.num_reqs).map(|r| inputs.accept(r)).collect::<Result<Vec<_>>>()?;
    for (r, accepted) in paths.iter().enumerate() {
        outputs.write(&inputs, r, accepted.as_ref());
    }
    Ok(())
}

/// Everything that a call writes.
struct Outputs {
    num_accepted: Output<i32>,
    accepted_nodes: Output<i32>,
    output_tokens: Output<i64>,
    accepted_rows: Option<Output<i32>>,
    next_positions: Option<Output<i64>>,
    num_rejected: Option<Output<i32>>,
    tree_flags: Option<Output<u32>>,
}

impl Outputs {
    /// Writes the row of request `r`, `None` for a padding request.
    fn write(&mut self, inputs: &Inputs<'_>, r: usize, accepted: Option<&(AcceptedPath, u32)>) {
        let max_depth = inputs.dims.max_depth;
        let rows = inputs.rows[r];
        let path = accepted.map(|(path, _)| path);
        let num_accepted = path.map_or(0, |path| path.nodes.len());
        self.num_accepted.write(r, path.map_or(-1, |_| num_accepted as i32));
        let nodes = path.iter().flat_map(|path| path.nodes.iter().copied());
        self.accepted_nodes.write_row(r * max_depth, max_depth, nodes.clone(), -1);
        let tokens = path.iter().flat_map(|path| path.tokens.iter().copied());
        self.output_tokens.write_row(r * (max_depth + 1), max_depth + 1, tokens, -1);
        if let Some(accepted_rows) = &mut self.accepted_rows {
            let root = path.iter().map(|_| 0);
            let path_rows = root.chain(nodes).map(|node| rows.of_node(node as usize) as i32);
            accepted_rows.write_row(r * (max_depth + 1), max_depth + 1, path_rows, -1);
        }
        if let Some(next_positions) = &mut self.next_positions {
            let next = path.map(|_| inputs.position(r, 0).wrapping_add(num_accepted as i64 + 1));
            next_positions.write(r, next.unwrap_or(0));
        }
        if let Some(num_rejected) = &mut self.num_rejected {
            let rejected = path.map(|_| rows.end - rows.start - 1 - num_accepted);
            num_rejected.write(r, rejected.unwrap_or(0) as i32);
        }
        if let (Some(tree_flags), Some((_, flags))) = (&mut self.tree_flags, accepted) {
            tree_flags.set_bits(r, *flags);
        }
    }
}
