// SPDX-License-Identifier: Apache-2.0
//! Poisoned caller memory for calls through the C ABI.

use std::ptr::null_mut;

use ddtree::Tree;
use ddtree::ffi::*;

use super::reference::closure;

/// What an unwritten element holds.
pub const POISON: i32 = 0x5a5a_5a5a;
const POISON_64: i64 = 0x5a5a_5a5a_5a5a_5a5a;

/// All arrays of a `ddt_tree`.
#[derive(Clone, Debug, PartialEq)]
pub struct TreeBuffers {
    pub num_reqs: usize,
    pub max_nodes: usize,
    pub max_depth: usize,
    pub num_nodes: Vec<i32>,
    pub tokens: Vec<i32>,
    pub parents: Vec<i32>,
    pub depths: Vec<i32>,
    pub first_child: Vec<i32>,
    pub next_sibling: Vec<i32>,
    pub subtree_end: Vec<i32>,
    pub ancestor_bits: Vec<u32>,
    pub ancestors: Vec<i32>,
    pub positions: Vec<i64>,
    pub pop_ranks: Vec<i32>,
    pub flags: Vec<u32>,
}

impl TreeBuffers {
    pub fn poisoned(num_reqs: usize, max_nodes: usize, max_depth: usize) -> Self {
        let slots = num_reqs * max_nodes;
        let per_node = || vec![POISON; slots];
        Self {
            num_reqs,
            max_nodes,
            max_depth,
            num_nodes: vec![POISON; num_reqs],
            tokens: per_node(),
            parents: per_node(),
            depths: per_node(),
            first_child: per_node(),
            next_sibling: per_node(),
            subtree_end: per_node(),
            ancestor_bits: vec![POISON as u32; slots * max_nodes.div_ceil(32)],
            ancestors: vec![POISON; slots * (max_depth + 1)],
            positions: vec![POISON_64; slots],
            pop_ranks: per_node(),
            flags: vec![POISON as u32; num_reqs],
        }
    }

    /// What the arrays must hold for these trees; one without nodes is a padding request.
    pub fn expected(max_nodes: usize, max_depth: usize, trees: &[(Tree, u32)]) -> Self {
        let mut all = Self::poisoned(trees.len(), max_nodes, max_depth);
        let words = max_nodes.div_ceil(32);
        all.subtree_end.fill(0);
        all.ancestor_bits.fill(0);
        all.positions.fill(0);
        for field in [
            &mut all.tokens,
            &mut all.parents,
            &mut all.depths,
            &mut all.first_child,
            &mut all.next_sibling,
            &mut all.ancestors,
            &mut all.pop_ranks,
        ] {
            field.fill(-1);
        }
        for (r, (tree, flags)) in trees.iter().enumerate() {
            let n = tree.num_nodes();
            all.num_nodes[r] = n as i32;
            all.flags[r] = *flags;
            let start = r * max_nodes;
            let ancestors = closure(&tree.parents);
            for (i, row) in ancestors.iter().enumerate() {
                all.tokens[start + i] = tree.tokens[i];
                all.parents[start + i] = tree.parents[i];
                all.depths[start + i] = tree.depths[i];
                all.first_child[start + i] = tree.first_child[i];
                all.next_sibling[start + i] = tree.next_sibling[i];
                all.subtree_end[start + i] = tree.subtree_end[i];
                all.pop_ranks[start + i] = tree.pop_ranks[i];
                all.positions[start + i] = tree.root_position + i64::from(tree.depths[i]);
                // in preorder an ancestor has a smaller index than its descendants
                for (depth, j) in (0..n).filter(|&j| row[j]).enumerate() {
                    all.ancestor_bits[(start + i) * words + j / 32] |= 1 << (j % 32);
                    all.ancestors[(start + i) * (max_depth + 1) + depth] = j as i32;
                }
            }
        }
        all
    }

