// SPDX-License-Identifier: Apache-2.0
//! ddt_tree_build: batches equal the Rust function per request, every output is written, and
//! hostile input is refused before anything is.

mod common;

use std::ptr::{null, null_mut};

use common::buffers::{ABSENT, Context, POISON, TreeBuffers, last_error, tensor};
use ddtree::ffi::*;
use ddtree::{DraftScores, TargetNoise, TensorRef, Tree, TreeRequest, tree_build};
use half::bf16;
use proptest::prelude::*;

const MAX_NODES: usize = 37;
const MAX_DEPTH: usize = 4;
const STOPS: usize = 2;

/// The arguments of one call; every optional array is there and can be dropped.
#[derive(Clone, Debug)]
struct Arguments {
    root_tokens: Vec<i32>,
    root_positions: Vec<i64>,
    node_budgets: Vec<i32>,
    depth_caps: Vec<i32>,
    candidate_caps: Vec<i32>,
    spine_depths: Vec<i32>,
    stop_tokens: Vec<i32>,
    stop_min_depths: Vec<i32>,
    depth_scales: Vec<f32>,
    seeds: Vec<i64>,
    temperatures: Vec<f32>,
    /// Which of the optional arrays are passed.
    given: [bool; 8],
}

impl Arguments {
    fn new(num_reqs: usize, num_depths: usize) -> Self {
        Self {
            root_tokens: (0..num_reqs as i32).map(|r| 100 + r).collect(),
            root_positions: (0..num_reqs as i64).map(|r| r << 40).collect(),
            node_budgets: vec![7; num_reqs],
            depth_caps: vec![9; num_reqs],
            candidate_caps: vec![0; num_reqs],
            spine_depths: vec![0; num_reqs],
            stop_tokens: vec![-1; num_reqs * STOPS],
            stop_min_depths: vec![0; num_reqs],
            depth_scales: vec![1.0; num_depths],
            seeds: vec![7; num_reqs],
            temperatures: vec![0.0; num_reqs],
            given: [true; 8],
        }
    }

    fn params(&self, tree: &mut ddt_tree) -> ddt_tree_build_params {
        fn optional<T>(given: bool, values: &[T]) -> *const T {
            if given { values.as_ptr() } else { null() }
        }
        ddt_tree_build_params {
            struct_size: size_of::<ddt_tree_build_params>() as u32,
            flags: 0,
            logits: ABSENT,
            candidate_tokens: ABSENT,
            candidate_scores: ABSENT,
            transition_scores: ABSENT,
            depth_scales: optional(self.given[0], &self.depth_scales),
            root_tokens: self.root_tokens.as_ptr(),
            root_positions: self.root_positions.as_ptr(),
            node_budgets: optional(self.given[1], &self.node_budgets),
            depth_caps: optional(self.given[2], &self.depth_caps),
            candidate_caps: optional(self.given[3], &self.candidate_caps),
            stop_tokens: optional(self.given[4], &self.stop_tokens),
            max_stop_tokens: if self.given[4] { STOPS as i32 } else { 0 },
            max_candidates: 0,
            stop_min_depths: optional(self.given[5], &self.stop_min_depths),
            seeds: optional(self.given[6], &self.seeds),
            workspace: null_mut(),
            workspace_bytes: 0,
            tree,
            tree_index: ABSENT,
            temperatures: optional(self.given[6], &self.temperatures),
            spine_depths: optional(self.given[7], &self.spine_depths),
        }
    }

