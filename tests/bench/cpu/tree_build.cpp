// SPDX-License-Identifier: Apache-2.0
// ddt_tree_build beside a plain C++17 tree of the same kind: float64 scores, std::partial_sort for the best tokens of
// each depth, std::priority_queue for the nodes. A shared library for run.py; as a program it builds trees for callgrind:
//
//   tree_build library|heap DEPTHS VOCAB BUDGET COUNT
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <queue>
#include <random>
#include <vector>

#include "ddtree.h"

namespace {

struct Entry {
  double score;  // log-probability of the path
  int parent, depth, rank;
  bool operator<(const Entry &other) const { return score < other.score; }
};

int heap_tree(const float *logits, int depths, int vocab, int budget, int32_t *tokens, int32_t *parents) {
  depths = std::min(depths, budget);
  const int width = std::min(budget, vocab);
  std::vector<std::vector<int>> best(depths);
  std::vector<std::vector<double>> scores(depths);
  std::vector<int> ids(vocab);
  for (int depth = 0; depth < depths; depth++) {
    const float *row = logits + static_cast<std::ptrdiff_t>(depth) * vocab;
    const float largest = *std::max_element(row, row + vocab);
    double sum = 0;
    for (int token = 0; token < vocab; token++) sum += std::exp(row[token] - largest);
    const double normaliser = largest + std::log(sum);
    std::iota(ids.begin(), ids.end(), 0);
    std::partial_sort(ids.begin(), ids.begin() + width, ids.end(), [row](int a, int b) { return row[a] > row[b]; });
    best[depth].assign(ids.begin(), ids.begin() + width);
    for (int token : best[depth]) scores[depth].push_back(row[token] - normaliser);
  }

  tokens[0] = 0;
  parents[0] = -1;
  int nodes = 1;
  std::priority_queue<Entry> heap;
  heap.push({scores[0][0], 0, 0, 0});
  while (nodes <= budget && !heap.empty()) {
    const Entry top = heap.top();
    heap.pop();
    tokens[nodes] = best[top.depth][top.rank];
    parents[nodes] = top.parent;
    const std::vector<double> &row = scores[top.depth];
    if (top.rank + 1 < width) {
      heap.push({top.score - row[top.rank] + row[top.rank + 1], top.parent, top.depth, top.rank + 1});
    }
    if (top.depth + 1 < depths) heap.push({top.score + scores[top.depth + 1][0], nodes, top.depth + 1, 0});
    nodes++;
  }
  return nodes;
}

int library_tree(const float *logits, int depths, int vocab, int budget, int32_t *tokens, int32_t *parents) {
  static ddt_context *context = nullptr;
  if (context == nullptr) {
    const ddt_context_params params = {sizeof params, DDT_ABI_VERSION, DDT_DEVICE_CPU, 0, 0};
    if (ddt_context_create(&params, &context) != DDT_OK) return -1;
  }
  const int32_t root_token = 0;
  const int64_t root_position = 0;
  int32_t nodes = 0;
  ddt_tree tree = {};
  tree.struct_size = sizeof tree;
  tree.num_reqs = 1;
  tree.max_nodes = budget + 1;
  tree.max_depth = depths;
  tree.num_nodes = &nodes;
  tree.tokens = tokens;
  tree.parents = parents;
  ddt_tree_build_params params = {};
  params.struct_size = sizeof params;
  params.logits.data = const_cast<float *>(logits);
  params.logits.dtype = DDT_DTYPE_F32;
  params.logits.ndim = 3;
  const int64_t shape[3] = {1, depths, vocab}, strides[3] = {static_cast<int64_t>(depths) * vocab, vocab, 1};
  std::copy(shape, shape + 3, params.logits.shape);
  std::copy(strides, strides + 3, params.logits.strides);
  params.root_tokens = &root_token;
  params.root_positions = &root_position;
  params.tree = &tree;
  return ddt_tree_build(context, &params, nullptr) == DDT_OK ? nodes : -1;
}

}  // namespace

extern "C" {

// Logits peaked as a drafter's are: the best token of a depth has about half of the probability.
void bench_fill(float *logits, long count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 8);
  for (long i = 0; i < count; i++) logits[i] = normal(random);
}

const char *bench_build_info() { return ddt_build_info(); }

// Builds the tree `count` times into tokens and parents [budget + 1], in any order in which parents come first.
// Returns the nodes with the root, -1 if it failed; *ns is the time of one.
int bench_build(int is_library, const float *logits, int depths, int vocab, int budget, long count, int32_t *tokens,
                int32_t *parents, double *ns) {
  int nodes = -1;
  const auto start = std::chrono::steady_clock::now();
  for (long i = 0; i < count; i++) {
    nodes = (is_library != 0 ? library_tree : heap_tree)(logits, depths, vocab, budget, tokens, parents);
  }
  const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
  *ns = time.count() / static_cast<double>(count);
  return nodes;
}
}

int main(int argc, char **argv) {
  if (argc != 6) return 1;
  const int depths = std::atoi(argv[2]), vocab = std::atoi(argv[3]), budget = std::atoi(argv[4]);
  std::vector<float> logits(static_cast<std::size_t>(depths) * vocab);
  bench_fill(logits.data(), static_cast<long>(logits.size()));
  std::vector<int32_t> tokens(budget + 1), parents(budget + 1);
  double ns = 0;
  const int is_library = std::strcmp(argv[1], "library") == 0;
  return bench_build(is_library, logits.data(), depths, vocab, budget, std::atol(argv[5]), tokens.data(),
                     parents.data(), &ns) > 0 ? 0 : 1;
}
