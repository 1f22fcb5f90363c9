// SPDX-License-Identifier: Apache-2.0
//
// tree_build: the best tree under a node budget, bit for bit that of rust/tree_build.rs. Two
// launches: the scores of each depth are summarised by many blocks, then the child lists are made
// and the last block of each request to finish searches. tree_build.md says why like this.
#include <float.h>

#include "params/tree_build.h"
#include "scores.cuh"
#include "topology.cuh"

namespace ddt {
namespace {

constexpr int CHUNK = DDT_CUDA_TREE_BUILD_CHUNK;
constexpr int BLOCK = DDT_CUDA_TREE_BUILD_BLOCK;
constexpr int BLOCKS_PER_CHUNK = CHUNK / BLOCK;
constexpr uint32_t NONFINITE_BIT = 1u << 31;
// DDT_FLAG_* of ddtree.h
constexpr uint32_t FLAG_NO_CANDIDATES = 1, FLAG_NONFINITE = 2, FLAG_CANDIDATES_EXHAUSTED = 4;

// What one request asks for, made safe.
struct Request {
  int budget;       // negative for a padding request
  int depth_limit;  // largest depth of its tree
  int max_children;

  __device__ Request(const ddt_cuda_tree_build &p, int r) {
    const int largest = p.tree.max_nodes - 1;
    budget = p.node_budgets ? min(p.node_budgets[r], largest) : largest;
    const int depth_cap = p.depth_caps ? max(p.depth_caps[r], 0) : p.tree.max_depth;
    depth_limit = max(min(min(p.num_rows, depth_cap), budget), 0);
    const int cap = p.candidate_caps ? p.candidate_caps[r] : 0;
    max_children = cap > 0 ? min(budget, cap) : budget;
  }
};

// A factor that cannot be makes every score of its depth a NaN, which means "never".
__device__ __forceinline__ float depth_scale(const ddt_cuda_tree_build &p, int depth) {
  if (p.depth_scales == nullptr) return 1.0f;
  const float scale = p.depth_scales[depth];
  return scale > 0.0f && scale < INFINITY ? scale : NAN;
}

__device__ __forceinline__ bool is_usable(float x) { return fabsf(x) < INFINITY; }

// ---- from logits: what each chunk of a row says

constexpr int PER_THREAD = 16;
constexpr int SUMMARIZE_THREADS = CHUNK / PER_THREAD;
constexpr int THREADS_PER_BLOCK_OF_IDS = BLOCK / PER_THREAD;
constexpr int SUMMARIZE_WARPS = SUMMARIZE_THREADS / 32;
// Row length that keeps lanes of different blocks in different banks.
constexpr int LANE_PITCH = BLOCK + 4;

template <typename T>
__device__ __forceinline__ void load_logits(const T *row, int64_t stride, uint32_t first, uint32_t vocab, bool vector,
                                            float (&x)[PER_THREAD]) {
  if (vector && first + PER_THREAD <= vocab) {
    constexpr int VECTORS = PER_THREAD * sizeof(T) / 16;
    uint4 raw[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) raw[i] = __ldcs(reinterpret_cast<const uint4 *>(row + first) + i);
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) x[i] = to_f32(reinterpret_cast<const T *>(raw)[i]);
  } else {
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      x[i] = first + i < vocab ? to_f32(row[(first + i) * stride]) : -INFINITY;
    }
  }
}

