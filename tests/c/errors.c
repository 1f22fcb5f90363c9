// SPDX-License-Identifier: Apache-2.0
// Bad input: a status, a message of this thread, and untouched outputs.
#include "check.h"

static tree_memory memory;
static float logits[NUM_REQS * 2 * 4];
static const int32_t root_tokens[NUM_REQS] = {1, 2};
static const int64_t root_positions[NUM_REQS] = {3, 4};

static ddt_tree_build_params good_build(ddt_tree *tree) {
  *tree = poisoned_tree(&memory);
  ddt_tree_build_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.logits = tensor_f32(logits, NUM_REQS, 2, 4);
  params.root_tokens = root_tokens;
  params.root_positions = root_positions;
  params.tree = tree;
  return params;
}

static void refused(ddt_status status, ddt_status want, const char *text) {
  char got[256];
  size_t needed = 0;
  CHECK(status == want);
  CHECK(ddt_last_error(got, sizeof got, &needed) == DDT_OK);
  CHECK(needed == strlen(got) + 1);
  if (strcmp(got, text) != 0) fprintf(stderr, "got  %s\nwant %s\n", got, text);
  CHECK(strcmp(got, text) == 0);
  CHECK(is_poisoned(&memory, sizeof memory));
}

static void contexts(void) {
  ddt_context *context = NULL;
  ddt_context_params params;
  memset(&params, 0, sizeof params);
  memset(&memory, 0x5a, sizeof memory);
  params.struct_size = sizeof params;
  refused(ddt_context_create(&params, &context), DDT_ABI_MISMATCH,
          "context_create: params.abi_version: got 0, want 1");
  params.abi_version = DDT_ABI_VERSION;
  params.device = 2;
  refused(ddt_context_create(&params, &context), DDT_INVALID_VALUE,
          "context_create: params.device: got 2, want 0 (CPU) or 1 (CUDA)");
  params.device = DDT_DEVICE_CPU;
  params.flags = 2;
  refused(ddt_context_create(&params, &context), DDT_UNSUPPORTED,
          "context_create: params.flags: got 0x2, want 0 or 0x1 (DDT_CONTEXT_PORTABLE_KERNELS)");
  refused(ddt_context_create(&params, NULL), DDT_NULL_POINTER,
          "context_create: out: got NULL, want a pointer");
  refused(ddt_context_create(NULL, &context), DDT_NULL_POINTER,
          "context_create: params: got NULL, want a pointer");
  CHECK(context == NULL);
}

static void build(ddt_context *context) {
  ddt_tree tree;
  ddt_tree_build_params params = good_build(&tree);
  refused(ddt_tree_build(NULL, &params, NULL), DDT_NULL_POINTER,
          "tree_build: context: got NULL, want a context of ddt_context_create");
  refused(ddt_tree_build(context, NULL, NULL), DDT_NULL_POINTER,
          "tree_build: params: got NULL, want a pointer");

  params = good_build(&tree);
  params.root_tokens = NULL;
  refused(ddt_tree_build(context, &params, NULL), DDT_NULL_POINTER,
          "tree_build: root_tokens: got NULL, want a pointer");

  params = good_build(&tree);
  params.logits.dtype = DDT_DTYPE_I32;
  refused(ddt_tree_build(context, &params, NULL), DDT_INVALID_DTYPE,
          "tree_build: logits dtype: got i32, want f32 or f16 or bf16");

  params = good_build(&tree);
  params.logits.strides[0] = INT64_MAX / 2;
  refused(ddt_tree_build(context, &params, NULL), DDT_INVALID_SHAPE,
          "tree_build: logits extent in memory: got shape [2, 2, 4] with strides "
          "[4611686018427387903, 4, 1], want less than 2^63 bytes");

  params = good_build(&tree);
  params.logits.shape[1] = -2;
  refused(ddt_tree_build(context, &params, NULL), DDT_INVALID_SHAPE,
          "tree_build: logits shape[1]: got -2, want >= 0");

  params = good_build(&tree);
  params.logits.data = (char *)params.logits.data + 2;
  CHECK(ddt_tree_build(context, &params, NULL) == DDT_MISALIGNED);
  CHECK(is_poisoned(&memory, sizeof memory));

  const int32_t budgets[NUM_REQS] = {1, 8};
  params = good_build(&tree);
  params.node_budgets = budgets;
  refused(ddt_tree_build(context, &params, NULL), DDT_INVALID_VALUE,
          "tree_build: node_budgets[1]: got 8, want -1..=7 (max_nodes - 1)");

  params = good_build(&tree);
  tree.max_nodes = 1000000;
  refused(ddt_tree_build(context, &params, NULL), DDT_INVALID_SHAPE,
          "tree_build: tree.max_nodes: got 1000000, want 1..=256");
}

static void mask(ddt_context *context) {
  const int32_t num_nodes[NUM_REQS] = {2, 3};
  int32_t parents[SLOTS] = {-1, 0};
  int32_t order[SLOTS];
  // nodes 1 and 2 of the second request are each other's parents
  const int32_t cycle[3] = {-1, 2, 1};
  memcpy(parents + MAX_NODES, cycle, sizeof cycle);
  memset(order, 0x5a, sizeof order);
  ddt_tree tree = poisoned_tree(&memory);
  ddt_tree_mask_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.num_reqs = NUM_REQS;
  params.max_nodes = MAX_NODES;
  params.num_nodes = num_nodes;
  params.parents = parents;
  params.order = order;
  params.tree = &tree;
  refused(ddt_tree_mask(context, &params, NULL), DDT_INVALID_VALUE,
          "tree_mask: request 1: parents[1]: got 2, want 0..=0 (a parent precedes its children)");
  CHECK(is_poisoned(order, sizeof order));
}

static void texts(ddt_context *context) {
  ddt_tree tree;
  ddt_tree_build_params params = good_build(&tree);
  params.flags = 1;
  refused(ddt_tree_build(context, &params, NULL), DDT_UNSUPPORTED,
          "tree_build: params.flags: got 0x1, want 0");
  char small[8];
  size_t needed = 0;
  CHECK(ddt_last_error(small, sizeof small, &needed) == DDT_OK);
  CHECK(strcmp(small, "tree_bu") == 0 && needed == 42);
  CHECK(ddt_last_error(NULL, 0, &needed) == DDT_OK && needed == 42);
  CHECK(ddt_last_error(NULL, 1, &needed) == DDT_NULL_POINTER);
  // a call that succeeds clears the text
  params.flags = 0;
  CHECK(ddt_tree_build(context, &params, NULL) == DDT_OK);
  CHECK(ddt_last_error(small, sizeof small, &needed) == DDT_OK);
  CHECK(strcmp(small, "") == 0 && needed == 1);
}

int main(void) {
  contexts();
  ddt_context *context = cpu_context();
  build(context);
  mask(context);
  texts(context);
  ddt_context_free(context);
  puts("errors: ok");
  return 0;
}
