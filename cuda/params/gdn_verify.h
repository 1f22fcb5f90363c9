// SPDX-License-Identifier: Apache-2.0
#ifndef DDT_CUDA_PARAMS_GDN_VERIFY_H
#define DDT_CUDA_PARAMS_GDN_VERIFY_H

#include "common.h"

// What can be accessed several elements at a time.
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
  // tiles of 16 value columns per block of "solve" for small trees
  int32_t block_tiles;
  // rows that the shared memory of "solve" has room for, a multiple of 8
  int32_t row_capacity;
  // DDT_CUDA_GDN_VERIFY_* bits
  uint32_t flags;
  float scale;
  float norm_eps;
};

enum {
  DDT_CUDA_GDN_VERIFY_PREPARE_THREADS = 128,
  // nodes of a block of "prepare"
  DDT_CUDA_GDN_VERIFY_PREPARE_NODES = 8,
  // value heads of a block of "prepare" that computes gates
  DDT_CUDA_GDN_VERIFY_GATE_HEADS = 16,
  // columns of value heads that a block of "solve" computes, as tiles of 16; for small trees the
  // most value heads per key head
  DDT_CUDA_GDN_VERIFY_TILES = 3,
  // "solve" for small trees: the most nodes, and warps, each with one tile at a time
  DDT_CUDA_GDN_VERIFY_SMALL_NODES = 16,
  DDT_CUDA_GDN_VERIFY_SMALL_WARPS = 8,
  // up to so many nodes a tile has two warps instead of four
  DDT_CUDA_GDN_VERIFY_MEDIUM_NODES = 32,
  // Shared memory of a block of "solve" per row with one part and with two, and the most rows.
  DDT_CUDA_GDN_VERIFY_ROW_BYTES_BF16 = 1165,
  DDT_CUDA_GDN_VERIFY_ROW_BYTES = 1709,
  DDT_CUDA_GDN_VERIFY_MAX_ROWS_BF16 = 64,
  DDT_CUDA_GDN_VERIFY_MAX_ROWS = 40,
  // per tile
  DDT_CUDA_GDN_VERIFY_TILE_BYTES = 8192,
  // and once: the ancestors that a chunk of nodes starts with
  DDT_CUDA_GDN_VERIFY_EXTRA_BYTES = 32,
  DDT_CUDA_GDN_VERIFY_SHARED_BYTES = 64 * 1165 + 3 * 8192 + 32,
};

#endif
