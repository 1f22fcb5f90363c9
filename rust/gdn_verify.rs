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
use crate::error::{Result, bail};
use crate::gdn::{self, Conv, GDN_CONV_WIDTH, GDN_HEAD_DIM, Head, HeadState, Heads, Inputs, WINDOW};
use crate::lanes::{add_scaled, dot};
use crate::tensor::{TensorMut, TensorRef};
use crate::tree::{RequestRows, request_rows};

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
    /// `[T,C]` out, dtype of `mixed_qkv`: a copy of each node's row.
    pub stash_qkv: TensorMut<'a>,
    /// `[T,2,Hv]` out, f32: log decay, then beta, of each node.
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
    let checked = Checked::new(&args)?;
    let heads = checked.heads;
    let qkv_dtype = args.mixed_qkv.dtype();
    let conv = Conv::new(&args.conv_weight, args.conv_bias.as_ref(), qkv_dtype);
    let mut inputs = Inputs::new(heads.channels());
    let mut raw = vec![0; heads.channels() * qkv_dtype.size()];
    let mut state = HeadState::new();
    for request in &checked.requests {
        let rows = request.rows;
        let num_nodes = rows.num_nodes;
        inputs.start(&args.conv_state.at(request.slot));
        for node in 0..num_nodes {
            let row = args.mixed_qkv.at(rows.of_node(node));
            inputs.push(&row);
            row.load_bytes(&mut raw);
            args.stash_qkv.at(rows.of_node(node)).store_bytes(&raw);
        }
        let gates = gates(&args, heads, rows);
        for node in 0..num_nodes {
            let mut stash = args.stash_gates.at(rows.of_node(node));
            stash.at(0).store_f32(0, &gates.log_decay[node * heads.num_v..][..heads.num_v]);
            stash.at(1).store_f32(0, &gates.beta[node * heads.num_v..][..heads.num_v]);
        }
        let taps: Vec<_> = (0..num_nodes).map(|node| taps(request.path(node))).collect();
        for k_head in 0..heads.num_k {
            let normalized = |channel| -> Vec<Head> {
                taps.iter()
                    .map(|&taps| conv.normalized_head(&inputs, taps, channel, checked.norm_eps))
                    .collect()
            };
            let pairs = Pairs::new(request, &normalized(heads.query_channel(k_head)), normalized(heads.key_channel(k_head)));
            for v_head in heads.value_heads(k_head) {
                state.load(&args.ssm_state.at(request.slot).at(v_head));
                let log_decay: Vec<f32> =
                    (0..num_nodes).map(|node| gates.log_decay[node * heads.num_v + v_head]).collect();
                let _ = (&log_decay, &pairs);
            }
        }
    }
    Ok(())
}
