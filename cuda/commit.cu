// SPDX-License-Identifier: Apache-2.0
//
// commit: the accepted path of each tree becomes permanent, in two launches for all layers.
//
// ddt_commit_replay updates the recurrent states. Its blocks share convolution windows, so these
// are written, and KV rows moved, by ddt_commit_shift, which may start while the last blocks of
// the first kernel run. commit.md has the numbers.

#include "common.cuh"
#include "gdn.cuh"
#include "params/commit.h"

namespace {

using namespace ddt;

constexpr int HEAD_DIM = GDN_HEAD_DIM;
constexpr int WINDOW = GDN_WINDOW;
// the root and the accepted nodes
constexpr int MAX_TOKENS = DDT_CUDA_MAX_DEPTH + 1;

constexpr int REPLAY_THREADS = DDT_CUDA_COMMIT_REPLAY_THREADS;
constexpr int STATE_ROWS = DDT_CUDA_COMMIT_STATE_ROWS;
// 8 lanes hold a row of the state, as float4s whose neighbours belong to neighbouring lanes
constexpr int ROW_LANES = 8;
constexpr int QUADS = HEAD_DIM / 4 / ROW_LANES;
constexpr int WARP_ROWS = STATE_ROWS / (REPLAY_THREADS / 32);
constexpr int LANE_ROWS = WARP_ROWS / (32 / ROW_LANES);
static_assert(REPLAY_THREADS >= HEAD_DIM + STATE_ROWS + MAX_TOKENS, "a thread per channel and per gate");
static_assert(LANE_ROWS >= 1, "a warp has whole passes of rows");

// ---- what was accepted

// Writes the rows of the root and the accepted nodes to rows[MAX_TOKENS] and returns how many there
// are; 0 = nothing to do, or values that cannot be. For one whole warp.
__device__ int accepted_path(const ddt_cuda_commit &p, int r, int num_rows, int *rows) {
  const int lane = threadIdx.x % 32;
  const int max_depth = p.tree.max_depth;
  const int num_accepted = p.num_accepted[r];
  const int node = lane < max_depth ? p.accepted_nodes[int64_t(r) * max_depth + lane] : 0;
  const RequestRows request = request_rows(p.query_start, p.tree, r, num_rows);
  int node_before = __shfl_up_sync(FULL_WARP, node, 1);
  if (lane == 0) node_before = 0;
  const bool is_on_path = lane < num_accepted;
  const bool is_valid = !is_on_path || (node > node_before && node < request.num_nodes);
  if (lane == 0) rows[0] = request.start;
  if (is_on_path) rows[lane + 1] = request.start + node;
  return __all_sync(FULL_WARP, is_valid) && request.num_nodes > 0 && num_accepted >= 0 && num_accepted <= max_depth
             ? num_accepted + 1
             : 0;
}

// Rows of the batch.
__device__ int num_rows(const ddt_cuda_commit &p) { return max(p.query_start[p.tree.num_reqs], 0); }

// Where a layer's state of a request goes.
struct Target {
  // tokens to commit; 0 = nothing to do
  int num_tokens;
  int slot;
  // tokens of the snapshot; 0 = none
  int snapshot_tokens;
  int snapshot_slot;
};

__device__ Target state_target(const ddt_cuda_commit &p, const ddt_cuda_commit_gdn &layer, int r, int num_tokens) {
  Target target = {num_tokens, layer.state_slots[r], 0, -1};
  if (layer.snapshot_slots && p.snapshot_tokens) {
    target.snapshot_tokens = p.snapshot_tokens[r];
    target.snapshot_slot = layer.snapshot_slots[r];
  }
  if (target.slot < 0 || target.slot >= layer.num_slots) target.num_tokens = 0;
  if (target.snapshot_slot < 0 || target.snapshot_slot >= layer.num_slots || target.snapshot_tokens > num_tokens) {
    target.snapshot_tokens = 0;
  }
  return target;
}

// ---- elements whose dtype is known only at run time, as bits: a conversion between two loads would
// make the second wait for the first

// NARROW: known to have 16 bits.
template <bool NARROW = false>
__device__ __forceinline__ uint32_t load_bits(const ddt_cuda_view &view, int64_t offset) {
  if (!NARROW && view.dtype == DDT_CUDA_F32) return static_cast<const uint32_t *>(view.data)[offset];
  return static_cast<const uint16_t *>(view.data)[offset];
}

__device__ __forceinline__ void store_bits(const ddt_cuda_view &view, int64_t offset, uint32_t bits) {
  if (view.dtype == DDT_CUDA_F32) {
    static_cast<uint32_t *>(view.data)[offset] = bits;
  } else {
    static_cast<uint16_t *>(view.data)[offset] = static_cast<uint16_t>(bits);
  }
}

__device__ __forceinline__ float bits_to_f32(uint32_t bits, uint32_t dtype) {
  if (dtype == DDT_CUDA_F16) return to_f32(__ushort_as_half(static_cast<unsigned short>(bits)));
  return __uint_as_float(dtype == DDT_CUDA_BF16 ? bits << 16 : bits);
}

__device__ __forceinline__ float rounded(float x, uint32_t dtype) {
  if (dtype == DDT_CUDA_F16) return round_to<__half>(x);
  return dtype == DDT_CUDA_BF16 ? round_to<__nv_bfloat16>(x) : x;
}

// ---- the recurrent state

using StateTile = float4[LANE_ROWS][QUADS];

// The rows of the state that a warp holds. ALIGNED: contiguous and fit for 16-byte accesses.
template <bool ALIGNED>
struct StateRows {
  float *data;
  int64_t row_stride;
  int64_t key_stride;