    /// The tree of request `r` from the Rust function; without nodes for a padding request.
    fn expected(&self, r: usize, draft: &DraftScores<'_>) -> (Tree, u32) {
        let budget = if self.given[1] { self.node_budgets[r] } else { MAX_NODES as i32 - 1 };
        if budget < 0 {
            return (Tree::default(), 0);
        }
        let request = TreeRequest {
            root_token: self.root_tokens[r],
            root_position: self.root_positions[r],
            node_budget: budget as usize,
            max_depth: MAX_DEPTH.min(if self.given[2] { self.depth_caps[r] as usize } else { usize::MAX }),
            candidate_cap: if self.given[3] { self.candidate_caps[r].max(0) as usize } else { 0 },
            spine_depth: if self.given[7] { self.spine_depths[r].max(0) as usize } else { 0 },
            stop_tokens: if self.given[4] { &self.stop_tokens[r * STOPS..(r + 1) * STOPS] } else { &[] },
            stop_min_depth: if self.given[5] { self.stop_min_depths[r] } else { 0 },
            noise: (self.given[6] && self.temperatures[r] > 0.0)
                .then(|| TargetNoise { seed: self.seeds[r], temperature: self.temperatures[r] }),
        };
        let built =
            tree_build(draft, self.given[0].then_some(&self.depth_scales[..]), &request).expect("a tree");
        (built.tree, built.flags)
    }
}

fn arguments(num_reqs: usize, num_depths: usize) -> impl Strategy<Value = Arguments> {
    use prop::collection::vec;
    (
        (vec(0i32..1000, num_reqs), vec(0i64..1 << 50, num_reqs)),
        vec(prop_oneof![Just(-1i32), 0i32..MAX_NODES as i32], num_reqs),
        vec(0i32..6, num_reqs),
        (vec(-1i32..4, num_reqs), vec(prop::sample::select(&[i32::MIN, 0, 1, 3, i32::MAX][..]), num_reqs)),
        vec(-1i32..9, num_reqs * STOPS),
        vec(-1i32..4, num_reqs),
        vec(0.25f32..4.0, num_depths),
        vec((any::<i64>(), prop::sample::select(&[0.0f32, -0.0, 0.6, 1.0, 3.0][..])), num_reqs),
        prop::array::uniform8(any::<bool>()),
    )
        .prop_map(
            |(
                (root_tokens, root_positions),
                node_budgets,
                depth_caps,
                (candidate_caps, spine_depths),
                stop_tokens,
                stop_min_depths,
                depth_scales,
                sampling,
                given,
            )| {
                let (seeds, temperatures) = sampling.into_iter().unzip();
                Arguments {
                    root_tokens,
                    root_positions,
                    node_budgets,
                    depth_caps,
                    candidate_caps,
                    spine_depths,
                    stop_tokens,
                    stop_min_depths,
                    depth_scales,
                    seeds,
                    temperatures,
                    given,
                }
            },
        )
}

fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -5.0f32..5.0,
        3 => prop::sample::select(vec![0.0f32, 1.0]),
        1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
    ]
}

/// `(R, L, V)`, arguments, `[R * L * V]` logits.
fn batch() -> impl Strategy<Value = ((usize, usize, usize), Arguments, Vec<f32>)> {
    (0usize..5, 0usize..7, 0usize..9).prop_flat_map(|(r, l, v)| {
        (Just((r, l, v)), arguments(r, l), prop::collection::vec(logit(), r * l * v))
    })
}

fn build(params: &ddt_tree_build_params) -> ddt_status {
    // SAFETY: all arrays have the lengths that the header asks for, or the call refuses them.
    unsafe { ddt_tree_build(Context::new().0, params, null_mut()) }
}

