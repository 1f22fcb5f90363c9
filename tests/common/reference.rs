// SPDX-License-Identifier: Apache-2.0
//! Slow, literal versions of what the library documents.

/// `exp_spec` of `ddtree::scores`.
fn exp_spec(t: f32) -> f32 {
    if t < -87.0 {
        return 0.0;
    }
    let constant = f32::from_bits;
    let s = t.mul_add(constant(0x3fb8aa3b), 12582912.0);
    let k = s - 12582912.0;
    let r = k.mul_add(-constant(0x3f317218), t);
    let r = k.mul_add(-constant(0xb102e308), r);
    let q = constant(0x3ab511e8);
    let q = q.mul_add(r, constant(0x3c091d10));
    let q = q.mul_add(r, constant(0x3d2aac79));
    let q = q.mul_add(r, constant(0x3e2aaa49));
    let q = q.mul_add(r, constant(0x3efffffe));
    let p = (r * r).mul_add(q, r) + 1.0;
    (f64::from(p) * 2f64.powi(k as i32)) as f32
}

/// `ln_spec` of `ddtree::scores`.
fn ln_spec(s: f32) -> f64 {
    let mut m = f64::from(s);
    let mut k = 0.0;
    while m >= 2.0 {
        m /= 2.0;
        k += 1.0;
    }
    if m > 1.5 {
        m /= 2.0;
        k += 1.0;
    }
    let z = (m - 1.0) / (m + 1.0);
    let w = z * z;
    let mut p = 1.0 / 23.0;
    for c in (1..=21).rev().step_by(2) {
        p = p * w + 1.0 / f64::from(c);
    }
    k * std::f64::consts::LN_2 + 2.0 * z * p
}

/// `lnZ` of a vocabulary, or `None` if nothing is finite.
pub fn vocab_normaliser(x: &[f32]) -> Option<f64> {
    let mut chunks = Vec::new();
    for (c, chunk) in x.chunks(4096).enumerate() {
        let finite = || chunk.iter().enumerate().filter(|(_, x)| x.is_finite());
        let Some(max) = finite().map(|(_, &x)| x).reduce(f32::max) else {
            continue;
        };
        let mut lanes = vec![0.0f32; 64];
        for (i, x) in finite() {
            lanes[(c * 4096 + i) % 64] += exp_spec(x - max);
        }
        for h in [32, 16, 8, 4, 2, 1] {
            for i in 0..h {
                lanes[i] += lanes[i + h];
            }
        }
        chunks.push((max, lanes[0]));
    }
    let max = chunks.iter().map(|chunk| chunk.0).reduce(f32::max)?;
    let mut sum = 0.0f32;
    for (m, s) in chunks {
        sum = s.mul_add(exp_spec(m - max), sum);
    }
    Some(f64::from(max) + ln_spec(sum))
}

/// `lnZ` of a candidate list, or `None` if nothing is finite.
pub fn list_normaliser(x: &[f32]) -> Option<f64> {
    let max = x.iter().copied().filter(|x| x.is_finite()).reduce(f32::max)?;
    let mut sum = 0.0f32;
    for x in x.iter().filter(|x| x.is_finite()) {
        sum += exp_spec(x - max);
    }
    Some(f64::from(max) + ln_spec(sum))
}

/// MurmurHash3_x86_32 of 16 bytes, seed 0.
fn murmur3(bytes: [u8; 16]) -> u32 {
    let mut h = 0u32;
    for word in bytes.chunks(4) {
        let k = u32::from_le_bytes(word.try_into().expect("4 bytes")).wrapping_mul(0xcc9e2d51);
        h ^= k.rotate_left(15).wrapping_mul(0x1b873593);
        h = h.rotate_left(13).wrapping_mul(5).wrapping_add(0xe6546b64);
    }
    h ^= 16;
    h = (h ^ (h >> 16)).wrapping_mul(0x85ebca6b);
    h = (h ^ (h >> 13)).wrapping_mul(0xc2b2ae35);
    h ^ (h >> 16)
}

/// The 32 bits behind the noise of a token that is sampled in the row at `position`.
pub fn noise_bits(seed: i64, position: i64, token: u32) -> u32 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    bytes[8..12].copy_from_slice(&position.to_le_bytes()[..4]);
    bytes[12..].copy_from_slice(&token.to_le_bytes());
    murmur3(bytes)
}

