// SPDX-License-Identifier: Apache-2.0
//! ddt_tree_gather: every entry of every output is the source's or untouched.

mod common;

use std::ptr::null_mut;

use common::buffers::{ABSENT, Context, TreeBuffers, last_error, tensor, tensor_mut};
use ddtree::ffi::*;
use proptest::prelude::*;

const MAX_DEPTH: usize = 3;

/// One call; fields of the source hold anything but where the operation looks.
#[derive(Clone, Debug)]
struct Case {
    source: TreeBuffers,
    tree_index: Vec<i64>,
    is_wide: bool,
    query_start: Vec<i32>,
    num_reqs: usize,
    max_nodes: usize,
    /// `[T]` and `[2, T]`
    positions: Option<Vec<i64>>,
    mrope_positions: Option<Vec<i64>>,
}

impl Case {
    /// Status, and the outputs: trees, positions, positions of the axes.
    fn run(
        &mut self,
        change: impl FnOnce(&mut ddt_tree_gather_params, &mut ddt_tree, &mut ddt_tree),
    ) -> (ddt_status, TreeBuffers, Vec<i64>, Vec<i64>) {
        let mut out = TreeBuffers::poisoned(self.num_reqs, self.max_nodes, MAX_DEPTH);
        let (mut source, mut tree) = (self.source.raw(), out.raw());
        let mut positions = self.positions.clone().unwrap_or_default();
        let mut mrope_positions = self.mrope_positions.clone().unwrap_or_default();
        let rows = positions.len().max(mrope_positions.len() / 2);
        let narrow: Vec<i32> = self.tree_index.iter().map(|&tree| tree as i32).collect();
        let n = self.tree_index.len();
        let mut params = ddt_tree_gather_params {
            struct_size: size_of::<ddt_tree_gather_params>() as u32,
            flags: 0,
            source: &mut source,
            tree: &mut tree,
            tree_index: if self.is_wide { tensor(&self.tree_index, &[n]) } else { tensor(&narrow, &[n]) },
            query_start: self.query_start.as_ptr(),
            positions: if self.positions.is_some() { tensor_mut(&mut positions, &[rows]) } else { ABSENT },
            mrope_positions: ABSENT,
        };
        if self.mrope_positions.is_some() {
            // the axes vary fastest
            params.mrope_positions = tensor_mut(&mut mrope_positions, &[2, rows]);
            params.mrope_positions.strides[..2].copy_from_slice(&[1, 2]);
        }
        change(&mut params, &mut source, &mut tree);
        (params.source, params.tree) = (&mut source, &mut tree);
        // SAFETY: all arrays have the lengths that the header asks for, or the call refuses them.
        let status = unsafe { ddt_tree_gather(Context::new().0, &params, null_mut()) };
        (status, out, positions, mrope_positions)
    }

    fn expected(&self) -> (TreeBuffers, Vec<i64>, Vec<i64>) {
        let mut out = TreeBuffers::poisoned(self.num_reqs, self.max_nodes, MAX_DEPTH);
        let mut positions = self.positions.clone().unwrap_or_default();
        let mut mrope_positions = self.mrope_positions.clone().unwrap_or_default();
        out.num_nodes.fill(0);
        for (i, &from) in self.tree_index.iter().enumerate() {
            let Ok(from) = usize::try_from(from) else { continue };
            out.copy_tree(i, &self.source, from);
            let (start, end) = (self.query_start[i], self.query_start[i + 1]);
            let nodes = self.source.num_nodes[from].min(self.max_nodes as i32).min(end - start);
            out.num_nodes[i] = nodes;
            for node in 0..nodes as usize {
                let depth = self.source.depths[from * self.source.max_nodes + node];
                let (row, delta) = (start as usize + node, i64::from(depth) - node as i64);
                if let Some(position) = positions.get_mut(row) {
                    *position += delta;
                }
                if let Some(axes) = mrope_positions.get_mut(2 * row..2 * row + 2) {
                    axes.iter_mut().for_each(|position| *position += delta);
                }
            }
        }
        (out, positions, mrope_positions)
    }
}

