// SPDX-License-Identifier: Apache-2.0
//! Trees by parents, and the fields of a batch made from them the obvious way.

use std::ptr::null_mut;

use ddtree::ffi::ddt_tree;

use super::numbers::Rng;

/// Fields hold this where no operation may look.
const POISON: i32 = i32::MIN;

/// Parents in depth-first preorder; -1 for the root.
pub type Parents = Vec<i32>;

pub fn chain(num_nodes: usize) -> Parents {
    (0..num_nodes as i32).map(|node| node - 1).collect()
}

pub fn star(num_nodes: usize) -> Parents {
    (0..num_nodes as i32).map(|node| if node == 0 { -1 } else { 0 }).collect()
}

/// Any preorder tree: each node hangs from some node on the path of the one before it.
pub fn random(rng: &mut Rng, num_nodes: usize, max_depth: usize) -> Parents {
    let mut parents = vec![-1];
    let descend = rng.uniform(0.2, 1.0);
    while parents.len() < num_nodes {
        let path = path(&parents, parents.len() - 1);
        let deepest = path.len().min(max_depth);
        let depth = if rng.uniform(0.0, 1.0) < descend { deepest } else { 1 + rng.below(deepest) };
        parents.push(path[depth - 1] as i32);
    }
    parents
}

/// A chain of the largest depth with short side branches.
pub fn deep(rng: &mut Rng, max_depth: usize) -> Parents {
    let mut parents = chain(max_depth + 1);
    for _ in 0..10 {
        let path = path(&parents, parents.len() - 1);
        parents.push(path[rng.below(path.len() - 1)] as i32);
    }
    parents
}

/// The nodes from the root to `node`.
pub fn path(parents: &[i32], node: usize) -> Vec<usize> {
    let mut path = vec![node];
    while parents[path[path.len() - 1]] >= 0 {
        path.push(parents[path[path.len() - 1]] as usize);
    }
    path.reverse();
    path
}

/// The tree fields of a batch. A padding request has no parents.
#[derive(Clone)]
pub struct Batch {
    pub trees: Vec<Parents>,
    pub max_nodes: usize,
    pub max_depth: usize,
    pub num_nodes: Vec<i32>,
    pub parents: Vec<i32>,
    pub depths: Vec<i32>,
    pub ancestor_bits: Vec<u32>,
    pub ancestors: Vec<i32>,
}

impl Batch {
    pub fn new(trees: Vec<Parents>, max_nodes: usize, max_depth: usize) -> Self {
        let slots = trees.len() * max_nodes;
        let words = max_nodes.div_ceil(32);
        let mut batch = Self {
            max_nodes,
            max_depth,
            num_nodes: trees.iter().map(|tree| tree.len() as i32).collect(),
            parents: vec![POISON; slots],
            depths: vec![POISON; slots],
            ancestor_bits: vec![POISON as u32; slots * words],
            ancestors: vec![POISON; slots * (max_depth + 1)],
            trees,
        };
        for (r, tree) in batch.trees.iter().enumerate() {
            for node in 0..tree.len() {
                let slot = r * max_nodes + node;
                let path = path(tree, node);
                batch.parents[slot] = tree[node];
                batch.depths[slot] = path.len() as i32 - 1;
                batch.ancestor_bits[slot * words..][..words].fill(0);
                for (depth, &ancestor) in path.iter().enumerate() {
                    batch.ancestors[slot * (max_depth + 1) + depth] = ancestor as i32;
                    batch.ancestor_bits[slot * words + ancestor / 32] |= 1 << (ancestor % 32);
                }
            }
        }
        batch
    }

    /// What the C ABI takes; only the fields of this struct are set.
    pub fn tree(&mut self) -> ddt_tree {
        ddt_tree {
            struct_size: size_of::<ddt_tree>() as u32,
            num_reqs: self.trees.len() as i32,
            max_nodes: self.max_nodes as i32,
            max_depth: self.max_depth as i32,
            num_nodes: self.num_nodes.as_mut_ptr(),
            tokens: null_mut(),
            parents: self.parents.as_mut_ptr(),
            depths: self.depths.as_mut_ptr(),
            first_child: null_mut(),
            next_sibling: null_mut(),
            subtree_end: null_mut(),
            ancestor_bits: self.ancestor_bits.as_mut_ptr(),
            ancestors: self.ancestors.as_mut_ptr(),
            positions: null_mut(),
            pop_ranks: null_mut(),
            flags: null_mut(),
        }
    }
}
