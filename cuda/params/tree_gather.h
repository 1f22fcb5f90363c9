// SPDX-License-Identifier: Apache-2.0
#ifndef DDT_CUDA_PARAMS_TREE_GATHER_H
#define DDT_CUDA_PARAMS_TREE_GATHER_H

#include "common.h"

enum { DDT_CUDA_TREE_GATHER_THREADS = 256 };

// ddt_tree_gather: a block per gathered tree, and one for the trees after them.
struct ddt_cuda_tree_gather {
  struct ddt_cuda_tree source;
  struct ddt_cuda_tree tree;
  // [B] i32 or i64
  struct ddt_cuda_view tree_index;
  // [B + 1]
  const int32_t *query_start;
  // [T] and [axes][T] i64, absent = none
  struct ddt_cuda_view positions;
  struct ddt_cuda_view mrope_positions;
  // B
  int32_t num_trees;
  // T
  int32_t num_rows;
  int32_t num_axes;
  int32_t reserved;
};

#endif