  __device__ StateRows(const ddt_cuda_commit_gdn &layer, int slot, int v_head, int first_row) {
    const int64_t *strides = layer.ssm_state.strides;
    data = static_cast<float *>(layer.ssm_state.data) + slot * strides[0] + v_head * strides[1] +
           first_row * strides[2];
    row_stride = strides[2];
    key_stride = strides[3];
  }

  // Elements 4 q to 4 q + 3 of row i of this lane; the state is too large for any cache to be of use.
  __device__ void load(StateTile &tile) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
      const float *row = data + (i * (32 / ROW_LANES) + lane / ROW_LANES) * row_stride;
#pragma unroll
      for (int q = 0; q < QUADS; q++) {
        const int key = 4 * (q * ROW_LANES + lane % ROW_LANES);
        if constexpr (ALIGNED) {
          tile[i][q] = __ldcs(reinterpret_cast<const float4 *>(row + key));
        } else {
          const float *keys = row + key * key_stride;
          tile[i][q] = {keys[0], keys[key_stride], keys[2 * key_stride], keys[3 * key_stride]};
        }
      }
    }
  }

  __device__ void store(const StateTile &tile) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
      float *row = data + (i * (32 / ROW_LANES) + lane / ROW_LANES) * row_stride;
#pragma unroll
      for (int q = 0; q < QUADS; q++) {
        const int key = 4 * (q * ROW_LANES + lane % ROW_LANES);
        const float4 x = tile[i][q];
        if constexpr (ALIGNED) {
          __stcs(reinterpret_cast<float4 *>(row + key), x);
        } else {
          float *keys = row + key * key_stride;
          keys[0] = x.x;
          keys[key_stride] = x.y;
          keys[2 * key_stride] = x.z;
          keys[3 * key_stride] = x.w;
        }
      }
    }
  }
};

// `S = alpha S; u = beta (v - S^T k); S += k u^T` for the rows of a warp; v points to its values.
__device__ __forceinline__ void step(StateTile &tile, const float *key, const float *v, float alpha, float beta) {
  const int lane = threadIdx.x % 32;
  const float4 *quads = reinterpret_cast<const float4 *>(key) + lane % ROW_LANES;
  float4 k[QUADS];
#pragma unroll
  for (int q = 0; q < QUADS; q++) k[q] = quads[q * ROW_LANES];
#pragma unroll
  for (int i = 0; i < LANE_ROWS; i++) {
    float4 sum = {0, 0, 0, 0};
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
      float4 &s = tile[i][q];
      s.x *= alpha, s.y *= alpha, s.z *= alpha, s.w *= alpha;
      sum.x += s.x * k[q].x, sum.y += s.y * k[q].y, sum.z += s.z * k[q].z, sum.w += s.w * k[q].w;
    }
    float memory = (sum.x + sum.y) + (sum.z + sum.w);
#pragma unroll
    for (int lanes = ROW_LANES / 2; lanes > 0; lanes /= 2) memory += __shfl_xor_sync(FULL_WARP, memory, lanes);
    const float u = beta * (v[i * (32 / ROW_LANES) + lane / ROW_LANES] - memory);
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
      float4 &s = tile[i][q];
      s.x += k[q].x * u, s.y += k[q].y * u, s.z += k[q].z * u, s.w += k[q].w * u;
    }
  }
}