template <typename T>
__device__ __forceinline__ void summarize(const ddt_cuda_tree_build &p) {
  __shared__ float exponentials[BLOCKS_PER_CHUNK * LANE_PITCH];
  __shared__ float warp_maxima[SUMMARIZE_WARPS];
  __shared__ uint32_t warp_usable[SUMMARIZE_WARPS];
  __shared__ float upper_lanes[BLOCK / 2];

  let_next_kernel_start();
  const int chunk = blockIdx.x, depth = blockIdx.y, r = blockIdx.z, i = threadIdx.x;
  if (chunk == 0 && depth == 0 && i == 0) p.arrived[r] = 0;
  if (chunk >= p.num_chunks || depth >= Request(p, r).depth_limit) return;

  const ddt_cuda_view &view = p.logits;
  const T *row = static_cast<const T *>(view.data) + r * view.strides[0] + depth * view.strides[1];
  // unsigned: ids of a padded chunk may go beyond 2^31
  const uint32_t vocab = p.vocab, first = static_cast<uint32_t>(chunk) * CHUNK + i * PER_THREAD;
  const float scale = depth_scale(p, depth);
  float x[PER_THREAD];
  load_logits(row, view.strides[2], first, vocab, p.vector, x);
  uint32_t usable = 0;
  float max_x = -INFINITY;
#pragma unroll
  for (int j = 0; j < PER_THREAD; ++j) {
    const float scaled = __fmul_rn(x[j], scale);
    const bool in_vocab = first + j < vocab;
    if (is_usable(scaled) && in_vocab) {
      usable += 1;
    } else {
      if (scaled != -INFINITY && in_vocab) usable |= NONFINITE_BIT;
    }
    x[j] = is_usable(scaled) && in_vocab ? scaled : -INFINITY;
    max_x = fmaxf(max_x, x[j]);
  }

#pragma unroll
  for (int step = 1; step < THREADS_PER_BLOCK_OF_IDS; step *= 2) {
    max_x = fmaxf(max_x, __shfl_xor_sync(FULL_WARP, max_x, step));
  }
  const int64_t task = static_cast<int64_t>(r) * p.num_rows + depth;
  const int block = chunk * BLOCKS_PER_CHUNK + i / THREADS_PER_BLOCK_OF_IDS;
  if (i % THREADS_PER_BLOCK_OF_IDS == 0 && block < p.num_blocks) p.block_max[task * p.num_blocks + block] = max_x;

  max_x = warp_max(max_x);
  const bool nonfinite = __any_sync(FULL_WARP, usable & NONFINITE_BIT);
  usable = __reduce_add_sync(FULL_WARP, usable & ~NONFINITE_BIT) | (nonfinite ? NONFINITE_BIT : 0);
  if (i % 32 == 0) {
    warp_maxima[i / 32] = max_x;
    warp_usable[i / 32] = usable;
  }
  __syncthreads();
  float chunk_max = warp_maxima[0];
#pragma unroll
  for (int warp = 1; warp < SUMMARIZE_WARPS; ++warp) chunk_max = fmaxf(chunk_max, warp_maxima[warp]);

  if (chunk_max > -INFINITY) {
    float *to = exponentials + i / THREADS_PER_BLOCK_OF_IDS * LANE_PITCH + i % THREADS_PER_BLOCK_OF_IDS * PER_THREAD;
#pragma unroll
    for (int j = 0; j < PER_THREAD; j += 4) {
      float4 quad;
      quad.x = exp_spec(__fsub_rn(x[j], chunk_max));
      quad.y = exp_spec(__fsub_rn(x[j + 1], chunk_max));
      quad.z = exp_spec(__fsub_rn(x[j + 2], chunk_max));
      quad.w = exp_spec(__fsub_rn(x[j + 3], chunk_max));
      *reinterpret_cast<float4 *>(to + j) = quad;
    }
  }
  __syncthreads();
  // ids in ascending order within a lane, then the lanes in halves
  float sum = 0.0f;
  if (i < BLOCK && chunk_max > -INFINITY) {
#pragma unroll 16
    for (int b = 0; b < BLOCKS_PER_CHUNK; ++b) sum = __fadd_rn(sum, exponentials[b * LANE_PITCH + i]);
    if (i >= BLOCK / 2) upper_lanes[i - BLOCK / 2] = sum;
  }
  __syncthreads();
  if (i >= 32) return;
  sum = __fadd_rn(sum, chunk_max > -INFINITY ? upper_lanes[i] : 0.0f);
#pragma unroll
  for (int half = 16; half > 0; half /= 2) sum = __fadd_rn(sum, __shfl_down_sync(FULL_WARP, sum, half));
  if (i == 0) {
    uint32_t total = 0;
    for (uint32_t part : warp_usable) total = (total + (part & ~NONFINITE_BIT)) | (part & NONFINITE_BIT);
    p.chunk_max[task * p.num_chunks + chunk] = chunk_max;
    p.chunk_sum[task * p.num_chunks + chunk] = sum;
    p.chunk_usable[task * p.num_chunks + chunk] = total;
  }
}

// ---- the search

constexpr uint64_t NO_KEY = UINT64_MAX;

// The child lists of a request: rows of keys, best first, each ended by NO_KEY.
struct Lists {
  const uint64_t *keys;
  const uint16_t *columns;  // NULL without a lattice
  int pitch;
  int per_row;  // lists of each depth but the first

