// SPDX-License-Identifier: Apache-2.0
//
// libddtree: trees for speculative decoding.
//
// What follows holds for every function unless its comment says otherwise.
//
// Memory: parameter structs, and the structs that they point to, are in host memory and are copied
// before a call returns. Every other pointer is NULL or points to what its type and comment say, in
// memory of the context's device, and is borrowed until the call returns (on a GPU: until the stream
// has passed it). The library keeps and frees nothing of the caller's. Inputs are never written and
// must not overlap outputs, nor outputs each other. Nothing looks for overlaps: on the CPU outputs, and
// what they overlap, hold unspecified values then, and the rest of this still holds; on a GPU nothing is
// promised. Zero a parameter struct, set struct_size, then the fields you need: what stays zero is
// absent.
//
// Shapes: `[R][N]` is an array of the pointer's type in row-major order without gaps; `[R,N]` is a
// tensor, which carries dtype and strides (ddt_tensor). Lengths and strides count elements, names in
// _bytes count bytes, positions count tokens of a sequence from 0.
//
// Outputs: every element is written, padding with the value that the field's comment names, so they
// need no initialisation. A padding request has a place in the batch and nothing to do.
//
// Errors: everything is validated first, and a call that does not return DDT_OK has written nothing.
// Beside the statuses that a comment lists, an operation can return DDT_WORKSPACE_TOO_SMALL and
// DDT_CUDA_ERROR on a GPU, and any function DDT_PANIC or DDT_INTERNAL. What the host cannot see is
// not an error: a value in device memory that is out of range is clamped, or what depends on it is
// skipped, and nothing outside of the caller's buffers is read or written.
//
// Threads: any thread may call anything at any time, as long as calls do not write the same memory.
// The library starts none; on the CPU a call runs on the thread that makes it.
//
// Streams: on a GPU `stream` is the CUstream or cudaStream_t that the call enqueues on, NULL for the
// default one; the CPU ignores it. A call allocates nothing, waits for nothing and reads no device
// memory on the host, so it can be captured in a CUDA graph, which then replays with what the same
// pointers hold: host values (structs, strides, counts) are those of the capture. The workspace,
// aligned to 256 bytes, may hold anything and is free again when the stream has passed the call; its
// size follows from the tensors, so the query may refuse what the call would.
//
// Random numbers: none are drawn from a state, so calls need no order and nothing has to be restored.
// The noise of token t in a row is -ln(-ln(1 - u)) with u = (h + 0.5) / 2^32, and h MurmurHash3
// (x86, 32 bits, seed 0) of 16 bytes: the request's seed (8), the low half of the row's position (4)
// and t (4), little-endian.
//
// Since: 0.1.0 and ABI 1, but for what is marked.

#ifndef DDTREE_H
#define DDTREE_H

// Generated from rust/ffi by cbindgen; do not edit. `DDTREE_WRITE_HEADER=1 cargo test --test header` rewrites it.

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus) && __cplusplus >= 201703L
#define DDT_NODISCARD [[nodiscard]]
#elif defined(__GNUC__) || defined(__clang__)
#define DDT_NODISCARD __attribute__((warn_unused_result))
#else
#define DDT_NODISCARD
#endif

// Most nodes of a tree below its root.
#define DDT_MAX_NODE_BUDGET 255

// Largest depth of a node; the root has depth 0.
#define DDT_MAX_DEPTH 32

// IEEE 754 binary32.
#define DDT_DTYPE_F32 1

// IEEE 754 binary16.
#define DDT_DTYPE_F16 2

// bfloat16.
#define DDT_DTYPE_BF16 3

// 32-bit signed integer.
#define DDT_DTYPE_I32 4

// 64-bit signed integer.
#define DDT_DTYPE_I64 5

// Byte; also how one-byte floats are passed.
#define DDT_DTYPE_U8 6

// The CPU.
#define DDT_DEVICE_CPU 0

// An NVIDIA GPU.
#define DDT_DEVICE_CUDA 1

// Flag of ddt_context_create: only kernels that every supported GPU architecture runs, without
// the faster ones that some have beside them.
#define DDT_CONTEXT_PORTABLE_KERNELS 1

// tree_build: depth 1 has no usable token, so the tree is the root alone.
#define DDT_FLAG_NO_CANDIDATES 1

// tree_build: a NaN or +inf score was ignored, as if it were -inf. tree_accept: a visited row
// has a NaN, which never wins, or nothing above -inf, which gives token 0.
#define DDT_FLAG_NONFINITE 2

