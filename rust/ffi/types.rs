// SPDX-License-Identifier: Apache-2.0
//! The structs and constants of the C ABI.
#![allow(non_camel_case_types)]

use std::ffi::c_void;
use std::mem::offset_of;

use super::ptr::Versioned;

/// Most nodes of a tree below its root.
pub const DDT_MAX_NODE_BUDGET: i32 = 255;
/// Largest depth of a node; the root has depth 0.
pub const DDT_MAX_DEPTH: i32 = 32;

/// IEEE 754 binary32.
pub const DDT_DTYPE_F32: u32 = 1;
/// IEEE 754 binary16.
pub const DDT_DTYPE_F16: u32 = 2;
/// bfloat16.
pub const DDT_DTYPE_BF16: u32 = 3;
/// 32-bit signed integer.
pub const DDT_DTYPE_I32: u32 = 4;
/// 64-bit signed integer.
pub const DDT_DTYPE_I64: u32 = 5;
/// Byte; also how one-byte floats are passed.
pub const DDT_DTYPE_U8: u32 = 6;

/// The CPU.
pub const DDT_DEVICE_CPU: u32 = 0;
/// An NVIDIA GPU.
pub const DDT_DEVICE_CUDA: u32 = 1;

/// Flag of ddt_context_create: only kernels that every supported GPU architecture runs, without
/// the faster ones that some have beside them.
pub const DDT_CONTEXT_PORTABLE_KERNELS: u32 = 1;

/// tree_build: depth 1 has no usable token, so the tree is the root alone.
pub const DDT_FLAG_NO_CANDIDATES: u32 = 1;
/// tree_build: a NaN or +inf score was ignored, as if it were -inf. tree_accept: a visited row
/// has a NaN, which never wins, or nothing above -inf, which gives token 0.
pub const DDT_FLAG_NONFINITE: u32 = 2;
/// tree_build: a candidate list was shorter than the node budget (or candidate_cap) could use, a
/// node used its last entry, and the vocabulary has more: the tree may be worse than it could be.
pub const DDT_FLAG_CANDIDATES_EXHAUSTED: u32 = 4;

/// A strided tensor in the memory of the context's device. Sizes and strides are in elements;
/// strides are >= 0, and > 0 for outputs. Entries of shape and strides from ndim on are ignored.
/// A tensor with data NULL and dtype 0 is absent.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_tensor {
    /// First element, aligned to its size.
    pub data: *mut c_void,
    /// DDT_DTYPE_*.
    pub dtype: u32,
    /// Dimensions, at most 4.
    pub ndim: u32,
    /// Extents.
    pub shape: [i64; 4],
    /// Distances between neighbours along each dimension.
    pub strides: [i64; 4],
}

/// Parameters of ddt_context_create.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_context_params {
    /// sizeof(ddt_context_params).
    pub struct_size: u32,
    /// DDT_ABI_VERSION of the header that the caller was compiled with.
    pub abi_version: u32,
    /// DDT_DEVICE_*.
    pub device: u32,
    /// Which device of that kind; 0 for the CPU.
    pub device_index: i32,
    /// DDT_CONTEXT_* bits.
    pub flags: u32,
}

