// SPDX-License-Identifier: Apache-2.0
//! Trees that anticipate the target's noise leave the law of the text alone: all texts of a small
//! vocabulary are enumerated, and sampled with the library's builder, walk and noise.

use ddtree::gumbel::GumbelNoise;
use ddtree::{
    DraftScores, TargetNoise, TensorRef, TreeLinks, TreeRequest, sampled_choice, tree_accept, tree_build,
};

const VOCAB: usize = 4;
const LENGTH: usize = 3;
const TEXTS: usize = VOCAB.pow(LENGTH as u32);
const SAMPLES: i64 = 60_000;
/// Position of the token before the text.
const ROOT_POSITION: i64 = 40;

/// A reproducible number in -1..1.
fn number(key: usize) -> f32 {
    let mut z = (key as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// A target whose logits depend on all tokens before.
#[derive(Clone, Copy)]
struct Target {
    temperature: f32,
    /// Taken from the logits of tokens that the text has already.
    presence_penalty: f32,
    /// Most tokens that can be sampled.
    top_k: usize,
}

impl Target {
    fn raw(prefix: &[usize]) -> [f32; VOCAB] {
        let key = prefix.iter().fold(1, |key, token| key * VOCAB + token);
        std::array::from_fn(|token| 1.6 * number(key * VOCAB + token))
    }

    /// What the sampler adds its noise to.
    fn processed(&self, prefix: &[usize]) -> [f32; VOCAB] {
        let mut logits = Self::raw(prefix);
        for (token, logit) in logits.iter_mut().enumerate() {
            if prefix.contains(&token) {
                *logit -= self.presence_penalty;
            }
            *logit /= self.temperature;
        }
        let mut sorted = logits;
        sorted.sort_by(|a, b| b.total_cmp(a));
        logits.map(|x| if x >= sorted[self.top_k - 1] { x } else { f32::NEG_INFINITY })
    }

    fn law(&self) -> Vec<f64> {
        (0..TEXTS)
            .map(|text| {
                let tokens = tokens_of(text);
                (0..LENGTH)
                    .map(|i| {
                        let weights = self.processed(&tokens[..i]).map(|x| f64::from(x).exp());
                        weights[tokens[i]] / weights.iter().sum::<f64>()
                    })
                    .product()
            })
            .collect()
    }
}

fn tokens_of(text: usize) -> [usize; LENGTH] {
    std::array::from_fn(|i| text / VOCAB.pow((LENGTH - 1 - i) as u32) % VOCAB)
}

/// How the drafter orders candidates, and where the target's noise comes from.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Match,
    Coupled,
    /// The builder's noise has another seed than the target's.
    OtherSalt,
    /// The target takes the noise of the root at every position, as the builder does.
    OnePosition,
}

/// Depth-wise scores of an imperfect drafter: the target's after the best token so far, and an error.
fn draft(prefix: &[usize]) -> Vec<f32> {
    let mut path = prefix.to_vec();
    let mut scores = Vec::new();
    while path.len() < LENGTH {
        let row = Target::raw(&path);
        let key = 7_000 + path.iter().fold(1, |key, token| key * VOCAB + token);
        scores.extend((0..VOCAB).map(|token| row[token] + 0.4 * number(key * VOCAB + token)));
        path.push((0..VOCAB).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a token"));
    }
    scores
}

/// The text of a seed, and how many of its tokens were accepted in the first round.
fn generate(target: &Target, mode: Mode, seed: i64, budget: usize) -> (usize, usize) {
    let mut text: Vec<usize> = Vec::new();
    let mut accepted = None;
    while text.len() < LENGTH {
        let root_position = ROOT_POSITION + text.len() as i64;
        let scores = draft(&text);
        let depths = LENGTH - text.len();
        let salt = if mode == Mode::OtherSalt { 1 << 40 } else { 0 };
        let noise = TargetNoise { seed: seed ^ salt, temperature: target.temperature };
        let request = TreeRequest {
            root_token: 0,
            root_position,
            node_budget: budget,
            max_depth: depths,
            candidate_cap: 0,
            spine_depth: 0,
            stop_tokens: &[],
            stop_min_depth: 0,
            noise: (mode != Mode::Match).then_some(noise),
        };
        let logits = TensorRef::new(&scores, &[depths, VOCAB]).expect("a matrix");
        let draft = DraftScores::Logits { logits, max_candidates: 0 };
        let tree = tree_build(&draft, None, &request).expect("a tree").tree;
        let choose = |node: usize| {
            let mut path = text.clone();
            let mut below = Vec::new();
            let mut at = node;
            while at > 0 {
                below.push(tree.tokens[at] as usize);
                at = tree.parents[at] as usize;
            }
            path.extend(below.iter().rev());
            if path.len() == LENGTH {
                return -1;
            }
            let position = match mode {
                Mode::OnePosition => ROOT_POSITION,
                _ => root_position + i64::from(tree.depths[node]),
            };
            let row = target.processed(&path);
            let row = TensorRef::new(&row, &[VOCAB]).expect("a vector");
            sampled_choice(row, GumbelNoise::new(seed, position)).token
        };
        let links = TreeLinks {
            tokens: &tree.tokens,
            first_child: &tree.first_child,
            next_sibling: &tree.next_sibling,
        };
        let path = tree_accept(&links, depths, choose).expect("a walk");
        accepted.get_or_insert(path.nodes.len());
        text.extend(path.tokens.iter().filter(|&&token| token >= 0).map(|&token| token as usize));
    }
    (text.iter().fold(0, |id, token| id * VOCAB + token), accepted.unwrap_or(0))
}

/// Chi-squared, its degrees of freedom, and the mean acceptance of first rounds.
fn measure(target: &Target, mode: Mode, budget: usize) -> (f64, usize, f64) {
    let mut counts = vec![0u32; TEXTS];
    let mut accepted = 0;
    for seed in 0..SAMPLES {
        let (text, nodes) = generate(target, mode, seed * 0x1_0000_0001 - 5, budget);
        counts[text] += 1;
        accepted += nodes;
    }
    // rare texts together
    let (mut chi, mut degrees, mut rest) = (0.0, 0, (0.0, 0.0));
    for (probability, count) in target.law().into_iter().zip(counts) {
        let (expected, count) = (probability * SAMPLES as f64, f64::from(count));
        if expected < 10.0 {
            assert!(expected > 0.0 || count == 0.0, "an impossible text");
            rest = (rest.0 + expected, rest.1 + count);
        } else {
            chi += (count - expected).powi(2) / expected;
            degrees += 1;
        }
    }
    if rest.0 >= 1.0 {
        chi += (rest.1 - rest.0).powi(2) / rest.0;
        degrees += 1;
    }
    (chi, degrees - 1, accepted as f64 / SAMPLES as f64)
}

/// Exceeded once in a million (Wilson and Hilferty's approximation).
fn critical(degrees: usize) -> f64 {
    let n = degrees as f64;
    n * (1.0 - 2.0 / (9.0 * n) + 4.753 * (2.0 / (9.0 * n)).sqrt()).powi(3)
}

#[test]
fn the_law_is_the_targets() {
    for (temperature, presence_penalty, top_k) in
        [(0.3, 0.0, VOCAB), (0.7, 0.0, 3), (1.0, 0.0, VOCAB), (1.0, 0.8, 3), (1.5, 0.5, VOCAB)]
    {
        let target = Target { temperature, presence_penalty, top_k };
        let (chi, degrees, coupled) = measure(&target, Mode::Coupled, 6);
        println!(
            "T {temperature}, penalty {presence_penalty}, top-k {top_k}: chi-squared {chi:.1} of {degrees}, \
             accepted {coupled:.3}"
        );
        assert!(chi < critical(degrees), "{chi} of {degrees}");
    }
}

/// The text of a seed is the same with and without coupling; coupling only accepts more of it.
#[test]
fn coupling_changes_the_rounds_and_no_text() {
    let target = Target { temperature: 1.0, presence_penalty: 0.0, top_k: VOCAB };
    for seed in 0..2000 {
        let text = |mode, budget| generate(&target, mode, seed, budget).0;
        let want = text(Mode::Match, 0);
        for budget in [1, 3, 6] {
            assert_eq!(text(Mode::Coupled, budget), want, "seed {seed}, budget {budget}");
            assert_eq!(text(Mode::OtherSalt, budget), want, "seed {seed}, budget {budget}");
        }
    }
    let (_, _, matched) = measure(&target, Mode::Match, 3);
    let (_, _, coupled) = measure(&target, Mode::Coupled, 3);
    println!("accepted with budget 3: match {matched:.3}, coupled {coupled:.3}");
    assert!(coupled > 1.2 * matched, "{coupled}, {matched}");
}

/// Negative control: a tree for other noise anticipates nothing, and is lossless all the same.
#[test]
fn noise_salted_differently_accepts_less_by_the_same_law() {
    let target = Target { temperature: 1.0, presence_penalty: 0.0, top_k: VOCAB };
    let (_, _, coupled) = measure(&target, Mode::Coupled, 3);
    let (_, _, matched) = measure(&target, Mode::Match, 3);
    let (chi, degrees, salted) = measure(&target, Mode::OtherSalt, 3);
    println!("accepted with budget 3: coupled {coupled:.3}, match {matched:.3}, salted {salted:.3}");
    assert!(chi < critical(degrees), "{chi} of {degrees}");
    // worse than no noise at all: the tree is random where it could be probable
    assert!(salted < matched && matched < coupled);
}

/// Negative control: the test sees a wrong law.
#[test]
fn noise_reused_across_positions_breaks_the_law() {
    let target = Target { temperature: 1.0, presence_penalty: 0.0, top_k: VOCAB };
    let (chi, degrees, _) = measure(&target, Mode::OnePosition, 6);
    println!("chi-squared {chi:.0} of {degrees}");
    assert!(chi > 10.0 * critical(degrees), "{chi} of {degrees}");
}
