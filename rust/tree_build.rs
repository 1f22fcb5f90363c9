// SPDX-License-Identifier: Apache-2.0
//! The best tree under a node budget, from a drafter's scores.
//!
//! A node's path score is the sum of its edge scores (see [`crate::scores`]). Starting from the
//! root, the node added next is, among all nodes whose parent is in the tree, the one with the
//! largest path score; ties go to the parent that was added first, then to the better sibling.
//! Siblings are ordered by edge score, then by token id. So the tree of a smaller budget is the
//! beginning of this order, and with independent depths the result is exactly the `node_budget`
//! most probable prefixes (DDTree, <https://arxiv.org/abs/2604.12989>).
//!
//! With a candidate lattice an edge may depend on its parent: for candidates `c_1 .. c_d` of a path
//! with unary scores `u` and transition scores `t`,
//!
//! ```text
//! score(c_1 .. c_d) = sum over k of log_softmax over j of (u[k, j] + t[k, c_(k-1), j]) at j = c_k
//! ```
//!
//! The lattice is the output of a DFlash2 selector or of LiLiCorr
//! (<https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/models/qwen3_dflash2.py>,
//! `lilicorr.py` beside it), and the log-softmax over it the distribution that their chains are
//! sampled from; DominoTree (<https://github.com/slin-zhq/Domino-Tree>) ranks paths in this way.
//!
//! A spine, the path of best children from the root, can be put before everything else. It is the
//! chain that the drafter itself would propose, which a best-first tree may leave unfinished.

use std::collections::BinaryHeap;

use crate::dtype::DType;
use crate::error::{Result, bail};
use crate::gumbel::GumbelNoise;
use crate::scores::{self, RowNoise, RowSummary, Scoring};
use crate::tensor::TensorRef;
use crate::tree::{
    FLAG_CANDIDATES_EXHAUSTED, FLAG_NO_CANDIDATES, FLAG_NONFINITE, MAX_DEPTH, MAX_NODE_BUDGET, Tree,
};
use crate::tree_mask::{Topology, tree_mask};

/// Widest candidate lattice; the scores of all pairs of neighbouring depths are looked at.
const MAX_CANDIDATES: usize = 4096;

/// What the drafter says about the depths 1 to L of one request.
#[derive(Clone, Copy, Debug)]
pub enum DraftScores<'a> {
    /// A score for every token, depths independent.
    Logits {
        /// `[L, V]` f32, f16 or bf16.
        logits: TensorRef<'a>,
        /// Most candidates per depth; 0 = as many as the budget can use.
        max_candidates: usize,
    },
    /// A candidate lattice: few tokens per depth, scored with or without their parent.
    Lattice {
        /// `[L, K]` i32, distinct at each depth; negative = no candidate. K is at most 4096.
        tokens: TensorRef<'a>,
        /// `[L, K]` f32, unnormalised; `None` is 0 and needs transitions.
        scores: Option<TensorRef<'a>>,
        /// `[L, K, K]` f32: `[d, i, j]` is added to the score of candidate j at depth d + 1 below
        /// candidate i at depth d; `i` is 0 below the root.
        transitions: Option<TensorRef<'a>>,
    },
}

/// The noise with which the target samples. With it, a tree anticipates the sampled tokens rather
/// than the most probable ones.
#[derive(Clone, Copy, Debug)]
pub struct TargetNoise {
    /// Seed of the request; the position of a token's parent is the rest of the key, see
    /// [`crate::gumbel`].
    pub seed: i64,
    /// What the drafter's scores are divided by before the noise is added; finite and > 0.
    pub temperature: f32,
}

/// What one request asks of its tree; the default asks for no node.
#[derive(Clone, Copy, Debug, Default)]
pub struct TreeRequest<'a> {
    /// Token of the root.
    pub root_token: i32,
    /// Position of the root, >= 0.
    pub root_position: i64,
    /// Most nodes below the root, at most [`MAX_NODE_BUDGET`].
    pub node_budget: usize,
    /// Largest depth; L and [`MAX_DEPTH`] are limits in any case.
    pub max_depth: usize,
    /// Candidates per parent that are considered; 1 = the chain of best tokens, 0 = no cap.
    pub candidate_cap: usize,
    /// The path of best children down to this depth is added before any other node; 0 = none.
    pub spine_depth: usize,
    /// Nothing grows below these tokens; negative ones are ignored.
    pub stop_tokens: &'a [i32],
    /// Stop tokens at a smaller depth than this do not end a path.
    pub stop_min_depth: i32,
    /// `None` for a greedy target, or a tree of the most probable tokens.
    pub noise: Option<TargetNoise>,
}