/// `noise_spec` of `ddtree::scores`.
pub fn noise_spec(bits: u32) -> f32 {
    let ln_near = |f: f32, k: i32| {
        let mut q = f32::from_bits(0xbd89a21e);
        for c in [0x3e10eede, 0xbe31883f, 0x3e4dc6bc, 0xbe7fc9a8, 0x3eaaa739, 0xbf00001c, 0x3f800000] {
            q = q.mul_add(f, f32::from_bits(c));
        }
        (k as f32).mul_add(f32::from_bits(0x3f317218), f * q)
    };
    let split = |v: f32| {
        let (mut m, mut k) = (v, 0);
        while m < 0.75 {
            (m, k) = (m * 2.0, k - 1);
        }
        while m >= 1.5 {
            (m, k) = (m / 2.0, k + 1);
        }
        (k, m)
    };
    let low = ((bits & 0xffff) as f32 + 0.5) * 2f32.powi(-32);
    let u = ((bits >> 16) as f32).mul_add(2f32.powi(-16), low);
    let (k, m) = split((1.0 - u).max(2f32.powi(-24)));
    let y = -ln_near(if u < 0.25 { -u } else { m - 1.0 }, k);
    let (k, m) = split(y);
    -ln_near(m - 1.0, k)
}

/// A row of logits as a target samples from it, before any scale.
pub fn noised(logits: &[f32], temperature: f32, seed: i64, position: i64) -> Vec<f32> {
    let noise = |token| noise_spec(noise_bits(seed, position, token as u32));
    logits.iter().enumerate().map(|(token, x)| x.mul_add(1.0 / temperature, noise(token))).collect()
}

/// Q10.21 edge score.
pub fn edge_score(x: f32, ln_z: f64) -> i64 {
    let score = ((f64::from(x) - ln_z) * 2f64.powi(21)).round_ties_even();
    score.clamp(-2147483647.0, 0.0) as i64
}

/// A possible child, best first in its list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Child {
    pub token: i32,
    pub score: i64,
    /// Column of a lattice.
    pub column: usize,
}

fn best_first(mut children: Vec<Child>) -> Vec<Child> {
    children.sort_by(|a, b| b.score.cmp(&a.score).then(a.token.cmp(&b.token)));
    children
}

/// The whole vocabulary, sorted.
pub fn vocab_children(logits: &[f32], scale: f32) -> Vec<Child> {
    let x: Vec<f32> = logits.iter().map(|x| x * scale).collect();
    let Some(ln_z) = vocab_normaliser(&x) else {
        return Vec::new();
    };
    let finite = x.iter().enumerate().filter(|(_, x)| x.is_finite());
    best_first(
        finite.map(|(id, &x)| Child { token: id as i32, score: edge_score(x, ln_z), column: 0 }).collect(),
    )
}

/// The candidates of one lattice row below one parent; `x` are the scaled scores by column.
pub fn lattice_children(tokens: &[i32], x: &[f32]) -> Vec<Child> {
    let present: Vec<usize> = (0..tokens.len()).filter(|&j| tokens[j] >= 0).collect();
    let scores: Vec<f32> = present.iter().map(|&j| x[j]).collect();
    let Some(ln_z) = list_normaliser(&scores) else {
        return Vec::new();
    };
    let finite = present.into_iter().filter(|&j| x[j].is_finite());
    best_first(finite.map(|j| Child { token: tokens[j], score: edge_score(x[j], ln_z), column: j }).collect())
}

/// A node of the brute-force tree, in the order of selection.
#[derive(Clone, Debug, PartialEq)]
pub struct Picked {
    pub token: i32,
    pub parent: usize,
    pub depth: usize,
    pub score: i64,
    pub sibling: usize,
    pub column: usize,
}

/// Repeatedly looks at every prefix whose parent is taken and takes the best. Entry 0 is the root.
/// `children(depth, column)` lists what may follow a node at that depth.
pub fn brute_force(
    budget: usize,
    depth_limit: usize,
    children: impl Fn(usize, usize) -> Vec<Child>,
    is_stop: impl Fn(i32, usize) -> bool,
) -> Vec<Picked> {
    brute_force_with_spine(0, budget, depth_limit, children, is_stop)
}

