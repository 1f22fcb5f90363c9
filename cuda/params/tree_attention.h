// SPDX-License-Identifier: Apache-2.0
//
// Parameters of the kernels of tree_attention: attend (one of several kernels), then combine.
#ifndef DDT_CUDA_PARAMS_TREE_ATTENTION_H
#define DDT_CUDA_PARAMS_TREE_ATTENTION_H

#include "common.h"

enum {
  // Most lines of a row tile: 8 warps of 16. A line is a query head of a KV head's group at a row.
  DDT_CUDA_TREE_ATTENTION_MAX_TILE_ROWS = 128,
  // Tokens of a KV tile of the mma.sync kernels, head dim 256 and less.
  DDT_CUDA_TREE_ATTENTION_TILE_TOKENS_256 = 32,
  DDT_CUDA_TREE_ATTENTION_TILE_TOKENS_128 = 64,
  // What a block size has to be a multiple of for the mma.sync kernels
  DDT_CUDA_TREE_ATTENTION_GRANULE = 16,
  // Fewest warps of their CTAs, which load more than they compute then
  DDT_CUDA_TREE_ATTENTION_MIN_WARPS = 4,
  // Most KV tiles in shared memory at a time, K and V counted separately.
  DDT_CUDA_TREE_ATTENTION_MAX_STAGES = 4,
  // Query tile and KV tiles: 128 lines of 256 bf16 and two tiles of 32 tokens.
  DDT_CUDA_TREE_ATTENTION_SHARED_BYTES = 98304,
  // The kernel that adds up partial results has none.
  DDT_CUDA_TREE_ATTENTION_COMBINE_SHARED_BYTES = 0,
  // Lines and tokens of a tile of the kernels for every dtype and stride.
  DDT_CUDA_TREE_ATTENTION_GENERIC_TILE_ROWS = 32,
  DDT_CUDA_TREE_ATTENTION_GENERIC_TILE_TOKENS = 32,
  // f32 tiles of queries, keys (rows padded by one) and values at head dim 256.
  DDT_CUDA_TREE_ATTENTION_GENERIC_SHARED_BYTES = 4 * 32 * (256 + 257 + 256),
  DDT_CUDA_TREE_ATTENTION_COMBINE_THREADS = 256,
};

// T = num_rows, R = tree.num_reqs, C = num_ctas.
struct ddt_cuda_tree_attention {
  // [T,Hq,Dh]
  struct ddt_cuda_view query;
  // [blocks,Hkv,block_size,Dh]
  struct ddt_cuda_view key_cache;
  struct ddt_cuda_view value_cache;
  // [R,max_blocks] i32
  struct ddt_cuda_view block_table;
  // [T,Hq,Dh] out
  struct ddt_cuda_view out;
  // [R + 1]
  const int32_t *query_start;
  // [R]
  const int32_t *seq_lens;
  // [R] or NULL
  const int32_t *prefix_rows;
  // num_nodes, ancestor_bits
  struct ddt_cuda_tree tree;

  // Workspace, see tree_attention.cuh: [C][2][tile_rows][2] of each line of a partial result, the base of its
  // weights (exponent of 2) and their sum
  float *partial_stats;
  // [C][2][tile_rows * Dh], lines and columns as in partial_offset
  float *partial_out;

  int32_t num_rows;
  int32_t num_heads;
  int32_t num_kv_heads;
  // query heads per KV head
  int32_t group;
  int32_t head_dim;
  int32_t num_blocks;
  int32_t block_size;
  int32_t max_blocks;

  // Lines of a row tile: a multiple of 16
  int32_t tile_rows;
  // Tokens of a KV tile
  int32_t tile_tokens;
  // CTAs of the attend kernel, and the fewest KV tiles that are worth a CTA
  int32_t num_ctas;
  int32_t min_tiles;
  // KV tiles in shared memory
  int32_t stages;

  // Scores to the base 2: softcap * tanh(product * score_scale), or product * score_scale if softcap is 0
  float score_scale;
  float softcap;

  // Threads of the combine kernel among which the partial results of a line are divided, per column
  int32_t combine_parts;
  // Whether two neighbouring elements of `out` can be written at once
  int32_t out_has_pairs;
  uint32_t reserved;
};

#endif
