// SPDX-License-Identifier: Apache-2.0
//
// gdn_verify: outputs of a gated-delta-net layer for every node of a tree, from one read of the
// state. What it computes is in rust/gdn_verify.rs, why like this in gdn_verify.md.
//
// With d(j, i) the sum of log decays below node j down to node i, and d(i) the sum from the root:
//
//   o_i = scale (e^d(i) S^T q_i + sum over j = i and ancestors of e^d(j, i) w_ij rhs_j)
//   rhs_j = beta_j (v_j - e^d(j) S^T k_j)
//   w_ij = q_i . k_j - sum over m = i and ancestors, below j, of w_im beta_m (k_m . k_j)
//
// That is the forward substitution of the WY form taken from the left: a small triangular system
// per node and value head, so that nothing is sequential over the columns of the state.
//
// "prepare" convolves, normalises and stashes, once per row and head. "solve" gives each block
// one key head and some value columns.
#include "gdn.cuh"
#include "params/gdn_verify.h"

namespace ddt {
namespace {

// Queries and keys before their norm are values of T, so exact in bf16 if that is T; other types
// take a sum of two.
template <typename T>
constexpr int PARTS = 2;
template <>
constexpr int PARTS<__nv_bfloat16> = 1;

template <typename T>
constexpr uint32_t DTYPE = DDT_CUDA_F32;
template <>
constexpr uint32_t DTYPE<__half> = DDT_CUDA_F16;
template <>
constexpr uint32_t DTYPE<__nv_bfloat16> = DDT_CUDA_BF16;

// ---- four neighbouring elements of a row

template <typename T>
struct alignas(4 * sizeof(T)) Quad {
  T x[4];
};

template <typename T>
__device__ __forceinline__ Quad<T> load_quad(const T *data, int64_t stride, bool vector) {
  if (vector) return *reinterpret_cast<const Quad<T> *>(data);
  return {{data[0], data[stride], data[2 * stride], data[3 * stride]}};
}

template <typename T>
__device__ __forceinline__ void store_quad(T *data, int64_t stride, bool vector, const Quad<T> &quad) {
  if (vector) {
    *reinterpret_cast<Quad<T> *>(data) = quad;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) data[i * stride] = quad.x[i];
  }
}

template <typename T>
__device__ __forceinline__ void store_four_as(const ddt_cuda_view &view, int64_t offset, int64_t stride, bool vector,
                                              const float (&in)[4]) {
  store_quad(static_cast<T *>(view.data) + offset, stride, vector,
             Quad<T>{{from_f32<T>(in[0]), from_f32<T>(in[1]), from_f32<T>(in[2]), from_f32<T>(in[3])}});
}

__device__ __forceinline__ void store_four(const ddt_cuda_view &view, int64_t offset, int64_t stride, bool vector,
                                           const float (&in)[4]) {
  switch (view.dtype) {
    case DDT_CUDA_F16: store_four_as<__half>(view, offset, stride, vector, in); break;
    case DDT_CUDA_BF16: store_four_as<__nv_bfloat16>(view, offset, stride, vector, in); break;
    default: store_four_as<float>(view, offset, stride, vector, in);
  }
}

// A floating-point element as it is in memory, so that several loads can be in flight before the
// first is converted.
__device__ __forceinline__ uint32_t load_bits(const ddt_cuda_view &view, int64_t offset) {
  if (view.dtype == DDT_CUDA_F32) return static_cast<const uint32_t *>(view.data)[offset];
  return static_cast<const uint16_t *>(view.data)[offset];
}

__device__ __forceinline__ float bits_to_f32(const ddt_cuda_view &view, uint32_t bits) {
  if (view.dtype == DDT_CUDA_F16) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  return __uint_as_float(view.dtype == DDT_CUDA_F32 ? bits : bits << 16);
}

// Two f32 as bf16 pairs: high + low has 16 bits of precision.
__device__ __forceinline__ void split(float x, float y, uint32_t &high, uint32_t &low) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  const __nv_bfloat162 l = __floats2bfloat162_rn(x - __low2float(h), y - __high2float(h));
  high = reinterpret_cast<const uint32_t &>(h);
  low = reinterpret_cast<const uint32_t &>(l);
}

