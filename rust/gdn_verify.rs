// SPDX-License-Identifier: Apache-2.0
//! Outputs of a gated-delta-net layer for every node of a tree, from one read of the state.
//!
//! Along the path to node i, with parent p, S is the state and
//!
//! ```text
//! S_i = e^g_i S_p + k_i u_i^T    u_i = beta_i (v_i - e^g_i S_p^T k_i)    o_i = scale S_i^T q_i
//! ```
//!
//! Unrolled to the committed state S_0, with d(j, i) the sum of the log decays g below node j
//! down to node i, and d(i) the sum from the root down to i:
//!
//! ```text
//! u_i = beta_i (v_i - e^d(i) S_0^T k_i - sum over ancestors j of e^d(j, i) (k_i . k_j) u_j)
//! o_i = scale (e^d(i) S_0^T q_i + sum over j = i and ancestors of e^d(j, i) (q_i . k_j) u_j)
//! ```
//!
//! A node only refers to its ancestors, so forward substitution in node order solves all paths
//! at once; trees are shallow, so lists of ancestors do far less work than N x N matrices. d(j, i)
//! is summed along the path: as a difference of two sums from the root it would lose the digits
//! that those share.

use crate::dtype::DType;
use crate::error::{Result, bail, want_len};
use crate::gdn::{self, Conv, GDN_CONV_WIDTH, GDN_HEAD_DIM, Head, HeadState, Heads, Inputs, WINDOW};
use crate::lanes::{add_scaled, dot};
use crate::tensor::{TensorMut, TensorRef};
use crate::tree::{MAX_DEPTH, RequestRows, request_rows};

/// Arguments of [`gdn_verify`]. T = rows, R = requests, N = `max_nodes`, D = `max_depth`; Hk and
/// Hv = key and value heads, Hv a multiple of Hk, value head h uses key head `h / (Hv / Hk)`;
/// C = `(2 * Hk + Hv) * 128` channels in the order q, k, v.
///
/// Floating-point tensors are f32, f16 or bf16 unless said otherwise.
#[derive(Debug)]
pub struct GdnVerify<'a> {
    /// `[C,4]`, newest tap last.
    pub conv_weight: TensorRef<'a>,
    /// `[C]`.
    pub conv_bias: Option<TensorRef<'a>>,
    /// `[slots,C,3]` the last conv inputs before the root, newest last; dtype of `mixed_qkv` or f32.
    pub conv_state: TensorRef<'a>,
    /// `[slots,Hv,128,128]` f32, value dimension before key dimension.
    pub ssm_state: TensorRef<'a>,
    /// `[R]` slot of each request; negative = padding request.
    pub state_slots: &'a [i32],
    /// `[T,C]` inputs of the convolution.
    pub mixed_qkv: TensorRef<'a>,
    /// `[T,Hv]` inputs of the decay.
    pub a: TensorRef<'a>,
    /// `[T,Hv]` inputs of beta.
    pub b: TensorRef<'a>,
    /// `[Hv]`.
    pub a_log: TensorRef<'a>,
    /// `[Hv]`.
    pub dt_bias: TensorRef<'a>,
    /// `[R + 1]` first row of each request.
    pub query_start: &'a [i32],
    /// Row length of the tree fields.
    pub max_nodes: usize,
    /// Largest depth that `ancestors` has room for.
    pub max_depth: usize,
    /// `[R]` nodes with the root; 0 = padding request.
    pub num_nodes: &'a [i32],
    /// `[R][N]`.
    pub parents: &'a [i32],
    /// `[R][N]`.
    pub depths: &'a [i32],
    /// `[R][N][D + 1]` path from the root to the node.
    pub ancestors: &'a [i32],
    /// Factor of the queries; 0 = 128^-0.5.
    pub scale: f32,
    /// Epsilon of the L2 norm of queries and keys; 0 = 1e-6.
    pub norm_eps: f32,
    /// `[>= T,C]` out, dtype of `mixed_qkv`: a copy of each node's row.
    pub stash_qkv: TensorMut<'a>,
    /// `[>= T,2,Hv]` out, f32: log decay, then beta, of each node.
    pub stash_gates: TensorMut<'a>,
    /// `[T,Hv,128]` out.
    pub out: TensorMut<'a>,
}

