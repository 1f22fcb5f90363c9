// SPDX-License-Identifier: Apache-2.0
//! Any parent array as a [`Tree`]: depth-first preorder, siblings by priority.

use crate::error::{Result, bail};
use crate::tree::{MAX_DEPTH, MAX_NODE_BUDGET, Tree};

const NONE: usize = usize::MAX;

/// The topology of one tree as the caller numbers it; node 0 is the root.
#[derive(Clone, Copy, Debug)]
pub struct Topology<'a> {
    /// `parents[0] = -1`, `0 <= parents[i] < i`.
    pub parents: &'a [i32],
    /// Token ids.
    pub tokens: Option<&'a [i32]>,
    /// Siblings are ordered by it, lower first, ties by index. The default is the index.
    pub priorities: Option<&'a [i32]>,
    /// Position of the root, >= 0.
    pub root_position: i64,
}

/// Renumbers a tree to depth-first preorder. The second value is the old index of each new node.
/// `pop_ranks` is the priority of each node.
///
/// # Errors
/// `InvalidShape`: no node, too many, or arrays of different lengths. `InvalidValue`: a parent that
/// does not precede its child (so no cycle passes), a depth above [`MAX_DEPTH`], a bad position.
pub fn tree_mask(topology: &Topology<'_>) -> Result<(Tree, Vec<i32>)> {
    let Topology { parents, tokens, priorities, root_position } = *topology;
    let num_nodes = parents.len();
    if !(1..=MAX_NODE_BUDGET + 1).contains(&num_nodes) {
        bail!(InvalidShape, "parents length: got {num_nodes}, want 1..={}", MAX_NODE_BUDGET + 1);
    }
    for (name, values) in [("tokens", tokens), ("priorities", priorities)] {
        if let Some(values) = values.filter(|values| values.len() != num_nodes) {
            bail!(InvalidShape, "{name} length: got {}, want {num_nodes} (parents)", values.len());
        }
    }
    if !(0..=i64::MAX - MAX_DEPTH as i64).contains(&root_position) {
        bail!(InvalidValue, "root position: got {root_position}, want 0..=2^63 - {}", MAX_DEPTH + 1);
    }
    let old_depths = depths(parents)?;
    let priority = |i: usize| priorities.map_or(i as i32, |priorities| priorities[i]);

    // linked child lists, filled from the worst node to the best
    let mut by_priority: Vec<usize> = (1..num_nodes).collect();
    by_priority.sort_by_key(|&i| (priority(i), i));
    let mut first_child = vec![NONE; num_nodes];
    let mut next_sibling = vec![NONE; num_nodes];
    for &i in by_priority.iter().rev() {
        let parent = parents[i] as usize;
        next_sibling[i] = first_child[parent];
        first_child[parent] = i;
    }

    let mut order = Vec::with_capacity(num_nodes);
    let mut new_index = vec![-1; num_nodes];
    let mut pending = vec![0];
    while let Some(i) = pending.pop() {
        new_index[i] = order.len() as i32;
        order.push(i);
        pending.extend([next_sibling[i], first_child[i]].into_iter().filter(|&i| i != NONE));
    }

    let in_order = |value: &dyn Fn(usize) -> i32| -> Vec<i32> { order.iter().map(|&i| value(i)).collect() };
    let renumbered = |i: usize| if i == NONE { -1 } else { new_index[i] };
    let tree = Tree {
        tokens: in_order(&|i| tokens.map_or(-1, |tokens| tokens[i])),
        parents: in_order(&|i| if i == 0 { -1 } else { new_index[parents[i] as usize] }),
        depths: in_order(&|i| old_depths[i]),
        first_child: in_order(&|i| renumbered(first_child[i])),
        next_sibling: in_order(&|i| renumbered(next_sibling[i])),
        subtree_end: Vec::new(),
        pop_ranks: in_order(&priority),
        root_position,
    };
    let subtree_end = subtree_ends(&tree.parents);
    Ok((Tree { subtree_end, ..tree }, in_order(&|i| i as i32)))
}

/// Checks the parents and returns the depth of each node.
fn depths(parents: &[i32]) -> Result<Vec<i32>> {
    if parents[0] != -1 {
        bail!(InvalidValue, "parents[0]: got {}, want -1 (the root)", parents[0]);
    }
    let mut depths = vec![0];
    for (i, &parent) in parents.iter().enumerate().skip(1) {
        if parent < 0 || parent as usize >= i {
            bail!(
                InvalidValue,
                "parents[{i}]: got {parent}, want 0..={} (a parent precedes its children)",
                i - 1
            );
        }
        let depth = depths[parent as usize] + 1;
        if depth > MAX_DEPTH as i32 {
            bail!(InvalidValue, "depth of node {i}: got {depth}, want at most {MAX_DEPTH}");
        }
        depths.push(depth);
    }
    Ok(depths)
}

/// One past the last node of each subtree, for parents in depth-first preorder.
fn subtree_ends(parents: &[i32]) -> Vec<i32> {
    let mut ends: Vec<i32> = (1..=parents.len() as i32).collect();
    for i in (1..parents.len()).rev() {
        let parent = parents[i] as usize;
        ends[parent] = ends[parent].max(ends[i]);
    }
    ends
}
