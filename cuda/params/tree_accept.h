// SPDX-License-Identifier: Apache-2.0
#ifndef DDT_CUDA_PARAMS_TREE_ACCEPT_H
#define DDT_CUDA_PARAMS_TREE_ACCEPT_H

#include "common.h"

enum {
  DDT_CUDA_TREE_ACCEPT_CHOOSE_THREADS = 256,
  // blocks of "choose" that a multiprocessor runs at the same time
  DDT_CUDA_TREE_ACCEPT_BLOCKS_PER_SM = 4,
  // one thread per node
  DDT_CUDA_TREE_ACCEPT_WALK_THREADS = DDT_CUDA_MAX_NODES,
  // bytes of logits that one load brings to a thread
  DDT_CUDA_TREE_ACCEPT_LOAD_BYTES = 16,
};

// Both kernels of the operation: "choose" finds the best token of each part of a node's logits,
// "walk" that of each node, and follows the choices from the root.
struct ddt_cuda_tree_accept {
  struct ddt_cuda_tree tree;
  // [R + 1]
  const int32_t *query_start;
  // [T,V]; absent: node_tokens
  struct ddt_cuda_view logits;
  // [T], NULL: logits
  const int64_t *node_tokens;
  // [R], NULL = 0 everywhere
  const float *temperatures;
  // [R], NULL without temperatures
  const int64_t *seeds;
  // [R]
  int32_t *num_accepted;
  // [R][D]
  int32_t *accepted_nodes;
  // [R][D + 1]
  int64_t *output_tokens;
  // [R][D + 1], NULL = none
  int32_t *accepted_rows;
  // [R], NULL = none
  int64_t *next_positions;
  // [R], NULL = none
  int32_t *num_rejected;
  // [T][num_splits] workspace: the best token of each part, as the kernels encode it
  uint64_t *partials;
  // T
  int32_t num_rows;
  // V
  int32_t vocab;
  // parts of a row of logits, and tokens of each but the last
  int32_t num_splits;
  int32_t split_tokens;
};

#endif