__device__ __forceinline__ void prefetch_to_l2(const void *address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---- prepare: a warp has two nodes of one query, key or value head, a lane four channels of it; further
// blocks have the gates of some value heads, a lane one of them

constexpr int PREPARE_WARPS = DDT_CUDA_GDN_VERIFY_PREPARE_THREADS / 32;
constexpr int WARP_NODES = 2;
constexpr int GATE_HEADS = DDT_CUDA_GDN_VERIFY_GATE_HEADS;
static_assert(PREPARE_WARPS * WARP_NODES == DDT_CUDA_GDN_VERIFY_PREPARE_NODES, "");
static_assert(WARP_NODES * GATE_HEADS == 32, "a lane per node and head");

// Strides of packed tensors fit 32 bits, so that an address takes one instruction.
template <bool PACKED>
__device__ __forceinline__ int64_t offset(int index, int64_t stride) {
  if constexpr (PACKED) return static_cast<int64_t>(index) * static_cast<int>(stride);
  return index * stride;
}

template <typename T, bool PACKED>
__device__ __forceinline__ void load_conv(const ddt_cuda_gdn_verify &p, int channel, ConvChannel (&conv)[4]) {
  const ddt_cuda_view &weight = p.conv_weight;
  if (PACKED || ((p.flags & DDT_CUDA_GDN_VERIFY_WEIGHT) != 0 && weight.dtype == DTYPE<T> && p.conv_bias.data == nullptr)) {
    Quad<T> taps[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      taps[i] = load_quad(static_cast<const T *>(weight.data) + offset<PACKED>(channel + i, weight.strides[0]), 1, true);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      conv[i].bias = 0.0f;
#pragma unroll
      for (int tap = 0; tap < GDN_CONV_WIDTH; ++tap) conv[i].weight[tap] = to_f32(taps[i].x[tap]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) conv[i] = load_conv_channel(weight, p.conv_bias, channel + i);
  }
}

// Gates of a warp's nodes; lane p of ancestors[i] has the ancestor at depth p.
__device__ __forceinline__ void prepare_gates(const ddt_cuda_gdn_verify &p, const RequestRows &rows, int gate_block,
                                              int first, const int (&depths)[WARP_NODES],
                                              const int (&ancestors)[WARP_NODES]) {
  constexpr int BATCH = 8;
  const int lane = threadIdx.x % 32, node = first + lane / GATE_HEADS;
  const int head = min(gate_block * GATE_HEADS + lane % GATE_HEADS, p.num_v_heads - 1);
  const int row = rows.start + min(node, rows.num_nodes - 1);
  const int depth = lane < GATE_HEADS ? depths[0] : depths[1];
  const uint32_t own_a = load_bits(p.a, row * p.a.strides[0] + head * p.a.strides[1]);
  const uint32_t own_b = load_bits(p.b, row * p.b.strides[0] + head * p.b.strides[1]);
  const float a_log = bits_to_f32(p.a_log, load_bits(p.a_log, head * p.a_log.strides[0]));
  const float dt_bias = bits_to_f32(p.dt_bias, load_bits(p.dt_bias, head * p.dt_bias.strides[0]));
  const int deepest = max(depths[0], depths[1]);
  float since_state = 0.0f;
#pragma unroll 1
  for (int base = 0; base < deepest; base += BATCH) {
    uint32_t a[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int of_first = __shfl_sync(FULL_WARP, ancestors[0], base + i);
      const int of_second = __shfl_sync(FULL_WARP, ancestors[1], base + i);
      const int ancestor_row = rows.start + (lane < GATE_HEADS ? of_first : of_second);
      a[i] = load_bits(p.a, ancestor_row * p.a.strides[0] + head * p.a.strides[1]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const float g = log_decay(bits_to_f32(p.a, a[i]), a_log, dt_bias);
      since_state += base + i < depth ? g : 0.0f;
    }
  }
  if (node >= rows.num_nodes || gate_block * GATE_HEADS + lane % GATE_HEADS >= p.num_v_heads) return;
  const float g = log_decay(bits_to_f32(p.a, own_a), a_log, dt_bias), beta = sigmoid(bits_to_f32(p.b, own_b));
  float *gates = p.gates + static_cast<int64_t>(row) * 3 * p.num_v_heads + head;
  gates[0] = g;
  gates[p.num_v_heads] = beta;
  gates[2 * p.num_v_heads] = expf(since_state + g);
  const ddt_cuda_view &stash = p.stash_gates;
  float *out = static_cast<float *>(stash.data) + row * stash.strides[0] + head * stash.strides[2];
  out[0] = g;
  out[stash.strides[1]] = beta;
}

// Where in 16 keys the first two of four are stored; the others are 8 behind. In this order the
// lanes of an mma hold 16 bytes of the state each.
__device__ __forceinline__ int position(int element) { return element / 16 * 16 + element % 16 / 2; }

// PACKED: whatever can be read four elements at a time is, and of type T, without a bias.
template <typename T, bool PACKED>
__device__ __forceinline__ void prepare(const ddt_cuda_gdn_verify &p) {
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_heads = 2 * p.num_k_heads + p.num_v_heads;
  const int request = blockIdx.x, head = blockIdx.y, v_head = head - 2 * p.num_k_heads;
  const int first = blockIdx.z * DDT_CUDA_GDN_VERIFY_PREPARE_NODES + warp * WARP_NODES;

  // first what needs nothing else
  int depths[WARP_NODES], ancestors[WARP_NODES];
#pragma unroll
  for (int i = 0; i < WARP_NODES; ++i) {
    const int64_t node = static_cast<int64_t>(request) * p.tree.max_nodes + min(first + i, p.tree.max_nodes - 1);
    depths[i] = p.tree.depths[node];
    ancestors[i] = p.tree.ancestors[node * (p.tree.max_depth + 1) + min(lane, p.tree.max_depth)];
  }
  const RequestRows rows = request_rows(p.query_start, p.tree, request, p.num_rows);
  const int slot = p.state_slots[request];
  const int channel = head * GDN_HEAD_DIM + lane * 4;
  ConvChannel conv[4];
  if (head < num_heads) load_conv<T, PACKED>(p, channel, conv);
  if (first >= rows.num_nodes || slot < 0 || slot >= p.num_slots) return;
#pragma unroll
  for (int i = 0; i < WARP_NODES; ++i) {
    depths[i] = first + i < rows.num_nodes ? min(max(depths[i], 0), min(first + i, p.tree.max_depth)) : 0;
    ancestors[i] = min(max(ancestors[i], 0), min(first + i, rows.num_nodes - 1));
  }
  if (head >= num_heads) {
    prepare_gates(p, rows, head - num_heads, first, depths, ancestors);
    return;
  }

  const ddt_cuda_view &state = p.conv_state;
  const bool vector = PACKED || (p.flags & DDT_CUDA_GDN_VERIFY_ROWS) != 0;
  const T *inputs_of_rows = static_cast<const T *>(p.mixed_qkv.data) +
                            (PACKED ? channel : channel * p.mixed_qkv.strides[1]);
  const T *window = static_cast<const T *>(state.data) + slot * state.strides[0] +
                    (PACKED ? channel : channel * state.strides[1]);
  Quad<T> taps[WARP_NODES][GDN_CONV_WIDTH];
#pragma unroll
  for (int i = 0; i < WARP_NODES; ++i) {
    const int node = first + i;
    if (node >= rows.num_nodes) break;
#pragma unroll
    for (int tap = 0; tap < GDN_CONV_WIDTH; ++tap) {
      const int place = depths[i] + tap - GDN_WINDOW;
      // the node itself may be one more than there are lanes
      const int ancestor = __shfl_sync(FULL_WARP, ancestors[i], max(place, 0) % 32);
      const T *row = inputs_of_rows + offset<PACKED>(rows.start + (tap == GDN_WINDOW ? node : ancestor),
                                                     p.mixed_qkv.strides[0]);
      if constexpr (PACKED) {
        const T *before = window + offset<PACKED>(place + GDN_WINDOW, state.strides[2]);
        taps[i][tap] = load_quad(place >= 0 ? row : before, 1, true);
      } else if (place >= 0) {
        taps[i][tap] = load_quad(row, p.mixed_qkv.strides[1], vector);
      } else if (state.dtype == DTYPE<T>) {
        taps[i][tap] = load_quad(window + (place + GDN_WINDOW) * state.strides[2], state.strides[1],
                                 (p.flags & DDT_CUDA_GDN_VERIFY_WINDOW) != 0);
      } else {
        taps[i][tap] = {};
      }
    }
  }
#pragma unroll
  for (int i = 0; i < WARP_NODES; ++i) {
    const int node = first + i;
    if (node >= rows.num_nodes) break;
    const int row = rows.start + node;
    const ddt_cuda_view &stash = p.stash_qkv;
    store_quad(static_cast<T *>(stash.data) + offset<PACKED>(row, stash.strides[0]) +
                   (PACKED ? channel : channel * stash.strides[1]),
               stash.strides[1], PACKED || (p.flags & DDT_CUDA_GDN_VERIFY_STASH) != 0, taps[i][GDN_WINDOW]);
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float inputs[GDN_CONV_WIDTH];
#pragma unroll
      for (int tap = 0; tap < GDN_CONV_WIDTH; ++tap) inputs[tap] = to_f32(taps[i][tap].x[k]);
      if (!PACKED && state.dtype != DTYPE<T>) {
        // a window of f32 that T cannot hold
#pragma unroll
        for (int tap = 0; tap < GDN_WINDOW; ++tap) {
          const int place = depths[i] + tap - GDN_WINDOW;
          if (place < 0) {
            inputs[tap] = load_f32(state, slot * state.strides[0] + (channel + k) * state.strides[1] +
                                              (place + GDN_WINDOW) * state.strides[2]);
          }
        }
      }
      x[k] = conv_silu<T>(conv[k], inputs);
    }
    if (v_head >= 0) {
      const Quad<T> quad = {{from_f32<T>(x[0]), from_f32<T>(x[1]), from_f32<T>(x[2]), from_f32<T>(x[3])}};
      T *out = static_cast<T *>(p.values) + static_cast<int64_t>(row * p.num_v_heads + v_head) * GDN_HEAD_DIM + lane * 4;
      *reinterpret_cast<Quad<T> *>(out) = quad;
      continue;
    }
    const float norm = inverse_norm(warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]), p.norm_eps);
    const int row_head = row * 2 * p.num_k_heads + head;
    if (lane == 0) p.norms[row_head] = norm;
    uint32_t parts[2][2];
    split(x[0], x[1], parts[0][0], parts[1][0]);
    split(x[2], x[3], parts[0][1], parts[1][1]);
#pragma unroll
    for (int part = 0; part < PARTS<T>; ++part) {
      __nv_bfloat16 *out = static_cast<__nv_bfloat16 *>(p.heads) +
                           (part * static_cast<int64_t>(p.num_rows) * 2 * p.num_k_heads + row_head) * GDN_HEAD_DIM +
                           position(lane * 4);
      *reinterpret_cast<uint32_t *>(out) = parts[part][0];
      *reinterpret_cast<uint32_t *>(out + 8) = parts[part][1];
    }
  }
}

