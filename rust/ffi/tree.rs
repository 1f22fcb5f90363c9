// SPDX-License-Identifier: Apache-2.0
//! `ddt_tree` as an output: what tree_build and tree_mask write.

use super::ptr::{Output, TreeDims, optional_output, output};
use super::types::ddt_tree;
use crate::error::Result;
use crate::tree::Tree;

/// The checked fields of a `ddt_tree`.
pub(crate) struct TreeOutput {
    dims: TreeDims,
    num_nodes: Output<i32>,
    tokens: Option<Output<i32>>,
    parents: Option<Output<i32>>,
    depths: Option<Output<i32>>,
    first_child: Option<Output<i32>>,
    next_sibling: Option<Output<i32>>,
    subtree_end: Option<Output<i32>>,
    ancestor_bits: Option<Output<u32>>,
    ancestors: Option<Output<i32>>,
    positions: Option<Output<i64>>,
    pop_ranks: Option<Output<i32>>,
    flags: Option<Output<u32>>,
}

impl TreeOutput {
    /// Checks the pointers of all fields.
    ///
    /// # Safety
    /// Each field must be NULL or writable for its length until the call ends.
    pub(crate) unsafe fn new(tree: &ddt_tree, dims: TreeDims) -> Result<Self> {
        let slots = dims.num_slots();
        // SAFETY: the caller's promise, for every field.
        unsafe {
            Ok(Self {
                dims,
                num_nodes: output(tree.num_nodes, dims.num_reqs, "tree.num_nodes")?,
                tokens: optional_output(tree.tokens, slots, "tree.tokens")?,
                parents: optional_output(tree.parents, slots, "tree.parents")?,
                depths: optional_output(tree.depths, slots, "tree.depths")?,
                first_child: optional_output(tree.first_child, slots, "tree.first_child")?,
                next_sibling: optional_output(tree.next_sibling, slots, "tree.next_sibling")?,
                subtree_end: optional_output(tree.subtree_end, slots, "tree.subtree_end")?,
                ancestor_bits: optional_output(tree.ancestor_bits, dims.bits_len(), "tree.ancestor_bits")?,
                ancestors: optional_output(tree.ancestors, dims.ancestors_len(), "tree.ancestors")?,
                positions: optional_output(tree.positions, slots, "tree.positions")?,
                pop_ranks: optional_output(tree.pop_ranks, slots, "tree.pop_ranks")?,
                flags: optional_output(tree.flags, dims.num_reqs, "tree.flags")?,
            })
        }
    }

    /// Writes the row of request `r`; a tree without nodes makes it a padding request.
    pub(crate) fn write(&mut self, r: usize, tree: &Tree, flags: u32) {
        let n = self.dims.max_nodes;
        let write_nodes = |out: &mut Option<Output<i32>>, values: &[i32], padding: i32| {
            if let Some(out) = out {
                out.write_row(r * n, n, values.iter().copied(), padding);
            }
        };
        write_nodes(&mut self.tokens, &tree.tokens, -1);
        write_nodes(&mut self.parents, &tree.parents, -1);
        write_nodes(&mut self.depths, &tree.depths, -1);
        write_nodes(&mut self.first_child, &tree.first_child, -1);
        write_nodes(&mut self.next_sibling, &tree.next_sibling, -1);
        write_nodes(&mut self.subtree_end, &tree.subtree_end, 0);
        write_nodes(&mut self.pop_ranks, &tree.pop_ranks, -1);

        self.num_nodes.write(r, tree.num_nodes() as i32);
        if let Some(out) = &mut self.flags {
            out.write(r, flags);
        }
        if let Some(out) = &mut self.positions {
            let positions = tree.depths.iter().map(|&depth| tree.root_position + i64::from(depth));
            out.write_row(r * n, n, positions, 0);
        }
        if let Some(out) = &mut self.ancestor_bits {
            let words = self.dims.words();
            out.fill(r * n * words, (r + 1) * n * words, 0);
            for i in 0..tree.num_nodes() {
                for j in tree.path_to_root(i) {
                    out.set_bits((r * n + i) * words + j / 32, 1 << (j % 32));
                }
            }
        }
        if let Some(out) = &mut self.ancestors {
            let row = self.dims.max_depth + 1;
            out.fill(r * n * row, (r + 1) * n * row, -1);
            for i in 0..tree.num_nodes() {
                for j in tree.path_to_root(i) {
                    out.write((r * n + i) * row + tree.depths[j] as usize, j as i32);
                }
            }
        }
    }
}
