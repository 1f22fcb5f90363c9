// SPDX-License-Identifier: Apache-2.0
//! tree_build against a brute-force selection, and its documented properties.

mod common;

use common::numbers::{Rng, fresh_seed};
use common::reference::{self, Child, Picked};
use ddtree::gumbel::GumbelNoise;
use ddtree::{
    BuiltTree, DraftScores, FLAG_CANDIDATES_EXHAUSTED, FLAG_NO_CANDIDATES, FLAG_NONFINITE, Status,
    TargetNoise, TensorRef, TreeRequest, sampled_choice, tree_build,
};
use half::{bf16, f16};
use proptest::prelude::*;

const ROOT: i32 = 99;

fn request(node_budget: usize) -> TreeRequest<'static> {
    TreeRequest {
        root_token: ROOT,
        root_position: 1000,
        node_budget,
        max_depth: 32,
        candidate_cap: 0,
        spine_depth: 0,
        stop_tokens: &[],
        stop_min_depth: 0,
        noise: None,
    }
}

fn from_logits(logits: &[f32], shape: [usize; 2], request: &TreeRequest<'_>) -> BuiltTree {
    let logits = TensorRef::new(logits, &shape).expect("a matrix");
    tree_build(&DraftScores::Logits { logits, max_candidates: 0 }, None, request).expect("a tree")
}

/// Compares set, order, ranks and scores with a brute-force selection.
fn assert_same(built: &BuiltTree, picked: &[Picked]) {
    let tree = &built.tree;
    let parents: Vec<i32> =
        picked.iter().enumerate().map(|(i, node)| if i == 0 { -1 } else { node.parent as i32 }).collect();
    let order = reference::preorder(&parents, &|i| picked[i].sibling);
    let ranks: Vec<i32> = order.iter().map(|&rank| rank as i32).collect();
    assert_eq!(tree.pop_ranks, ranks, "pop ranks in preorder, best child first");

    let mut index = vec![0; picked.len()];
    for (new, &rank) in order.iter().enumerate() {
        index[rank] = new as i32;
    }
    for (i, &rank) in order.iter().enumerate() {
        let want = &picked[rank];
        assert_eq!(tree.tokens[i], if i == 0 { ROOT } else { want.token }, "token of node {i}");
        assert_eq!(tree.parents[i], if i == 0 { -1 } else { index[want.parent] }, "parent of node {i}");
        assert_eq!(tree.depths[i], want.depth as i32, "depth of node {i}");
        assert_eq!(i64::from(built.path_scores[i]), want.score, "score of node {i}");
    }
    let fields = reference::fields(&tree.parents);
    assert_eq!(tree.first_child, fields.first_child);
    assert_eq!(tree.next_sibling, fields.next_sibling);
    assert_eq!(tree.subtree_end, fields.subtree_end);
    assert_eq!(tree.root_position, 1000);
}

/// Temperatures and seeds of requests that are sampled.
fn target_noise() -> impl Strategy<Value = TargetNoise> {
    let temperature = prop::sample::select(vec![0.01f32, 0.3, 0.6, 1.0, 1.5, 40.0]);
    (any::<i64>(), temperature).prop_map(|(seed, temperature)| TargetNoise { seed, temperature })
}

/// The sorted vocabulary of each depth.
fn sorted_depths(logits: &[f32], vocab: usize, scale: impl Fn(usize) -> f32) -> Vec<Vec<Child>> {
    logits.chunks(vocab).enumerate().map(|(d, row)| reference::vocab_children(row, scale(d))).collect()
}

/// What is left of a child list under a cap; 0 = no cap.
fn capped(children: &[Child], cap: usize) -> Vec<Child> {
    children.iter().copied().take(if cap == 0 { usize::MAX } else { cap }).collect()
}

/// Ordinary numbers, heavy ties, and numbers that mean "never".
fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -20.0f32..20.0,
        4 => prop::sample::select(vec![0.0f32, 1.0, 2.0]),
        1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN, -1.0e-40]),
    ]
}

/// Depths of a spine; most trees have none.
fn spine() -> impl Strategy<Value = usize> {
    prop::sample::select(vec![0usize, 0, 0, 1, 2, 5, 32, usize::MAX])
}

fn tied_logit() -> impl Strategy<Value = f32> {
    prop::sample::select(vec![0.0f32, 0.0, 0.0, -1.0])
}

/// `(L, V, [L * V] logits)`.
fn rows(value: impl Strategy<Value = f32> + Clone) -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    (1usize..6, 1usize..14)
        .prop_flat_map(move |(l, v)| (Just(l), Just(v), prop::collection::vec(value.clone(), l * v)))
}

fn any_rows() -> impl Strategy<Value = (usize, usize, Vec<f32>)> {
    prop_oneof![rows(logit().boxed()), rows(tied_logit().boxed())]
}

