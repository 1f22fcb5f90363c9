// SPDX-License-Identifier: Apache-2.0
// Programs compiled against an older and against a newer header.
#include "check.h"

// ddt_tree as it might have been: nothing after depths.
typedef struct old_tree {
  uint32_t struct_size;
  int32_t num_reqs, max_nodes, max_depth;
  int32_t *num_nodes, *tokens, *parents, *depths;
} old_tree;

// The parameters as they may become.
typedef struct new_params {
  ddt_tree_build_params known;
  const int32_t *new_array;
  uint32_t new_number, new_reserved;
} new_params;

static float logits[NUM_REQS * 2 * 4];
static const int32_t root_tokens[NUM_REQS] = {1, 2};
static const int64_t root_positions[NUM_REQS] = {3, 4};

int main(void) {
  ddt_context *context = cpu_context();
  tree_memory memory;
  ddt_tree tree = poisoned_tree(&memory);
  new_params params;
  memset(&params, 0, sizeof params);
  params.known.struct_size = sizeof params.known;
  params.known.logits = tensor_f32(logits, NUM_REQS, 2, 4);
  params.known.root_tokens = root_tokens;
  params.known.root_positions = root_positions;

  // an older tree: the fields it does not have are not written
  old_tree old = {sizeof(old_tree), NUM_REQS, MAX_NODES, MAX_DEPTH,
                  memory.num_nodes, memory.tokens, memory.parents, memory.depths};
  params.known.tree = (ddt_tree *)(void *)&old;
  CHECK(ddt_tree_build(context, &params.known, NULL) == DDT_OK);
  CHECK(memory.num_nodes[0] == MAX_NODES && memory.depths[0] == 0);
  CHECK(is_poisoned(memory.first_child, sizeof memory.first_child));
  CHECK(is_poisoned(memory.flags, sizeof memory.flags));

  // a newer caller that does not use what is new
  tree = poisoned_tree(&memory);
  params.known.tree = &tree;
  params.known.struct_size = sizeof params;
  CHECK(ddt_tree_build(context, &params.known, NULL) == DDT_OK);
  CHECK(memory.flags[1] == 0);

  // a newer caller that does
  tree = poisoned_tree(&memory);
  params.new_number = 1;
  CHECK(ddt_tree_build(context, &params.known, NULL) == DDT_UNSUPPORTED);
  CHECK(is_poisoned(&memory, sizeof memory));
  params.new_number = 0;

  // an older caller, whose parameters ended before tree_index: what is behind them is not read
  memset(&params.known.tree_index, 0xff, sizeof params.known.tree_index);
  tree = poisoned_tree(&memory);
  const uint32_t before = offsetof(ddt_tree_build_params, tree_index);
  params.known.struct_size = before;
  CHECK(ddt_tree_build(context, &params.known, NULL) == DDT_OK);
  CHECK(memory.flags[1] == 0);
  memset(&params.known.tree_index, 0, sizeof params.known.tree_index);
  tree = poisoned_tree(&memory);

  // no version has structs of these sizes
  const uint32_t sizes[] = {0, 4, before - 8, sizeof params.known + 4, UINT32_MAX};
  for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
    params.known.struct_size = sizes[i];
    CHECK(ddt_tree_build(context, &params.known, NULL) == DDT_INVALID_STRUCT);
    CHECK(is_poisoned(&memory, sizeof memory));
  }
  ddt_context_free(context);
  puts("struct_size: ok");
  return 0;
}
