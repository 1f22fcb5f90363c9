// SPDX-License-Identifier: Apache-2.0
//
// tree_accept in two launches. "choose" reads the logits, once: a block finds the best token of a
// part of one node's row. "walk" combines the parts of each node and follows the choices from the
// root, one block per request. tree_accept.md has the measurements.

#include "common.cuh"
#include "gumbel.cuh"
#include "params/tree_accept.h"

namespace ddt {
namespace {

using Params = ddt_cuda_tree_accept;

constexpr int CHOOSE_THREADS = DDT_CUDA_TREE_ACCEPT_CHOOSE_THREADS;
constexpr int CHOOSE_WARPS = CHOOSE_THREADS / 32;
constexpr int WALK_THREADS = DDT_CUDA_TREE_ACCEPT_WALK_THREADS;
static_assert(WALK_THREADS >= DDT_CUDA_MAX_NODES, "a thread per node");
// loads of a thread that are under way at the same time
constexpr int LOADS = 3;
constexpr uint32_t FLAG_NONFINITE = 2;  // DDT_FLAG_NONFINITE
constexpr float INF = __builtin_huge_valf();

// ---- a choice as one number, so that the larger one is better: the value in its order, 31 bits
// that fall with the token id, and one that says whether a NaN was seen. 0 = nothing above -inf.

__device__ __forceinline__ uint64_t encode(float value, int token) {
  const uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));  // -0 is equal to 0
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(INT32_MAX - token) << 1;
}
__device__ __forceinline__ uint64_t better(uint64_t a, uint64_t b) {
  return (a > b ? a : b) | ((a | b) & 1);
}
__device__ __forceinline__ int token_of(uint64_t choice) {
  return choice >> 1 == 0 ? 0 : INT32_MAX - static_cast<int>(static_cast<uint32_t>(choice) >> 1);
}
__device__ __forceinline__ bool is_nonfinite(uint64_t choice) { return (choice & 1) != 0 || choice == 0; }

template <int LANES>
__device__ __forceinline__ uint64_t best_of_lanes(uint64_t choice) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) choice = better(choice, __shfl_xor_sync(FULL_WARP, choice, step));
  return choice;
}

// ---- choose