proptest! {
    #![proptest_config(common::cases(300))]

    #[test]
    fn equals_the_brute_force_selection(
        (l, v, logits) in any_rows(),
        budget in 0usize..40,
        cap in 0usize..7,
        candidate_cap in prop::sample::select(vec![0usize, 0, 1, 2, 300]),
        stops in prop::collection::vec(-1i32..14, 0..3),
        stop_min_depth in 0i32..4,
        scales in prop::option::of(prop::collection::vec(prop::sample::select(vec![0.5f32, 1.0, 1.7]), 5)),
        spine_depth in spine(),
    ) {
        let scale = |d: usize| scales.as_ref().map_or(1.0, |scales| scales[d]);
        let children = sorted_depths(&logits, v, scale);
        let picked = reference::brute_force_with_spine(
            spine_depth,
            budget,
            l.min(cap),
            |depth, _| capped(&children[depth], candidate_cap),
            |token, depth| stops.contains(&token) && depth as i32 >= stop_min_depth,
        );
        let request = TreeRequest {
            max_depth: cap, candidate_cap, spine_depth, stop_tokens: &stops, stop_min_depth, ..request(budget)
        };
        let draft = DraftScores::Logits { logits: TensorRef::new(&logits, &[l, v]).unwrap(), max_candidates: 0 };
        let built = tree_build(&draft, scales.as_deref().map(|scales| &scales[..l]), &request).unwrap();
        assert_same(&built, &picked);

        let used = l.min(cap).min(budget);
        let ignored = (0..used).any(|d| {
            logits[d * v..(d + 1) * v].iter().map(|x| x * scale(d)).any(|x| x.is_nan() || x == f32::INFINITY)
        });
        prop_assert_eq!(built.flags & FLAG_NONFINITE != 0, ignored);
        prop_assert_eq!(built.flags & FLAG_NO_CANDIDATES != 0, used > 0 && children[0].is_empty());
        prop_assert_eq!(built.flags & FLAG_CANDIDATES_EXHAUSTED, 0);
    }

    /// Independent depths: the result is the global best `budget` prefixes by score.
    #[test]
    fn is_the_best_set_of_prefixes((l, v, logits) in any_rows(), budget in 0usize..40) {
        let children = sorted_depths(&logits, v, |_| 1.0);
        let mut level = vec![0i64];
        let mut all: Vec<i64> = Vec::new();
        for depth in children.iter().take(l.min(3)) {
            level = level.iter().flat_map(|path| depth.iter().map(move |child| (path + child.score).max(-2147483647))).collect();
            all.extend(&level);
        }
        all.sort_unstable_by(|a, b| b.cmp(a));
        all.truncate(budget);
        let built = from_logits(&logits, [l, v], &TreeRequest { max_depth: 3, ..request(budget) });
        let mut got: Vec<i64> = built.path_scores[1..].iter().map(|&score| i64::from(score)).collect();
        got.sort_unstable_by(|a, b| b.cmp(a));
        prop_assert_eq!(got, all);
    }

    #[test]
    fn smaller_budgets_are_prefixes_in_pop_order((l, v, logits) in any_rows(), large in 1usize..40) {
        let large = from_logits(&logits, [l, v], &request(large));
        let by_rank = |built: &BuiltTree, count: usize| -> Vec<(i32, i32, i32)> {
            let tree = &built.tree;
            let mut nodes: Vec<_> = (0..tree.num_nodes())
                .map(|i| {
                    let parent = usize::try_from(tree.parents[i]).map_or(-1, |parent| tree.pop_ranks[parent]);
                    (tree.pop_ranks[i], parent, tree.tokens[i])
                })
                .collect();
            nodes.sort_unstable();
            nodes.truncate(count);
            nodes
        };
        for budget in 0..large.tree.num_nodes() {
            let small = from_logits(&logits, [l, v], &request(budget));
            prop_assert_eq!(by_rank(&small, usize::MAX), by_rank(&large, budget + 1));
        }
    }

    #[test]
    fn is_a_tree_in_preorder_within_its_limits(
        (l, v, logits) in any_rows(), budget in 0usize..60, cap in 0usize..5,
    ) {
        let BuiltTree { tree, path_scores, .. } =
            from_logits(&logits, [l, v], &TreeRequest { max_depth: cap, ..request(budget) });
        prop_assert!(tree.num_nodes() <= budget + 1);
        prop_assert!(tree.depths.iter().all(|&depth| depth as usize <= cap.min(l)));
        let mut edges = std::collections::HashSet::new();
        for i in 1..tree.num_nodes() {
            let parent = tree.parents[i] as usize;
            prop_assert!(parent < i);
            prop_assert!(tree.pop_ranks[parent] < tree.pop_ranks[i]);
            prop_assert!(path_scores[i] <= path_scores[parent]);
            prop_assert!(edges.insert((parent, tree.tokens[i])), "two children with one token");
            if tree.next_sibling[i] >= 0 {
                let next = tree.next_sibling[i] as usize;
                prop_assert!(path_scores[next] <= path_scores[i]);
                prop_assert!(tree.pop_ranks[next] > tree.pop_ranks[i]);
            }
        }
        // best-first: scores never rise in pop order
        let mut by_rank: Vec<_> = tree.pop_ranks.iter().zip(&path_scores).collect();
        by_rank.sort_unstable();
        prop_assert!(by_rank.windows(2).all(|pair| pair[0].1 >= pair[1].1));
    }

    /// Integers and a power-of-two shift keep `x - lnZ` exact enough that no score can move.
    #[test]
    fn a_constant_per_depth_changes_nothing(
        (l, v, logits) in rows(prop::sample::select(vec![-3.0f32, -2.0, -1.0, 0.0, 1.0, 2.0]).boxed()),
        shifts in prop::collection::vec(prop::sample::select(vec![0.0f32, 8.0, -16.0, 64.0]), 5),
        budget in 0usize..40,
    ) {
        let shifted: Vec<f32> = logits.iter().enumerate().map(|(i, x)| x + shifts[i / v]).collect();
        let (a, b) = (from_logits(&logits, [l, v], &request(budget)), from_logits(&shifted, [l, v], &request(budget)));
        prop_assert_eq!(a.tree, b.tree);
    }

    /// All tokens of a depth have clearly different scores, so only their names may change.
    #[test]
    fn renaming_tokens_renames_the_tree(
        names in Just((0..11).collect::<Vec<i32>>()).prop_shuffle(),
        depths in prop::collection::vec(Just((0..11).collect::<Vec<i32>>()).prop_shuffle(), 1..5),
        budget in 0usize..40,
    ) {
        let l = depths.len();
        let logits: Vec<f32> = depths.iter().enumerate()
            .flat_map(|(d, row)| row.iter().map(move |&x| x as f32 * (0.31 + 0.173 * d as f32)))
            .collect();
        let mut renamed = logits.clone();
        for d in 0..l {
            for (old, &new) in names.iter().enumerate() {
                renamed[d * 11 + new as usize] = logits[d * 11 + old];
            }
        }
        let a = from_logits(&logits, [l, 11], &request(budget));
        let b = from_logits(&renamed, [l, 11], &request(budget));
        prop_assert_eq!(&a.tree.parents, &b.tree.parents);
        let renamed: Vec<i32> =
            a.tree.tokens.iter().map(|&token| if token == ROOT { ROOT } else { names[token as usize] }).collect();
        prop_assert_eq!(renamed, b.tree.tokens);
    }

    #[test]
    fn a_candidate_limit_keeps_the_best_and_says_when_it_hurts(
        (l, v, logits) in any_rows(),
        budget in 0usize..30,
        limit in 1usize..6,
        cap in prop::sample::select(vec![0usize, 2, 4]),
    ) {
        let all = sorted_depths(&logits, v, |_| 1.0);
        let picked = reference::brute_force(
            budget, l, |depth, _| capped(&capped(&all[depth], limit), cap), |_, _| false,
        );
        let draft = DraftScores::Logits {
            logits: TensorRef::new(&logits, &[l, v]).unwrap(), max_candidates: limit,
        };
        let built = tree_build(&draft, None, &TreeRequest { candidate_cap: cap, ..request(budget) }).unwrap();
        assert_same(&built, &picked);
        // a cap is what the caller wants, so it does not count as running out
        let exhausted = limit < budget.min(if cap == 0 { usize::MAX } else { cap })
            && picked[1..].iter().any(|node| node.sibling + 1 == limit && all[node.depth - 1].len() > limit);
        prop_assert_eq!(built.flags & FLAG_CANDIDATES_EXHAUSTED != 0, exhausted);
    }

    /// f16 and bf16 rows, and rows with any strides, are the f32 rows with the same values.
    #[test]
    fn dtypes_and_strides_do_not_matter((l, v, logits) in any_rows(), budget in 0usize..40) {
        let check = |converted: Vec<f32>, strided: &dyn Fn() -> BuiltTree| {
            prop_assert_eq!(from_logits(&converted, [l, v], &request(budget)), strided());
            Ok(())
        };
        let build = |logits: TensorRef<'_>| {
            tree_build(&DraftScores::Logits { logits, max_candidates: 0 }, None, &request(budget)).unwrap()
        };
        let half: Vec<f16> = logits.iter().map(|&x| f16::from_f32(x)).collect();
        check(half.iter().map(|x| x.to_f32()).collect(), &|| build(TensorRef::new(&half, &[l, v]).unwrap()))?;

        // element (d, t) at 2 * d + t * (2 * L + 1), everything else NaN
        let strides = [2, 2 * l as i64 + 1];
        let at = |i: usize| 2 * (i / v) + (i % v) * (2 * l + 1);
        let mut spread = vec![bf16::NAN; 2 * l + v * (2 * l + 1)];
        let mut spread_f32 = vec![f32::NAN; spread.len()];
        for (i, &x) in logits.iter().enumerate() {
            spread[at(i)] = bf16::from_f32(x);
            spread_f32[at(i)] = x;
        }
        check(
            (0..l * v).map(|i| spread[at(i)].to_f32()).collect(),
            &|| build(TensorRef::with_strides(&spread, &[l, v], &strides).unwrap()),
        )?;
        check(logits.clone(), &|| build(TensorRef::with_strides(&spread_f32, &[l, v], &strides).unwrap()))?;
    }
}

