// SPDX-License-Identifier: Apache-2.0
//! tree_mask against naive derivations, in Rust and through the C ABI.

mod common;

use std::ptr::{null, null_mut};

use common::buffers::{Context, POISON, TreeBuffers, last_error};
use common::reference;
use ddtree::ffi::*;
use ddtree::{Status, Topology, Tree, tree_mask};
use proptest::prelude::*;

/// Random parents (`-1`, then anything smaller), sometimes chains, sometimes stars.
fn parents(max_nodes: usize) -> impl Strategy<Value = Vec<i32>> {
    (1..=max_nodes, 0..4u8).prop_flat_map(|(n, shape)| {
        prop::collection::vec(any::<prop::sample::Index>(), n).prop_map(move |choices| {
            let mut parents = vec![-1];
            let mut depths = vec![0];
            for (i, choice) in choices.iter().enumerate().skip(1) {
                let wanted = match shape {
                    0 => choice.index(i),
                    1 => i - 1,
                    2 => 0,
                    _ => i - 1 - choice.index(i.min(3)),
                };
                // stay within the depth limit
                let parent = if depths[wanted] < 32 { wanted } else { 0 };
                parents.push(parent as i32);
                depths.push(depths[parent] + 1);
            }
            parents
        })
    })
}

/// One request of a batch: parents, tokens, priorities, root position.
type Request = (Vec<i32>, Vec<i32>, Vec<i32>, i64);

fn request(max_nodes: usize) -> impl Strategy<Value = Request> {
    parents(max_nodes).prop_flat_map(|parents| {
        let n = parents.len();
        (
            Just(parents),
            prop::collection::vec(0i32..1000, n),
            prop::collection::vec(-3i32..4, n),
            0i64..1_000_000_000_000,
        )
    })
}

/// The tree that the documentation promises, and the old index of each node.
fn expected((parents, tokens, priorities, position): &Request, with_priorities: bool) -> (Tree, Vec<i32>) {
    let priority = |i: usize| if with_priorities { priorities[i] } else { i as i32 };
    let order = reference::preorder(parents, &|i| (priority(i), i));
    let new_index = |old: usize| order.iter().position(|&i| i == old).expect("a permutation") as i32;
    let new_parents: Vec<i32> =
        order.iter().map(|&old| usize::try_from(parents[old]).map_or(-1, new_index)).collect();
    let fields = reference::fields(&new_parents);
    let tree = Tree {
        tokens: order.iter().map(|&old| tokens[old]).collect(),
        parents: new_parents,
        depths: fields.depths,
        first_child: fields.first_child,
        next_sibling: fields.next_sibling,
        subtree_end: fields.subtree_end,
        pop_ranks: order.iter().map(|&old| priority(old)).collect(),
        root_position: *position,
    };
    (tree, order.iter().map(|&old| old as i32).collect())
}

