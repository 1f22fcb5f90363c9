// SPDX-License-Identifier: Apache-2.0
//
// The fields of ddt_tree from parents in any topological order.
#pragma once

#include "common.cuh"

namespace ddt {

constexpr int MAX_NODES = DDT_CUDA_MAX_NODES;
constexpr int MAX_PATH = DDT_CUDA_MAX_DEPTH + 1;

// Stands for the parent of the root: the last of 256 nodes has no children.
constexpr uint32_t NO_NODE = MAX_NODES - 1;

// One tree in shared memory. The caller fills the first four; nodes are in any order in which
// parents precede their children, node 0 is the root.
struct Topology {
  int16_t parent[MAX_NODES];
  uint8_t depth[MAX_NODES];
  int32_t token[MAX_NODES];
  // siblings are ordered by it; all different
  uint8_t rank[MAX_NODES];

  // size of each subtree
  int32_t size[MAX_NODES];
  // size, parent and rank of each node in one word, so that a look at all nodes is one load each
  uint32_t packed[MAX_NODES];
  // how far behind its parent a node comes in preorder
  int16_t offset[MAX_NODES];
  int16_t first_child[MAX_NODES];
  int16_t next_sibling[MAX_NODES];
  // new index of each node, and the reverse
  uint8_t position[MAX_NODES];
  uint8_t node[MAX_NODES];
  // path of each node by its new index, root first
  uint8_t path[MAX_NODES][MAX_PATH];
};

// Writes the row of request r, by all threads of the block, of which there are at least MAX_NODES.
// num_nodes 0 makes it a padding request. `pop_rank(node)` is what the caller knows a node's
// priority as; `order` gets the old index of each node, unless NULL.
template <typename PopRank>
__device__ __forceinline__ void write_tree(const ddt_cuda_tree &tree, int r, int num_nodes, Topology &shared,
                                           int64_t root_position, uint32_t flags, PopRank pop_rank, int32_t *order) {
  const int i = threadIdx.x, threads = blockDim.x;
  const bool is_node = i < num_nodes;
  if (is_node) shared.size[i] = 1;
  __syncthreads();
  if (is_node) {
    for (int j = shared.parent[i]; j >= 0; j = shared.parent[j]) atomicAdd(&shared.size[j], 1);
  }
  __syncthreads();
  const uint32_t parent = is_node && i > 0 ? shared.parent[i] : NO_NODE, rank = is_node ? shared.rank[i] : 0;
  if (is_node) shared.packed[i] = static_cast<uint32_t>(shared.size[i]) << 16 | parent << 8 | rank;
  __syncthreads();
  if (is_node) {
    constexpr uint32_t NONE = UINT32_MAX;
    uint32_t offset = 1, first = NONE, next = NONE;
#pragma unroll 8
    for (int j = 1; j < num_nodes; ++j) {
      const uint32_t other = shared.packed[j], other_rank = other & 255, other_parent = other >> 8 & 255;
      const uint32_t candidate = other_rank << 8 | j;
      if (other_parent == i) first = min(first, candidate);
      if (other_parent == parent && other_rank < rank) offset += other >> 16;
      if (other_parent == parent && other_rank > rank) next = min(next, candidate);
    }
    shared.offset[i] = offset;
    shared.first_child[i] = first == NONE ? -1 : static_cast<int>(first & 255);
    shared.next_sibling[i] = next == NONE ? -1 : static_cast<int>(next & 255);
  }
  __syncthreads();
  if (is_node) {
    int position = 0;
    for (int j = i; shared.parent[j] >= 0; j = shared.parent[j]) position += shared.offset[j];
    shared.position[i] = position;
    shared.node[position] = i;
  }
  __syncthreads();
  if (is_node) {
    const int position = shared.position[i];
    for (int j = i; j >= 0; j = shared.parent[j]) shared.path[position][shared.depth[j]] = shared.position[j];
  }
  __syncthreads();

  const int n = tree.max_nodes, words = tree.words, places = tree.max_depth + 1;
  const int64_t row = static_cast<int64_t>(r) * n;
  const auto renumber = [&](int node) { return node < 0 ? -1 : shared.position[node]; };
  for (int k = i; k < n; k += threads) {
    const bool exists = k < num_nodes;
    const int node = exists ? shared.node[k] : 0;
    if (tree.tokens) tree.tokens[row + k] = exists ? shared.token[node] : -1;
    if (tree.parents) tree.parents[row + k] = exists ? renumber(shared.parent[node]) : -1;
    if (tree.depths) tree.depths[row + k] = exists ? shared.depth[node] : -1;
    if (tree.first_child) tree.first_child[row + k] = exists ? renumber(shared.first_child[node]) : -1;
    if (tree.next_sibling) tree.next_sibling[row + k] = exists ? renumber(shared.next_sibling[node]) : -1;
    if (tree.subtree_end) tree.subtree_end[row + k] = exists ? k + shared.size[node] : 0;
    if (tree.positions) tree.positions[row + k] = exists ? root_position + shared.depth[node] : 0;
    if (tree.pop_ranks) tree.pop_ranks[row + k] = exists ? pop_rank(node) : -1;
    if (order) order[row + k] = exists ? node : -1;
  }
  if (tree.ancestors) {
    for (int k = i; k < n * places; k += threads) {
      const int at = k / places, place = k % places;
      const bool exists = at < num_nodes && place <= shared.depth[shared.node[at]];
      tree.ancestors[row * places + k] = exists ? shared.path[at][place] : -1;
    }
  }
  if (tree.ancestor_bits) {
    for (int k = i; k < n * words; k += threads) {
      const int at = k / words, word = k % words;
      uint32_t bits = 0;
      if (at < num_nodes) {
        for (int place = shared.depth[shared.node[at]]; place >= 0; --place) {
          const int ancestor = shared.path[at][place];
          if (ancestor / 32 == word) bits |= 1u << ancestor % 32;
        }
      }
      tree.ancestor_bits[row * words + k] = bits;
    }
  }
  if (i == 0) {
    tree.num_nodes[r] = num_nodes;
    if (tree.flags) tree.flags[r] = flags;
  }
}

}  // namespace ddt
