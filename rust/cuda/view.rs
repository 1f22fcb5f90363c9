// SPDX-License-Identifier: Apache-2.0
//! Descriptions of device memory, from those of the C ABI to those of the kernels.

use std::ptr::null_mut;

use super::params::{ddt_cuda_tree, ddt_cuda_view};
use crate::ffi::ddt_tree;
use crate::ffi::ptr::TreeDims;
use crate::tensor::TensorRef;

/// Makes a [`ddt_cuda_view`].
pub(crate) struct View;

impl View {
    /// Describes a checked tensor; its data is not read.
    pub(crate) fn of(tensor: &TensorRef<'_>) -> ddt_cuda_view {
        let mut strides = [0; 4];
        for (to, &from) in strides.iter_mut().zip(tensor.strides()) {
            *to = from as i64;
        }
        ddt_cuda_view {
            data: tensor.data().cast_mut().cast(),
            strides,
            dtype: tensor.dtype() as u32,
            reserved: 0,
        }
    }

    /// A tensor that the caller left out.
    pub(crate) fn absent() -> ddt_cuda_view {
        ddt_cuda_view { data: null_mut(), strides: [0; 4], dtype: 0, reserved: 0 }
    }

    /// Describes a tensor that may have been left out.
    pub(crate) fn optional(tensor: Option<&TensorRef<'_>>) -> ddt_cuda_view {
        tensor.map_or_else(Self::absent, Self::of)
    }
}

/// The fields of a tree as kernels take them. Whoever reads or writes a field checks its pointer
/// before, with the lengths of [`TreeDims`].
pub(crate) fn tree_params(tree: &ddt_tree, dims: TreeDims) -> ddt_cuda_tree {
    ddt_cuda_tree {
        num_reqs: dims.num_reqs as i32,
        max_nodes: dims.max_nodes as i32,
        max_depth: dims.max_depth as i32,
        words: dims.words() as i32,
        num_nodes: tree.num_nodes,
        tokens: tree.tokens,
        parents: tree.parents,
        depths: tree.depths,
        first_child: tree.first_child,
        next_sibling: tree.next_sibling,
        subtree_end: tree.subtree_end,
        ancestor_bits: tree.ancestor_bits,
        ancestors: tree.ancestors,
        positions: tree.positions,
        pop_ranks: tree.pop_ranks,
        flags: tree.flags,
    }
}
