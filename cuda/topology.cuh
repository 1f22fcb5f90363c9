// SPDX-License-Identifier: Apache-2.0
//
// The fields of ddt_tree from parents in any topological order.
#pragma once

#include "common.cuh"

namespace ddt {

constexpr int MAX_NODES = DDT_CUDA_MAX_NODES;
constexpr int MAX_PATH = DDT_CUDA_MAX_DEPTH + 1;

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
  // size, parent and rank of each node but the root in one word, so that a look at many is one load
  alignas(16) uint32_t packed[MAX_NODES];
  // how far behind its parent a node comes in preorder
  int16_t offset[MAX_NODES];
  // new index of each node, and the reverse
  uint8_t position[MAX_NODES];
  uint8_t node[MAX_NODES];
  // nodes from the root to each node
  uint8_t path[MAX_NODES][MAX_PATH];
};

// Quotients of numbers k below MAX_NODES * divisor by a divisor of at most MAX_PATH: rounding the
// reciprocal up adds at most k / 2^20 to them, which is less than 1 / divisor.
struct Division {
  int divisor, reciprocal;

  __device__ explicit Division(int divisor) : divisor(divisor), reciprocal((1 << 20) / divisor + 1) {}
  __device__ int quotient(int k) const { return k * reciprocal >> 20; }
};

// Writes the row of request r, by all threads of the block, of which there are at least MAX_NODES.
// num_nodes 0 makes it a padding request. `pop_rank(node)` is what the caller knows a node's
// priority as; `order` gets the old index of each node, unless NULL.
template <typename PopRank>
__device__ __forceinline__ void write_tree(const ddt_cuda_tree &tree, int r, int num_nodes, Topology &shared,
                                           int64_t root_position, uint32_t flags, PopRank pop_rank, int32_t *order) {
  const int i = threadIdx.x, threads = blockDim.x;
  const bool is_node = i < num_nodes;
  if (is_node) shared.size[i] = i == 0 ? num_nodes : 1;
  __syncthreads();
  if (is_node) {
    int j = i;
    for (int depth = shared.depth[i]; depth >= 0; --depth) {
      shared.path[i][depth] = j;
      if (depth > 0 && j != i) atomicAdd(&shared.size[j], 1);
      j = shared.parent[j];
    }
  }
  __syncthreads();
  if (i < MAX_NODES) {
    // what is no node, and the root, is no sibling: its size is 0
    shared.packed[i] = is_node && i > 0 ? shared.size[i] << 16 | shared.parent[i] << 8 | shared.rank[i] : 0;
  }
  __syncthreads();
  {
    // the offset of a node by up to 8 threads, each of which looks at a part of all nodes
    int shift = 0;
    while (shift < 3 && num_nodes << (shift + 1) <= threads) ++shift;
    const int node = i >> shift, part = i & ((1 << shift) - 1);
    uint32_t offset = part == 0;
    if (node < num_nodes) {
      const uint32_t own = shared.packed[node], first = own & 0xff00, rank = own & 0xff;
      const auto before = [&](uint32_t other) { return (other & 0xffff) - first < rank ? other >> 16 : 0; };
#pragma unroll 2
      for (int j = 4 * part; j < num_nodes; j += 4 << shift) {
        const uint4 four = *reinterpret_cast<const uint4 *>(shared.packed + j);
        offset += before(four.x) + before(four.y) + before(four.z) + before(four.w);
      }
    }
    for (int step = 1; step < 1 << shift; step *= 2) offset += __shfl_xor_sync(FULL_WARP, offset, step);
    if (node < num_nodes && part == 0) shared.offset[node] = offset;
  }
  __syncthreads();
  if (is_node) {
    int position = 0;
#pragma unroll 4
    for (int depth = shared.depth[i]; depth > 0; --depth) position += shared.offset[shared.path[i][depth]];
    shared.position[i] = position;
    shared.node[position] = i;
  }
  __syncthreads();

  const int n = tree.max_nodes, words = tree.words, places = tree.max_depth + 1;
  const int64_t row = static_cast<int64_t>(r) * n;
  for (int k = i; k < n; k += threads) {
    const bool exists = k < num_nodes;
    const int node = exists ? shared.node[k] : 0, parent = shared.parent[node], end = k + shared.size[node];
    // what comes after a subtree is a sibling or an ancestor's
    const bool has_sibling = exists && end < num_nodes && shared.parent[shared.node[end]] == parent;
    if (tree.tokens) tree.tokens[row + k] = exists ? shared.token[node] : -1;
    if (tree.parents) tree.parents[row + k] = exists && k > 0 ? shared.position[parent] : -1;
    if (tree.depths) tree.depths[row + k] = exists ? shared.depth[node] : -1;
    if (tree.first_child) tree.first_child[row + k] = exists && end > k + 1 ? k + 1 : -1;
    if (tree.next_sibling) tree.next_sibling[row + k] = has_sibling ? end : -1;
    if (tree.subtree_end) tree.subtree_end[row + k] = exists ? end : 0;
    if (tree.positions) tree.positions[row + k] = exists ? root_position + shared.depth[node] : 0;
    if (tree.pop_ranks) tree.pop_ranks[row + k] = exists ? pop_rank(node) : -1;
    if (order) order[row + k] = exists ? node : -1;
  }
  if (tree.ancestors) {
    const Division by_places(places);
    for (int k = i; k < n * places; k += threads) {
      const int at = by_places.quotient(k), place = k - at * places;
      const int node = at < num_nodes ? shared.node[at] : 0;
      const bool exists = at < num_nodes && place <= shared.depth[node];
      tree.ancestors[row * places + k] = exists ? shared.position[shared.path[node][place]] : -1;
    }
  }
  if (tree.ancestor_bits) {
    const Division by_words(words);
    for (int k = i; k < n * words; k += threads) {
      const int at = by_words.quotient(k), word = k - at * words;
      uint32_t bits = 0;
      if (at < num_nodes) {
        const int node = shared.node[at];
#pragma unroll 4
        for (int place = shared.depth[node]; place >= 0; --place) {
          const int ancestor = shared.position[shared.path[node][place]];
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