    /// Tree `to` becomes tree `from` of a batch with the same max_depth and rows that are at least as
    /// long.
    pub fn copy_tree(&mut self, to: usize, source: &Self, from: usize) {
        fn copy<T: Copy>(
            out: &mut [T],
            source: &[T],
            nodes: [usize; 2],
            widths: [usize; 2],
            trees: [usize; 2],
        ) {
            for node in 0..nodes[0] {
                for k in 0..widths[0] {
                    out[(trees[0] * nodes[0] + node) * widths[0] + k] =
                        source[(trees[1] * nodes[1] + node) * widths[1] + k];
                }
            }
        }
        let (nodes, trees) = ([self.max_nodes, source.max_nodes], [to, from]);
        let places = [self.max_depth + 1; 2];
        let words = nodes.map(|nodes| nodes.div_ceil(32));
        self.num_nodes[to] = source.num_nodes[from];
        self.flags[to] = source.flags[from];
        copy(&mut self.tokens, &source.tokens, nodes, [1; 2], trees);
        copy(&mut self.parents, &source.parents, nodes, [1; 2], trees);
        copy(&mut self.depths, &source.depths, nodes, [1; 2], trees);
        copy(&mut self.first_child, &source.first_child, nodes, [1; 2], trees);
        copy(&mut self.next_sibling, &source.next_sibling, nodes, [1; 2], trees);
        copy(&mut self.subtree_end, &source.subtree_end, nodes, [1; 2], trees);
        copy(&mut self.pop_ranks, &source.pop_ranks, nodes, [1; 2], trees);
        copy(&mut self.positions, &source.positions, nodes, [1; 2], trees);
        copy(&mut self.ancestors, &source.ancestors, nodes, places, trees);
        copy(&mut self.ancestor_bits, &source.ancestor_bits, nodes, words, trees);
    }

    /// The C view of these arrays, good until they move.
    pub fn raw(&mut self) -> ddt_tree {
        ddt_tree {
            struct_size: size_of::<ddt_tree>() as u32,
            num_reqs: self.num_reqs as i32,
            max_nodes: self.max_nodes as i32,
            max_depth: self.max_depth as i32,
            num_nodes: self.num_nodes.as_mut_ptr(),
            tokens: self.tokens.as_mut_ptr(),
            parents: self.parents.as_mut_ptr(),
            depths: self.depths.as_mut_ptr(),
            first_child: self.first_child.as_mut_ptr(),
            next_sibling: self.next_sibling.as_mut_ptr(),
            subtree_end: self.subtree_end.as_mut_ptr(),
            ancestor_bits: self.ancestor_bits.as_mut_ptr(),
            ancestors: self.ancestors.as_mut_ptr(),
            positions: self.positions.as_mut_ptr(),
            pop_ranks: self.pop_ranks.as_mut_ptr(),
            flags: self.flags.as_mut_ptr(),
        }
    }
}

/// An absent tensor.
pub const ABSENT: ddt_tensor =
    ddt_tensor { data: null_mut(), dtype: 0, ndim: 0, shape: [0; 4], strides: [0; 4] };

/// A row-major tensor over `data`, to be read.
pub fn tensor<T: ddtree::Element>(data: &[T], shape: &[usize]) -> ddt_tensor {
    over(data.as_ptr().cast_mut(), data.len(), shape)
}

/// A row-major tensor over `data`, to be written.
pub fn tensor_mut<T: ddtree::Element>(data: &mut [T], shape: &[usize]) -> ddt_tensor {
    over(data.as_mut_ptr(), data.len(), shape)
}

fn over<T: ddtree::Element>(data: *mut T, len: usize, shape: &[usize]) -> ddt_tensor {
    assert_eq!(len, shape.iter().product::<usize>());
    let mut raw = ddt_tensor {
        data: data.cast(),
        dtype: T::DTYPE as u32,
        ndim: shape.len() as u32,
        shape: [-5; 4],
        strides: [-5; 4],
    };
    let mut stride = 1;
    for axis in (0..shape.len()).rev() {
        raw.shape[axis] = shape[axis] as i64;
        raw.strides[axis] = stride;
        stride *= shape[axis] as i64;
    }
    raw
}

/// A CPU context, freed at the end of its scope.
pub struct Context(pub *mut ddt_context);

impl Context {
    pub fn new() -> Self {
        let params = ddt_context_params {
            struct_size: size_of::<ddt_context_params>() as u32,
            abi_version: DDT_ABI_VERSION,
            device: DDT_DEVICE_CPU,
            device_index: 0,
            flags: 0,
        };
        let mut context = null_mut();
        // SAFETY: both pointers are valid.
        assert_eq!(unsafe { ddt_context_create(&params, &mut context) }, DDT_OK);
        Self(context)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once.
        unsafe { ddt_context_free(self.0) };
    }
}

/// This thread's last error text.
pub fn last_error() -> String {
    let mut text = vec![0u8; 4096];
    let mut needed = 0;
    // SAFETY: the buffer is as long as said.
    let status = unsafe { ddt_last_error(text.as_mut_ptr().cast(), text.len(), &mut needed) };
    assert_eq!(status, DDT_OK);
    text.truncate(needed - 1);
    String::from_utf8(text).expect("UTF-8")
}
