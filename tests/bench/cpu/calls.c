// SPDX-License-Identifier: Apache-2.0
// What a call of each function costs on a CPU, on inputs so small that the call itself is much of it.
//
//   calls REPETITIONS MICROSECONDS   times every case: op, case, median, least and spread in ns (tab-separated)
//   calls --count N OP CASE          makes N calls of one case, for callgrind
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ddtree.h"

// One request with a tree of four nodes, and the fewest heads and dimensions that each operation takes.
enum {
  VOCAB = 8,
  DEPTH = 2,
  NODES = 4,
  HEAD = 128,           // of the recurrent layer
  CHANNELS = 3 * HEAD,  // q, k and v of one head
  DIM = 32,             // of the attention layer
  BLOCK = 16,           // tokens in a KV page
  CONTEXT = 4,          // tokens before the root
  MOST_REPETITIONS = 100000,
};

typedef struct {
  int32_t num_nodes[1], tokens[NODES], parents[NODES], depths[NODES], first_child[NODES], next_sibling[NODES];
  int32_t subtree_end[NODES], ancestors[NODES][DEPTH + 1], pop_ranks[NODES];
  uint32_t ancestor_bits[NODES], flags[1];
  int64_t positions[NODES];
} tree_memory;

// Buffers and parameters of one case.
typedef struct {
  float draft[DEPTH][VOCAB], logits[NODES][VOCAB];
  float qkv[NODES][CHANNELS], a[NODES], b[NODES], a_log[1], dt_bias[1], gdn_out[NODES][HEAD];
  float conv_weight[CHANNELS][4], conv_state[CHANNELS][3], ssm_state[HEAD][HEAD];
  float stash_qkv[NODES][CHANNELS], stash_gates[NODES][2];
  float query[NODES][DIM], attention_out[NODES][DIM], key_cache[BLOCK][DIM], value_cache[BLOCK][DIM];
  int32_t block_table[1], query_start[2], seq_lens[1], state_slots[1];
  int32_t root_tokens[1], budgets[1], tree_index[1], num_accepted[1], accepted_nodes[DEPTH];
  int64_t root_positions[1], node_tokens[NODES], row_slots[NODES], output_tokens[DEPTH + 1];
  tree_memory built_memory, masked_memory, gathered_memory;
  ddt_tree built, masked, gathered;
  ddt_gdn_layer gdn;
  ddt_kv_layer kv;
  ddt_tree_build_params build;
  ddt_tree_mask_params mask;
  ddt_tree_gather_params gather;
  ddt_gdn_verify_params verify;
  ddt_tree_attention_params attention;
  ddt_tree_accept_params accept, accept_tokens;
  ddt_commit_params commit;
} inputs;

static ddt_context *context;
static inputs tree_inputs, padding_inputs, refused_inputs, *in;

static void must(int is_true, const char *what) {
  if (is_true) return;
  char text[512] = "";
  if (ddt_last_error(text, sizeof text, NULL) != DDT_OK) text[0] = 0;
  fprintf(stderr, "%s: %s\n", what, text);
  exit(1);
}

static ddt_tensor tensor(void *data, uint32_t dtype, uint32_t ndim, int64_t a, int64_t b, int64_t c, int64_t d) {
  ddt_tensor tensor = {data, dtype, ndim, {a, b, c, d}, {0}};
  int64_t stride = 1;
  for (uint32_t i = ndim; i-- > 0;) {
    tensor.strides[i] = stride;
    stride *= tensor.shape[i];
  }
  return tensor;
}

static void random_numbers(void *out, size_t bytes) {
  static uint64_t state = 1;
  for (float *x = out; x < (float *)((char *)out + bytes); x++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    *x = (float)(state >> 40) / (1 << 23) - 1;
  }
}