// tree_build: a candidate list was shorter than the node budget (or candidate_cap) could use, a
// node used its last entry, and the vocabulary has more: the tree may be worse than it could be.
#define DDT_FLAG_CANDIDATES_EXHAUSTED 4

// Version of this ABI; changes only with a break. Fields appended to parameter structs are not
// one, see struct_size.
#define DDT_ABI_VERSION 1

// A device and what the library keeps for it. Immutable: any number of threads may use one
// context at the same time.
typedef struct ddt_context ddt_context;

// Result of a call: DDT_OK, or why nothing was written. 1xx: the caller's mistake, 2xx: the
// environment, 9xx: a bug in the library. `ddt_last_error` has the sentence.
typedef int32_t ddt_status;

// A strided tensor in the memory of the context's device. Sizes and strides are in elements;
// strides are >= 0, and > 0 for outputs. Entries of shape and strides from ndim on are ignored.
// A tensor with data NULL and dtype 0 is absent.
typedef struct ddt_tensor {
  // First element, aligned to its size.
  void *data;
  // DDT_DTYPE_*.
  uint32_t dtype;
  // Dimensions, at most 4.
  uint32_t ndim;
  // Extents.
  int64_t shape[4];
  // Distances between neighbours along each dimension.
  int64_t strides[4];
} ddt_tensor;

// One gated-delta-net layer: weights, recurrent state and the stash that commit replays.
// Hk and Hv = key and value heads; head dim 128, conv width 4; C = 2 * Hk * 128 + Hv * 128
// channels in the order q, k, v.
typedef struct ddt_gdn_layer {
  // `[C,4]` newest tap last.
  struct ddt_tensor conv_weight;
  // `[C]` optional.
  struct ddt_tensor conv_bias;
  // `[slots,C,3]` last conv inputs, newest last.
  struct ddt_tensor conv_state;
  // `[slots,Hv,128,128]` f32, value dimension before key dimension.
  struct ddt_tensor ssm_state;
  // `[T,C]`, or more rows: conv inputs of each row, dtype of mixed_qkv.
  struct ddt_tensor stash_qkv;
  // `[T,2,Hv]`, or more rows: f32 log decay, then beta, of each row.
  struct ddt_tensor stash_gates;
  // `[R]` slot of each request in conv_state and ssm_state, negative = padding request.
  const int32_t *state_slots;
  // `[R]` optional, read by commit: a second slot that receives the state after
  // snapshot_tokens rows; -1 = none.
  const int32_t *snapshot_slots;
} ddt_gdn_layer;

// The KV cache of one attention layer.
typedef struct ddt_kv_layer {
  // `[blocks,Hkv,block_size,Dh]` any dtype.
  struct ddt_tensor key_cache;
  // `[blocks,Hkv,block_size,Dh]` any dtype; strides may differ.
  struct ddt_tensor value_cache;
  // `[T]` block * block_size + offset of each row, negative = none.
  const int64_t *row_slots;
} ddt_kv_layer;

// A batch of trees in caller memory, one row per request. R = num_reqs, N = max_nodes,
// D = max_depth, W = (N + 31) / 32.
//
// Node 0 is the root: the last sampled token. Nodes are in depth-first preorder, best child
// first, so a parent precedes its children and rows 1..d of a tree are its greedy spine.
//
// ddt_tree_build and ddt_tree_mask write every field that is not NULL (num_nodes is required),
// padding included. The other operations read the fields that they name; those must not be NULL,
// the others may be.
typedef struct ddt_tree {
  // sizeof(ddt_tree).
  uint32_t struct_size;
  // R.
  int32_t num_reqs;
  // N: length of a row, root counted; 1 to DDT_MAX_NODE_BUDGET + 1.
  int32_t max_nodes;
  // D: largest depth that a node may have; 0 to DDT_MAX_DEPTH.
  int32_t max_depth;
  // `[R]` nodes with the root; 0 = padding request, which every operation skips.
  int32_t *num_nodes;
  // `[R][N]` token ids, padding -1.
  int32_t *tokens;
  // `[R][N]` parent nodes, root -1, padding -1.
  int32_t *parents;
  // `[R][N]` root 0, padding -1.
  int32_t *depths;
  // `[R][N]` best child, none -1, padding -1.
  int32_t *first_child;
  // `[R][N]` next worse child of the same parent, none -1, padding -1.
  int32_t *next_sibling;
  // `[R][N]` one past the last node of the subtree, padding 0. Node j is i or an ancestor of i
  // iff `j <= i < subtree_end[j]`.
  int32_t *subtree_end;
  // `[R][N][W]` bit j % 32 of word j / 32 is set iff node j is i or an ancestor of i; padding 0.
  uint32_t *ancestor_bits;
  // `[R][N][D + 1]` path from the root to the node, which is at `[depth]`; then -1.
  int32_t *ancestors;
  // `[R][N]` position of the root plus depth, padding 0.
  int64_t *positions;
  // `[R][N]` place in best-first order, root 0, padding -1. The nodes with rank <= b are the
  // tree of budget b.
  int32_t *pop_ranks;
  // `[R]` DDT_FLAG_* bits.
  uint32_t *flags;
} ddt_tree;

