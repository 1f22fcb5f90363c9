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

// ---- prepare: a warp has some nodes of one query, key or value head, a lane four channels of it

constexpr int PREPARE_WARPS = DDT_CUDA_GDN_VERIFY_PREPARE_THREADS / 32;
constexpr int WARP_NODES = DDT_CUDA_GDN_VERIFY_PREPARE_NODES / PREPARE_WARPS;

template <typename T>
__device__ __forceinline__ void load_conv(const ddt_cuda_gdn_verify &p, int64_t channel, ConvChannel (&conv)[4]) {
  const ddt_cuda_view &weight = p.conv_weight;
  if ((p.flags & DDT_CUDA_GDN_VERIFY_WEIGHT) != 0 && weight.dtype == DTYPE<T> && p.conv_bias.data == nullptr) {
    Quad<T> taps[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      taps[i] = load_quad(static_cast<const T *>(weight.data) + (channel + i) * weight.strides[0], 1, true);
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

// Gates of one node of a value head; lane `place` has the ancestor at that depth.
__device__ __forceinline__ void prepare_gates(const ddt_cuda_gdn_verify &p, const RequestRows &rows, int head,
                                              int node, int depth, int ancestor) {
  const int lane = threadIdx.x % 32;
  const int64_t row = rows.start + node;
  const int64_t ancestor_row = lane < depth ? rows.start + ancestor : row;
  const uint32_t a = load_bits(p.a, row * p.a.strides[0] + head * p.a.strides[1]);
  const uint32_t ancestor_a = load_bits(p.a, ancestor_row * p.a.strides[0] + head * p.a.strides[1]);
  const uint32_t b = load_bits(p.b, row * p.b.strides[0] + head * p.b.strides[1]);
  const float a_log = bits_to_f32(p.a_log, load_bits(p.a_log, head * p.a_log.strides[0]));
  const float dt_bias = bits_to_f32(p.dt_bias, load_bits(p.dt_bias, head * p.dt_bias.strides[0]));
  const float g = log_decay(bits_to_f32(p.a, a), a_log, dt_bias);
  const float ancestor_g = log_decay(bits_to_f32(p.a, ancestor_a), a_log, dt_bias);
  const float since_state = g + warp_sum(lane < depth ? ancestor_g : 0.0f);
  if (lane != 0) return;
  const float beta = sigmoid(bits_to_f32(p.b, b));
  float *gates = p.gates + row * 3 * p.num_v_heads + head;
  gates[0] = g;
  gates[p.num_v_heads] = beta;
  gates[2 * p.num_v_heads] = expf(since_state);
  const ddt_cuda_view &stash = p.stash_gates;
  float *out = static_cast<float *>(stash.data) + row * stash.strides[0] + head * stash.strides[2];
  out[0] = g;
  out[stash.strides[1]] = beta;
}

// Where in 16 keys the first two of four are stored; the others are 8 behind. In this order the
// lanes of an mma hold 16 bytes of the state each.
__device__ __forceinline__ int position(int element) { return element / 16 * 16 + element % 16 / 2; }

template <typename T>
__device__ __forceinline__ void prepare(const ddt_cuda_gdn_verify &p) {
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_heads = 2 * p.num_k_heads + p.num_v_heads;
  const int groups = (p.tree.max_nodes + DDT_CUDA_GDN_VERIFY_PREPARE_NODES - 1) / DDT_CUDA_GDN_VERIFY_PREPARE_NODES;
  const int head = blockIdx.x % num_heads, group = blockIdx.x / num_heads % groups;
  const int request = blockIdx.x / num_heads / groups;
  const int v_head = head - 2 * p.num_k_heads;

  // first what needs nothing else
  const int first = group * DDT_CUDA_GDN_VERIFY_PREPARE_NODES + warp * WARP_NODES;
  int depths[WARP_NODES], ancestors[WARP_NODES];
#pragma unroll
  for (int i = 0; i < WARP_NODES; ++i) {
    const int64_t node = static_cast<int64_t>(request) * p.tree.max_nodes + min(first + i, p.tree.max_nodes - 1);
    depths[i] = p.tree.depths[node];
    ancestors[i] = p.tree.ancestors[node * (p.tree.max_depth + 1) + min(lane, p.tree.max_depth)];
  }
  const RequestRows rows = request_rows(p.query_start, p.tree, request, p.num_rows);
  const int64_t slot = p.state_slots[request];
  const int64_t channel = head * GDN_HEAD_DIM + lane * 4;
  ConvChannel conv[4];
  load_conv<T>(p, channel, conv);
  if (rows.num_nodes == 0 || slot < 0 || slot >= p.num_slots) return;

  if (v_head >= 0 && group == 0 && (p.flags & DDT_CUDA_GDN_VERIFY_PREFETCH) != 0) {
    constexpr int SECTOR = 8, SECTORS = GDN_HEAD_DIM / SECTOR;
    const ddt_cuda_view &view = p.ssm_state;
    const float *state = static_cast<const float *>(view.data) + slot * view.strides[0] + v_head * view.strides[1];
    for (int i = threadIdx.x; i < GDN_HEAD_DIM * SECTORS; i += DDT_CUDA_GDN_VERIFY_PREPARE_THREADS) {
      prefetch_to_l2(state + i / SECTORS * view.strides[2] + i % SECTORS * SECTOR);
    }
  }

  const ddt_cuda_view &state = p.conv_state;
  const bool vector = (p.flags & DDT_CUDA_GDN_VERIFY_ROWS) != 0;
  Quad<T> taps[WARP_NODES][GDN_CONV_WIDTH];
#pragma unroll
  for (int i = 0; i < WARP_NODES; ++i) {
    const int node = first + i;
    if (node >= rows.num_nodes) break;
    depths[i] = min(max(depths[i], 0), min(node, p.tree.max_depth));
    ancestors[i] = min(max(ancestors[i], 0), node);
#pragma unroll
    for (int tap = 0; tap < GDN_CONV_WIDTH; ++tap) {
      const int place = depths[i] + tap - GDN_WINDOW;
      // the node itself may be one more than there are lanes
      const int ancestor = __shfl_sync(FULL_WARP, ancestors[i], max(place, 0));
      const int64_t row = rows.start + (tap == GDN_WINDOW ? node : ancestor);
      if (place >= 0) {
        taps[i][tap] = load_quad(static_cast<const T *>(p.mixed_qkv.data) + row * p.mixed_qkv.strides[0] +
                                     channel * p.mixed_qkv.strides[1],
                                 p.mixed_qkv.strides[1], vector);
      } else if (state.dtype == DTYPE<T>) {
        taps[i][tap] = load_quad(static_cast<const T *>(state.data) + slot * state.strides[0] +
                                     channel * state.strides[1] + (place + GDN_WINDOW) * state.strides[2],
                                 state.strides[1], (p.flags & DDT_CUDA_GDN_VERIFY_WINDOW) != 0);
      } else {
        taps[i][tap] = {};
      }
    }
  }
#pragma unroll
  for (int i = 0; i < WARP_NODES; ++i) {
    const int node = first + i;
    if (node >= rows.num_nodes) break;
    const int64_t row = rows.start + node;
    if (v_head >= 0) prepare_gates(p, rows, v_head, node, depths[i], ancestors[i]);
    const ddt_cuda_view &stash = p.stash_qkv;
    store_quad(static_cast<T *>(stash.data) + row * stash.strides[0] + channel * stash.strides[1], stash.strides[1],
               (p.flags & DDT_CUDA_GDN_VERIFY_STASH) != 0, taps[i][GDN_WINDOW]);
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float inputs[GDN_CONV_WIDTH];
#pragma unroll
      for (int tap = 0; tap < GDN_CONV_WIDTH; ++tap) inputs[tap] = to_f32(taps[i][tap].x[k]);
      if (state.dtype != DTYPE<T>) {
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
      T *out = static_cast<T *>(p.values) + (row * p.num_v_heads + v_head) * GDN_HEAD_DIM + lane * 4;
      *reinterpret_cast<Quad<T> *>(out) = quad;
      continue;
    }
    const float norm = inverse_norm(warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]), p.norm_eps);
    const int64_t row_head = row * 2 * p.num_k_heads + head;
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

constexpr int TILES = DDT_CUDA_GDN_VERIFY_TILES;
// Value columns of a tile, which are the rows of an mma.
constexpr int TILE = 16;
constexpr int QUADS = TILES * TILE / 4;
constexpr int K_STEPS = GDN_HEAD_DIM / 16;
constexpr int MAX_PATH = DDT_CUDA_MAX_DEPTH + 1;
// Row lengths in shared memory, without bank conflicts.
constexpr int HEAD_PITCH = GDN_HEAD_DIM + 8;
constexpr int COLUMN_PITCH = TILES * TILE + 4;
constexpr int PATH_PITCH = MAX_PATH;

// The dynamic shared memory of a block. M = row_capacity.
template <typename T>
struct Shared {
  // [PARTS][2][M][HEAD_PITCH] queries, then keys, before their norm
  __nv_bfloat16 *heads;
  // [M][COLUMN_PITCH] rhs
  float *rhs;
  // [M][COLUMN_PITCH] e^d(i) S^T q_i
  float *from_state;
  // [M][PATH_PITCH] k_i . k_j of the ancestors j of i, root first
  float *key_dots;
  // [TILES][M][PATH_PITCH] e^d(j, i) w_ij of j = i and ancestors. At first q_i . k_j in tile 0,
  // and behind that the values, [M][TILES * TILE] of T.
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

  __device__ Shared(unsigned char *base, int m) {
    heads = reinterpret_cast<__nv_bfloat16 *>(base);
    rhs = reinterpret_cast<float *>(heads + PARTS<T> * 2 * m * HEAD_PITCH);
    from_state = rhs + m * COLUMN_PITCH;
    key_dots = from_state + m * COLUMN_PITCH;
    weights = key_dots + m * PATH_PITCH;
    log_decays = weights + TILES * m * PATH_PITCH;
    betas = log_decays + TILES * m;
    root_decays = betas + TILES * m;
    norms = root_decays + TILES * m;
    paths = reinterpret_cast<uint8_t *>(norms + 2 * m);
    depths = paths + m * PATH_PITCH;
    carried = depths + m;
  }
};

constexpr int ROW_BYTES_WITHOUT_HEADS =
    4 * (2 * COLUMN_PITCH + (1 + TILES) * PATH_PITCH + 3 * TILES + 2) + PATH_PITCH + 1;
static_assert(2 * HEAD_PITCH * 2 + ROW_BYTES_WITHOUT_HEADS == DDT_CUDA_GDN_VERIFY_ROW_BYTES_BF16, "");
static_assert(4 * HEAD_PITCH * 2 + ROW_BYTES_WITHOUT_HEADS == DDT_CUDA_GDN_VERIFY_ROW_BYTES, "");
static_assert(TILES * TILE * 4 <= 4 * (TILES - 1) * PATH_PITCH, "values fit behind the weights of the first tile");
static_assert(DDT_CUDA_GDN_VERIFY_MAX_ROWS > DDT_CUDA_MAX_DEPTH, "a chunk has room for a node beside its ancestors");

// What a block computes: some value columns of one key head's value heads, for one request.
struct Work {
  RequestRows rows;
  int64_t slot;
  int request;
  int k_head;
  int slice;
  int group;  // value heads per key head

  // Tiles of one column range of all value heads come first.
  __device__ int tile(int i) const { return slice * TILES + i; }
  __device__ bool has_tile(int i) const { return tile(i) < group * (GDN_HEAD_DIM / TILE); }
  __device__ int head(int i) const { return k_head * group + tile(i) % group; }
  __device__ int column(int i) const { return tile(i) / group * TILE; }
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

template <typename T, int GROUPS>
struct Solve {
  static constexpr int WARPS = TILES * GROUPS;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int MAX_ROWS = PARTS<T> == 1 ? DDT_CUDA_GDN_VERIFY_MAX_ROWS_BF16 : DDT_CUDA_GDN_VERIFY_MAX_ROWS;
  static_assert(THREADS % QUADS == 0, "");

  const ddt_cuda_gdn_verify &p;
  const Work work;
  const Shared<T> shared;
  const int warp;
  const int lane;

  // A warp multiplies one tile of the state with the nodes of one group.
  __device__ int warp_tile() const { return warp % TILES; }
  __device__ int warp_group() const { return warp / TILES; }

  __device__ __nv_bfloat16 *head_row(int part, int is_key, int row) const {
    return shared.heads + ((part * 2 + is_key) * p.row_capacity + row) * HEAD_PITCH;
  }

  // One tile of the state: lane (g, t) of a warp gets rows g and g + 8, and of each 16 keys those
  // from 4 t.
  __device__ void load_state(float (&state)[K_STEPS][2][4]) const {
    const ddt_cuda_view &view = p.ssm_state;
    // a block always has its first tile
    const int tile = work.has_tile(warp_tile()) ? warp_tile() : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float *data = static_cast<const float *>(view.data) + work.slot * view.strides[0] +
                          work.head(tile) * view.strides[1] +
                          (work.column(tile) + lane / 4 + 8 * half) * view.strides[2] +
                          lane % 4 * 4 * view.strides[3];
      if (p.flags & DDT_CUDA_GDN_VERIFY_STATE) {
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
          const float4 keys = *reinterpret_cast<const float4 *>(data + step * 16);
          state[step][half][0] = keys.x;
          state[step][half][1] = keys.y;
          state[step][half][2] = keys.z;
          state[step][half][3] = keys.w;
        }
      } else {
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll
          for (int i = 0; i < 4; ++i) state[step][half][i] = data[i * view.strides[3]];
          data += 16 * view.strides[3];
        }
      }
    }
  }

  // Depths and paths of all rows. Whatever the tree holds, a row's path has no later row.
  __device__ void load_paths(const Chunk &chunk) const {
    const int64_t nodes = static_cast<int64_t>(work.request) * p.tree.max_nodes;
    const int places = p.tree.max_depth + 1;
    for (int row = threadIdx.x; row < chunk.count; row += THREADS) {
      const int depth = row < chunk.carried ? row : p.tree.depths[nodes + chunk.node(row, shared.carried)];
      shared.depths[row] = min(max(depth, 0), min(row, p.tree.max_depth));
    }
#pragma unroll 4
    for (int at = threadIdx.x; at < chunk.count * places; at += THREADS) {
      const int row = at / places, place = at - row * places;
      const int ancestor =
          row < chunk.carried ? -1 : p.tree.ancestors[(nodes + chunk.first - chunk.carried) * places + at];
      // an ancestor before the chunk's nodes is the carried row of that depth
      const int path_row = ancestor >= chunk.first ? ancestor - chunk.first + chunk.carried : place;
      shared.paths[row * PATH_PITCH + place] = min(path_row, row);
    }
  }

  // Starts to copy the block's queries, keys, values, norms and gates to shared memory.
  __device__ void stage(const Chunk &chunk) const {
    const int64_t start = work.rows.start;
    constexpr int HEAD_VECTORS = GDN_HEAD_DIM / 8;
#pragma unroll
    for (int part = 0; part < PARTS<T>; ++part) {
      const __nv_bfloat16 *heads = static_cast<const __nv_bfloat16 *>(p.heads) +
                                   part * static_cast<int64_t>(p.num_rows) * 2 * p.num_k_heads * GDN_HEAD_DIM;
#pragma unroll 1
      for (int i = threadIdx.x; i < chunk.count * 2 * HEAD_VECTORS; i += THREADS) {
        const int vector = i % HEAD_VECTORS, is_key = i / HEAD_VECTORS % 2, row = i / (2 * HEAD_VECTORS);
        const int64_t global_row = start + chunk.node(row, shared.carried);
        const int64_t head = (global_row * 2 + is_key) * p.num_k_heads + work.k_head;
        copy_async_16(head_row(part, is_key, row) + vector * 8, heads + head * GDN_HEAD_DIM + vector * 8);
      }
    }
    constexpr int TILE_VECTORS = TILE * sizeof(T) / 16, VECTORS = TILES * TILE_VECTORS;
    static_assert(THREADS % VECTORS == 0, "a thread keeps its tile");
    const int vector = threadIdx.x % VECTORS, tile = vector / TILE_VECTORS;
    if (work.has_tile(tile)) {
      const char *values =
          static_cast<const char *>(p.values) +
          (work.head(tile) * GDN_HEAD_DIM + work.column(tile)) * sizeof(T) + vector % TILE_VECTORS * 16;
      char *to = reinterpret_cast<char *>(shared.weights + p.row_capacity * PATH_PITCH) + vector * 16;
#pragma unroll 1
      for (int row = threadIdx.x / VECTORS; row < chunk.count; row += THREADS / VECTORS) {
        const int64_t global_row = start + chunk.node(row, shared.carried);
        copy_async_16(to + row * (TILES * TILE * sizeof(T)),
                      values + global_row * p.num_v_heads * GDN_HEAD_DIM * sizeof(T));
      }
    }
    copy_async_commit();
    for (int i = threadIdx.x; i < 2 * chunk.count; i += THREADS) {
      const int row = i / 2, is_key = i % 2;
      const int64_t global_row = start + chunk.node(row, shared.carried);
      shared.norms[is_key * p.row_capacity + row] =
          p.norms[(global_row * 2 + is_key) * p.num_k_heads + work.k_head];
    }
    const int gate_tile = threadIdx.x % TILES;
    if (work.has_tile(gate_tile)) {
      const float *gates = p.gates + work.head(gate_tile);
      for (int row = threadIdx.x / TILES; row < chunk.count; row += THREADS / TILES) {
        const float *from = gates + (start + chunk.node(row, shared.carried)) * 3 * p.num_v_heads;
        const int at = gate_tile * p.row_capacity + row;
        shared.log_decays[at] = from[0];
        shared.betas[at] = from[p.num_v_heads];
        shared.root_decays[at] = from[2 * p.num_v_heads];
      }
    }
  }

  // Fragments of eight rows of queries or keys for two steps of 16 elements.
  __device__ void load_rows(uint32_t (&b)[4], int part, int is_key, int row, int step) const {
    load_matrix_x4(b, head_row(part, is_key, row + lane % 8) + step * 16 + lane / 8 * 8);
  }

  // Products of queries and keys with the keys of their ancestors.
  __device__ void multiply_heads(const Chunk &chunk) const {
    int unit = 0;
#pragma unroll 1
    for (int node = 0; node < chunk.count; node += 8) {
#pragma unroll 1
      for (int ancestor = 0; ancestor < node + 8; ancestor += 16, ++unit) {
        if (unit % WARPS != warp) continue;
        float sums[2][2][4] = {};
#pragma unroll
        for (int step = 0; step < K_STEPS; step += 2) {
          uint32_t a[2][PARTS<T>][4];
#pragma unroll
          for (int part = 0; part < PARTS<T>; ++part) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              load_matrix_x4(a[i][part],
                             head_row(part, 1, ancestor + lane % 16) + (step + i) * 16 + lane / 16 * 8);
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
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = node + lane % 4 * 2 + i % 2;
          const int j = ancestor + lane / 4 + i / 2 * 8;
          if (row >= chunk.count || j > row) continue;
          const int place = shared.depths[j];
          if (place > shared.depths[row] || shared.paths[row * PATH_PITCH + place] != j) continue;
          const float norm = shared.norms[p.row_capacity + j];
          const int at = row * PATH_PITCH + place;
          shared.weights[at] = (sums[0][0][i] + sums[0][1][i]) * (norm * shared.norms[row]);
          shared.key_dots[at] = (sums[1][0][i] + sums[1][1][i]) * (norm * shared.norms[p.row_capacity + row]);
        }
      }
    }
  }

  // Products of the state with queries and keys.
  __device__ void multiply_state(const Chunk &chunk, const float (&state)[K_STEPS][2][4]) const {
    const int tile = warp_tile();
    if (!work.has_tile(tile)) return;
    const T *values = reinterpret_cast<const T *>(shared.weights + p.row_capacity * PATH_PITCH);
    uint32_t a[2][K_STEPS][4];
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *pair = &state[step][i % 2][i / 2 * 2];
        split(pair[0], pair[1], a[0][step][i], a[1][step][i]);
      }
    }
#pragma unroll 1
    for (int node = warp_group() * 8; node < chunk.count; node += GROUPS * 8) {
      float sums[2][2][4] = {};
#pragma unroll
      for (int step = 0; step < K_STEPS; step += 2) {
#pragma unroll
        for (int is_key = 0; is_key < 2; ++is_key) {
          uint32_t b[PARTS<T>][4];
#pragma unroll
          for (int part = 0; part < PARTS<T>; ++part) load_rows(b[part], part, is_key, node, step);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              mma_m16n8k16<__nv_bfloat16>(sums[is_key][half], a[half][step + i], b[0][2 * i], b[0][2 * i + 1]);
            }
            if constexpr (PARTS<T> == 2) {
              mma_m16n8k16<__nv_bfloat16>(sums[is_key][1], a[0][step + i], b[1][2 * i], b[1][2 * i + 1]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = node + lane % 4 * 2 + i % 2, column = tile * TILE + lane / 4 + i / 2 * 8;
        if (row >= chunk.count) continue;
        const float decay = shared.root_decays[tile * p.row_capacity + row];
        const float value = to_f32(values[row * (TILES * TILE) + column]);
        const float key_sum = (sums[1][0][i] + sums[1][1][i]) * (decay * shared.norms[p.row_capacity + row]);
        shared.from_state[row * COLUMN_PITCH + column] =
            (sums[0][0][i] + sums[0][1][i]) * (decay * shared.norms[row]);
        shared.rhs[row * COLUMN_PITCH + column] = shared.betas[tile * p.row_capacity + row] * (value - key_sum);
      }
    }
  }

  static constexpr int LANES = 8;
  static constexpr int SLOTS = (MAX_PATH + LANES - 1) / LANES;

  // What one step of the substitution needs besides the weights; zeros at steps that a row lacks.
  struct Step {
    float log_decays[TILES], betas[TILES], key_dots[SLOTS];
  };

  __device__ Step load_step(int row, int depth, int place) const {
    Step step = {};
    if (place < 0 || place > depth) return step;
    const int j = shared.paths[row * PATH_PITCH + place];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      step.log_decays[tile] = shared.log_decays[tile * p.row_capacity + j];
      step.betas[tile] = shared.betas[tile * p.row_capacity + j];
    }
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      const int other = slot * LANES + lane % LANES;
      if (other < place) step.key_dots[slot] = shared.key_dots[j * PATH_PITCH + other];
    }
    return step;
  }

  // The weights of every row, by substitution from the row up to the root. Eight lanes share a row.
  __device__ void substitute(const Chunk &chunk) const {
    const int m = p.row_capacity;
#pragma unroll 1
    for (int base = warp * (32 / LANES); base < chunk.count; base += WARPS * (32 / LANES)) {
      const int row = base + lane / LANES, sub = lane % LANES;
      const int depth = row < chunk.count ? shared.depths[row] : -1;
      float *weights = shared.weights + row * PATH_PITCH;
      float w[TILES][SLOTS], decays[TILES][SLOTS], sums[TILES] = {};
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        const int place = slot * LANES + sub;
        const float dot = place <= depth ? weights[place] : 0.0f;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          w[tile][slot] = dot;
          decays[tile][slot] = 0.0f;
        }
      }
      const int deepest = __reduce_max_sync(FULL_WARP, depth);
      Step next = load_step(row, depth, deepest);