/// A tree, the path score of each of its nodes, and flag bits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuiltTree {
    /// The tree; `pop_ranks` is the order in which nodes were added.
    pub tree: Tree,
    /// Path scores in the order of the tree: log-probability * 2^21, the root 0.
    pub path_scores: Vec<i32>,
    /// `FLAG_*` bits. Scores are looked at, and flagged, down to the smallest of `node_budget`,
    /// `max_depth` and L.
    pub flags: u32,
}

/// Builds the tree of one request. `depth_scales`: `[L]`, factors of the scores of each depth.
///
/// # Errors
/// `InvalidShape`, `InvalidDtype`: tensors that do not fit together. `InvalidValue`: a budget above
/// the limit, a scale or temperature that is not finite and positive, a negative position, a token
/// twice at one depth.
pub fn tree_build(
    draft: &DraftScores<'_>,
    depth_scales: Option<&[f32]>,
    request: &TreeRequest<'_>,
) -> Result<BuiltTree> {
    let num_depths = check_scores(draft)?;
    if request.node_budget > MAX_NODE_BUDGET {
        bail!(InvalidValue, "node budget: got {}, want at most {MAX_NODE_BUDGET}", request.node_budget);
    }
    if let Some(scales) = depth_scales {
        check_scales(scales, num_depths)?;
    }
    if let Some(TargetNoise { temperature, .. }) = request.noise
        && !(temperature.is_finite() && temperature > 0.0)
    {
        bail!(InvalidValue, "temperature: got {temperature}, want a finite number above 0");
    }
    let depth_limit = num_depths.min(request.max_depth).min(request.node_budget).min(MAX_DEPTH);
    let cap = if request.candidate_cap == 0 { usize::MAX } else { request.candidate_cap };
    let scorings = (0..depth_limit).map(|depth| scoring(depth_scales, request, depth)).collect();
    let candidates = Candidates::new(draft, scorings, request.node_budget.min(cap))?;
    Builder::new(candidates, depth_limit, request).run()
}

/// How the scores of row `depth` are made.
fn scoring(depth_scales: Option<&[f32]>, request: &TreeRequest<'_>, depth: usize) -> Scoring {
    Scoring {
        scale: depth_scales.map_or(1.0, |scales| scales[depth]),
        noise: request.noise.map(|noise| RowNoise {
            inverse_temperature: 1.0 / noise.temperature,
            // the target samples these tokens in the row of their parent
            gumbel: GumbelNoise::new(noise.seed, request.root_position.wrapping_add(depth as i64)),
        }),
    }
}

/// Checks dtypes and shapes; returns L.
fn check_scores(draft: &DraftScores<'_>) -> Result<usize> {
    match draft {
        DraftScores::Logits { logits, .. } => {
            logits.want_ndim("logits", 2)?;
            check_logits(logits)?;
            Ok(logits.shape()[0])
        }
        DraftScores::Lattice { tokens, scores, transitions } => {
            tokens.want_ndim("candidate_tokens", 2)?;
            check_lattice(tokens, scores.as_ref(), transitions.as_ref())?;
            Ok(tokens.shape()[0])
        }
    }
}

/// Checks dtype and vocabulary of logits `[.., V]`.
pub(crate) fn check_logits(logits: &TensorRef<'_>) -> Result<()> {
    logits.want_dtype("logits", DType::FLOATS)?;
    match logits.shape() {
        [.., vocab] if i32::try_from(*vocab).is_err() => {
            bail!(InvalidShape, "logits vocabulary: got {vocab}, want less than 2^31 (token ids are i32)")
        }
        _ => Ok(()),
    }
}