  __device__ int of(int depth, int column) const { return depth == 0 ? 0 : 1 + (depth - 1) * per_row + column; }
  // One past the last list of the first `depths` depths.
  __device__ int end(int depths) const { return depths == 0 ? 0 : 1 + (depths - 1) * per_row; }
};

struct SearchShared {
  Topology topology;
  // best child of each node that is not in the tree, 0 for none; see entry_of
  uint64_t entry[MAX_NODES];
  int32_t score[MAX_NODES];
  // of each node in the lattice
  uint16_t column[MAX_NODES];
  int num_nodes;
  uint32_t flags;
};

// A possible next node: the largest is next. Score, then the earlier parent, then the better
// sibling; the parent's depth rides along below.
__device__ __forceinline__ uint64_t entry_of(int32_t score, uint64_t key, int parent, int sibling, int depth) {
  if (key == NO_KEY) return 0;
  const uint32_t high = static_cast<uint32_t>(extend_path(score, key_score(key))) - 0x80000000u;
  return static_cast<uint64_t>(high) << 32 |
         static_cast<uint32_t>((255 - parent) << 24 | (255 - sibling) << 16 | depth);
}

// Best-first search by one warp. Lane l looks after the entries of nodes l, l + 32, ... and keeps
// the largest in registers. What a step reads follows from the winning entry alone, so that all its
// loads are in flight at once.
__device__ __forceinline__ void search(const ddt_cuda_tree_build &p, int r, const Request &request,
                                       const Lists &lists, const ddt_cuda_child_list *infos, SearchShared &shared) {
  const int lane = threadIdx.x;
  Topology &tree = shared.topology;
  const int32_t *stops = p.stop_tokens + static_cast<int64_t>(r) * p.max_stop_tokens;
  const int stop_min_depth = p.stop_min_depths ? p.stop_min_depths[r] : 0;
  const int end = lists.end(request.depth_limit);
  uint32_t flags = 0;
  for (int list = lane; list < end; list += 32) flags |= infos[list].has_nonfinite ? FLAG_NONFINITE : 0;
  uint64_t best = 0;
  if (lane == 0) {
    tree.parent[0] = -1;
    tree.depth[0] = 0;
    tree.token[0] = p.root_tokens[r];
    shared.score[0] = 0;
    shared.column[0] = 0;
    if (request.depth_limit > 0) best = entry_of(0, lists.keys[0], 0, 0, 0);
    if (request.depth_limit > 0 && best == 0) flags |= FLAG_NO_CANDIDATES;
    shared.entry[0] = best;
  }
  __syncwarp();
  int num_nodes = 1;
  while (num_nodes <= request.budget) {
    const uint32_t high = static_cast<uint32_t>(best >> 32), low = static_cast<uint32_t>(best);
    const uint32_t top = __reduce_max_sync(FULL_WARP, high);
    if (top == 0) break;
    const uint32_t place = __reduce_max_sync(FULL_WARP, high == top ? low : 0);
    const int parent = 255 - static_cast<int>(place >> 24), sibling = 255 - static_cast<int>(place >> 16 & 255);
    const int depth = static_cast<int>(place & 255);
    const int list = lists.of(depth, lists.per_row > 1 ? shared.column[parent] : 0);
    const int64_t at = static_cast<int64_t>(list) * lists.pitch + sibling;
    const uint64_t key = lists.keys[at], next = lists.keys[at + 1];
    const int32_t score = static_cast<int32_t>(top + 0x80000000u), parent_score = shared.score[parent];
    const int token = key_token(key), column = lists.per_row > 1 ? lists.columns[at] : 0;
    bool opens = depth + 1 < request.depth_limit;
    const uint64_t child =
        opens ? lists.keys[static_cast<int64_t>(lists.of(depth + 1, column)) * lists.pitch] : NO_KEY;
    if (opens && p.max_stop_tokens > 0 && token >= 0 && depth + 1 >= stop_min_depth) {
      bool is_stop = false;
      for (int i = lane; i < p.max_stop_tokens; i += 32) is_stop |= stops[i] == token;
      opens = !__any_sync(FULL_WARP, is_stop);
    }
    if (next == NO_KEY && infos[list].is_cut) flags |= FLAG_CANDIDATES_EXHAUSTED;
    if (lane == parent % 32) {
      shared.entry[parent] = entry_of(parent_score, next, parent, sibling + 1, depth);
      best = 0;
      for (int node = lane; node < num_nodes; node += 32) best = max(best, shared.entry[node]);
    }
    if (lane == num_nodes % 32) {
      const uint64_t entry = opens ? entry_of(score, child, num_nodes, 0, depth + 1) : 0;
      shared.entry[num_nodes] = entry;
      best = max(best, entry);
      tree.parent[num_nodes] = parent;
      tree.depth[num_nodes] = depth + 1;
      tree.token[num_nodes] = token;
      shared.score[num_nodes] = score;
      shared.column[num_nodes] = column;
    }
    __syncwarp();
    ++num_nodes;
  }
  flags = __reduce_or_sync(FULL_WARP, flags);
  if (lane == 0) {
    shared.num_nodes = num_nodes;
    shared.flags = flags;
  }
}