proptest! {
    #![proptest_config(common::cases(200))]

    #[test]
    fn logits_batches_write_every_field(
        ((r, l, v), arguments, logits) in batch(), max_candidates in prop::sample::select(vec![0usize, 0, 1, 3]),
    ) {
        // vocabulary first, so that no stride is 1; poison between
        let mut spread = vec![bf16::NAN; 2 * r * l * v];
        let at = |i: usize| 2 * ((i % v) * r * l + i / v);
        for (i, &x) in logits.iter().enumerate() {
            spread[at(i)] = bf16::from_f32(x);
        }
        let mut view = tensor(&spread, &[v, r, l, 2]);
        (view.ndim, view.shape) = (3, [r as i64, l as i64, v as i64, -1]);
        view.strides = [2 * l as i64, 2, 2 * (r * l) as i64, -1];

        let rounded: Vec<f32> = logits.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        let trees: Vec<_> = (0..r)
            .map(|r| {
                let logits = TensorRef::new(&rounded[r * l * v..(r + 1) * l * v], &[l, v]).unwrap();
                arguments.expected(r, &DraftScores::Logits { logits, max_candidates })
            })
            .collect();
        for logits in [view, tensor(&rounded, &[r, l, v])] {
            let mut buffers = TreeBuffers::poisoned(r, MAX_NODES, MAX_DEPTH);
            let mut tree = buffers.raw();
            let params = ddt_tree_build_params {
                logits, max_candidates: max_candidates as i32, ..arguments.params(&mut tree)
            };
            prop_assert_eq!(build(&params), DDT_OK, "{}", last_error());
            prop_assert_eq!(last_error(), "");
            prop_assert_eq!(&buffers, &TreeBuffers::expected(MAX_NODES, MAX_DEPTH, &trees));
        }
    }

    #[test]
    fn an_index_names_the_trees_that_are_written(
        ((r, l, v), arguments, logits) in batch(),
        trees in Just((0i64..7).collect::<Vec<_>>()).prop_shuffle(),
        skipped in prop::array::uniform5(prop::bool::weighted(0.2)),
        is_wide: bool,
    ) {
        // every other entry is not the index's
        let mut index = vec![99i64; 2 * r];
        for i in 0..r {
            index[2 * i] = if skipped[i] { -1 - trees[i] } else { trees[i] };
        }
        let narrow: Vec<i32> = index.iter().map(|&tree| tree as i32).collect();
        let mut tree_index = if is_wide { tensor(&index, &[2 * r]) } else { tensor(&narrow, &[2 * r]) };
        (tree_index.shape[0], tree_index.strides[0]) = (r as i64, 2);

        let built: Vec<_> = (0..r)
            .map(|r| {
                let logits = TensorRef::new(&logits[r * l * v..(r + 1) * l * v], &[l, v]).unwrap();
                arguments.expected(r, &DraftScores::Logits { logits, max_candidates: 0 })
            })
            .collect();
        let built = TreeBuffers::expected(MAX_NODES, MAX_DEPTH, &built);
        let mut expected = TreeBuffers::poisoned(7, MAX_NODES, MAX_DEPTH);
        for i in (0..r).filter(|&i| !skipped[i]) {
            expected.copy_tree(trees[i] as usize, &built, i);
        }
        let mut buffers = TreeBuffers::poisoned(7, MAX_NODES, MAX_DEPTH);
        let mut tree = buffers.raw();
        let params = ddt_tree_build_params {
            logits: tensor(&logits, &[r, l, v]), tree_index, ..arguments.params(&mut tree)
        };
        prop_assert_eq!(build(&params), DDT_OK, "{}", last_error());
        prop_assert_eq!(&buffers, &expected);
    }

    #[test]
    fn lattice_batches_write_every_field(
        (r, l) in (0usize..4, 0usize..6),
        seed in prop::collection::vec(logit(), 600),
        with_transitions: bool,
        with_scores: bool,
        given in prop::array::uniform8(any::<bool>()),
    ) {
        const K: usize = 3;
        let with_scores = with_scores || !with_transitions;
        let arguments = Arguments { given, spine_depths: vec![3, 0, 1, 9][..r].to_vec(), ..Arguments::new(r, l) };
        let take = |count: usize, from: usize| -> Vec<f32> { seed[from..].iter().copied().cycle().take(count).collect() };
        let tokens: Vec<i32> = (0..r * l * K).map(|i| if i % 7 == 0 { -1 } else { 40 - i as i32 }).collect();
        let scores = take(r * l * K, 0);
        let transitions = take(r * l * K * K, 100);
        let trees: Vec<_> = (0..r)
            .map(|r| {
                let row = |size: usize| r * l * size..(r + 1) * l * size;
                arguments.expected(r, &DraftScores::Lattice {
                    tokens: TensorRef::new(&tokens[row(K)], &[l, K]).unwrap(),
                    scores: with_scores.then(|| TensorRef::new(&scores[row(K)], &[l, K]).unwrap()),
                    transitions: with_transitions
                        .then(|| TensorRef::new(&transitions[row(K * K)], &[l, K, K]).unwrap()),
                })
            })
            .collect();
        let mut buffers = TreeBuffers::poisoned(r, MAX_NODES, MAX_DEPTH);
        let mut tree = buffers.raw();
        let params = ddt_tree_build_params {
            candidate_tokens: tensor(&tokens, &[r, l, K]),
            candidate_scores: if with_scores { tensor(&scores, &[r, l, K]) } else { ABSENT },
            transition_scores: if with_transitions { tensor(&transitions, &[r, l, K, K]) } else { ABSENT },
            ..arguments.params(&mut tree)
        };
        prop_assert_eq!(build(&params), DDT_OK, "{}", last_error());
        prop_assert_eq!(&buffers, &TreeBuffers::expected(MAX_NODES, MAX_DEPTH, &trees));
    }
}

