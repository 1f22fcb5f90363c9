// SPDX-License-Identifier: Apache-2.0
//! `ddt_tree_build`.

use std::ffi::c_void;

use super::context::{Backend, backend, ddt_context};
use super::guard::guard;
use super::ptr::{self, TreeDims};
use super::status::ddt_status;
use super::tree::TreeOutput;
use super::types::ddt_tree_build_params;
use crate::dtype::DType;
use crate::error::{Error, Result, bail};
use crate::tensor::TensorRef;
use crate::tree_build::{
    BuiltTree, DraftScores, TargetNoise, TreeRequest, check_lattice, check_logits, check_scales, tree_build,
};

/// Builds the best tree of each request under its node budget.
///
/// A node's score is the sum of the log-probabilities of its path, in fixed point, so that every
/// backend builds the same tree, ties included. The tree of a smaller budget is the first nodes in
/// pop order. NaN, +inf and -inf scores mean "never".
///
/// From logits the depths are independent (DDTree, <https://arxiv.org/abs/2604.12989>). In a
/// candidate lattice with transition_scores each edge is conditioned on its parent: its
/// log-probability is the log-softmax, over the K candidates of its depth, of candidate_scores plus
/// the parent's row of transition_scores (as <https://github.com/slin-zhq/Domino-Tree> ranks
/// paths). With zeros there the tree is that of candidate_scores alone.
///
/// Writes: every field of tree that is not NULL, for the trees that tree_index names. Scores are
/// looked at, and flagged in tree.flags, down to the smallest of node_budget, depth_cap, max_depth
/// and L.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT. DDT_INVALID_SHAPE (logits,
/// candidates, tree_index and tree disagree, or V >= 2^31). DDT_INVALID_DTYPE. DDT_INVALID_VALUE
/// (both or neither of logits and candidates; candidates without any scores; one of temperatures
/// and seeds without the other; a budget, cap, scale, temperature or position out of range; a token
/// twice at one depth; a tree that is not there or named twice). DDT_UNSUPPORTED (unknown flags).
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_tree_build(
    context: *const ddt_context,
    params: *const ddt_tree_build_params,
    stream: *mut c_void,
) -> ddt_status {
    guard("tree_build", || {
        // SAFETY: the caller vouches for the context, the parameters and what they point to.
        unsafe {
            let backend = backend(context)?;
            let params = ptr::versioned(params, "params")?;
            match backend {
                Backend::Cpu(_) => run(&params),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::tree_build::launch(device, &params, stream),
            }
        }
    })
}

/// Bytes of workspace that ddt_tree_build needs for these parameters; 0 on the CPU.
///
/// Writes: `*out`.
///
/// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_UNSUPPORTED.
#[unsafe(no_mangle)]
#[must_use]
pub unsafe extern "C" fn ddt_tree_build_workspace_size(
    context: *const ddt_context,
    params: *const ddt_tree_build_params,
    out: *mut usize,
) -> ddt_status {
    guard("tree_build_workspace_size", || {
        // SAFETY: the caller vouches for the context, the parameters and `out`.
        unsafe {
            let backend = backend(context)?;
            ptr::workspace_size(params, out, |params| match backend {
                Backend::Cpu(_) => Ok(0),
                #[cfg(feature = "cuda")]
                Backend::Cuda(device) => crate::cuda::tree_build::workspace_bytes(device, params),
            })
        }
    })
}

/// Checks what is neither a pointer nor a tensor.
pub(crate) fn check_scalars(params: &ddt_tree_build_params) -> Result<()> {
    ptr::no_flags(params.flags)?;
    if params.temperatures.is_null() != params.seeds.is_null() {
        let got = if params.seeds.is_null() { "temperatures" } else { "seeds" };
        bail!(InvalidValue, "temperatures and seeds: got {got} alone, want both or neither");
    }
    if params.max_stop_tokens < 0 {
        bail!(InvalidShape, "max_stop_tokens: got {}, want >= 0", params.max_stop_tokens);
    }
    Ok(())
}