proptest! {
    #![proptest_config(common::cases(200))]

    #[test]
    fn equals_the_naive_derivation(case in request(60), with_priorities: bool) {
        let (parents, tokens, priorities, position) = &case;
        let (tree, order) = tree_mask(&Topology {
            parents,
            tokens: Some(tokens),
            priorities: with_priorities.then_some(priorities),
            root_position: *position,
        }).unwrap();
        prop_assert_eq!((&tree, &order), (&expected(&case, with_priorities).0, &expected(&case, with_priorities).1));

        // the order is a permutation that carries the old tree to the new one
        let mut sorted = order.clone();
        sorted.sort_unstable();
        prop_assert_eq!(sorted, (0..parents.len() as i32).collect::<Vec<_>>());
        for (new, &old) in order.iter().enumerate() {
            let old_parent = parents[old as usize];
            let new_parent = tree.parents[new];
            prop_assert_eq!(usize::try_from(new_parent).map_or(-1, |parent| order[parent]), old_parent);
            prop_assert!(new_parent < new as i32);
        }
        // intervals say the same as the closure
        let closure = reference::closure(&tree.parents);
        for (i, row) in closure.iter().enumerate() {
            for (j, &is_ancestor) in row.iter().enumerate() {
                prop_assert_eq!(j <= i && (i as i32) < tree.subtree_end[j], is_ancestor);
            }
        }
    }

    /// A batch through the C ABI: every element of every output is written, padding included.
    #[test]
    fn c_abi_writes_every_field(
        cases in prop::collection::vec(prop::option::weighted(0.8, request(40)), 0..5),
        spare in 0usize..30,
        optional in prop::collection::vec(any::<bool>(), 3),
    ) {
        let max_nodes = cases.iter().flatten().map(|case| case.0.len()).max().unwrap_or(1) + spare;
        let mut input = MaskInput::new(max_nodes, &cases);
        let [with_tokens, with_priorities, with_positions] = [optional[0], optional[1], optional[2]];
        let mut trees = Vec::new();
        let mut order = Vec::new();
        for case in &cases {
            let (mut tree, mut old_index) =
                case.as_ref().map_or_else(Default::default, |case| expected(case, with_priorities));
            if !with_tokens {
                tree.tokens.fill(-1);
            }
            if !with_positions {
                tree.root_position = 0;
            }
            old_index.resize(max_nodes, -1);
            order.extend(old_index);
            trees.push((tree, 0));
        }
        let mut buffers = TreeBuffers::poisoned(cases.len(), max_nodes, 32);
        let mut raw = buffers.raw();
        let mut params = input.params(&mut raw);
        if !with_tokens { params.tokens = null(); }
        if !with_priorities { params.priorities = null(); }
        if !with_positions { params.root_positions = null(); }
        // SAFETY: all arrays have the lengths that the header asks for.
        let status = unsafe { ddt_tree_mask(Context::new().0, &params, null_mut()) };
        prop_assert_eq!(status, DDT_OK, "{}", last_error());
        prop_assert_eq!(&buffers, &TreeBuffers::expected(max_nodes, 32, &trees));
        prop_assert_eq!(&input.order, &order);

        // all fields but num_nodes may be left out
        let before = buffers.clone();
        let mut raw = ddt_tree { num_nodes: buffers.num_nodes.as_mut_ptr(), ..EMPTY_TREE };
        (raw.num_reqs, raw.max_nodes, raw.max_depth) = (cases.len() as i32, max_nodes as i32, 32);
        let params = ddt_tree_mask_params { order: null_mut(), tree: &mut raw, ..params };
        // SAFETY: as above.
        prop_assert_eq!(unsafe { ddt_tree_mask(Context::new().0, &params, null_mut()) }, DDT_OK);
        prop_assert_eq!(buffers, before);
    }
}

const EMPTY_TREE: ddt_tree = ddt_tree {
    struct_size: size_of::<ddt_tree>() as u32,
    num_reqs: 0,
    max_nodes: 1,
    max_depth: 0,
    num_nodes: null_mut(),
    tokens: null_mut(),
    parents: null_mut(),
    depths: null_mut(),
    first_child: null_mut(),
    next_sibling: null_mut(),
    subtree_end: null_mut(),
    ancestor_bits: null_mut(),
    ancestors: null_mut(),
    positions: null_mut(),
    pop_ranks: null_mut(),
    flags: null_mut(),
};

/// The inputs of one call; entries from num_nodes on are poison.
struct MaskInput {
    max_nodes: usize,
    num_nodes: Vec<i32>,
    tokens: Vec<i32>,
    parents: Vec<i32>,
    priorities: Vec<i32>,
    root_positions: Vec<i64>,
    order: Vec<i32>,
}