// Parameters of ddt_commit.
typedef struct ddt_commit_params {
  // sizeof(ddt_commit_params).
  uint32_t struct_size;
  // Must be 0.
  uint32_t flags;
  // Length of gdn_layers.
  int32_t num_gdn_layers;
  // Length of kv_layers.
  int32_t num_kv_layers;
  // `[num_gdn_layers]` the stash is read, conv_state and ssm_state are written.
  const struct ddt_gdn_layer *gdn_layers;
  // `[num_kv_layers]` caches to compact.
  const struct ddt_kv_layer *kv_layers;
  // Reads num_nodes.
  struct ddt_tree *tree;
  // `[R + 1]`.
  const int32_t *query_start;
  // `[R]` as ddt_tree_accept wrote it.
  const int32_t *num_accepted;
  // `[R][D]` as ddt_tree_accept wrote it.
  const int32_t *accepted_nodes;
  // `[R]` rows of this round, root included, that the snapshots contain: 1 to
  // num_accepted + 1. Required iff a layer has snapshot_slots.
  const int32_t *snapshot_tokens;
  // Epsilon of the L2 norm of keys, as ddt_gdn_verify had it; 0 = 1e-6.
  float norm_eps;
  // Must be 0.
  uint32_t reserved0;
  // Caller memory of at least ddt_commit_workspace_size bytes; may be NULL if that is 0.
  void *workspace;
  // Its size.
  size_t workspace_bytes;
} ddt_commit_params;

// Parameters of ddt_context_create.
typedef struct ddt_context_params {
  // sizeof(ddt_context_params).
  uint32_t struct_size;
  // DDT_ABI_VERSION of the header that the caller was compiled with.
  uint32_t abi_version;
  // DDT_DEVICE_*.
  uint32_t device;
  // Which device of that kind; 0 for the CPU.
  int32_t device_index;
  // DDT_CONTEXT_* bits.
  uint32_t flags;
} ddt_context_params;

// Parameters of ddt_gdn_verify. Rows as for ddt_tree_attention_params.
typedef struct ddt_gdn_verify_params {
  // sizeof(ddt_gdn_verify_params).
  uint32_t struct_size;
  // Must be 0.
  uint32_t flags;
  // The layer: conv_state and ssm_state are read, the stash is written.
  struct ddt_gdn_layer layer;
  // `[T,C]` inputs of the convolution.
  struct ddt_tensor mixed_qkv;
  // `[T,Hv]` inputs of the decay.
  struct ddt_tensor a;
  // `[T,Hv]` inputs of beta.
  struct ddt_tensor b;
  // `[Hv]`.
  struct ddt_tensor a_log;
  // `[Hv]`.
  struct ddt_tensor dt_bias;
  // `[R + 1]`.
  const int32_t *query_start;
  // Reads num_nodes, parents, depths, ancestors.
  struct ddt_tree *tree;
  // Factor of the queries; 0 = 128^-0.5.
  float scale;
  // Epsilon of the L2 norm of queries and keys; 0 = 1e-6.
  float norm_eps;
  // `[T,Hv,128]` out.
  struct ddt_tensor out;
  // Caller memory of at least ddt_gdn_verify_workspace_size bytes; may be NULL if that is 0.
  void *workspace;
  // Its size.
  size_t workspace_bytes;
} ddt_gdn_verify_params;