// ---- solve

// Rows of state at a time: value columns of an mma.
constexpr int TILE = 16;
// Weights are kept for so many tiles, or for the value heads of so many.
constexpr int TILES = DDT_CUDA_GDN_VERIFY_TILES;
constexpr int K_STEPS = GDN_HEAD_DIM / 16;
constexpr int MAX_PATH = DDT_CUDA_MAX_DEPTH + 1;
// Row lengths in shared memory, without bank conflicts.
constexpr int HEAD_PITCH = GDN_HEAD_DIM + 8;
constexpr int WEIGHT_PITCH = MAX_PATH;
// These rows are read four elements at a time.
constexpr int PATH_PITCH = (MAX_PATH + 3) / 4 * 4;
constexpr int TILE_FLOATS = TILE * GDN_HEAD_DIM;

// The dynamic shared memory of a block. M = row_capacity.
template <typename T>
struct Shared {
  // [PARTS][2][M][HEAD_PITCH] queries, then keys, before their norm
  __nv_bfloat16 *heads;
  // Per tile its rows of the state, [TILE][128]; after the products with it [2][M][TILE] of
  // rhs, then of e^d(i) S^T q_i
  float *tiles;
  // [M][PATH_PITCH] k_i . k_j of the ancestors j of i, root first
  float *key_dots;
  // [TILES][M][WEIGHT_PITCH] e^d(j, i) w_ij of j = i and ancestors, at first q_i . k_j
  float *weights;
  // [TILES][M]
  float *log_decays, *betas, *root_decays;
  // [2][M] factors of queries, then keys
  float *norms;
  // [M][PATH_PITCH] rows on the way from the root to each row, itself last
  uint8_t *paths;
  uint8_t *depths;
  // nodes of the rows before the first node
  uint8_t *carried;

  __device__ Shared(unsigned char *base, int m, int num_tiles) {
    heads = reinterpret_cast<__nv_bfloat16 *>(base);
    tiles = reinterpret_cast<float *>(heads + PARTS<T> * 2 * m * HEAD_PITCH);
    key_dots = tiles + num_tiles * TILE_FLOATS;
    weights = key_dots + m * PATH_PITCH;
    log_decays = weights + TILES * m * WEIGHT_PITCH;
    betas = log_decays + TILES * m;
    root_decays = betas + TILES * m;
    norms = root_decays + TILES * m;
    paths = reinterpret_cast<uint8_t *>(norms + 2 * m);
    depths = paths + m * PATH_PITCH;
    carried = depths + m;
  }
};

constexpr int ROW_BYTES_WITHOUT_HEADS = 4 * (PATH_PITCH + TILES * WEIGHT_PITCH + 3 * TILES + 2) + PATH_PITCH + 1;
static_assert(2 * HEAD_PITCH * 2 + ROW_BYTES_WITHOUT_HEADS == DDT_CUDA_GDN_VERIFY_ROW_BYTES_BF16, "");
static_assert(4 * HEAD_PITCH * 2 + ROW_BYTES_WITHOUT_HEADS == DDT_CUDA_GDN_VERIFY_ROW_BYTES, "");
static_assert(TILES * WEIGHT_PITCH * 4 <= 2 * HEAD_PITCH * 2, "steps fit where the heads were");
static_assert(TILE_FLOATS * 4 == DDT_CUDA_GDN_VERIFY_TILE_BYTES, "");
static_assert(2 * DDT_CUDA_GDN_VERIFY_MAX_ROWS_BF16 * TILE <= TILE_FLOATS, "results fit where the state was");
static_assert(DDT_CUDA_GDN_VERIFY_MAX_ROWS > DDT_CUDA_MAX_DEPTH, "a chunk has room for a node beside its ancestors");