/// `(L, K, tokens, scores, transitions)`.
type LatticeCase = (usize, usize, Vec<i32>, Vec<f32>, Vec<f32>);

fn lattice() -> impl Strategy<Value = LatticeCase> {
    (1usize..5, 1usize..6).prop_flat_map(|(l, k)| {
        let row = Just((0..9).collect::<Vec<i32>>()).prop_shuffle();
        let tokens =
            prop::collection::vec((row, prop::collection::vec(0..5u8, k)), l).prop_map(move |rows| {
                // distinct tokens, one in five absent
                rows.into_iter()
                    .flat_map(|(row, absent)| {
                        (0..k).map(move |j| if absent[j] == 0 { -1 } else { row[j] }).collect::<Vec<_>>()
                    })
                    .collect()
            });
        (
            Just(l),
            Just(k),
            tokens,
            prop::collection::vec(logit(), l * k),
            prop::collection::vec(prop_oneof![3 => logit(), 1 => Just(0.0f32)], l * k * k),
        )
    })
}

proptest! {
    #![proptest_config(common::cases(300))]

    #[test]
    fn lattice_equals_the_brute_force_over_conditioned_scores(
        (l, k, tokens, scores, transitions) in lattice(),
        budget in 0usize..40,
        with_transitions: bool,
        scale in prop::sample::select(vec![1.0f32, 0.6]),
        cap in prop::sample::select(vec![0usize, 0, 1, 3]),
        spine_depth in spine(),
    ) {
        let x = |d: usize, i: usize, j: usize| {
            let score = scores[d * k + j];
            let score = if with_transitions { score + transitions[(d * k + i) * k + j] } else { score };
            score * scale
        };
        let row = |d: usize, i: usize| -> Vec<f32> { (0..k).map(|j| x(d, i, j)).collect() };
        let children = |d: usize, i: usize| reference::lattice_children(&tokens[d * k..(d + 1) * k], &row(d, i));
        let picked = reference::brute_force_with_spine(
            spine_depth, budget, l, |d, i| capped(&children(d, i), cap), |token, _| token == 4,
        );

        let draft = DraftScores::Lattice {
            tokens: TensorRef::new(&tokens, &[l, k]).unwrap(),
            scores: Some(TensorRef::new(&scores, &[l, k]).unwrap()),
            transitions: with_transitions.then(|| TensorRef::new(&transitions, &[l, k, k]).unwrap()),
        };
        let request = TreeRequest { stop_tokens: &[4], candidate_cap: cap, spine_depth, ..request(budget) };
        let built = tree_build(&draft, Some(&vec![scale; l]), &request).unwrap();
        assert_same(&built, &picked);

        let present = |d: usize| (0..k).filter(|&j| tokens[d * k + j] >= 0).collect::<Vec<_>>();
        let parents = |d: usize| if d == 0 { vec![0] } else { present(d - 1) };
        let ignored = (0..l.min(budget)).any(|d| {
            parents(d).iter().any(|&i| present(d).iter().any(|&j| x(d, i, j).is_nan() || x(d, i, j) == f32::INFINITY))
        });
        prop_assert_eq!(built.flags & FLAG_NONFINITE != 0, ignored);
        let full = |d: usize, i: usize| children(d, i).len() == k;
        let exhausted = k < budget.min(if cap == 0 { usize::MAX } else { cap }) && picked[1..].iter().any(|node| {
            node.sibling + 1 == k && full(node.depth - 1, picked[node.parent].column)
        });
        prop_assert_eq!(built.flags & FLAG_CANDIDATES_EXHAUSTED != 0, exhausted);
    }

    #[test]
    fn zero_transitions_are_no_transitions((l, k, tokens, scores, _) in lattice(), budget in 0usize..40) {
        let zeros = vec![0.0f32; l * k * k];
        let build = |transitions: Option<TensorRef<'_>>| {
            let draft = DraftScores::Lattice {
                tokens: TensorRef::new(&tokens, &[l, k]).unwrap(),
                scores: Some(TensorRef::new(&scores, &[l, k]).unwrap()),
                transitions,
            };
            tree_build(&draft, None, &request(budget)).unwrap()
        };
        let (with, without) = (build(Some(TensorRef::new(&zeros, &[l, k, k]).unwrap())), build(None));
        prop_assert_eq!(with.tree, without.tree);
        prop_assert_eq!(with.path_scores, without.path_scores);
    }

    /// A head that gives one sum per pair needs no scores beside it.
    #[test]
    fn transitions_may_hold_the_scores(
        (l, k, tokens, scores, transitions) in lattice(), budget in 0usize..40, spine_depth in spine(),
    ) {
        let sums: Vec<f32> =
            transitions.iter().enumerate().map(|(at, t)| scores[at / (k * k) * k + at % k] + t).collect();
        let build = |scores: Option<&[f32]>, transitions: &[f32]| {
            let draft = DraftScores::Lattice {
                tokens: TensorRef::new(&tokens, &[l, k]).unwrap(),
                scores: scores.map(|scores| TensorRef::new(scores, &[l, k]).unwrap()),
                transitions: Some(TensorRef::new(transitions, &[l, k, k]).unwrap()),
            };
            tree_build(&draft, None, &TreeRequest { spine_depth, ..request(budget) }).unwrap()
        };
        prop_assert_eq!(build(Some(&scores), &transitions), build(None, &sums));
    }

    /// A reduced draft vocabulary: ids that keep their order rename the tree and change nothing else.
    #[test]
    fn mapped_ids_rename_the_tree(
        (l, k, tokens, scores, transitions) in lattice(),
        gaps in prop::collection::vec(1i32..30_000, 9),
        budget in 0usize..40,
    ) {
        let target: Vec<i32> = gaps.iter().scan(-1, |id, gap| { *id += gap; Some(*id) }).collect();
        let mapped: Vec<i32> =
            tokens.iter().map(|&token| usize::try_from(token).map_or(-1, |token| target[token])).collect();
        let build = |tokens: &[i32]| {
            let draft = DraftScores::Lattice {
                tokens: TensorRef::new(tokens, &[l, k]).unwrap(),
                scores: Some(TensorRef::new(&scores, &[l, k]).unwrap()),
                transitions: Some(TensorRef::new(&transitions, &[l, k, k]).unwrap()),
            };
            tree_build(&draft, None, &request(budget)).unwrap()
        };
        let mut want = build(&tokens);
        want.tree.tokens[1..].iter_mut().for_each(|token| *token = target[*token as usize]);
        prop_assert_eq!(build(&mapped), want);
    }

    /// The spine is the chain that one candidate per parent gives; what follows is best first.
    #[test]
    fn a_spine_is_the_chain_of_best_children(
        (l, k, tokens, scores, transitions) in lattice(),
        budget in 0usize..40,
        spine_depth in 0usize..6,
        sampled in prop::option::of(target_noise()),
    ) {
        let draft = DraftScores::Lattice {
            tokens: TensorRef::new(&tokens, &[l, k]).unwrap(),
            scores: Some(TensorRef::new(&scores, &[l, k]).unwrap()),
            transitions: Some(TensorRef::new(&transitions, &[l, k, k]).unwrap()),
        };
        let build = |budget, spine_depth, candidate_cap| {
            let request = TreeRequest { noise: sampled, spine_depth, candidate_cap, ..request(budget) };
            tree_build(&draft, None, &request).unwrap()
        };
        let BuiltTree { tree, path_scores, .. } = build(budget, spine_depth, 0);
        let chain = build(budget.min(spine_depth), 0, 1).tree;
        let on_spine = chain.num_nodes();
        prop_assert_eq!(&tree.tokens[..on_spine], &chain.tokens[..]);
        prop_assert_eq!(&tree.parents[..on_spine], &chain.parents[..]);
        prop_assert_eq!(&tree.pop_ranks[..on_spine], &chain.pop_ranks[..]);
        let mut by_rank: Vec<_> = tree.pop_ranks.iter().zip(&path_scores).collect();
        by_rank.sort_unstable();
        prop_assert!(by_rank[on_spine..].windows(2).all(|pair| pair[0].1 >= pair[1].1));
        // nested in the budget, as without a spine
        let ranked = |built: &BuiltTree, count: usize| -> Vec<(i32, i32)> {
            let tree = &built.tree;
            let mut nodes: Vec<_> = tree.pop_ranks.iter().copied().zip(tree.tokens.iter().copied()).collect();
            nodes.sort_unstable();
            nodes.truncate(count);
            nodes
        };
        let large = build(budget, spine_depth, 0);
        for smaller in 0..large.tree.num_nodes() {
            prop_assert_eq!(ranked(&build(smaller, spine_depth, 0), usize::MAX), ranked(&large, smaller + 1));
        }
    }
}