/// A batch of trees in caller memory, one row per request. R = num_reqs, N = max_nodes,
/// D = max_depth, W = (N + 31) / 32.
///
/// Node 0 is the root: the last sampled token. Nodes are in depth-first preorder, best child
/// first, so a parent precedes its children and rows 1..d of a tree are its greedy spine.
///
/// ddt_tree_build and ddt_tree_mask write every field that is not NULL (num_nodes is required),
/// padding included. The other operations read the fields that they name; those must not be NULL,
/// the others may be.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_tree {
    /// sizeof(ddt_tree).
    pub struct_size: u32,
    /// R.
    pub num_reqs: i32,
    /// N: length of a row, root counted; 1 to DDT_MAX_NODE_BUDGET + 1.
    pub max_nodes: i32,
    /// D: largest depth that a node may have; 0 to DDT_MAX_DEPTH.
    pub max_depth: i32,
    /// `[R]` nodes with the root; 0 = padding request, which every operation skips.
    pub num_nodes: *mut i32,
    /// `[R][N]` token ids, padding -1.
    pub tokens: *mut i32,
    /// `[R][N]` parent nodes, root -1, padding -1.
    pub parents: *mut i32,
    /// `[R][N]` root 0, padding -1.
    pub depths: *mut i32,
    /// `[R][N]` best child, none -1, padding -1.
    pub first_child: *mut i32,
    /// `[R][N]` next worse child of the same parent, none -1, padding -1.
    pub next_sibling: *mut i32,
    /// `[R][N]` one past the last node of the subtree, padding 0. Node j is i or an ancestor of i
    /// iff `j <= i < subtree_end[j]`.
    pub subtree_end: *mut i32,
    /// `[R][N][W]` bit j % 32 of word j / 32 is set iff node j is i or an ancestor of i; padding 0.
    pub ancestor_bits: *mut u32,
    /// `[R][N][D + 1]` path from the root to the node, which is at `[depth]`; then -1.
    pub ancestors: *mut i32,
    /// `[R][N]` position of the root plus depth, padding 0.
    pub positions: *mut i64,
    /// `[R][N]` place in best-first order, root 0, padding -1. The nodes with rank <= b are the
    /// tree of budget b.
    pub pop_ranks: *mut i32,
    /// `[R]` DDT_FLAG_* bits.
    pub flags: *mut u32,
}

/// Parameters of ddt_tree_build. L = depths that have scores, V = vocabulary, K = candidates.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_tree_build_params {
    /// sizeof(ddt_tree_build_params).
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// `[R,L,V]` f32, f16 or bf16: scores of every token at depths 1 to L. Absent iff candidates
    /// are given.
    pub logits: ddt_tensor,
    /// `[R,L,K]` i32: token ids, distinct at each depth; -1 = no candidate. K is at most 4096.
    pub candidate_tokens: ddt_tensor,
    /// `[R,L,K]` f32: unnormalised scores of the candidates; 0 if absent, which needs
    /// transition_scores.
    pub candidate_scores: ddt_tensor,
    /// `[R,L,K,K]` f32, optional: `[r,d,i,j]` is added to the score of candidate j at depth d + 1
    /// when its parent is candidate i at depth d; at d = 0 the parent is the root and i is 0.
    pub transition_scores: ddt_tensor,
    /// `[L]` optional: the scores of depth d + 1 are multiplied by entry d; finite and > 0.
    pub depth_scales: *const f32,
    /// `[R]` tokens of the roots.
    pub root_tokens: *const i32,
    /// `[R]` positions of the roots, >= 0.
    pub root_positions: *const i64,
    /// `[R]` optional: most nodes below the root, default and limit max_nodes - 1; 0 = root alone,
    /// -1 = padding request.
    pub node_budgets: *const i32,
    /// `[R]` optional: largest depth, >= 0; min(L, max_depth) is a limit in any case.
    pub depth_caps: *const i32,
    /// `[R]` optional: candidates per parent that are considered, 1 = the chain of best tokens,
    /// <= 0 = no cap.
    pub candidate_caps: *const i32,
    /// `[R][max_stop_tokens]` optional: nothing grows below these tokens; padding -1. The root is
    /// not looked up: it has been sampled, and whether that ended the request is the caller's
    /// to know.
    pub stop_tokens: *const i32,
    /// Row length of stop_tokens.
    pub max_stop_tokens: i32,
    /// Most candidates per depth taken from logits; 0 = as many as the budget can use. Must be 0
    /// with candidates.
    pub max_candidates: i32,
    /// `[R]` optional: stop tokens at a smaller depth than this do not end a path.
    pub stop_min_depths: *const i32,
    /// `[R]` optional, required iff temperatures is given: seeds of the target's noise.
    pub seeds: *const i64,
    /// Caller memory of at least ddt_tree_build_workspace_size bytes; may be NULL if that is 0.
    pub workspace: *mut c_void,
    /// Its size.
    pub workspace_bytes: usize,
    /// Where the trees go.
    pub tree: *mut ddt_tree,
    /// `[B]` i32 or i64, optional: the B requests of this call write trees `tree_index[0]` to
    /// `tree_index[B - 1]` of the R, all different, and a negative one none. What is `[R]` above
    /// is then `[B]`, and the other trees stay as they are.
    pub tree_index: ddt_tensor,
    /// `[R]` optional, finite and >= 0: where it is above 0, scores are divided by it and get the
    /// noise that ddt_tree_accept adds for the same seed (at the position of a token's parent, by
    /// token id), so that the tree anticipates what the target samples; 0 = as they are. The
    /// normaliser and the candidates are those of the scores with noise.
    pub temperatures: *const f32,
    /// `[R]` optional: the path of best children from the root down to this depth, the chain that
    /// candidate_caps = 1 would give, is in the tree, before all other nodes in pop order; <= 0 =
    /// none. node_budgets, depth_caps and stop tokens limit it as any path.
    pub spine_depths: *const i32,
}