static ddt_tree tree_in(tree_memory *m) {
  return (ddt_tree){sizeof(ddt_tree), 1, NODES, DEPTH, m->num_nodes, m->tokens, m->parents, m->depths, m->first_child,
                    m->next_sibling, m->subtree_end, m->ancestor_bits, &m->ancestors[0][0], m->positions,
                    m->pop_ranks, m->flags};
}

// Fills `in`: the root, its child 5 and the children 6 and 7 of that. A budget of -1 makes a padding request, for
// which an operation has nothing to do.
static void prepare(inputs *inputs, int32_t budget) {
  in = inputs;
  random_numbers(in->qkv, sizeof in->qkv);
  random_numbers(in->conv_weight, sizeof in->conv_weight);
  random_numbers(in->query, sizeof in->query);
  random_numbers(in->key_cache, sizeof in->key_cache);
  random_numbers(in->value_cache, sizeof in->value_cache);
  in->draft[0][5] = 9;
  in->draft[1][6] = 9;
  in->draft[1][7] = 8;
  // the target takes 5, then 7, whose row moves from node 3 to node 2, then 1
  in->logits[0][5] = in->logits[1][7] = in->logits[3][1] = 1;
  in->node_tokens[0] = 5;
  in->node_tokens[1] = 7;
  in->node_tokens[3] = 1;
  in->query_start[1] = NODES;
  in->seq_lens[0] = CONTEXT + NODES;
  in->root_positions[0] = CONTEXT;
  in->budgets[0] = budget;
  in->tree_index[0] = budget < 0 ? -1 : 0;
  for (int i = 0; i < NODES; i++) in->row_slots[i] = CONTEXT + i;

  in->built = tree_in(&in->built_memory);
  in->masked = tree_in(&in->masked_memory);
  in->gathered = tree_in(&in->gathered_memory);
  in->gdn = (ddt_gdn_layer){.conv_weight = tensor(in->conv_weight, DDT_DTYPE_F32, 2, CHANNELS, 4, 0, 0),
                            .conv_state = tensor(in->conv_state, DDT_DTYPE_F32, 3, 1, CHANNELS, 3, 0),
                            .ssm_state = tensor(in->ssm_state, DDT_DTYPE_F32, 4, 1, 1, HEAD, HEAD),
                            .stash_qkv = tensor(in->stash_qkv, DDT_DTYPE_F32, 2, NODES, CHANNELS, 0, 0),
                            .stash_gates = tensor(in->stash_gates, DDT_DTYPE_F32, 3, NODES, 2, 1, 0),
                            .state_slots = in->state_slots};
  in->kv = (ddt_kv_layer){.key_cache = tensor(in->key_cache, DDT_DTYPE_F32, 4, 1, 1, BLOCK, DIM),
                          .value_cache = tensor(in->value_cache, DDT_DTYPE_F32, 4, 1, 1, BLOCK, DIM),
                          .row_slots = in->row_slots};
  in->build = (ddt_tree_build_params){.struct_size = sizeof in->build,
                                      .logits = tensor(in->draft, DDT_DTYPE_F32, 3, 1, DEPTH, VOCAB, 0),
                                      .root_tokens = in->root_tokens,
                                      .root_positions = in->root_positions,
                                      .node_budgets = in->budgets,
                                      .tree = &in->built};
  in->mask = (ddt_tree_mask_params){.struct_size = sizeof in->mask,
                                    .num_reqs = 1,
                                    .max_nodes = NODES,
                                    .num_nodes = in->built_memory.num_nodes,
                                    .tokens = in->built_memory.tokens,
                                    .parents = in->built_memory.parents,
                                    .root_positions = in->root_positions,
                                    .tree = &in->masked};
  in->gather = (ddt_tree_gather_params){.struct_size = sizeof in->gather,
                                        .source = &in->built,
                                        .tree = &in->gathered,
                                        .tree_index = tensor(in->tree_index, DDT_DTYPE_I32, 1, 1, 0, 0, 0),
                                        .query_start = in->query_start};
  in->verify = (ddt_gdn_verify_params){.struct_size = sizeof in->verify,
                                       .layer = in->gdn,
                                       .mixed_qkv = tensor(in->qkv, DDT_DTYPE_F32, 2, NODES, CHANNELS, 0, 0),
                                       .a = tensor(in->a, DDT_DTYPE_F32, 2, NODES, 1, 0, 0),
                                       .b = tensor(in->b, DDT_DTYPE_F32, 2, NODES, 1, 0, 0),
                                       .a_log = tensor(in->a_log, DDT_DTYPE_F32, 1, 1, 0, 0, 0),
                                       .dt_bias = tensor(in->dt_bias, DDT_DTYPE_F32, 1, 1, 0, 0, 0),
                                       .query_start = in->query_start,
                                       .tree = &in->built,
                                       .out = tensor(in->gdn_out, DDT_DTYPE_F32, 3, NODES, 1, HEAD, 0)};
  in->attention = (ddt_tree_attention_params){.struct_size = sizeof in->attention,
                                              .query = tensor(in->query, DDT_DTYPE_F32, 3, NODES, 1, DIM, 0),
                                              .key_cache = in->kv.key_cache,
                                              .value_cache = in->kv.value_cache,
                                              .block_table = tensor(in->block_table, DDT_DTYPE_I32, 2, 1, 1, 0, 0),
                                              .query_start = in->query_start,
                                              .seq_lens = in->seq_lens,
                                              .tree = &in->built,
                                              .softmax_scale = 1,
                                              .out = tensor(in->attention_out, DDT_DTYPE_F32, 3, NODES, 1, DIM, 0)};
  in->accept = (ddt_tree_accept_params){.struct_size = sizeof in->accept,
                                        .tree = &in->built,
                                        .query_start = in->query_start,
                                        .logits = tensor(in->logits, DDT_DTYPE_F32, 2, NODES, VOCAB, 0, 0),
                                        .num_accepted = in->num_accepted,
                                        .accepted_nodes = in->accepted_nodes,
                                        .output_tokens = in->output_tokens};
  in->accept_tokens = in->accept;
  in->accept_tokens.logits = (ddt_tensor){0};
  in->accept_tokens.node_tokens = in->node_tokens;
  in->commit = (ddt_commit_params){.struct_size = sizeof in->commit,
                                   .num_gdn_layers = 1,
                                   .num_kv_layers = 1,
                                   .gdn_layers = &in->gdn,
                                   .kv_layers = &in->kv,
                                   .tree = &in->built,
                                   .query_start = in->query_start,
                                   .num_accepted = in->num_accepted,
                                   .accepted_nodes = in->accepted_nodes};
}