// 16 value columns of one value head: columns of the key head's value heads alternate.
struct Tile {
  int head;    // among the value heads of the key head
  int column;  // first

  __device__ Tile(int index, int group) : head(index % group), column(index / group * TILE) {}
};

// The nodes that a block treats at a time, after the ancestors of the first of them. Nodes are in
// depth-first order, so those are all the ancestors that earlier nodes provide.
struct Chunk {
  int first;    // node
  int carried;  // ancestors, whose outputs are known already
  int count;    // rows: carried, then nodes

  __device__ int node(int row, const uint8_t *carried_nodes) const {
    return row < carried ? carried_nodes[row] : first + row - carried;
  }
};

template <typename T, int WARPS, int MAX_ROWS>
struct Solve {
  static constexpr int THREADS = WARPS * 32;
  static constexpr int PATH_LANES = 16;
  static constexpr int PATH_ROWS = THREADS / PATH_LANES;
  static constexpr int PATH_PASSES = (MAX_ROWS + PATH_ROWS - 1) / PATH_ROWS;
  // Blocks of eight rows that a warp multiplies with its tile.
  static constexpr int BLOCKS = 2;
  static_assert(THREADS >= 2 * MAX_ROWS, "a thread per norm");

  using Sums = float[BLOCKS][2][4];
  using Values = T[BLOCKS][4];

  const ddt_cuda_gdn_verify &p;
  const Shared<T> shared;
  const int request, k_head;
  const int group;  // value heads per key head
  int warp, lane;

  __device__ __nv_bfloat16 *head_row(int part, int is_key, int row) const {
    return shared.heads + ((part * 2 + is_key) * p.row_capacity + row) * HEAD_PITCH;
  }

  // ---- topology

  // Some of what the tree says of a chunk's rows, on its way to shared memory.
  struct Topology {
    int depth;
    int ancestors[PATH_PASSES];
  };

  __device__ int64_t tree_row(const Chunk &chunk, int row) const {
    return static_cast<int64_t>(request) * p.tree.max_nodes + chunk.first - chunk.carried + row;
  }

  __device__ bool in_tree(const Chunk &chunk, int row) const {
    return row >= chunk.carried && row < p.row_capacity && chunk.first - chunk.carried + row < p.tree.max_nodes;
  }

  __device__ Topology load_topology(const Chunk &chunk) const {
    Topology topology;
    const int place = threadIdx.x % PATH_LANES;
    topology.depth = in_tree(chunk, threadIdx.x) ? p.tree.depths[tree_row(chunk, threadIdx.x)] : threadIdx.x;
#pragma unroll
    for (int pass = 0; pass < PATH_PASSES; ++pass) {
      const int row = pass * PATH_ROWS + threadIdx.x / PATH_LANES;
      topology.ancestors[pass] = in_tree(chunk, row) && place <= p.tree.max_depth
                                     ? p.tree.ancestors[tree_row(chunk, row) * (p.tree.max_depth + 1) + place]
                                     : -1;
    }
    return topology;
  }

  // Whatever the tree holds, a row's path has no later row.
  __device__ void store_path(const Chunk &chunk, int row, int place, int ancestor) const {
    // an ancestor before the chunk's nodes is the carried row of that depth
    const int path_row = ancestor >= chunk.first ? ancestor - chunk.first + chunk.carried : place;
    shared.paths[row * PATH_PITCH + place] = min(path_row, row);
  }

  __device__ void store_topology(const Chunk &chunk, const Topology &topology) const {
    const int row = threadIdx.x;
    if (row < chunk.count) shared.depths[row] = min(max(topology.depth, 0), min(row, p.tree.max_depth));
#pragma unroll
    for (int pass = 0; pass < PATH_PASSES; ++pass) {
      const int path_row = pass * PATH_ROWS + threadIdx.x / PATH_LANES;
      if (path_row >= chunk.count) break;
      store_path(chunk, path_row, threadIdx.x % PATH_LANES, topology.ancestors[pass]);
#pragma unroll 1
      for (int place = PATH_LANES + threadIdx.x % PATH_LANES; place <= p.tree.max_depth; place += PATH_LANES) {
        const int ancestor = path_row >= chunk.carried
                                 ? p.tree.ancestors[tree_row(chunk, path_row) * (p.tree.max_depth + 1) + place]
                                 : -1;
        store_path(chunk, path_row, place, ancestor);
      }
    }
  }

  // ---- from global to shared memory

  // Where four keys of a row of the state are: in this order the lanes of a warp do not collide.
  __device__ static int state_place(int row, int quad) { return row * GDN_HEAD_DIM + (quad ^ (row & 1) << 2) * 4; }