fn case() -> impl Strategy<Value = Case> {
    use prop::collection::vec;
    (1usize..6, 1usize..70, 0usize..5, 0usize..3).prop_flat_map(|(trees, nodes, n, more)| {
        (
            (vec(0..=nodes as i32, trees), vec(any::<i32>(), 64), vec(any::<prop::sample::Index>(), nodes)),
            (vec(-2..trees as i64, n), any::<bool>(), vec(0i32..nodes as i32 + 3, n), 1..=nodes),
            (any::<bool>(), any::<bool>(), 0i32..3),
        )
            .prop_map(
                move |((num_nodes, noise, depths), (tree_index, is_wide, rows, max_nodes), with)| {
                    let mut source = TreeBuffers::poisoned(trees, nodes, MAX_DEPTH);
                    // any values: they are copied, not understood
                    let mut at = 0;
                    let mut next = || {
                        at += 1;
                        noise[at % noise.len()].wrapping_mul(at as i32)
                    };
                    for field in [
                        &mut source.tokens,
                        &mut source.parents,
                        &mut source.first_child,
                        &mut source.next_sibling,
                        &mut source.subtree_end,
                        &mut source.ancestors,
                        &mut source.pop_ranks,
                    ] {
                        field.fill_with(&mut next);
                    }
                    source.ancestor_bits.fill_with(|| next() as u32);
                    source.flags.fill_with(|| next() as u32);
                    source.positions.fill_with(|| i64::from(next()) << 20);
                    for (i, depth) in source.depths.iter_mut().enumerate() {
                        let node = i % nodes;
                        *depth = depths[node].index(node + 1) as i32;
                    }
                    source.num_nodes = num_nodes;
                    let mut query_start = vec![with.2];
                    for count in rows {
                        query_start.push(query_start[query_start.len() - 1] + count);
                    }
                    // rows of others follow
                    let total = query_start[query_start.len() - 1] as usize + 2;
                    let positions = |len: usize| (0..len as i64).map(|row| 1000 * row).collect();
                    Case {
                        source,
                        num_reqs: tree_index.len() + more,
                        tree_index,
                        is_wide,
                        query_start,
                        max_nodes,
                        positions: with.0.then(|| positions(total)),
                        mrope_positions: with.1.then(|| positions(2 * total)),
                    }
                },
            )
    })
}

proptest! {
    #![proptest_config(common::cases(300))]

    #[test]
    fn trees_and_positions(mut case in case()) {
        let (status, trees, positions, mrope_positions) = case.run(|_, _, _| {});
        prop_assert_eq!(status, DDT_OK, "{}", last_error());
        prop_assert_eq!(&trees, &case.expected().0);
        prop_assert_eq!((positions, mrope_positions), (case.expected().1, case.expected().2));
    }

    #[test]
    fn absent_fields_are_left_out(mut case in case()) {
        let (status, trees, ..) = case.run(|_, source, tree| {
            for tree in [source, tree] {
                tree.tokens = null_mut();
                tree.ancestors = null_mut();
                tree.ancestor_bits = null_mut();
                tree.positions = null_mut();
                tree.flags = null_mut();
            }
        });
        prop_assert_eq!(status, DDT_OK, "{}", last_error());
        let expected = case.expected().0;
        prop_assert_eq!((&trees.num_nodes, &trees.depths), (&expected.num_nodes, &expected.depths));
        let untouched = TreeBuffers::poisoned(case.num_reqs, case.max_nodes, MAX_DEPTH);
        prop_assert_eq!((&trees.tokens, &trees.ancestor_bits), (&untouched.tokens, &untouched.ancestor_bits));
        prop_assert_eq!((&trees.positions, &trees.flags), (&untouched.positions, &untouched.flags));
    }
}

