// SPDX-License-Identifier: Apache-2.0
//
// gdn_verify: outputs of a gated-delta-net layer for every node of a tree, from one read of the
// state. What it computes is in rust/gdn_verify.rs, why like this in gdn_verify.md.
//
// With d(j, i) the sum of log decays below node j down to node i, d(i) the sum from the root and
// A the strictly lower triangular matrix beta_i e^d(j, i) (k_i . k_j) of ancestors j of i:
//
//   o_i = scale (e^d(i) S^T q_i + sum over j = i and ancestors of e^d(j, i) w_ij rhs_j)
//   rhs_j = beta_j (v_j - e^d(j) S^T k_j)
//
// where w_i solves w_i (I + A') = (q_i . k_j) and A' is A without its decays, which cancel. It is
// the substitution of the WY form taken from the left: a small system per node and value head, so
// that nothing is sequential over columns of the state.
#include "gdn.cuh"
#include "params/gdn_verify.h"

namespace ddt {
namespace {

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

// Queries and keys before their norm are values of T, so exact in bf16 if that is T; other types
// take a sum of two.
template <typename T>
constexpr int PARTS = 2;
template <>
constexpr int PARTS<__nv_bfloat16> = 1;

// Four neighbouring elements of a row.
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
__device__ __forceinline__ void load_four_as(const ddt_cuda_view &view, int64_t offset, int64_t stride, bool vector,
                                             float (&out)[4]) {
  const Quad<T> quad = load_quad(static_cast<const T *>(view.data) + offset, stride, vector);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = to_f32(quad.x[i]);
}

// Four elements of a tensor whose dtype is known only at run time.
__device__ __forceinline__ void load_four(const ddt_cuda_view &view, int64_t offset, int64_t stride, bool vector,
                                          float (&out)[4]) {
  switch (view.dtype) {
    case DDT_CUDA_F16: load_four_as<__half>(view, offset, stride, vector, out); break;
    case DDT_CUDA_BF16: load_four_as<__nv_bfloat16>(view, offset, stride, vector, out); break;
    default: load_four_as<float>(view, offset, stride, vector, out);
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

// The dynamic shared memory of a block. M = row_capacity.
template <typename T>
struct Shared {
  // [PARTS][2][M][HEAD_PITCH] keys, then queries, before their norm. Within 16 elements the order
  // is that in which the lanes of an mma hold 16 bytes of the state, see `position`.
  __nv_bfloat16 *heads;
  // [M][COLUMN_PITCH] values, later rhs
  float *values;
  // [M][COLUMN_PITCH] e^d(i) S^T q_i; until then the raw inputs of values
  float *from_state;
  // [M][PATH_PITCH] k_i . k_j of the ancestors j of i, root first; with weights, the raw inputs
  // of queries and keys until then
  float *key_dots;
  // [TILES][M][PATH_PITCH] e^d(j, i) w_ij of j = i and ancestors; q_i . k_j at first, in tile 0
  float *weights;
  // [TILES][M]
  float *log_decays, *betas, *root_decays;
  // [2][M] factors of keys, then queries
  float *norms;
  // [M][PATH_PITCH] rows on the way from the root to each row, itself last
  uint8_t *paths;
  uint8_t *depths;
  // nodes of the rows before the first node
  uint8_t *carried;

  __device__ Shared(unsigned char *base, int m) {
    heads = reinterpret_cast<__nv_bfloat16 *>(base);
    values = reinterpret_cast<float *>(heads + PARTS<T> * 2 * m * HEAD_PITCH);
    from_state = values + m * COLUMN_PITCH;
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
static_assert(2 * GDN_HEAD_DIM * 2 <= 4 * (1 + TILES) * PATH_PITCH, "raw queries and keys fit");
static_assert(TILES * TILE * 2 <= 4 * COLUMN_PITCH, "raw values fit");
static_assert(DDT_CUDA_GDN_VERIFY_MAX_ROWS > DDT_CUDA_MAX_DEPTH, "a chunk has room for a node beside its ancestors");

// What a block computes: some value columns of one key head's value heads, for one request.
struct Work {
  RequestRows rows;
  int64_t slot;
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

// The part of 128 keys or queries that the four elements at `element` go to.
__device__ __forceinline__ int position(int element) { return element / 16 * 16 + element % 16 / 2; }

template <typename T>
constexpr uint32_t DTYPE = DDT_CUDA_F32;
template <>
constexpr uint32_t DTYPE<__half> = DDT_CUDA_F16;
template <>
constexpr uint32_t DTYPE<__nv_bfloat16> = DDT_CUDA_BF16;

// A convolution of four channels.
struct Conv {
  // What bias and window add at depths 0, 1, 2 and beyond.
  float start[GDN_CONV_WIDTH][4];
  float weight[4][GDN_CONV_WIDTH];

  template <typename T>
  __device__ void load(const ddt_cuda_gdn_verify &p, int64_t slot, int64_t channel) {
    const ddt_cuda_view &weights = p.conv_weight, &state = p.conv_state;
    const bool vector_weight = p.vectors & DDT_CUDA_GDN_VERIFY_WEIGHT;
    const bool vector_window = p.vectors & DDT_CUDA_GDN_VERIFY_WINDOW;
    const int64_t weight_offset = channel * weights.strides[0];
    const int64_t window_offset = slot * state.strides[0] + channel * state.strides[1];
    float window[GDN_WINDOW][4];
    if (vector_weight && vector_window && weights.dtype == DTYPE<T> && state.dtype == DTYPE<T>) {
      // all loads in flight before the first conversion
      Quad<T> quads[4 + GDN_WINDOW];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        quads[i] = load_quad(static_cast<const T *>(weights.data) + weight_offset + i * weights.strides[0], 1, true);
      }
#pragma unroll
      for (int tap = 0; tap < GDN_WINDOW; ++tap) {
        quads[4 + tap] =
            load_quad(static_cast<const T *>(state.data) + window_offset + tap * state.strides[2], 1, true);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) weight[i][j] = to_f32(quads[i].x[j]);
#pragma unroll
        for (int tap = 0; tap < GDN_WINDOW; ++tap) window[tap][i] = to_f32(quads[4 + tap].x[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        load_four(weights, weight_offset + i * weights.strides[0], weights.strides[1], vector_weight, weight[i]);
      }
#pragma unroll
      for (int tap = 0; tap < GDN_WINDOW; ++tap) {
        load_four(state, window_offset + tap * state.strides[2], state.strides[1], vector_window, window[tap]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float bias =
          p.conv_bias.data == nullptr ? 0.0f : load_f32(p.conv_bias, (channel + i) * p.conv_bias.strides[0]);
#pragma unroll
      for (int depth = 0; depth < GDN_CONV_WIDTH; ++depth) {
        start[depth][i] = bias;
#pragma unroll
        for (int tap = 0; tap < GDN_WINDOW - depth; ++tap) {
          start[depth][i] = fmaf(weight[i][tap], window[depth + tap][i], start[depth][i]);
        }
      }
    }
  }
};

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

// Raw inputs of four channels, in shared or global memory.
template <typename T>
struct RawInputs {
  const T *data;
  int64_t row_stride;
  int64_t channel_stride;
  bool staged;
  bool vector;
};

template <typename T, int GROUPS>
struct GdnVerify {
  static constexpr int WARPS = TILES * GROUPS;
  static constexpr int THREADS = WARPS * 32;
  // Two warps convolve values; the others, in equal numbers, queries and keys.
  static constexpr int VALUE_WARPS = 2;
  static constexpr int HEAD_WARPS = (WARPS - VALUE_WARPS) / 2;
  static constexpr int MAX_ROWS = PARTS<T> == 1 ? DDT_CUDA_GDN_VERIFY_MAX_ROWS_BF16 : DDT_CUDA_GDN_VERIFY_MAX_ROWS;
  static constexpr bool STAGED_TYPE = sizeof(T) == 2;
  static_assert(THREADS % QUADS == 0 && (WARPS - VALUE_WARPS) % 2 == 0, "");

  const ddt_cuda_gdn_verify &p;
  const Work work;
  const Shared<T> shared;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  // A warp multiplies one tile of the state with the nodes of one group.
  __device__ int warp_tile() const { return warp % TILES; }
  __device__ int warp_group() const { return warp / TILES; }

  __device__ __nv_bfloat16 *head_row(int part, int is_query, int row) const {
    return shared.heads + ((part * 2 + is_query) * p.row_capacity + row) * HEAD_PITCH;
  }

  __device__ bool is_staged() const { return STAGED_TYPE && (p.vectors & DDT_CUDA_GDN_VERIFY_ROWS) != 0; }

  // Brings the block's part of the state closer. Registers are for it only once the convolution is done.
  __device__ void prefetch_state() const {
    if ((p.vectors & DDT_CUDA_GDN_VERIFY_STATE) == 0) return;
    constexpr int SECTOR = 8, SECTORS = GDN_HEAD_DIM / SECTOR;
    const ddt_cuda_view &view = p.ssm_state;
    for (int i = threadIdx.x; i < TILES * TILE * SECTORS; i += THREADS) {
      const int row = i / SECTORS, tile = row / TILE;
      if (!work.has_tile(tile)) return;
      prefetch_to_l2(static_cast<const float *>(view.data) + work.slot * view.strides[0] +
                     work.head(tile) * view.strides[1] + (work.column(tile) + row % TILE) * view.strides[2] +
                     i % SECTORS * SECTOR);
    }
  }

  // One tile of the state: lane (g, t) of a warp gets rows g and g + 8, and of each 16 keys those
  // from 4 t.
  __device__ void load_state(float (&state)[K_STEPS][2][4]) const {
    const ddt_cuda_view &view = p.ssm_state;
    // a block always has its first tile
    const int tile = work.has_tile(warp_tile()) ? warp_tile() : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t offset = work.slot * view.strides[0] + work.head(tile) * view.strides[1] +
                             (work.column(tile) + lane / 4 + 8 * half) * view.strides[2] +
                             lane % 4 * 4 * view.strides[3];
      if (p.vectors & DDT_CUDA_GDN_VERIFY_STATE) {
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
          load_four_as<float>(view, offset + step * 16, 1, true, state[step][half]);
        }
      } else {
        const float *data = static_cast<const float *>(view.data) + offset;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll
          for (int i = 0; i < 4; ++i) state[step][half][i] = data[i * view.strides[3]];
          data += 16 * view.strides[3];
          asm volatile("" : "+l"(data));
        }
      }
    }
  }

  // Starts to copy the raw inputs of the block's channels to shared memory.
  __device__ void stage_rows(const Chunk &chunk) const {
    const char *data = static_cast<const char *>(p.mixed_qkv.data);
    char *heads = reinterpret_cast<char *>(shared.key_dots);
    char *values = reinterpret_cast<char *>(shared.from_state);
    const auto source = [&](int row, int channel) {
      const int64_t global_row = work.rows.start + chunk.node(row, shared.carried);
      return data + (global_row * p.mixed_qkv.strides[0] + channel) * 2;
    };
    constexpr int HEAD_VECTORS = GDN_HEAD_DIM / 8, TILE_VECTORS = TILE / 8;
    for (int i = threadIdx.x; i < chunk.count * 2 * HEAD_VECTORS; i += THREADS) {
      const int row = i / (2 * HEAD_VECTORS), vector = i % (2 * HEAD_VECTORS);
      const int head = vector < HEAD_VECTORS ? work.k_head : p.num_k_heads + work.k_head;
      copy_async_16(heads + i * 16, source(row, head * GDN_HEAD_DIM + vector % HEAD_VECTORS * 8));
    }
    for (int i = threadIdx.x; i < chunk.count * TILES * TILE_VECTORS; i += THREADS) {
      const int row = i / (TILES * TILE_VECTORS), vector = i % (TILES * TILE_VECTORS), tile = vector / TILE_VECTORS;
      if (!work.has_tile(tile)) continue;
      const int channel = (2 * p.num_k_heads + work.head(tile)) * GDN_HEAD_DIM + work.column(tile);
      copy_async_16(values + i * 16, source(row, channel + vector % TILE_VECTORS * 8));
    }
  }

  // Depths and paths of all rows. Whatever the tree holds, a row's path has no later row.
  __device__ void load_paths(const Chunk &chunk) const {
    const int64_t nodes = static_cast<int64_t>(request) * p.tree.max_nodes;
    const int places = p.tree.max_depth + 1;
    constexpr int PER_THREAD = (MAX_ROWS * MAX_PATH + THREADS - 1) / THREADS;
    int ancestors[PER_THREAD];
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int at = threadIdx.x + i * THREADS, row = at / places;
      if (row >= chunk.carried && row < chunk.count) {
        ancestors[i] = p.tree.ancestors[(nodes + chunk.first - chunk.carried) * places + at];
      }
    }
    if (threadIdx.x < chunk.count) {
      const int row = threadIdx.x;
      const int depth =
          row < chunk.carried ? row : p.tree.depths[nodes + chunk.node(row, shared.carried)];
      shared.depths[row] = min(max(depth, 0), min(row, p.tree.max_depth));
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int at = threadIdx.x + i * THREADS, row = at / places, place = at % places;
      if (row >= chunk.count) break;
      // an ancestor before the chunk's nodes is the carried row of that depth
      const bool is_own = row >= chunk.carried && ancestors[i] >= chunk.first;
      const int path_row = is_own ? ancestors[i] - chunk.first + chunk.carried : place;
      shared.paths[row * PATH_PITCH + place] = min(path_row, row);
    }
  }

  // Gates of all rows; those of the chunk's own nodes go to the stash, once per head.
  __device__ void load_gates(const Chunk &chunk) const {
    for (int i = threadIdx.x; i < chunk.count * TILES; i += THREADS) {
      const int row = i / TILES, tile = i % TILES;
      if (!work.has_tile(tile)) continue;
      const int head = work.head(tile);
      const int64_t global_row = work.rows.start + chunk.node(row, shared.carried);
      const uint32_t a = load_bits(p.a, global_row * p.a.strides[0] + head * p.a.strides[1]);
      const uint32_t b = load_bits(p.b, global_row * p.b.strides[0] + head * p.b.strides[1]);
      const uint32_t a_log = load_bits(p.a_log, head * p.a_log.strides[0]);
      const uint32_t dt_bias = load_bits(p.dt_bias, head * p.dt_bias.strides[0]);
      const float g =
          log_decay(bits_to_f32(p.a, a), bits_to_f32(p.a_log, a_log), bits_to_f32(p.dt_bias, dt_bias));
      const float beta = sigmoid(bits_to_f32(p.b, b));
      shared.log_decays[tile * p.row_capacity + row] = g;
      shared.betas[tile * p.row_capacity + row] = beta;
      if (row >= chunk.carried && work.column(tile) == 0) {
        const ddt_cuda_view &stash = p.stash_gates;
        float *out = static_cast<float *>(stash.data) + global_row * stash.strides[0] + head * stash.strides[2];
        out[0] = g;
        out[stash.strides[1]] = beta;
      }
    }
  }

  __device__ void sum_root_decays(const Chunk &chunk) const {
    for (int i = threadIdx.x; i < chunk.count * TILES; i += THREADS) {
      const int row = i / TILES, tile = i % TILES;
      const uint8_t *path = shared.paths + row * PATH_PITCH;
      const float *log_decays = shared.log_decays + tile * p.row_capacity;
      float sum = 0.0f;
      for (int place = shared.depths[row]; place >= 0; --place) sum += log_decays[path[place]];
      shared.root_decays[tile * p.row_capacity + row] = expf(sum);
    }
  }

  // Convolves the rows of the chunk and stashes their raw inputs. Each lane has four channels.
  // Queries and keys: a warp per row. Values: the lanes of five rows side by side.
  __device__ void convolve(const Chunk &chunk, const Conv &conv, int role, int quad, int channel, int row,
                           int row_step) const {
    const bool staged = is_staged();
    RawInputs<T> raw;
    raw.staged = staged;
    raw.vector = staged || (p.vectors & DDT_CUDA_GDN_VERIFY_ROWS) != 0;
    if (staged) {
      raw.data = role == 2 ? reinterpret_cast<const T *>(shared.from_state) + quad * 4
                           : reinterpret_cast<const T *>(shared.key_dots) + (role == 1 ? 0 : GDN_HEAD_DIM) + quad * 4;
      raw.row_stride = role == 2 ? TILES * TILE : 2 * GDN_HEAD_DIM;
      raw.channel_stride = 1;
    } else {
      raw.data = static_cast<const T *>(p.mixed_qkv.data) + channel * p.mixed_qkv.strides[1];
      raw.row_stride = p.mixed_qkv.strides[0];
      raw.channel_stride = p.mixed_qkv.strides[1];
    }
#pragma unroll 1
    for (; row < chunk.count; row += row_step) {
      const int depth = shared.depths[row];
      const uint8_t *path = shared.paths + row * PATH_PITCH;
      Quad<T> taps[GDN_CONV_WIDTH];
#pragma unroll
      for (int tap = 0; tap < GDN_CONV_WIDTH; ++tap) {
        const int place = depth + tap - GDN_WINDOW;
        if (place >= 0) {
          const int source = path[place];
          const int64_t source_row = staged ? source : work.rows.start + chunk.node(source, shared.carried);
          taps[tap] = load_quad(raw.data + source_row * raw.row_stride, raw.channel_stride, raw.vector);
        } else {
          taps[tap] = {};
        }
      }
      float x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = depth == 0 ? conv.start[0][i] : depth == 1 ? conv.start[1][i]
                                                : depth == 2   ? conv.start[2][i]
                                                               : conv.start[3][i];
#pragma unroll
        for (int tap = 0; tap < GDN_CONV_WIDTH; ++tap) {
          sum = fmaf(conv.weight[i][tap], to_f32(taps[tap].x[i]), sum);
        }
        x[i] = round_to<T>(silu(sum));
      }
      // the blocks of a key head share the stashing of its queries and keys
      if (row >= chunk.carried && (role == 2 || row % p.num_slices == work.slice)) {
        const int64_t global_row = work.rows.start + chunk.node(row, shared.carried);
        const ddt_cuda_view &stash = p.stash_qkv;
        store_quad(static_cast<T *>(stash.data) + global_row * stash.strides[0] + channel * stash.strides[1],
                   stash.strides[1], (p.vectors & DDT_CUDA_GDN_VERIFY_STASH) != 0, taps[GDN_WINDOW]);
      }
      if (role == 2) {
        *reinterpret_cast<float4 *>(shared.values + row * COLUMN_PITCH + quad * 4) = {x[0], x[1], x[2], x[3]};
        continue;
      }
      const float norm = inverse_norm(warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]), p.norm_eps);
      if (lane == 0) shared.norms[role * p.row_capacity + row] = norm;
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        uint32_t parts[2];
        split(x[2 * pair], x[2 * pair + 1], parts[0], parts[1]);
#pragma unroll
        for (int part = 0; part < PARTS<T>; ++part) {
          __nv_bfloat16 *out = head_row(part, role, row) + position(quad * 4) + 8 * pair;
          *reinterpret_cast<uint32_t *>(out) = parts[part];
        }
      }
    }
  }

