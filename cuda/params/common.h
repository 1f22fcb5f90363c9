// SPDX-License-Identifier: Apache-2.0
//
// What the parameter structs of all kernels share. C, and plain old data: nvcc compiles it, and
// bindgen turns it into rust/cuda/params.rs. Pointers are device pointers.
#ifndef DDT_CUDA_PARAMS_COMMON_H
#define DDT_CUDA_PARAMS_COMMON_H

#include <stdint.h>

// Element types; the numbers are DDT_DTYPE_* of ddtree.h.
enum ddt_cuda_dtype {
  DDT_CUDA_F32 = 1,
  DDT_CUDA_F16 = 2,
  DDT_CUDA_BF16 = 3,
  DDT_CUDA_I32 = 4,
  DDT_CUDA_I64 = 5,
  DDT_CUDA_U8 = 6,
};

enum { DDT_CUDA_MAX_NODES = 256, DDT_CUDA_MAX_DEPTH = 32 };

// A strided tensor; strides in elements, unused ones 0. An absent tensor has data NULL. Extents are
// in the parameters of each kernel.
struct ddt_cuda_view {
  void *data;
  int64_t strides[4];
  uint32_t dtype;
  uint32_t reserved;
};

// A batch of trees: the fields of ddt_tree of ddtree.h, NULL where the caller has none.
struct ddt_cuda_tree {
  int32_t num_reqs;
  int32_t max_nodes;
  int32_t max_depth;
  // 32-bit words of a row of ancestor_bits
  int32_t words;
  int32_t *num_nodes;
  int32_t *tokens;
  int32_t *parents;
  int32_t *depths;
  int32_t *first_child;
  int32_t *next_sibling;
  int32_t *subtree_end;
  uint32_t *ancestor_bits;
  int32_t *ancestors;
  int64_t *positions;
  int32_t *pop_ranks;
  uint32_t *flags;
};

#endif