// What a load of 16 bytes brings.
template <typename T>
struct Packed;
template <>
struct Packed<float> {
  static constexpr uint32_t MINUS_INF = 0xff800000u;
  static __device__ __forceinline__ void unpack(const uint32_t (&words)[4], float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __uint_as_float(words[i]);
  }
};
template <>
struct Packed<__half> {
  static constexpr uint32_t MINUS_INF = 0xfc00fc00u;
  static __device__ __forceinline__ void unpack(const uint32_t (&words)[4], float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = to_f32(__ushort_as_half(words[i] & 0xffffu));
      x[2 * i + 1] = to_f32(__ushort_as_half(words[i] >> 16));
    }
  }
};
template <>
struct Packed<__nv_bfloat16> {
  static constexpr uint32_t MINUS_INF = 0xff80ff80u;
  static __device__ __forceinline__ void unpack(const uint32_t (&words)[4], float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// What a thread has found.
struct Best {
  float value = -INF;
  int token = INT32_MAX;
  bool has_nan = false;

  __device__ __forceinline__ void consider(float x, int id) {
    if (x > value || (x == value && id < token)) {
      value = x;
      token = id;
    }
  }
  __device__ __forceinline__ uint64_t encoded() const {
    return (value > -INF ? encode(value, token) : 0) | static_cast<uint64_t>(has_nan);
  }
};

template <bool SAMPLED>
__device__ __forceinline__ float value_of(float logit, uint32_t prefix, int token) {
  return SAMPLED ? __fadd_rn(logit, gumbel_noise(gumbel_bits(prefix, token))) : logit;
}

// The logits that one load brought to each lane; `first` is the id of x[0]. All lanes take part,
// and the ids of later calls are larger. `floor` is the best value of the warp: what cannot
// reach it costs no more than a bound, and the most promising tokens come first to raise it.
template <bool SAMPLED, int N>
__device__ __forceinline__ void consider_all(float (&x)[N], int first, uint32_t prefix, Best &best, float &floor) {
  float top = x[0];
#pragma unroll
  for (int i = 1; i < N; i++) top = max_or_nan(top, x[i]);
  if (isnan(top)) {
    best.has_nan = true;
    top = -INF;
#pragma unroll
    for (int i = 0; i < N; i++) {
      x[i] = isnan(x[i]) ? -INF : x[i];
      top = fmaxf(top, x[i]);
    }
  }
  float bound[N];
#pragma unroll
  for (int i = 0; i < N; i++) bound[i] = x[i];
  if (SAMPLED) {
    if (!__any_sync(FULL_WARP, top + MAX_GUMBEL_NOISE >= floor)) return;
    top = -INF;
#pragma unroll
    for (int i = 0; i < N; i++) {
      bound[i] = __fadd_rn(x[i], gumbel_bound(gumbel_bits(prefix, first + i)));
      top = fmaxf(top, bound[i]);
    }
  }
  // a sampled value may be equal to the floor and have a lower id than the token that set it,
  // because that one may have been looked at first
  while (__any_sync(FULL_WARP, SAMPLED ? top >= floor : top > floor)) {
    if (SAMPLED ? top >= floor : top > floor) {
      int i = 0;
      float logit = 0;
#pragma unroll
      for (int j = N - 1; j >= 0; j--) {
        if (bound[j] == top) {
          i = j;
          logit = x[j];
        }
      }
      best.consider(value_of<SAMPLED>(logit, prefix, first + i), first + i);
#pragma unroll
      for (int j = 0; j < N; j++) bound[j] = i == j ? -INF : bound[j];
      top = bound[0];
#pragma unroll
      for (int j = 1; j < N; j++) top = fmaxf(top, bound[j]);
    }
    floor = warp_max(fmaxf(floor, best.value));
  }
}

// Where a part of a row of logits lies: single tokens, then loads of 16 bytes, then single tokens. It is
// all single if the tokens are not contiguous.
template <typename T>
struct Part {
  static constexpr int PER_LOAD = DDT_CUDA_TREE_ACCEPT_LOAD_BYTES / sizeof(T);
  const T *row;
  int64_t stride;
  int begin;
  int first;  // token of the loads
  int num_loads;
  int last;  // one past them
  int end;

  __device__ __forceinline__ Part(const Params &p, int row_index, int split) {
    row = static_cast<const T *>(p.logits.data) + row_index * p.logits.strides[0];
    stride = p.logits.strides[1];
    begin = split * p.split_tokens;
    end = begin + min(p.split_tokens, p.vocab - begin);
    first = begin;
    num_loads = 0;
    if (stride == 1) {
      const int offset = static_cast<int>(reinterpret_cast<uintptr_t>(row + begin) / sizeof(T) % PER_LOAD);
      first = min(begin + (PER_LOAD - offset) % PER_LOAD, end);
      num_loads = (end - first) / PER_LOAD;
    }
    last = first + num_loads * PER_LOAD;
  }

  // The thread's load of a round; -inf where there is nothing to load.
  __device__ __forceinline__ uint4 load(int round) const {
    constexpr uint32_t NONE = Packed<T>::MINUS_INF;
    const int load = round * CHOOSE_THREADS + static_cast<int>(threadIdx.x);
    if (load >= num_loads) return make_uint4(NONE, NONE, NONE, NONE);
    return __ldg(reinterpret_cast<const uint4 *>(row + first) + load);
  }
};

// What a thread finds in a part; `words` are its loads of the first rounds.
template <bool SAMPLED, typename T>
__device__ __forceinline__ uint64_t best_of_part(const Part<T> &part, uint4 (&words)[LOADS], uint32_t prefix) {
  constexpr int N = Part<T>::PER_LOAD;
  const int thread = threadIdx.x;
  Best best;
  // below every finite value
  float floor = SAMPLED ? -3.402823466e38f : -INF;
  const int num_rounds = (part.num_loads + CHOOSE_THREADS - 1) / CHOOSE_THREADS;
  for (int first_round = 0; first_round < num_rounds; first_round += LOADS) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int round = first_round + i;
      float x[N];
      Packed<T>::unpack({words[i].x, words[i].y, words[i].z, words[i].w}, x);
      words[i] = part.load(round + LOADS);
      const int load = round * CHOOSE_THREADS + thread;
      // whole warps
      if (load - thread % 32 < part.num_loads) {
        consider_all<SAMPLED>(x, part.first + load * N, prefix, best, floor);
      }
    }
  }
  const uint32_t num_before = part.first - part.begin;
  const uint32_t num_single = num_before + (part.end - part.last);
  for (uint32_t i = thread; i < num_single; i += CHOOSE_THREADS) {
    const int token = static_cast<int>(i < num_before ? part.begin + i : part.last + (i - num_before));
    const float logit = to_f32(part.row[token * part.stride]);
    best.has_nan |= isnan(logit);
    best.consider(value_of<SAMPLED>(logit, prefix, token), token);
  }
  return best.encoded();
}