const R: usize = 2;
const L: usize = 3;
const V: usize = 5;

/// Runs a call over logits that must fail; checks that no output moved.
fn fails(
    change: impl FnOnce(&mut Arguments, &mut ddt_tree),
    params: impl FnOnce(&mut ddt_tree_build_params),
) -> (ddt_status, String) {
    let mut arguments = Arguments::new(R, L);
    let logits = vec![0.0f32; R * L * V];
    let mut buffers = TreeBuffers::poisoned(R, MAX_NODES, MAX_DEPTH);
    let mut tree = buffers.raw();
    change(&mut arguments, &mut tree);
    let mut all =
        ddt_tree_build_params { logits: tensor(&logits, &[R, L, V]), ..arguments.params(&mut tree) };
    params(&mut all);
    let status = build(&all);
    let text = last_error();
    assert_eq!(buffers, TreeBuffers::poisoned(R, MAX_NODES, MAX_DEPTH), "outputs after: {text}");
    (status, text)
}

fn check((status, text): (ddt_status, String), want_status: ddt_status, want: &str) {
    assert_eq!((status, &text[..]), (want_status, &format!("tree_build: {want}")[..]));
}

#[test]
fn values_out_of_range_are_refused() {
    let with = |change: fn(&mut Arguments, &mut ddt_tree)| fails(change, |_| {});
    let value = DDT_INVALID_VALUE;
    check(
        with(|a, _| a.node_budgets[1] = -2),
        value,
        "node_budgets[1]: got -2, want -1..=36 (max_nodes - 1)",
    );
    check(
        with(|a, _| a.node_budgets[1] = 37),
        value,
        "node_budgets[1]: got 37, want -1..=36 (max_nodes - 1)",
    );
    check(
        with(|a, _| a.node_budgets[1] = i32::MIN),
        value,
        "node_budgets[1]: got -2147483648, want -1..=36 (max_nodes - 1)",
    );
    check(with(|a, _| a.depth_caps[1] = -1), value, "depth_caps[1]: got -1, want >= 0");
    check(
        with(|a, _| a.root_positions[1] = -1),
        value,
        "request 1: root position: got -1, want 0..=2^63 - 33",
    );
    check(
        with(|a, _| a.root_positions[1] = i64::MAX),
        value,
        "request 1: root position: got 9223372036854775807, want 0..=2^63 - 33",
    );
    check(
        with(|a, _| a.depth_scales[2] = f32::NAN),
        value,
        "depth_scales[2]: got NaN, want a finite number above 0",
    );
    let shape = DDT_INVALID_SHAPE;
    check(with(|_, tree| tree.num_reqs = 3), shape, "logits shape[0]: got 2, want 3 (num_reqs)");
    check(with(|_, tree| tree.num_reqs = i32::MIN), shape, "tree.num_reqs: got -2147483648, want >= 0");
    check(with(|_, tree| tree.max_nodes = i32::MAX), shape, "tree.max_nodes: got 2147483647, want 1..=256");
    check(with(|_, tree| tree.max_depth = -1), shape, "tree.max_depth: got -1, want 0..=32");
    check(
        with(|_, tree| tree.num_nodes = null_mut()),
        DDT_NULL_POINTER,
        "tree.num_nodes: got NULL, want a pointer",
    );

    let with = |change: fn(&mut ddt_tree_build_params)| fails(|_, _| {}, change);
    check(with(|p| p.max_candidates = -1), value, "max_candidates: got -1, want >= 0");
    check(with(|p| p.max_stop_tokens = -1), shape, "max_stop_tokens: got -1, want >= 0");
    check(with(|p| p.flags = 0x80), DDT_UNSUPPORTED, "params.flags: got 0x80, want 0");
    for (temperature, shown) in [(f32::NAN, "NaN"), (-0.5, "-0.5"), (f32::INFINITY, "inf")] {
        check(
            fails(|a, _| a.temperatures[1] = temperature, |_| {}),
            value,
            &format!("temperatures[1]: got {shown}, want a finite number of at least 0"),
        );
    }
    check(
        with(|p| p.temperatures = null()),
        value,
        "temperatures and seeds: got seeds alone, want both or neither",
    );
    check(
        with(|p| p.seeds = null()),
        value,
        "temperatures and seeds: got temperatures alone, want both or neither",
    );
    const INDEX: [i64; 2] = [1, 1];
    check(
        with(|p| p.tree_index = tensor(&INDEX, &[2])),
        value,
        "tree_index[1]: got 1 a second time, want different trees",
    );
    check(
        with(|p| p.tree_index = tensor(&[0i32, 2], &[2])),
        value,
        "tree_index[1]: got 2, want less than 2 (tree.num_reqs)",
    );
    check(with(|p| p.tree_index = tensor(&INDEX, &[2, 1])), shape, "tree_index ndim: got 2, want 1");
    check(
        with(|p| p.tree_index = tensor(&INDEX[..1], &[1])),
        shape,
        "logits shape[0]: got 2, want 1 (as tree_index)",
    );
    check(
        with(|p| p.tree_index = tensor(&[0.0f32, 1.0], &[2])),
        DDT_INVALID_DTYPE,
        "tree_index dtype: got f32, want i32 or i64",
    );
    let null_pointer = DDT_NULL_POINTER;
    check(with(|p| p.root_tokens = null()), null_pointer, "root_tokens: got NULL, want a pointer");
    check(with(|p| p.root_positions = null()), null_pointer, "root_positions: got NULL, want a pointer");
    check(with(|p| p.stop_tokens = null()), null_pointer, "stop_tokens: got NULL, want a pointer");
    check(with(|p| p.tree = null_mut()), null_pointer, "tree: got NULL, want a pointer");
    check(with(|p| p.logits = ABSENT), value, "logits and candidate_tokens: got neither, want exactly one");
    check(
        with(|p| p.candidate_tokens = p.logits),
        value,
        "logits and candidate_tokens: got both, want exactly one",
    );
    check(
        with(|p| p.candidate_scores = p.logits),
        value,
        "candidate_scores: got a tensor, want it absent without candidate_tokens",
    );
    for change in [
        (|p| p.root_positions = p.root_positions.wrapping_byte_add(4)) as fn(&mut ddt_tree_build_params),
        |p| p.stop_tokens = p.stop_tokens.wrapping_byte_add(1),
        |p| p.depth_scales = p.depth_scales.wrapping_byte_add(2),
        |p| p.seeds = p.seeds.wrapping_byte_add(4),
        |p| p.temperatures = p.temperatures.wrapping_byte_add(1),
        |p| p.spine_depths = p.spine_depths.wrapping_byte_add(2),
        |p| p.tree = p.tree.wrapping_byte_add(4),
        |p| p.logits.data = p.logits.data.wrapping_byte_add(1),
    ] {
        assert_eq!(with(change).0, DDT_MISALIGNED);
    }
    let (status, _) = fails(|_, tree| tree.ancestor_bits = tree.ancestor_bits.wrapping_byte_add(3), |_| {});
    assert_eq!(status, DDT_MISALIGNED);
}

