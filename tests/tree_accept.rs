// SPDX-License-Identifier: Apache-2.0
//! tree_accept against an independent walk, in Rust and through the C ABI.

mod common;

use std::collections::HashMap;
use std::ptr::{null, null_mut};

use common::buffers::{ABSENT, Context, POISON, TreeBuffers, last_error, tensor};
use common::reference;
use ddtree::ffi::*;
use ddtree::gumbel::GumbelNoise;
use ddtree::{
    AcceptedPath, Choice, FLAG_NONFINITE, Status, TensorRef, Topology, Tree, TreeLinks, greedy_choice,
    sampled_choice, tree_accept, tree_mask,
};
use half::{bf16, f16};
use proptest::prelude::*;

const VOCAB: usize = 7;
const POISON_64: i64 = 0x5a5a_5a5a_5a5a_5a5a;

/// A tree without equal siblings, over few tokens so that walks go deep.
fn tree() -> impl Strategy<Value = Tree> {
    prop::collection::vec((any::<prop::sample::Index>(), 0..VOCAB as i32), 0..40).prop_map(|nodes| {
        let mut parents = vec![-1];
        let mut tokens = vec![1000];
        let mut depths = vec![0];
        for (choice, token) in nodes {
            let parent = choice.index(parents.len());
            let is_new = (0..parents.len()).all(|i| (parents[i], tokens[i]) != (parent as i32, token));
            if is_new && depths[parent] < 32 {
                parents.push(parent as i32);
                tokens.push(token);
                depths.push(depths[parent] + 1);
            }
        }
        let topology =
            Topology { parents: &parents, tokens: Some(&tokens), priorities: None, root_position: 3 };
        tree_mask(&topology).expect("a tree").0
    })
}

/// Follows a map from (node, token) to child, built from the parents alone.
fn walk(tree: &Tree, choice: impl Fn(usize) -> i64) -> AcceptedPath {
    let children: HashMap<(i32, i64), usize> =
        (1..tree.num_nodes()).map(|i| ((tree.parents[i], i64::from(tree.tokens[i])), i)).collect();
    let mut path = AcceptedPath { nodes: vec![], tokens: vec![choice(0)] };
    let mut node = 0;
    while let Some(&child) = children.get(&(node as i32, choice(node))) {
        path.nodes.push(child as i32);
        path.tokens.push(choice(child));
        node = child;
    }
    path
}

/// Argmax by sorting: largest value, then lowest id; NaN and -inf only if nothing else, which is id 0.
fn argmax(row: &[f32]) -> Choice {
    let mut order: Vec<usize> = (0..row.len()).filter(|&id| row[id] > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| row[b].partial_cmp(&row[a]).unwrap().then(a.cmp(&b)));
    let token = order.first().map_or(0, |&id| id as i64);
    Choice { token, is_nonfinite: order.is_empty() || row.iter().any(|x| x.is_nan()) }
}

/// The choice of a row with noise: argmax of the sums.
fn sample(row: &[f32], seed: i64, position: i64) -> Choice {
    let noise = GumbelNoise::new(seed, position);
    let sums: Vec<f32> = row.iter().enumerate().map(|(id, &x)| x + noise.of(id as u32)).collect();
    Choice { is_nonfinite: argmax(row).is_nonfinite, ..argmax(&sums) }
}

fn links(tree: &Tree) -> TreeLinks<'_> {
    TreeLinks { tokens: &tree.tokens, first_child: &tree.first_child, next_sibling: &tree.next_sibling }
}

fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => -9.0f32..9.0,
        3 => prop::sample::select(vec![0.0f32, 1.0]),
        1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0]),
    ]
}

/// One request of a batch: idle rows, its tree if any, and its nodes' logits.
type Request = (usize, Option<Tree>, Vec<f32>);

