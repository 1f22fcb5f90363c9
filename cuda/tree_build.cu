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

// The tree that request r writes, negative for none.
__device__ __forceinline__ int64_t tree_of(const ddt_cuda_tree_build &p, int r) {
  if (p.tree_index.data == nullptr) return r;
  const int64_t tree = load_index(p.tree_index, r);
  return tree < p.tree.num_reqs ? tree : -1;
}

// What one request asks for, made safe.
struct Request {
  int budget;       // negative for a padding request
  int depth_limit;  // largest depth of its tree
  int max_children;
  int spine_depth;

  __device__ Request(const ddt_cuda_tree_build &p, int r) {
    const int largest = p.tree.max_nodes - 1;
    budget = p.node_budgets ? min(p.node_budgets[r], largest) : largest;
    if (tree_of(p, r) < 0) budget = -1;
    const int depth_cap = p.depth_caps ? max(p.depth_caps[r], 0) : p.tree.max_depth;
    depth_limit = max(min(min(p.num_rows, depth_cap), budget), 0);
    const int cap = p.candidate_caps ? p.candidate_caps[r] : 0;
    max_children = cap > 0 ? min(budget, cap) : budget;
    spine_depth = p.spine_depths ? p.spine_depths[r] : 0;
  }
};

// A factor that cannot be makes every score of its depth a NaN, which means "never".
__device__ __forceinline__ float depth_scale(const ddt_cuda_tree_build &p, int depth) {
  if (p.depth_scales == nullptr) return 1.0f;
  const float scale = p.depth_scales[depth];
  return scale > 0.0f && scale < INFINITY ? scale : NAN;
}

// The noise of the row of the target that samples the tokens of a depth: rust/scores.rs, scores with noise.
struct RowNoise {
  bool is_there;
  float inverse_temperature;
  uint32_t prefix;

  __device__ RowNoise(const ddt_cuda_tree_build &p, int r, int depth) : is_there(false), inverse_temperature(0), prefix(0) {
    if (p.temperatures == nullptr) return;
    const float temperature = p.temperatures[r];
    is_there = temperature != 0.0f;
    if (!is_there) return;
    // one that cannot be makes every score a NaN, which means "never"
    inverse_temperature = temperature > 0.0f ? __frcp_rn(temperature) : NAN;
    const uint64_t position = static_cast<uint64_t>(p.root_positions[r]) + static_cast<uint32_t>(depth);
    prefix = gumbel_prefix(p.seeds[r], static_cast<int64_t>(position));
  }
  __device__ __forceinline__ float add(float logit, uint32_t token) const {
    return __fmaf_rn(logit, inverse_temperature, noise_spec(gumbel_bits(prefix, static_cast<int>(token))));
  }
};

__device__ __forceinline__ bool is_usable(float x) { return fabsf(x) < INFINITY; }

// ---- from logits: what each chunk of a row says

constexpr int PER_THREAD = 16;
constexpr int SUMMARIZE_THREADS = CHUNK / PER_THREAD;
constexpr int THREADS_PER_BLOCK_OF_IDS = BLOCK / PER_THREAD;
constexpr int SUMMARIZE_WARPS = SUMMARIZE_THREADS / 32;
// Row length that keeps lanes of different blocks in different banks.
constexpr int LANE_PITCH = BLOCK + 4;

// Logits of one thread as they are in memory, and a bound on both sides: NaN if any is NaN.
template <typename T>
struct Raw {
  static constexpr int VECTORS = PER_THREAD * sizeof(T) / 16;
  uint4 vectors[VECTORS];

  __device__ void load(const T *from) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) vectors[i] = __ldcg(reinterpret_cast<const uint4 *>(from) + i);
  }
  __device__ float operator[](int i) const { return to_f32(reinterpret_cast<const T *>(vectors)[i]); }
  __device__ void bounds(float &low, float &high) const { bounds_of(reinterpret_cast<const T *>(vectors), low, high); }

 private:
  template <typename PAIR>
  __device__ static void bounds_of_pairs(const PAIR *pairs, float &low, float &high) {
    PAIR least = pairs[0], most = pairs[0];
#pragma unroll
    for (int i = 1; i < PER_THREAD / 2; ++i) {
      least = __hmin2_nan(least, pairs[i]);
      most = __hmax2_nan(most, pairs[i]);
    }
    low = to_f32(__hmin_nan(least.x, least.y));
    high = to_f32(__hmax_nan(most.x, most.y));
  }
  __device__ static void bounds_of(const __nv_bfloat16 *x, float &low, float &high) {
    bounds_of_pairs(reinterpret_cast<const __nv_bfloat162 *>(x), low, high);
  }
  __device__ static void bounds_of(const __half *x, float &low, float &high) {
    bounds_of_pairs(reinterpret_cast<const __half2 *>(x), low, high);
  }
  __device__ static void bounds_of(const float *x, float &low, float &high) {
    low = high = x[0];
    bool has_nan = isnan(x[0]);
#pragma unroll
    for (int i = 1; i < PER_THREAD; ++i) {
      low = fminf(low, x[i]);
      high = fmaxf(high, x[i]);
      has_nan |= isnan(x[i]);
    }
    if (has_nan) low = high = NAN;
  }
};

