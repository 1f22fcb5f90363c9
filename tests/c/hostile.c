// SPDX-License-Identifier: Apache-2.0
// Eight threads on one context, a fork after the library was used, and trees that are none: a
// status, and nothing written around the outputs. Inputs end where their malloc ends, so that
// valgrind and a sanitizer see a read behind them.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { THREADS = 8, DEPTHS = 3, VOCAB = 50, LOOPS = 20, CANARY = 64 };

static void *copy_of(const void *from, size_t size) {
  void *to = malloc(size);
  CHECK(to != NULL);
  return memcpy(to, from, size);
}

// ---- threads and processes

typedef struct job {
  ddt_context *context;
  unsigned seed;
  tree_memory memory;
} job;

// A batch of trees that depends on the seed alone.
static void build(job *it) {
  float *logits = (float *)malloc(sizeof(float) * NUM_REQS * DEPTHS * VOCAB);
  CHECK(logits != NULL);
  uint32_t state = it->seed;
  for (int i = 0; i < NUM_REQS * DEPTHS * VOCAB; i++) {
    state = state * 1664525u + 1013904223u;
    logits[i] = (float)(state >> 8) / (1 << 22);
  }
  const int32_t root_tokens[NUM_REQS] = {1, 2};
  const int64_t root_positions[NUM_REQS] = {3, 4};
  ddt_tree tree = poisoned_tree(&it->memory);
  ddt_tree_build_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.logits = tensor_f32(logits, NUM_REQS, DEPTHS, VOCAB);
  params.root_tokens = root_tokens;
  params.root_positions = root_positions;
  params.tree = &tree;
  CHECK(ddt_tree_build(it->context, &params, NULL) == DDT_OK);
  // every thread has its own message
  params.flags = it->seed;
  CHECK(ddt_tree_build(it->context, &params, NULL) == DDT_UNSUPPORTED);
  char text[128], want[128];
  snprintf(want, sizeof want, "tree_build: params.flags: got 0x%x, want 0", it->seed);
  CHECK(ddt_last_error(text, sizeof text, NULL) == DDT_OK);
  CHECK(strcmp(text, want) == 0);
  free(logits);
}

static void *in_thread(void *argument) {
  job *it = (job *)argument;
  for (int i = 0; i < LOOPS; i++) build(it);
  return NULL;
}

static void threads_and_fork(ddt_context *context) {
  static job jobs[THREADS], alone;
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++) {
    jobs[i].context = context;
    jobs[i].seed = (unsigned)i + 1;
    CHECK(pthread_create(&threads[i], NULL, in_thread, &jobs[i]) == 0);
  }
  for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  for (int i = 0; i < THREADS; i++) {
    alone.context = context;
    alone.seed = jobs[i].seed;
    build(&alone);
    CHECK(memcmp(&alone.memory, &jobs[i].memory, sizeof alone.memory) == 0);
  }

  // a child uses the parent's context, makes its own, and sees the parent's last message
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    char text[128];
    CHECK(ddt_last_error(text, sizeof text, NULL) == DDT_OK && strstr(text, "got 0x8"));
    build(&alone);
    ddt_context *own = cpu_context();
    alone.context = own;
    build(&alone);
    ddt_context_free(own);
    CHECK(memcmp(&alone.memory, &jobs[THREADS - 1].memory, sizeof alone.memory) == 0);
    _exit(0);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// ---- outputs between canaries

typedef struct guarded {
  unsigned char *block;
  size_t size;
} guarded;

static guarded guarded_outputs[32];
static int num_guarded;

static void *output(size_t size) {
  unsigned char *block = (unsigned char *)malloc(size + 2 * CANARY);
  CHECK(block != NULL && num_guarded < 32);
  memset(block, 0x5a, size + 2 * CANARY);
  guarded_outputs[num_guarded].block = block;
  guarded_outputs[num_guarded++].size = size;
  return block + CANARY;
}

// Checks all canaries, and after a call that failed the outputs too; forgets them.
static void check_outputs(ddt_status status) {
  while (num_guarded > 0) {
    guarded it = guarded_outputs[--num_guarded];
    CHECK(is_poisoned(it.block, CANARY));
    CHECK(is_poisoned(it.block + CANARY + it.size, CANARY));
    if (status != DDT_OK) CHECK(is_poisoned(it.block, it.size + 2 * CANARY));
    free(it.block);
  }
}