/// Computes the outputs of all tree nodes of a batch and stashes what [`commit`](crate::commit())
/// replays. Writes no state.
///
/// `q | k | v = silu(bias + convolution of mixed_qkv along the ancestors)`, rounded to the dtype
/// of `mixed_qkv`; then q and k become `x * rsqrt(sum(x^2) + norm_eps)`. The log decay is
/// `-exp(a_log) * softplus(a + dt_bias)` and beta is `sigmoid(b)`. All of it is f32.
///
/// Rows of a request after its last node get zeros in `out`. Nothing is written to the rows of a
/// padding request, or to the stash of a row without a node.
///
/// # Errors
/// `InvalidShape`, `InvalidDtype`; `InvalidValue` for a slot, row or tree out of range or a tree
/// that contradicts itself. Nothing is written then.
pub fn gdn_verify(mut args: GdnVerify) -> Result<()> {
    let plan = Plan::new(&args)?;
    if plan.requests.is_empty() {
        // without rows nothing vouches for the extents, which sizes below depend on
        return Ok(());
    }
    let heads = plan.heads;
    let qkv_dtype = args.mixed_qkv.dtype();
    let conv = Conv::new(&args.conv_weight, args.conv_bias.as_ref(), qkv_dtype);
    let decay_weights: Vec<_> =
        (0..heads.num_v).map(|head| (args.a_log.get_f32(&[head]), args.dt_bias.get_f32(&[head]))).collect();
    let mut inputs = Inputs::new(heads.channels());
    let mut raw = vec![0; heads.channels() * qkv_dtype.size()];
    let mut state = HeadState::new();
    for request in &plan.requests {
        let rows = request.rows;
        inputs.start(&args.conv_state.at(request.slot));
        let mut gates = Vec::with_capacity(rows.num_nodes);
        for row in (0..rows.num_nodes).map(|node| rows.of_node(node)) {
            let raw_input = args.mixed_qkv.at(row);
            inputs.push(&raw_input);
            raw_input.load_bytes(&mut raw);
            args.stash_qkv.at(row).store_bytes(&raw);
            let gate = Gates::new(&args.a.at(row), &args.b.at(row), &decay_weights);
            let mut stash = args.stash_gates.at(row);
            stash.at(0).store_f32(0, &gate.log_decays);
            stash.at(1).store_f32(0, &gate.betas);
            gates.push(gate);
        }
        for k_head in 0..heads.num_k {
            let keys = KeyHead::new(&request.paths, |node, is_query| {
                let channel = if is_query { heads.query_channel(k_head) } else { heads.key_channel(k_head) };
                conv.normalized_head(&inputs, request.paths.taps(node), channel, plan.norm_eps)
            });
            for v_head in heads.value_heads(k_head) {
                state.load(&args.ssm_state.at(request.slot).at(v_head));
                let solution = keys.solve(&request.paths, &state, plan.scale, |node| Value {
                    value: conv.head(&inputs, request.paths.taps(node), heads.value_channel(v_head)),
                    log_decay: gates[node].log_decays[v_head],
                    beta: gates[node].betas[v_head],
                });
                for (node, out) in solution.iter().enumerate() {
                    args.out.at(rows.of_node(node)).at(v_head).store_f32(0, out);
                }
            }
        }
        for row in rows.of_node(rows.num_nodes)..rows.end {
            for v_head in 0..heads.num_v {
                args.out.at(row).at(v_head).store_f32(0, &[0.0; GDN_HEAD_DIM]);
            }
        }
    }
    Ok(())
}

/// The checked arguments, padding requests left out.
struct Plan {
    heads: Heads,
    scale: f32,
    norm_eps: f32,
    requests: Vec<Request>,
}

struct Request {
    slot: usize,
    rows: RequestRows,
    paths: Paths,
}

/// What the tensors and scalars of a call say, once they are checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checked {
    pub(crate) heads: Heads,
    pub(crate) num_rows: usize,
    pub(crate) scale: f32,
    pub(crate) norm_eps: f32,
}

impl GdnVerify<'_> {
    /// Checks everything but the arrays, without reading a tensor's data.
    pub(crate) fn check(&self) -> Result<Checked> {
        self.mixed_qkv.want_ndim("mixed_qkv", 2)?;
        self.mixed_qkv.want_dtype("mixed_qkv", DType::FLOATS)?;
        self.ssm_state.want_ndim("ssm_state", 4)?;
        let &[num_rows, channels] = self.mixed_qkv.shape() else { unreachable!("ndim is 2") };
        let heads = Heads::new("mixed_qkv", channels, self.ssm_state.shape()[1])?;
        gdn::check_layer(
            heads,
            self.mixed_qkv.dtype(),
            &self.conv_weight,
            self.conv_bias.as_ref(),
            &self.conv_state,
            &self.ssm_state,
        )?;
        for (name, tensor, shape) in [
            ("a", &self.a, &[num_rows, heads.num_v][..]),
            ("b", &self.b, &[num_rows, heads.num_v]),
            ("a_log", &self.a_log, &[heads.num_v]),
            ("dt_bias", &self.dt_bias, &[heads.num_v]),
            ("out", &self.out.view(), &[num_rows, heads.num_v, GDN_HEAD_DIM]),
        ] {
            tensor.want_shape(name, shape)?;
            tensor.want_dtype(name, DType::FLOATS)?;
        }
        gdn::check_stash(heads, num_rows, &self.stash_qkv.view(), &self.stash_gates.view())?;
        self.stash_qkv.want_dtype("stash_qkv", &[self.mixed_qkv.dtype()])?;
        if !self.scale.is_finite() {
            bail!(InvalidValue, "scale: got {}, want a finite number", self.scale);
        }
        let scale = if self.scale == 0.0 { (GDN_HEAD_DIM as f32).sqrt().recip() } else { self.scale };
        let norm_eps = gdn::norm_eps(self.norm_eps)?;
        if self.max_depth > MAX_DEPTH {
            bail!(InvalidShape, "tree.max_depth: got {}, want <= {MAX_DEPTH}", self.max_depth);
        }
        Ok(Checked { heads, num_rows, scale, norm_eps })
    }
}