  // Fragments of eight rows of keys or queries for two steps of 16 elements.
  __device__ void load_rows(uint32_t (&b)[4], int part, int is_query, int row, int step) const {
    load_matrix_x4(b, head_row(part, is_query, row + lane % 8) + step * 16 + lane / 8 * 8);
  }

  // Products of keys and queries with the keys of their ancestors.
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
                             head_row(part, 0, ancestor + lane % 16) + (step + i) * 16 + lane / 16 * 8);
            }
          }
#pragma unroll
          for (int is_query = 0; is_query < 2; ++is_query) {
            uint32_t b[PARTS<T>][4];
#pragma unroll
            for (int part = 0; part < PARTS<T>; ++part) load_rows(b[part], part, is_query, node, step);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              mma_m16n8k16<__nv_bfloat16>(sums[is_query][i], a[i][0], b[0][2 * i], b[0][2 * i + 1]);
              if constexpr (PARTS<T> == 2) {
                mma_m16n8k16<__nv_bfloat16>(sums[is_query][i], a[i][0], b[1][2 * i], b[1][2 * i + 1]);
                mma_m16n8k16<__nv_bfloat16>(sums[is_query][i], a[i][1], b[0][2 * i], b[0][2 * i + 1]);
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
          const float norm = shared.norms[j];
          const int at = row * PATH_PITCH + place;
          shared.key_dots[at] = (sums[0][0][i] + sums[0][1][i]) * (norm * shared.norms[row]);
          shared.weights[at] = (sums[1][0][i] + sums[1][1][i]) * (norm * shared.norms[p.row_capacity + row]);
        }
      }
    }
  }

  // Products of the state with keys and queries; turns values into rhs.
  __device__ void multiply_state(const Chunk &chunk, const float (&state)[K_STEPS][2][4]) const {
    const int tile = warp_tile();
    if (!work.has_tile(tile)) return;
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
        for (int is_query = 0; is_query < 2; ++is_query) {
          uint32_t b[PARTS<T>][4];
#pragma unroll
          for (int part = 0; part < PARTS<T>; ++part) load_rows(b[part], part, is_query, node, step);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              mma_m16n8k16<__nv_bfloat16>(sums[is_query][half], a[half][step + i], b[0][2 * i], b[0][2 * i + 1]);
            }
            if constexpr (PARTS<T> == 2) {
              mma_m16n8k16<__nv_bfloat16>(sums[is_query][1], a[0][step + i], b[1][2 * i], b[1][2 * i + 1]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = node + lane % 4 * 2 + i % 2;
        if (row >= chunk.count) continue;
        const float decay = shared.root_decays[tile * p.row_capacity + row];
        const int at = row * COLUMN_PITCH + tile * TILE + lane / 4 + i / 2 * 8;
        const float key_sum = (sums[0][0][i] + sums[0][1][i]) * (decay * shared.norms[row]);
        shared.values[at] = shared.betas[tile * p.row_capacity + row] * (shared.values[at] - key_sum);
        shared.from_state[at] =
            (sums[1][0][i] + sums[1][1][i]) * (decay * shared.norms[p.row_capacity + row]);
      }
    }
  }

  // The weights of every row, by substitution from the row up to the root. Eight lanes share a row.
  __device__ void solve(const Chunk &chunk) const {
    constexpr int LANES = 8, SLOTS = (MAX_PATH + LANES - 1) / LANES;
    const int m = p.row_capacity;
    for (int base = warp * (32 / LANES); base < chunk.count; base += WARPS * (32 / LANES)) {
      const int row = base + lane / LANES, sub = lane % LANES;
      const int depth = row < chunk.count ? shared.depths[row] : -1;
      const uint8_t *path = shared.paths + row * PATH_PITCH;
      float *weights = shared.weights + row * PATH_PITCH;
      float w[TILES][SLOTS], sums[TILES] = {};
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) {
        const int place = slot * LANES + sub;
        const float dot = place <= depth ? weights[place] : 0.0f;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) w[tile][slot] = dot;
      }
      const int deepest = __reduce_max_sync(FULL_WARP, depth);