#pragma unroll
      for (int slot = SLOTS - 1; slot >= 0; --slot) {
#pragma unroll 1
        for (int place = min(deepest, slot * LANES + LANES - 1); place >= slot * LANES; --place) {
          const Step step = next;
          next = load_step(row, depth, place - 1);
          const int owner = place - slot * LANES;
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) {
            const float x = __shfl_sync(FULL_WARP, w[tile][slot], owner, LANES) * step.betas[tile];
            if (sub == owner) decays[tile][slot] = sums[tile];
            sums[tile] += step.log_decays[tile];
#pragma unroll
            for (int above = 0; above <= slot; ++above) {
              w[tile][above] = fmaf(-x, step.key_dots[above], w[tile][above]);
            }
          }
        }
      }
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        const int place = slot * LANES + sub;
        if (place > depth) continue;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          weights[tile * m * PATH_PITCH + place] = expf(decays[tile][slot]) * w[tile][slot];
        }
      }
    }
  }

  // Outputs of the chunk's nodes; with the last node also zeros for the idle rows.
  __device__ void store_outputs(const Chunk &chunk) const {
    const int quad = threadIdx.x % QUADS, tile = quad / (TILE / 4);
    if (!work.has_tile(tile)) return;
    const int first = chunk.first - chunk.carried;
    const bool is_last = first + chunk.count == work.rows.num_nodes;
    const int end = is_last ? work.rows.end - work.rows.start - first : chunk.count;
    const int64_t offset =
        work.head(tile) * p.out.strides[1] + (work.column(tile) + quad % (TILE / 4) * 4) * p.out.strides[2];
#pragma unroll 1
    for (int row = chunk.carried + threadIdx.x / QUADS; row < end; row += THREADS / QUADS) {
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
      if (row < chunk.count) {
        const uint8_t *path = shared.paths + row * PATH_PITCH;
        const float *weights = shared.weights + (tile * p.row_capacity + row) * PATH_PITCH;
        sum = *reinterpret_cast<const float4 *>(shared.from_state + row * COLUMN_PITCH + quad * 4);
        const int depth = shared.depths[row];
#pragma unroll 4
        for (int place = 0; place <= depth; ++place) {
          const float w = weights[place];
          const float4 rhs = *reinterpret_cast<const float4 *>(shared.rhs + path[place] * COLUMN_PITCH + quad * 4);
          sum.x = fmaf(w, rhs.x, sum.x);
          sum.y = fmaf(w, rhs.y, sum.y);
          sum.z = fmaf(w, rhs.z, sum.z);
          sum.w = fmaf(w, rhs.w, sum.w);
        }
      }
      store_four(p.out, (work.rows.start + first + row) * p.out.strides[0] + offset, p.out.strides[2],
                 (p.flags & DDT_CUDA_GDN_VERIFY_OUT) != 0,
                 {p.scale * sum.x, p.scale * sum.y, p.scale * sum.z, p.scale * sum.w});
    }
  }

  __device__ void run() const {
    for (int first = 0; first < work.rows.num_nodes;) first = run_chunk(first);
  }

  // Returns the node after the chunk.
  __device__ int run_chunk(int first) const {
    float state[K_STEPS][2][4];
    load_state(state);
    Chunk chunk{first, 0, 0};
    if (first > 0) {
      const int64_t node = static_cast<int64_t>(work.request) * p.tree.max_nodes + first;
      chunk.carried = min(max(p.tree.depths[node], 0), min(p.tree.max_depth, first));
      __syncthreads();  // the shared memory of the chunk before is free
      if (threadIdx.x < chunk.carried) {
        const int ancestor = p.tree.ancestors[node * (p.tree.max_depth + 1) + threadIdx.x];
        shared.carried[threadIdx.x] = min(max(ancestor, 0), first - 1);
      }
      __syncthreads();
    }
    chunk.count = min(chunk.carried + work.rows.num_nodes - first, p.row_capacity);
    load_paths(chunk);
    // Only from here on "prepare" must have ended: what is read above are inputs of the call.
    if (first == 0) wait_for_previous_kernel();
    stage(chunk);
    copy_async_wait<0>();
    __syncthreads();
    multiply_heads(chunk);
    multiply_state(chunk, state);
    __syncthreads();
    substitute(chunk);
    __syncthreads();
    store_outputs(chunk);
    return first + chunk.count - chunk.carried;
  }
};