fn request() -> impl Strategy<Value = Request> {
    (0usize..3, prop::option::weighted(0.8, tree())).prop_flat_map(|(idle, tree)| {
        let n = tree.as_ref().map_or(0, Tree::num_nodes);
        let row = prop_oneof![
            8 => prop::collection::vec(logit(), VOCAB),
            1 => Just(vec![f32::NAN; VOCAB]),
            1 => Just(vec![f32::NEG_INFINITY; VOCAB]),
        ];
        let rows = prop::collection::vec(row, n).prop_map(|rows| rows.concat());
        (Just(idle), Just(tree), rows)
    })
}

/// Arguments and outputs of one call.
struct Call {
    buffers: TreeBuffers,
    query_start: Vec<i32>,
    /// `[T, VOCAB]`, poisoned with NaN where no tree has a row.
    logits: Vec<f32>,
    node_tokens: Vec<i64>,
    num_accepted: Vec<i32>,
    accepted_nodes: Vec<i32>,
    output_tokens: Vec<i64>,
}

impl Call {
    fn new(requests: &[Request], max_depth: usize) -> Self {
        let trees: Vec<(Tree, u32)> =
            requests.iter().map(|(_, tree, _)| (tree.clone().unwrap_or_default(), 0)).collect();
        let max_nodes = trees.iter().map(|(tree, _)| tree.num_nodes()).max().unwrap_or(0).max(1) + 2;
        let mut buffers = TreeBuffers::poisoned(requests.len(), max_nodes, max_depth);
        // num_nodes and links as tree_build leaves them, everything else poison
        let full = TreeBuffers::expected(max_nodes, 32, &trees);
        (buffers.num_nodes, buffers.tokens) = (full.num_nodes, full.tokens);
        (buffers.first_child, buffers.next_sibling) = (full.first_child, full.next_sibling);
        buffers.flags.fill(4);

        // a row of nobody before the first request and after the last one
        let mut query_start = vec![1];
        let mut logits = vec![f32::NAN; VOCAB];
        for (idle, _, rows) in requests {
            logits.extend(rows);
            logits.extend(vec![f32::NAN; idle * VOCAB]);
            query_start.push((logits.len() / VOCAB) as i32);
        }
        logits.extend([f32::NAN; VOCAB]);
        let node_tokens = logits.chunks(VOCAB).map(|row| argmax(row).token).collect();
        Self {
            buffers,
            query_start,
            logits,
            node_tokens,
            num_accepted: vec![POISON; requests.len()],
            accepted_nodes: vec![POISON; requests.len() * max_depth],
            output_tokens: vec![POISON_64; requests.len() * (max_depth + 1)],
        }
    }

    fn run(&mut self, logits: ddt_tensor, node_tokens: *const i64) -> ddt_status {
        let mut tree = self.buffers.raw();
        self.run_with(logits, node_tokens, |_| {}, &mut tree)
    }

    fn run_with(
        &mut self,
        logits: ddt_tensor,
        node_tokens: *const i64,
        change: impl FnOnce(&mut ddt_tree_accept_params),
        tree: &mut ddt_tree,
    ) -> ddt_status {
        let mut params = ddt_tree_accept_params {
            struct_size: size_of::<ddt_tree_accept_params>() as u32,
            flags: 0,
            tree,
            query_start: self.query_start.as_ptr(),
            logits,
            node_tokens,
            num_accepted: self.num_accepted.as_mut_ptr(),
            accepted_nodes: self.accepted_nodes.as_mut_ptr(),
            output_tokens: self.output_tokens.as_mut_ptr(),
            workspace: null_mut(),
            workspace_bytes: 0,
            temperatures: null(),
            seeds: null(),
            accepted_rows: null_mut(),
            next_positions: null_mut(),
            num_rejected: null_mut(),
        };
        change(&mut params);
        // SAFETY: all arrays have the lengths that the header asks for, or the call refuses them.
        unsafe { ddt_tree_accept(Context::new().0, &params, null_mut()) }
    }

    fn outputs(&self) -> (&[i32], &[i32], &[i64], &[u32]) {
        (&self.num_accepted, &self.accepted_nodes, &self.output_tokens, &self.buffers.flags)
    }
}