/// Parameters of ddt_tree_gather. B = trees to gather, T = rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_tree_gather_params {
    /// sizeof(ddt_tree_gather_params).
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// Reads num_nodes, every field that tree has, and depths with positions.
    pub source: *mut ddt_tree,
    /// Where the trees go: R >= B, max_nodes at most that of source, the same max_depth.
    pub tree: *mut ddt_tree,
    /// `[B]` i32 or i64: tree i becomes source's tree `tree_index[i]`; negative = padding request.
    pub tree_index: ddt_tensor,
    /// `[B + 1]` rows as for ddt_tree_attention_params: a tree keeps no more nodes than it has
    /// rows.
    pub query_start: *const i32,
    /// `[T]` i64, optional, in place: a node's row, `query_start[i]` + node, gets
    /// `depth - node` added, which turns consecutive positions into those of a tree.
    pub positions: ddt_tensor,
    /// `[axes,T]` i64, optional, in place: the same on every axis of multimodal rotary positions.
    pub mrope_positions: ddt_tensor,
}

/// Parameters of ddt_tree_mask.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_tree_mask_params {
    /// sizeof(ddt_tree_mask_params).
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// R, as in the tree.
    pub num_reqs: i32,
    /// N, as in the tree.
    pub max_nodes: i32,
    /// `[R]` 0 = padding request.
    pub num_nodes: *const i32,
    /// `[R][N]` optional; without it the tree's tokens are -1.
    pub tokens: *const i32,
    /// `[R][N]` `parents[0] = -1` and `0 <= parents[i] < i`; entries from num_nodes on are ignored.
    pub parents: *const i32,
    /// `[R][N]` optional: siblings are ordered by it, lower first, ties by index; it becomes the
    /// tree's pop_ranks. The default is the index.
    pub priorities: *const i32,
    /// `[R]` optional, >= 0, default 0.
    pub root_positions: *const i64,
    /// `[R][N]` out, optional: the index in the input of each node of the tree, padding -1.
    pub order: *mut i32,
    /// Where the trees go.
    pub tree: *mut ddt_tree,
}

/// Parameters of ddt_tree_attention. T = rows, Hq and Hkv = query and KV heads, Dh = head dim.
///
/// Row rule of all operations: request r owns rows `query_start[r]` to `query_start[r + 1] - 1`.
/// Node i of its tree is row `query_start[r] + i`; for attention `prefix_rows[r]` rows may come
/// before the root and are a causal chain. Rows after the last node are idle: operations write
/// zeros to them in `out` and otherwise leave them alone. num_nodes may be lowered after the
/// build, as long as nodes 0 to num_nodes - 1 stay: links to later nodes count as none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_tree_attention_params {
    /// sizeof(ddt_tree_attention_params).
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// `[T,Hq,Dh]` f32, f16 or bf16.
    pub query: ddt_tensor,
    /// `[blocks,Hkv,block_size,Dh]` dtype of query, or f32.
    pub key_cache: ddt_tensor,
    /// `[blocks,Hkv,block_size,Dh]` dtype of query, or f32; strides may differ.
    pub value_cache: ddt_tensor,
    /// `[R,max_blocks]` i32.
    pub block_table: ddt_tensor,
    /// `[R + 1]`.
    pub query_start: *const i32,
    /// `[R]` tokens in the KV cache, this step's rows included: row q of a request's n rows has
    /// KV index `seq_lens[r] - n + q`.
    pub seq_lens: *const i32,
    /// `[R]` optional: rows before the root, default 0.
    pub prefix_rows: *const i32,
    /// Reads num_nodes, ancestor_bits.
    pub tree: *mut ddt_tree,
    /// Factor of the scores.
    pub softmax_scale: f32,
    /// Scores become cap * tanh(score / cap); 0 = none.
    pub logit_softcap: f32,
    /// `[T,Hq,Dh]` out, f32, f16 or bf16; rows of no request are not written.
    pub out: ddt_tensor,
    /// Caller memory of at least ddt_tree_attention_workspace_size bytes; may be NULL if that is 0.
    pub workspace: *mut c_void,
    /// Its size.
    pub workspace_bytes: usize,
}