// Writes the convolved inputs of one channel for all tokens of the path to out, `stride` apart.
template <bool NARROW>
__device__ __forceinline__ void convolve(const ddt_cuda_commit_gdn &layer, int slot, int channel, const int *rows,
                                         int num_tokens, float *out, int stride) {
  const ddt_cuda_view &weight = layer.conv_weight, &bias = layer.conv_bias, &state = layer.conv_state,
                      &stash = layer.stash_qkv;
  uint32_t weight_bits[GDN_CONV_WIDTH], window_bits[WINDOW];
#pragma unroll
  for (int tap = 0; tap < GDN_CONV_WIDTH; tap++) {
    weight_bits[tap] = load_bits<NARROW>(weight, channel * weight.strides[0] + tap * weight.strides[1]);
  }
#pragma unroll
  for (int tap = 0; tap < WINDOW; tap++) {
    window_bits[tap] = load_bits<NARROW>(
        state, slot * state.strides[0] + channel * state.strides[1] + tap * state.strides[2]);
  }
  const uint32_t bias_bits = bias.data ? load_bits<NARROW>(bias, channel * bias.strides[0]) : 0;

  // inputs first, several loads at a time; outputs then replace them
  constexpr int BATCH = 8;
  for (int first = 0; first < num_tokens; first += BATCH) {
    uint32_t bits[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int row = rows[min(first + i, num_tokens - 1)];
      bits[i] = load_bits<NARROW>(stash, row * stash.strides[0] + channel * stash.strides[1]);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      if (first + i < num_tokens) out[(first + i) * stride] = bits_to_f32(bits[i], stash.dtype);
    }
  }

  ConvChannel conv;
  float taps[GDN_CONV_WIDTH];
  conv.bias = bits_to_f32(bias_bits, bias.dtype);
#pragma unroll
  for (int tap = 0; tap < GDN_CONV_WIDTH; tap++) conv.weight[tap] = bits_to_f32(weight_bits[tap], weight.dtype);
#pragma unroll
  for (int tap = 0; tap < WINDOW; tap++) taps[tap] = bits_to_f32(window_bits[tap], state.dtype);
  for (int token = 0; token < num_tokens; token++) {
    float &x = out[token * stride];
    taps[WINDOW] = x;
    x = rounded(conv_silu<float>(conv, taps), stash.dtype);
#pragma unroll
    for (int tap = 0; tap < WINDOW; tap++) taps[tap] = taps[tap + 1];
  }
}