#[test]
fn hostile_tensors_are_refused() {
    let with = |change: fn(&mut ddt_tensor)| fails(|_, _| {}, |p| change(&mut p.logits));
    let shape = DDT_INVALID_SHAPE;
    check(with(|t| t.ndim = 2), shape, "logits ndim: got 2, want 3");
    check(with(|t| t.ndim = 5), shape, "logits ndim: got 5, want 3");
    check(
        with(|t| t.dtype = DDT_DTYPE_U8),
        DDT_INVALID_DTYPE,
        "logits dtype: got u8, want f32 or f16 or bf16",
    );
    check(
        with(|t| t.dtype = u32::MAX),
        DDT_INVALID_DTYPE,
        "logits dtype: got number 4294967295, want 1..=6 (DDT_DTYPE_*)",
    );
    check(with(|t| t.shape[2] = -1), shape, "logits shape[2]: got -1, want >= 0");
    check(with(|t| t.strides[1] = -1), shape, "logits strides[1]: got -1, want >= 0");
    check(with(|t| t.data = null_mut()), DDT_NULL_POINTER, "logits data: got NULL, want f32 elements");
    check(
        with(|t| (t.shape[2], t.strides[2]) = (i64::from(i32::MAX) + 1, 0)),
        shape,
        "logits vocabulary: got 2147483648, want less than 2^31 (token ids are i32)",
    );
    // byte extents that overflow: by a product, by a sum, by the element size
    for change in [
        (|t| (t.shape[2], t.strides[2]) = (1 << 31, i64::MAX / 1000)) as fn(&mut ddt_tensor),
        |t| t.strides = [i64::MAX - 2, i64::MAX / 4, 1, 0],
        |t| t.strides[0] = i64::MAX / 4,
    ] {
        let (status, text) = with(change);
        assert_eq!(status, shape, "{text}");
        assert!(text.contains("extent in memory"), "{text}");
    }
}