fn padded<T: Copy>(values: impl IntoIterator<Item = T>, len: usize, padding: T) -> Vec<T> {
    let mut values: Vec<T> = values.into_iter().collect();
    assert!(values.len() <= len);
    values.resize(len, padding);
    values
}

proptest! {
    #![proptest_config(common::cases(300))]

    #[test]
    fn equals_an_independent_walk(tree in tree(), choices in prop::collection::vec(-2i64..8, 64)) {
        let got = tree_accept(&links(&tree), 32, |node| choices[node]).unwrap();
        prop_assert_eq!(got, walk(&tree, |node| choices[node]));
    }

    /// Cutting a tree to its first nodes leaves links to nodes that are gone; they count as none.
    #[test]
    fn cut_trees_stay_trees(
        tree in tree(), cut in any::<prop::sample::Index>(), choices in prop::collection::vec(0i64..7, 64),
    ) {
        let n = cut.index(tree.num_nodes()) + 1;
        let links = TreeLinks {
            tokens: &tree.tokens[..n],
            first_child: &tree.first_child[..n],
            next_sibling: &tree.next_sibling[..n],
        };
        let small = Tree { parents: tree.parents[..n].to_vec(), tokens: tree.tokens[..n].to_vec(), ..tree.clone() };
        prop_assert_eq!(tree_accept(&links, 32, |node| choices[node]).unwrap(), walk(&small, |node| choices[node]));
    }

    #[test]
    fn greedy_choice_is_the_argmax(row in prop::collection::vec(logit(), 1..3000)) {
        let choice = |row: TensorRef<'_>| greedy_choice(row);
        prop_assert_eq!(choice(TensorRef::new(&row, &[row.len()]).unwrap()), argmax(&row));
        let half: Vec<f16> = row.iter().map(|&x| f16::from_f32(x)).collect();
        let widened: Vec<f32> = half.iter().map(|x| x.to_f32()).collect();
        prop_assert_eq!(choice(TensorRef::new(&half, &[row.len()]).unwrap()), argmax(&widened));
        // ties: everything twice
        let twice = [&row[..], &row[..]].concat();
        prop_assert_eq!(choice(TensorRef::new(&twice, &[twice.len()]).unwrap()).token, argmax(&row).token);
    }

    #[test]
    fn sampled_choice_is_the_argmax_with_noise(
        row in prop::collection::vec(logit(), 1..3000), seed: i64, position: i64, large: bool,
    ) {
        // large values round the noise away, so that sums are equal
        let row: Vec<f32> = row.iter().map(|&x| if large { x * 1e9 } else { x }).collect();
        let got = sampled_choice(TensorRef::new(&row, &[row.len()]).unwrap(), GumbelNoise::new(seed, position));
        prop_assert_eq!(got, sample(&row, seed, position));
    }

    /// Noise per request, keyed by seed and position, and every optional output.
    #[test]
    fn c_abi_samples(
        requests in prop::collection::vec(request(), 0..5),
        settings in prop::collection::vec((prop::sample::select(vec![0.0f32, 0.5, 1.0]), any::<i64>()), 5),
    ) {
        let d = requests.iter().flat_map(|(_, tree, _)| tree).flat_map(|tree| &tree.depths).max();
        let d = *d.unwrap_or(&0) as usize;
        let mut call = Call::new(&requests, d);
        let n = call.buffers.max_nodes;
        for (r, (_, tree, _)) in requests.iter().enumerate() {
            for (node, &depth) in tree.iter().flat_map(|tree| &tree.depths).enumerate() {
                call.buffers.positions[r * n + node] = 100 * r as i64 + i64::from(depth);
            }
        }
        let (mut counts, mut nodes, mut tokens) = (Vec::new(), Vec::new(), Vec::new());
        let (mut rows, mut positions, mut rejected) = (Vec::new(), Vec::new(), Vec::new());
        for (r, (idle, tree, logits)) in requests.iter().enumerate() {
            let choice = |node: usize| {
                let row = &logits[node * VOCAB..(node + 1) * VOCAB];
                let position = call.buffers.positions[r * n + node];
                if settings[r].0 == 0.0 { argmax(row) } else { sample(row, settings[r].1, position) }
            };
            let path = tree.as_ref().map(|tree| walk(tree, |node| choice(node).token));
            let visited = path.iter().flat_map(|path| [0].into_iter().chain(path.nodes.iter().copied()));
            rows.extend(padded(visited.map(|node| call.query_start[r] + node), d + 1, -1));
            let count = path.as_ref().map_or(-1, |path| path.nodes.len() as i32);
            counts.push(count);
            positions.push(path.as_ref().map_or(0, |_| 100 * r as i64 + i64::from(count) + 1));
            let size = tree.as_ref().map_or(0, Tree::num_nodes);
            rejected.push(path.as_ref().map_or(0, |_| (size + idle) as i32 - 1 - count));
            nodes.extend(padded(path.iter().flat_map(|path| path.nodes.iter().copied()), d, -1));
            tokens.extend(padded(path.iter().flat_map(|path| path.tokens.iter().copied()), d + 1, -1));
        }
        let (temperatures, seeds): (Vec<f32>, Vec<i64>) = settings.iter().copied().unzip();
        let logits = call.logits.clone();
        let mut accepted_rows = vec![POISON; requests.len() * (d + 1)];
        let mut next_positions = vec![POISON_64; requests.len()];
        let mut num_rejected = vec![POISON; requests.len()];
        let mut tree = call.buffers.raw();
        let set = |params: &mut ddt_tree_accept_params| {
            (params.temperatures, params.seeds) = (temperatures.as_ptr(), seeds.as_ptr());
            params.accepted_rows = accepted_rows.as_mut_ptr();
            params.next_positions = next_positions.as_mut_ptr();
            params.num_rejected = num_rejected.as_mut_ptr();
        };
        let view = tensor(&logits, &[logits.len() / VOCAB, VOCAB]);
        prop_assert_eq!(call.run_with(view, null(), set, &mut tree), DDT_OK, "{}", last_error());
        let (got_counts, got_nodes, got_tokens, _) = call.outputs();
        prop_assert_eq!((got_counts, got_nodes, got_tokens), (&counts[..], &nodes[..], &tokens[..]));
        prop_assert_eq!((accepted_rows, next_positions, num_rejected), (rows, positions, rejected));
    }

    /// A batch through the C ABI, greedy and sampled: same walk, all outputs written.
    #[test]
    fn c_abi_writes_every_output(requests in prop::collection::vec(request(), 0..5)) {
        let d = requests.iter().flat_map(|(_, tree, _)| tree).flat_map(|tree| &tree.depths).max();
        let d = *d.unwrap_or(&0) as usize;
        let mut counts = Vec::new();
        let (mut nodes, mut tokens, mut flags) = (Vec::new(), Vec::new(), Vec::new());
        for (_, tree, rows) in &requests {
            let choice = |node: usize| argmax(&rows[node * VOCAB..(node + 1) * VOCAB]);
            let path = tree.as_ref().map(|tree| walk(tree, |node| choice(node).token));
            counts.push(path.as_ref().map_or(-1, |path| path.nodes.len() as i32));
            let bad = path.iter().flat_map(|path| [0].into_iter().chain(path.nodes.iter().copied()))
                .any(|node| choice(node as usize).is_nonfinite);
            flags.push(4 | if bad { FLAG_NONFINITE } else { 0 });
            nodes.extend(padded(path.iter().flat_map(|path| path.nodes.iter().copied()), d, -1));
            tokens.extend(padded(path.iter().flat_map(|path| path.tokens.iter().copied()), d + 1, -1));
        }

        let mut greedy = Call::new(&requests, d);
        let logits = greedy.logits.clone();
        let rows = logits.len() / VOCAB;
        prop_assert_eq!(greedy.run(tensor(&logits, &[rows, VOCAB]), null()), DDT_OK, "{}", last_error());
        prop_assert_eq!(greedy.outputs(), (&counts[..], &nodes[..], &tokens[..], &flags[..]));

        // the caller's tokens: same outputs, no flags
        let mut sampled = Call::new(&requests, d);
        let node_tokens = sampled.node_tokens.clone();
        prop_assert_eq!(sampled.run(ABSENT, node_tokens.as_ptr()), DDT_OK, "{}", last_error());
        prop_assert_eq!(sampled.outputs(), (&counts[..], &nodes[..], &tokens[..], &vec![4; requests.len()][..]));

        // bf16 that is exact, column-major, with a gap; flags may be left out
        let exact: Vec<f32> = logits.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        let mut plain = Call::new(&requests, d);
        prop_assert_eq!(plain.run(tensor(&exact, &[rows, VOCAB]), null()), DDT_OK);
        let mut spread = vec![bf16::NAN; (rows + 3) * VOCAB];
        for (i, &x) in exact.iter().enumerate() {
            spread[(i % VOCAB) * (rows + 3) + i / VOCAB] = bf16::from_f32(x);
        }
        let mut strided = Call::new(&requests, d);
        let mut view = tensor(&spread, &[VOCAB, rows + 3]);
        (view.shape[0], view.shape[1]) = (rows as i64, VOCAB as i64);
        (view.strides[0], view.strides[1]) = (1, rows as i64 + 3);
        let mut tree = strided.buffers.raw();
        tree.flags = null_mut();
        prop_assert_eq!(strided.run_with(view, null(), |_| {}, &mut tree), DDT_OK, "{}", last_error());
        let (counts, nodes, tokens, _) = plain.outputs();
        prop_assert_eq!(strided.outputs(), (counts, nodes, tokens, &vec![4; requests.len()][..]));
    }
}