// One block replays STATE_ROWS rows of one head's state: grid (requests * heads * tiles, layers).
// The state is on its way to registers while keys, values and gates of the path are computed.
template <bool ALIGNED>
__device__ __forceinline__ void replay(const ddt_cuda_commit &p) {
  constexpr int TILES = HEAD_DIM / STATE_ROWS;
  __shared__ float keys[MAX_TOKENS][HEAD_DIM];
  __shared__ float values[MAX_TOKENS][STATE_ROWS];
  __shared__ float alphas[MAX_TOKENS], betas[MAX_TOKENS];
  __shared__ int rows[MAX_TOKENS];
  __shared__ Target target;

  let_next_kernel_start();
  const ddt_cuda_commit_gdn &layer = p.gdn_layers[blockIdx.y];
  const int tiles_per_request = gridDim.x / p.tree.num_reqs;
  const int r = blockIdx.x / tiles_per_request;
  const int v_head = blockIdx.x % tiles_per_request / TILES;
  const int tile_row = blockIdx.x % TILES * STATE_ROWS;
  if (v_head >= layer.num_v_heads) return;

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (warp == 0) {
    const int num_tokens = accepted_path(p, r, min(num_rows(p), layer.stash_rows), rows);
    if (lane == 0) target = state_target(p, layer, r, num_tokens);
  }
  __syncthreads();
  const int num_tokens = target.num_tokens, slot = target.slot;
  if (num_tokens == 0) return;

  const int first_row = tile_row + warp * WARP_ROWS;
  StateTile tile;
  StateRows<ALIGNED>(layer, slot, v_head, first_row).load(tile);

  // one thread per key channel, per value channel of the tile, and per token for the gates
  if (thread < HEAD_DIM + STATE_ROWS) {
    const int k_head = v_head / (layer.num_v_heads / layer.num_k_heads);
    const bool is_key = thread < HEAD_DIM;
    const int channel = is_key ? (layer.num_k_heads + k_head) * HEAD_DIM + thread
                               : (2 * layer.num_k_heads + v_head) * HEAD_DIM + tile_row + thread - HEAD_DIM;
    float *out = is_key ? &keys[0][thread] : &values[0][thread - HEAD_DIM];
    const int out_stride = is_key ? HEAD_DIM : STATE_ROWS;
    const bool is_narrow = layer.stash_qkv.dtype != DDT_CUDA_F32 && layer.conv_state.dtype != DDT_CUDA_F32 &&
                           layer.conv_weight.dtype != DDT_CUDA_F32 && layer.conv_bias.dtype != DDT_CUDA_F32;
    if (is_narrow) {
      convolve<true>(layer, slot, channel, rows, num_tokens, out, out_stride);
    } else {
      convolve<false>(layer, slot, channel, rows, num_tokens, out, out_stride);
    }
  } else if (const int token = thread - HEAD_DIM - STATE_ROWS; token < num_tokens) {
    const ddt_cuda_view &gates = layer.stash_gates;
    const float *gate =
        static_cast<const float *>(gates.data) + rows[token] * gates.strides[0] + v_head * gates.strides[2];
    alphas[token] = expf(gate[0]);
    betas[token] = gate[gates.strides[1]];
  }
  __syncthreads();

  for (int token = warp; token < num_tokens; token += REPLAY_THREADS / 32) {
    float4 &k = reinterpret_cast<float4 *>(keys[token])[lane];
    const float norm2 = warp_sum(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w);
    const float scale = inverse_norm(norm2, p.norm_eps);
    k.x *= scale, k.y *= scale, k.z *= scale, k.w *= scale;
  }
  __syncthreads();

  for (int token = 0; token < num_tokens; token++) {
    step(tile, keys[token], &values[token][warp * WARP_ROWS], alphas[token], betas[token]);
    if (token + 1 == target.snapshot_tokens) {
      StateRows<ALIGNED>(layer, target.snapshot_slot, v_head, first_row).store(tile);
    }
  }
  StateRows<ALIGNED>(layer, target.slot, v_head, first_row).store(tile);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(REPLAY_THREADS, 3)
    ddt_commit_replay(const __grid_constant__ ddt_cuda_commit p) {
  replay<true>(p);
}

// For states of any strides.
extern "C" __global__ void __launch_bounds__(REPLAY_THREADS)
    ddt_commit_replay_strided(const __grid_constant__ ddt_cuda_commit p) {
  replay<false>(p);
}

namespace {

// ---- convolution windows

// The window after `tokens` tokens of the path: inputs tokens to tokens + 2 of old window and path.
__device__ void load_window(const ddt_cuda_commit_gdn &layer, const int *rows, int slot, int tokens, int channel,
                            uint32_t (&window)[WINDOW]) {
  const ddt_cuda_view &state = layer.conv_state, &stash = layer.stash_qkv;
#pragma unroll
  for (int tap = 0; tap < WINDOW; tap++) {
    const int input = tokens + tap;
    if (input < WINDOW) {
      window[tap] =
          load_bits(state, slot * state.strides[0] + channel * state.strides[1] + input * state.strides[2]);
    } else {
      const int64_t offset = rows[input - WINDOW] * stash.strides[0] + channel * stash.strides[1];
      window[tap] = load_bits(stash, offset);
      if (state.dtype != stash.dtype) window[tap] = __float_as_uint(bits_to_f32(window[tap], stash.dtype));
    }
  }
}

__device__ void store_window(const ddt_cuda_commit_gdn &layer, int slot, int channel,
                             const uint32_t (&window)[WINDOW]) {
  const ddt_cuda_view &state = layer.conv_state;
#pragma unroll
  for (int tap = 0; tap < WINDOW; tap++) {
    store_bits(state, slot * state.strides[0] + channel * state.strides[1] + tap * state.strides[2], window[tap]);
  }
}

__device__ void shift_windows(const ddt_cuda_commit &p, const ddt_cuda_commit_gdn &layer, int r, int first_channel,
                              const int *rows, int num_tokens) {
  const Target target = state_target(p, layer, r, num_tokens);
  if (target.num_tokens == 0) return;
  const bool has_snapshot = target.snapshot_tokens > 0;
  const int num_channels = (2 * layer.num_k_heads + layer.num_v_heads) * HEAD_DIM;
  const int end = min(first_channel + DDT_CUDA_COMMIT_WINDOW_CHANNELS, num_channels);
  for (int channel = first_channel + threadIdx.x; channel < end; channel += blockDim.x) {
    uint32_t window[WINDOW], snapshot[WINDOW];
    load_window(layer, rows, target.slot, num_tokens, channel, window);
    if (has_snapshot) load_window(layer, rows, target.slot, target.snapshot_tokens, channel, snapshot);
    // the replay reads the windows
    wait_for_previous_kernel();
    store_window(layer, target.slot, channel, window);
    if (has_snapshot) store_window(layer, target.snapshot_slot, channel, snapshot);
  }
}

// ---- KV rows

// Where a row lies in a cache, or -1 if nowhere.
__device__ int64_t row_offset(const ddt_cuda_commit_kv &layer, const ddt_cuda_commit_cache &cache, int row) {
  const int64_t slot = layer.row_slots[row];
  if (slot < 0 || layer.block_size == 0) return -1;
  const int64_t block = slot / layer.block_size, offset = slot % layer.block_size;
  return block < layer.num_blocks ? block * cache.block_stride + offset * cache.token_stride : -1;
}

// Moves rows in path order. The row of token t goes to row t of the request, and tokens after t come
// from rows after t, so no row is read after it was written.
template <typename Unit>
__device__ void move_rows(const ddt_cuda_commit_cache &cache, int num_heads, const int64_t *sources,
                          const int64_t *targets, int num_moves) {
  constexpr int BATCH = 4;
  char *const data = static_cast<char *>(cache.data);
  for (int i = threadIdx.x; i < num_heads * cache.num_units; i += blockDim.x) {
    char *const column = data + i / cache.num_units * cache.head_stride + i % cache.num_units * cache.unit_stride;
    for (int first = 0; first < num_moves; first += BATCH) {
      Unit units[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        if (first + j < num_moves) units[j] = *reinterpret_cast<const Unit *>(column + sources[first + j]);
      }
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        if (first + j < num_moves) *reinterpret_cast<Unit *>(column + targets[first + j]) = units[j];
      }
    }
  }
}

__device__ void compact(const ddt_cuda_commit_kv &layer, bool is_value, const int *rows, int num_tokens) {
  __shared__ int64_t sources[MAX_TOKENS], targets[MAX_TOKENS];
  __shared__ int move_count;
  const ddt_cuda_commit_cache &cache = is_value ? layer.value_cache : layer.key_cache;
  if (threadIdx.x < 32) {
    // one lane per accepted node
    const int token = threadIdx.x + 1;
    int64_t source = -1, target = -1;
    if (token < num_tokens && rows[token] != rows[0] + token) {
      source = row_offset(layer, cache, rows[token]);
      target = row_offset(layer, cache, rows[0] + token);
    }
    const bool moves = source >= 0 && target >= 0;
    const uint32_t movers = __ballot_sync(FULL_WARP, moves);
    if (moves) {
      const int i = __popc(movers & ((1u << threadIdx.x) - 1));
      sources[i] = source;
      targets[i] = target;
    }
    if (threadIdx.x == 0) move_count = __popc(movers);
  }
  __syncthreads();
  const int num_heads = is_value ? layer.num_value_heads : layer.num_key_heads;
  switch (cache.unit_bytes) {
    case 16: move_rows<uint4>(cache, num_heads, sources, targets, move_count); break;
    case 8: move_rows<uint64_t>(cache, num_heads, sources, targets, move_count); break;
    case 4: move_rows<uint32_t>(cache, num_heads, sources, targets, move_count); break;
    case 2: move_rows<uint16_t>(cache, num_heads, sources, targets, move_count); break;
    default: move_rows<uint8_t>(cache, num_heads, sources, targets, move_count); break;
  }
}

}  // namespace