#[test]
fn hostile_lattices_are_refused() {
    let tokens: Vec<i32> = (0..12).collect();
    let scores = [0.0f32; 48];
    let with = |change: &dyn Fn(&mut ddt_tree_build_params)| {
        fails(
            |_, _| {},
            |p| {
                p.logits = ABSENT;
                p.candidate_tokens = tensor(&tokens, &[2, 3, 2]);
                p.candidate_scores = tensor(&scores[..12], &[2, 3, 2]);
                p.transition_scores = tensor(&scores[..24], &[2, 3, 2, 2]);
                change(p);
            },
        )
    };
    let shape = DDT_INVALID_SHAPE;
    check(
        with(&|p| (p.candidate_scores, p.transition_scores) = (ABSENT, ABSENT)),
        DDT_INVALID_VALUE,
        "candidate_scores and transition_scores: got neither, want at least one",
    );
    check(
        with(&|p| p.candidate_scores = tensor(&scores[..12], &[3, 2, 2])),
        shape,
        "candidate_scores shape: got [3, 2, 2], want [2, 3, 2]",
    );
    check(
        with(&|p| p.candidate_scores = tensor(&scores[..12], &[2, 2, 3])),
        shape,
        "candidate_scores shape: got [2, 2, 3], want [2, 3, 2]",
    );
    check(
        with(&|p| p.transition_scores = tensor(&scores[..12], &[2, 3, 2, 1])),
        shape,
        "transition_scores shape: got [2, 3, 2, 1], want [2, 3, 2, 2]",
    );
    check(
        with(&|p| p.transition_scores = tensor(&scores[..36], &[3, 3, 2, 2])),
        shape,
        "transition_scores shape: got [3, 3, 2, 2], want [2, 3, 2, 2]",
    );
    check(
        with(&|p| p.max_candidates = 2),
        DDT_INVALID_VALUE,
        "max_candidates: got 2, want 0 with candidate_tokens",
    );
    check(
        with(&|p| p.candidate_tokens = tensor(&scores[..12], &[2, 3, 2])),
        DDT_INVALID_DTYPE,
        "candidate_tokens dtype: got f32, want i32",
    );
    check(
        with(&|p| {
            p.candidate_tokens =
                ddt_tensor { shape: [2, 3, 1 << 40, 0], strides: [0; 4], ..p.candidate_tokens }
        }),
        shape,
        "candidate_tokens width: got 1099511627776, want at most 4096",
    );
    // the second request, so that the first one's row must stay as it was
    let repeated = [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 10, 11];
    check(
        with(&|p| p.candidate_tokens = tensor(&repeated, &[2, 3, 2])),
        DDT_INVALID_VALUE,
        "request 1: candidate_tokens of depth 1: got token 8 twice, want distinct tokens",
    );
}