impl MaskInput {
    fn new(max_nodes: usize, cases: &[Option<Request>]) -> Self {
        let slots = cases.len() * max_nodes;
        let mut input = Self {
            max_nodes,
            num_nodes: vec![0; cases.len()],
            tokens: vec![POISON; slots],
            parents: vec![POISON; slots],
            priorities: vec![POISON; slots],
            root_positions: vec![i64::MIN; cases.len()],
            order: vec![POISON; slots],
        };
        for (r, case) in cases.iter().enumerate() {
            if let Some((parents, tokens, priorities, position)) = case {
                let row = r * max_nodes..r * max_nodes + parents.len();
                input.num_nodes[r] = parents.len() as i32;
                input.tokens[row.clone()].copy_from_slice(tokens);
                input.parents[row.clone()].copy_from_slice(parents);
                input.priorities[row].copy_from_slice(priorities);
                input.root_positions[r] = *position;
            }
        }
        input
    }

    fn params(&mut self, tree: &mut ddt_tree) -> ddt_tree_mask_params {
        ddt_tree_mask_params {
            struct_size: size_of::<ddt_tree_mask_params>() as u32,
            flags: 0,
            num_reqs: self.num_nodes.len() as i32,
            max_nodes: self.max_nodes as i32,
            num_nodes: self.num_nodes.as_ptr(),
            tokens: self.tokens.as_ptr(),
            parents: self.parents.as_ptr(),
            priorities: self.priorities.as_ptr(),
            root_positions: self.root_positions.as_ptr(),
            order: self.order.as_mut_ptr(),
            tree,
        }
    }
}

/// Runs a call that must fail; returns status and text, after checking that no output moved.
fn fails(
    max_depth: usize,
    change: impl FnOnce(&mut MaskInput, &mut ddt_tree, &mut ddt_tree_mask_params),
) -> (ddt_status, String) {
    let good: Request = (vec![-1, 0, 1], vec![5, 6, 7], vec![0, 1, 2], 10);
    let mut input = MaskInput::new(4, &[Some(good.clone()), Some(good)]);
    let mut buffers = TreeBuffers::poisoned(2, 4, max_depth);
    let mut raw = buffers.raw();
    let mut params = input.params(&mut raw);
    let untouched = TreeBuffers::poisoned(2, 4, max_depth);
    change(&mut input, &mut raw, &mut params);
    params.tree = if params.tree.is_null() { null_mut() } else { &mut raw };
    // SAFETY: the arrays have the lengths that the header asks for, or the call refuses them.
    let status = unsafe { ddt_tree_mask(Context::new().0, &params, null_mut()) };
    let text = last_error();
    assert_eq!(buffers, untouched, "outputs after: {text}");
    assert!(input.order.iter().all(|&entry| entry == POISON), "order after: {text}");
    (status, text)
}

#[test]
fn hostile_parents_are_refused() {
    // request 1 of 2 is bad: the row of request 0 must stay as it was, too
    for (node, parent, want) in [
        (0, 0, "request 1: parents[0]: got 0, want -1 (the root)"),
        (1, 1, "request 1: parents[1]: got 1, want 0..=0 (a parent precedes its children)"),
        (1, 2, "request 1: parents[1]: got 2, want 0..=0 (a parent precedes its children)"),
        (2, -1, "request 1: parents[2]: got -1, want 0..=1 (a parent precedes its children)"),
        (2, i32::MAX, "request 1: parents[2]: got 2147483647, want 0..=1 (a parent precedes its children)"),
        (2, i32::MIN, "request 1: parents[2]: got -2147483648, want 0..=1 (a parent precedes its children)"),
    ] {
        let (status, text) = fails(32, |input, _, _| input.parents[4 + node] = parent);
        assert_eq!((status, text), (DDT_INVALID_VALUE, format!("tree_mask: {want}")));
    }
}

