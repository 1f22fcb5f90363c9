// SPDX-License-Identifier: Apache-2.0
//! `ddt_tree_gather`.

use std::ffi::c_void;

use super::context::{Backend, backend, ddt_context};
use super::guard::guard;
use super::ptr::{self, Output, TreeDims};
use super::status::ddt_status;
use super::types::{ddt_tree, ddt_tree_gather_params};
use crate::dtype::DType;
use crate::error::{Result, bail};
use crate::tensor::{TensorMut, TensorRef};

/// Brings trees of a batch into the order of another one, and the positions of their rows from
/// those of a chain to those of the tree.
///
/// A tree keeps its first max_nodes nodes, and no more than it has rows; links to later nodes stay
/// (see ddt_tree_attention_params). Trees from B on become padding requests.
///
/// Writes: of tree num_nodes, and every other field that is not NULL for the gathered trees,
/// padding included; what a padding request has there stays. Positions.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_INVALID_DTYPE.
/// DDT_INVALID_SHAPE (more trees to gather than tree has, trees that differ in max_depth, a source
/// with shorter rows). DDT_INVALID_VALUE (a tree that is not there, num_nodes, a depth or a row out
/// of range). DDT_UNSUPPORTED (unknown flags).
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_tree_gather(
    context: *const ddt_context,
    params: *const ddt_tree_gather_params,
    stream: *mut c_void,
) -> ddt_status {
    guard("tree_gather", || {
        // SAFETY: the caller vouches for the context, the parameters and what they point to.
        unsafe {
            let backend = backend(context)?;
            let params = ptr::versioned(params, "params")?;
            match backend {
                Backend::Cpu(_) => run(&params),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::tree_gather::launch(device, &params, stream),
            }
        }
    })
}

/// What the host can see of a call.
pub(crate) struct Gather<'a> {
    pub(crate) source: ddt_tree,
    pub(crate) source_dims: TreeDims,
    pub(crate) tree: ddt_tree,
    pub(crate) dims: TreeDims,
    pub(crate) tree_index: TensorRef<'a>,
    pub(crate) positions: Option<TensorMut<'a>>,
    pub(crate) mrope_positions: Option<TensorMut<'a>>,
}