/// A parameter struct of another version: `size` bytes, those beyond what is known set to `tail`.
#[repr(C, align(8))]
struct Resized<T> {
    params: T,
    tail: [u8; 64],
}

#[test]
fn parameter_structs_of_other_versions() {
    let known = size_of::<ddt_tree_build_params>() as u32;
    let logits = vec![0.0f32; R * L * V];
    let run_with = |noise: bool, size: u32, tail: [u8; 64]| {
        let mut arguments = Arguments::new(R, L);
        arguments.given[6] = noise;
        let mut buffers = TreeBuffers::poisoned(R, MAX_NODES, MAX_DEPTH);
        let mut tree = buffers.raw();
        let params = ddt_tree_build_params {
            logits: tensor(&logits, &[R, L, V]),
            struct_size: size,
            ..arguments.params(&mut tree)
        };
        let resized = Resized { params, tail };
        let status = build(&resized.params);
        let is_written = buffers != TreeBuffers::poisoned(R, MAX_NODES, MAX_DEPTH);
        assert_eq!(is_written, status == DDT_OK, "{}", last_error());
        status
    };
    let run = |size, tail| run_with(false, size, tail);
    let mut last_byte = [0; 64];
    last_byte[63] = 1;
    let mut garbage_behind = [0; 64];
    garbage_behind[16] = 1;
    assert_eq!(run(known, [0xff; 64]), DDT_OK);
    assert_eq!(run(known + 64, [0; 64]), DDT_OK);
    assert_eq!(run(known + 16, garbage_behind), DDT_OK);
    assert_eq!(run(known + 24, garbage_behind), DDT_UNSUPPORTED);
    assert_eq!(run(known + 64, last_byte), DDT_UNSUPPORTED);
    // an older one, without spine_depths
    let no_spine = std::mem::offset_of!(ddt_tree_build_params, spine_depths) as u32;
    assert_eq!(run_with(true, no_spine, [0; 64]), DDT_OK);
    // without temperatures: seeds meant nothing yet
    let older = std::mem::offset_of!(ddt_tree_build_params, temperatures) as u32;
    assert_eq!(run_with(true, older, [0; 64]), DDT_INVALID_VALUE);
    assert_eq!(run_with(true, known, [0; 64]), DDT_OK);
    assert_eq!(run(older, [0; 64]), DDT_OK);
    // and without tree_index
    let least = std::mem::offset_of!(ddt_tree_build_params, tree_index) as u32;
    assert_eq!(run(least, [0; 64]), DDT_OK);
    for size in [0, 4, least - 8, known + 4, known + 1, 5000, u32::MAX] {
        assert_eq!(run(size, [0; 64]), DDT_INVALID_STRUCT, "{size}");
        assert!(
            last_error().starts_with(&format!("tree_build: params.struct_size: got {size}, want {known} "))
        );
    }
}