/// Checks dtypes of a lattice, and shapes against those of `tokens` `[.., K]`.
pub(crate) fn check_lattice(
    tokens: &TensorRef<'_>,
    scores: Option<&TensorRef<'_>>,
    transitions: Option<&TensorRef<'_>>,
) -> Result<()> {
    tokens.want_dtype("candidate_tokens", &[DType::I32])?;
    match tokens.shape() {
        [.., width] if *width > MAX_CANDIDATES => {
            bail!(InvalidShape, "candidate_tokens width: got {width}, want at most {MAX_CANDIDATES}")
        }
        _ => {}
    }
    if scores.is_none() && transitions.is_none() {
        bail!(InvalidValue, "candidate_scores and transition_scores: got neither, want at least one");
    }
    if let Some(scores) = scores {
        scores.want_dtype("candidate_scores", &[DType::F32])?;
        scores.want_shape("candidate_scores", tokens.shape())?;
    }
    if let Some(transitions) = transitions {
        let shape = [tokens.shape(), tokens.shape().last().map_or(&[], std::slice::from_ref)].concat();
        transitions.want_dtype("transition_scores", &[DType::F32])?;
        transitions.want_shape("transition_scores", &shape)?;
    }
    Ok(())
}

/// Checks the factors of the depths.
pub(crate) fn check_scales(scales: &[f32], num_depths: usize) -> Result<()> {
    if scales.len() != num_depths {
        bail!(InvalidShape, "depth_scales length: got {}, want {num_depths}", scales.len());
    }
    for (depth, &scale) in scales.iter().enumerate() {
        if !(scale.is_finite() && scale > 0.0) {
            bail!(InvalidValue, "depth_scales[{depth}]: got {scale}, want a finite number above 0");
        }
    }
    Ok(())
}

/// One possible child.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: i32,
    /// Edge score.
    score: i32,
    /// Its column in the lattice; 0 without one.
    column: usize,
}

impl Candidate {
    fn from_key(key: u64) -> Self {
        Self { token: scores::key_token(key), score: scores::key_score(key), column: 0 }
    }
}

/// The possible children of one node, best first.
#[derive(Debug, Default)]
struct ChildList {
    children: Vec<Candidate>,
    /// Whether it should be longer: it has fewer than `max_children` entries only because the
    /// drafter's candidates end.
    is_cut: bool,
}

/// Where child lists come from.
struct Candidates<'a> {
    /// Child lists of the nodes of each depth; empty with a lattice, which makes one per parent.
    per_depth: Vec<ChildList>,
    lattice: Option<Lattice<'a>>,
    /// Whether a NaN or +inf was ignored.
    has_nonfinite: bool,
}

impl<'a> Candidates<'a> {
    /// `scorings`: of each depth that the tree can have. `max_children`: how long a child list can
    /// usefully be.
    fn new(draft: &DraftScores<'a>, scorings: Vec<Scoring>, max_children: usize) -> Result<Self> {
        match *draft {
            DraftScores::Logits { logits, max_candidates } => {
                let limit = if max_candidates == 0 { max_children } else { max_candidates.min(max_children) };
                let mut candidates = Self { per_depth: Vec::new(), lattice: None, has_nonfinite: false };
                for (depth, scoring) in scorings.iter().enumerate() {
                    let row = logits.at(depth);
                    let summary = RowSummary::new(row, scoring);
                    candidates.has_nonfinite |= summary.has_nonfinite;
                    let best = summary.best(row, scoring, limit);
                    candidates.per_depth.push(ChildList {
                        children: best.into_iter().map(Candidate::from_key).collect(),
                        is_cut: limit < max_children && summary.num_usable > limit,
                    });
                }
                Ok(candidates)
            }
            DraftScores::Lattice { tokens, scores, transitions } => {
                let lattice = Lattice::new(tokens, scores, transitions, scorings, max_children)?;
                let has_nonfinite = lattice.has_nonfinite();
                Ok(Self { per_depth: Vec::new(), lattice: Some(lattice), has_nonfinite })
            }
        }
    }
}

/// A lattice, read down to the depth that the tree can use.
struct Lattice<'a> {
    /// `[depths][K]`
    tokens: Vec<Vec<i32>>,
    width: usize,
    scores: Option<TensorRef<'a>>,
    transitions: Option<TensorRef<'a>>,
    scorings: Vec<Scoring>,
    max_children: usize,
}