// The request that a row belongs to: the last one that starts at it or before it. -1 = none.
__device__ __forceinline__ int owner_of(int row, const Params &p) {
  int count = 0;
  for (int r = threadIdx.x % 32; r < p.tree.num_reqs; r += 32) count += p.query_start[r] <= row;
  return static_cast<int>(__reduce_add_sync(FULL_WARP, count)) - 1;
}

template <typename T>
__device__ __forceinline__ void choose(const Params &p) {
  __shared__ uint64_t warp_best[CHOOSE_WARPS];
  let_next_kernel_start();
  const int row = blockIdx.x;
  const int split = blockIdx.y;
  // the logits are on their way while the block finds out whose they are
  const Part<T> part(p, row, split);
  uint4 words[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) words[i] = part.load(i);

  const int r = owner_of(row, p);
  uint64_t best = 0;
  if (r >= 0) {
    const float temperature = p.temperatures == nullptr ? 0.0f : p.temperatures[r];
    const RequestRows rows = request_rows(p.query_start, p.tree, r, p.num_rows);
    const int node = row - rows.start;
    // negative only if query_start does not ascend
    if (node >= 0 && node < rows.num_nodes) {
      if (temperature != 0.0f) {
        const int64_t position = p.tree.positions[static_cast<int64_t>(r) * p.tree.max_nodes + node];
        best = best_of_part<true>(part, words, gumbel_prefix(p.seeds[r], position));
      } else {
        best = best_of_part<false>(part, words, 0);
      }
    }
  }
  best = best_of_lanes<32>(best);
  if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp = 1; warp < CHOOSE_WARPS; warp++) best = better(best, warp_best[warp]);
    p.partials[static_cast<int64_t>(row) * p.num_splits + split] = best;
  }
}

// ---- walk

// A link that leads to a later node of the tree, else -1. Links to nodes that were cut off count as
// none, and no link leads back, so that every walk ends.
__device__ __forceinline__ int forward(int link, int node, int num_nodes) {
  return link > node && link < num_nodes ? link : -1;
}

}  // namespace
}  // namespace ddt

extern "C" __global__ void __launch_bounds__(ddt::CHOOSE_THREADS, DDT_CUDA_TREE_ACCEPT_BLOCKS_PER_SM)
    ddt_tree_accept_choose_f32(const __grid_constant__ ddt_cuda_tree_accept p) {
  ddt::choose<float>(p);
}

extern "C" __global__ void __launch_bounds__(ddt::CHOOSE_THREADS, DDT_CUDA_TREE_ACCEPT_BLOCKS_PER_SM)
    ddt_tree_accept_choose_f16(const __grid_constant__ ddt_cuda_tree_accept p) {
  ddt::choose<__half>(p);
}

extern "C" __global__ void __launch_bounds__(ddt::CHOOSE_THREADS, DDT_CUDA_TREE_ACCEPT_BLOCKS_PER_SM)
    ddt_tree_accept_choose_bf16(const __grid_constant__ ddt_cuda_tree_accept p) {
  ddt::choose<__nv_bfloat16>(p);
}