// Searches and writes the tree of request r, by all threads of a block.
__device__ __forceinline__ void build(const ddt_cuda_tree_build &p, int r, const Request &request,
                                      SearchShared &shared, uint64_t *dynamic) {
  __shared__ ddt_cuda_child_list infos[DDT_CUDA_MAX_DEPTH];
  if (request.budget >= 0) {
    const int num_lists = p.num_rows == 0 ? 0 : 1 + (p.num_rows - 1) * p.lists_per_row;
    const int64_t first = static_cast<int64_t>(r) * num_lists;
    const int pitch = p.list_capacity + 1;
    Lists lists{p.keys + first * pitch, p.columns ? p.columns + first * pitch : nullptr, pitch, p.lists_per_row};
    if (p.lists_in_shared) {
      // lists of depths that the tree cannot have are not written, nor read
      const int used = lists.end(request.depth_limit), used_pitch = min(p.list_capacity, request.max_children) + 1;
      uint16_t *columns = reinterpret_cast<uint16_t *>(dynamic + num_lists * pitch);
      for (int i = threadIdx.x; i < used * used_pitch; i += blockDim.x) {
        const int at = i / used_pitch * pitch + i % used_pitch;
        dynamic[at] = __ldcg(lists.keys + at);
        if (lists.columns) columns[at] = __ldcg(lists.columns + at);
      }
      lists.keys = dynamic;
      if (lists.columns) lists.columns = columns;
    }
    const ddt_cuda_child_list *all = p.lists + first;
    if (p.lists_per_row == 1) {
      for (int i = threadIdx.x; i < request.depth_limit; i += blockDim.x) infos[i] = all[i];
      all = infos;
    }
    if (threadIdx.x < MAX_NODES) shared.topology.rank[threadIdx.x] = threadIdx.x;
    __syncthreads();
    if (threadIdx.x < 32) search(p, r, request, lists, all, shared);
  } else if (threadIdx.x == 0) {
    shared.num_nodes = 0;
    shared.flags = 0;
  }
  __syncthreads();
  const auto pop_rank = [](int node) { return node; };
  write_tree(p.tree, r, shared.num_nodes, shared.topology, p.root_positions[r], shared.flags, pop_rank, nullptr);
}

// ---- from logits: the child list of each depth

constexpr int SELECT_THREADS = 512;
constexpr int SELECT_WARPS = SELECT_THREADS / 32;
// Blocks of ids that a thread keeps the maxima of in registers; a larger vocabulary is read again.
constexpr int MAXIMA_PER_THREAD = 8;
constexpr int BUFFER = 1024;
// Blocks that may have a candidate.
constexpr int MAX_HITS = 1024;
// Elements that are looked at before the buffer is cut, when there are more than it holds.
constexpr int BLOCKS_PER_ROUND = SELECT_THREADS / BLOCK;

struct SelectShared {
  uint64_t buffer[BUFFER];
  uint32_t hits[MAX_HITS];
  float sums[SELECT_THREADS];
  uint32_t counts[34];
  float warp_min[SELECT_WARPS], warp_max[SELECT_WARPS];
  double ln_z;
  uint32_t num_usable, has_nonfinite, num_hits, num_keys;
  bool is_last;
};

