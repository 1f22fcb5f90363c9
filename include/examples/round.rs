// SPDX-License-Identifier: Apache-2.0
//! Greedy decoding with trees, from Rust: `cargo run --example round`.
//!
//! The target is a toy, a fixed function of the last two tokens; the drafter knows it only roughly.
//! Both texts must be the same, and trees must need fewer rounds.

use ddtree::{
    DraftScores, Result, TensorRef, TreeLinks, TreeRequest, greedy_choice, tree_accept, tree_build,
};

const VOCAB: usize = 50;
const HORIZON: usize = 6;
const BUDGET: usize = 15;
const TEXT: usize = 200;

/// Logits of the token after `last`, which came after `before`.
fn target(before: i32, last: i32) -> [f32; VOCAB] {
    std::array::from_fn(|token| {
        let key = (before as u64 * 53 + last as u64) * 53 + token as u64;
        let hash =
            key.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (hash >> 40) as f32 / (1 << 21) as f32
    })
}

fn choice(logits: &[f32]) -> Result<i32> {
    Ok(greedy_choice(TensorRef::new(logits, &[VOCAB])?).token as i32)
}

/// Scores of the tokens at depths 1 to HORIZON, `[HORIZON, VOCAB]`: the target's own along one path,
/// less and less certain.
fn draft(text: &[i32]) -> Result<Vec<f32>> {
    let mut path = text[text.len() - 2..].to_vec();
    let mut scores = Vec::new();
    for depth in 0..HORIZON {
        let logits = target(path[depth], path[depth + 1]);
        scores.extend(logits.map(|x| x / (1.0 + 0.3 * depth as f32)));
        path.push(choice(&logits)?);
    }
    Ok(scores)
}

/// Extends the text to TEXT tokens; returns the rounds it took. Without a budget the root is the tree.
fn decode(text: &mut Vec<i32>, node_budget: usize) -> Result<usize> {
    let mut rounds = 0;
    while text.len() < TEXT {
        let scores = draft(text)?;
        let logits = TensorRef::new(&scores, &[HORIZON, VOCAB])?;
        let request = TreeRequest {
            root_token: text[text.len() - 1],
            root_position: text.len() as i64 - 1,
            node_budget,
            max_depth: HORIZON,
            ..TreeRequest::default()
        };
        let tree = tree_build(&DraftScores::Logits { logits, max_candidates: 0 }, None, &request)?.tree;

        // one forward: the target's choice after each node, given the path to it
        let before_root = text[text.len() - 2];
        let choices = (0..tree.num_nodes())
            .map(|node| {
                let before =
                    usize::try_from(tree.parents[node]).map_or(before_root, |parent| tree.tokens[parent]);
                choice(&target(before, tree.tokens[node]))
            })
            .collect::<Result<Vec<_>>>()?;

        let links = TreeLinks {
            tokens: &tree.tokens,
            first_child: &tree.first_child,
            next_sibling: &tree.next_sibling,
        };
        let path = tree_accept(&links, HORIZON, |node| i64::from(choices[node]))?;
        text.extend(path.tokens.iter().map(|&token| token as i32));
        rounds += 1;
    }
    text.truncate(TEXT);
    Ok(rounds)
}

fn main() -> Result<()> {
    let (mut plain, mut with_trees) = (vec![1, 2], vec![1, 2]);
    let plain_rounds = decode(&mut plain, 0)?;
    let tree_rounds = decode(&mut with_trees, BUDGET)?;
    println!("{plain_rounds} rounds without trees, {tree_rounds} with them: {:?} ...", &with_trees[..16]);
    assert_eq!(plain, with_trees, "the texts differ");
    assert!(tree_rounds < plain_rounds);
    Ok(())
}