// ---- the calls

static ddt_status nothing(void) { return DDT_OK; }
static ddt_status version(void) { return ddt_version() == NULL; }
static ddt_status abi_version(void) { return ddt_abi_version() != DDT_ABI_VERSION; }
static ddt_status build_info(void) { return ddt_build_info() == NULL; }
static ddt_status status_name(void) { return ddt_status_name(DDT_INVALID_SHAPE) == NULL; }
static ddt_status last_error(void) {
  char text[256];
  return ddt_last_error(text, sizeof text, NULL);
}
static ddt_status context_create_and_free(void) {
  ddt_context_params params = {sizeof params, DDT_ABI_VERSION, DDT_DEVICE_CPU, 0, 0};
  ddt_context *other;
  ddt_status status = ddt_context_create(&params, &other);
  if (status == DDT_OK) ddt_context_free(other);
  return status;
}
static ddt_status tree_build(void) { return ddt_tree_build(context, &in->build, NULL); }
static ddt_status tree_mask(void) { return ddt_tree_mask(context, &in->mask, NULL); }
static ddt_status tree_gather(void) { return ddt_tree_gather(context, &in->gather, NULL); }
static ddt_status gdn_verify(void) { return ddt_gdn_verify(context, &in->verify, NULL); }
static ddt_status tree_attention(void) { return ddt_tree_attention(context, &in->attention, NULL); }
static ddt_status tree_accept(void) { return ddt_tree_accept(context, &in->accept, NULL); }
static ddt_status tree_accept_tokens(void) { return ddt_tree_accept(context, &in->accept_tokens, NULL); }
static ddt_status commit(void) { return ddt_commit(context, &in->commit, NULL); }
static size_t bytes;
static ddt_status build_size(void) { return ddt_tree_build_workspace_size(context, &in->build, &bytes); }
static ddt_status verify_size(void) { return ddt_gdn_verify_workspace_size(context, &in->verify, &bytes); }
static ddt_status attention_size(void) { return ddt_tree_attention_workspace_size(context, &in->attention, &bytes); }
static ddt_status accept_size(void) { return ddt_tree_accept_workspace_size(context, &in->accept, &bytes); }
static ddt_status commit_size(void) { return ddt_commit_workspace_size(context, &in->commit, &bytes); }