#[test]
fn ties_and_numbers_that_never_win() {
    let choose = |row: &[f32]| {
        let choice = greedy_choice(TensorRef::new(row, &[row.len()]).expect("a vector"));
        (choice.token, choice.is_nonfinite)
    };
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    assert_eq!(choose(&[1.0, 3.0, 3.0]), (1, false));
    assert_eq!(choose(&[-0.0, 0.0]), (0, false));
    assert_eq!(choose(&[nan, -5.0, nan]), (1, true));
    assert_eq!(choose(&[nan, nan]), (0, true));
    assert_eq!(choose(&[-inf, -inf]), (0, true));
    assert_eq!(choose(&[-inf, f32::MIN]), (1, false));
    assert_eq!(choose(&[1.0, inf, inf]), (1, false));
    let mut long = vec![0.0; 250_000];
    (long[249_999], long[131_072], long[131_071]) = (2.0, 2.0, nan);
    assert_eq!(choose(&long), (131_072, true));
}

/// A root with the chain 10, 11 below it.
fn chain() -> Request {
    let topology =
        Topology { parents: &[-1, 0, 1], tokens: Some(&[9, 1, 2]), priorities: None, root_position: 0 };
    (1, Some(tree_mask(&topology).expect("a tree").0), vec![0.0; 3 * VOCAB])
}