template <typename T>
__device__ __forceinline__ void summarize(const ddt_cuda_tree_build &p) {
  __shared__ float exponentials[BLOCKS_PER_CHUNK * LANE_PITCH];
  __shared__ float warp_maxima[SUMMARIZE_WARPS];
  __shared__ uint32_t warp_usable[SUMMARIZE_WARPS];
  __shared__ float upper_lanes[BLOCK / 2];

  let_next_kernel_start();
  const int chunk = blockIdx.x, depth = blockIdx.y, r = blockIdx.z, i = threadIdx.x;
  if (chunk == 0 && depth == 0 && i == 0) p.arrived[r] = 0;
  const RowNoise noise(p, r, depth);
  if (chunk >= p.num_chunks || depth >= Request(p, r).depth_limit) return;

  const ddt_cuda_view &view = p.logits;
  const T *row = static_cast<const T *>(view.data) + r * view.strides[0] + depth * view.strides[1];
  // unsigned: ids of a padded chunk may go beyond 2^31
  const uint32_t vocab = p.vocab, first = static_cast<uint32_t>(chunk) * CHUNK + i * PER_THREAD;
  const float scale = depth_scale(p, depth);
  // usable score of an id of this thread, or -inf; counts what is not
  const auto one_by_one = [&](int j, uint32_t &usable) {
    if (first + j >= vocab) return -INFINITY;
    const float x = __fmul_rn(to_f32(row[(first + j) * view.strides[2]]), scale);
    if (is_usable(x)) {
      usable += 1;
      return x;
    }
    if (x != -INFINITY) usable |= NONFINITE_BIT;
    return -INFINITY;
  };

  // Scaling keeps the order, so if both ends are finite then all are. A warp of which all are
  // needs no look at each; others read their logits once more, one by one.
  // With noise each is looked at, and waits in shared memory for the maximum.
  Raw<T> raw;
  float low = NAN, high = NAN;
  float *to = exponentials + i / THREADS_PER_BLOCK_OF_IDS * LANE_PITCH + i % THREADS_PER_BLOCK_OF_IDS * PER_THREAD;
  const bool has_all = p.vector && static_cast<uint32_t>(chunk + 1) * CHUNK <= vocab;
  if (has_all && !noise.is_there) {
    raw.load(row + first);
    raw.bounds(low, high);
    low = __fmul_rn(low, scale);
    high = __fmul_rn(high, scale);
  }
  const bool all_usable = __all_sync(FULL_WARP, is_usable(low) && is_usable(high));
  uint32_t usable = PER_THREAD;
  float max_x = high;
  if (noise.is_there) {
    if (has_all) {
      raw.load(row + first);
#pragma unroll
      for (int j = 0; j < PER_THREAD; j += 4) {
        *reinterpret_cast<float4 *>(to + j) = make_float4(raw[j], raw[j + 1], raw[j + 2], raw[j + 3]);
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < PER_THREAD; ++j) {
        to[j] = first + j < vocab ? to_f32(row[(first + j) * view.strides[2]]) : -INFINITY;
      }
    }
    usable = 0;
    max_x = -INFINITY;
#pragma unroll 1
    for (int j = 0; j < PER_THREAD; j += 4) {
      float4 quad = *reinterpret_cast<float4 *>(to + j);
      const auto noised = [&](float &x, uint32_t token) {
        x = __fmul_rn(noise.add(x, token), scale);
        if (is_usable(x)) {
          usable += 1;
        } else {
          if (x != -INFINITY) usable |= NONFINITE_BIT;
          x = -INFINITY;
        }
        max_x = fmaxf(max_x, x);
      };
      noised(quad.x, first + j);
      noised(quad.y, first + j + 1);
      noised(quad.z, first + j + 2);
      noised(quad.w, first + j + 3);
      *reinterpret_cast<float4 *>(to + j) = quad;
    }
  } else if (!all_usable) {
    usable = 0;
    max_x = -INFINITY;
#pragma unroll 1
    for (int j = 0; j < PER_THREAD; ++j) max_x = fmaxf(max_x, one_by_one(j, usable));
  }

#pragma unroll
  for (int step = 1; step < THREADS_PER_BLOCK_OF_IDS; step *= 2) {
    max_x = fmaxf(max_x, __shfl_xor_sync(FULL_WARP, max_x, step));
  }
  const int64_t task = static_cast<int64_t>(r) * p.num_rows + depth;
  const int block = chunk * BLOCKS_PER_CHUNK + i / THREADS_PER_BLOCK_OF_IDS;
  if (i % THREADS_PER_BLOCK_OF_IDS == 0 && block < p.num_blocks) p.block_max[task * p.num_blocks + block] = max_x;

  const float max_of_warp = from_ordered(__reduce_max_sync(FULL_WARP, ordered(max_x)));
  const bool nonfinite = __any_sync(FULL_WARP, usable & NONFINITE_BIT);
  usable = __reduce_add_sync(FULL_WARP, usable & ~NONFINITE_BIT) | (nonfinite ? NONFINITE_BIT : 0);
  if (i % 32 == 0) {
    warp_maxima[i / 32] = max_of_warp;
    warp_usable[i / 32] = usable;
  }
  __syncthreads();
  float chunk_max = warp_maxima[0];
#pragma unroll
  for (int warp = 1; warp < SUMMARIZE_WARPS; ++warp) chunk_max = fmaxf(chunk_max, warp_maxima[warp]);

  const bool none_vanishes = __all_sync(FULL_WARP, __fsub_rn(low, chunk_max) >= EXP_CUTOFF);
  if (noise.is_there) {
    if (chunk_max > -INFINITY) {
#pragma unroll 1
      for (int j = 0; j < PER_THREAD; j += 4) {
        float4 quad = *reinterpret_cast<float4 *>(to + j);
        quad.x = exp_spec(__fsub_rn(quad.x, chunk_max));
        quad.y = exp_spec(__fsub_rn(quad.y, chunk_max));
        quad.z = exp_spec(__fsub_rn(quad.z, chunk_max));
        quad.w = exp_spec(__fsub_rn(quad.w, chunk_max));
        *reinterpret_cast<float4 *>(to + j) = quad;
      }
    }
  } else if (all_usable && none_vanishes) {
#pragma unroll
    for (int j = 0; j < PER_THREAD; j += 4) {
      float4 quad;
      quad.x = exp_in_range(__fsub_rn(__fmul_rn(raw[j], scale), chunk_max));
      quad.y = exp_in_range(__fsub_rn(__fmul_rn(raw[j + 1], scale), chunk_max));
      quad.z = exp_in_range(__fsub_rn(__fmul_rn(raw[j + 2], scale), chunk_max));
      quad.w = exp_in_range(__fsub_rn(__fmul_rn(raw[j + 3], scale), chunk_max));
      *reinterpret_cast<float4 *>(to + j) = quad;
    }
  } else if (chunk_max > -INFINITY) {
    uint32_t ignored = 0;
#pragma unroll 1
    for (int j = 0; j < PER_THREAD; ++j) to[j] = exp_spec(__fsub_rn(one_by_one(j, ignored), chunk_max));
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

// What ends a list: all ones in place of a cost, and whether the list is cut.
__device__ __forceinline__ uint64_t end_of_list(bool is_cut) { return is_cut ? NO_KEY : NO_KEY - 1; }

// The child lists of a request: rows of keys, best first, each ended by end_of_list.
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
  // column of each node in the lattice
  uint16_t column[MAX_NODES];
  int num_nodes;
  uint32_t flags;
};

// A possible next node: the smallest is next. Whether it is off the spine, its cost (the score's
// negative), then the earlier parent, then the better sibling; the parent's depth rides along below.
constexpr uint64_t NO_ENTRY = UINT64_MAX;
constexpr uint32_t OFF_SPINE = 1u << 31;

__device__ __forceinline__ uint64_t entry_of(uint32_t off_spine, uint32_t path_cost, uint64_t key, uint32_t place) {
  const uint32_t edge_cost = static_cast<uint32_t>(key >> 32), most = -MIN_SCORE;
  if (edge_cost > most) return NO_ENTRY;  // the list's end
  return static_cast<uint64_t>(min(path_cost + edge_cost, most) | off_spine) << 32 | place;
}

// The compiler would compute a shared address anew at each use, for which it reads a special register.
__device__ __forceinline__ uint32_t kept(uint32_t address) {
  asm volatile("" : "+r"(address));
  return address;
}
__device__ __forceinline__ uint64_t load_shared(uint32_t address) {
  uint64_t x;
  asm volatile("ld.volatile.shared.b64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
  return x;
}

// In lists in shared memory, the sign bit of a token says that nothing grows below it.
constexpr uint32_t STOP_BIT = 1u << 31;

__device__ __forceinline__ bool is_stop(const ddt_cuda_tree_build &p, int r, int depth, int token) {
  if (p.stop_min_depths && depth < p.stop_min_depths[r]) return false;
  bool found = false;
  for (int i = 0; i < p.max_stop_tokens; ++i) {
    found |= p.stop_tokens[static_cast<int64_t>(r) * p.max_stop_tokens + i] == token;
  }
  return found;
}

// Best-first search by one warp. Every node has one entry, its best child that is not in the tree.
// The smallest entries are kept sorted, SLOTS in each lane's registers: of B nodes the t-th leaves at
// most t entries and B - t to find, so (B + 1) / 2 are enough. Each step takes the first away and
// merges two, its next sibling and its first child. What comes next is the least of those and of the
// second, which is known before they are; so only loads and two minima are between two steps.
template <int SLOTS, bool IN_SHARED>
__device__ __forceinline__ void search(const ddt_cuda_tree_build &p, int r, const Request &request,
                                       const Lists &lists, const ddt_cuda_child_list *infos, SearchShared &shared) {
  const int lane = threadIdx.x;
  Topology &tree = shared.topology;
  const uint32_t base = IN_SHARED ? kept(shared_address(lists.keys)) : 0;
  const auto key_at = [&](int at) { return IN_SHARED ? load_shared(base + at * 8) : lists.keys[at]; };
  const int end = lists.end(request.depth_limit);
  uint32_t flags = 0;
  for (int list = lane; list < end; list += 32) flags |= infos[list].has_nonfinite ? FLAG_NONFINITE : 0;
  uint64_t first = NO_ENTRY;
  if (request.depth_limit > 0) {
    first = entry_of(request.spine_depth > 0 ? 0 : OFF_SPINE, 0, key_at(0), 0);
    if (first == NO_ENTRY) flags |= FLAG_NO_CANDIDATES;
  }
  // in ascending order: those of lane 0, of lane 1, ...
  uint64_t entries[SLOTS];
#pragma unroll
  for (int k = 0; k < SLOTS; ++k) entries[k] = lane == 0 && k == 0 ? first : NO_ENTRY;
  int num_nodes = 1;
  for (; num_nodes <= request.budget && first != NO_ENTRY; ++num_nodes) {
    const uint32_t cost = static_cast<uint32_t>(first >> 32) & ~OFF_SPINE, place = static_cast<uint32_t>(first);
    const int parent = static_cast<int>(place >> 24), sibling = static_cast<int>(place >> 16 & 255);
    const int depth = static_cast<int>(place & 255);
    const bool has_pairs = lists.per_row > 1;
    const int list = has_pairs ? lists.of(depth, shared.column[parent]) : depth;
    const int at = list * lists.pitch + sibling;
    const int column = has_pairs ? lists.columns[at] : 0;
    bool opens = depth + 1 < request.depth_limit;
    const int child_list = !opens ? 0 : has_pairs ? lists.of(depth + 1, column) : depth + 1;
    // all loads before anything that waits for one
    const uint64_t key = key_at(at), next = key_at(at + 1), child = key_at(child_list * lists.pitch);
    const uint64_t second = __shfl_sync(FULL_WARP, entries[SLOTS > 1 ? 1 : 0], SLOTS > 1 ? 0 : 1);
    uint64_t before = __shfl_up_sync(FULL_WARP, entries[SLOTS - 1], 1);
    uint64_t after = __shfl_down_sync(FULL_WARP, entries[0], 1);
    if (lane == 0) before = 0;
    if (lane == 31) after = NO_ENTRY;
    const int token = key_token(key) & ~STOP_BIT;
    if (IN_SHARED) {
      opens = opens && !(static_cast<uint32_t>(key) & STOP_BIT);
    } else if (opens && p.max_stop_tokens > 0) {
      opens = !is_stop(p, r, depth + 1, token);
    }
    if (next == end_of_list(true)) flags |= FLAG_CANDIDATES_EXHAUSTED;
    // the parent's cost may be taken from the child's: where that was cut off, the sibling's is too
    const uint32_t parent_cost = cost - static_cast<uint32_t>(key >> 32);
    const uint64_t next_entry = entry_of(OFF_SPINE, parent_cost, next, place + (1 << 16));
    const uint64_t never = opens ? 0 : NO_KEY;
    const uint32_t off_spine = depth + 1 < request.spine_depth ? static_cast<uint32_t>(first >> 32) & OFF_SPINE : OFF_SPINE;
    const uint64_t child_entry = entry_of(off_spine, cost, child | never, num_nodes << 24 | (depth + 1));
    first = min(second, min(next_entry, child_entry));
    // One entry into a list that loses its first, which is less than all: each place gets the
    // middle one of what it had, what comes after, and the new one. The other entry without loss.
    before = max(before, min(next_entry, entries[0]));
#pragma unroll
    for (int k = 0; k < SLOTS; ++k) {
      const uint64_t one_in = max(entries[k], min(next_entry, k + 1 < SLOTS ? entries[(k + 1) % SLOTS] : after));
      entries[k] = max(before, min(child_entry, one_in));
      before = one_in;
    }
    // all lanes write the same, which spares a branch
    tree.parent[num_nodes] = parent;
    tree.depth[num_nodes] = depth + 1;
    tree.token[num_nodes] = token;
    if (has_pairs) shared.column[num_nodes] = column;
    __syncwarp();
  }
  flags = __reduce_or_sync(FULL_WARP, flags);
  if (lane == 0) {
    shared.num_nodes = num_nodes;
    shared.flags = flags;
  }
}

// Searches and writes the tree of request r, by all threads of a block. ALWAYS_SHARED: the lists
// of a depth each, which fit into shared memory; the compiler then knows where they are.
template <bool ALWAYS_SHARED>
__device__ __forceinline__ void build(const ddt_cuda_tree_build &p, int r, const Request &request,
                                      SearchShared &shared, uint64_t *dynamic) {
  __shared__ ddt_cuda_child_list infos[DDT_CUDA_MAX_DEPTH];
  // early, as they may come from far
  const int root_token = p.root_tokens[r];
  const int64_t root_position = p.root_positions[r];
  if (request.budget >= 0) {
    const int lists_per_row = ALWAYS_SHARED ? 1 : p.lists_per_row;
    const int num_lists = p.num_rows == 0 ? 0 : 1 + (p.num_rows - 1) * lists_per_row;
    const int64_t first = static_cast<int64_t>(r) * num_lists;
    const int pitch = p.list_capacity + 1;
    Lists lists{p.keys + first * pitch, ALWAYS_SHARED || !p.columns ? nullptr : p.columns + first * pitch, pitch,
                lists_per_row};
    const ddt_cuda_child_list *all = p.lists + first;
    if (lists_per_row == 1) {
      for (int i = threadIdx.x; i < request.depth_limit; i += blockDim.x) {
        const int4 info = __ldcg(reinterpret_cast<const int4 *>(all) + i);
        infos[i] = {info.x, info.y, info.z, info.w};
      }
      all = infos;
    }
    if (ALWAYS_SHARED || p.lists_in_shared) {
      // lists of depths that the tree cannot have are not written, nor read
      const int used = lists.end(request.depth_limit), used_pitch = min(p.list_capacity, request.max_children) + 1;
      uint16_t *columns = reinterpret_cast<uint16_t *>(dynamic + num_lists * pitch);
      for (int list = threadIdx.x / 32; list < used; list += blockDim.x / 32) {
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < used_pitch; i += 32) {
          const int at = list * pitch + i;
          dynamic[at] = __ldcg(lists.keys + at);
          if (lists.columns) columns[at] = __ldcg(lists.columns + at);
        }
        if (p.max_stop_tokens == 0) continue;
        const int depth = list == 0 ? 1 : 2 + (list - 1) / lists_per_row;
#pragma unroll 1
        for (int i = threadIdx.x % 32; i < used_pitch; i += 32) {
          const int at = list * pitch + i;
          if (is_stop(p, r, depth, key_token(dynamic[at]))) dynamic[at] |= STOP_BIT;
        }
      }
      lists.keys = dynamic;
      if (lists.columns) lists.columns = columns;
    }
    if (threadIdx.x < MAX_NODES) shared.topology.rank[threadIdx.x] = threadIdx.x;
    if (threadIdx.x == 0) {
      shared.topology.parent[0] = -1;
      shared.topology.depth[0] = 0;
      shared.topology.token[0] = root_token;
      shared.column[0] = 0;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      if (!ALWAYS_SHARED && !p.lists_in_shared) {
        search<MAX_NODES / 64, false>(p, r, request, lists, all, shared);
      } else if (request.budget < 64) {
        search<1, true>(p, r, request, lists, all, shared);
      } else {
        search<MAX_NODES / 64, true>(p, r, request, lists, all, shared);
      }
    }
  } else if (threadIdx.x == 0) {
    shared.num_nodes = 0;
    shared.flags = 0;
  }
  __syncthreads();
  const int64_t tree = tree_of(p, r);
  if (tree < 0) return;
  const auto pop_rank = [](int node) { return node; };
  write_tree(p.tree, tree, shared.num_nodes, shared.topology, root_position, shared.flags, pop_rank, nullptr);
}

// ---- from logits: the child list of each depth

// Threads that look for candidates; one more warp computes the normaliser.
constexpr int SELECT_THREADS = DDT_CUDA_TREE_BUILD_SELECT_THREADS;
constexpr int SELECT_WARPS = SELECT_THREADS / 32;
// Blocks of ids that a thread keeps the maxima of in registers; a larger vocabulary is read again.
constexpr int MAXIMA_PER_THREAD = 8;
constexpr int BUFFER = 1024;
// Blocks that may have a candidate.
constexpr int MAX_HITS = 1024;
// Elements that are looked at before the buffer is cut, when there are more than it holds.
constexpr int BLOCKS_PER_ROUND = SELECT_THREADS / BLOCK;
// Chunks whose sums the normaliser adds at once.
constexpr int CHUNKS_AT_ONCE = 64;
constexpr uint32_t NEVER = 0x007fffff;  // ordered(-INFINITY)

struct SelectShared {
  // candidates: their scores and ids, then their keys
  uint64_t buffer[BUFFER];
  uint32_t hits[MAX_HITS];
  // sum and factor of each chunk
  float2 terms[CHUNKS_AT_ONCE];
  uint32_t warp_min[SELECT_WARPS], warp_max[SELECT_WARPS];
  double ln_z;
  uint32_t num_usable, has_nonfinite, num_hits, num_keys;
  bool is_last;
};

// Barriers of the threads that look for candidates.
__device__ __forceinline__ void sync_selectors() {
  asm volatile("bar.sync 1, %0;" ::"n"(SELECT_THREADS) : "memory");
}
__device__ __forceinline__ int count_selectors(bool which) {
  int count;
  asm volatile(
      "{\n"
      ".reg .pred which;\n"
      "setp.ne.u32 which, %1, 0;\n"
      "bar.red.popc.u32 %0, 1, %2, which;\n"
      "}"
      : "=r"(count)
      : "r"(static_cast<uint32_t>(which)), "n"(SELECT_THREADS)
      : "memory");
  return count;
}

// Keeps the best `count` of the `size` distinct keys of the buffer, sorted; by the selectors. Each
// warp sorts 32 keys; a key's rank is the sum of its places in all such runs.
__device__ __forceinline__ void keep_best(uint64_t *buffer, int size, int count) {
  constexpr int KEYS = BUFFER / SELECT_THREADS;
  uint64_t keys[KEYS];
  int ranks[KEYS];
#pragma unroll
  for (int k = 0; k < KEYS; ++k) {
    const int i = k * SELECT_THREADS + threadIdx.x, first = i & ~31;
    keys[k] = NO_KEY;
    if (first >= size) continue;
    if (i < size) {
      keys[k] = buffer[i];
    } else {
      buffer[i] = NO_KEY;
    }
    __syncwarp();
    int rank = 0;
#pragma unroll 8
    for (int j = first; j < first + 32; ++j) rank += buffer[j] < keys[k];
    __syncwarp();
    if (i < size) buffer[first + rank] = keys[k];
  }
  sync_selectors();
#pragma unroll
  for (int k = 0; k < KEYS; ++k) {
    ranks[k] = 0;
    if (keys[k] == NO_KEY) continue;
#pragma unroll 4
    for (int first = 0; first < size; first += 32) {
      int place = first;
#pragma unroll
      for (int step = 16; step > 0; step /= 2) place += buffer[place + step - 1] < keys[k] ? step : 0;
      ranks[k] += place - first + (buffer[place] < keys[k]);
    }
  }
  sync_selectors();
#pragma unroll
  for (int k = 0; k < KEYS; ++k) {
    if (keys[k] != NO_KEY && ranks[k] < count) buffer[ranks[k]] = keys[k];
  }
  sync_selectors();
}

template <typename T>
struct Row {
  const T *data;
  int64_t stride;
  uint32_t vocab;
  float scale;
  RowNoise noise;

  __device__ Row(const ddt_cuda_tree_build &p, int r, int depth, const RowNoise &noise)
      : data(static_cast<const T *>(p.logits.data) + r * p.logits.strides[0] + depth * p.logits.strides[1]),
        stride(p.logits.strides[2]), vocab(p.vocab), scale(depth_scale(p, depth)), noise(noise) {}

  // Score of a token with this logit; with noise, whether it may be used or not.
  __device__ __forceinline__ float noised(float logit, uint32_t token) const {
    return __fmul_rn(noise.add(logit, token), scale);
  }
  // Usable score of a token, or -inf.
  __device__ __forceinline__ float x(uint32_t token) const {
    if (token >= vocab) return -INFINITY;
    const float logit = to_f32(data[token * stride]);
    const float x = noise.is_there ? noised(logit, token) : __fmul_rn(logit, scale);
    return is_usable(x) ? x : -INFINITY;
  }
};

// What the normaliser reads of a chunk.
struct ChunkSummary {
  float max, sum;
  uint32_t usable;

  __device__ ChunkSummary(const ddt_cuda_tree_build &p, int64_t task, int chunk) : max(-INFINITY), sum(0), usable(0) {
    if (chunk >= p.num_chunks) return;
    max = __ldcg(p.chunk_max + task * p.num_chunks + chunk);
    sum = __ldcg(p.chunk_sum + task * p.num_chunks + chunk);
    usable = __ldcg(p.chunk_usable + task * p.num_chunks + chunk);
  }
};

// The normaliser by one warp: chunk by chunk in ascending order. The first chunks are given.
__device__ __forceinline__ void normalise(const ddt_cuda_tree_build &p, int64_t task, float row_max, ChunkSummary low,
                                          ChunkSummary high, SelectShared &shared) {
  const int lane = threadIdx.x % 32;
  uint32_t usable = 0, has_nonfinite = 0;
  float sum = 0.0f;
  for (int start = 0; start < p.num_chunks; start += CHUNKS_AT_ONCE) {
    if (start > 0) {
      low = ChunkSummary(p, task, start + lane);
      high = ChunkSummary(p, task, start + 32 + lane);
    }
    // a chunk without usable scores adds 0 * 0, which changes nothing
    const auto term = [&](const ChunkSummary &chunk) {
      usable += chunk.usable & ~NONFINITE_BIT;
      has_nonfinite |= chunk.usable & NONFINITE_BIT;
      if (chunk.max == -INFINITY) return make_float2(0.0f, 0.0f);
      return make_float2(chunk.sum, exp_spec(__fsub_rn(chunk.max, row_max)));
    };
    shared.terms[lane] = term(low);
    shared.terms[32 + lane] = term(high);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < CHUNKS_AT_ONCE; ++k) sum = __fmaf_rn(shared.terms[k].x, shared.terms[k].y, sum);
    __syncwarp();
  }
  usable = __reduce_add_sync(FULL_WARP, usable);
  has_nonfinite = __reduce_or_sync(FULL_WARP, has_nonfinite);
  const double ln_z = usable > 0 ? __dadd_rn(static_cast<double>(row_max), ln_spec(sum)) : 0.0;
  if (lane == 0) {
    shared.ln_z = ln_z;
    shared.num_usable = usable;
    shared.has_nonfinite = has_nonfinite != 0;
  }
}