// Parameters of ddt_tree_accept. Rows as for ddt_tree_attention_params.
typedef struct ddt_tree_accept_params {
  // sizeof(ddt_tree_accept_params).
  uint32_t struct_size;
  // Must be 0.
  uint32_t flags;
  // Reads num_nodes, tokens, first_child, next_sibling, and positions with temperatures or
  // next_positions; sets bits of flags unless NULL.
  struct ddt_tree *tree;
  // `[R + 1]`.
  const int32_t *query_start;
  // `[T,V]` f32, f16 or bf16, processed by the caller, temperature included: each row chooses
  // its largest logit, or with temperatures its largest sum of logit and noise; the lowest id
  // among equals, never a NaN. Absent iff node_tokens is given.
  struct ddt_tensor logits;
  // `[T]` the token that the caller sampled from the target at each row.
  const int64_t *node_tokens;
  // `[R]` out: accepted nodes, root not counted; -1 for a padding request.
  int32_t *num_accepted;
  // `[R][D]` out: the accepted nodes from depth 1 on, padding -1.
  int32_t *accepted_nodes;
  // `[R][D + 1]` out: their tokens, then the bonus token, padding -1.
  int64_t *output_tokens;
  // Caller memory of at least ddt_tree_accept_workspace_size bytes; may be NULL if that is 0.
  void *workspace;
  // Its size.
  size_t workspace_bytes;
  // `[R]` optional, needs logits and seeds: 0 = no noise, anything else = the row is sampled.
  // The logits have been divided by it already.
  const float *temperatures;
  // `[R]` seeds of the noise, required iff temperatures is given. The noise of a row is that of
  // its seed, position and token in vLLM 0.32 and 0.33 (f32, not use_fp64_gumbel), up to the
  // last bits of log.
  const int64_t *seeds;
  // `[R][D + 1]` out, optional: the rows of the root and of the accepted nodes, padding -1.
  int32_t *accepted_rows;
  // `[R]` out, optional: position of the bonus token, padding 0.
  int64_t *next_positions;
  // `[R]` out, optional: rows of the request, idle ones included, that are neither the root nor
  // accepted; padding 0.
  int32_t *num_rejected;
} ddt_tree_accept_params;

// Parameters of ddt_tree_attention. T = rows, Hq and Hkv = query and KV heads, Dh = head dim.
//
// Row rule of all operations: request r owns rows `query_start[r]` to `query_start[r + 1] - 1`.
// Node i of its tree is row `query_start[r] + i`; for attention `prefix_rows[r]` rows may come
// before the root and are a causal chain. Rows after the last node are idle: operations write
// zeros to them in `out` and otherwise leave them alone. num_nodes may be lowered after the
// build, as long as nodes 0 to num_nodes - 1 stay: links to later nodes count as none.
typedef struct ddt_tree_attention_params {
  // sizeof(ddt_tree_attention_params).
  uint32_t struct_size;
  // Must be 0.
  uint32_t flags;
  // `[T,Hq,Dh]` f32, f16 or bf16.
  struct ddt_tensor query;
  // `[blocks,Hkv,block_size,Dh]` dtype of query, or f32.
  struct ddt_tensor key_cache;
  // `[blocks,Hkv,block_size,Dh]` dtype of query, or f32; strides may differ.
  struct ddt_tensor value_cache;
  // `[R,max_blocks]` i32.
  struct ddt_tensor block_table;
  // `[R + 1]`.
  const int32_t *query_start;
  // `[R]` tokens in the KV cache, this step's rows included: row q of a request's n rows has
  // KV index `seq_lens[r] - n + q`.
  const int32_t *seq_lens;
  // `[R]` optional: rows before the root, default 0.
  const int32_t *prefix_rows;
  // Reads num_nodes, ancestor_bits.
  struct ddt_tree *tree;
  // Factor of the scores.
  float softmax_scale;
  // Scores become cap * tanh(score / cap); 0 = none.
  float logit_softcap;
  // `[T,Hq,Dh]` out, f32, f16 or bf16; rows of no request are not written.
  struct ddt_tensor out;
  // Caller memory of at least ddt_tree_attention_workspace_size bytes; may be NULL if that is 0.
  void *workspace;
  // Its size.
  size_t workspace_bytes;
} ddt_tree_attention_params;