impl Plan {
    fn new(args: &GdnVerify) -> Result<Self> {
        let Checked { heads, num_rows, scale, norm_eps } = args.check()?;
        want_len("state_slots", args.state_slots.len(), args.num_nodes.len())?;
        let nodes = args.num_nodes.len() * args.max_nodes;
        want_len("tree.parents", args.parents.len(), nodes)?;
        want_len("tree.depths", args.depths.len(), nodes)?;
        want_len("tree.ancestors", args.ancestors.len(), nodes * (args.max_depth + 1))?;
        let mut requests = Vec::new();
        for (r, rows) in request_rows(args.query_start, args.num_nodes, num_rows)?.into_iter().enumerate() {
            let slot = args.state_slots[r];
            if slot < 0 || rows.num_nodes == 0 {
                continue;
            }
            gdn::check_slot("state_slots", r, slot, &args.conv_state, &args.ssm_state)?;
            requests.push(Request { slot: slot as usize, rows, paths: Paths::new(args, r)? });
        }
        Ok(Self { heads, scale, norm_eps, requests })
    }
}

/// The path from the root to each node of one tree, the node itself last, one after the other.
struct Paths {
    nodes: Vec<usize>,
    /// Where each node's path starts, and the end of the last one.
    starts: Vec<usize>,
}

impl Paths {
    /// Reads request `r`'s ancestors, and checks that they agree with parents and depths.
    fn new(args: &GdnVerify, r: usize) -> Result<Self> {
        let num_nodes = args.num_nodes[r] as usize;
        if num_nodes > args.max_nodes {
            bail!(
                InvalidValue,
                "tree.num_nodes[{r}]: got {num_nodes}, want <= {} (max_nodes)",
                args.max_nodes
            );
        }
        let mut paths = Self { nodes: Vec::new(), starts: vec![0] };
        for node in 0..num_nodes {
            let at = r * args.max_nodes + node;
            let parent = args.parents[at];
            let is_root = node == 0;
            if is_root && parent != -1 || !is_root && !(0..node as i32).contains(&parent) {
                bail!(
                    InvalidValue,
                    "tree.parents[{r}][{node}]: got {parent}, want -1 for the root and an earlier node for others"
                );
            }
            let start = paths.nodes.len();
            if !is_root {
                let parent_path = paths.range(parent as usize);
                paths.nodes.extend_from_within(parent_path);
            }
            let depth = paths.nodes.len() - start;
            paths.nodes.push(node);
            paths.starts.push(paths.nodes.len());
            if depth > args.max_depth || args.depths[at] != depth as i32 {
                bail!(
                    InvalidValue,
                    "tree.depths[{r}][{node}]: got {}, want {depth}, at most {} (max_depth)",
                    args.depths[at],
                    args.max_depth
                );
            }
            let got = &args.ancestors[at * (args.max_depth + 1)..][..=depth];
            let want = paths.of(node);
            if got.iter().zip(want).any(|(&got, &want)| got != want as i32) {
                bail!(InvalidValue, "tree.ancestors[{r}][{node}]: got {got:?}, want {want:?}");
            }
        }
        Ok(paths)
    }

    fn num_nodes(&self) -> usize {
        self.starts.len() - 1
    }

    fn range(&self, node: usize) -> std::ops::Range<usize> {
        self.starts[node]..self.starts[node + 1]
    }

    fn of(&self, node: usize) -> &[usize] {
        &self.nodes[self.range(node)]
    }

    /// The rows of [`Inputs`] that the convolution at `node` covers: its last ancestors, or the
    /// window where they reach above the root.
    fn taps(&self, node: usize) -> [usize; GDN_CONV_WIDTH] {
        let path = self.of(node);
        std::array::from_fn(|tap| {
            // place in the sequence of window and path
            let place = path.len() + tap;
            if place < GDN_CONV_WIDTH { place - 1 } else { WINDOW + path[place - GDN_CONV_WIDTH] }
        })
    }
}

