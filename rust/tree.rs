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

/// Where the rows of one request lie among the `T` rows of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestRows {
    /// First row of the request.
    pub start: usize,
    /// One past its last row.
    pub end: usize,
    /// Nodes of its tree, which are the last rows; 0 for a padding request.
    pub num_nodes: usize,
}

impl RequestRows {
    /// Row of tree node `node`.
    pub fn of_node(&self, node: usize) -> usize {
        self.end - self.num_nodes + node
    }
}

/// Applies the row rule: request `r` owns rows `query_start[r]..query_start[r + 1]` of `num_rows`,
/// and the last `num_nodes[r]` of them are its tree.
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
        if nodes < 0 || nodes as usize > MAX_NODE_BUDGET + 1 || nodes > end - start {
            bail!(
                InvalidValue,
                "tree.num_nodes[{r}]: got {nodes}, want 0..={} (rows of the request, at most {})",
                (end - start).min(MAX_NODE_BUDGET as i32 + 1),
                MAX_NODE_BUDGET + 1
            );
        }
        rows.push(RequestRows { start: start as usize, end: end as usize, num_nodes: nodes as usize });
    }
    Ok(rows)
}
