// SPDX-License-Identifier: Apache-2.0
// Decodes two requests with a toy hybrid model on the CPU, token by token and with trees, and checks
// that both give the same texts. The calls, their order and the buffers are those of a real runtime;
// only the model (one recurrent layer, one attention layer, random weights) and the drafter (which
// counts what followed each token so far) are toys.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ddtree.h"

enum {
  REQS = 2,
  VOCAB = 32,
  HORIZON = 6,               // depths that the drafter scores
  BUDGET = 15,               // nodes below the root
  ROWS = BUDGET + 1,         // rows of a request in each forward, as in a captured graph
  T = REQS * ROWS,
  WORDS = (ROWS + 31) / 32,
  PROMPT = 4,
  TEXT = 96,
  HEAD = 128,                // of the recurrent layer
  CHANNELS = 3 * HEAD,       // q, k and v of one head
  DIM = 32,                  // of the attention layer
  BLOCK = 16,                // tokens in a KV page
  BLOCKS = (TEXT + ROWS) / BLOCK + 1,
};

static float qkv_of[VOCAB][CHANNELS], gates_of[VOCAB][2], attention_of[VOCAB][3][DIM];
static float out_of_gdn[VOCAB][HEAD], out_of_attention[VOCAB][DIM];
static float conv_weight[CHANNELS][4], a_log[1] = {0}, dt_bias[1] = {0};

static ddt_context *context;

static void must(ddt_status status) {
  if (status == DDT_OK) return;
  char text[512];
  if (ddt_last_error(text, sizeof text, NULL) == DDT_OK) fprintf(stderr, "%s: %s\n", ddt_status_name(status), text);
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

static void random_weights(void *out, size_t bytes, float scale) {
  static uint64_t state = 1;
  for (float *x = out; x < (float *)((char *)out + bytes); x++) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    *x = scale * ((float)(state >> 40) / (1 << 23) - 1);
  }
}

// All that one way of decoding keeps.
typedef struct {
  int32_t text[REQS][PROMPT + TEXT + ROWS];
  int32_t length[REQS];  // tokens of the text; the last one is the root, whose state is not committed yet
  int follows[VOCAB][VOCAB];
  // what the model keeps of the tokens before the root: one state and one window, whatever the budget
  float conv_state[REQS][CHANNELS][3], ssm_state[REQS][HEAD][HEAD];
  float key_cache[REQS * BLOCKS][BLOCK][DIM], value_cache[REQS * BLOCKS][BLOCK][DIM];
  int32_t block_table[REQS][BLOCKS];
  int rounds, rows;
} sequences;

// What each round overwrites.
static struct {
  float draft[REQS][HORIZON][VOCAB], logits[T][VOCAB];
  float qkv[T][CHANNELS], a[T], b[T], gdn_out[T][HEAD], stash_qkv[T][CHANNELS], stash_gates[T][2];
  float query[T][DIM], attention_out[T][DIM];
  int64_t row_slots[T];
  int32_t query_start[REQS + 1], seq_lens[REQS], state_slots[REQS];
  int32_t root_tokens[REQS], budgets[REQS];
  int64_t root_positions[REQS];
  int32_t num_nodes[REQS], tokens[T], parents[T], depths[T], first_child[T], next_sibling[T];
  uint32_t ancestor_bits[T][WORDS];
  int32_t ancestors[T][HORIZON + 1];
  int32_t num_accepted[REQS], accepted_nodes[REQS][HORIZON];
  int64_t output_tokens[REQS][HORIZON + 1];
} round_;

// Scores of the tokens at each depth: where a walk along "what followed what" may be after d steps.
static void draft(const sequences *s, int r) {
  float now[VOCAB] = {0}, next[VOCAB];
  now[s->text[r][s->length[r] - 1]] = 1;
  for (int d = 0; d < HORIZON; d++) {
    memset(next, 0, sizeof next);
    for (int from = 0; from < VOCAB; from++) {
      float total = 0.1f;
      for (int to = 0; to < VOCAB; to++) total += (float)s->follows[from][to];
      for (int to = 0; to < VOCAB; to++) next[to] += now[from] * ((float)s->follows[from][to] + 0.1f / VOCAB) / total;
    }
    memcpy(now, next, sizeof now);
    for (int to = 0; to < VOCAB; to++) round_.draft[r][d][to] = logf(now[to]);
  }
}