/// All paths of a lattice, scored in f64 by the formula alone: no fixed point, no search.
#[test]
fn conditioned_trees_are_the_best_of_all_paths() {
    let seed = fresh_seed();
    let mut rng = Rng(seed);
    let mut checked = 0;
    for case in 0..400 {
        let (l, k, budget) = (1 + rng.below(4), 1 + rng.below(5), 1 + rng.below(30));
        let mut draw = |count: usize| -> Vec<f32> { (0..count).map(|_| 2.0 * rng.normal() as f32).collect() };
        let (scores, transitions) = (draw(l * k), draw(l * k * k));
        let tokens: Vec<i32> = (0..l * k).map(|i| 50 - i as i32).collect();
        let mut all: Vec<(f64, Vec<i32>)> = Vec::new();
        let mut level: Vec<(f64, Vec<usize>)> = vec![(0.0, Vec::new())];
        for d in 0..l {
            let mut below = Vec::new();
            for (score, path) in &level {
                let parent = path.last().copied().unwrap_or(0);
                let x = |j: usize| f64::from(scores[d * k + j] + transitions[(d * k + parent) * k + j]);
                let ln_z = (0..k).map(|j| x(j).exp()).sum::<f64>().ln();
                for j in 0..k {
                    below.push((score + x(j) - ln_z, [&path[..], &[j]].concat()));
                }
            }
            let named = |path: &[usize]| path.iter().enumerate().map(|(d, j)| tokens[d * k + j]).collect();
            all.extend(below.iter().map(|(score, path)| (*score, named(path))));
            level = below;
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        all.truncate(budget + 1);
        // fixed point may swap neighbours that are closer than this
        if all.windows(2).any(|pair| pair[0].0 - pair[1].0 < 1e-5) {
            continue;
        }
        checked += 1;
        let draft = DraftScores::Lattice {
            tokens: TensorRef::new(&tokens, &[l, k]).unwrap(),
            scores: Some(TensorRef::new(&scores, &[l, k]).unwrap()),
            transitions: Some(TensorRef::new(&transitions, &[l, k, k]).unwrap()),
        };
        let BuiltTree { tree, path_scores, .. } = tree_build(&draft, None, &request(budget)).unwrap();
        let mut got = vec![(0.0, Vec::new()); tree.num_nodes()];
        let mut paths: Vec<Vec<i32>> = vec![Vec::new()];
        for i in 1..tree.num_nodes() {
            paths.push([&paths[tree.parents[i] as usize][..], &[tree.tokens[i]]].concat());
            got[tree.pop_ranks[i] as usize] = (f64::from(path_scores[i]) / 2f64.powi(21), paths[i].clone());
        }
        let want = &all[..budget.min(all.len())];
        assert_eq!(got.len() - 1, want.len(), "seed {seed}, case {case}");
        for (rank, (got, want)) in got[1..].iter().zip(want).enumerate() {
            assert_eq!(got.1, want.1, "seed {seed}, case {case}, rank {}", rank + 1);
            assert!((got.0 - want.0).abs() < 1e-5, "seed {seed}, case {case}: {got:?}, {want:?}");
        }
    }
    assert!(checked > 300, "seed {seed}: only {checked} cases without near ties");
}

/// A lattice of the whole vocabulary without parents is that vocabulary. The scores of one make its
/// normaliser exact in any order, ties included, so every bit agrees.
#[test]
fn a_lattice_of_everything_without_pairs_is_the_marginal_tree() {
    let seed = fresh_seed();
    let mut rng = Rng(seed);
    for case in 0..60 {
        let (l, v, budget) = (1 + rng.below(5), 1 + rng.below(40), rng.below(80));
        let logits: Vec<f32> = (0..l * v).map(|_| [0.0, -100.0, f32::NAN][rng.below(5) / 2]).collect();
        let tokens: Vec<i32> = (0..l * v).map(|i| (i % v) as i32).collect();
        let zeros = vec![0.0f32; l * v * v];
        let draft = DraftScores::Lattice {
            tokens: TensorRef::new(&tokens, &[l, v]).unwrap(),
            scores: Some(TensorRef::new(&logits, &[l, v]).unwrap()),
            transitions: Some(TensorRef::new(&zeros, &[l, v, v]).unwrap()),
        };
        let built = tree_build(&draft, None, &request(budget)).unwrap();
        let marginal = from_logits(&logits, [l, v], &request(budget));
        assert_eq!(built.tree, marginal.tree, "seed {seed}, case {case}");
        assert_eq!(built.path_scores, marginal.path_scores, "seed {seed}, case {case}");
    }
}

/// A reproducible stream of normal-ish numbers.
fn noise(count: usize, mut state: u64) -> Vec<f32> {
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count).map(|_| (uniform() + uniform() + uniform() - 1.5) * 8.0).collect()
}

