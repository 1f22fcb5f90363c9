// SPDX-License-Identifier: Apache-2.0
//! The law of the text that verification by matching emits: that of the target alone.
//!
//! A target over 5 tokens whose logits depend on the whole prefix emits 3 tokens, 125 texts whose
//! probabilities are enumerated in f64. Texts are drawn round by round, with another tree in every
//! round, and compared with them by a chi-square test. Methods that others got wrong must fail it.

mod common;

use common::numbers::{Rng, fresh_seed};
use ddtree::gumbel::GumbelNoise;
use ddtree::{
    AcceptedPath, DraftScores, TensorRef, Topology, Tree, TreeLinks, TreeRequest, sampled_choice,
    tree_accept, tree_build, tree_mask,
};

const VOCAB: usize = 5;
const LENGTH: usize = 3;
const DEPTH: usize = 3;
const SAMPLES: usize = 40_000;
/// In standard deviations of the normal that a chi-square is turned into: a false alarm in 10^7.
const THRESHOLD: f64 = 5.2;
/// Positions are those of a text with a prompt.
const ROOT_POSITION: i64 = 40;

#[derive(Clone, Copy, Debug)]
struct Sampling {
    temperature: f64,
    top_k: usize,
    top_p: f64,
    /// Repetition, frequency and presence penalties on what the text has so far.
    penalised: bool,
}

impl Sampling {
    fn plain(temperature: f64) -> Self {
        Self { temperature, top_k: VOCAB, top_p: 1.0, penalised: false }
    }
}

/// Logits of the prefixes of up to LENGTH + DEPTH tokens, in the order of `index`.
struct Target {
    logits: Vec<[f64; VOCAB]>,
}

fn index(prefix: &[usize]) -> usize {
    prefix.iter().fold(0, |i, &token| i * VOCAB + token + 1)
}

impl Target {
    /// One that leaves a dozen texts to be told apart.
    fn random(sampling: Sampling, rng: &mut Rng) -> Self {
        let rows = index(&[VOCAB - 1; LENGTH + DEPTH]) + 1;
        loop {
            let logits = (0..rows).map(|_| [(); VOCAB].map(|()| 1.5 * rng.normal())).collect();
            let target = Self { logits };
            if target.law(sampling).iter().filter(|&&p| p > 0.002).count() >= 12 {
                return target;
            }
        }
    }

    /// What is sampled from after `prefix`, with `history` for the penalties: logits over the
    /// temperature, -inf for what is cut off. The order is vLLM's.
    fn row(&self, sampling: Sampling, prefix: &[usize], history: &[usize]) -> [f64; VOCAB] {
        let mut row = self.logits[index(prefix)];
        if sampling.penalised {
            for (token, logit) in row.iter_mut().enumerate() {
                let count = history.iter().filter(|&&t| t == token).count();
                if count > 0 {
                    *logit = if *logit > 0.0 { *logit / 1.5 } else { *logit * 1.5 };
                    *logit -= 0.7 * count as f64 + 0.4;
                }
            }
        }
        row = row.map(|x| x / sampling.temperature);
        let mut order: Vec<usize> = (0..VOCAB).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        for &token in &order[sampling.top_k..] {
            row[token] = f64::NEG_INFINITY;
        }
        let weights = softmax(&row);
        let mut before = 0.0;
        for &token in &order {
            if before >= sampling.top_p {
                row[token] = f64::NEG_INFINITY;
            }
            before += weights[token];
        }
        row
    }

    /// The probability of every text of LENGTH tokens, by the number that `text_number` gives.
    fn law(&self, sampling: Sampling) -> Vec<f64> {
        (0..VOCAB.pow(LENGTH as u32))
            .map(|number| {
                let text: Vec<usize> =
                    (0..LENGTH).rev().map(|i| number / VOCAB.pow(i as u32) % VOCAB).collect();
                (0..LENGTH).map(|i| softmax(&self.row(sampling, &text[..i], &text[..i]))[text[i]]).product()
            })
            .collect()
    }
}

fn text_number(text: &[usize]) -> usize {
    text[..LENGTH].iter().fold(0, |number, &token| number * VOCAB + token)
}