static ddt_tree tree_between_canaries(int num_reqs, int max_nodes, int max_depth) {
  ddt_tree tree;
  memset(&tree, 0, sizeof tree);
  tree.struct_size = sizeof tree;
  tree.num_reqs = num_reqs;
  tree.max_nodes = max_nodes;
  tree.max_depth = max_depth;
  size_t slots = (size_t)num_reqs * (size_t)max_nodes, words = ((size_t)max_nodes + 31) / 32;
  tree.num_nodes = (int32_t *)output(4 * (size_t)num_reqs);
  tree.tokens = (int32_t *)output(4 * slots);
  tree.parents = (int32_t *)output(4 * slots);
  tree.depths = (int32_t *)output(4 * slots);
  tree.first_child = (int32_t *)output(4 * slots);
  tree.next_sibling = (int32_t *)output(4 * slots);
  tree.subtree_end = (int32_t *)output(4 * slots);
  tree.pop_ranks = (int32_t *)output(4 * slots);
  tree.positions = (int64_t *)output(8 * slots);
  tree.ancestor_bits = (uint32_t *)output(4 * slots * words);
  tree.ancestors = (int32_t *)output(4 * slots * ((size_t)max_depth + 1));
  tree.flags = (uint32_t *)output(4 * (size_t)num_reqs);
  return tree;
}

static ddt_status lay_out(ddt_context *context, int max_nodes, int max_depth, int32_t count, const int32_t *parents) {
  int32_t *counts = (int32_t *)copy_of(&count, sizeof count);
  int32_t *links = (int32_t *)copy_of(parents, sizeof *parents * (size_t)max_nodes);
  ddt_tree tree = tree_between_canaries(1, max_nodes, max_depth);
  ddt_tree_mask_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.num_reqs = 1;
  params.max_nodes = max_nodes;
  params.num_nodes = counts;
  params.parents = links;
  params.order = (int32_t *)output(4 * (size_t)max_nodes);
  params.tree = &tree;
  ddt_status status = ddt_tree_mask(context, &params, NULL);
  check_outputs(status);
  free(counts);
  free(links);
  return status;
}

static void trees(ddt_context *context) {
  int32_t parents[256];
  // the deepest chain there may be, one level more, and the widest tree
  for (int i = 0; i < 256; i++) parents[i] = i - 1;
  CHECK(lay_out(context, 256, 32, 33, parents) == DDT_OK);
  CHECK(lay_out(context, 256, 32, 34, parents) == DDT_INVALID_VALUE);
  CHECK(lay_out(context, 256, 32, 256, parents) == DDT_INVALID_VALUE);
  CHECK(lay_out(context, 256, 0, 2, parents) == DDT_INVALID_VALUE);
  for (int i = 1; i < 256; i++) parents[i] = 0;
  CHECK(lay_out(context, 256, 1, 256, parents) == DDT_OK);
  // counts that are not there
  const int32_t counts[] = {-1, 257, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
    CHECK(lay_out(context, 256, 1, counts[i], parents) == DDT_INVALID_VALUE);
  }
  // a node of its own child, of itself, of nobody, of nothing that exists
  const int32_t wrong[] = {100, 200, -1, 256, INT32_MAX, INT32_MIN};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    parents[100] = wrong[i];
    CHECK(lay_out(context, 256, 32, 256, parents) == DDT_INVALID_VALUE);
    // behind the tree it does not matter
    CHECK(lay_out(context, 256, 32, 100, parents) == DDT_OK);
  }
}

// Walks a tree whose links are given: 8 nodes, each choosing token 0, which every node has.
static ddt_status walk(ddt_context *context, const int32_t *first_child, const int32_t *next_sibling) {
  const int32_t count = MAX_NODES, start[2] = {0, MAX_NODES}, tokens[MAX_NODES] = {0};
  const int64_t choices[MAX_NODES] = {0};
  ddt_tree tree;
  memset(&tree, 0, sizeof tree);
  tree.struct_size = sizeof tree;
  tree.num_reqs = 1;
  tree.max_nodes = MAX_NODES;
  tree.max_depth = MAX_DEPTH;
  tree.num_nodes = (int32_t *)copy_of(&count, sizeof count);
  tree.tokens = (int32_t *)copy_of(tokens, sizeof tokens);
  tree.first_child = (int32_t *)copy_of(first_child, sizeof tokens);
  tree.next_sibling = (int32_t *)copy_of(next_sibling, sizeof tokens);
  ddt_tree_accept_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.tree = &tree;
  params.query_start = (int32_t *)copy_of(start, sizeof start);
  params.node_tokens = (int64_t *)copy_of(choices, sizeof choices);
  params.num_accepted = (int32_t *)output(4);
  params.accepted_nodes = (int32_t *)output(4 * MAX_DEPTH);
  params.output_tokens = (int64_t *)output(8 * (MAX_DEPTH + 1));
  ddt_status status = ddt_tree_accept(context, &params, NULL);
  check_outputs(status);
  free(tree.num_nodes);
  free(tree.tokens);
  free(tree.first_child);
  free(tree.next_sibling);
  free((void *)params.query_start);
  free((void *)params.node_tokens);
  return status;
}