#[test]
fn large_vocabularies_keep_every_candidate() {
    // sizes around chunk (4096) and block (64) edges; the largest budget; scores rounded so that many tie
    for (vocab, step) in [(4096, 0.0), (4097, 0.25), (12_345, 0.0), (12_345, 0.5), (300, 0.0), (64, 1.0)] {
        let mut logits = noise(3 * vocab, vocab as u64);
        if step > 0.0 {
            logits.iter_mut().for_each(|x| *x = (*x / step).round() * step);
        }
        let children = sorted_depths(&logits, vocab, |_| 1.0);
        let shortened = |depth: usize, _| children[depth][..children[depth].len().min(255)].to_vec();
        // one depth uses all 255 candidates, three use fewer of each
        for max_depth in [1, 3] {
            let request = TreeRequest { max_depth, ..request(255) };
            let picked = reference::brute_force(255, max_depth, shortened, |_, _| false);
            assert_same(&from_logits(&logits, [3, vocab], &request), &picked);
        }
    }
}

#[test]
fn equal_scores_that_differ_as_floats_go_by_token_id() {
    // 3e-8 apart around 0: below the resolution of Q10.21, so the lower id wins, not the larger float
    let mut logits = vec![-30.0f32; 200];
    logits[10] = 0.0;
    logits[150] = 3.0e-8;
    let built = from_logits(&logits, [1, 200], &request(1));
    assert_eq!(built.tree.tokens, [ROOT, 10]);
    let built = from_logits(&vec![0.25f32; 100_000], [1, 100_000], &request(5));
    assert_eq!(built.tree.tokens, [ROOT, 0, 1, 2, 3, 4]);
}