fn softmax(row: &[f64; VOCAB]) -> [f64; VOCAB] {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights = row.map(|x| (x - max).exp());
    let sum: f64 = weights.iter().sum();
    weights.map(|w| w / sum)
}

/// The library's choice of one row.
fn choose(row: &[f64; VOCAB], seed: i64, position: i64) -> usize {
    let logits = row.map(|x| x as f32);
    let logits = TensorRef::new(&logits, &[VOCAB]).expect("a row");
    sampled_choice(logits, GumbelNoise::new(seed, position)).token as usize
}

/// A drafted tree and the drafter's distributions of its depths.
struct Draft {
    tree: Tree,
    scores: [[f64; VOCAB]; DEPTH],
}

/// The best-first tree of a drafter that knows the target a little.
fn best_first(target: &Target, prefix: &[usize], rng: &mut Rng) -> Draft {
    let near = target.logits[index(prefix)];
    let scores = [(); DEPTH].map(|()| near.map(|x| 0.5 * x + rng.normal()));
    let flat: Vec<f32> = scores.iter().flatten().map(|&x| x as f32).collect();
    let logits = TensorRef::new(&flat, &[DEPTH, VOCAB]).expect("scores");
    let request = TreeRequest {
        root_token: 0,
        root_position: ROOT_POSITION + prefix.len() as i64,
        node_budget: rng.below(13),
        max_depth: DEPTH,
        candidate_cap: 0,
        spine_depth: 0,
        stop_tokens: &[],
        stop_min_depth: 0,
        noise: None,
    };
    let draft = DraftScores::Logits { logits, max_candidates: 0 };
    let tree = tree_build(&draft, None, &request).expect("a tree").tree;
    Draft { tree, scores: scores.map(|row| softmax(&row)) }
}

/// A tree without sense.
fn bush(prefix: &[usize], rng: &mut Rng) -> Tree {
    let (mut parents, mut tokens, mut depths) = (vec![-1], vec![0], vec![0]);
    for _ in 0..rng.below(16) {
        let (parent, token) = (rng.below(parents.len()), rng.below(VOCAB) as i32);
        let is_new = (1..parents.len()).all(|i| (parents[i], tokens[i]) != (parent as i32, token));
        if is_new && depths[parent] < DEPTH {
            parents.push(parent as i32);
            tokens.push(token);
            depths.push(depths[parent] + 1);
        }
    }
    let topology = Topology {
        parents: &parents,
        tokens: Some(&tokens),
        priorities: None,
        root_position: ROOT_POSITION + prefix.len() as i64,
    };
    tree_mask(&topology).expect("a tree").0
}

/// The tokens of a node's path, without the root.
fn path(tree: &Tree, node: usize) -> Vec<usize> {
    let mut tokens: Vec<usize> =
        tree.path_to_root(node).filter(|&n| n > 0).map(|n| tree.tokens[n] as usize).collect();
    tokens.reverse();
    tokens
}

fn walk(tree: &Tree, choice: impl FnMut(usize) -> i64) -> AcceptedPath {
    let links =
        TreeLinks { tokens: &tree.tokens, first_child: &tree.first_child, next_sibling: &tree.next_sibling };
    tree_accept(&links, DEPTH, choice).expect("a path")
}

/// How a round goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Round {
    Right,
    /// Every row of a round has the root's noise.
    SameNoise,
    /// Noise by place in the list of rows, not by depth.
    NoiseOfRows,
    /// Penalties count what stands before a row in the list, as if that were a chain.
    PenaltiesOfRows,
    /// Rows are sampled as if nothing were cut off.
    Unfiltered,
}