/// The scores of a batch; axis 0 is the request.
pub(crate) enum BatchScores<'a> {
    Logits { logits: TensorRef<'a>, max_candidates: usize },
    Lattice { tokens: TensorRef<'a>, scores: Option<TensorRef<'a>>, transitions: Option<TensorRef<'a>> },
}

impl<'a> BatchScores<'a> {
    /// # Safety
    /// The elements of the tensors must be readable.
    pub(crate) unsafe fn new(params: &ddt_tree_build_params, num_reqs: usize) -> Result<Self> {
        let has_candidates = !ptr::is_absent(&params.candidate_tokens);
        if has_candidates != ptr::is_absent(&params.logits) {
            let got = if has_candidates { "both" } else { "neither" };
            bail!(InvalidValue, "logits and candidate_tokens: got {got}, want exactly one");
        }
        if params.max_candidates < 0 || (has_candidates && params.max_candidates > 0) {
            let want = if has_candidates { "0 with candidate_tokens" } else { ">= 0" };
            bail!(InvalidValue, "max_candidates: got {}, want {want}", params.max_candidates);
        }
        let what = if ptr::is_absent(&params.tree_index) { "num_reqs" } else { "as tree_index" };
        // SAFETY: the caller's promise, for every tensor.
        unsafe {
            if !has_candidates {
                for (tensor, name) in [
                    (&params.candidate_scores, "candidate_scores"),
                    (&params.transition_scores, "transition_scores"),
                ] {
                    if !ptr::is_absent(tensor) {
                        bail!(InvalidValue, "{name}: got a tensor, want it absent without candidate_tokens");
                    }
                }
                let logits = ptr::tensor(&params.logits, 3, "logits")?;
                logits.want_dim("logits", 0, num_reqs, what)?;
                check_logits(&logits)?;
                return Ok(Self::Logits { logits, max_candidates: params.max_candidates as usize });
            }
            let tokens = ptr::tensor(&params.candidate_tokens, 3, "candidate_tokens")?;
            let scores = ptr::optional_tensor(&params.candidate_scores, 3, "candidate_scores")?;
            let transitions = ptr::optional_tensor(&params.transition_scores, 4, "transition_scores")?;
            tokens.want_dim("candidate_tokens", 0, num_reqs, what)?;
            check_lattice(&tokens, scores.as_ref(), transitions.as_ref())?;
            Ok(Self::Lattice { tokens, scores, transitions })
        }
    }

    pub(crate) fn num_depths(&self) -> usize {
        match self {
            Self::Logits { logits, .. } => logits.shape()[1],
            Self::Lattice { tokens, .. } => tokens.shape()[1],
        }
    }

    fn of(&self, r: usize) -> DraftScores<'a> {
        match *self {
            Self::Logits { logits, max_candidates } => {
                DraftScores::Logits { logits: logits.at(r), max_candidates }
            }
            Self::Lattice { tokens, scores, transitions } => DraftScores::Lattice {
                tokens: tokens.at(r),
                scores: scores.map(|scores| scores.at(r)),
                transitions: transitions.map(|transitions| transitions.at(r)),
            },
        }
    }
}

/// tree_index, and how many requests the call has: R without one.
///
/// # Safety
/// The elements of the tensor must be readable.
pub(crate) unsafe fn batch<'a>(
    params: &ddt_tree_build_params,
    dims: TreeDims,
) -> Result<(Option<TensorRef<'a>>, usize)> {
    // SAFETY: the caller's promise.
    let index = unsafe { ptr::optional_tensor(&params.tree_index, 1, "tree_index")? };
    let Some(index) = index else {
        return Ok((None, dims.num_reqs));
    };
    index.want_dtype("tree_index", &[DType::I32, DType::I64])?;
    Ok((Some(index), index.shape()[0]))
}

/// Everything that a call reads.
struct Inputs<'a> {
    num_reqs: usize,
    /// The tree of each request, `None` where nothing is to be written.
    trees: Vec<Option<usize>>,
    max_nodes: usize,
    max_depth: usize,
    scores: BatchScores<'a>,
    depth_scales: Option<&'a [f32]>,
    root_tokens: &'a [i32],
    root_positions: &'a [i64],
    node_budgets: Option<&'a [i32]>,
    depth_caps: Option<&'a [i32]>,
    candidate_caps: Option<&'a [i32]>,
    spine_depths: Option<&'a [i32]>,
    stop_tokens: &'a [i32],
    num_stop_tokens: usize,
    stop_min_depths: Option<&'a [i32]>,
    seeds: Option<&'a [i64]>,
    temperatures: Option<&'a [f32]>,
}

impl<'a> Inputs<'a> {
    /// # Safety
    /// What the parameters point to must be as the header says.
    unsafe fn new(params: &ddt_tree_build_params, dims: TreeDims) -> Result<Self> {
        check_scalars(params)?;
        let num_stop_tokens = params.max_stop_tokens as usize;
        // SAFETY: the caller's promise, for every pointer.
        unsafe {
            let (index, num_reqs) = batch(params, dims)?;
            let trees = match index {
                None => (0..num_reqs).map(Some).collect(),
                Some(index) => named_trees(&index, dims.num_reqs)?,
            };
            let scores = BatchScores::new(params, num_reqs)?;
            let num_depths = scores.num_depths();
            let depth_scales = ptr::optional_input(params.depth_scales, num_depths, "depth_scales")?;
            if let Some(scales) = depth_scales {
                check_scales(scales, num_depths)?;
            }
            Ok(Self {
                num_reqs,
                trees,
                max_nodes: dims.max_nodes,
                max_depth: dims.max_depth,
                scores,
                depth_scales,
                root_tokens: ptr::input(params.root_tokens, num_reqs, "root_tokens")?,
                root_positions: ptr::input(params.root_positions, num_reqs, "root_positions")?,
                node_budgets: ptr::optional_input(params.node_budgets, num_reqs, "node_budgets")?,
                depth_caps: ptr::optional_input(params.depth_caps, num_reqs, "depth_caps")?,
                candidate_caps: ptr::optional_input(params.candidate_caps, num_reqs, "candidate_caps")?,
                spine_depths: ptr::optional_input(params.spine_depths, num_reqs, "spine_depths")?,
                stop_tokens: ptr::input(params.stop_tokens, num_reqs * num_stop_tokens, "stop_tokens")?,
                num_stop_tokens,
                stop_min_depths: ptr::optional_input(params.stop_min_depths, num_reqs, "stop_min_depths")?,
                seeds: ptr::optional_input(params.seeds, num_reqs, "seeds")?,
                temperatures: ptr::optional_input(params.temperatures, num_reqs, "temperatures")?,
            })
        }
    }

