// SPDX-License-Identifier: Apache-2.0
//! `ddt_tree_mask`.

use std::ffi::c_void;

use super::context::{Backend, backend, ddt_context};
use super::guard::guard;
use super::ptr::{self, TreeDims};
use super::status::ddt_status;
use super::tree::TreeOutput;
use super::types::ddt_tree_mask_params;
use crate::error::{Error, Result, bail};
use crate::tree::Tree;
use crate::tree_mask::{Topology, tree_mask};

/// Lays out trees that the caller built: renumbers each to depth-first preorder and derives every
/// field of ddt_tree from the parents.
///
/// Writes: every field of tree that is not NULL (flags 0); order.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT. DDT_INVALID_SHAPE (num_reqs or
/// max_nodes differ from the tree's). DDT_INVALID_VALUE (num_nodes or a position out of range, a
/// parent that does not precede its child, a node deeper than the tree's max_depth).
/// DDT_UNSUPPORTED (unknown flags).
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_tree_mask(
    context: *const ddt_context,
    params: *const ddt_tree_mask_params,
    stream: *mut c_void,
) -> ddt_status {
    guard("tree_mask", || {
        // SAFETY: the caller vouches for the context, the parameters and what they point to.
        unsafe {
            let backend = backend(context)?;
            let params = ptr::versioned(params, "params")?;
            match backend {
                Backend::Cpu(_) => run(&params),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::tree_mask::launch(device, &params, stream),
            }
        }
    })
}

/// Checks what is no pointer.
pub(crate) fn check_scalars(params: &ddt_tree_mask_params, dims: TreeDims) -> Result<()> {
    ptr::no_flags(params.flags)?;
    for (name, got, want) in
        [("num_reqs", params.num_reqs, dims.num_reqs), ("max_nodes", params.max_nodes, dims.max_nodes)]
    {
        if usize::try_from(got) != Ok(want) {
            bail!(InvalidShape, "params.{name}: got {got}, want {want} (the tree's)");
        }
    }
    Ok(())
}

/// Everything that a call reads.
struct Inputs<'a> {
    dims: TreeDims,
    num_nodes: &'a [i32],
    tokens: Option<&'a [i32]>,
    parents: &'a [i32],
    priorities: Option<&'a [i32]>,
    root_positions: Option<&'a [i64]>,
}

impl<'a> Inputs<'a> {
    /// # Safety
    /// What the parameters point to must be as the header says.
    unsafe fn new(params: &ddt_tree_mask_params, dims: TreeDims) -> Result<Self> {
        check_scalars(params, dims)?;
        let (num_reqs, slots) = (dims.num_reqs, dims.num_slots());
        // SAFETY: the caller's promise, for every pointer.
        unsafe {
            Ok(Self {
                dims,
                num_nodes: ptr::input(params.num_nodes, num_reqs, "num_nodes")?,
                tokens: ptr::optional_input(params.tokens, slots, "tokens")?,
                parents: ptr::input(params.parents, slots, "parents")?,
                priorities: ptr::optional_input(params.priorities, slots, "priorities")?,
                root_positions: ptr::optional_input(params.root_positions, num_reqs, "root_positions")?,
            })
        }
    }

    /// Tree and order of request `r`, without nodes for a padding request.
    fn lay_out(&self, r: usize) -> Result<(Tree, Vec<i32>)> {
        let TreeDims { max_nodes, max_depth, .. } = self.dims;
        let count = match self.num_nodes[r] {
            0 => return Ok((Tree::default(), Vec::new())),
            count if (1..=max_nodes as i32).contains(&count) => count as usize,
            count => bail!(InvalidValue, "num_nodes[{r}]: got {count}, want 0..={max_nodes}"),
        };
        let row = |values: &'a [i32]| &values[r * max_nodes..][..count];
        let (tree, order) = tree_mask(&Topology {
            parents: row(self.parents),
            tokens: self.tokens.map(row),
            priorities: self.priorities.map(row),
            root_position: self.root_positions.map_or(0, |positions| positions[r]),
        })
        .map_err(|error| Error::new(error.status(), format!("request {r}: {error}")))?;
        if let Some(node) = tree.depths.iter().position(|&depth| depth as usize > max_depth) {
            bail!(
                InvalidValue,
                "request {r}: depth of node {}: got {}, want at most {max_depth} (tree.max_depth)",
                order[node],
                tree.depths[node]
            );
        }
        Ok((tree, order))
    }
}

/// # Safety
/// What the parameters point to must be as the header says.
unsafe fn run(params: &ddt_tree_mask_params) -> Result<()> {
    // SAFETY: the caller's promise.
    let (mut out, mut order, inputs) = unsafe {
        let (tree, dims) = ptr::tree(params.tree, "tree")?;
        (
            TreeOutput::new(&tree, dims)?,
            ptr::optional_output(params.order, dims.num_slots(), "order")?,
            Inputs::new(params, dims)?,
        )
    };
    let TreeDims { num_reqs, max_nodes, .. } = inputs.dims;
    // all requests first: an error in the last one must leave the first one's row alone
    let trees = (0..num_reqs).map(|r| inputs.lay_out(r)).collect::<Result<Vec<_>>>()?;
    for (r, (tree, old_index)) in trees.iter().enumerate() {
        out.write(r, tree, 0);
        if let Some(order) = &mut order {
            order.write_row(r * max_nodes, max_nodes, old_index.iter().copied(), -1);
        }
    }
    Ok(())
}