impl<'a> Lattice<'a> {
    fn new(
        tokens: TensorRef<'a>,
        scores: Option<TensorRef<'a>>,
        transitions: Option<TensorRef<'a>>,
        scorings: Vec<Scoring>,
        max_children: usize,
    ) -> Result<Self> {
        let width = tokens.shape()[1];
        let mut rows = Vec::with_capacity(scorings.len());
        for depth in 0..scorings.len() {
            let row: Vec<i32> = (0..width).map(|j| tokens.get_i32(&[depth, j])).collect();
            let mut present: Vec<i32> = row.iter().copied().filter(|&token| token >= 0).collect();
            present.sort_unstable();
            if let Some(pair) = present.windows(2).find(|pair| pair[0] == pair[1]) {
                bail!(
                    InvalidValue,
                    "candidate_tokens of depth {depth}: got token {} twice, want distinct tokens",
                    pair[0]
                );
            }
            rows.push(row);
        }
        Ok(Self { tokens: rows, width, scores, transitions, scorings, max_children })
    }

    /// The score of candidate `column` of row `depth` below candidate `parent` of the row before.
    fn x(&self, depth: usize, parent: usize, column: usize) -> f32 {
        let mut score = self.scores.map_or(0.0, |scores| scores.get_f32(&[depth, column]));
        if let Some(transitions) = self.transitions {
            score += transitions.get_f32(&[depth, parent, column]);
        }
        self.scorings[depth].x(score, self.tokens[depth][column] as u32)
    }

    /// The candidates of row `depth` that are not absent.
    fn columns(&self, depth: usize) -> impl Iterator<Item = usize> {
        self.tokens[depth].iter().enumerate().filter(|&(_, &token)| token >= 0).map(|(column, _)| column)
    }

    fn children(&self, depth: usize, parent: usize) -> ChildList {
        let columns: Vec<usize> = self.columns(depth).collect();
        let xs: Vec<f32> = columns.iter().map(|&column| self.x(depth, parent, column)).collect();
        let Some(ln_z) = scores::list_normaliser(&xs) else {
            return ChildList::default();
        };
        let mut children: Vec<Candidate> = columns
            .into_iter()
            .zip(xs)
            .filter(|(_, x)| x.is_finite())
            .map(|(column, x)| Candidate {
                token: self.tokens[depth][column],
                score: scores::edge_score(x, ln_z),
                column,
            })
            .collect();
        children.sort_unstable_by_key(|child| scores::candidate_key(child.score, child.token as u32));
        // the vocabulary always has more than a full list
        let is_cut = children.len() == self.width && self.width < self.max_children;
        children.truncate(self.max_children);
        ChildList { children, is_cut }
    }

    /// Whether any score that the tree could use is NaN or +inf.
    fn has_nonfinite(&self) -> bool {
        (0..self.scorings.len()).any(|depth| {
            let parents: Vec<usize> = match depth {
                0 => vec![0],
                _ => self.columns(depth - 1).collect(),
            };
            // without transitions every parent sees the same scores
            let parents =
                if self.transitions.is_some() { &parents[..] } else { &parents[..parents.len().min(1)] };
            parents.iter().any(|&parent| {
                self.columns(depth).any(|column| {
                    let x = self.x(depth, parent, column);
                    x.is_nan() || x == f32::INFINITY
                })
            })
        })
    }
}

/// A node that has been added, in best-first order.
struct Node {
    token: i32,
    parent: i32,
    depth: usize,
    score: i32,
    column: usize,
    /// Index of its child list, if it may have children.
    list: Option<usize>,
    is_spine: bool,
}

/// The possible next node, whose maximum is the next node: the spine, then by score and place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    is_spine: bool,
    key: u64,
}

impl Entry {
    fn new(is_spine: bool, score: i32, parent: usize, sibling: usize) -> Self {
        let score = (i64::from(score) - i64::from(i32::MIN)) as u64;
        Self { is_spine, key: score << 32 | (0xffff - parent as u64) << 16 | (0xffff - sibling as u64) }
    }