/// The gates of one node, for every value head.
struct Gates {
    log_decays: Vec<f32>,
    betas: Vec<f32>,
}

impl Gates {
    /// `a` and `b` are `[Hv]`; `decay_weights` has `(a_log, dt_bias)` of each head.
    fn new(a: &TensorRef, b: &TensorRef, decay_weights: &[(f32, f32)]) -> Self {
        let mut log_decays = vec![0.0; decay_weights.len()];
        a.load_f32(0, &mut log_decays);
        for (x, &(a_log, dt_bias)) in log_decays.iter_mut().zip(decay_weights) {
            *x = log_decay(*x, a_log, dt_bias);
        }
        let mut betas = vec![0.0; decay_weights.len()];
        b.load_f32(0, &mut betas);
        for x in &mut betas {
            *x = sigmoid(*x);
        }
        Self { log_decays, betas }
    }
}

/// Log decay `-exp(a_log) * softplus(a + dt_bias)`, never positive.
fn log_decay(a: f32, a_log: f32, dt_bias: f32) -> f32 {
    let x = a + dt_bias;
    // beyond 20 the two are equal in f32, and exp would overflow at last
    let softplus = if x > 20.0 { x } else { x.exp().ln_1p() };
    -a_log.exp() * softplus
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// What one value head adds at a node.
struct Value {
    value: Head,
    log_decay: f32,
    beta: f32,
}

/// Queries and keys of all nodes, and their products with the keys on the node's path: what the
/// value heads of one key head share.
struct KeyHead {
    queries: Vec<Head>,
    keys: Vec<Head>,
    /// `q_i . k_j`, in the order of [`Paths::nodes`].
    query_dots: Vec<f32>,
    /// `k_i . k_j`, likewise.
    key_dots: Vec<f32>,
}

impl KeyHead {
    /// `head(node, is_query)` is the query or key of a node.
    fn new(paths: &Paths, head: impl Fn(usize, bool) -> Head) -> Self {
        let queries: Vec<_> = (0..paths.num_nodes()).map(|node| head(node, true)).collect();
        let keys: Vec<_> = (0..paths.num_nodes()).map(|node| head(node, false)).collect();
        let mut query_dots = Vec::with_capacity(paths.nodes.len());
        let mut key_dots = Vec::with_capacity(paths.nodes.len());
        for node in 0..paths.num_nodes() {
            for &ancestor in paths.of(node) {
                query_dots.push(dot(&queries[node], &keys[ancestor]));
                key_dots.push(dot(&keys[node], &keys[ancestor]));
            }
        }
        Self { queries, keys, query_dots, key_dots }
    }

    /// The outputs `o_i` of one value head.
    fn solve(
        &self,
        paths: &Paths,
        state: &HeadState,
        scale: f32,
        value: impl Fn(usize) -> Value,
    ) -> Vec<Head> {
        let num_nodes = paths.num_nodes();
        let mut from_state = vec![[0.0; GDN_HEAD_DIM]; num_nodes];
        state.project(&self.keys, &mut from_state);
        let mut outs = vec![[0.0; GDN_HEAD_DIM]; num_nodes];
        state.project(&self.queries, &mut outs);
        let mut updates: Vec<Head> = Vec::with_capacity(num_nodes);
        let mut log_decays = Vec::with_capacity(num_nodes);
        for node in 0..num_nodes {
            let Value { mut value, log_decay, beta } = value(node);
            log_decays.push(log_decay);
            let mut decays = [0.0; MAX_DEPTH + 1];
            let path = paths.of(node);
            let mut sum = 0.0f32;
            for (decay, &below) in decays[..path.len()].iter_mut().zip(path).rev() {
                *decay = sum.exp();
                sum += log_decays[below];
            }
            let root_decay = sum.exp();

            let range = paths.range(node);
            let (ancestors, key_dots) = (&path[..path.len() - 1], &self.key_dots[range.clone()]);
            add_scaled(&mut value, -root_decay, &from_state[node]);
            for ((&ancestor, decay), key_dot) in ancestors.iter().zip(&decays).zip(key_dots) {
                add_scaled(&mut value, -decay * key_dot, &updates[ancestor]);
            }
            updates.push(value.map(|x| beta * x));

            let out = &mut outs[node];
            for x in out.iter_mut() {
                *x *= root_decay;
            }
            for ((&ancestor, decay), query_dot) in path.iter().zip(&decays).zip(&self.query_dots[range]) {
                add_scaled(out, decay * query_dot, &updates[ancestor]);
            }
            for x in out {
                *x *= scale;
            }
        }
        outs
    }
}