#define ROUND "root, child, two grandchildren"
#define PADDING "padding request"

static const struct {
  const char *op, *name;
  ddt_status (*call)(void);
  inputs *in;
  ddt_status want;
} cases[] = {
    {"nothing", "an empty function of the program", nothing, &tree_inputs, DDT_OK},
    {"ddt_version", "", version, &tree_inputs, DDT_OK},
    {"ddt_abi_version", "", abi_version, &tree_inputs, DDT_OK},
    {"ddt_build_info", "", build_info, &tree_inputs, DDT_OK},
    {"ddt_status_name", "", status_name, &tree_inputs, DDT_OK},
    {"ddt_last_error", "", last_error, &tree_inputs, DDT_OK},
    {"ddt_context_create", "and ddt_context_free", context_create_and_free, &tree_inputs, DDT_OK},
    {"ddt_tree_build_workspace_size", "", build_size, &tree_inputs, DDT_OK},
    {"ddt_gdn_verify_workspace_size", "", verify_size, &tree_inputs, DDT_OK},
    {"ddt_tree_attention_workspace_size", "", attention_size, &tree_inputs, DDT_OK},
    {"ddt_tree_accept_workspace_size", "", accept_size, &tree_inputs, DDT_OK},
    {"ddt_commit_workspace_size", "", commit_size, &tree_inputs, DDT_OK},
    {"ddt_tree_build", PADDING, tree_build, &padding_inputs, DDT_OK},
    {"ddt_tree_build", "refused: a budget above max_nodes - 1", tree_build, &refused_inputs, DDT_INVALID_VALUE},
    {"ddt_tree_build", ROUND ", 2 depths of 8 f32 logits", tree_build, &tree_inputs, DDT_OK},
    {"ddt_tree_mask", PADDING, tree_mask, &padding_inputs, DDT_OK},
    {"ddt_tree_mask", ROUND, tree_mask, &tree_inputs, DDT_OK},
    {"ddt_tree_gather", PADDING, tree_gather, &padding_inputs, DDT_OK},
    {"ddt_tree_gather", ROUND, tree_gather, &tree_inputs, DDT_OK},
    {"ddt_gdn_verify", PADDING, gdn_verify, &padding_inputs, DDT_OK},
    {"ddt_gdn_verify", ROUND ", 1 head of 128, f32", gdn_verify, &tree_inputs, DDT_OK},
    {"ddt_tree_attention", PADDING, tree_attention, &padding_inputs, DDT_OK},
    {"ddt_tree_attention", ROUND ", 4 tokens before them, 1 head of 32, f32", tree_attention, &tree_inputs, DDT_OK},
    {"ddt_tree_accept", PADDING, tree_accept, &padding_inputs, DDT_OK},
    {"ddt_tree_accept", ROUND ", 2 accepted, 8 f32 logits", tree_accept, &tree_inputs, DDT_OK},
    {"ddt_tree_accept", ROUND ", 2 accepted, node_tokens", tree_accept_tokens, &tree_inputs, DDT_OK},
    {"ddt_commit", PADDING, commit, &padding_inputs, DDT_OK},
    {"ddt_commit", ROUND ", 2 accepted, 1 recurrent layer of 1 head of 128, 1 attention layer of 1 head of 32, f32", commit,
     &tree_inputs, DDT_OK},
};
enum { CASES = sizeof cases / sizeof cases[0] };