/// Runs a call with sampled tokens that must fail, and checks that no output moved.
fn fails(
    max_depth: usize,
    prepare: impl FnOnce(&mut Call),
    change: impl FnOnce(&mut ddt_tree_accept_params),
) -> (ddt_status, String) {
    let mut call = Call::new(&[chain(), chain()], max_depth);
    call.node_tokens = vec![-3, 1, 2, 5, -3, 1, 2, 5, -3, -3];
    prepare(&mut call);
    let node_tokens = call.node_tokens.clone();
    let mut tree = call.buffers.raw();
    let status = call.run_with(ABSENT, node_tokens.as_ptr(), change, &mut tree);
    let text = last_error();
    assert_eq!(call.num_accepted, [POISON; 2], "num_accepted after: {text}");
    assert!(call.accepted_nodes.iter().all(|&node| node == POISON), "accepted_nodes after: {text}");
    assert!(call.output_tokens.iter().all(|&token| token == POISON_64), "output_tokens after: {text}");
    assert_eq!(call.buffers.flags, [4; 2], "flags after: {text}");
    (status, text)
}

#[test]
fn hostile_links_are_refused() {
    let check = |(status, text): (ddt_status, String), want: &str| {
        assert_eq!((status, &text[..]), (DDT_INVALID_VALUE, &format!("tree_accept: {want}")[..]));
    };
    // request 1 of 2 is bad: the row of request 0 must stay as it was, too
    let n = 5;
    for link in [0, 1] {
        let want = format!("request 1: first_child[1]: got {link}, want -1 or a later node");
        check(fails(2, |call| call.buffers.first_child[n + 1] = link, |_| {}), &want);
    }
    check(
        fails(
            2,
            |call| {
                // a cycle of siblings
                call.buffers.tokens[n + 1] = 77;
                call.buffers.next_sibling[n + 1] = 1;
            },
            |_| {},
        ),
        "request 1: next_sibling[1]: got 1, want -1 or a later node",
    );
    check(fails(1, |_| {}, |_| {}), "request 0: depth of node 2: got 2, want at most 1");
}

