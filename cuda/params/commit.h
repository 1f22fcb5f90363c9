// SPDX-License-Identifier: Apache-2.0
#ifndef DDT_CUDA_PARAMS_COMMIT_H
#define DDT_CUDA_PARAMS_COMMIT_H

#include "common.h"

// Layers of one launch: their tables travel by value, and with them the parameters must fit into
// the 32,764 bytes that CUDA allows. More layers take more launches.
enum {
  DDT_CUDA_COMMIT_MAX_GDN_LAYERS = 64,
  DDT_CUDA_COMMIT_MAX_KV_LAYERS = 64,
};

// The work of a block, which host and kernels must agree on.
enum {
  DDT_CUDA_COMMIT_REPLAY_THREADS = 256,
  // blocks of the replay that a multiprocessor runs at the same time
  DDT_CUDA_COMMIT_REPLAY_BLOCKS_PER_SM = 2,
  DDT_CUDA_COMMIT_SHIFT_THREADS = 256,
  // value heads of one key head that a block replays, at most
  DDT_CUDA_COMMIT_MAX_BLOCK_HEADS = 3,
  // keys and values of DDT_CUDA_MAX_DEPTH + 1 tokens in f32
  DDT_CUDA_COMMIT_REPLAY_SHARED_BYTES = 33 * 128 * (1 + DDT_CUDA_COMMIT_MAX_BLOCK_HEADS) * 4,
  // channels of one request's convolution window
  DDT_CUDA_COMMIT_WINDOW_CHANNELS = 1024,
};

// One gated-delta-net layer: ddt_gdn_layer of ddtree.h.
struct ddt_cuda_commit_gdn {
  struct ddt_cuda_view conv_weight;
  struct ddt_cuda_view conv_bias;
  struct ddt_cuda_view conv_state;
  struct ddt_cuda_view ssm_state;
  struct ddt_cuda_view stash_qkv;
  struct ddt_cuda_view stash_gates;
  const int32_t *state_slots;
  // NULL = none
  const int32_t *snapshot_slots;
  // slots that both states have
  int64_t num_slots;
  // rows that both stashes have
  int32_t stash_rows;
  int32_t num_k_heads;
  int32_t num_v_heads;
  // value heads that a block replays: a divisor of num_v_heads / num_k_heads
  int32_t block_heads;
  // 1 if weights, bias, window and stash_qkv have the same 16-bit type, the channels of each are
  // contiguous (of weights their taps) and can be accessed four at a time
  uint32_t has_aligned_rows;
  uint32_t reserved;
};

// A KV cache as it is moved: in units of 1, 2, 4, 8 or 16 bytes, whatever its elements are.
// Strides in bytes.
struct ddt_cuda_commit_cache {
  void *data;
  int64_t block_stride;
  int64_t head_stride;
  int64_t token_stride;
  int64_t unit_stride;
  uint32_t unit_bytes;
  // units of one head of one token
  int32_t num_units;
};

// One attention layer: ddt_kv_layer of ddtree.h.
struct ddt_cuda_commit_kv {
  struct ddt_cuda_commit_cache key_cache;
  struct ddt_cuda_commit_cache value_cache;
  const int64_t *row_slots;
  int64_t num_blocks;
  int64_t block_size;
  int32_t num_key_heads;
  int32_t num_value_heads;
};

// Both kernels of the operation.
struct ddt_cuda_commit {
  struct ddt_cuda_tree tree;
  // [R + 1]
  const int32_t *query_start;
  // [R]
  const int32_t *num_accepted;
  // [R][D]
  const int32_t *accepted_nodes;
  // [R], NULL = none
  const int32_t *snapshot_tokens;
  float norm_eps;
  int32_t num_gdn_layers;
  int32_t num_kv_layers;
  uint32_t reserved;
  struct ddt_cuda_commit_gdn gdn_layers[DDT_CUDA_COMMIT_MAX_GDN_LAYERS];
  struct ddt_cuda_commit_kv kv_layers[DDT_CUDA_COMMIT_MAX_KV_LAYERS];
};

#endif