/// Two trees of four nodes, gathered in turn.
fn small() -> Case {
    let mut source = TreeBuffers::poisoned(2, 4, MAX_DEPTH);
    source.num_nodes = vec![4, 3];
    source.depths = vec![0, 1, 1, 1, 0, 1, 2, -1];
    Case {
        source,
        tree_index: vec![1, 0],
        is_wide: true,
        query_start: vec![0, 4, 8],
        num_reqs: 3,
        max_nodes: 4,
        positions: Some(vec![10; 8]),
        mrope_positions: Some(vec![10; 16]),
    }
}

#[test]
fn a_tree_is_cut_to_its_rows() {
    let mut case = Case { query_start: vec![0, 2, 8], ..small() };
    let (status, trees, positions, _) = case.run(|_, _, _| {});
    assert_eq!(status, DDT_OK, "{}", last_error());
    assert_eq!(trees.num_nodes, [2, 4, 0]);
    assert_eq!(positions, [10, 10, 10, 10, 9, 8, 10, 10]);
}

#[test]
fn what_cannot_be_is_refused() {
    type Change = fn(&mut ddt_tree_gather_params, &mut ddt_tree, &mut ddt_tree);
    fn refused(mut case: Case, change: Change, status: ddt_status, want: &str) {
        let (got, trees, positions, mrope_positions) = case.run(change);
        assert_eq!((got, last_error()), (status, format!("tree_gather: {want}")));
        assert_eq!(trees, TreeBuffers::poisoned(case.num_reqs, case.max_nodes, MAX_DEPTH));
        assert_eq!((Some(positions), Some(mrope_positions)), (case.positions, case.mrope_positions));
    }
    let (value, shape) = (DDT_INVALID_VALUE, DDT_INVALID_SHAPE);
    let case = |change: fn(&mut Case)| {
        let mut case = small();
        change(&mut case);
        case
    };
    let as_is: Change = |_, _, _| {};
    refused(
        case(|c| c.tree_index[1] = 2),
        as_is,
        value,
        "tree_index[1]: got 2, want less than 2 (source.num_reqs)",
    );
    refused(
        case(|c| c.query_start[1] = 9),
        as_is,
        value,
        "query_start[1]: got 9 after 0, want ascending rows of 8",
    );
    refused(
        case(|c| c.query_start[2] = 3),
        as_is,
        value,
        "query_start[2]: got 3 after 4, want ascending rows of 8",
    );
    refused(case(|c| c.source.depths[6] = 3), as_is, value, "source.depths[1][2]: got 3, want 0..=2");
    refused(
        case(|c| c.source.num_nodes[0] = 5),
        as_is,
        value,
        "source.num_nodes[0]: got 5, want 0..=4 (max_nodes)",
    );
    let change = |change: Change, status, want| refused(small(), change, status, want);
    change(|_, _, tree| tree.max_depth = 2, shape, "tree.max_depth: got 2, want 3 (source.max_depth)");
    change(
        |_, source, _| source.max_nodes = 3,
        shape,
        "tree.max_nodes: got 4, want at most 3 (source.max_nodes)",
    );
    change(
        |_, _, tree| tree.num_reqs = 1,
        shape,
        "tree_index shape[0]: got 2, want at most 1 (tree.num_reqs)",
    );
    change(
        |_, source, _| source.parents = null_mut(),
        DDT_NULL_POINTER,
        "source.parents: got NULL, want a pointer",
    );
    change(
        |p, _, _| p.positions.dtype = DDT_DTYPE_F32,
        DDT_INVALID_DTYPE,
        "positions dtype: got f32, want i64",
    );
    change(
        |p, _, _| p.tree_index = ABSENT,
        DDT_NULL_POINTER,
        "tree_index: got an absent tensor (data NULL, dtype 0), want one of 1 dimensions",
    );
    change(|p, _, _| p.flags = 1, DDT_UNSUPPORTED, "params.flags: got 0x1, want 0");
}