// Parameters of ddt_tree_build. L = depths that have scores, V = vocabulary, K = candidates.
typedef struct ddt_tree_build_params {
  // sizeof(ddt_tree_build_params).
  uint32_t struct_size;
  // Must be 0.
  uint32_t flags;
  // `[R,L,V]` f32, f16 or bf16: scores of every token at depths 1 to L. Absent iff candidates
  // are given.
  struct ddt_tensor logits;
  // `[R,L,K]` i32: token ids, distinct at each depth; -1 = no candidate. K is at most 4096.
  struct ddt_tensor candidate_tokens;
  // `[R,L,K]` f32: unnormalised scores of the candidates; 0 if absent, which needs
  // transition_scores.
  struct ddt_tensor candidate_scores;
  // `[R,L,K,K]` f32, optional: `[r,d,i,j]` is added to the score of candidate j at depth d + 1
  // when its parent is candidate i at depth d; at d = 0 the parent is the root and i is 0.
  struct ddt_tensor transition_scores;
  // `[L]` optional: the scores of depth d + 1 are multiplied by entry d; finite and > 0.
  const float *depth_scales;
  // `[R]` tokens of the roots.
  const int32_t *root_tokens;
  // `[R]` positions of the roots, >= 0.
  const int64_t *root_positions;
  // `[R]` optional: most nodes below the root, default and limit max_nodes - 1; 0 = root alone,
  // -1 = padding request.
  const int32_t *node_budgets;
  // `[R]` optional: largest depth, >= 0; min(L, max_depth) is a limit in any case.
  const int32_t *depth_caps;
  // `[R]` optional: candidates per parent that are considered, 1 = the chain of best tokens,
  // <= 0 = no cap.
  const int32_t *candidate_caps;
  // `[R][max_stop_tokens]` optional: nothing grows below these tokens; padding -1. The root is
  // not looked up: it has been sampled, and whether that ended the request is the caller's
  // to know.
  const int32_t *stop_tokens;
  // Row length of stop_tokens.
  int32_t max_stop_tokens;
  // Most candidates per depth taken from logits; 0 = as many as the budget can use. Must be 0
  // with candidates.
  int32_t max_candidates;
  // `[R]` optional: stop tokens at a smaller depth than this do not end a path.
  const int32_t *stop_min_depths;
  // `[R]` optional, required iff temperatures is given: seeds of the target's noise.
  const int64_t *seeds;
  // Caller memory of at least ddt_tree_build_workspace_size bytes; may be NULL if that is 0.
  void *workspace;
  // Its size.
  size_t workspace_bytes;
  // Where the trees go.
  struct ddt_tree *tree;
  // `[B]` i32 or i64, optional: the B requests of this call write trees `tree_index[0]` to
  // `tree_index[B - 1]` of the R, all different, and a negative one none. What is `[R]` above
  // is then `[B]`, and the other trees stay as they are.
  struct ddt_tensor tree_index;
  // `[R]` optional, finite and >= 0: where it is above 0, scores are divided by it and get the
  // noise that ddt_tree_accept adds for the same seed (at the position of a token's parent, by
  // token id), so that the tree anticipates what the target samples; 0 = as they are. The
  // normaliser and the candidates are those of the scores with noise.
  const float *temperatures;
  // `[R]` optional: the path of best children from the root down to this depth, the chain that
  // candidate_caps = 1 would give, is in the tree, before all other nodes in pop order; <= 0 =
  // none. node_budgets, depth_caps and stop tokens limit it as any path.
  const int32_t *spine_depths;
} ddt_tree_build_params;

// Parameters of ddt_tree_gather. B = trees to gather, T = rows.
typedef struct ddt_tree_gather_params {
  // sizeof(ddt_tree_gather_params).
  uint32_t struct_size;
  // Must be 0.
  uint32_t flags;
  // Reads num_nodes, every field that tree has, and depths with positions.
  struct ddt_tree *source;
  // Where the trees go: R >= B, max_nodes at most that of source, the same max_depth.
  struct ddt_tree *tree;
  // `[B]` i32 or i64: tree i becomes source's tree `tree_index[i]`; negative = padding request.
  struct ddt_tensor tree_index;
  // `[B + 1]` rows as for ddt_tree_attention_params: a tree keeps no more nodes than it has
  // rows.
  const int32_t *query_start;
  // `[T]` i64, optional, in place: a node's row, `query_start[i]` + node, gets
  // `depth - node` added, which turns consecutive positions into those of a tree.
  struct ddt_tensor positions;
  // `[axes,T]` i64, optional, in place: the same on every axis of multimodal rotary positions.
  struct ddt_tensor mrope_positions;
} ddt_tree_gather_params;

// Parameters of ddt_tree_mask.
typedef struct ddt_tree_mask_params {
  // sizeof(ddt_tree_mask_params).
  uint32_t struct_size;
  // Must be 0.
  uint32_t flags;
  // R, as in the tree.
  int32_t num_reqs;
  // N, as in the tree.
  int32_t max_nodes;
  // `[R]` 0 = padding request.
  const int32_t *num_nodes;
  // `[R][N]` optional; without it the tree's tokens are -1.
  const int32_t *tokens;
  // `[R][N]` `parents[0] = -1` and `0 <= parents[i] < i`; entries from num_nodes on are ignored.
  const int32_t *parents;
  // `[R][N]` optional: siblings are ordered by it, lower first, ties by index; it becomes the
  // tree's pop_ranks. The default is the index.
  const int32_t *priorities;
  // `[R]` optional, >= 0, default 0.
  const int64_t *root_positions;
  // `[R][N]` out, optional: the index in the input of each node of the tree, padding -1.
  int32_t *order;
  // Where the trees go.
  struct ddt_tree *tree;
} ddt_tree_mask_params;