// Times `count` calls of a case; the first also checks it.
static double nanoseconds(int i, long count) {
  struct timespec start, end;
  in = cases[i].in;
  ddt_status (*volatile call)(void) = cases[i].call;
  must(call() == cases[i].want, cases[i].op);
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (long n = 0; n < count; n++) call();
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec);
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void time_all(int repetitions, double microseconds) {
  static long counts[CASES];
  double *times = malloc(sizeof(double) * CASES * (size_t)repetitions);
  must(times != NULL, "no memory");
  for (int i = 0; i < CASES; i++) {
    // calls that fill a repetition
    counts[i] = 1;
    while (nanoseconds(i, counts[i]) < microseconds * 1e3) counts[i] *= 2;
  }
  // in turns, so that what else the machine does meets all of them
  for (int r = 0; r < repetitions; r++) {
    for (int i = 0; i < CASES; i++) times[i * repetitions + r] = nanoseconds(i, counts[i]) / (double)counts[i];
  }
  for (int i = 0; i < CASES; i++) {
    double *of = times + (size_t)i * (size_t)repetitions;
    qsort(of, (size_t)repetitions, sizeof *of, compare);
    printf("%s\t%s\t%.2f\t%.2f\t%.2f\n", cases[i].op, cases[i].name, of[repetitions / 2], of[0],
           of[repetitions * 9 / 10] - of[repetitions / 10]);
  }
  free(times);
}

int main(int argc, char **argv) {
  ddt_context_params params = {sizeof params, DDT_ABI_VERSION, DDT_DEVICE_CPU, 0, 0};
  must(ddt_context_create(&params, &context) == DDT_OK, "context");
  inputs *all[] = {&padding_inputs, &tree_inputs};
  for (int i = 0; i < 2; i++) {
    prepare(all[i], i == 0 ? -1 : NODES - 1);
    // one round, so that each operation has the outputs of those before it
    must(tree_build() == DDT_OK && tree_mask() == DDT_OK && tree_gather() == DDT_OK, "tree");
    must(gdn_verify() == DDT_OK && tree_attention() == DDT_OK, "forward");
    must(tree_accept() == DDT_OK && commit() == DDT_OK, "commit");
  }
  must(padding_inputs.gathered_memory.num_nodes[0] == 0 && padding_inputs.num_accepted[0] == -1, "padding");
  must(in->gathered_memory.num_nodes[0] == NODES && in->num_accepted[0] == 2 && in->accepted_nodes[1] == 3, "tree");
  prepare(&refused_inputs, NODES);

  if (argc == 5 && strcmp(argv[1], "--count") == 0) {
    for (int i = 0; i < CASES; i++) {
      if (strcmp(argv[3], cases[i].op) == 0 && strcmp(argv[4], cases[i].name) == 0) {
        nanoseconds(i, atol(argv[2]));
        return 0;
      }
    }
    fprintf(stderr, "no such case\n");
    return 1;
  }
  int repetitions = argc == 3 ? atoi(argv[1]) : 0;
  if (repetitions < 1 || repetitions > MOST_REPETITIONS) {
    fprintf(stderr, "usage: calls REPETITIONS MICROSECONDS | calls --count N OP CASE\n");
    return 1;
  }
  time_all(repetitions, atof(argv[2]));
  puts(ddt_build_info());
  ddt_context_free(context);
  return 0;
}