  // Starts to copy `rows` rows of a tile from `first` on, by the calling warp.
  template <int ROWS>
  __device__ void load_state(float *to, int slot, const Tile &tile, int first) const {
    const ddt_cuda_view &view = p.ssm_state;
    const float *from = static_cast<const float *>(view.data) + slot * view.strides[0] +
                        (k_head * group + tile.head) * view.strides[1] + (tile.column + first) * view.strides[2] +
                        lane * 4 * view.strides[3];
    if (p.flags & DDT_CUDA_GDN_VERIFY_STATE) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        copy_async_16(to + state_place(first + row, lane), from);
        from += view.strides[2];
      }
    } else {
#pragma unroll 1
      for (int row = 0; row < ROWS; ++row) {
#pragma unroll 1
        for (int i = 0; i < 4; ++i) to[state_place(first + row, lane) + i] = from[i * view.strides[3]];
        from += view.strides[2];
      }
    }
  }

  // Splits what the calling thread copied, in place: of each two keys their high, then their low parts.
  template <int ROWS>
  __device__ void split_state(float *state, int first) const {
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float4 *place = reinterpret_cast<float4 *>(state + state_place(first + row, lane));
      const float4 keys = *place;
      uint4 parts;
      split(keys.x, keys.y, parts.x, parts.y);
      split(keys.z, keys.w, parts.z, parts.w);
      *reinterpret_cast<uint4 *>(place) = parts;
    }
  }

  // Starts to copy the rows' queries, keys and norms.
  __device__ void load_heads(const Chunk &chunk, int start) const {
    constexpr int VECTORS = GDN_HEAD_DIM / 8;
    const int vector = threadIdx.x % VECTORS;
    const auto head = [&](int pair) {
      return ((start + chunk.node(pair / 2, shared.carried)) * 2 + pair % 2) * p.num_k_heads + k_head;
    };
#pragma unroll
    for (int part = 0; part < PARTS<T>; ++part) {
      const __nv_bfloat16 *heads = static_cast<const __nv_bfloat16 *>(p.heads) +
                                   part * static_cast<int64_t>(p.num_rows) * 2 * p.num_k_heads * GDN_HEAD_DIM +
                                   vector * 8;
#pragma unroll 1
      for (int pair = threadIdx.x / VECTORS; pair < 2 * chunk.count; pair += THREADS / VECTORS) {
        copy_async_16(head_row(part, pair % 2, pair / 2) + vector * 8,
                      heads + static_cast<int64_t>(head(pair)) * GDN_HEAD_DIM);
      }
    }
    const int pair = threadIdx.x;
    if (pair < 2 * chunk.count) copy_async_4(shared.norms + pair % 2 * p.row_capacity + pair / 2, p.norms + head(pair));
  }

  // Starts to copy the gates of one row.
  __device__ void load_gates(const Chunk &chunk, int start, int set, int head, int row) const {
    const float *from = p.gates +
                        static_cast<int64_t>(start + chunk.node(row, shared.carried)) * 3 * p.num_v_heads +
                        (k_head * group + head);
    const int at = set * p.row_capacity + row;
    copy_async_4(shared.log_decays + at, from);
    copy_async_4(shared.betas + at, from + p.num_v_heads);
    copy_async_4(shared.root_decays + at, from + 2 * p.num_v_heads);
  }

  // Which row and column of its tile a lane has in element `i` of block `block`.
  template <int ROW_STEP>
  __device__ int sum_row(int first, int block, int i) const {
    return first + block * ROW_STEP + lane % 4 * 2 + i % 2;
  }
  __device__ int sum_column(int i) const { return lane / 4 + i / 2 * 8; }

  template <int ROW_STEP>
  __device__ void load_values(const Chunk &chunk, int start, const Tile &tile, int first, Values &values) const {
    const T *from = static_cast<const T *>(p.values) + (k_head * group + tile.head) * GDN_HEAD_DIM + tile.column;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = min(sum_row<ROW_STEP>(first, block, i), chunk.count - 1);
        values[block][i] = from[static_cast<int64_t>(start + chunk.node(row, shared.carried)) *
                                    (p.num_v_heads * GDN_HEAD_DIM) + sum_column(i)];
      }
    }
  }

  // ---- products

  // Fragments of eight rows of queries or keys for two steps of 16 elements.
  __device__ void load_rows(uint32_t (&b)[4], int part, int is_key, int row, int step) const {
    load_matrix_x4(b, head_row(part, is_key, row + lane % 8) + step * 16 + lane / 8 * 8);
  }

  // Products of queries and keys with the keys of their ancestors, for `sets` sets of weights.
  __device__ void multiply_heads(const Chunk &chunk, int sets) const {
    // Units of 8 rows and 16 ancestors.
    int node = 0, ancestor = warp * 16;
#pragma unroll 1
    while (true) {
      while (ancestor > node + 7) {
        ancestor -= (node + 8 + 15) / 16 * 16;
        node += 8;
      }
      if (node >= chunk.count) break;
      float sums[2][2][4] = {};
#pragma unroll
      for (int step = 0; step < K_STEPS; step += 2) {
        uint32_t a[2][PARTS<T>][4];
#pragma unroll
        for (int part = 0; part < PARTS<T>; ++part) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            load_matrix_x4(a[i][part], head_row(part, 1, ancestor + lane % 16) + (step + i) * 16 + lane / 16 * 8);
          }
        }
#pragma unroll
        for (int is_key = 0; is_key < 2; ++is_key) {
          uint32_t b[PARTS<T>][4];
#pragma unroll
          for (int part = 0; part < PARTS<T>; ++part) load_rows(b[part], part, is_key, node, step);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            mma_m16n8k16<__nv_bfloat16>(sums[is_key][i], a[i][0], b[0][2 * i], b[0][2 * i + 1]);
            if constexpr (PARTS<T> == 2) {
              mma_m16n8k16<__nv_bfloat16>(sums[is_key][i], a[i][0], b[1][2 * i], b[1][2 * i + 1]);
              mma_m16n8k16<__nv_bfloat16>(sums[is_key][i], a[i][1], b[0][2 * i], b[0][2 * i + 1]);
            }
          }
        }
      }
      // what is read of rows that are none is not used
      int depths[2], places[2];
      float query_norms[2], key_norms[2], ancestor_norms[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = node + lane % 4 * 2 + i, j = ancestor + lane / 4 + i * 8;
        depths[i] = row < chunk.count ? shared.depths[row] : -1;
        places[i] = min(static_cast<int>(shared.depths[j]), MAX_PATH - 1);
        query_norms[i] = shared.norms[row];
        key_norms[i] = shared.norms[p.row_capacity + row];
        ancestor_norms[i] = shared.norms[p.row_capacity + j];
      }
      bool on_path[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = node + lane % 4 * 2 + i % 2, j = ancestor + lane / 4 + i / 2 * 8;
        on_path[i] = shared.paths[row * PATH_PITCH + places[i / 2]] == j && places[i / 2] <= depths[i % 2] && j <= row;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!on_path[i]) continue;
        const int row = node + lane % 4 * 2 + i % 2, place = places[i / 2];
        const float norm = ancestor_norms[i / 2];
        shared.key_dots[row * PATH_PITCH + place] = (sums[1][0][i] + sums[1][1][i]) * (norm * key_norms[i % 2]);
        const float dot = (sums[0][0][i] + sums[0][1][i]) * (norm * query_norms[i % 2]);
        float *weight = shared.weights + row * WEIGHT_PITCH + place;
        for (int set = 0; set < sets; ++set) weight[set * p.row_capacity * WEIGHT_PITCH] = dot;
      }
      ancestor += WARPS * 16;
    }
  }

  // Products of a tile of the state, in parts, with queries and keys. The parts of eight keys are the
  // 16 elements of one mma, so both halves of the other operand are the same.
  template <int ROW_STEP>
  __device__ void multiply_state(const Chunk &chunk, const float *state, int first, Sums &sums) const {
#pragma unroll
    for (int i = 0; i < BLOCKS * 8; ++i) sums[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < K_STEPS; step += 2) {
      uint32_t a[2][2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 parts = *reinterpret_cast<const uint4 *>(
              state + state_place(lane / 4 + 8 * half, (step + i) * 4 + lane % 4));
          a[i][0][half] = parts.x;
          a[i][0][2 + half] = parts.y;
          a[i][1][half] = parts.z;
          a[i][1][2 + half] = parts.w;
        }
      }
#pragma unroll
      for (int block = 0; block < BLOCKS; ++block) {
        const int node = first + block * ROW_STEP;
        if (node >= chunk.count) break;
#pragma unroll
        for (int is_key = 0; is_key < 2; ++is_key) {
#pragma unroll
          for (int part = 0; part < PARTS<T>; ++part) {
            uint32_t b[4];
            load_rows(b, part, is_key, node, step);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              mma_m16n8k16<__nv_bfloat16>(sums[block][is_key], a[i / 2][i % 2], b[i], b[i]);
            }
          }
        }
      }
    }
  }

  // Where four columns of a row are among a tile's results.
  __device__ static int result_place(int row, int quad) { return row * TILE + (quad ^ (row >> 1 & 3)) * 4; }

  // rhs and e^d(i) S^T q_i of a tile, over its state.
  template <int ROW_STEP>
  __device__ void store_sums(const Chunk &chunk, float *results, int set, int first, const Sums &sums,
                             const Values &values) const {
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; ++i) {
      const int block = i / 2, parity = i % 2, row = sum_row<ROW_STEP>(first, block, parity);
      if (row >= chunk.count) continue;
      const int gate = set * p.row_capacity + row;
      const float beta = shared.betas[gate], decay = shared.root_decays[gate];
      const float query_factor = decay * shared.norms[row], key_factor = decay * shared.norms[p.row_capacity + row];
#pragma unroll
      for (int at = parity; at < 4; at += 2) {
        const int column = sum_column(at);
        float *to = results + result_place(row, column / 4) + column % 4;
        to[0] = beta * (to_f32(values[block][at]) - sums[block][1][at] * key_factor);
        to[p.row_capacity * TILE] = sums[block][0][at] * query_factor;
      }
    }
  }

  // ---- substitution

  // The weights of one set for a row per lane, by substitution from the row up to the root, four steps
  // at a time. `all_steps` has room for [M][WEIGHT_PITCH] w_ij beta_j.
  __device__ void substitute(const Chunk &chunk, int set, int lane_row, float *all_steps) const {
    const int row = min(lane_row, chunk.count - 1);
    const int depth = lane_row < chunk.count ? shared.depths[row] : -1;
    const int deepest = __reduce_max_sync(FULL_WARP, depth);
    const uint32_t *path = reinterpret_cast<const uint32_t *>(shared.paths + row * PATH_PITCH);
    const float *log_decays = shared.log_decays + set * p.row_capacity, *betas = shared.betas + set * p.row_capacity;
    float *weights = shared.weights + (set * p.row_capacity + row) * WEIGHT_PITCH;
    float *steps = all_steps + row * WEIGHT_PITCH, sum = 0.0f;
    // A step that a row lacks has factor 0 and the row's own dots: up to its depth they are numbers.
    const auto step_row = [&](uint32_t four, int place) {
      return place <= depth ? static_cast<int>(four >> (place % 4 * 8) & 255) : row;
    };
    const auto dots_of = [&](int of_row, int group) {
      return *reinterpret_cast<const float4 *>(shared.key_dots + of_row * PATH_PITCH + group * 4);
    };
#pragma unroll 1
    for (int group = deepest / 4; group >= 0; --group) {
      const int base = group * 4;
      float w[4], log_decay[4], beta[4], x[4], weight[4];
      float4 own[4];
      const uint32_t own_path = path[group];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = step_row(own_path, base + i);
        w[i] = base + i <= depth ? weights[base + i] : 0.0f;
        log_decay[i] = log_decays[j];
        beta[i] = betas[j];
        own[i] = dots_of(j, group);
      }
#pragma unroll 1
      for (int below = base + 4; below <= deepest; below += 4) {
        const uint32_t four = path[below / 4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float factor = below + i <= depth ? -steps[below + i] : 0.0f;
          const float4 dots = dots_of(step_row(four, below + i), group);
          w[0] = fmaf(factor, dots.x, w[0]);
          w[1] = fmaf(factor, dots.y, w[1]);
          w[2] = fmaf(factor, dots.z, w[2]);
          w[3] = fmaf(factor, dots.w, w[3]);
        }
      }
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        const bool is_step = base + i <= depth;
        x[i] = is_step ? w[i] * beta[i] : 0.0f;
        weight[i] = expf(sum) * w[i];
        sum += is_step ? log_decay[i] : 0.0f;
        if (i > 0) w[0] = fmaf(-x[i], own[i].x, w[0]);
        if (i > 1) w[1] = fmaf(-x[i], own[i].y, w[1]);
        if (i > 2) w[2] = fmaf(-x[i], own[i].z, w[2]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (base + i > depth) continue;
        steps[base + i] = x[i];
        weights[base + i] = weight[i];
      }
    }
  }

  // ---- outputs

  // Outputs of the chunk's nodes for one tile, by `threads` threads of which this is `index`; with the
  // last node also zeros for the idle rows.
  __device__ void store_outputs(const Chunk &chunk, const RequestRows &rows, const float *results, int set,
                                const Tile &tile, int index, int threads) const {
    constexpr int QUADS = TILE / 4;
    const int first = chunk.first - chunk.carried, quad = index % QUADS;
    const bool is_last = first + chunk.count == rows.num_nodes;
    const int end = is_last ? rows.end - rows.start - first : chunk.count;
    const int64_t offset =
        (k_head * group + tile.head) * p.out.strides[1] + (tile.column + quad * 4) * p.out.strides[2];
#pragma unroll 1
    for (int row = chunk.carried + index / QUADS; row < end; row += threads / QUADS) {
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
      if (row < chunk.count) {
        const uint8_t *path = shared.paths + row * PATH_PITCH;
        const float *weights = shared.weights + (set * p.row_capacity + row) * WEIGHT_PITCH;
        sum = *reinterpret_cast<const float4 *>(results + p.row_capacity * TILE + result_place(row, quad));
        const int depth = shared.depths[row];
#pragma unroll 1
        for (int base = 0; base <= depth; base += 4) {
          const uint32_t four = *reinterpret_cast<const uint32_t *>(path + base);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const bool is_step = base + i <= depth;
            const float w = is_step ? weights[base + i] : 0.0f;
            const int j = is_step ? four >> (8 * i) & 255 : row;
            const float4 rhs = *reinterpret_cast<const float4 *>(results + result_place(j, quad));
            sum.x = fmaf(w, rhs.x, sum.x);
            sum.y = fmaf(w, rhs.y, sum.y);
            sum.z = fmaf(w, rhs.z, sum.z);
            sum.w = fmaf(w, rhs.w, sum.w);
          }
        }
      }
      store_four(p.out, (rows.start + first + row) * p.out.strides[0] + offset, p.out.strides[2],
                 (p.flags & DDT_CUDA_GDN_VERIFY_OUT) != 0,
                 {p.scale * sum.x, p.scale * sum.y, p.scale * sum.z, p.scale * sum.w});
    }
  }
};