/// One text, round by round, and the first round's surplus over what the target expects of its tree.
fn emit(target: &Target, sampling: Sampling, round: Round, seed: i64, rng: &mut Rng) -> (Vec<usize>, f64) {
    let (mut text, mut surplus) = (vec![], None);
    while text.len() < LENGTH {
        let tree = if rng.below(2) == 0 { bush(&text, rng) } else { best_first(target, &text, rng).tree };
        let after = |node: usize| [&text[..], &path(&tree, node)].concat();
        let accepted = walk(&tree, |node| {
            let prefix = after(node);
            let mut history = prefix.clone();
            if round == Round::PenaltiesOfRows {
                history = text.clone();
                history.extend(tree.tokens[1..=node].iter().map(|&t| t as usize));
            }
            let mut used = sampling;
            if round == Round::Unfiltered {
                used.top_k = VOCAB;
            }
            let row = target.row(used, &prefix, &history);
            let place = match round {
                Round::SameNoise => 0,
                Round::NoiseOfRows => node as i64,
                _ => i64::from(tree.depths[node]),
            };
            choose(&row, seed, tree.root_position + place) as i64
        });
        surplus.get_or_insert_with(|| {
            // the probability that a path is the text's beginning is that it is accepted
            let expected: f64 = (1..tree.num_nodes())
                .map(|node| {
                    let tokens = path(&tree, node);
                    (0..tokens.len())
                        .map(|i| softmax(&target.row(sampling, &tokens[..i], &tokens[..i]))[tokens[i]])
                        .product::<f64>()
                })
                .sum();
            accepted.nodes.len() as f64 - expected
        });
        text.extend(accepted.tokens.iter().map(|&token| token as usize));
    }
    (text, surplus.unwrap_or(0.0))
}

/// A ratio test on a tree whose candidates were not drawn: accept a child with min(1, p / q), else
/// go on with what p has beyond q.
fn emit_by_ratio(target: &Target, sampling: Sampling, rng: &mut Rng) -> Vec<usize> {
    let mut text = vec![];
    while text.len() < LENGTH {
        let Draft { tree, scores } = best_first(target, &text, rng);
        let accepted = walk(&tree, |node| {
            let prefix = [&text[..], &path(&tree, node)].concat();
            let mut p = softmax(&target.row(sampling, &prefix, &prefix));
            let mut child = tree.first_child[node];
            while let Ok(candidate) = usize::try_from(child) {
                let token = tree.tokens[candidate] as usize;
                let q = scores[tree.depths[node] as usize];
                if rng.uniform(0.0, 1.0) * q[token] < p[token] {
                    return token as i64;
                }
                let rest: Vec<f64> = (0..VOCAB).map(|t| (p[t] - q[t]).max(0.0)).collect();
                let sum: f64 = rest.iter().sum();
                p = std::array::from_fn(|t| rest[t] / sum);
                child = tree.next_sibling[candidate];
            }
            draw(&p, rng) as i64
        });
        text.extend(accepted.tokens.iter().map(|&token| token as usize));
    }
    text
}

fn draw(p: &[f64; VOCAB], rng: &mut Rng) -> usize {
    let mut left = rng.uniform(0.0, 1.0);
    let last = (0..VOCAB).rfind(|&t| p[t] > 0.0).expect("a distribution");
    (0..last)
        .find(|&t| {
            left -= p[t];
            left < 0.0
        })
        .unwrap_or(last)
}

/// Pearson's chi-square of the counts, as a standard normal by Wilson and Hilferty
/// (<https://doi.org/10.1073/pnas.17.12.684>). Texts that are expected less than ten times count
/// as one; one that cannot be is infinitely far off.
fn deviation(law: &[f64], counts: &[usize]) -> f64 {
    let total: usize = counts.iter().sum();
    let (mut sum, mut cells, mut rare) = (0.0, 0, (0.0, 0.0));
    let term = |expected: f64, count: f64| (count - expected).powi(2) / expected;
    for (&p, &count) in law.iter().zip(counts) {
        let expected = p * total as f64;
        if p == 0.0 && count > 0 {
            return f64::INFINITY;
        }
        if expected < 10.0 {
            rare = (rare.0 + expected, rare.1 + count as f64);
        } else {
            sum += term(expected, count as f64);
            cells += 1;
        }
    }
    if rare.0 >= 10.0 {
        sum += term(rare.0, rare.1);
        cells += 1;
    }
    let freedom = f64::from(cells) - 1.0;
    assert!(freedom >= 10.0, "nothing left to test");
    let spread = 2.0 / (9.0 * freedom);
    ((sum / freedom).cbrt() - (1.0 - spread)) / spread.sqrt()
}