// Finds the candidates of at least floor_x in the blocks of ids whose maxima reach it, by the
// selectors. Counts all, keeps those that the buffer has room for.
template <typename T>
__device__ __forceinline__ void find_candidates(const ddt_cuda_tree_build &p, const Row<T> &row, float floor_x,
                                                int num_hits, SelectShared &shared) {
  constexpr int VALUES = 16 / sizeof(T), THREADS_PER_HIT = BLOCK / VALUES, AT_ONCE = 2;
  constexpr int HITS = SELECT_THREADS / THREADS_PER_HIT;
  for (int start = 0; start < num_hits; start += AT_ONCE * HITS) {
    // all loads first, so that they overlap
    uint4 raw[AT_ONCE];
    uint32_t tokens[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const int hit = start + k * HITS + threadIdx.x / THREADS_PER_HIT;
      tokens[k] = UINT32_MAX;
      if (hit >= num_hits) continue;
      tokens[k] = shared.hits[hit] * BLOCK + threadIdx.x % THREADS_PER_HIT * VALUES;
      if (p.vector && tokens[k] + VALUES <= row.vocab) {
        raw[k] = __ldcg(reinterpret_cast<const uint4 *>(row.data + tokens[k]));
      } else {
        T *const to = reinterpret_cast<T *>(&raw[k]);
#pragma unroll
        for (int j = 0; j < VALUES; ++j) {
          to[j] = tokens[k] + j < row.vocab ? row.data[(tokens[k] + j) * row.stride] : from_f32<T>(-INFINITY);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      if (tokens[k] == UINT32_MAX) continue;
      float x[VALUES];
      uint32_t found = 0;
#pragma unroll
      for (int j = 0; j < VALUES; ++j) {
        x[j] = __fmul_rn(to_f32(reinterpret_cast<const T *>(&raw[k])[j]), row.scale);
        if (x[j] >= floor_x && x[j] < INFINITY) found |= 1u << j;
      }
      if (found == 0) continue;
      uint32_t at = atomicAdd(&shared.num_keys, static_cast<uint32_t>(__popc(found)));
#pragma unroll
      for (int j = 0; j < VALUES; ++j) {
        if (!(found >> j & 1)) continue;
        if (at < BUFFER) shared.buffer[at] = static_cast<uint64_t>(__float_as_uint(x[j])) << 32 | (tokens[k] + j);
        at += 1;
      }
    }
  }
}

// The same with noise.
template <typename T>
__device__ __forceinline__ void find_noised_candidates(const Row<T> &row, float floor_x, int num_hits,
                                                       SelectShared &shared) {
  constexpr int HITS = SELECT_THREADS / BLOCK, AT_ONCE = 4;
#pragma unroll 1
  for (int start = 0; start < num_hits; start += AT_ONCE * HITS) {
    float logits[AT_ONCE];
    uint32_t tokens[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const int hit = start + k * HITS + threadIdx.x / BLOCK;
      tokens[k] = hit < num_hits ? shared.hits[hit] * BLOCK + threadIdx.x % BLOCK : UINT32_MAX;
      logits[k] = tokens[k] < row.vocab ? to_f32(row.data[tokens[k] * row.stride]) : -INFINITY;
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; ++k) {
      const float x = row.noised(logits[k], tokens[k]);
      if (!(x >= floor_x && x < INFINITY)) continue;
      const uint32_t at = atomicAdd(&shared.num_keys, 1u);
      if (at < BUFFER) shared.buffer[at] = static_cast<uint64_t>(__float_as_uint(x)) << 32 | tokens[k];
    }
  }
}

// All blocks in ascending order, where too many can have a candidate: the buffer is cut after each
// round, and later ids lose ties. Returns the number of keys in the buffer.
template <typename T>
__device__ __forceinline__ int select_in_rounds(const ddt_cuda_tree_build &p, const Row<T> &row, int32_t worst, int want,
                                                SelectShared &shared) {
  const double ln_z = shared.ln_z;
  int num_keys = 0;
  int32_t needed = worst;
  sync_selectors();
  if (threadIdx.x == 0) shared.num_keys = 0;
  for (int start = 0; start < p.num_blocks && needed <= 0; start += BLOCKS_PER_ROUND) {
    sync_selectors();
    const uint32_t token = static_cast<uint32_t>(start) * BLOCK + threadIdx.x;
    const float x = row.x(token);
    const int32_t score = x > -INFINITY ? edge_score(x, ln_z) : MIN_SCORE;
    if (x > -INFINITY && score >= needed) {
      shared.buffer[atomicAdd(&shared.num_keys, 1u)] = candidate_key(score, token);
    }
    sync_selectors();
    const int size = shared.num_keys;
    if (size == num_keys) continue;
    keep_best(shared.buffer, size, want);
    num_keys = min(size, want);
    if (num_keys == want) needed = key_score(shared.buffer[want - 1]) + 1;
    if (threadIdx.x == 0) shared.num_keys = num_keys;
  }
  return num_keys;
}

// The list of one depth, into the workspace: rust/scores.rs, RowSummary.
template <typename T>
__device__ __forceinline__ void select_row(const ddt_cuda_tree_build &p, int r, int depth, const Request &request,
                                           SelectShared &shared) {
  const int i = threadIdx.x, lane = i % 32, warp = i / 32;
  const bool is_selector = i < SELECT_THREADS;
  const int64_t task = static_cast<int64_t>(r) * p.num_rows + depth;
  const float *block_max = p.block_max + task * p.num_blocks;
  // maxima as integers of the same order
  uint32_t maxima[MAXIMA_PER_THREAD];
#pragma unroll
  for (int k = 0; k < MAXIMA_PER_THREAD; ++k) {
    const int block = k * SELECT_THREADS + i;
    maxima[k] = is_selector && block < p.num_blocks ? ordered(__ldcg(block_max + block)) : NEVER;
  }
  const int first_chunk = is_selector ? p.num_chunks : lane;
  const ChunkSummary low_chunk(p, task, first_chunk), high_chunk(p, task, first_chunk + 32);
  const RowNoise noise(p, r, depth);
  const auto for_each_block = [&](auto &&use) {
#pragma unroll
    for (int k = 0; k < MAXIMA_PER_THREAD; ++k) use(k * SELECT_THREADS + i, maxima[k]);
    for (int block = MAXIMA_PER_THREAD * SELECT_THREADS + i; block < p.num_blocks; block += SELECT_THREADS) {
      use(block, ordered(__ldcg(block_max + block)));
    }
  };
  uint32_t thread_max = NEVER;
  if (is_selector) {
    for_each_block([&](int, uint32_t x) { thread_max = max(thread_max, x); });
    const uint32_t low_of_warp = __reduce_min_sync(FULL_WARP, thread_max);
    const uint32_t high_of_warp = __reduce_max_sync(FULL_WARP, thread_max);
    if (lane == 0) {
      shared.warp_min[warp] = low_of_warp;
      shared.warp_max[warp] = high_of_warp;
    }
  }
  if (i == 0) shared.num_hits = shared.num_keys = 0;
  __syncthreads();
  const uint32_t row_low = __reduce_min_sync(FULL_WARP, shared.warp_min[lane % SELECT_WARPS]);
  const uint32_t row_high = __reduce_max_sync(FULL_WARP, shared.warp_max[lane % SELECT_WARPS]);
  const float row_max = from_ordered(row_high);
  const int limit = p.max_candidates > 0 ? min(p.max_candidates, request.max_children) : request.max_children;
  const int want = row_high > NEVER ? min(limit, p.list_capacity) : 0;

  float threshold = -INFINITY, floor_x = -FLT_MAX;
  int num_hits = 0;
  if (!is_selector) {
    normalise(p, task, row_max, low_chunk, high_chunk, shared);
  } else if (want > 0) {
    // A score that at least `want` blocks reach. Any will do; that `want` threads have such a
    // block is quick to count, and few more blocks do. It is found by bisection of its bits.
    if (count_selectors(thread_max > NEVER) >= want) {
      uint32_t low = max(row_low, NEVER + 1), high = row_high + 1;
      while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        const int count = count_selectors(thread_max >= middle);
        if (count >= want) {
          low = middle;
          if (count <= want + want / 8 + 2) break;
        } else {
          high = middle;
        }
      }
      threshold = from_ordered(low);
    }
    // No smaller x can have this score: a unit is 2^-21. The worst score, of x more than 1024
    // below the normaliser, has no such limit; that is at most ln(2^31) above the maximum.
    if (threshold - row_max > -1000.0f) floor_x = threshold - 1e-6f - fabsf(threshold) * 3e-7f;
    const uint32_t floor_key = ordered(floor_x);
    for_each_block([&](int block, uint32_t x) {
      if (x < floor_key || block >= p.num_blocks) return;
      const uint32_t at = atomicAdd(&shared.num_hits, 1u);
      if (at < MAX_HITS) shared.hits[at] = block;
    });
    sync_selectors();
    num_hits = shared.num_hits;
    const Row<T> row(p, r, depth, noise);
    if (num_hits <= MAX_HITS && noise.is_there) {
      find_noised_candidates(row, floor_x, num_hits, shared);
    } else if (num_hits <= MAX_HITS) {
      find_candidates(p, row, floor_x, num_hits, shared);
    }
  }
  __syncthreads();
  if (!is_selector) return;
  const double ln_z = shared.ln_z;
  int num_keys = 0;
  if (want > 0) {
    const int size = shared.num_keys;
    if (num_hits > MAX_HITS || size > BUFFER) {
      const Row<T> row(p, r, depth, noise);
      const int32_t worst = threshold > -INFINITY ? edge_score(threshold, ln_z) : MIN_SCORE;
      num_keys = select_in_rounds(p, row, worst, want, shared);
    } else {
      for (int k = i; k < size; k += SELECT_THREADS) {
        const uint64_t candidate = shared.buffer[k];
        const float x = __uint_as_float(static_cast<uint32_t>(candidate >> 32));
        shared.buffer[k] = candidate_key(edge_score(x, ln_z), static_cast<uint32_t>(candidate));
      }
      sync_selectors();
      keep_best(shared.buffer, size, want);
      num_keys = min(size, want);
    }
  }
  uint64_t *keys = p.keys + task * (p.list_capacity + 1);
  const bool is_cut = limit < request.max_children && shared.num_usable > static_cast<uint32_t>(limit);
  for (int k = i; k <= num_keys; k += SELECT_THREADS) keys[k] = k < num_keys ? shared.buffer[k] : end_of_list(is_cut);
  if (i == 0) p.lists[task] = {num_keys, is_cut, static_cast<int32_t>(shared.has_nonfinite), 0};
}

// Whether this block is the last of `count` to come here; what the others wrote before is then
// visible to all its threads.
__device__ __forceinline__ bool is_last_block(uint32_t *arrived, uint32_t count, bool &shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared = atomicAdd(arrived, 1u) == count - 1;
    __threadfence();
  }
  __syncthreads();
  return shared;
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
  const bool is_last = is_last_block(p.arrived + r, gridDim.x, shared.select.is_last);
  __syncthreads();
  if (is_last) build<true>(p, r, request, shared.search, dynamic);
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
  const RowNoise noise(p, r, depth);
  float max_x = -INFINITY;
  int usable = 0;
  for (int column = i; column < width; column += LISTS_THREADS) {
    float x = -INFINITY;
    if (any_parent && token_of(depth, column) >= 0) {
      x = 0.0f;
      if (scores.data) {
        x = static_cast<const float *>(
            scores.data)[r * scores.strides[0] + depth * scores.strides[1] + column * scores.strides[2]];
      }
      if (pairs.data) {
        x = __fadd_rn(x, static_cast<const float *>(pairs.data)[r * pairs.strides[0] + depth * pairs.strides[1] +
                                                                parent * pairs.strides[2] + column * pairs.strides[3]]);
      }
      if (noise.is_there) x = noise.add(x, static_cast<uint32_t>(token_of(depth, column)));
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
  const bool is_cut = num_usable == width && width < request.max_children;
  if (i == 0) p.keys[list * pitch + length] = end_of_list(is_cut);
  if (i == 0) p.lists[list] = {length, is_cut, has_nonfinite, 0};
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
extern "C" __global__ void __launch_bounds__(SELECT_THREADS + 32, 1)
    ddt_tree_build_select_f32(const __grid_constant__ ddt_cuda_tree_build p) {
  select<float>(p);
}
extern "C" __global__ void __launch_bounds__(SELECT_THREADS + 32, 1)
    ddt_tree_build_select_f16(const __grid_constant__ ddt_cuda_tree_build p) {
  select<__half>(p);
}
extern "C" __global__ void __launch_bounds__(SELECT_THREADS + 32, 1)
    ddt_tree_build_select_bf16(const __grid_constant__ ddt_cuda_tree_build p) {
  select<__nv_bfloat16>(p);
}
extern "C" __global__ void __launch_bounds__(LISTS_THREADS, 1)
    ddt_tree_build_lists(const __grid_constant__ ddt_cuda_tree_build p) {
  make_list(p);
}
extern "C" __global__ void __launch_bounds__(MAX_NODES, 1)
    ddt_tree_build_search(const __grid_constant__ ddt_cuda_tree_build p) {
  extern __shared__ uint64_t dynamic[];
  __shared__ SearchShared shared;
  wait_for_previous_kernel();
  build<false>(p, blockIdx.x, Request(p, blockIdx.x), shared, dynamic);
}