    /// The tree of request `r`, without nodes for a padding request.
    fn build(&self, r: usize) -> Result<BuiltTree> {
        let largest = self.max_nodes - 1;
        let node_budget = match self.node_budgets.map(|budgets| budgets[r]) {
            None => largest,
            Some(-1) => return Ok(BuiltTree::default()),
            Some(budget) if (0..=largest as i32).contains(&budget) => budget as usize,
            Some(budget) => {
                bail!(InvalidValue, "node_budgets[{r}]: got {budget}, want -1..={largest} (max_nodes - 1)")
            }
        };
        let depth_cap = match self.depth_caps.map(|caps| caps[r]) {
            None => self.max_depth,
            Some(cap) if cap >= 0 => self.max_depth.min(cap as usize),
            Some(cap) => bail!(InvalidValue, "depth_caps[{r}]: got {cap}, want >= 0"),
        };
        let request = TreeRequest {
            root_token: self.root_tokens[r],
            root_position: self.root_positions[r],
            node_budget,
            max_depth: depth_cap,
            candidate_cap: self.candidate_caps.map_or(0, |caps| caps[r].max(0) as usize),
            spine_depth: self.spine_depths.map_or(0, |depths| depths[r].max(0) as usize),
            stop_tokens: &self.stop_tokens[r * self.num_stop_tokens..][..self.num_stop_tokens],
            stop_min_depth: self.stop_min_depths.map_or(0, |depths| depths[r]),
            noise: self.noise(r)?,
        };
        tree_build(&self.scores.of(r), self.depth_scales, &request)
            .map_err(|error| Error::new(error.status(), format!("request {r}: {error}")))
    }

    /// The noise of request `r`, `None` at temperature 0.
    fn noise(&self, r: usize) -> Result<Option<TargetNoise>> {
        let (Some(seeds), Some(temperatures)) = (self.seeds, self.temperatures) else {
            return Ok(None);
        };
        let (seed, temperature) = (seeds[r], temperatures[r]);
        if !(temperature.is_finite() && temperature >= 0.0) {
            bail!(InvalidValue, "temperatures[{r}]: got {temperature}, want a finite number of at least 0");
        }
        Ok((temperature > 0.0).then_some(TargetNoise { seed, temperature }))
    }
}

/// What tree_index says: trees of the batch, each at most once.
fn named_trees(index: &TensorRef<'_>, num_trees: usize) -> Result<Vec<Option<usize>>> {
    let mut is_named = vec![false; num_trees];
    (0..index.shape()[0])
        .map(|i| {
            let tree = index.get_i64(&[i]);
            if tree < 0 {
                return Ok(None);
            }
            let Some(is_named) = usize::try_from(tree).ok().and_then(|tree| is_named.get_mut(tree)) else {
                bail!(
                    InvalidValue,
                    "tree_index[{i}]: got {tree}, want less than {num_trees} (tree.num_reqs)"
                );
            };
            if std::mem::replace(is_named, true) {
                bail!(InvalidValue, "tree_index[{i}]: got {tree} a second time, want different trees");
            }
            Ok(Some(tree as usize))
        })
        .collect()
}

/// # Safety
/// What the parameters point to must be as the header says.
unsafe fn run(params: &ddt_tree_build_params) -> Result<()> {
    // SAFETY: the caller's promise.
    let (mut out, inputs) = unsafe {
        let (tree, dims) = ptr::tree(params.tree, "tree")?;
        (TreeOutput::new(&tree, dims)?, Inputs::new(params, dims)?)
    };
    // all requests first: an error in the last one must leave the first one's row alone
    let built = (0..inputs.num_reqs)
        .map(|r| inputs.trees[r].map(|tree| Ok((tree, inputs.build(r)?))).transpose())
        .collect::<Result<Vec<_>>>()?;
    for (tree, built) in built.iter().flatten() {
        out.write(*tree, &built.tree, built.flags);
    }
    Ok(())
}
