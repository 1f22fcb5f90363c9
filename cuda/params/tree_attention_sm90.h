// SPDX-License-Identifier: Apache-2.0
//
// Parameters of the Hopper kernels of tree_attention.
#ifndef DDT_CUDA_PARAMS_TREE_ATTENTION_SM90_H
#define DDT_CUDA_PARAMS_TREE_ATTENTION_SM90_H

#include "tree_attention.h"

enum {
  // Tokens of a KV tile.
  DDT_CUDA_TREE_ATTENTION_SM90_TILE_TOKENS = 64,
  // What is copied at a time: all columns, in panels, of so many keys or values. Pages must hold a multiple of both.
  DDT_CUDA_TREE_ATTENTION_SM90_PANEL_COLUMNS = 64,
  DDT_CUDA_TREE_ATTENTION_SM90_KEY_BOX_TOKENS = 8,
  DDT_CUDA_TREE_ATTENTION_SM90_VALUE_BOX_TOKENS = 16,
  DDT_CUDA_TREE_ATTENTION_SM90_SHARED_BYTES = 227 * 1024,
};

// A tensor map, as cuTensorMapEncodeTiled writes it.
struct ddt_cuda_tensor_map {
  uint64_t words[16];
} __attribute__((aligned(64)));

struct ddt_cuda_tree_attention_sm90 {
  // Of the caches: dimensions [PANEL_COLUMNS, block_size, Dh / PANEL_COLUMNS, Hkv, blocks], 128-byte swizzle, boxes of
  // BOX_TOKENS tokens and all columns, zeros outside.
  struct ddt_cuda_tensor_map key_map;
  struct ddt_cuda_tensor_map value_map;
  // Row tiles of at most 128 lines and KV tiles of TILE_TOKENS; `stages` is not read.
  struct ddt_cuda_tree_attention attention;
};

#endif