// One block per request.
extern "C" __global__ void __launch_bounds__(ddt::WALK_THREADS)
    ddt_tree_accept_walk(const __grid_constant__ ddt_cuda_tree_accept p) {
  using namespace ddt;
  __shared__ int token[DDT_CUDA_MAX_NODES], next_sibling[DDT_CUDA_MAX_NODES];
  __shared__ int64_t choice[DDT_CUDA_MAX_NODES];
  __shared__ bool nonfinite[DDT_CUDA_MAX_NODES];
  // the child that a node's choice leads to, -1 = none
  __shared__ int follow[DDT_CUDA_MAX_NODES];
  // nodes from the root on; the last one's choice is the bonus token
  __shared__ int path[DDT_CUDA_MAX_DEPTH + 1];
  __shared__ int num_accepted;

  const int r = blockIdx.x;
  const int thread = threadIdx.x;
  const int max_depth = p.tree.max_depth;
  const int64_t slot = static_cast<int64_t>(r) * p.tree.max_nodes + thread;
  // none of this comes from the kernel before, which itself waited for everything earlier
  const RequestRows rows = request_rows(p.query_start, p.tree, r, p.num_rows);
  const int num_nodes = rows.num_nodes;
  const int64_t next_position = p.next_positions == nullptr || num_nodes == 0 ? 0 : p.tree.positions[slot - thread] + 1;
  int first_child = -1;
  if (thread < num_nodes) {
    token[thread] = p.tree.tokens[slot];
    next_sibling[thread] = forward(p.tree.next_sibling[slot], thread, num_nodes);
    first_child = forward(p.tree.first_child[slot], thread, num_nodes);
  }
  wait_for_previous_kernel();

  if (p.node_tokens != nullptr) {
    if (thread < num_nodes) {
      choice[thread] = p.node_tokens[rows.start + thread];
      nonfinite[thread] = false;
    }
  } else {
    constexpr int LANES = 4;  // of each node
    const int lane = thread % LANES;
    // whole warps take part in the shuffles
    for (int node = thread / LANES; node - node % (32 / LANES) < num_nodes; node += WALK_THREADS / LANES) {
      uint64_t best = 0;
      if (node < num_nodes) {
        const uint64_t *partials = p.partials + static_cast<int64_t>(rows.start + node) * p.num_splits;
        for (int split = lane; split < p.num_splits; split += LANES) best = better(best, partials[split]);
      }
      best = best_of_lanes<LANES>(best);
      if (lane == 0 && node < num_nodes) {
        choice[node] = token_of(best);
        nonfinite[node] = is_nonfinite(best);
      }
    }
  }
  __syncthreads();
  if (thread < num_nodes) {
    int child = first_child;
    while (child >= 0 && token[child] != choice[thread]) child = next_sibling[child];
    follow[thread] = child;
  }
  __syncthreads();
  if (thread == 0) {
    int depth = num_nodes == 0 ? -1 : 0;
    if (num_nodes > 0) {
      int node = 0;
      bool is_bad = nonfinite[0];
      path[0] = 0;
      while (depth < max_depth && follow[node] >= 0) {
        node = follow[node];
        is_bad |= nonfinite[node];
        path[++depth] = node;
      }
      if (is_bad && p.tree.flags != nullptr) p.tree.flags[r] |= FLAG_NONFINITE;
    }
    num_accepted = depth;
    p.num_accepted[r] = depth;
    if (p.num_rejected != nullptr) p.num_rejected[r] = num_nodes == 0 ? 0 : rows.end - rows.start - 1 - depth;
    if (p.next_positions != nullptr) p.next_positions[r] = num_nodes == 0 ? 0 : next_position + depth;
  }
  __syncthreads();
  if (thread <= max_depth) {
    const bool is_visited = thread <= num_accepted;
    const int node = is_visited ? path[thread] : -1;
    const int64_t place = static_cast<int64_t>(r) * (max_depth + 1) + thread;
    p.output_tokens[place] = is_visited ? choice[node] : -1;
    if (p.accepted_rows != nullptr) p.accepted_rows[place] = is_visited ? rows.start + node : -1;
    if (thread > 0) p.accepted_nodes[static_cast<int64_t>(r) * max_depth + thread - 1] = node;
  }
}