#[test]
fn bad_arguments_are_refused() {
    let check = |(status, text): (ddt_status, String), want_status: ddt_status, want: &str| {
        assert_eq!((status, &text[..]), (want_status, &format!("tree_accept: {want}")[..]));
    };
    let same = |_: &mut Call| {};
    check(
        fails(2, same, |params| params.node_tokens = null()),
        DDT_INVALID_VALUE,
        "logits and node_tokens: got neither, want exactly one",
    );
    let data = [0.0f32; 70];
    let logits = tensor(&data, &[10, 7]);
    check(
        fails(2, same, |params| params.logits = logits),
        DDT_INVALID_VALUE,
        "logits and node_tokens: got both, want exactly one",
    );
    let with_logits =
        |logits: ddt_tensor| fails(2, same, |params| (params.logits, params.node_tokens) = (logits, null()));
    check(
        with_logits(tensor(&data, &[7, 10])),
        DDT_INVALID_VALUE,
        "query_start[1] and [2]: got 5 and 9, want 0 <= first <= second <= 7",
    );
    check(
        with_logits(tensor(&[] as &[f32], &[10, 0])),
        DDT_INVALID_SHAPE,
        "logits vocabulary: got 0, want 1..2^31 (token ids are i32)",
    );
    check(
        with_logits(ddt_tensor { shape: [10, 1 << 40, 0, 0], strides: [1, 0, 0, 0], ..logits }),
        DDT_INVALID_SHAPE,
        "logits vocabulary: got 1099511627776, want 1..2^31 (token ids are i32)",
    );
    check(
        with_logits(ddt_tensor { strides: [i64::MAX / 2, 1, 0, 0], ..logits }),
        DDT_INVALID_SHAPE,
        "logits extent in memory: got shape [10, 7] with strides [4611686018427387903, 1], want less than 2^63 bytes",
    );
    check(
        with_logits(ddt_tensor { strides: [-7, 1, 0, 0], ..logits }),
        DDT_INVALID_SHAPE,
        "logits strides[0]: got -7, want >= 0",
    );
    check(
        with_logits(ddt_tensor { shape: [-1, 7, 0, 0], ..logits }),
        DDT_INVALID_SHAPE,
        "logits shape[0]: got -1, want >= 0",
    );
    check(with_logits(ddt_tensor { ndim: 3, ..logits }), DDT_INVALID_SHAPE, "logits ndim: got 3, want 2");
    check(
        with_logits(ddt_tensor { ndim: 1 << 31, ..logits }),
        DDT_INVALID_SHAPE,
        "logits ndim: got 2147483648, want 2",
    );
    check(
        with_logits(ddt_tensor { dtype: 77, ..logits }),
        DDT_INVALID_DTYPE,
        "logits dtype: got number 77, want 1..=6 (DDT_DTYPE_*)",
    );
    check(
        with_logits(ddt_tensor { dtype: DDT_DTYPE_I32, ..logits }),
        DDT_INVALID_DTYPE,
        "logits dtype: got i32, want f32 or f16 or bf16",
    );
    check(
        with_logits(ddt_tensor { data: null_mut(), ..logits }),
        DDT_NULL_POINTER,
        "logits data: got NULL, want f32 elements",
    );
    let (status, _) = with_logits(ddt_tensor { data: logits.data.wrapping_byte_add(2), ..logits });
    assert_eq!(status, DDT_MISALIGNED);

    for (r, value, want) in [
        (1, -1, "query_start[0] and [1]: got 1 and -1, want 0 <= first <= second <= 2147483647"),
        (1, 0, "query_start[0] and [1]: got 1 and 0, want 0 <= first <= second <= 2147483647"),
        (2, 7, "tree.num_nodes[1]: got 3, want 0..=2 (its rows, at most 256)"),
    ] {
        check(fails(2, |call| call.query_start[r] = value, |_| {}), DDT_INVALID_VALUE, want);
    }
    for count in [-1, 6] {
        check(
            fails(2, |call| call.buffers.num_nodes[1] = count, |_| {}),
            DDT_INVALID_VALUE,
            &format!("tree.num_nodes[1]: got {count}, want 0..=5 (max_nodes)"),
        );
    }
    check(fails(2, same, |params| params.flags = 1), DDT_UNSUPPORTED, "params.flags: got 0x1, want 0");
    check(
        fails(2, same, |params| params.tree = null_mut()),
        DDT_NULL_POINTER,
        "tree: got NULL, want a pointer",
    );
    check(
        fails(2, same, |params| params.query_start = null()),
        DDT_NULL_POINTER,
        "query_start: got NULL, want a pointer",
    );
    check(
        fails(2, same, |params| params.num_accepted = null_mut()),
        DDT_NULL_POINTER,
        "num_accepted: got NULL, want a pointer",
    );
    check(
        fails(2, same, |params| params.accepted_nodes = null_mut()),
        DDT_NULL_POINTER,
        "accepted_nodes: got NULL, want a pointer",
    );
    check(
        fails(2, same, |params| params.output_tokens = null_mut()),
        DDT_NULL_POINTER,
        "output_tokens: got NULL, want a pointer",
    );
    let (status, _) =
        fails(2, same, |params| params.output_tokens = params.output_tokens.wrapping_byte_add(4));
    assert_eq!(status, DDT_MISALIGNED);
}