#[test]
fn scores_are_log_probabilities() {
    let vocab = 50_000;
    let logits = noise(vocab, 5);
    let ln_z = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
    let built = from_logits(&logits, [1, vocab], &request(64));
    for i in 1..65 {
        let want = f64::from(logits[built.tree.tokens[i] as usize]) - ln_z;
        let got = f64::from(built.path_scores[i]) / 2f64.powi(21);
        assert!((got - want).abs() < 2e-6, "node {i}: got {got}, want {want}");
    }
}

#[test]
fn one_candidate_per_depth_is_a_chain() {
    let logits = noise(15 * 500, 3);
    let logits = TensorRef::new(&logits, &[15, 500]).expect("a matrix");
    let draft = DraftScores::Logits { logits, max_candidates: 1 };
    let built = tree_build(&draft, None, &request(31)).expect("a tree");
    assert_eq!(built.tree.parents, (-1..15).collect::<Vec<i32>>());
    assert_eq!(built.flags, FLAG_CANDIDATES_EXHAUSTED);

    let tokens: Vec<i32> = (0..15).collect();
    let draft = DraftScores::Lattice {
        tokens: TensorRef::new(&tokens, &[15, 1]).expect("a matrix"),
        scores: Some(TensorRef::new(&[0.0f32; 15], &[15, 1]).expect("a matrix")),
        transitions: None,
    };
    let built = tree_build(&draft, None, &request(9)).expect("a tree");
    assert_eq!(built.tree.parents, (-1..9).collect::<Vec<i32>>());
    assert!(built.path_scores.iter().all(|&score| score == 0));

    let pairs = noise(15, 4);
    let draft = DraftScores::Lattice {
        tokens: TensorRef::new(&tokens, &[15, 1]).expect("a matrix"),
        scores: None,
        transitions: Some(TensorRef::new(&pairs, &[15, 1, 1]).expect("a lattice")),
    };
    assert_eq!(tree_build(&draft, None, &request(9)).expect("a tree"), built);
}

