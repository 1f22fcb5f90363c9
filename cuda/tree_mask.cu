// SPDX-License-Identifier: Apache-2.0
//
// tree_mask: the layout of trees that the caller built. A block per request.
#include "params/tree_mask.h"
#include "topology.cuh"

using namespace ddt;

extern "C" __global__ void __launch_bounds__(MAX_NODES) ddt_tree_mask(const __grid_constant__ ddt_cuda_tree_mask p) {
  __shared__ Topology shared;
  __shared__ int16_t parents[MAX_NODES];
  __shared__ int32_t priorities[MAX_NODES];
  const int r = blockIdx.x, i = threadIdx.x, max_depth = p.tree.max_depth;
  const int64_t row = static_cast<int64_t>(r) * p.tree.max_nodes;
  const int num_nodes = min(max(p.num_nodes[r], 0), max_depth == 0 ? 1 : p.tree.max_nodes);
  if (i < num_nodes) {
    parents[i] = i == 0 ? -1 : min(max(p.parents[row + i], 0), i - 1);
    shared.token[i] = p.tokens ? p.tokens[row + i] : -1;
    priorities[i] = p.priorities ? p.priorities[row + i] : i;
  }
  __syncthreads();
  if (i < num_nodes) {
    int depth = 0, parent = parents[i];
    for (int j = parent; j >= 0; j = parents[j]) ++depth;
    // what is too deep hangs from the last ancestor that may have children
    for (; depth > max_depth; --depth) parent = parents[parent];
    shared.parent[i] = parent;
    shared.depth[i] = depth;
    int rank = 0;
    for (int j = 0; j < num_nodes; ++j) {
      rank += priorities[j] < priorities[i] || (priorities[j] == priorities[i] && j < i);
    }
    shared.rank[i] = rank;
  }
  __syncthreads();
  const auto pop_rank = [&](int node) { return priorities[node]; };
  write_tree(p.tree, r, num_nodes, shared, p.root_positions ? p.root_positions[r] : 0, 0, pop_rank, p.order);
}