// Any tree: a block has three tiles, and several warps share each.
template <typename T, int GROUPS, int MAX_ROWS>
__device__ __forceinline__ void solve(const ddt_cuda_gdn_verify &p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  using Block = Solve<T, TILES * GROUPS, MAX_ROWS>;
  constexpr int ROW_STEP = 8 * GROUPS;
  static_assert(Block::BLOCKS * ROW_STEP >= MAX_ROWS && 32 * GROUPS >= MAX_ROWS, "");
  const int request = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = p.num_v_heads / p.num_k_heads;
  Block block{p, Shared<T>(shared_bytes, p.row_capacity, TILES), request, static_cast<int>(blockIdx.y), group,
                    warp, lane};
  const Shared<T> &shared = block.shared;
  Chunk chunk{0, 0, 0};
  typename Block::Topology topology = block.load_topology(chunk);
  const RequestRows rows = request_rows(p.query_start, p.tree, request, p.num_rows);
  const int slot = p.state_slots[request];
  if (rows.num_nodes == 0 || slot < 0 || slot >= p.num_slots) return;

  while (true) {
    // Addresses that do not depend on the chunk would take registers throughout the loop.
    asm volatile("" : "+r"(block.lane), "+r"(block.warp));
    const int set = block.warp / GROUPS, part = block.warp % GROUPS;
    const int index = blockIdx.z * TILES + set;
    const bool has_tile = index < group * (GDN_HEAD_DIM / TILE);
    const Tile tile(index, group);
    float *state = shared.tiles + set * TILE_FLOATS;
    constexpr int STATE_ROWS = TILE / GROUPS;
    if (has_tile) block.template load_state<STATE_ROWS>(state, slot, tile, part * STATE_ROWS);
    copy_async_commit();
    chunk.count = min(chunk.carried + rows.num_nodes - chunk.first, p.row_capacity);
    block.store_topology(chunk, topology);
    // Only from here on "prepare" must have ended: what is read above are inputs of the call.
    if (chunk.first == 0) wait_for_previous_kernel();
    block.load_heads(chunk, rows.start);
    const int gate_row = part * 32 + lane;
    if (has_tile && gate_row < chunk.count) block.load_gates(chunk, rows.start, set, tile.head, gate_row);
    copy_async_commit();
    copy_async_wait<1>();
    if (has_tile) block.template split_state<STATE_ROWS>(state, part * STATE_ROWS);
    copy_async_wait<0>();
    __syncthreads();
    block.multiply_heads(chunk, TILES);
    typename Block::Sums sums;
    typename Block::Values values;
    if (has_tile) {
      block.template multiply_state<ROW_STEP>(chunk, state, part * 8, sums);
      // not earlier: there are no registers for them beside the products
      block.template load_values<ROW_STEP>(chunk, rows.start, tile, part * 8, values);
    }
    __syncthreads();
    if (has_tile) {
      block.template store_sums<ROW_STEP>(chunk, state, set, part * 8, sums, values);
      // the schedulers of an SM share the warps that have rows
      const int row = (part + TILES * GROUPS - set) % GROUPS * 32;
      float *steps = reinterpret_cast<float *>(shared.heads) + set * p.row_capacity * WEIGHT_PITCH;
      if (row < chunk.count) block.substitute(chunk, set, row + lane, steps);
    }
    __syncthreads();
    if (has_tile) block.store_outputs(chunk, rows, state, set, tile, part * 32 + lane, GROUPS * 32);

    const int next = chunk.first + chunk.count - chunk.carried;
    if (next >= rows.num_nodes) break;
    const int64_t node = static_cast<int64_t>(request) * p.tree.max_nodes + next;
    chunk = {next, min(max(p.tree.depths[node], 0), min(p.tree.max_depth, next)), 0};
    __syncthreads();  // the shared memory is free
    if (threadIdx.x < chunk.carried) {
      const int ancestor = p.tree.ancestors[node * (p.tree.max_depth + 1) + threadIdx.x];
      shared.carried[threadIdx.x] = min(max(ancestor, 0), next - 1);
    }
    topology = block.load_topology(chunk);
    __syncthreads();
  }
}

