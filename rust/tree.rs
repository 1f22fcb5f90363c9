// SPDX-License-Identifier: Apache-2.0
//! The tree data model that all operations share.
//!
//! Node 0 is the root, the last sampled token; `num_nodes` counts it and budgets do not. Nodes
//! are in depth-first preorder with the best child first. So a parent precedes its children, the
//! ancestor test is an interval test, any prefix of the list is a tree, and the greedy spine is
//! nodes 1, 2, 3, ... `pop_ranks` keeps the best-first order beside it.

use crate::error::{Result, bail};

/// Most nodes below the root.
pub const MAX_NODE_BUDGET: usize = 255;
/// Largest depth of a node; the root has depth 0.
pub const MAX_DEPTH: usize = 32;

/// Depth 1 has no usable token: the tree is the root alone.
pub const FLAG_NO_CANDIDATES: u32 = 1;
/// A NaN or +inf score was ignored, or a row that chooses a token has nothing but NaN and -inf.
pub const FLAG_NONFINITE: u32 = 2;
/// A node used the last entry of a candidate list that was shorter than the tree could use.
pub const FLAG_CANDIDATES_EXHAUSTED: u32 = 4;

/// One tree. Every vector has an entry per node, in the order of the module documentation. The
/// default, without even a root, stands for a padding request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tree {
    /// Token ids; -1 where the caller gave none.
    pub tokens: Vec<i32>,
    /// Parent of each node, -1 for the root.
    pub parents: Vec<i32>,
    /// Depth of each node, 0 for the root.
    pub depths: Vec<i32>,
    /// Best child of each node, -1 for none.
    pub first_child: Vec<i32>,
    /// Next worse child of the same parent, -1 for none.
    pub next_sibling: Vec<i32>,
    /// One past the last node of each subtree.
    pub subtree_end: Vec<i32>,
    /// Place of each node in best-first order.
    pub pop_ranks: Vec<i32>,
    /// Position of the root in its sequence; a node's is this plus its depth.
    pub root_position: i64,
}

impl Tree {
    /// Number of nodes, root counted.
    pub fn num_nodes(&self) -> usize {
        self.parents.len()
    }

    /// The nodes from `node` up to the root.
    pub fn path_to_root(&self, node: usize) -> impl Iterator<Item = usize> {
        std::iter::successors(Some(node), |&node| usize::try_from(self.parents[node]).ok())
    }
}

/// Where the rows of one request lie among the `T` rows of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestRows {
    /// First row of the request.
    pub start: usize,
    /// One past its last row.
    pub end: usize,
    /// Nodes of its tree; 0 for a padding request.
    pub num_nodes: usize,
}

impl RequestRows {
    /// Row of tree node `node` of a request without rows before its root.
    pub fn of_node(&self, node: usize) -> usize {
        self.start + node
    }
}

/// Applies the row rule: request `r` owns rows `query_start[r]..query_start[r + 1]` of `num_rows`,
/// enough for the `num_nodes[r]` nodes of its tree; rows that are left over are idle.
pub fn request_rows(query_start: &[i32], num_nodes: &[i32], num_rows: usize) -> Result<Vec<RequestRows>> {
    if query_start.len() != num_nodes.len() + 1 {
        bail!(InvalidShape, "query_start length: got {}, want {}", query_start.len(), num_nodes.len() + 1);
    }
    let mut rows = Vec::with_capacity(num_nodes.len());
    for (r, &nodes) in num_nodes.iter().enumerate() {
        let (start, end) = (query_start[r], query_start[r + 1]);
        if start < 0 || end < start || end as usize > num_rows {
            bail!(
                InvalidValue,
                "query_start[{r}] and [{}]: got {start} and {end}, want 0 <= first <= second <= {num_rows}",
                r + 1
            );
        }
        let most = (end - start).min(MAX_NODE_BUDGET as i32 + 1);
        if !(0..=most).contains(&nodes) {
            bail!(
                InvalidValue,
                "tree.num_nodes[{r}]: got {nodes}, want 0..={most} (its rows, at most {})",
                MAX_NODE_BUDGET + 1
            );
        }
        rows.push(RequestRows { start: start as usize, end: end as usize, num_nodes: nodes as usize });
    }
    Ok(rows)
}