static void links(ddt_context *context) {
  const int32_t none[MAX_NODES] = {-1, -1, -1, -1, -1, -1, -1, -1};
  int32_t child[MAX_NODES] = {1, 2, -1, -1, -1, -1, -1, -1};
  CHECK(walk(context, child, none) == DDT_OK);
  child[2] = 0;  // a cycle
  CHECK(walk(context, child, none) == DDT_INVALID_VALUE);
  child[2] = 2;
  CHECK(walk(context, child, none) == DDT_INVALID_VALUE);
  child[2] = 3;
  child[3] = 4;  // deeper than MAX_DEPTH
  CHECK(walk(context, child, none) == DDT_INVALID_VALUE);
  child[2] = INT32_MAX;  // a node that was cut off
  CHECK(walk(context, child, none) == DDT_OK);
}

static ddt_status build_from(ddt_context *context, float fill, int max_nodes, int64_t stride, int32_t budget) {
  enum { L = 4, V = 16 };
  float *logits = (float *)malloc(sizeof(float) * L * V);
  CHECK(logits != NULL);
  // one token per depth has a score like any other
  for (int i = 0; i < L * V; i++) logits[i] = i % V == 3 ? 1.0f : fill;
  const int32_t root_token = 1;
  const int64_t root_position = 1;
  ddt_tree tree = tree_between_canaries(1, max_nodes, L);
  ddt_tree_build_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.logits = tensor_f32(logits, 1, L, V);
  params.logits.strides[1] = stride;
  params.root_tokens = &root_token;
  params.root_positions = &root_position;
  params.node_budgets = &budget;
  params.tree = &tree;
  ddt_status status = ddt_tree_build(context, &params, NULL);
  if (status == DDT_OK) {
    CHECK(tree.num_nodes[0] >= 1 && tree.num_nodes[0] <= max_nodes);
    CHECK(tree.num_nodes[0] == 1 || tree.tokens[1] == (fill > 1 && isfinite(fill) ? 0 : 3));
  }
  check_outputs(status);
  free(logits);
  return status;
}

static void scores(ddt_context *context) {
  const float fills[] = {NAN, INFINITY, -INFINITY, 1e-40f, -1e-45f, 3e38f, -3e38f, 0.0f, -0.0f};
  for (size_t i = 0; i < sizeof fills / sizeof fills[0]; i++) {
    CHECK(build_from(context, fills[i], 256, 16, 255) == DDT_OK);
    CHECK(build_from(context, fills[i], 1, 16, 0) == DDT_OK);
  }
  CHECK(build_from(context, 0, 8, 16, 8) == DDT_INVALID_VALUE);
  CHECK(build_from(context, 0, 8, 16, INT32_MAX) == DDT_INVALID_VALUE);
  CHECK(build_from(context, 0, 8, 16, INT32_MIN) == DDT_INVALID_VALUE);
  const int64_t strides[] = {-1, -16, INT64_MIN, INT64_MAX, INT64_MAX / 4 + 1};
  for (size_t i = 0; i < sizeof strides / sizeof strides[0]; i++) {
    CHECK(build_from(context, 0, 8, strides[i], 7) == DDT_INVALID_SHAPE);
  }
  CHECK(build_from(context, 0, 8, 0, 7) == DDT_OK);  // one row for every depth
}

// ---- outputs that lie on inputs: a status, and the canaries stay

