// SPDX-License-Identifier: Apache-2.0
//
// Parameters of the Hopper kernels of tree_attention.
#ifndef DDT_CUDA_PARAMS_TREE_ATTENTION_SM90_H
#define DDT_CUDA_PARAMS_TREE_ATTENTION_SM90_H

#include "tree_attention.h"

enum {
  // Tokens of a KV tile, and of one copy: pages must hold a multiple of the latter.
  DDT_CUDA_TREE_ATTENTION_SM90_TILE_TOKENS = 64,
  DDT_CUDA_TREE_ATTENTION_SM90_BOX_TOKENS = 16,
  // Columns of one copy.
  DDT_CUDA_TREE_ATTENTION_SM90_BOX_COLUMNS = 64,
  DDT_CUDA_TREE_ATTENTION_SM90_SHARED_BYTES = 227 * 1024,
};

// A tensor map, as cuTensorMapEncodeTiled writes it.
struct ddt_cuda_tensor_map {
  uint64_t words[16];
} __attribute__((aligned(64)));

struct ddt_cuda_tree_attention_sm90 {
  // Of the caches: dimensions [Dh, block_size, Hkv, blocks], 128-byte swizzle, boxes of BOX_COLUMNS columns
  // and BOX_TOKENS tokens, zeros outside.
  struct ddt_cuda_tensor_map key_map;
  struct ddt_cuda_tensor_map value_map;
  // Row tiles of at most 128 lines and KV tiles of TILE_TOKENS; `stages` is not read.
  struct ddt_cuda_tree_attention attention;
};

#endif