// Success.
#define DDT_OK 0

// A required pointer is NULL.
#define DDT_NULL_POINTER 100

// struct_size is too small, too large or not a multiple of the struct's alignment.
#define DDT_INVALID_STRUCT 101

// A shape, stride or length is negative, overflows or disagrees with another one.
#define DDT_INVALID_SHAPE 102

// A tensor has a dtype that the argument does not accept.
#define DDT_INVALID_DTYPE 103

// A value lies outside of its documented range.
#define DDT_INVALID_VALUE 104

// The workspace is smaller than the size query says.
#define DDT_WORKSPACE_TOO_SMALL 105

// The caller was compiled against another DDT_ABI_VERSION.
#define DDT_ABI_MISMATCH 106

// A pointer is not aligned to its element.
#define DDT_MISALIGNED 107

// This build or this version cannot do what was asked.
#define DDT_UNSUPPORTED 200

// No such device.
#define DDT_NO_DEVICE 201

// The build contains no code for the device's architecture.
#define DDT_ARCH_NOT_BUILT 202

// The CUDA driver reported an error.
#define DDT_CUDA_ERROR 203

// Memory ran out.
#define DDT_OUT_OF_MEMORY 204

// A panic was caught: a bug in the library.
#define DDT_PANIC 900

// Any other bug in the library.
#define DDT_INTERNAL 901

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes the accepted path of every tree permanent. conv_state and ssm_state of each recurrent
// layer become those after plain decoding of the root and the accepted nodes, replayed from the
// stash in f32, token by token: `S = e^g S; u = beta * (v - S^T k); S += k u^T`. In each
// attention layer the KV row of the j-th accepted node moves to the row of node j.
//
// Shapes: see ddt_commit_params, ddt_gdn_layer and ddt_kv_layer.
//
// Writes: the states of each request's slot, and of its snapshot slot if it has one; the KV rows
// that move. A request is skipped if num_nodes is 0 or num_accepted is -1, and by a recurrent
// layer also if its slot there is negative.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_INVALID_SHAPE,
// DDT_INVALID_DTYPE; DDT_INVALID_VALUE (a row, node, slot or snapshot_tokens out of range,
// accepted nodes that do not ascend, a KV row that moves from or to no slot, a state or KV slot
// that would be written twice); DDT_UNSUPPORTED (flags). Nothing has been written then.
DDT_NODISCARD
ddt_status ddt_commit(const struct ddt_context *context,
                      const struct ddt_commit_params *params,
                      void *stream);

// Bytes of workspace that ddt_commit needs for these parameters; 0 on the CPU.
//
// Writes: `*out`.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_UNSUPPORTED.
DDT_NODISCARD
ddt_status ddt_commit_workspace_size(const struct ddt_context *context,
                                     const struct ddt_commit_params *params,
                                     size_t *out);

// Makes a context for a device. For a GPU this loads all kernels, and retains the primary context
// of the device, which is also that of the CUDA runtime. It may run on other streams' time: do not
// call it while a stream is being captured.
//
// Writes: `*out`, to be freed with `ddt_context_free`.
//
// Errors: DDT_NULL_POINTER, DDT_INVALID_STRUCT, DDT_ABI_MISMATCH (abi_version is not the
// library's), DDT_INVALID_VALUE (unknown device, or a device_index other than 0 for the CPU),
// DDT_UNSUPPORTED (a device that this build has no backend for, unknown flags, a GPU with too
// little shared memory), DDT_NO_DEVICE (no driver, or no such GPU), DDT_ARCH_NOT_BUILT,
// DDT_CUDA_ERROR (also a driver that is too old), DDT_OUT_OF_MEMORY.
DDT_NODISCARD
ddt_status ddt_context_create(const struct ddt_context_params *params,
                              struct ddt_context **out);

// Frees a context; NULL is allowed. No call may be using it, and on a GPU no stream may still have
// work of it.
void ddt_context_free(struct ddt_context *context);