// The target on every node of every tree, in one forward. Rows after the last node are idle.
static void forward(sequences *s, ddt_tree *tree, ddt_gdn_layer *gdn, ddt_kv_layer *kv) {
  for (int r = 0; r < REQS; r++) {
    // this step's rows come after the committed tokens, of which the root is not one yet
    int committed = s->length[r] - 1;
    round_.seq_lens[r] = committed + ROWS;
    for (int i = 0; i < ROWS; i++) {
      int row = r * ROWS + i, at = committed + i;
      int block = s->block_table[r][at / BLOCK];
      round_.row_slots[row] = (int64_t)block * BLOCK + at % BLOCK;
      if (i >= round_.num_nodes[r]) continue;
      int token = round_.tokens[row];
      memcpy(round_.qkv[row], qkv_of[token], sizeof round_.qkv[row]);
      round_.a[row] = gates_of[token][0];
      round_.b[row] = gates_of[token][1];
      memcpy(round_.query[row], attention_of[token][0], sizeof round_.query[row]);
      memcpy(s->key_cache[block][at % BLOCK], attention_of[token][1], sizeof s->key_cache[0][0]);
      memcpy(s->value_cache[block][at % BLOCK], attention_of[token][2], sizeof s->value_cache[0][0]);
    }
  }

  ddt_gdn_verify_params recurrent = {0};
  recurrent.struct_size = sizeof recurrent;
  recurrent.layer = *gdn;
  recurrent.mixed_qkv = tensor(round_.qkv, DDT_DTYPE_F32, 2, T, CHANNELS, 0, 0);
  recurrent.a = tensor(round_.a, DDT_DTYPE_F32, 2, T, 1, 0, 0);
  recurrent.b = tensor(round_.b, DDT_DTYPE_F32, 2, T, 1, 0, 0);
  recurrent.a_log = tensor(a_log, DDT_DTYPE_F32, 1, 1, 0, 0, 0);
  recurrent.dt_bias = tensor(dt_bias, DDT_DTYPE_F32, 1, 1, 0, 0, 0);
  recurrent.query_start = round_.query_start;
  recurrent.tree = tree;
  recurrent.out = tensor(round_.gdn_out, DDT_DTYPE_F32, 3, T, 1, HEAD, 0);
  must(ddt_gdn_verify(context, &recurrent, NULL));

  ddt_tree_attention_params attention = {0};
  attention.struct_size = sizeof attention;
  attention.query = tensor(round_.query, DDT_DTYPE_F32, 3, T, 1, DIM, 0);
  attention.key_cache = kv->key_cache;
  attention.value_cache = kv->value_cache;
  attention.block_table = tensor(s->block_table, DDT_DTYPE_I32, 2, REQS, BLOCKS, 0, 0);
  attention.query_start = round_.query_start;
  attention.seq_lens = round_.seq_lens;
  attention.tree = tree;
  attention.softmax_scale = 1;
  attention.out = tensor(round_.attention_out, DDT_DTYPE_F32, 3, T, 1, DIM, 0);
  must(ddt_tree_attention(context, &attention, NULL));

  for (int row = 0; row < T; row++) {
    for (int token = 0; token < VOCAB; token++) {
      float sum = 0;
      for (int i = 0; i < HEAD; i++) sum += round_.gdn_out[row][i] * out_of_gdn[token][i];
      for (int i = 0; i < DIM; i++) sum += round_.attention_out[row][i] * out_of_attention[token][i];
      round_.logits[row][token] = sum;
    }
  }
}