impl<'a> Gather<'a> {
    /// # Safety
    /// What the parameters point to must be as the header says; elements are not read.
    pub(crate) unsafe fn new(params: &ddt_tree_gather_params) -> Result<Self> {
        ptr::no_flags(params.flags)?;
        // SAFETY: the caller's promise.
        unsafe {
            let (source, source_dims) = ptr::tree(params.source, "source")?;
            let (tree, dims) = ptr::tree(params.tree, "tree")?;
            if dims.max_depth != source_dims.max_depth {
                bail!(
                    InvalidShape,
                    "tree.max_depth: got {}, want {} (source.max_depth)",
                    dims.max_depth,
                    source_dims.max_depth
                );
            }
            if dims.max_nodes > source_dims.max_nodes {
                bail!(
                    InvalidShape,
                    "tree.max_nodes: got {}, want at most {} (source.max_nodes)",
                    dims.max_nodes,
                    source_dims.max_nodes
                );
            }
            let tree_index = ptr::tensor(&params.tree_index, 1, "tree_index")?;
            tree_index.want_dtype("tree_index", &[DType::I32, DType::I64])?;
            if tree_index.shape()[0] > dims.num_reqs {
                bail!(
                    InvalidShape,
                    "tree_index shape[0]: got {}, want at most {} (tree.num_reqs)",
                    tree_index.shape()[0],
                    dims.num_reqs
                );
            }
            let in_place = |raw, ndim, name| -> Result<Option<TensorMut<'a>>> {
                if ptr::is_absent(raw) {
                    return Ok(None);
                }
                let positions = ptr::tensor_mut(raw, ndim, name)?;
                positions.want_dtype(name, &[DType::I64])?;
                Ok(Some(positions))
            };
            let positions = in_place(&params.positions, 1, "positions")?;
            let mrope_positions = in_place(&params.mrope_positions, 2, "mrope_positions")?;
            Ok(Self { source, source_dims, tree, dims, tree_index, positions, mrope_positions })
        }
    }

    /// Whether depths are read.
    pub(crate) fn moves_positions(&self) -> bool {
        self.positions.is_some() || self.mrope_positions.is_some()
    }

    /// Checks the pointers of the source's fields.
    #[cfg(feature = "cuda")]
    pub(crate) fn check_source(&self) -> Result<()> {
        let Self { source, source_dims: dims, tree, .. } = self;
        let slots = dims.num_slots();
        ptr::device_array(source.num_nodes, dims.num_reqs, "source.num_nodes")?;
        for (field, is_wanted, len, name) in [
            (source.tokens, !tree.tokens.is_null(), slots, "tokens"),
            (source.parents, !tree.parents.is_null(), slots, "parents"),
            (source.depths, !tree.depths.is_null() || self.moves_positions(), slots, "depths"),
            (source.first_child, !tree.first_child.is_null(), slots, "first_child"),
            (source.next_sibling, !tree.next_sibling.is_null(), slots, "next_sibling"),
            (source.subtree_end, !tree.subtree_end.is_null(), slots, "subtree_end"),
            (source.pop_ranks, !tree.pop_ranks.is_null(), slots, "pop_ranks"),
            (source.ancestors, !tree.ancestors.is_null(), dims.ancestors_len(), "ancestors"),
            (source.ancestor_bits.cast(), !tree.ancestor_bits.is_null(), dims.bits_len(), "ancestor_bits"),
            (source.flags.cast(), !tree.flags.is_null(), dims.num_reqs, "flags"),
        ] {
            if is_wanted {
                ptr::device_array(field, len, &format!("source.{name}"))?;
            }
        }
        if !tree.positions.is_null() {
            ptr::device_array(source.positions, slots, "source.positions")?;
        }
        Ok(())
    }

    /// T, if there are positions: the smaller one.
    pub(crate) fn num_rows(&self) -> Option<usize> {
        let positions = self.positions.as_ref().map(|positions| positions.shape()[0]);
        let mrope_positions = self.mrope_positions.as_ref().map(|positions| positions.shape()[1]);
        positions.into_iter().chain(mrope_positions).min()
    }

    fn add(&mut self, row: usize, delta: i64) {
        if let Some(positions) = &mut self.positions {
            positions.add_i64(&[row], delta);
        }
        if let Some(positions) = &mut self.mrope_positions {
            for axis in 0..positions.shape()[0] {
                positions.add_i64(&[axis, row], delta);
            }
        }
    }
}

/// One field of the trees, as it is copied.
struct Field<'a, T> {
    source: &'a [T],
    out: Output<T>,
    /// Nodes of a tree, and entries of a node, in the source and in the gathered trees.
    from: (usize, usize),
    to: (usize, usize),
}

impl<'a, T: Copy> Field<'a, T> {
    /// `None` if the gathered trees have no such field. `widths`: entries of a node, both ways.
    ///
    /// # Safety
    /// The source must be readable for its trees and the output writable for its own.
    unsafe fn new(
        gather: &Gather<'_>,
        source: *const T,
        out: *mut T,
        name: &str,
        widths: (usize, usize),
    ) -> Result<Option<Self>> {
        if out.is_null() {
            return Ok(None);
        }
        let from = (gather.source_dims.max_nodes, widths.0);
        let to = (gather.dims.max_nodes, widths.1);
        // SAFETY: the caller's promise.
        unsafe {
            Ok(Some(Self {
                source: ptr::input(
                    source,
                    gather.source_dims.num_reqs * from.0 * from.1,
                    &format!("source.{name}"),
                )?,
                out: ptr::output(out, gather.dims.num_reqs * to.0 * to.1, &format!("tree.{name}"))?,
                from,
                to,
            }))
        }
    }

    fn copy(&mut self, source: usize, tree: usize) {
        let ((from_nodes, from_width), (to_nodes, to_width)) = (self.from, self.to);
        for node in 0..to_nodes {
            let row = &self.source[(source * from_nodes + node) * from_width..][..to_width];
            let start = (tree * to_nodes + node) * to_width;
            self.out.write_row(start, to_width, row.iter().copied(), row[0]);
        }
    }
}