// Computes the outputs of one gated-delta-net layer for every node of every tree, from one read
// of the layer's state, and writes to the stash what ddt_commit replays. No state is written.
//
// Convolution along the ancestors, silu and rounding to the dtype of mixed_qkv give q, k and v;
// q and k become `x * rsqrt(sum(x^2) + norm_eps)`; the log decay g is
// `-exp(a_log) * softplus(a + dt_bias)` and beta is `sigmoid(b)`. With S the state of the parent,
// a node's output is `scale * S'^T q` of `S' = e^g S + k u^T, u = beta * (v - e^g S^T k)`.
// All of it is f32.
//
// Shapes: see ddt_gdn_verify_params. Floating-point tensors are f32, f16 or bf16; conv_state has
// the dtype of mixed_qkv or is f32; ssm_state and stash_gates are f32. Value head h uses key head
// `h / (Hv / Hk)`. Two requests may name the same slot. On a GPU nodes must be in depth-first
// order, as ddt_tree says: other orders give wrong outputs for trees of more than 48 nodes.
//
// Writes: out and the stash at the rows of nodes; zeros to out, and nothing to the stash, at
// idle rows. Rows of a padding request (num_nodes 0 or a negative slot) are not written.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_INVALID_SHAPE,
// DDT_INVALID_DTYPE; DDT_INVALID_VALUE (a slot, row or node out of range, parents, depths and
// ancestors that do not agree, a scale or norm_eps that is not finite); DDT_UNSUPPORTED (flags).
// Nothing has been written then.
DDT_NODISCARD
ddt_status ddt_gdn_verify(const struct ddt_context *context,
                          const struct ddt_gdn_verify_params *params,
                          void *stream);

// Bytes of workspace that ddt_gdn_verify needs for these parameters; 0 on the CPU.
//
// Writes: `*out`.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_UNSUPPORTED.
DDT_NODISCARD
ddt_status ddt_gdn_verify_workspace_size(const struct ddt_context *context,
                                         const struct ddt_gdn_verify_params *params,
                                         size_t *out);

// Name of a status, such as "DDT_INVALID_SHAPE"; "DDT_STATUS_UNKNOWN" for any other number.
// The string is static.
const char *ddt_status_name(ddt_status status);

// Copies the message of this thread's most recent call that can fail: `op: what was wrong: got
// X, want Y`, or the empty string if that call succeeded. Reading does not clear it.
//
// Writes: up to `len` bytes to `buf`, NUL-terminated and cut between UTF-8 characters; the size
// of the whole message with its NUL to `needed`. Either pointer may be NULL, `buf` only with
// `len` 0.
//
// Errors: DDT_NULL_POINTER (buf is NULL and len is not 0), without a message of its own.
ddt_status ddt_last_error(char *buf, size_t len, size_t *needed);

// Walks each tree from its root along the target's choices until no child has the chosen token,
// which is then the bonus token.
//
// A choice is the largest logit of the node's row, a token sampled from the row by its seed and
// position, or the caller's sampled token: with tokens sampled from the target, the output is what
// the target alone would have produced.
//
// Writes: num_accepted, accepted_nodes, output_tokens, accepted_rows, next_positions and
// num_rejected, padding included. Sets DDT_FLAG_NONFINITE in tree.flags, if that is not NULL, for
// a request with a visited row that has a NaN or nothing above -inf.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT. DDT_INVALID_SHAPE (V not in 1 to
// 2^31 - 1). DDT_INVALID_DTYPE. DDT_INVALID_VALUE (both or neither of logits and node_tokens;
// temperatures with node_tokens; one of temperatures and seeds without the other; query_start or
// num_nodes out of range; links that do not lead to a later node; an accepted path longer than
// max_depth). DDT_UNSUPPORTED (unknown flags).
DDT_NODISCARD
ddt_status ddt_tree_accept(const struct ddt_context *context,
                           const struct ddt_tree_accept_params *params,
                           void *stream);

// Bytes of workspace that ddt_tree_accept needs for these parameters; 0 on the CPU.
//
// Writes: `*out`.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_UNSUPPORTED.
DDT_NODISCARD
ddt_status ddt_tree_accept_workspace_size(const struct ddt_context *context,
                                          const struct ddt_tree_accept_params *params,
                                          size_t *out);

// Attends every row to a paged KV cache that already holds this step's rows: a row before the
// root to all tokens up to itself, a node to all tokens before the root and to its path.
//
// One online softmax in f32 per row and head; the KV of tokens that a row does not see never
// reaches it, NaN included. Query head h uses KV head `h / (Hq / Hkv)`; head dims 32, 64, 128 and
// 256, at most 16 query heads per KV head.
//
// Shapes: see ddt_tree_attention_params. K may be stored dim-major (token stride 1).
//
// Writes: out at the rows before the root and of nodes; zeros at idle rows. Rows of a padding
// request (num_nodes 0) and of no request are not written.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_INVALID_SHAPE,
// DDT_INVALID_DTYPE; DDT_INVALID_VALUE (rows, seq_lens or blocks out of range, ancestor_bits
// with a later node or without the node itself, a softmax_scale that is not finite, a
// logit_softcap that is negative or not finite); DDT_UNSUPPORTED (head dim, query heads per KV
// head, flags). Nothing has been written then.
DDT_NODISCARD
ddt_status ddt_tree_attention(const struct ddt_context *context,
                              const struct ddt_tree_attention_params *params,
                              void *stream);