fn counts(mut text: impl FnMut() -> Vec<usize>) -> Vec<usize> {
    let mut counts = vec![0; VOCAB.pow(LENGTH as u32)];
    for _ in 0..SAMPLES {
        counts[text_number(&text())] += 1;
    }
    counts
}

fn samplings() -> Vec<Sampling> {
    let mut all = vec![];
    for temperature in [0.3, 0.7, 1.0, 1.5] {
        let plain = Sampling::plain(temperature);
        let truncated = Sampling { top_k: 4, top_p: 0.9, ..plain };
        all.extend([plain, truncated, Sampling { penalised: true, ..truncated }]);
    }
    all
}

#[test]
fn the_text_has_the_law_of_the_target() {
    let mut rng = Rng(fresh_seed());
    for sampling in samplings() {
        let target = Target::random(sampling, &mut rng);
        let (mut surplus, mut squares) = (0.0, 0.0);
        let counts = counts(|| {
            let seed = rng.next() as i64;
            let (text, more) = emit(&target, sampling, Round::Right, seed, &mut rng);
            surplus += more;
            squares += more * more;
            text
        });
        let z = deviation(&target.law(sampling), &counts);
        // <https://arxiv.org/abs/2604.12989>: matching accepts the target's mass of the tree's paths
        let accepted = surplus / squares.sqrt();
        println!("{sampling:?}: deviation {z:.2}, accepted {accepted:.2}");
        assert!(z < THRESHOLD, "{sampling:?}: {z}");
        assert!(accepted.abs() < THRESHOLD, "{sampling:?}: {accepted}");
    }
}

/// Not only in law: a seed gives one text, with any trees or none.
#[test]
fn a_seed_gives_the_text_of_plain_decoding() {
    let mut rng = Rng(fresh_seed());
    let mut others = 0;
    for sampling in samplings() {
        let target = Target::random(sampling, &mut rng);
        for _ in 0..2000 {
            let seed = rng.next() as i64;
            let mut want = vec![];
            while want.len() < LENGTH {
                let row = target.row(sampling, &want, &want);
                want.push(choose(&row, seed, ROOT_POSITION + want.len() as i64));
            }
            let text = |round, rng: &mut Rng| emit(&target, sampling, round, seed, rng).0[..LENGTH].to_vec();
            assert_eq!(text(Round::Right, &mut rng), want, "{sampling:?}, seed {seed}");
            others += usize::from(text(Round::NoiseOfRows, &mut rng) != want);
        }
    }
    assert!(others > 1000, "noise by row gave the same texts: {others} differ");
}

#[test]
fn what_others_got_wrong_fails() {
    let mut rng = Rng(fresh_seed());
    let plain = Sampling::plain(1.0);
    // a target may hide a mistake, four hardly
    let mut must_fail = |what: &str, sampling, text: &dyn Fn(&Target, &mut Rng) -> Vec<usize>| {
        let largest = (0..4)
            .map(|_| {
                let target = Target::random(sampling, &mut rng);
                deviation(&target.law(sampling), &counts(|| text(&target, &mut rng)))
            })
            .fold(f64::NEG_INFINITY, f64::max);
        println!("{what}: deviation {largest:.1}");
        assert!(largest > 2.0 * THRESHOLD, "{what} passes the test: {largest}");
    };
    for (round, sampling) in [
        // <https://github.com/vllm-project/vllm/issues/54282>
        (Round::SameNoise, plain),
        // vLLM's own order of rows, see `penalties.py` of its Model Runner V2
        (Round::PenaltiesOfRows, Sampling { penalised: true, ..plain }),
        // <https://macoredroid.github.io/Lumo_FlyWheel/every-lever.html>
        (Round::Unfiltered, Sampling { top_k: 3, ..plain }),
    ] {
        must_fail(&format!("{round:?}"), sampling, &|target, rng| {
            let seed = rng.next() as i64;
            emit(target, sampling, round, seed, rng).0
        });
    }
    // <https://github.com/warpfront/hipfire/pull/483>
    must_fail("min(1, p / q)", plain, &|target, rng| emit_by_ratio(target, plain, rng));
}