/// # Safety
/// What the parameters point to must be as the header says.
unsafe fn run(params: &ddt_tree_gather_params) -> Result<()> {
    // SAFETY: the caller's promise, for every pointer.
    unsafe {
        let mut gather = Gather::new(params)?;
        let Gather { source, source_dims, tree, dims, tree_index, .. } = &gather;
        let num_trees = tree_index.shape()[0];
        let places = dims.max_depth + 1;
        let words = (source_dims.words(), dims.words());
        let source_num_nodes = ptr::num_nodes(source, *source_dims, "source")?;
        let mut num_nodes = ptr::output(tree.num_nodes, dims.num_reqs, "tree.num_nodes")?;
        let query_start = ptr::input(params.query_start, num_trees + 1, "query_start")?;
        let field = |from: *mut i32, to, name, width| Field::new(&gather, from, to, name, (width, width));
        let mut fields = [
            field(source.tokens, tree.tokens, "tokens", 1)?,
            field(source.parents, tree.parents, "parents", 1)?,
            field(source.depths, tree.depths, "depths", 1)?,
            field(source.first_child, tree.first_child, "first_child", 1)?,
            field(source.next_sibling, tree.next_sibling, "next_sibling", 1)?,
            field(source.subtree_end, tree.subtree_end, "subtree_end", 1)?,
            field(source.pop_ranks, tree.pop_ranks, "pop_ranks", 1)?,
            field(source.ancestors, tree.ancestors, "ancestors", places)?,
        ];
        let mut bits = Field::new(&gather, source.ancestor_bits, tree.ancestor_bits, "ancestor_bits", words)?;
        let mut node_positions = Field::new(&gather, source.positions, tree.positions, "positions", (1, 1))?;
        let mut flags = ptr::optional_output(tree.flags, dims.num_reqs, "tree.flags")?;
        let source_flags = match flags {
            Some(_) => ptr::input(source.flags, source_dims.num_reqs, "source.flags")?,
            None => &[],
        };
        let depths = match gather.moves_positions() {
            true => ptr::input(source.depths, source_dims.num_slots(), "source.depths")?,
            false => &[],
        };
        let num_rows = gather.num_rows().unwrap_or(i32::MAX as usize);

        // the source's tree, the nodes that it keeps and its first row, before anything is written:
        // query_start may lie where trees go
        let mut kept = Vec::with_capacity(num_trees);
        for i in 0..num_trees {
            let (start, end) = (query_start[i], query_start[i + 1]);
            if start < 0 || end < start || end as usize > num_rows {
                bail!(
                    InvalidValue,
                    "query_start[{}]: got {end} after {start}, want ascending rows of {num_rows}",
                    i + 1
                );
            }
            let index = tree_index.get_i64(&[i]);
            if index < 0 {
                kept.push(None);
                continue;
            }
            if index as usize >= source_dims.num_reqs {
                bail!(
                    InvalidValue,
                    "tree_index[{i}]: got {index}, want less than {} (source.num_reqs)",
                    source_dims.num_reqs
                );
            }
            let slot = index as usize;
            let nodes = (source_num_nodes[slot] as usize).min(dims.max_nodes).min((end - start) as usize);
            if !depths.is_empty() {
                let depths = &depths[slot * source_dims.max_nodes..][..nodes];
                if let Some(node) = (0..nodes).find(|&node| !(0..=node as i32).contains(&depths[node])) {
                    bail!(
                        InvalidValue,
                        "source.depths[{slot}][{node}]: got {}, want 0..={node}",
                        depths[node]
                    );
                }
            }
            kept.push(Some((slot, nodes, start as usize)));
        }

        let max_nodes = source_dims.max_nodes;
        for (i, tree) in kept.iter().enumerate() {
            let Some((slot, nodes, _)) = *tree else {
                num_nodes.write(i, 0);
                continue;
            };
            num_nodes.write(i, nodes as i32);
            fields.iter_mut().flatten().for_each(|field| field.copy(slot, i));
            bits.iter_mut().for_each(|field| field.copy(slot, i));
            node_positions.iter_mut().for_each(|field| field.copy(slot, i));
            if let Some(flags) = &mut flags {
                flags.write(i, source_flags[slot]);
            }
        }
        num_nodes.fill(num_trees, gather.dims.num_reqs, 0);
        if !gather.moves_positions() {
            return Ok(());
        }
        for &(slot, nodes, first_row) in kept.iter().flatten() {
            for node in 0..nodes {
                let delta = i64::from(depths[slot * max_nodes + node]) - node as i64;
                gather.add(first_row + node, delta);
            }
        }
    }
    Ok(())
}