// Trees of up to 16 nodes: each warp has tiles of its own, and what all tiles share is computed once
// for as many of them as the grid leaves to a block.
__device__ __forceinline__ void solve_small(const ddt_cuda_gdn_verify &p) {
  using T = __nv_bfloat16;
  constexpr int WARPS = DDT_CUDA_GDN_VERIFY_SMALL_WARPS, ROWS = DDT_CUDA_GDN_VERIFY_SMALL_NODES, ROW_STEP = 8;
  using Block = Solve<T, WARPS, ROWS>;
  static_assert(Block::BLOCKS * ROW_STEP == ROWS && WARPS * 32 >= TILES * ROWS && WARPS >= TILES && ROWS <= 32, "");
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int request = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = p.num_v_heads / p.num_k_heads;
  const Block block{p, Shared<T>(shared_bytes, p.row_capacity, WARPS), request, static_cast<int>(blockIdx.y), group,
                    warp, lane};
  Chunk chunk{0, 0, 0};
  const typename Block::Topology topology = block.load_topology(chunk);
  const RequestRows rows = request_rows(p.query_start, p.tree, request, p.num_rows);
  const int slot = p.state_slots[request];
  if (rows.num_nodes == 0 || slot < 0 || slot >= p.num_slots) return;
  chunk.count = rows.num_nodes;

  const int end = min(static_cast<int>(blockIdx.z + 1) * p.block_tiles, group * (GDN_HEAD_DIM / TILE));
  int index = blockIdx.z * p.block_tiles + warp;
  float *state = block.shared.tiles + warp * TILE_FLOATS;
  const auto prefetch = [&](int tile_index) {
    if (tile_index >= end || !(p.flags & DDT_CUDA_GDN_VERIFY_STATE)) return;
    const ddt_cuda_view &view = p.ssm_state;
    const Tile tile(tile_index, group);
    const float *from = static_cast<const float *>(view.data) + slot * view.strides[0] +
                        (block.k_head * group + tile.head) * view.strides[1] + lane % 4 * 32;
    for (int row = lane / 4; row < TILE; row += 8) prefetch_to_l2(from + (tile.column + row) * view.strides[2]);
  };
  if (index < end) block.template load_state<TILE>(state, slot, Tile(index, group), 0);
  copy_async_commit();
  prefetch(index + WARPS);
  block.store_topology(chunk, topology);
  wait_for_previous_kernel();
  block.load_heads(chunk, rows.start);
  const int gate_row = threadIdx.x % ROWS, gate_head = threadIdx.x / ROWS;
  if (gate_head < group && gate_row < chunk.count) {
    block.load_gates(chunk, rows.start, gate_head, gate_head, gate_row);
  }
  typename Block::Values values;
  if (index < end) block.template load_values<ROW_STEP>(chunk, rows.start, Tile(index, group), 0, values);
  copy_async_commit();
  copy_async_wait<1>();
  if (index < end) block.template split_state<TILE>(state, 0);
  copy_async_wait<0>();
  __syncthreads();
  block.multiply_heads(chunk, group);
  typename Block::Sums sums;
  if (index < end) block.template multiply_state<ROW_STEP>(chunk, state, 0, sums);
  __syncthreads();
  if (warp < group) block.substitute(chunk, warp, lane, state);
  __syncthreads();
  while (index < end) {
    const Tile tile(index, group);
    // one warp alone uses this part of the shared memory
    __syncwarp();
    block.template store_sums<ROW_STEP>(chunk, state, tile.head, 0, sums, values);
    __syncwarp();
    block.store_outputs(chunk, rows, state, tile.head, tile, lane, 32);
    index += WARPS;
    if (index >= end) break;
    __syncwarp();
    block.template load_state<TILE>(state, slot, Tile(index, group), 0);
    copy_async_commit();
    prefetch(index + WARPS);
    block.template load_values<ROW_STEP>(chunk, rows.start, Tile(index, group), 0, values);
    copy_async_wait<0>();
    block.template split_state<TILE>(state, 0);
    __syncwarp();
    block.template multiply_state<ROW_STEP>(chunk, state, 0, sums);
  }
}