#[test]
fn certain_depths_make_a_chain_before_anything_else() {
    let mut logits = vec![-50.0f32; 6 * 40];
    (0..6).for_each(|d| logits[d * 40 + 7] = 50.0);
    let built = from_logits(&logits, [6, 40], &request(6));
    assert_eq!(built.tree.tokens, [ROOT, 7, 7, 7, 7, 7, 7]);
    assert_eq!(built.tree.depths, [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn unusable_depths_end_the_tree() {
    let never = [f32::NEG_INFINITY, f32::NAN, f32::INFINITY];
    let built = from_logits(&never, [1, 3], &request(5));
    assert_eq!((built.tree.num_nodes(), built.flags), (1, FLAG_NO_CANDIDATES | FLAG_NONFINITE));
    let built = from_logits(&[f32::NEG_INFINITY; 4], [2, 2], &request(5));
    assert_eq!((built.tree.num_nodes(), built.flags), (1, FLAG_NO_CANDIDATES));
    // a later depth without candidates is no reason for a flag
    let built = from_logits(&[0.0, 1.0, f32::NEG_INFINITY, f32::NEG_INFINITY], [2, 2], &request(5));
    assert_eq!((built.tree.num_nodes(), built.flags), (3, 0));
    // no depth and no vocabulary
    assert_eq!(from_logits(&[], [0, 4], &request(5)).flags, 0);
    assert_eq!(from_logits(&[], [2, 0], &request(5)).flags, FLAG_NO_CANDIDATES);
    // finite logits whose scaled value overflows mean never as well
    let logits = TensorRef::new(&[3.0e38f32, 1.0], &[1, 2]).expect("a matrix");
    let draft = DraftScores::Logits { logits, max_candidates: 0 };
    let built = tree_build(&draft, Some(&[4.0]), &request(5)).expect("a tree");
    assert_eq!((built.tree.tokens, built.flags), (vec![ROOT, 1], FLAG_NONFINITE));
}

#[test]
fn path_scores_saturate() {
    // each edge to token 1 has log-probability -600, so two of them are below the limit
    let logits = [0.0f32, -600.0].repeat(3);
    let built = from_logits(&logits, [3, 2], &request(14));
    assert_eq!(built.tree.num_nodes(), 15);
    assert_eq!(built.path_scores.iter().filter(|&&score| score == ddtree::scores::MIN_SCORE).count(), 5);
    let children = sorted_depths(&logits, 2, |_| 1.0);
    assert_same(&built, &reference::brute_force(14, 3, |depth, _| children[depth].clone(), |_, _| false));
}

proptest! {
    #![proptest_config(common::cases(300))]

    #[test]
    fn with_noise_equals_the_brute_force_over_noised_scores(
        (l, v, logits) in any_rows(),
        noise in target_noise(),
        budget in 0usize..40,
        candidate_cap in prop::sample::select(vec![0usize, 0, 1, 3]),
        scales in prop::option::of(prop::collection::vec(prop::sample::select(vec![0.5f32, 1.0, 1.7]), 5)),
    ) {
        let rows: Vec<f32> = logits.chunks(v).enumerate()
            .flat_map(|(d, row)| reference::noised(row, noise.temperature, noise.seed, 1000 + d as i64))
            .collect();
        let children = sorted_depths(&rows, v, |d| scales.as_ref().map_or(1.0, |scales| scales[d]));
        let picked = reference::brute_force(
            budget, l, |depth, _| capped(&children[depth], candidate_cap), |_, _| false,
        );
        let request = TreeRequest { candidate_cap, noise: Some(noise), ..request(budget) };
        let draft = DraftScores::Logits { logits: TensorRef::new(&logits, &[l, v]).unwrap(), max_candidates: 0 };
        let built = tree_build(&draft, scales.as_deref().map(|scales| &scales[..l]), &request).unwrap();
        assert_same(&built, &picked);
        let ignored = rows[..l.min(budget) * v].iter().any(|x| x.is_nan() || *x == f32::INFINITY);
        prop_assert_eq!(built.flags & FLAG_NONFINITE != 0, ignored);
    }

    /// By token id, not by column.
    #[test]
    fn a_lattice_gets_the_noise_of_its_tokens(
        (l, k, tokens, scores, transitions) in lattice(),
        noise in target_noise(),
        budget in 0usize..40,
        with_transitions: bool,
        spine_depth in spine(),
    ) {
        let row = |d: usize, i: usize| -> Vec<f32> {
            let mut by_token = vec![f32::NEG_INFINITY; 9];
            for j in (0..k).filter(|j| tokens[d * k + j] >= 0) {
                let transition = if with_transitions { transitions[(d * k + i) * k + j] } else { 0.0 };
                by_token[tokens[d * k + j] as usize] = scores[d * k + j] + transition;
            }
            let noised = reference::noised(&by_token, noise.temperature, noise.seed, 1000 + d as i64);
            (0..k).map(|j| usize::try_from(tokens[d * k + j]).map_or(0.0, |token| noised[token])).collect()
        };
        let children = |d: usize, i: usize| reference::lattice_children(&tokens[d * k..(d + 1) * k], &row(d, i));
        let picked = reference::brute_force_with_spine(spine_depth, budget, l, children, |_, _| false);
        let draft = DraftScores::Lattice {
            tokens: TensorRef::new(&tokens, &[l, k]).unwrap(),
            scores: Some(TensorRef::new(&scores, &[l, k]).unwrap()),
            transitions: with_transitions.then(|| TensorRef::new(&transitions, &[l, k, k]).unwrap()),
        };
        let request = TreeRequest { noise: Some(noise), spine_depth, ..request(budget) };
        let built = tree_build(&draft, None, &request).unwrap();
        assert_same(&built, &picked);
    }
}

/// A drafter that knows the target's logits makes a chain of what the target samples, over several
/// chunks of ids, and the rest of the tree is the brute force's.
#[test]
fn the_spine_is_what_the_target_samples() {
    const L: usize = 5;
    let seed = fresh_seed();
    let mut rng = Rng(seed);
    for case in 0..60 {
        let v = [50, 4096, 9001][case % 3];
        let temperature = [0.3, 0.6, 1.0, 1.5][case % 4];
        let logits: Vec<bf16> = (0..L * v).map(|_| bf16::from_f64(4.0 * rng.normal())).collect();
        let noise = TargetNoise { seed: rng.next() as i64, temperature };
        let position = (rng.next() >> 24) as i64;
        // a chain has every depth, a tree may end before
        let is_chain = case % 2 == 0;
        let request = TreeRequest {
            root_position: position,
            noise: Some(noise),
            candidate_cap: usize::from(is_chain),
            ..request(if is_chain { L } else { 31 })
        };
        let draft =
            DraftScores::Logits { logits: TensorRef::new(&logits, &[L, v]).unwrap(), max_candidates: 0 };
        let tree = tree_build(&draft, None, &request).unwrap().tree;
        let mut node = 0;
        for d in 0..L {
            // as vLLM's sampler: divided by the temperature in f32
            let row: Vec<f32> = logits[d * v..(d + 1) * v].iter().map(|x| x.to_f32() / temperature).collect();
            let gumbel = GumbelNoise::new(noise.seed, position + d as i64);
            let sampled = sampled_choice(TensorRef::new(&row, &[v]).unwrap(), gumbel).token;
            let Ok(child) = usize::try_from(tree.first_child[node]) else {
                assert!(!is_chain, "seed {seed}, case {case}: the chain ends at depth {d}");
                break;
            };
            node = child;
            let got = tree.tokens[node];
            let value = |token: i64| row[token as usize] + gumbel.of(token as u32);
            assert!(
                i64::from(got) == sampled || value(sampled) - value(got.into()) < 1e-4,
                "seed {seed}, case {case}, depth {}: got {got}, sampled {sampled}",
                d + 1
            );
        }
        let children: Vec<Vec<Child>> = (0..L)
            .map(|d| {
                let row: Vec<f32> = logits[d * v..(d + 1) * v].iter().map(|x| x.to_f32()).collect();
                let row = reference::noised(&row, temperature, noise.seed, position + d as i64);
                capped(&reference::vocab_children(&row, 1.0), if is_chain { 1 } else { request.node_budget })
            })
            .collect();
        let picked =
            reference::brute_force(request.node_budget, L, |depth, _| children[depth].clone(), |_, _| false);
        let mut by_rank: Vec<_> = tree.pop_ranks.iter().zip(&tree.tokens).skip(1).collect();
        by_rank.sort_unstable();
        let got: Vec<i32> = by_rank.into_iter().map(|(_, &token)| token).collect();
        let want: Vec<i32> = picked[1..].iter().map(|node| node.token).collect();
        assert_eq!(got, want, "seed {seed}, case {case}");
    }
}

/// The reference's noise is the formula, as the sampler's is: see rust/scores.rs.
#[test]
fn noise_is_a_gumbel_variable() {
    let (mut sum, mut squares, count) = (0.0, 0.0, 200_000);
    for i in 0..count {
        let bits = reference::noise_bits(-7, 11, i);
        let u = (f64::from(bits) + 0.5) / 4_294_967_296.0;
        let (got, want) = (f64::from(reference::noise_spec(bits)), -(-(-u).ln_1p()).ln());
        // near u = 1 the sampler has few digits of 1 - u
        assert!((got - want).abs() < if u < 0.99 { 4e-6 } else { 0.3 }, "{bits}: {got}, {want}");
        assert!((got - f64::from(GumbelNoise::new(-7, 11).of(i))).abs() < 4e-6);
        sum += got;
        squares += got * got;
    }
    let mean = sum / f64::from(count);
    let variance = squares / f64::from(count) - mean * mean;
    assert!((mean - 0.577_216).abs() < 0.012 && (variance - 1.644_934).abs() < 0.03, "{mean}, {variance}");
}

#[test]
fn the_root_is_never_a_stop_token() {
    let request = TreeRequest { stop_tokens: &[ROOT, 1], ..request(6) };
    let built = from_logits(&[0.0, 0.0, 0.0, 0.0], [2, 2], &request);
    // below token 0 both tokens, below token 1 none
    assert_eq!(built.tree.parents, [-1, 0, 1, 1, 0]);
}

#[test]
fn bad_arguments_are_named() {
    let data = [0.0f32; 12];
    let logits = |shape: &[usize]| DraftScores::Logits {
        logits: TensorRef::new(&data, shape).expect("fits"),
        max_candidates: 0,
    };
    let fails = |draft: DraftScores<'_>, scales: Option<&[f32]>, request: TreeRequest<'_>| {
        let error = tree_build(&draft, scales, &request).expect_err("refused");
        (error.status(), error.to_string())
    };
    let (status, text) = fails(logits(&[12]), None, request(3));
    assert_eq!((status, &text[..]), (Status::InvalidShape, "logits dimensions: got 1, want 2"));
    let (status, text) = fails(logits(&[3, 4]), None, request(256));
    assert_eq!((status, &text[..]), (Status::InvalidValue, "node budget: got 256, want at most 255"));
    for (scale, shown) in [(f32::NAN, "NaN"), (0.0, "0"), (-1.0, "-1"), (f32::INFINITY, "inf")] {
        let (status, text) = fails(logits(&[3, 4]), Some(&[1.0, scale, 1.0]), request(3));
        assert_eq!(status, Status::InvalidValue);
        assert_eq!(text, format!("depth_scales[1]: got {shown}, want a finite number above 0"));
    }
    for (temperature, shown) in [(f32::NAN, "NaN"), (0.0, "0"), (-1.0, "-1"), (f32::INFINITY, "inf")] {
        let noise = Some(TargetNoise { seed: 1, temperature });
        let (status, text) = fails(logits(&[3, 4]), None, TreeRequest { noise, ..request(3) });
        assert_eq!(status, Status::InvalidValue);
        assert_eq!(text, format!("temperature: got {shown}, want a finite number above 0"));
    }
    let (status, text) = fails(logits(&[3, 4]), Some(&[1.0]), request(3));
    assert_eq!((status, &text[..]), (Status::InvalidShape, "depth_scales length: got 1, want 3"));
    for position in [-1, i64::MAX] {
        let request = TreeRequest { root_position: position, ..request(3) };
        assert_eq!(fails(logits(&[3, 4]), None, request).0, Status::InvalidValue);
    }

    let tokens = [3i32, -1, -1, 3, 5, 3];
    let lattice = |shape: &[usize], scores_shape: &[usize]| DraftScores::Lattice {
        tokens: TensorRef::new(&tokens, shape).expect("fits"),
        scores: Some(TensorRef::new(&data, scores_shape).expect("fits")),
        transitions: None,
    };
    let (status, text) = fails(lattice(&[2, 3], &[2, 3]), None, request(3));
    assert_eq!(status, Status::InvalidValue);
    assert_eq!(text, "candidate_tokens of depth 1: got token 3 twice, want distinct tokens");
    assert_eq!(fails(lattice(&[2, 3], &[3, 2]), None, request(3)).0, Status::InvalidShape);
    let draft = DraftScores::Lattice {
        tokens: TensorRef::new(&data, &[3, 4]).expect("fits"),
        scores: Some(TensorRef::new(&data, &[3, 4]).expect("fits")),
        transitions: None,
    };
    assert_eq!(fails(draft, None, request(3)).0, Status::InvalidDtype);
    let tokens = TensorRef::new(&tokens, &[2, 3]).expect("fits");
    let (status, text) =
        fails(DraftScores::Lattice { tokens, scores: None, transitions: None }, None, request(3));
    assert_eq!(status, Status::InvalidValue);
    assert_eq!(text, "candidate_scores and transition_scores: got neither, want at least one");
}