#pragma unroll
      for (int slot = SLOTS - 1; slot >= 0; --slot) {
        if (slot * LANES > deepest) continue;
#pragma unroll 1
        for (int owner = LANES - 1; owner >= 0; --owner) {
          const int place = slot * LANES + owner;
          const bool active = place <= depth;
          const int j = active ? path[place] : 0;
          float x[TILES];
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) {
            const float solved = __shfl_sync(FULL_WARP, w[tile][slot], owner, LANES);
            x[tile] = active ? solved * shared.betas[tile * m + j] : 0.0f;
            if (active && sub == owner) weights[tile * m * PATH_PITCH + place] = expf(sums[tile]) * solved;
            if (active) sums[tile] += shared.log_decays[tile * m + j];
          }
#pragma unroll
          for (int above = 0; above <= slot; ++above) {
            const int other = above * LANES + sub;
            const float dot = active && other < place ? shared.key_dots[j * PATH_PITCH + other] : 0.0f;
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) w[tile][above] = fmaf(-x[tile], dot, w[tile][above]);
          }
        }
      }
    }
  }

  __device__ void store_outputs(const Chunk &chunk) const {
    const int quad = threadIdx.x % QUADS, tile = quad / (TILE / 4);
    if (!work.has_tile(tile)) return;
    for (int row = chunk.carried + threadIdx.x / QUADS; row < chunk.count; row += THREADS / QUADS) {
      const uint8_t *path = shared.paths + row * PATH_PITCH;
      const float *weights = shared.weights + (tile * p.row_capacity + row) * PATH_PITCH;
      float4 sum = *reinterpret_cast<const float4 *>(shared.from_state + row * COLUMN_PITCH + quad * 4);
      const int depth = shared.depths[row];
      for (int place = 0; place <= depth; ++place) {
        const float w = weights[place];
        const float4 rhs =
            *reinterpret_cast<const float4 *>(shared.values + path[place] * COLUMN_PITCH + quad * 4);
        sum.x = fmaf(w, rhs.x, sum.x);
        sum.y = fmaf(w, rhs.y, sum.y);
        sum.z = fmaf(w, rhs.z, sum.z);
        sum.w = fmaf(w, rhs.w, sum.w);
      }
      store_output(chunk.first + row - chunk.carried, tile, quad,
                   {p.scale * sum.x, p.scale * sum.y, p.scale * sum.z, p.scale * sum.w});
    }
  }

  // `row` counts from the request's first.
  __device__ void store_output(int row, int tile, int quad, float4 x) const {
    const int64_t offset = (work.rows.start + row) * p.out.strides[0] + work.head(tile) * p.out.strides[1] +
                           (work.column(tile) + quad % (TILE / 4) * 4) * p.out.strides[2];
    store_four(p.out, offset, p.out.strides[2], p.vectors & DDT_CUDA_GDN_VERIFY_OUT, {x.x, x.y, x.z, x.w});
  }

  __device__ void zero_idle_rows() const {
    const int quad = threadIdx.x % QUADS, tile = quad / (TILE / 4);
    if (!work.has_tile(tile)) return;
    const int num_rows = work.rows.end - work.rows.start;
    for (int row = work.rows.num_nodes + threadIdx.x / QUADS; row < num_rows; row += THREADS / QUADS) {
      store_output(row, tile, quad, {0.0f, 0.0f, 0.0f, 0.0f});
    }
  }

  __device__ void run() const {
    for (int first = 0; first < work.rows.num_nodes;) first = run_chunk(first);
    zero_idle_rows();
  }

  // Returns the node after the chunk.
  __device__ int run_chunk(int first) const {
    Chunk chunk{first, 0, 0};
    if (first == 0) {
      prefetch_state();
    } else {
      // the shared memory of the chunk before is free, and the ancestors are needed to address rows
      const int64_t node = static_cast<int64_t>(request) * p.tree.max_nodes + first;
      chunk.carried = min(max(p.tree.depths[node], 0), min(p.tree.max_depth, first));
      __syncthreads();
      if (threadIdx.x < chunk.carried) {
        const int ancestor = p.tree.ancestors[node * (p.tree.max_depth + 1) + threadIdx.x];
        shared.carried[threadIdx.x] = min(max(ancestor, 0), first - 1);
      }
      __syncthreads();
    }
    chunk.count = min(chunk.carried + work.rows.num_nodes - first, p.row_capacity);
    if (is_staged()) stage_rows(chunk);
    copy_async_commit();

    // roles: 0 = keys, 1 = queries, 2 = values
    const int role = warp < HEAD_WARPS ? 0 : warp < 2 * HEAD_WARPS ? 1 : 2;
    int quad = lane, row = warp - role * HEAD_WARPS, row_step = HEAD_WARPS;
    int channel = ((role == 0 ? p.num_k_heads : 0) + work.k_head) * GDN_HEAD_DIM + quad * 4;
    if (role == 2) {
      constexpr int ROWS = VALUE_WARPS * 32 / QUADS;
      const int thread = threadIdx.x - 2 * HEAD_WARPS * 32;
      quad = thread % QUADS;
      const bool has_work = thread < ROWS * QUADS && work.has_tile(quad / (TILE / 4));
      if (!has_work) quad = 0;
      const int tile = quad / (TILE / 4);
      row = has_work ? thread / QUADS : chunk.count;
      row_step = ROWS;
      channel = (2 * p.num_k_heads + work.head(tile)) * GDN_HEAD_DIM + work.column(tile) + quad % (TILE / 4) * 4;
    }
    Conv conv;
    conv.load<T>(p, work.slot, channel);
    load_paths(chunk);
    load_gates(chunk);
    copy_async_wait<0>();
    __syncthreads();
    sum_root_decays(chunk);
    convolve(chunk, conv, role, quad, channel, row, row_step);
    float state[K_STEPS][2][4];
    load_state(state);
    __syncthreads();
    multiply_heads(chunk);
    multiply_state(chunk, state);
    __syncthreads();
    solve(chunk);
    __syncthreads();
    store_outputs(chunk);
    return first + chunk.count - chunk.carried;
  }

  const int request;
};