// Bytes of workspace that ddt_tree_attention needs for these parameters; 0 on the CPU.
//
// Writes: `*out`.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_UNSUPPORTED.
DDT_NODISCARD
ddt_status ddt_tree_attention_workspace_size(const struct ddt_context *context,
                                             const struct ddt_tree_attention_params *params,
                                             size_t *out);

// Builds the best tree of each request under its node budget.
//
// A node's score is the sum of the log-probabilities of its path, in fixed point, so that every
// backend builds the same tree, ties included. The tree of a smaller budget is the first nodes in
// pop order. NaN, +inf and -inf scores mean "never".
//
// From logits the depths are independent (DDTree, <https://arxiv.org/abs/2604.12989>). In a
// candidate lattice with transition_scores each edge is conditioned on its parent: its
// log-probability is the log-softmax, over the K candidates of its depth, of candidate_scores plus
// the parent's row of transition_scores (as <https://github.com/slin-zhq/Domino-Tree> ranks
// paths). With zeros there the tree is that of candidate_scores alone.
//
// Writes: every field of tree that is not NULL, for the trees that tree_index names. Scores are
// looked at, and flagged in tree.flags, down to the smallest of node_budget, depth_cap, max_depth
// and L.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT. DDT_INVALID_SHAPE (logits,
// candidates, tree_index and tree disagree, or V >= 2^31). DDT_INVALID_DTYPE. DDT_INVALID_VALUE
// (both or neither of logits and candidates; candidates without any scores; one of temperatures
// and seeds without the other; a budget, cap, scale, temperature or position out of range; a token
// twice at one depth; a tree that is not there or named twice). DDT_UNSUPPORTED (unknown flags).
DDT_NODISCARD
ddt_status ddt_tree_build(const struct ddt_context *context,
                          const struct ddt_tree_build_params *params,
                          void *stream);

// Bytes of workspace that ddt_tree_build needs for these parameters; 0 on the CPU.
//
// Writes: `*out`.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_UNSUPPORTED.
DDT_NODISCARD
ddt_status ddt_tree_build_workspace_size(const struct ddt_context *context,
                                         const struct ddt_tree_build_params *params,
                                         size_t *out);

// Brings trees of a batch into the order of another one, and the positions of their rows from
// those of a chain to those of the tree.
//
// A tree keeps its first max_nodes nodes, and no more than it has rows; links to later nodes stay
// (see ddt_tree_attention_params). Trees from B on become padding requests.
//
// Writes: of tree num_nodes, and every other field that is not NULL for the gathered trees,
// padding included; what a padding request has there stays. Positions.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT, DDT_INVALID_DTYPE.
// DDT_INVALID_SHAPE (more trees to gather than tree has, trees that differ in max_depth, a source
// with shorter rows). DDT_INVALID_VALUE (a tree that is not there, num_nodes, a depth or a row out
// of range). DDT_UNSUPPORTED (unknown flags).
DDT_NODISCARD
ddt_status ddt_tree_gather(const struct ddt_context *context,
                           const struct ddt_tree_gather_params *params,
                           void *stream);

// Lays out trees that the caller built: renumbers each to depth-first preorder and derives every
// field of ddt_tree from the parents.
//
// Writes: every field of tree that is not NULL (flags 0); order.
//
// Errors: DDT_NULL_POINTER, DDT_MISALIGNED, DDT_INVALID_STRUCT. DDT_INVALID_SHAPE (num_reqs or
// max_nodes differ from the tree's). DDT_INVALID_VALUE (num_nodes or a position out of range, a
// parent that does not precede its child, a node deeper than the tree's max_depth).
// DDT_UNSUPPORTED (unknown flags).
DDT_NODISCARD
ddt_status ddt_tree_mask(const struct ddt_context *context,
                         const struct ddt_tree_mask_params *params,
                         void *stream);

// The DDT_ABI_VERSION that the library was built with.
uint32_t ddt_abi_version(void);

// Version of the library, such as "0.1.0". The string is static.
const char *ddt_version(void);

// One line for bug reports: version, ABI, the commit that was built ("+": with changes; "unknown":
// not from a checkout), the backends of this build and, for CUDA, the architectures that it holds
// machine code (sm) and PTX (compute) for, such as
// "ddtree/0.1.0 abi/1 git/0123456789ab backends/cpu,cuda archs/sm_90a,compute_80". The string is
// static.
const char *ddt_build_info(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DDTREE_H */
