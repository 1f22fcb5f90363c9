// SPDX-License-Identifier: Apache-2.0
#ifndef DDT_CUDA_PARAMS_TREE_MASK_H
#define DDT_CUDA_PARAMS_TREE_MASK_H

#include "common.h"

// ddt_tree_mask: a block per request.
struct ddt_cuda_tree_mask {
  // [R]
  const int32_t *num_nodes;
  // [R][N], or NULL
  const int32_t *tokens;
  // [R][N]
  const int32_t *parents;
  // [R][N], or NULL
  const int32_t *priorities;
  // [R], or NULL
  const int64_t *root_positions;
  // out, [R][N], or NULL
  int32_t *order;
  struct ddt_cuda_tree tree;
};

#endif