/// The same after the best child of the root, its best child, and so on down to `spine_depth`.
pub fn brute_force_with_spine(
    spine_depth: usize,
    budget: usize,
    depth_limit: usize,
    children: impl Fn(usize, usize) -> Vec<Child>,
    is_stop: impl Fn(i32, usize) -> bool,
) -> Vec<Picked> {
    let mut picked = vec![Picked { token: -7, parent: 0, depth: 0, score: 0, sibling: 0, column: 0 }];
    let mut taken = std::collections::HashSet::new();
    for depth in 0..spine_depth.min(budget).min(depth_limit) {
        let above = &picked[depth];
        let ends = depth > 0 && is_stop(above.token, depth);
        let Some(child) = children(depth, above.column).first().copied().filter(|_| !ends) else {
            break;
        };
        let score = (above.score + child.score).max(-2147483647);
        taken.insert((depth, 0));
        picked.push(Picked {
            token: child.token,
            parent: depth,
            depth: depth + 1,
            score,
            sibling: 0,
            column: child.column,
        });
    }
    while picked.len() <= budget {
        let mut best: Option<Picked> = None;
        for (rank, parent) in picked.iter().enumerate() {
            if parent.depth >= depth_limit || (rank > 0 && is_stop(parent.token, parent.depth)) {
                continue;
            }
            for (sibling, child) in children(parent.depth, parent.column).into_iter().enumerate() {
                if taken.contains(&(rank, sibling)) {
                    continue;
                }
                let candidate = Picked {
                    token: child.token,
                    parent: rank,
                    depth: parent.depth + 1,
                    score: (parent.score + child.score).max(-2147483647),
                    sibling,
                    column: child.column,
                };
                let key = |node: &Picked| (-node.score, node.parent, node.sibling);
                if best.as_ref().is_none_or(|best| key(&candidate) < key(best)) {
                    best = Some(candidate);
                }
            }
        }
        match best {
            Some(best) => {
                taken.insert((best.parent, best.sibling));
                picked.push(best);
            }
            None => break,
        }
    }
    picked
}

/// Every field of one tree, derived naively from parents that are already in depth-first preorder.
#[derive(Clone, Debug, PartialEq)]
pub struct Fields {
    pub depths: Vec<i32>,
    pub first_child: Vec<i32>,
    pub next_sibling: Vec<i32>,
    pub subtree_end: Vec<i32>,
    /// `[i][j]`: j is i or an ancestor of i.
    pub closure: Vec<Vec<bool>>,
}

/// Transitive closure of the parent relation by repeated squaring of a boolean matrix.
pub fn closure(parents: &[i32]) -> Vec<Vec<bool>> {
    let n = parents.len();
    let mut reach: Vec<Vec<bool>> =
        (0..n).map(|i| (0..n).map(|j| i == j || parents[i] == j as i32).collect()).collect();
    loop {
        let squared: Vec<Vec<bool>> =
            (0..n).map(|i| (0..n).map(|j| (0..n).any(|k| reach[i][k] && reach[k][j])).collect()).collect();
        if squared == reach {
            return reach;
        }
        reach = squared;
    }
}

pub fn fields(parents: &[i32]) -> Fields {
    let closure = closure(parents);
    let n = parents.len();
    let node = |i: Option<usize>| i.map_or(-1, |i| i as i32);
    Fields {
        depths: closure.iter().map(|row| row.iter().filter(|&&bit| bit).count() as i32 - 1).collect(),
        first_child: (0..n).map(|i| node((0..n).find(|&j| parents[j] == i as i32))).collect(),
        next_sibling: (0..n)
            .map(|i| node((i + 1..n).find(|&j| parents[j] >= 0 && parents[j] == parents[i])))
            .collect(),
        subtree_end: (0..n).map(|i| (i + (0..n).filter(|&j| closure[j][i]).count()) as i32).collect(),
        closure,
    }
}

/// Depth-first preorder by recursion; `key` orders siblings.
pub fn preorder<K: Ord>(parents: &[i32], key: &impl Fn(usize) -> K) -> Vec<usize> {
    fn visit<K: Ord>(node: usize, parents: &[i32], key: &impl Fn(usize) -> K, out: &mut Vec<usize>) {
        out.push(node);
        let mut children: Vec<usize> = (1..parents.len()).filter(|&j| parents[j] == node as i32).collect();
        children.sort_by_key(|&j| key(j));
        for child in children {
            visit(child, parents, key, out);
        }
    }
    let mut out = Vec::new();
    visit(0, parents, key, &mut out);
    out
}