#[test]
fn trees_of_other_versions() {
    let known = size_of::<ddt_tree>();
    let logits = vec![0.0f32; R * L * V];
    let arguments = Arguments::new(R, L);
    let run = |size: usize, tail: [u8; 64]| {
        let mut buffers = TreeBuffers::poisoned(R, MAX_NODES, MAX_DEPTH);
        let mut resized = Resized { params: buffers.raw(), tail };
        resized.params.struct_size = size as u32;
        let params = ddt_tree_build_params {
            logits: tensor(&logits, &[R, L, V]),
            ..arguments.params(&mut resized.params)
        };
        (build(&params), buffers)
    };
    let (status, full) = run(known, [0xff; 64]);
    assert_eq!(status, DDT_OK);
    assert!(!full.flags.contains(&(POISON as u32)));
    assert_eq!(run(known + 64, [0; 64]), (DDT_OK, full.clone()));
    assert_eq!(run(known + 64, [1; 64]).0, DDT_UNSUPPORTED);

    // an older tree that ends after depths: later fields do not exist for it, whatever is there
    let (status, old) = run(std::mem::offset_of!(ddt_tree, first_child), [0; 64]);
    assert_eq!(status, DDT_OK);
    let mut want = TreeBuffers::poisoned(R, MAX_NODES, MAX_DEPTH);
    (want.num_nodes, want.tokens) = (full.num_nodes.clone(), full.tokens.clone());
    (want.parents, want.depths) = (full.parents.clone(), full.depths.clone());
    assert_eq!(old, want);
    // num_nodes alone is the least
    let (status, least) = run(std::mem::offset_of!(ddt_tree, tokens), [0; 64]);
    assert_eq!((status, least.num_nodes, least.tokens[0]), (DDT_OK, full.num_nodes, POISON));
    let (status, untouched) = run(std::mem::offset_of!(ddt_tree, num_nodes), [0; 64]);
    assert_eq!((status, untouched), (DDT_INVALID_STRUCT, TreeBuffers::poisoned(R, MAX_NODES, MAX_DEPTH)));
}

#[test]
fn null_arguments_and_the_size_query() {
    let context = Context::new();
    let mut buffers = TreeBuffers::poisoned(R, MAX_NODES, MAX_DEPTH);
    let mut tree = buffers.raw();
    let params = Arguments::new(R, L).params(&mut tree);
    let mut bytes = 77;
    // SAFETY: NULL is what these calls are about; the rest is valid.
    unsafe {
        assert_eq!(ddt_tree_build(null(), &params, null_mut()), DDT_NULL_POINTER);
        assert_eq!(last_error(), "tree_build: context: got NULL, want a context of ddt_context_create");
        assert_eq!(ddt_tree_build(context.0, null(), null_mut()), DDT_NULL_POINTER);
        assert_eq!(last_error(), "tree_build: params: got NULL, want a pointer");
        assert_eq!(ddt_tree_build_workspace_size(null(), &params, &mut bytes), DDT_NULL_POINTER);
        assert_eq!(ddt_tree_build_workspace_size(context.0, null(), &mut bytes), DDT_NULL_POINTER);
        assert_eq!(ddt_tree_build_workspace_size(context.0, &params, null_mut()), DDT_NULL_POINTER);
        assert_eq!(last_error(), "tree_build_workspace_size: out: got NULL, want a pointer");
        assert_eq!(bytes, 77);
        assert_eq!(ddt_tree_build_workspace_size(context.0, &params, &mut bytes), DDT_OK);
        assert_eq!(bytes, 0);
    }
}