// One round: draft, build, forward, walk, commit. A budget of 0 is plain decoding.
static void decode(sequences *s, int budget) {
  ddt_tree tree = {.struct_size = sizeof tree,
                   .num_reqs = REQS,
                   .max_nodes = ROWS,
                   .max_depth = HORIZON,
                   .num_nodes = round_.num_nodes,
                   .tokens = round_.tokens,
                   .parents = round_.parents,
                   .depths = round_.depths,
                   .first_child = round_.first_child,
                   .next_sibling = round_.next_sibling,
                   .ancestor_bits = &round_.ancestor_bits[0][0],
                   .ancestors = &round_.ancestors[0][0]};
  for (int r = 0; r < REQS; r++) {
    int is_done = s->length[r] >= PROMPT + TEXT;
    draft(s, r);
    round_.query_start[r + 1] = (r + 1) * ROWS;
    round_.root_tokens[r] = s->text[r][s->length[r] - 1];
    round_.root_positions[r] = s->length[r] - 1;
    round_.budgets[r] = is_done ? -1 : budget;  // -1: nothing is done for this place of the batch
    round_.state_slots[r] = r;
  }

  ddt_tree_build_params build = {0};
  build.struct_size = sizeof build;
  build.logits = tensor(round_.draft, DDT_DTYPE_F32, 3, REQS, HORIZON, VOCAB, 0);
  build.root_tokens = round_.root_tokens;
  build.root_positions = round_.root_positions;
  build.node_budgets = round_.budgets;
  build.tree = &tree;
  must(ddt_tree_build(context, &build, NULL));

  ddt_gdn_layer gdn = {0};
  gdn.conv_weight = tensor(conv_weight, DDT_DTYPE_F32, 2, CHANNELS, 4, 0, 0);
  gdn.conv_state = tensor(s->conv_state, DDT_DTYPE_F32, 3, REQS, CHANNELS, 3, 0);
  gdn.ssm_state = tensor(s->ssm_state, DDT_DTYPE_F32, 4, REQS, 1, HEAD, HEAD);
  gdn.stash_qkv = tensor(round_.stash_qkv, DDT_DTYPE_F32, 2, T, CHANNELS, 0, 0);
  gdn.stash_gates = tensor(round_.stash_gates, DDT_DTYPE_F32, 3, T, 2, 1, 0);
  gdn.state_slots = round_.state_slots;
  ddt_kv_layer kv = {0};
  kv.key_cache = tensor(s->key_cache, DDT_DTYPE_F32, 4, REQS * BLOCKS, 1, BLOCK, DIM);
  kv.value_cache = tensor(s->value_cache, DDT_DTYPE_F32, 4, REQS * BLOCKS, 1, BLOCK, DIM);
  kv.row_slots = round_.row_slots;
  forward(s, &tree, &gdn, &kv);

  ddt_tree_accept_params accept = {0};
  accept.struct_size = sizeof accept;
  accept.tree = &tree;
  accept.query_start = round_.query_start;
  accept.logits = tensor(round_.logits, DDT_DTYPE_F32, 2, T, VOCAB, 0, 0);
  accept.num_accepted = round_.num_accepted;
  accept.accepted_nodes = &round_.accepted_nodes[0][0];
  accept.output_tokens = &round_.output_tokens[0][0];
  must(ddt_tree_accept(context, &accept, NULL));

  ddt_commit_params commit = {0};
  commit.struct_size = sizeof commit;
  commit.num_gdn_layers = 1;
  commit.num_kv_layers = 1;
  commit.gdn_layers = &gdn;
  commit.kv_layers = &kv;
  commit.tree = &tree;
  commit.query_start = round_.query_start;
  commit.num_accepted = round_.num_accepted;
  commit.accepted_nodes = &round_.accepted_nodes[0][0];
  must(ddt_commit(context, &commit, NULL));

  for (int r = 0; r < REQS; r++) {
    if (round_.num_accepted[r] < 0) continue;
    s->rounds++;
    s->rows += round_.num_nodes[r];
    // the accepted tokens and the target's own next one, which is the next root
    for (int i = 0; i <= round_.num_accepted[r]; i++) {
      int32_t *next = &s->text[r][s->length[r]];
      // a prompt is fed token by token: this toy has no prefill
      if (s->length[r] >= PROMPT) *next = (int32_t)round_.output_tokens[r][i];
      s->follows[next[-1]][next[0]]++;
      s->length[r]++;
    }
  }
}

static sequences *run(int budget) {
  sequences *s = calloc(1, sizeof *s);
  if (!s) exit(1);
  for (int r = 0; r < REQS; r++) {
    s->length[r] = 1;
    for (int i = 0; i < PROMPT; i++) s->text[r][i] = (7 * r + 3 * i + 1) % VOCAB;
    // pages may lie anywhere
    for (int i = 0; i < BLOCKS; i++) s->block_table[r][i] = REQS * (BLOCKS - 1 - i) + r;
  }
  while (s->length[0] < PROMPT + TEXT || s->length[1] < PROMPT + TEXT) {
    int in_prompt = s->length[0] < PROMPT || s->length[1] < PROMPT;
    decode(s, in_prompt ? 0 : budget);
  }
  return s;
}

int main(void) {
  ddt_context_params params = {sizeof params, DDT_ABI_VERSION, DDT_DEVICE_CPU, 0, 0};
  must(ddt_context_create(&params, &context));
  puts(ddt_build_info());
  random_weights(qkv_of, sizeof qkv_of, 1);
  random_weights(gates_of, sizeof gates_of, 2);
  random_weights(attention_of, sizeof attention_of, 1);
  random_weights(conv_weight, sizeof conv_weight, 1);
  random_weights(out_of_gdn, sizeof out_of_gdn, 30);
  random_weights(out_of_attention, sizeof out_of_attention, 1);

  sequences *plain = run(0), *trees = run(BUDGET);
  int is_same = 1;
  for (int r = 0; r < REQS; r++) {
    is_same &= !memcmp(plain->text[r], trees->text[r], sizeof(int32_t) * (PROMPT + TEXT));
    printf("request %d:", r);
    for (int i = 0; i < PROMPT + TEXT; i++) printf(" %d", trees->text[r][i]);
    puts("");
  }
  printf("%s texts; %d rounds of 1 row without trees, %d rounds of %.1f rows with them\n",
         is_same ? "the same" : "DIFFERENT", plain->rounds, trees->rounds, (double)trees->rows / trees->rounds);
  int is_shorter = trees->rounds < plain->rounds;
  free(plain);
  free(trees);
  ddt_context_free(context);
  return is_same && is_shorter ? 0 : 1;
}