#[test]
fn sampling_needs_logits_seeds_and_positions() {
    let (temperatures, seeds) = ([1.0f32; 2], [7i64; 2]);
    let check = |(status, text): (ddt_status, String), want_status: ddt_status, want: &str| {
        assert_eq!((status, &text[..]), (want_status, &format!("tree_accept: {want}")[..]));
    };
    let same = |_: &mut Call| {};
    for (temperatures, seeds, alone) in
        [(temperatures.as_ptr(), null(), "temperatures"), (null(), seeds.as_ptr(), "seeds")]
    {
        check(
            fails(2, same, |params| (params.temperatures, params.seeds) = (temperatures, seeds)),
            DDT_INVALID_VALUE,
            &format!("temperatures and seeds: got {alone} alone, want both or neither"),
        );
    }
    check(
        fails(2, same, |params| {
            (params.temperatures, params.seeds) = (temperatures.as_ptr(), seeds.as_ptr());
        }),
        DDT_INVALID_VALUE,
        "temperatures: got them with node_tokens, want logits to sample from",
    );
    let mut next_positions = [POISON_64; 2];
    check(
        fails(2, same, |params| {
            params.next_positions = next_positions.as_mut_ptr();
            // SAFETY: `fails` passes a tree that it owns.
            unsafe { (*params.tree).positions = null_mut() };
        }),
        DDT_NULL_POINTER,
        "tree.positions: got NULL, want a pointer",
    );
    assert_eq!(next_positions, [POISON_64; 2]);
}

