// SPDX-License-Identifier: Apache-2.0
#ifndef DDT_CUDA_PARAMS_TREE_BUILD_H
#define DDT_CUDA_PARAMS_TREE_BUILD_H

#include "common.h"

enum {
  // ids of a chunk and of a block, as rust/scores.rs specifies them
  DDT_CUDA_TREE_BUILD_CHUNK = 4096,
  DDT_CUDA_TREE_BUILD_BLOCK = 64,
  // threads of ddt_tree_build_select that look for candidates; one warp more is launched
  DDT_CUDA_TREE_BUILD_SELECT_THREADS = 512,
  // the child lists of all depths at the largest budget
  DDT_CUDA_TREE_BUILD_SELECT_SHARED_BYTES = DDT_CUDA_MAX_DEPTH * DDT_CUDA_MAX_NODES * 8,
  DDT_CUDA_TREE_BUILD_SEARCH_SHARED_BYTES = DDT_CUDA_TREE_BUILD_SELECT_SHARED_BYTES,
  // keys of a candidate list while it is sorted
  DDT_CUDA_TREE_BUILD_LISTS_SHARED_BYTES = 4096 * (8 + 4),
};

// What a child list in the workspace says about itself.
struct ddt_cuda_child_list {
  int32_t length;
  // it has fewer entries than the tree could use, only because the candidates end
  int32_t is_cut;
  int32_t has_nonfinite;
  int32_t reserved;
};

// ddt_tree_build_summarize and ddt_tree_build_select (from logits), or ddt_tree_build_lists and
// ddt_tree_build_search (from a candidate lattice). Rows are the depths that a tree can have.
struct ddt_cuda_tree_build {
  // [R][L][V]
  struct ddt_cuda_view logits;
  // [R][L][K], [R][L][K], [R][L][K][K]; one of the last two may be absent
  struct ddt_cuda_view candidate_tokens;
  struct ddt_cuda_view candidate_scores;
  struct ddt_cuda_view transition_scores;
  int32_t vocab;
  // chunks and blocks of the vocabulary
  int32_t num_chunks;
  int32_t num_blocks;
  // K
  int32_t num_candidates;
  // depths that any tree of this batch can have
  int32_t num_rows;
  // 0 = as many as the budget can use
  int32_t max_candidates;
  // entries that each child list in the workspace has room for
  int32_t list_capacity;
  // child lists of each depth but the first, which has one
  int32_t lists_per_row;
  int32_t max_stop_tokens;
  // 16-byte loads of logits; lists are copied to shared memory
  int32_t vector;
  int32_t lists_in_shared;
  int32_t reserved;
  // [B] i32 or i64, absent: B = R, and each request writes its own tree. What is [R] below is [B].
  struct ddt_cuda_view tree_index;
  // [L], or NULL
  const float *depth_scales;
  // [R]; all but the first two may be NULL
  const int32_t *root_tokens;
  const int64_t *root_positions;
  const int32_t *node_budgets;
  const int32_t *depth_caps;
  const int32_t *candidate_caps;
  const int32_t *spine_depths;
  // [R][max_stop_tokens]
  const int32_t *stop_tokens;
  const int32_t *stop_min_depths;
  // both or neither
  const int64_t *seeds;
  const float *temperatures;
  // workspace: [R] rows that are done
  uint32_t *arrived;
  // workspace: [R][num_rows][num_chunks] largest usable score, sum of exponentials, usable scores;
  // the sign bit of the last says that a score was NaN or +inf
  float *chunk_max;
  float *chunk_sum;
  uint32_t *chunk_usable;
  // workspace: [R][num_rows][num_blocks] largest usable score
  float *block_max;
  // workspace: [R][lists]
  struct ddt_cuda_child_list *lists;
  // workspace: [R][lists][list_capacity + 1] keys as rust/scores.rs makes them, best first, then
  // one of all ones
  uint64_t *keys;
  // workspace: [R][lists][list_capacity + 1] column of each entry in the lattice
  uint16_t *columns;
  struct ddt_cuda_tree tree;
};

#endif