    /// Best-first rank of the parent, and rank among its children.
    fn place(self) -> (usize, usize) {
        (0xffff - (self.key >> 16 & 0xffff) as usize, 0xffff - (self.key & 0xffff) as usize)
    }
}

struct Builder<'a> {
    request: &'a TreeRequest<'a>,
    depth_limit: usize,
    lattice: Option<Lattice<'a>>,
    lists: Vec<ChildList>,
    nodes: Vec<Node>,
    heap: BinaryHeap<Entry>,
    flags: u32,
}

impl<'a> Builder<'a> {
    fn new(candidates: Candidates<'a>, depth_limit: usize, request: &'a TreeRequest<'a>) -> Self {
        Self {
            request,
            depth_limit,
            lattice: candidates.lattice,
            lists: candidates.per_depth,
            nodes: Vec::with_capacity(request.node_budget + 1),
            heap: BinaryHeap::new(),
            flags: if candidates.has_nonfinite { FLAG_NONFINITE } else { 0 },
        }
    }

    fn run(mut self) -> Result<BuiltTree> {
        self.nodes.push(Node {
            token: self.request.root_token,
            parent: -1,
            depth: 0,
            score: 0,
            column: 0,
            list: None,
            is_spine: true,
        });
        self.open(0);
        if self.depth_limit > 0 && self.heap.is_empty() {
            self.flags |= FLAG_NO_CANDIDATES;
        }
        while self.nodes.len() <= self.request.node_budget
            && let Some(entry) = self.heap.pop()
        {
            self.add(entry);
        }
        self.finish()
    }

    /// Offers the best child of node `rank`, if it may have one.
    fn open(&mut self, rank: usize) {
        let node = &self.nodes[rank];
        let is_stop = rank > 0
            && node.token >= 0
            && node.depth as i64 >= i64::from(self.request.stop_min_depth)
            && self.request.stop_tokens.contains(&node.token);
        if node.depth >= self.depth_limit || is_stop {
            return;
        }
        let list = match &self.lattice {
            None => node.depth,
            Some(lattice) => {
                self.lists.push(lattice.children(node.depth, node.column));
                self.lists.len() - 1
            }
        };
        self.nodes[rank].list = Some(list);
        self.offer(rank, 0);
    }

    /// Offers child `sibling` of node `parent`, if there is one.
    fn offer(&mut self, parent: usize, sibling: usize) {
        let node = &self.nodes[parent];
        let child = node.list.and_then(|list| self.lists[list].children.get(sibling));
        if let Some(child) = child {
            let is_spine = node.is_spine && sibling == 0 && node.depth < self.request.spine_depth;
            let score = scores::extend_path(node.score, child.score);
            self.heap.push(Entry::new(is_spine, score, parent, sibling));
        }
    }

    fn add(&mut self, entry: Entry) {
        let (parent, sibling) = entry.place();
        let above = &self.nodes[parent];
        let Some(list) = above.list.map(|list| &self.lists[list]) else {
            return;
        };
        let child = list.children[sibling];
        if list.is_cut && sibling + 1 == list.children.len() {
            self.flags |= FLAG_CANDIDATES_EXHAUSTED;
        }
        let node = Node {
            token: child.token,
            parent: parent as i32,
            depth: above.depth + 1,
            score: scores::extend_path(above.score, child.score),
            column: child.column,
            list: None,
            is_spine: entry.is_spine,
        };
        self.nodes.push(node);
        self.offer(parent, sibling + 1);
        if self.nodes.len() <= self.request.node_budget {
            self.open(self.nodes.len() - 1);
        }
    }

    /// Renumbers to depth-first preorder; siblings were added best first, so the rank orders them.
    fn finish(self) -> Result<BuiltTree> {
        let parents: Vec<i32> = self.nodes.iter().map(|node| node.parent).collect();
        let tokens: Vec<i32> = self.nodes.iter().map(|node| node.token).collect();
        let (tree, order) = tree_mask(&Topology {
            parents: &parents,
            tokens: Some(&tokens),
            priorities: None,
            root_position: self.request.root_position,
        })?;
        let path_scores = order.iter().map(|&rank| self.nodes[rank as usize].score).collect();
        Ok(BuiltTree { tree, path_scores, flags: self.flags })
    }
}