/// A caller compiled before sampling existed; one compiled after something that is yet to come.
#[test]
fn older_and_newer_callers() {
    let run = |size: usize, tail: u64| {
        #[repr(C)]
        struct Newer {
            known: ddt_tree_accept_params,
            tail: u64,
        }
        let mut call = Call::new(&[chain()], 2);
        call.node_tokens = vec![-3, 1, 2, 5, -3];
        let (node_tokens, mut accepted_rows) = (call.node_tokens.clone(), [POISON; 3]);
        let mut status = DDT_INTERNAL;
        let mut tree = call.buffers.raw();
        let grow = |params: &mut ddt_tree_accept_params| {
            params.accepted_rows = accepted_rows.as_mut_ptr();
            let newer = Newer { known: ddt_tree_accept_params { struct_size: size as u32, ..*params }, tail };
            // SAFETY: struct_size bytes are readable, and all arrays have their lengths.
            status = unsafe { ddt_tree_accept(Context::new().0, &raw const newer.known, null_mut()) };
            // what `run_with` calls afterwards is to fail
            params.flags = 1;
        };
        assert_eq!(call.run_with(ABSENT, node_tokens.as_ptr(), grow, &mut tree), DDT_UNSUPPORTED);
        (status, call.num_accepted[0], accepted_rows)
    };
    let known = size_of::<ddt_tree_accept_params>();
    let old = std::mem::offset_of!(ddt_tree_accept_params, temperatures);
    assert_eq!(run(known, 1), (DDT_OK, 2, [1, 2, 3]));
    assert_eq!(run(old, 1), (DDT_OK, 2, [POISON; 3]));
    assert_eq!(run(known + 8, 0), (DDT_OK, 2, [1, 2, 3]));
    assert_eq!(run(known + 8, 1), (DDT_UNSUPPORTED, POISON, [POISON; 3]));
}

#[test]
fn workspace_is_not_needed() {
    let mut call = Call::new(&[chain()], 2);
    let mut tree = call.buffers.raw();
    let mut bytes = 77;
    let query = |params: &mut ddt_tree_accept_params| {
        // SAFETY: the parameters are valid.
        let status = unsafe { ddt_tree_accept_workspace_size(Context::new().0, params, &mut bytes) };
        assert_eq!(status, DDT_OK);
    };
    let node_tokens = call.node_tokens.clone();
    assert_eq!(call.run_with(ABSENT, node_tokens.as_ptr(), query, &mut tree), DDT_OK);
    assert_eq!(bytes, 0);
}

#[test]
fn rust_callers_get_errors_too() {
    let links = TreeLinks { tokens: &[], first_child: &[], next_sibling: &[] };
    assert_eq!(tree_accept(&links, 3, |_| 0).expect_err("no root").status(), Status::InvalidShape);
    let links = TreeLinks { tokens: &[1, 2], first_child: &[1], next_sibling: &[-1, -1] };
    assert_eq!(tree_accept(&links, 3, |_| 0).expect_err("short").status(), Status::InvalidShape);
    // an unsorted sibling list is fine as long as it moves forward
    let parents = [-1, 0, 0, 0];
    let fields = reference::fields(&parents);
    let links = TreeLinks {
        tokens: &[0, 5, 4, 6],
        first_child: &fields.first_child,
        next_sibling: &fields.next_sibling,
    };
    let path = tree_accept(&links, 3, |node| if node == 0 { 6 } else { 8 }).expect("a path");
    assert_eq!(path, AcceptedPath { nodes: vec![3], tokens: vec![6, 8] });
}