// Keeps the best `count` of the `size` distinct keys of the buffer, sorted.
__device__ __forceinline__ void keep_best(uint64_t *buffer, int size, int count) {
  uint64_t keys[BUFFER / SELECT_THREADS];
  int ranks[BUFFER / SELECT_THREADS];
#pragma unroll
  for (int k = 0; k < BUFFER / SELECT_THREADS; ++k) {
    const int i = threadIdx.x + k * SELECT_THREADS;
    ranks[k] = count;
    if (i < size) {
      keys[k] = buffer[i];
      int rank = 0;
#pragma unroll 8
      for (int j = 0; j < size; ++j) rank += buffer[j] < keys[k];
      ranks[k] = rank;
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < BUFFER / SELECT_THREADS; ++k) {
    if (ranks[k] < count) buffer[ranks[k]] = keys[k];
  }
  __syncthreads();
}

template <typename T>
struct Row {
  const T *data;
  int64_t stride;
  uint32_t vocab;
  float scale;

  // Usable score of a token, or -inf.
  __device__ float x(uint32_t token) const {
    const float scaled = token < vocab ? __fmul_rn(to_f32(data[token * stride]), scale) : -INFINITY;
    return is_usable(scaled) ? scaled : -INFINITY;
  }
};

// The list of one depth, into the workspace: rust/scores.rs, RowSummary.
template <typename T>
__device__ __forceinline__ void select_row(const ddt_cuda_tree_build &p, int r, int depth, const Request &request,
                           SelectShared &shared) {
  const int i = threadIdx.x, lane = i % 32, warp = i / 32;
  const int64_t task = static_cast<int64_t>(r) * p.num_rows + depth;
  const float *block_max = p.block_max + task * p.num_blocks;
  float maxima[MAXIMA_PER_THREAD];
#pragma unroll
  for (int k = 0; k < MAXIMA_PER_THREAD; ++k) {
    const int block = k * SELECT_THREADS + i;
    maxima[k] = block < p.num_blocks ? __ldcg(block_max + block) : -INFINITY;
  }
  const auto for_each_block = [&](auto &&use) {
#pragma unroll
    for (int k = 0; k < MAXIMA_PER_THREAD; ++k) use(k * SELECT_THREADS + i, maxima[k]);
    for (int block = MAXIMA_PER_THREAD * SELECT_THREADS + i; block < p.num_blocks; block += SELECT_THREADS) {
      use(block, __ldcg(block_max + block));
    }
  };

  // the normaliser: chunk by chunk in ascending order
  if (i < 34) shared.counts[i] = 0;
  if (i == 0) shared.num_usable = shared.has_nonfinite = shared.num_hits = shared.num_keys = 0;
  float thread_max = -INFINITY;
  for_each_block([&](int, float x) { thread_max = fmaxf(thread_max, x); });
  const float low_of_warp = -warp_max(-thread_max), high_of_warp = warp_max(thread_max);
  if (lane == 0) {
    shared.warp_min[warp] = low_of_warp;
    shared.warp_max[warp] = high_of_warp;
  }
  __syncthreads();
  float row_max = -INFINITY, row_low = INFINITY;
#pragma unroll
  for (int k = 0; k < SELECT_WARPS; ++k) {
    row_max = fmaxf(row_max, shared.warp_max[k]);
    row_low = fminf(row_low, shared.warp_min[k]);
  }
  float sum = 0.0f;
  for (int start = 0; start < p.num_chunks; start += SELECT_THREADS) {
    const int chunk = start + i;
    float factor = 0.0f, chunk_sum = 0.0f;
    if (chunk < p.num_chunks) {
      const uint32_t usable = p.chunk_usable[task * p.num_chunks + chunk];
      const float chunk_max = p.chunk_max[task * p.num_chunks + chunk];
      atomicAdd(&shared.num_usable, usable & ~NONFINITE_BIT);
      if (usable & NONFINITE_BIT) atomicOr(&shared.has_nonfinite, 1u);
      if (chunk_max > -INFINITY) {
        factor = exp_spec(__fsub_rn(chunk_max, row_max));
        chunk_sum = p.chunk_sum[task * p.num_chunks + chunk];
      }
    }
    // a chunk without usable scores adds 0 * 0, which changes nothing
    float *const factors = reinterpret_cast<float *>(shared.buffer);
    factors[i] = factor;
    shared.sums[i] = chunk_sum;
    __syncthreads();
    if (i == 0) {
      const int count = min(p.num_chunks - start, SELECT_THREADS);
#pragma unroll 8
      for (int k = 0; k < count; ++k) sum = __fmaf_rn(shared.sums[k], factors[k], sum);
    }
    __syncthreads();
  }
  const uint32_t num_usable = shared.num_usable;
  if (i == 0) shared.ln_z = num_usable > 0 ? __dadd_rn(static_cast<double>(row_max), ln_spec(sum)) : 0.0;

  const int limit = p.max_candidates > 0 ? min(p.max_candidates, request.max_children) : request.max_children;
  const int want = min(limit, p.list_capacity);
  // A score that at least `want` blocks reach. Any will do; one that few more reach is found by
  // bisection of the scores' bits.
  float threshold = -INFINITY;
  if (want > 0 && row_max > -INFINITY) {
    // every thread has a block of at least row_low, so that many blocks reach it
    uint32_t low = ordered(row_low > -INFINITY ? row_low : -FLT_MAX), high = ordered(row_max) + 1;
    for (int step = 0; step < 34; ++step) {
      uint32_t middle = step == 0 ? low : low + (high - low) / 2;
      int count = 0;
      for_each_block([&](int, float x) { count += x > -INFINITY && ordered(x) >= middle; });
      count = __reduce_add_sync(FULL_WARP, count);
      if (lane == 0) atomicAdd(&shared.counts[step], count);
      __syncthreads();
      const int total = shared.counts[step];
      if (step == 0 && total < want) {
        low = 0;  // fewer blocks than candidates: all of them
        break;
      }
      if (total >= want) {
        low = middle;
        if (total <= want + want / 4 + 8) break;
      } else {
        high = middle;
      }
      if (high - low <= 1) break;
    }
    threshold = low == 0 ? -INFINITY : from_ordered(low);
  }
  __syncthreads();
  const double ln_z = shared.ln_z;
  const int32_t worst = threshold > -INFINITY ? edge_score(threshold, ln_z) : MIN_SCORE;
  // no smaller x can have this score: a unit is 2^-21. The worst score has no such limit.
  const float floor_x = worst > MIN_SCORE ? threshold - 1e-6f - fabsf(threshold) * 3e-7f : -FLT_MAX;
  const auto qualifies = [&](float x) {
    return x >= floor_x && (x >= threshold || edge_score(x, ln_z) >= worst);
  };

  if (want > 0 && row_max > -INFINITY) {
    for_each_block([&](int block, float x) {
      if (!qualifies(x)) return;
      const uint32_t at = atomicAdd(&shared.num_hits, 1u);
      if (at < MAX_HITS) shared.hits[at] = block;
    });
  }
  __syncthreads();
  const int num_hits = shared.num_hits;
  const ddt_cuda_view &view = p.logits;
  const Row<T> row{static_cast<const T *>(view.data) + r * view.strides[0] + depth * view.strides[1], view.strides[2],
                   static_cast<uint32_t>(p.vocab), depth_scale(p, depth)};
  // First all blocks that can have a candidate; if those are too many, then all blocks in
  // ascending order, and the buffer is cut after each round. There later ids lose ties.
  bool in_rounds = num_hits > MAX_HITS;
  int num_keys = 0, start = 0;
  int32_t needed = worst;
  while (true) {
    if (in_rounds) {
      const uint32_t token = static_cast<uint32_t>(start) * BLOCK + i;
      const float x = row.x(token);
      const int32_t score = x > -INFINITY ? edge_score(x, ln_z) : MIN_SCORE;
      if (x > -INFINITY && score >= needed) {
        shared.buffer[atomicAdd(&shared.num_keys, 1u)] = candidate_key(score, token);
      }
      start += BLOCKS_PER_ROUND;
    } else {
      // a warp per block of ids, two at a time so that their loads overlap
      for (int hit = warp; hit < num_hits; hit += 2 * SELECT_WARPS) {
        const bool has_second = hit + SELECT_WARPS < num_hits;
        uint32_t tokens[4];
        float x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t block = shared.hits[k < 2 || has_second ? hit + k / 2 * SELECT_WARPS : hit];
          tokens[k] = block * BLOCK + k % 2 * 32 + lane;
          x[k] = k < 2 || has_second ? row.x(tokens[k]) : -INFINITY;
        }
#pragma unroll 1
        for (int k = 0; k < 4; ++k) {
          const float candidate = k == 0 ? x[0] : k == 1 ? x[1] : k == 2 ? x[2] : x[3];
          if (candidate == -INFINITY || candidate < floor_x) continue;
          const int32_t score = edge_score(candidate, ln_z);
          if (score < worst) continue;
          const uint32_t at = atomicAdd(&shared.num_keys, 1u);
          const uint32_t token = k == 0 ? tokens[0] : k == 1 ? tokens[1] : k == 2 ? tokens[2] : tokens[3];
          if (at < BUFFER) shared.buffer[at] = candidate_key(score, token);
        }
      }
    }
    __syncthreads();
    const int size = shared.num_keys;
    const bool overflows = size > BUFFER;
    if (!overflows && size > num_keys) keep_best(shared.buffer, size, want);
    if (!in_rounds && !overflows) {
      num_keys = min(size, want);
      break;
    }
    if (in_rounds && size > num_keys) {
      num_keys = min(size, want);
      if (num_keys == want) needed = key_score(shared.buffer[want - 1]) + 1;
    }
    in_rounds = true;
    if (start >= p.num_blocks || needed > 0) break;
    __syncthreads();
    if (i == 0) shared.num_keys = num_keys;
    __syncthreads();
  }
  uint64_t *keys = p.keys + task * (p.list_capacity + 1);
  for (int k = i; k <= num_keys; k += SELECT_THREADS) keys[k] = k < num_keys ? shared.buffer[k] : NO_KEY;
  if (i == 0) {
    p.lists[task] = {num_keys, limit < request.max_children && num_usable > static_cast<uint32_t>(limit),
                     static_cast<int32_t>(shared.has_nonfinite), 0};
  }
}

