// SPDX-License-Identifier: Apache-2.0
//
// tree_gather: trees in the order of another batch, and positions of their rows. A block per tree.
#include "common.cuh"
#include "params/tree_gather.h"

using namespace ddt;

namespace {

constexpr int THREADS = DDT_CUDA_TREE_GATHER_THREADS;
static_assert(THREADS >= DDT_CUDA_MAX_NODES, "a thread per node");

// `width` entries of each node; nodes of the source may have more.
template <typename T>
__device__ __forceinline__ void copy_lists(T *__restrict__ out, const T *__restrict__ source, int nodes, int width,
                                           int source_width) {
#pragma unroll 4
  for (int k = threadIdx.x; k < nodes * width; k += THREADS) {
    const int node = k / width;
    out[k] = source[node * source_width + k - node * width];
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS)
    ddt_tree_gather(const __grid_constant__ ddt_cuda_tree_gather p) {
  const int i = blockIdx.x, node = threadIdx.x;
  const ddt_cuda_tree &from = p.source, &to = p.tree;
  if (i == p.num_trees) {
    for (int r = i + node; r < to.num_reqs; r += THREADS) to.num_nodes[r] = 0;
    return;
  }
  const int64_t slot = load_index(p.tree_index, i);
  if (slot < 0 || slot >= from.num_reqs) {
    if (node == 0) to.num_nodes[i] = 0;
    return;
  }
  const int start = min(max(p.query_start[i], 0), p.num_rows);
  const int end = min(max(p.query_start[i + 1], start), p.num_rows);
  const int num_nodes = min(min(max(from.num_nodes[slot], 0), to.max_nodes), end - start);
  const int64_t source = slot * from.max_nodes, row = static_cast<int64_t>(i) * to.max_nodes;
  if (node == 0) {
    to.num_nodes[i] = num_nodes;
    if (to.flags) to.flags[i] = from.flags[slot];
  }
  if (node < to.max_nodes) {
    // all loads before the first store, which they would otherwise wait for
    const auto load = [&](const auto *out, const auto *field) { return out ? field[source + node] : 0; };
    const int32_t token = load(to.tokens, from.tokens), parent = load(to.parents, from.parents);
    const int32_t depth = load(to.depths, from.depths), first_child = load(to.first_child, from.first_child);
    const int32_t next_sibling = load(to.next_sibling, from.next_sibling);
    const int32_t subtree_end = load(to.subtree_end, from.subtree_end), rank = load(to.pop_ranks, from.pop_ranks);
    const int64_t position = load(to.positions, from.positions);
    if (to.tokens) to.tokens[row + node] = token;
    if (to.parents) to.parents[row + node] = parent;
    if (to.depths) to.depths[row + node] = depth;
    if (to.first_child) to.first_child[row + node] = first_child;
    if (to.next_sibling) to.next_sibling[row + node] = next_sibling;
    if (to.subtree_end) to.subtree_end[row + node] = subtree_end;
    if (to.pop_ranks) to.pop_ranks[row + node] = rank;
    if (to.positions) to.positions[row + node] = position;
  }
  if (node < num_nodes && (p.positions.data || p.mrope_positions.data)) {
    const int64_t delta = from.depths[source + node] - node, at = start + node;
    if (p.positions.data) static_cast<int64_t *>(p.positions.data)[at * p.positions.strides[0]] += delta;
    if (p.mrope_positions.data) {
      int64_t *position = static_cast<int64_t *>(p.mrope_positions.data) + at * p.mrope_positions.strides[1];
      for (int axis = 0; axis < p.num_axes; ++axis) position[axis * p.mrope_positions.strides[0]] += delta;
    }
  }
  const int places = to.max_depth + 1;
  if (to.ancestors) {
    copy_lists(to.ancestors + row * places, from.ancestors + source * places, to.max_nodes, places, places);
  }
  if (to.ancestor_bits) {
    copy_lists(to.ancestor_bits + row * to.words, from.ancestor_bits + source * from.words, to.max_nodes, to.words,
               from.words);
  }
}
