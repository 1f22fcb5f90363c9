// SPDX-License-Identifier: Apache-2.0
//! The walk down a tree along the target's choices.

use crate::error::{Result, bail};
use crate::gumbel::{GumbelNoise, MAX_NOISE};
use crate::tensor::TensorRef;

/// The links of one tree that the walk follows, an entry per node. The tree may have been cut after
/// it was built: a link to a node that is not there is none.
#[derive(Clone, Copy, Debug)]
pub struct TreeLinks<'a> {
    /// Token ids.
    pub tokens: &'a [i32],
    /// Best child, negative for none.
    pub first_child: &'a [i32],
    /// Next worse child of the same parent, negative for none.
    pub next_sibling: &'a [i32],
}

/// What the target makes of one tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedPath {
    /// Accepted nodes from depth 1 on.
    pub nodes: Vec<i32>,
    /// Their tokens, then the bonus token: the choice at the last accepted node.
    pub tokens: Vec<i64>,
}

/// Follows `choose(node)`, the token that the target takes after `node`, from the root until no
/// child has that token. `choose` is called for the nodes of the path only.
///
/// # Errors
/// `InvalidShape`: no node, or arrays of different lengths. `InvalidValue`: a link that does not
/// lead to a later node (so no cycle passes), or a path longer than `max_depth`.
pub fn tree_accept(
    links: &TreeLinks<'_>,
    max_depth: usize,
    mut choose: impl FnMut(usize) -> i64,
) -> Result<AcceptedPath> {
    let num_nodes = links.tokens.len();
    if num_nodes == 0 || links.first_child.len() != num_nodes || links.next_sibling.len() != num_nodes {
        bail!(
            InvalidShape,
            "tokens, first_child, next_sibling lengths: got {num_nodes}, {}, {}, want the same, at least 1",
            links.first_child.len(),
            links.next_sibling.len()
        );
    }
    let follow = |name: &str, link: &[i32], node: usize| match link[node] {
        ..0 => Ok(None),
        next if next as usize <= node => {
            bail!(InvalidValue, "{name}[{node}]: got {next}, want -1 or a later node")
        }
        next => Ok(Some(next as usize).filter(|&next| next < num_nodes)),
    };

    let mut path = AcceptedPath { nodes: Vec::new(), tokens: Vec::new() };
    let mut node = 0;
    loop {
        let token = choose(node);
        path.tokens.push(token);
        let mut child = follow("first_child", links.first_child, node)?;
        while let Some(candidate) = child
            && i64::from(links.tokens[candidate]) != token
        {
            child = follow("next_sibling", links.next_sibling, candidate)?;
        }
        let Some(next) = child else {
            return Ok(path);
        };
        if path.nodes.len() == max_depth {
            bail!(InvalidValue, "depth of node {next}: got {}, want at most {max_depth}", max_depth + 1);
        }
        path.nodes.push(next as i32);
        node = next;
    }
}

/// The choice of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The token of the largest value, the lowest id among equals; 0 if nothing is above -inf.
    pub token: i64,
    /// The row has a NaN, which never wins, or nothing above -inf.
    pub is_nonfinite: bool,
}

/// Chooses the largest of a floating-point vector of logits.
pub fn greedy_choice(logits: TensorRef<'_>) -> Choice {
    const LANES: usize = 16;
    let mut best = f32::NEG_INFINITY;
    let mut token = 0;
    let mut has_nan = false;
    in_chunks(logits, |start, x| {
        // independent lanes, so that the loop vectorises; a comparison with NaN is false
        let mut lanes = [best; LANES];
        for part in x.chunks(LANES) {
            for (lane, &x) in lanes.iter_mut().zip(part) {
                *lane = if x > *lane { x } else { *lane };
                has_nan |= x.is_nan();
            }
        }
        let max = lanes.into_iter().fold(best, f32::max);
        if max > best {
            best = max;
            token = start + x.iter().position(|&x| x == max).unwrap_or(0);
        }
    });
    Choice { token: token as i64, is_nonfinite: has_nan || best == f32::NEG_INFINITY }
}

/// Samples from the softmax of a floating-point vector of logits: chooses the largest sum of logit
/// and noise, rounded to f32.
pub fn sampled_choice(logits: TensorRef<'_>, noise: GumbelNoise) -> Choice {
    let mut best = f32::NEG_INFINITY;
    let mut token = 0;
    let mut has_nan = false;
    in_chunks(logits, |start, x| {
        for (i, &x) in x.iter().enumerate() {
            has_nan |= x.is_nan();
            // most tokens cannot win, whatever their noise
            if x + MAX_NOISE > best {
                let value = x + noise.of((start + i) as u32);
                if value > best {
                    best = value;
                    token = start + i;
                }
            }
        }
    });
    Choice { token: token as i64, is_nonfinite: has_nan || best == f32::NEG_INFINITY }
}

/// Calls `visit` with the first index and the elements of each chunk, in order.
fn in_chunks(logits: TensorRef<'_>, mut visit: impl FnMut(usize, &[f32])) {
    const CHUNK: usize = 1024;
    let vocab = logits.shape()[0];
    let mut buffer = [0.0f32; CHUNK];
    for start in (0..vocab).step_by(CHUNK) {
        let x = &mut buffer[..CHUNK.min(vocab - start)];
        logits.load_f32(start, x);
        visit(start, x);
    }
}