template <typename T>
__device__ __forceinline__ void select(const ddt_cuda_tree_build &p) {
  extern __shared__ uint64_t dynamic[];
  __shared__ union Shared {
    SelectShared select;
    SearchShared search;
    __device__ Shared() {}
  } shared;
  wait_for_previous_kernel();
  const int depth = blockIdx.x, r = blockIdx.y;
  const Request request(p, r);
  if (depth < request.depth_limit) select_row<T>(p, r, depth, request, shared.select);
  // the last block of the request goes on
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.select.is_last = atomicAdd(&p.arrived[r], 1u) == gridDim.x - 1;
  __syncthreads();
  if (!shared.select.is_last) return;
  __threadfence();
  __syncthreads();
  build(p, r, request, shared.search, dynamic);
}

// ---- from a candidate lattice

constexpr int LISTS_THREADS = 128;

// One child list: of the candidates of a depth below one candidate of the depth before.
__device__ __forceinline__ void make_list(const ddt_cuda_tree_build &p) {
  extern __shared__ uint64_t dynamic[];
  __shared__ int any_parent, has_nonfinite, num_usable;
  __shared__ float warp_maxima[LISTS_THREADS / 32];
  __shared__ double ln_z;

  let_next_kernel_start();
  const int parent = blockIdx.x, depth = blockIdx.y, r = blockIdx.z, i = threadIdx.x;
  const Request request(p, r);
  if (depth >= request.depth_limit || (depth == 0 && parent > 0)) return;
  const ddt_cuda_view &tokens = p.candidate_tokens, &scores = p.candidate_scores, &pairs = p.transition_scores;
  const int width = p.num_candidates;
  uint64_t *const keys = dynamic;
  float *const xs = reinterpret_cast<float *>(keys + width);
  const auto token_of = [&](int at_depth, int column) {
    return static_cast<const int32_t *>(
        tokens.data)[r * tokens.strides[0] + at_depth * tokens.strides[1] + column * tokens.strides[2]];
  };
  // with one list for all parents, it counts if there is any parent
  if (i == 0) any_parent = depth == 0, has_nonfinite = num_usable = 0;
  __syncthreads();
  if (depth > 0) {
    if (pairs.data) {
      if (i == 0) any_parent = token_of(depth - 1, parent) >= 0;
    } else {
      for (int column = i; column < width; column += LISTS_THREADS) {
        if (token_of(depth - 1, column) >= 0) atomicOr(&any_parent, 1);
      }
    }
  }
  __syncthreads();
  const float scale = depth_scale(p, depth);
  float max_x = -INFINITY;
  int usable = 0;
  for (int column = i; column < width; column += LISTS_THREADS) {
    float x = -INFINITY;
    if (any_parent && token_of(depth, column) >= 0) {
      x = static_cast<const float *>(
          scores.data)[r * scores.strides[0] + depth * scores.strides[1] + column * scores.strides[2]];
      if (pairs.data) {
        x = __fadd_rn(x, static_cast<const float *>(pairs.data)[r * pairs.strides[0] + depth * pairs.strides[1] +
                                                                parent * pairs.strides[2] + column * pairs.strides[3]]);
      }
      x = __fmul_rn(x, scale);
      if (is_usable(x)) {
        usable += 1;
      } else {
        if (x != -INFINITY) atomicOr(&has_nonfinite, 1);
        x = -INFINITY;
      }
    }
    xs[column] = x;
    max_x = fmaxf(max_x, x);
  }
  max_x = warp_max(max_x);
  usable = __reduce_add_sync(FULL_WARP, usable);
  if (i % 32 == 0) {
    warp_maxima[i / 32] = max_x;
    atomicAdd(&num_usable, usable);
  }
  __syncthreads();
  for (float other : warp_maxima) max_x = fmaxf(max_x, other);
  // exponentials first, all at once; their sum is in the order of the list
  float *const exponentials = reinterpret_cast<float *>(keys);
  for (int column = i; column < width; column += LISTS_THREADS) {
    exponentials[column] = xs[column] > -INFINITY ? exp_spec(__fsub_rn(xs[column], max_x)) : 0.0f;
  }
  __syncthreads();
  if (i == 0 && num_usable > 0) {
    float sum = 0.0f;
#pragma unroll 8
    for (int column = 0; column < width; ++column) sum = __fadd_rn(sum, exponentials[column]);
    ln_z = __dadd_rn(static_cast<double>(max_x), ln_spec(sum));
  }
  __syncthreads();
  for (int column = i; column < width; column += LISTS_THREADS) {
    keys[column] = xs[column] > -INFINITY
                       ? candidate_key(edge_score(xs[column], ln_z), static_cast<uint32_t>(token_of(depth, column)))
                       : NO_KEY;
  }
  __syncthreads();
  const int length = min(min(num_usable, request.max_children), p.list_capacity), pitch = p.list_capacity + 1;
  const int num_lists = 1 + (p.num_rows - 1) * p.lists_per_row;
  const int64_t list =
      static_cast<int64_t>(r) * num_lists + (depth == 0 ? 0 : 1 + (depth - 1) * p.lists_per_row + parent);
  for (int column = i; column < width; column += LISTS_THREADS) {
    const uint64_t key = keys[column];
    if (key == NO_KEY) continue;
    // ties only between equal tokens, which the caller promised not to give
    int rank = 0;
    for (int other = 0; other < width; ++other) {
      rank += keys[other] < key || (keys[other] == key && other < column);
    }
    if (rank < length) {
      p.keys[list * pitch + rank] = key;
      p.columns[list * pitch + rank] = static_cast<uint16_t>(column);
    }
  }
  if (i == 0) p.keys[list * pitch + length] = NO_KEY;
  if (i == 0) p.lists[list] = {length, num_usable == width && width < request.max_children, has_nonfinite, 0};
}

}  // namespace
}  // namespace ddt