#[test]
fn bad_sizes_and_pointers_are_refused() {
    let check = |(status, text): (ddt_status, String), want_status: ddt_status, want: &str| {
        assert_eq!((status, &text[..]), (want_status, &format!("tree_mask: {want}")[..]));
    };
    check(
        fails(1, |_, _, _| {}),
        DDT_INVALID_VALUE,
        "request 0: depth of node 2: got 2, want at most 1 (tree.max_depth)",
    );
    check(
        fails(32, |input, _, _| input.num_nodes[1] = 5),
        DDT_INVALID_VALUE,
        "num_nodes[1]: got 5, want 0..=4",
    );
    check(
        fails(32, |input, _, _| input.num_nodes[1] = -1),
        DDT_INVALID_VALUE,
        "num_nodes[1]: got -1, want 0..=4",
    );
    check(
        fails(32, |input, _, _| input.root_positions[1] = -1),
        DDT_INVALID_VALUE,
        "request 1: root position: got -1, want 0..=2^63 - 33",
    );
    check(
        fails(32, |input, _, _| input.root_positions[1] = i64::MAX - 31),
        DDT_INVALID_VALUE,
        "request 1: root position: got 9223372036854775776, want 0..=2^63 - 33",
    );
    check(
        fails(32, |_, _, params| params.num_reqs = 3),
        DDT_INVALID_SHAPE,
        "params.num_reqs: got 3, want 2 (the tree's)",
    );
    check(
        fails(32, |_, _, params| params.max_nodes = -4),
        DDT_INVALID_SHAPE,
        "params.max_nodes: got -4, want 4 (the tree's)",
    );
    check(fails(32, |_, tree, _| tree.num_reqs = -1), DDT_INVALID_SHAPE, "tree.num_reqs: got -1, want >= 0");
    check(
        fails(32, |_, tree, _| tree.max_nodes = 257),
        DDT_INVALID_SHAPE,
        "tree.max_nodes: got 257, want 1..=256",
    );
    check(
        fails(32, |_, tree, _| tree.max_nodes = 0),
        DDT_INVALID_SHAPE,
        "tree.max_nodes: got 0, want 1..=256",
    );
    check(
        fails(32, |_, tree, _| tree.max_depth = 33),
        DDT_INVALID_SHAPE,
        "tree.max_depth: got 33, want 0..=32",
    );
    check(fails(32, |_, _, params| params.flags = 4), DDT_UNSUPPORTED, "params.flags: got 0x4, want 0");
    check(
        fails(32, |_, _, params| params.num_nodes = null()),
        DDT_NULL_POINTER,
        "num_nodes: got NULL, want a pointer",
    );
    check(
        fails(32, |_, _, params| params.parents = null()),
        DDT_NULL_POINTER,
        "parents: got NULL, want a pointer",
    );
    check(
        fails(32, |_, _, params| params.tree = null_mut()),
        DDT_NULL_POINTER,
        "tree: got NULL, want a pointer",
    );
    check(
        fails(32, |_, tree, _| tree.num_nodes = null_mut()),
        DDT_NULL_POINTER,
        "tree.num_nodes: got NULL, want a pointer",
    );
    let (status, text) = fails(32, |_, tree, _| tree.depths = tree.depths.wrapping_byte_add(2));
    assert_eq!(status, DDT_MISALIGNED);
    assert!(
        text.starts_with("tree_mask: tree.depths: got address 0x") && text.ends_with("want a multiple of 4"),
        "{text}"
    );
    let (status, _) = fails(32, |_, _, params| params.parents = params.parents.wrapping_byte_add(1));
    assert_eq!(status, DDT_MISALIGNED);
}

#[test]
fn rust_callers_get_the_same_errors() {
    let topology = Topology { parents: &[], tokens: None, priorities: None, root_position: 0 };
    assert_eq!(tree_mask(&topology).expect_err("no root").status(), Status::InvalidShape);
    let too_many = vec![-1; 257];
    assert_eq!(
        tree_mask(&Topology { parents: &too_many, ..topology }).expect_err("too many").status(),
        Status::InvalidShape
    );
    let error =
        tree_mask(&Topology { parents: &[-1, 0], tokens: Some(&[1]), ..topology }).expect_err("one token");
    assert_eq!(error.to_string(), "tokens length: got 1, want 2 (parents)");
    let chain: Vec<i32> = (-1..33).collect();
    let error = tree_mask(&Topology { parents: &chain, ..topology }).expect_err("too deep");
    assert_eq!(error.to_string(), "depth of node 33: got 33, want at most 32");
    assert!(tree_mask(&Topology { parents: &chain[..33], ..topology }).is_ok());
}