template <typename T, int GROUPS>
__device__ __forceinline__ void run(const ddt_cuda_gdn_verify &p) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  const int block = blockIdx.x, slice = block % p.num_slices;
  const int k_head = block / p.num_slices % p.num_k_heads, request = block / p.num_slices / p.num_k_heads;
  const RequestRows rows = request_rows(p.query_start, p.tree, request, p.num_rows);
  const int64_t slot = p.state_slots[request];
  if (rows.num_nodes == 0 || slot < 0 || slot >= p.num_slots) return;
  const Work work{rows, slot, k_head, slice, p.num_v_heads / p.num_k_heads};
  GdnVerify<T, GROUPS>{p, work, Shared<T>(shared_bytes, p.row_capacity), static_cast<int>(threadIdx.x / 32),
                       static_cast<int>(threadIdx.x % 32), request}
      .run();
}

}  // namespace
}  // namespace ddt

#define DDT_GDN_VERIFY(NAME, T, GROUPS)                                                          \
  extern "C" __global__ void __launch_bounds__(ddt::GdnVerify<T, GROUPS>::THREADS) NAME(         \
      const __grid_constant__ ddt_cuda_gdn_verify p) {                                           \
    ddt::run<T, GROUPS>(p);                                                                      \
  }

DDT_GDN_VERIFY(ddt_gdn_verify_f32, float, 4)
DDT_GDN_VERIFY(ddt_gdn_verify_f16, __half, 4)
DDT_GDN_VERIFY(ddt_gdn_verify_bf16, __nv_bfloat16, 4)
DDT_GDN_VERIFY(ddt_gdn_verify_bf16_small, __nv_bfloat16, 2)
