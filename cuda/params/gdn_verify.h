// SPDX-License-Identifier: Apache-2.0
#ifndef DDT_CUDA_PARAMS_GDN_VERIFY_H
#define DDT_CUDA_PARAMS_GDN_VERIFY_H

#include "common.h"

// Tensors that can be accessed several elements at a time.
enum ddt_cuda_gdn_verify_vectors {
  // ssm_state: 16 bytes of keys
  DDT_CUDA_GDN_VERIFY_STATE = 1,
  // mixed_qkv: 16 bytes of channels
  DDT_CUDA_GDN_VERIFY_ROWS = 2,
  // stash_qkv: 4 channels
  DDT_CUDA_GDN_VERIFY_STASH = 4,
  // conv_weight: the 4 taps of a channel
  DDT_CUDA_GDN_VERIFY_WEIGHT = 8,
  // conv_state: 4 channels
  DDT_CUDA_GDN_VERIFY_WINDOW = 16,
  // out: 4 elements of a head
  DDT_CUDA_GDN_VERIFY_OUT = 32,
};

// ddt_gdn_verify_params of ddtree.h.
struct ddt_cuda_gdn_verify {
  struct ddt_cuda_view conv_weight;
  // absent = 0
  struct ddt_cuda_view conv_bias;
  struct ddt_cuda_view conv_state;
  struct ddt_cuda_view ssm_state;
  struct ddt_cuda_view stash_qkv;
  struct ddt_cuda_view stash_gates;
  struct ddt_cuda_view mixed_qkv;
  struct ddt_cuda_view a;
  struct ddt_cuda_view b;
  struct ddt_cuda_view a_log;
  struct ddt_cuda_view dt_bias;
  struct ddt_cuda_view out;
  struct ddt_cuda_tree tree;
  // [R]
  const int32_t *state_slots;
  // [R + 1]
  const int32_t *query_start;
  // slots that both states have
  int64_t num_slots;
  // T
  int32_t num_rows;
  int32_t num_k_heads;
  int32_t num_v_heads;
  // blocks per key head of a request
  int32_t num_slices;
  // rows that shared memory has room for, a multiple of 16
  int32_t row_capacity;
  // DDT_CUDA_GDN_VERIFY_* bits
  uint32_t vectors;
  float scale;
  float norm_eps;
};

enum {
  // columns of value heads that a block computes, as tiles of 16
  DDT_CUDA_GDN_VERIFY_TILES = 3,
  // Shared memory of a block per row, with two-byte inputs that are exact in bf16 and with others, and the most rows.
  DDT_CUDA_GDN_VERIFY_ROW_BYTES_BF16 = 1566,
  DDT_CUDA_GDN_VERIFY_ROW_BYTES = 2110,
  DDT_CUDA_GDN_VERIFY_MAX_ROWS_BF16 = 64,
  DDT_CUDA_GDN_VERIFY_MAX_ROWS = 48,
  // the ancestors that a chunk of nodes starts with
  DDT_CUDA_GDN_VERIFY_EXTRA_BYTES = 32,
  DDT_CUDA_GDN_VERIFY_SHARED_BYTES = 48 * 2110 + 32,
};

#endif