// The first row of the second tree is read after the first tree was written, onto it.
static void gather_onto_query_start(ddt_context *context) {
  const int32_t counts[2] = {2, 2}, index[2] = {0, 1}, start[3] = {0, 2, 4}, depths[4] = {0, 1, 0, 1};
  const int32_t far_away[4] = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};
  ddt_tree source;
  memset(&source, 0, sizeof source);
  source.struct_size = sizeof source;
  source.num_reqs = 2;
  source.max_nodes = 2;
  source.max_depth = 1;
  source.num_nodes = (int32_t *)copy_of(counts, sizeof counts);
  source.tokens = (int32_t *)copy_of(far_away, sizeof far_away);
  source.depths = (int32_t *)copy_of(depths, sizeof depths);
  ddt_tree tree = source;
  tree.num_nodes = (int32_t *)output(sizeof counts);
  tree.tokens = (int32_t *)output(sizeof far_away);
  tree.depths = NULL;
  int64_t *positions = (int64_t *)output(4 * sizeof *positions);
  ddt_tree_gather_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.source = &source;
  params.tree = &tree;
  params.tree_index.data = copy_of(index, sizeof index);
  params.tree_index.dtype = DDT_DTYPE_I32;
  params.tree_index.ndim = 1;
  params.tree_index.shape[0] = 2;
  params.tree_index.strides[0] = 1;
  params.positions = params.tree_index;
  params.positions.data = positions;
  params.positions.dtype = DDT_DTYPE_I64;
  params.positions.shape[0] = 4;
  params.query_start = (int32_t *)memcpy(tree.tokens, start, sizeof start);
  ddt_status status = ddt_tree_gather(context, &params, NULL);
  CHECK(status == DDT_OK);
  // what lies on nothing is what it would have been, and nodes are where their depths say: no change
  CHECK(tree.num_nodes[0] == 2 && tree.num_nodes[1] == 2);
  CHECK(is_poisoned(positions, 4 * sizeof *positions));
  check_outputs(status);
  free(source.num_nodes);
  free(source.tokens);
  free(source.depths);
  free(params.tree_index.data);
}

// The block table and the ancestors of the second request lie where the first one's rows go.
static void attend_onto_tables(ddt_context *context, int is_table) {
  enum { DIM = 32, REQS = 2 };
  const int32_t counts[REQS] = {1, 1}, start[REQS + 1] = {0, 1, 2}, lens[REQS] = {1, 1}, blocks[REQS] = {0, 0};
  const uint32_t bits[REQS] = {1, 1};
  float floats[REQS * DIM];
  for (int i = 0; i < REQS * DIM; i++) floats[i] = 1e30f;
  float *out = (float *)output(sizeof floats);
  ddt_tree tree;
  memset(&tree, 0, sizeof tree);
  tree.struct_size = sizeof tree;
  tree.num_reqs = REQS;
  tree.max_nodes = 1;
  tree.num_nodes = (int32_t *)copy_of(counts, sizeof counts);
  tree.ancestor_bits = (uint32_t *)copy_of(bits, sizeof bits);
  int32_t *table = (int32_t *)copy_of(blocks, sizeof blocks);
  ddt_tree_attention_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.query = tensor_f32((float *)copy_of(floats, sizeof floats), REQS, 1, DIM);
  params.out = tensor_f32(out, REQS, 1, DIM);
  params.key_cache = tensor_f32((float *)copy_of(floats, sizeof floats), 1, 1, 1);
  params.key_cache.ndim = 4;
  params.key_cache.shape[3] = DIM;
  params.key_cache.strides[3] = 1;
  params.value_cache = params.key_cache;
  params.block_table = params.out;
  params.block_table.data = is_table ? memcpy(out, blocks, sizeof blocks) : table;
  params.block_table.dtype = DDT_DTYPE_I32;
  params.block_table.ndim = 2;
  params.block_table.shape[1] = 1;
  params.block_table.strides[0] = 1;
  params.query_start = (int32_t *)copy_of(start, sizeof start);
  params.seq_lens = (int32_t *)copy_of(lens, sizeof lens);
  params.tree = &tree;
  params.softmax_scale = 1;
  uint32_t *own_bits = tree.ancestor_bits;
  if (!is_table) tree.ancestor_bits = (uint32_t *)memcpy(out, bits, sizeof bits);
  ddt_status status = ddt_tree_attention(context, &params, NULL);
  CHECK(status == DDT_OK);
  check_outputs(status);
  free(tree.num_nodes);
  free(own_bits);
  free(table);
  free(params.query.data);
  free(params.key_cache.data);
  free((void *)params.query_start);
  free((void *)params.seq_lens);
}

static void overlaps(ddt_context *context) {
  gather_onto_query_start(context);
  attend_onto_tables(context, 1);
  attend_onto_tables(context, 0);
}

int main(void) {
  alarm(300);  // a hang is a failure
  ddt_context *context = cpu_context();
  threads_and_fork(context);
  trees(context);
  links(context);
  scores(context);
  overlaps(context);
  ddt_context_free(context);
  puts("hostile: ok");
  return 0;
}