using namespace ddt;

extern "C" __global__ void __launch_bounds__(SUMMARIZE_THREADS)
    ddt_tree_build_summarize_f32(const __grid_constant__ ddt_cuda_tree_build p) {
  summarize<float>(p);
}
extern "C" __global__ void __launch_bounds__(SUMMARIZE_THREADS)
    ddt_tree_build_summarize_f16(const __grid_constant__ ddt_cuda_tree_build p) {
  summarize<__half>(p);
}
extern "C" __global__ void __launch_bounds__(SUMMARIZE_THREADS)
    ddt_tree_build_summarize_bf16(const __grid_constant__ ddt_cuda_tree_build p) {
  summarize<__nv_bfloat16>(p);
}
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    ddt_tree_build_select_f32(const __grid_constant__ ddt_cuda_tree_build p) {
  select<float>(p);
}
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    ddt_tree_build_select_f16(const __grid_constant__ ddt_cuda_tree_build p) {
  select<__half>(p);
}
extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1)
    ddt_tree_build_select_bf16(const __grid_constant__ ddt_cuda_tree_build p) {
  select<__nv_bfloat16>(p);
}
extern "C" __global__ void __launch_bounds__(LISTS_THREADS, 1)
    ddt_tree_build_lists(const __grid_constant__ ddt_cuda_tree_build p) {
  make_list(p);
}
extern "C" __global__ void __launch_bounds__(MAX_NODES)
    ddt_tree_build_search(const __grid_constant__ ddt_cuda_tree_build p) {
  extern __shared__ uint64_t dynamic[];
  __shared__ SearchShared shared;
  wait_for_previous_kernel();
  build(p, blockIdx.x, Request(p, blockIdx.x), shared, dynamic);
}
