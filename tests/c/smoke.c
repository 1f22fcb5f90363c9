// SPDX-License-Identifier: Apache-2.0
// One round of the tree operations, as a C runtime would run it.
#include "check.h"

uint32_t abi_version_of_another_unit(void);

static void versions(void) {
  CHECK(ddt_abi_version() == DDT_ABI_VERSION);
  CHECK(abi_version_of_another_unit() == DDT_ABI_VERSION);
  CHECK(strncmp(ddt_build_info(), "ddtree/", 7) == 0);
  CHECK(strncmp(ddt_build_info() + 7, ddt_version(), strlen(ddt_version())) == 0);
  CHECK(strcmp(ddt_status_name(DDT_OK), "DDT_OK") == 0);
  CHECK(strcmp(ddt_status_name(-1), "DDT_STATUS_UNKNOWN") == 0);
}

// Request 0: two depths over a vocabulary of 4; request 1 is padding.
static void build_and_accept(ddt_context *context) {
  // ln of 6/8, 2/8 and of 4/8, 3/8, 1/8; a token that never comes
  float logits[NUM_REQS][2][4] = {{{-1.386294f, -0.287682f, -1e30f, -1e30f},
                                   {-0.693147f, -0.980829f, -2.079442f, -1e30f}}};
  const int32_t root_tokens[NUM_REQS] = {42, 0};
  const int64_t root_positions[NUM_REQS] = {1000, 0};
  const int32_t budgets[NUM_REQS] = {4, -1};
  tree_memory memory;
  ddt_tree tree = poisoned_tree(&memory);

  ddt_tree_build_params build;
  memset(&build, 0, sizeof build);
  build.struct_size = sizeof build;
  build.logits = tensor_f32(&logits[0][0][0], NUM_REQS, 2, 4);
  build.root_tokens = root_tokens;
  build.root_positions = root_positions;
  build.node_budgets = budgets;
  build.tree = &tree;
  size_t bytes = 1;
  CHECK(ddt_tree_build_workspace_size(context, &build, &bytes) == DDT_OK && bytes == 0);
  CHECK(ddt_tree_build(context, &build, NULL) == DDT_OK);

  // probabilities: 1 = 24/32, (1,0) = 12/32, (1,1) = 9/32, 0 = 8/32
  const int32_t tokens[MAX_NODES] = {42, 1, 0, 1, 0, -1, -1, -1};
  const int32_t parents[MAX_NODES] = {-1, 0, 1, 1, 0, -1, -1, -1};
  const int32_t pop_ranks[MAX_NODES] = {0, 1, 2, 3, 4, -1, -1, -1};
  const int32_t subtree_end[MAX_NODES] = {5, 4, 3, 4, 5, 0, 0, 0};
  const int64_t positions[MAX_NODES] = {1000, 1001, 1002, 1002, 1001, 0, 0, 0};
  const uint32_t bits[MAX_NODES] = {1, 3, 7, 11, 17, 0, 0, 0};
  CHECK(memory.num_nodes[0] == 5 && memory.num_nodes[1] == 0);
  CHECK(memory.flags[0] == 0 && memory.flags[1] == 0);
  CHECK(memcmp(memory.tokens, tokens, sizeof tokens) == 0);
  CHECK(memcmp(memory.parents, parents, sizeof parents) == 0);
  CHECK(memcmp(memory.pop_ranks, pop_ranks, sizeof pop_ranks) == 0);
  CHECK(memcmp(memory.subtree_end, subtree_end, sizeof subtree_end) == 0);
  CHECK(memcmp(memory.positions, positions, sizeof positions) == 0);
  CHECK(memcmp(memory.ancestor_bits, bits, sizeof bits) == 0);
  for (int i = 0; i < MAX_NODES; i++) {
    CHECK(memory.tokens[MAX_NODES + i] == -1 && memory.ancestor_bits[MAX_NODES + i] == 0);
  }

  // the target takes 1 after the root, 1 after that, then 3
  const int64_t node_tokens[5] = {1, 1, 0, 3, 0};
  const int32_t query_start[NUM_REQS + 1] = {0, 5, 5};
  int32_t num_accepted[NUM_REQS], accepted_nodes[NUM_REQS][MAX_DEPTH];
  int64_t output_tokens[NUM_REQS][MAX_DEPTH + 1];
  ddt_tree_accept_params accept;
  memset(&accept, 0, sizeof accept);
  accept.struct_size = sizeof accept;
  accept.tree = &tree;
  accept.query_start = query_start;
  accept.node_tokens = node_tokens;
  accept.num_accepted = num_accepted;
  accept.accepted_nodes = accepted_nodes[0];
  accept.output_tokens = output_tokens[0];
  CHECK(ddt_tree_accept(context, &accept, NULL) == DDT_OK);
  const int32_t nodes[NUM_REQS][MAX_DEPTH] = {{1, 3, -1}, {-1, -1, -1}};
  const int64_t output[NUM_REQS][MAX_DEPTH + 1] = {{1, 1, 3, -1}, {-1, -1, -1, -1}};
  CHECK(num_accepted[0] == 2 && num_accepted[1] == -1);
  CHECK(memcmp(accepted_nodes, nodes, sizeof nodes) == 0);
  CHECK(memcmp(output_tokens, output, sizeof output) == 0);

  // greedy, over the same choices as logits
  float rows[5][4] = {{0, 5, 0, 0}, {0, 2, 2, 1}, {0}, {-1, -2, -1, 0}, {0}};
  accept.node_tokens = NULL;
  accept.logits = tensor_f32(&rows[0][0], 5, 4, 1);
  accept.logits.ndim = 2;
  memset(output_tokens, 0x5a, sizeof output_tokens);
  CHECK(ddt_tree_accept(context, &accept, NULL) == DDT_OK);
  CHECK(memcmp(output_tokens, output, sizeof output) == 0);
}

static void lay_out(ddt_context *context) {
  // children of the root: 1 and 2; of 1: 3; the second request is a chain
  const int32_t num_nodes[NUM_REQS] = {4, 3};
  int32_t parents[SLOTS] = {-1, 0, 0, 1};
  const int32_t chain[3] = {-1, 0, 1};
  memcpy(parents + MAX_NODES, chain, sizeof chain);
  int32_t order[SLOTS];
  tree_memory memory;
  ddt_tree tree = poisoned_tree(&memory);
  ddt_tree_mask_params mask;
  memset(&mask, 0, sizeof mask);
  mask.struct_size = sizeof mask;
  mask.num_reqs = NUM_REQS;
  mask.max_nodes = MAX_NODES;
  mask.num_nodes = num_nodes;
  mask.parents = parents;
  mask.order = order;
  mask.tree = &tree;
  CHECK(ddt_tree_mask(context, &mask, NULL) == DDT_OK);
  const int32_t want_order[MAX_NODES] = {0, 1, 3, 2, -1, -1, -1, -1};
  const int32_t want_parents[MAX_NODES] = {-1, 0, 1, 0, -1, -1, -1, -1};
  CHECK(memcmp(order, want_order, sizeof want_order) == 0);
  CHECK(memcmp(memory.parents, want_parents, sizeof want_parents) == 0);
  CHECK(memory.depths[MAX_NODES + 2] == 2 && memory.positions[MAX_NODES + 2] == 2);
}

int main(void) {
  versions();
  ddt_context *context = cpu_context();
  build_and_accept(context);
  lay_out(context);
  ddt_context_free(context);
  ddt_context_free(NULL);
  puts("smoke: ok");
  return 0;
}
