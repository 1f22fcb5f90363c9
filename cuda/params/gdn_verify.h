// SPDX-License-Identifier: Apache-2.0
#ifndef DDT_CUDA_PARAMS_GDN_VERIFY_H
#define DDT_CUDA_PARAMS_GDN_VERIFY_H

#include "common.h"

// What can be accessed several elements at a time, and what is worth a prefetch.
enum ddt_cuda_gdn_verify_flags {
  // ssm_state: 16 bytes of keys
  DDT_CUDA_GDN_VERIFY_STATE = 1,
  // mixed_qkv: 4 channels
  DDT_CUDA_GDN_VERIFY_ROWS = 2,
  // stash_qkv: 4 channels
  DDT_CUDA_GDN_VERIFY_STASH = 4,
  // conv_weight: the 4 taps of a channel
  DDT_CUDA_GDN_VERIFY_WEIGHT = 8,
  // conv_state: 4 channels
  DDT_CUDA_GDN_VERIFY_WINDOW = 16,
  // out: 4 elements of a head
  DDT_CUDA_GDN_VERIFY_OUT = 32,
  // the states of all requests fit into L2
  DDT_CUDA_GDN_VERIFY_PREFETCH = 64,
};

// Both kernels of the operation: "prepare" convolves, "solve" multiplies with the state.
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
  // Workspace. Queries and keys before their norm as sums of bf16 parts, one if that is the type
  // of mixed_qkv, else two: [parts][T][2 * Hk][128].
  void *heads;
  // [T][Hv][128] values, type of mixed_qkv
  void *values;
  // [T][2 * Hk] f32 factors that complete queries and keys
  float *norms;
  // [T][3][Hv] f32: log decay, beta, decay since the state
  float *gates;
  // slots that both states have
  int64_t num_slots;
  // T
  int32_t num_rows;
  int32_t num_k_heads;
  int32_t num_v_heads;
  // blocks per key head of a request in "solve"
  int32_t num_slices;
  // rows that the shared memory of "solve" has room for, a multiple of 16
  int32_t row_capacity;
  // DDT_CUDA_GDN_VERIFY_* bits
  uint32_t flags;
  float scale;
  float norm_eps;
};

enum {
  DDT_CUDA_GDN_VERIFY_PREPARE_THREADS = 256,
  // nodes of a block of "prepare"
  DDT_CUDA_GDN_VERIFY_PREPARE_NODES = 16,
  // columns of value heads that a block of "solve" computes, as tiles of 16
  DDT_CUDA_GDN_VERIFY_TILES = 3,
  // Shared memory of a block of "solve" per row with one part and with two, and the most rows.
  DDT_CUDA_GDN_VERIFY_ROW_BYTES_BF16 = 1566,
  DDT_CUDA_GDN_VERIFY_ROW_BYTES = 2110,
  DDT_CUDA_GDN_VERIFY_MAX_ROWS_BF16 = 64,
  DDT_CUDA_GDN_VERIFY_MAX_ROWS = 48,
  // and once: the ancestors that a chunk of nodes starts with
  DDT_CUDA_GDN_VERIFY_EXTRA_BYTES = 32,
  DDT_CUDA_GDN_VERIFY_SHARED_BYTES = 48 * 2110 + 32,
};

#endif