template <typename T, int GROUPS>
__device__ __forceinline__ void solve(const ddt_cuda_gdn_verify &p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int block = blockIdx.x, slice = block % p.num_slices;
  const int k_head = block / p.num_slices % p.num_k_heads, request = block / p.num_slices / p.num_k_heads;
  const RequestRows rows = request_rows(p.query_start, p.tree, request, p.num_rows);
  const int64_t slot = p.state_slots[request];
  if (rows.num_nodes == 0 || slot < 0 || slot >= p.num_slots) return;
  const Work work{rows, slot, request, k_head, slice, p.num_v_heads / p.num_k_heads};
  Solve<T, GROUPS>{p, work, Shared<T>(shared_bytes, p.row_capacity), static_cast<int>(threadIdx.x / 32),
                   static_cast<int>(threadIdx.x % 32)}
      .run();
}

}  // namespace
}  // namespace ddt

#define DDT_PREPARE(NAME, T)                                                                            \
  extern "C" __global__ void __launch_bounds__(DDT_CUDA_GDN_VERIFY_PREPARE_THREADS) NAME(               \
      const __grid_constant__ ddt_cuda_gdn_verify p) {                                                  \
    ddt::prepare<T>(p);                                                                                 \
  }

DDT_PREPARE(ddt_gdn_verify_prepare_f32, float)
DDT_PREPARE(ddt_gdn_verify_prepare_f16, __half)
DDT_PREPARE(ddt_gdn_verify_prepare_bf16, __nv_bfloat16)

#define DDT_SOLVE(NAME, T, GROUPS)                                                                      \
  extern "C" __global__ void __launch_bounds__(ddt::Solve<T, GROUPS>::THREADS) NAME(                    \
      const __grid_constant__ ddt_cuda_gdn_verify p) {                                                  \
    ddt::solve<T, GROUPS>(p);                                                                           \
  }

DDT_SOLVE(ddt_gdn_verify_solve_f32, float, 4)
DDT_SOLVE(ddt_gdn_verify_solve_f16, __half, 4)
DDT_SOLVE(ddt_gdn_verify_solve_bf16, __nv_bfloat16, 4)
DDT_SOLVE(ddt_gdn_verify_solve_bf16_small, __nv_bfloat16, 2)