/// One gated-delta-net layer: weights, recurrent state and the stash that commit replays.
/// Hk and Hv = key and value heads; head dim 128, conv width 4; C = 2 * Hk * 128 + Hv * 128
/// channels in the order q, k, v.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_gdn_layer {
    /// `[C,4]` newest tap last.
    pub conv_weight: ddt_tensor,
    /// `[C]` optional.
    pub conv_bias: ddt_tensor,
    /// `[slots,C,3]` last conv inputs, newest last.
    pub conv_state: ddt_tensor,
    /// `[slots,Hv,128,128]` f32, value dimension before key dimension.
    pub ssm_state: ddt_tensor,
    /// `[T,C]`, or more rows: conv inputs of each row, dtype of mixed_qkv.
    pub stash_qkv: ddt_tensor,
    /// `[T,2,Hv]`, or more rows: f32 log decay, then beta, of each row.
    pub stash_gates: ddt_tensor,
    /// `[R]` slot of each request in conv_state and ssm_state, negative = padding request.
    pub state_slots: *const i32,
    /// `[R]` optional, read by commit: a second slot that receives the state after
    /// snapshot_tokens rows; -1 = none.
    pub snapshot_slots: *const i32,
}

/// Parameters of ddt_gdn_verify. Rows as for ddt_tree_attention_params.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_gdn_verify_params {
    /// sizeof(ddt_gdn_verify_params).
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// The layer: conv_state and ssm_state are read, the stash is written.
    pub layer: ddt_gdn_layer,
    /// `[T,C]` inputs of the convolution.
    pub mixed_qkv: ddt_tensor,
    /// `[T,Hv]` inputs of the decay.
    pub a: ddt_tensor,
    /// `[T,Hv]` inputs of beta.
    pub b: ddt_tensor,
    /// `[Hv]`.
    pub a_log: ddt_tensor,
    /// `[Hv]`.
    pub dt_bias: ddt_tensor,
    /// `[R + 1]`.
    pub query_start: *const i32,
    /// Reads num_nodes, parents, depths, ancestors.
    pub tree: *mut ddt_tree,
    /// Factor of the queries; 0 = 128^-0.5.
    pub scale: f32,
    /// Epsilon of the L2 norm of queries and keys; 0 = 1e-6.
    pub norm_eps: f32,
    /// `[T,Hv,128]` out.
    pub out: ddt_tensor,
    /// Caller memory of at least ddt_gdn_verify_workspace_size bytes; may be NULL if that is 0.
    pub workspace: *mut c_void,
    /// Its size.
    pub workspace_bytes: usize,
}

