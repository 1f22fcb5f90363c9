// SPDX-License-Identifier: Apache-2.0
// What the C programs share. Valid as C11 and as C++17.
#ifndef DDTREE_TESTS_CHECK_H
#define DDTREE_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ddtree.h"
// a second inclusion must be harmless
#include "ddtree.h"

#define CHECK(condition)                                                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      char text[512] = "";                                                                    \
      if (ddt_last_error(text, sizeof text, NULL) != DDT_OK) text[0] = 0;                     \
      fprintf(stderr, "%s:%d: failed: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
              text);                                                                          \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)

enum { MAX_NODES = 8, MAX_DEPTH = 3, NUM_REQS = 2, WORDS = 1, SLOTS = NUM_REQS * MAX_NODES };

// Memory of a ddt_tree.
typedef struct tree_memory {
  int32_t num_nodes[NUM_REQS];
  int32_t tokens[SLOTS], parents[SLOTS], depths[SLOTS], first_child[SLOTS], next_sibling[SLOTS];
  int32_t subtree_end[SLOTS], pop_ranks[SLOTS];
  uint32_t ancestor_bits[SLOTS * WORDS];
  int32_t ancestors[SLOTS * (MAX_DEPTH + 1)];
  int64_t positions[SLOTS];
  uint32_t flags[NUM_REQS];
} tree_memory;

static inline ddt_tree poisoned_tree(tree_memory *memory) {
  memset(memory, 0x5a, sizeof *memory);
  ddt_tree tree;
  memset(&tree, 0, sizeof tree);
  tree.struct_size = sizeof tree;
  tree.num_reqs = NUM_REQS;
  tree.max_nodes = MAX_NODES;
  tree.max_depth = MAX_DEPTH;
  tree.num_nodes = memory->num_nodes;
  tree.tokens = memory->tokens;
  tree.parents = memory->parents;
  tree.depths = memory->depths;
  tree.first_child = memory->first_child;
  tree.next_sibling = memory->next_sibling;
  tree.subtree_end = memory->subtree_end;
  tree.ancestor_bits = memory->ancestor_bits;
  tree.ancestors = memory->ancestors;
  tree.positions = memory->positions;
  tree.pop_ranks = memory->pop_ranks;
  tree.flags = memory->flags;
  return tree;
}

static inline int is_poisoned(const void *memory, size_t size) {
  const unsigned char *bytes = (const unsigned char *)memory;
  for (size_t i = 0; i < size; i++) {
    if (bytes[i] != 0x5a) return 0;
  }
  return 1;
}

// A row-major f32 tensor of three dimensions.
static inline ddt_tensor tensor_f32(float *data, int64_t a, int64_t b, int64_t c) {
  ddt_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.dtype = DDT_DTYPE_F32;
  tensor.ndim = 3;
  tensor.shape[0] = a;
  tensor.shape[1] = b;
  tensor.shape[2] = c;
  tensor.strides[0] = b * c;
  tensor.strides[1] = c;
  tensor.strides[2] = 1;
  return tensor;
}

static inline ddt_context *cpu_context(void) {
  ddt_context_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.abi_version = DDT_ABI_VERSION;
  ddt_context *context = NULL;
  CHECK(ddt_context_create(&params, &context) == DDT_OK);
  return context;
}

#endif