// Shifts the convolution windows and moves KV rows: grid (requests * parts, recurrent layers, then
// attention layers). A part is WINDOW_CHANNELS channels, or one of the two caches.
extern "C" __global__ void __launch_bounds__(DDT_CUDA_COMMIT_SHIFT_THREADS)
    ddt_commit_shift(const __grid_constant__ ddt_cuda_commit p) {
  __shared__ int rows[MAX_TOKENS], path_length;
  const int parts = gridDim.x / p.tree.num_reqs;
  const int r = blockIdx.x / parts, part = blockIdx.x % parts;
  const int layer = blockIdx.y;
  const bool is_gdn = layer < p.num_gdn_layers;
  if (threadIdx.x < 32) {
    const int limit = is_gdn ? min(num_rows(p), p.gdn_layers[layer].stash_rows) : num_rows(p);
    const int length = accepted_path(p, r, limit, rows);
    if (threadIdx.x == 0) path_length = length;
  }
  __syncthreads();
  if (is_gdn) {
    shift_windows(p, p.gdn_layers[layer], r, part * DDT_CUDA_COMMIT_WINDOW_CHANNELS, rows, path_length);
  } else if (part < 2) {
    compact(p.kv_layers[layer - p.num_gdn_layers], part == 1, rows, path_length);
  }
  // this kernel must not end before the one that it overlaps
  wait_for_previous_kernel();
}