// Two blocks with 64 rows, where an SM has shared memory for them.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
constexpr int LARGE_BLOCKS_PER_SM = 2;
#else
constexpr int LARGE_BLOCKS_PER_SM = 1;
#endif

}  // namespace
}  // namespace ddt

#define DDT_PREPARE(NAME, T, PACKED)                                                                    \
  extern "C" __global__ void __launch_bounds__(DDT_CUDA_GDN_VERIFY_PREPARE_THREADS) NAME(               \
      const __grid_constant__ ddt_cuda_gdn_verify p) {                                                  \
    ddt::prepare<T, PACKED>(p);                                                                         \
  }

DDT_PREPARE(ddt_gdn_verify_prepare_f32, float, false)
DDT_PREPARE(ddt_gdn_verify_prepare_f16, __half, false)
DDT_PREPARE(ddt_gdn_verify_prepare_bf16, __nv_bfloat16, false)
DDT_PREPARE(ddt_gdn_verify_prepare_bf16_packed, __nv_bfloat16, true)

#define DDT_SOLVE(NAME, T, GROUPS, MAX_ROWS, BLOCKS_PER_SM)                                             \
  extern "C" __global__ void __launch_bounds__(ddt::TILES * GROUPS * 32, BLOCKS_PER_SM) NAME(           \
      const __grid_constant__ ddt_cuda_gdn_verify p) {                                                  \
    ddt::solve<T, GROUPS, MAX_ROWS>(p);                                                                 \
  }

DDT_SOLVE(ddt_gdn_verify_solve_f32, float, 4, DDT_CUDA_GDN_VERIFY_MAX_ROWS, 1)
DDT_SOLVE(ddt_gdn_verify_solve_f16, __half, 4, DDT_CUDA_GDN_VERIFY_MAX_ROWS, 1)
DDT_SOLVE(ddt_gdn_verify_solve_bf16, __nv_bfloat16, 4, DDT_CUDA_GDN_VERIFY_MAX_ROWS_BF16, ddt::LARGE_BLOCKS_PER_SM)

// Fewer warps, so that more blocks run at once.
DDT_SOLVE(ddt_gdn_verify_solve_bf16_medium, __nv_bfloat16, 2, DDT_CUDA_GDN_VERIFY_MEDIUM_NODES, 3)

extern "C" __global__ void __launch_bounds__(DDT_CUDA_GDN_VERIFY_SMALL_WARPS * 32, 2)
    ddt_gdn_verify_solve_bf16_small(const __grid_constant__ ddt_cuda_gdn_verify p) {
  ddt::solve_small(p);
}
