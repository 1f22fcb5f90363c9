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
  DDT_CUDA_COMMIT_SHIFT_THREADS = 256,
  // rows of the value dimension of one head's state
  DDT_CUDA_COMMIT_STATE_ROWS = 64,
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