/// Parameters of ddt_tree_accept. Rows as for ddt_tree_attention_params.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_tree_accept_params {
    /// sizeof(ddt_tree_accept_params).
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// Reads num_nodes, tokens, first_child, next_sibling, and positions with temperatures or
    /// next_positions; sets bits of flags unless NULL.
    pub tree: *mut ddt_tree,
    /// `[R + 1]`.
    pub query_start: *const i32,
    /// `[T,V]` f32, f16 or bf16, processed by the caller, temperature included: each row chooses
    /// its largest logit, or with temperatures its largest sum of logit and noise; the lowest id
    /// among equals, never a NaN. Absent iff node_tokens is given.
    pub logits: ddt_tensor,
    /// `[T]` the token that the caller sampled from the target at each row.
    pub node_tokens: *const i64,
    /// `[R]` out: accepted nodes, root not counted; -1 for a padding request.
    pub num_accepted: *mut i32,
    /// `[R][D]` out: the accepted nodes from depth 1 on, padding -1.
    pub accepted_nodes: *mut i32,
    /// `[R][D + 1]` out: their tokens, then the bonus token, padding -1.
    pub output_tokens: *mut i64,
    /// Caller memory of at least ddt_tree_accept_workspace_size bytes; may be NULL if that is 0.
    pub workspace: *mut c_void,
    /// Its size.
    pub workspace_bytes: usize,
    /// `[R]` optional, needs logits and seeds: 0 = no noise, anything else = the row is sampled.
    /// The logits have been divided by it already.
    pub temperatures: *const f32,
    /// `[R]` seeds of the noise, required iff temperatures is given. The noise of a row is that of
    /// its seed, position and token in vLLM 0.32 and 0.33 (f32, not use_fp64_gumbel), up to the
    /// last bits of log.
    pub seeds: *const i64,
    /// `[R][D + 1]` out, optional: the rows of the root and of the accepted nodes, padding -1.
    pub accepted_rows: *mut i32,
    /// `[R]` out, optional: position of the bonus token, padding 0.
    pub next_positions: *mut i64,
    /// `[R]` out, optional: rows of the request, idle ones included, that are neither the root nor
    /// accepted; padding 0.
    pub num_rejected: *mut i32,
}

/// The KV cache of one attention layer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_kv_layer {
    /// `[blocks,Hkv,block_size,Dh]` any dtype.
    pub key_cache: ddt_tensor,
    /// `[blocks,Hkv,block_size,Dh]` any dtype; strides may differ.
    pub value_cache: ddt_tensor,
    /// `[T]` block * block_size + offset of each row, negative = none.
    pub row_slots: *const i64,
}

/// Parameters of ddt_commit.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ddt_commit_params {
    /// sizeof(ddt_commit_params).
    pub struct_size: u32,
    /// Must be 0.
    pub flags: u32,
    /// Length of gdn_layers.
    pub num_gdn_layers: i32,
    /// Length of kv_layers.
    pub num_kv_layers: i32,
    /// `[num_gdn_layers]` the stash is read, conv_state and ssm_state are written.
    pub gdn_layers: *const ddt_gdn_layer,
    /// `[num_kv_layers]` caches to compact.
    pub kv_layers: *const ddt_kv_layer,
    /// Reads num_nodes.
    pub tree: *mut ddt_tree,
    /// `[R + 1]`.
    pub query_start: *const i32,
    /// `[R]` as ddt_tree_accept wrote it.
    pub num_accepted: *const i32,
    /// `[R][D]` as ddt_tree_accept wrote it.
    pub accepted_nodes: *const i32,
    /// `[R]` rows of this round, root included, that the snapshots contain: 1 to
    /// num_accepted + 1. Required iff a layer has snapshot_slots.
    pub snapshot_tokens: *const i32,
    /// Epsilon of the L2 norm of keys, as ddt_gdn_verify had it; 0 = 1e-6.
    pub norm_eps: f32,
    /// Must be 0.
    pub reserved0: u32,
    /// Caller memory of at least ddt_commit_workspace_size bytes; may be NULL if that is 0.
    pub workspace: *mut c_void,
    /// Its size.
    pub workspace_bytes: usize,
}

macro_rules! versioned {
    ($($type:ty: $min:expr;)*) => {
        $(
            // SAFETY: repr(C), starts with struct_size, no padding, and zero means absent or 0.
            unsafe impl Versioned for $type {
                const MIN_SIZE: usize = $min;
            }
        )*
    };
}
versioned! {
    ddt_context_params: offset_of!(ddt_context_params, device);
    ddt_tree: offset_of!(ddt_tree, tokens);
    ddt_tree_build_params: offset_of!(ddt_tree_build_params, tree_index);
    ddt_tree_gather_params: offset_of!(ddt_tree_gather_params, positions);
    ddt_tree_mask_params: size_of::<ddt_tree_mask_params>();
    ddt_tree_attention_params: offset_of!(ddt_tree_attention_params, workspace);
    ddt_gdn_verify_params: offset_of!(ddt_gdn_verify_params, workspace);
    ddt_tree_accept_params: offset_of!(ddt_tree_accept_params, workspace);
    ddt_commit_params: offset_of!(ddt_commit_params, snapshot_tokens);
}
