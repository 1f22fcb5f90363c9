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
constexpr int REPLAY_WARPS = REPLAY_THREADS / 32;
constexpr int MAX_HEADS = DDT_CUDA_COMMIT_MAX_BLOCK_HEADS;
// 8 lanes hold a row of the state, as float4s whose neighbours belong to neighbouring lanes
constexpr int ROW_LANES = 8;
constexpr int QUADS = HEAD_DIM / 4 / ROW_LANES;
// half of a head's rows are in registers while the other half is on its way there
constexpr int WARP_ROWS = HEAD_DIM / 2 / REPLAY_WARPS;
constexpr int PASS_ROWS = 32 / ROW_LANES;
constexpr int LANE_ROWS = WARP_ROWS / PASS_ROWS;
static_assert(LANE_ROWS >= 1, "a warp has whole passes of rows");
static_assert(DDT_CUDA_COMMIT_SHIFT_THREADS * 4 == DDT_CUDA_COMMIT_WINDOW_CHANNELS, "a thread per four channels");
static_assert(REPLAY_THREADS >= MAX_TOKENS * MAX_HEADS, "a thread per token and head");
static_assert(REPLAY_THREADS >= HEAD_DIM / 4 * (1 + MAX_HEADS), "a thread per four channels");
static_assert(DDT_CUDA_COMMIT_REPLAY_SHARED_BYTES == MAX_TOKENS * HEAD_DIM * (1 + MAX_HEADS) * sizeof(float),
              "keys and values of the longest path");

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

// ---- elements whose dtype is known only at run time, as bits

__device__ __forceinline__ uint32_t load_bits(const ddt_cuda_view &view, int64_t offset) {
  if (view.dtype == DDT_CUDA_F32) return static_cast<const uint32_t *>(view.data)[offset];
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

__device__ __forceinline__ float4 scaled(float4 x, float factor) {
  return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}

// The rows of a slot's state that a warp holds. ALIGNED: contiguous and fit for 16-byte accesses.
template <bool ALIGNED>
struct StateRows {
  float *lane_data;
  const int64_t *strides;

  // The first WARP_ROWS of the warp in head v_head.
  __device__ StateRows(const ddt_cuda_commit_gdn &layer, int slot, int v_head) : strides(layer.ssm_state.strides) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    lane_data = static_cast<float *>(layer.ssm_state.data) + slot * strides[0] + v_head * strides[1] +
                (warp * WARP_ROWS + lane / ROW_LANES) * strides[2] + lane % ROW_LANES * 4 * strides[3];
  }

  // Element 0 of row i that this lane has of a half of a head, `head` heads on.
  __device__ __forceinline__ float *row(int head, int half, int i) const {
    return lane_data + head * strides[1] + (half * (HEAD_DIM / 2) + i * PASS_ROWS) * strides[2];
  }

  // The state is too large for any cache to be of use.
  __device__ __forceinline__ void load(StateTile &tile, int head, int half) const {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
      const float *const keys = row(head, half, i);
#pragma unroll
      for (int q = 0; q < QUADS; q++) {
        if constexpr (ALIGNED) {
          tile[i][q] = __ldcs(reinterpret_cast<const float4 *>(keys) + q * ROW_LANES);
        } else {
          const float *const quad = keys + q * ROW_LANES * 4 * strides[3];
          tile[i][q] = {quad[0], quad[strides[3]], quad[2 * strides[3]], quad[3 * strides[3]]};
        }
      }
    }
  }

  __device__ __forceinline__ void store(const StateTile &tile, float factor, int head, int half) const {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
      float *const keys = row(head, half, i);
#pragma unroll
      for (int q = 0; q < QUADS; q++) {
        const float4 x = scaled(tile[i][q], factor);
        if constexpr (ALIGNED) {
          __stcs(reinterpret_cast<float4 *>(keys) + q * ROW_LANES, x);
        } else {
          float *const quad = keys + q * ROW_LANES * 4 * strides[3];
          quad[0] = x.x;
          quad[strides[3]] = x.y;
          quad[2 * strides[3]] = x.z;
          quad[3 * strides[3]] = x.w;
        }
      }
    }
  }
};

// Gates of a token. The state is kept divided by the product of the decays, which saves the multiplication
// of every element by each: `S = alpha S; u = beta (v - S^T k); S += k u^T` becomes, with S = decay R,
// `R = rescale R; w = beta / decay v - beta R^T k; R += k w^T`.
struct alignas(16) Gates {
  float minus_beta;
  float beta_by_decay;
  // 1, unless the product would leave the range below
  float rescale;
  float decay;
};

// The product of decays is multiplied into the state outside of this range, so that its inverse is exact enough.
constexpr float MIN_DECAY = 1e-9f, MAX_DECAY = 1e9f;

// From log decays, which are in `decay`, and betas, which are in `beta_by_decay`.
__device__ __forceinline__ void accumulate_decays(Gates *gates, int num_tokens) {
  float decay = 1.0f;
  for (int token = 0; token < num_tokens; token++) {
    Gates g = gates[token];
    float rescale = 1.0f;
    decay *= expf(g.decay);
    if (!(decay >= MIN_DECAY && decay <= MAX_DECAY)) {
      rescale = decay;
      decay = 1.0f;
    }
    const float beta = g.beta_by_decay;
    gates[token] = {-beta, beta / decay, rescale, decay};
  }
}

// One token for the rows of a warp; v points to the value of the lane's first row.
__device__ __forceinline__ void step(StateTile &tile, const float *key, const float *v, const Gates &gates) {
  if (gates.rescale != 1.0f) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
#pragma unroll
      for (int q = 0; q < QUADS; q++) tile[i][q] = scaled(tile[i][q], gates.rescale);
    }
  }
  const float4 *const quads = reinterpret_cast<const float4 *>(key) + threadIdx.x % ROW_LANES;
  float4 k[QUADS];
#pragma unroll
  for (int q = 0; q < QUADS; q++) k[q] = quads[q * ROW_LANES];
#pragma unroll
  for (int i = 0; i < LANE_ROWS; i++) {
    float2 sum = {0, 0};
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
      const float4 s = tile[i][q];
      sum.x += s.x * k[q].x, sum.y += s.y * k[q].y, sum.x += s.z * k[q].z, sum.y += s.w * k[q].w;
    }
    float memory = sum.x + sum.y;
#pragma unroll
    for (int lanes = ROW_LANES / 2; lanes > 0; lanes /= 2) memory += __shfl_xor_sync(FULL_WARP, memory, lanes);
    const float w = gates.beta_by_decay * v[i * PASS_ROWS] + gates.minus_beta * memory;
#pragma unroll
    for (int q = 0; q < QUADS; q++) {
      float4 &s = tile[i][q];
      s.x += k[q].x * w, s.y += k[q].y * w, s.z += k[q].z * w, s.w += k[q].w * w;
    }
  }
}

// ---- what a block replays

struct Path {
  Target target;
  int rows[MAX_TOKENS];
  // channel 0 of the inputs of the window and of the tokens, if rows are aligned
  const uint16_t *inputs[WINDOW + MAX_TOKENS];
  Gates gates[MAX_HEADS][MAX_TOKENS];
};

// The convolved channels of a token: those of the key head, then those of the value heads.
struct Channels {
  int num_heads;
  // their places in the layer
  int first_key;
  int first_value;
  float *convolved;

  __device__ __forceinline__ int count() const { return (1 + num_heads) * HEAD_DIM; }
  __device__ __forceinline__ int in_layer(int channel) const {
    return channel < HEAD_DIM ? first_key + channel : first_value + channel - HEAD_DIM;
  }
  __device__ __forceinline__ float *of(int token) const { return convolved + token * count(); }
};

template <typename T>
__device__ __forceinline__ void unpack(uint2 bits, float (&x)[4]) {
  const T *const elements = reinterpret_cast<const T *>(&bits);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = to_f32(elements[i]);
}

// Four channels of a few tokens per thread; all operands are of the 16-bit type T, in rows of channels that
// are fit for 8-byte accesses.
template <typename T>
__device__ __forceinline__ void convolve_quads(const ddt_cuda_commit_gdn &layer, const Channels &channels,
                                               const Path &path, int num_tokens) {
  constexpr int BATCH = 4;
  const int quads = channels.count() / 4;
  const int group = threadIdx.x / quads, num_groups = REPLAY_THREADS / quads;
  if (group >= num_groups) return;
  const int c = (threadIdx.x - group * quads) * 4, channel = channels.in_layer(c);

  uint2 weight_bits[4], bias_bits = {0, 0};
#pragma unroll
  for (int i = 0; i < 4; i++) weight_bits[i] = static_cast<const uint2 *>(layer.conv_weight.data)[channel + i];
  if (layer.conv_bias.data) {
    bias_bits = *reinterpret_cast<const uint2 *>(static_cast<const T *>(layer.conv_bias.data) + channel);
  }
  for (int first = group * BATCH; first < num_tokens; first += num_groups * BATCH) {
    uint2 input_bits[WINDOW + BATCH];
#pragma unroll
    for (int i = 0; i < WINDOW + BATCH; i++) {
      const int input = min(first + i, WINDOW + num_tokens - 1);
      input_bits[i] = *reinterpret_cast<const uint2 *>(path.inputs[input] + channel);
    }
    float biases[4];
    ConvChannel conv[4];
    unpack<T>(bias_bits, biases);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      conv[i].bias = biases[i];
      unpack<T>(weight_bits[i], conv[i].weight);
    }
#pragma unroll
    for (int token = 0; token < BATCH; token++) {
      if (first + token >= num_tokens) break;
      float inputs[GDN_CONV_WIDTH][4];
#pragma unroll
      for (int tap = 0; tap < GDN_CONV_WIDTH; tap++) unpack<T>(input_bits[token + tap], inputs[tap]);
      float out[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        out[i] = conv_silu<T>(conv[i], {inputs[0][i], inputs[1][i], inputs[2][i], inputs[3][i]});
      }
      *reinterpret_cast<float4 *>(channels.of(first + token) + c) = {out[0], out[1], out[2], out[3]};
    }
  }
}

// The same for any types and strides, one channel of all tokens per thread.
__device__ __forceinline__ void convolve(const ddt_cuda_commit_gdn &layer, const Channels &channels, const Path &path,
                                         int num_tokens) {
  const ddt_cuda_view &state = layer.conv_state, &stash = layer.stash_qkv;
  for (int c = threadIdx.x; c < channels.count(); c += REPLAY_THREADS) {
    const int channel = channels.in_layer(c);
    const ConvChannel conv = load_conv_channel(layer.conv_weight, layer.conv_bias, channel);
    float inputs[GDN_CONV_WIDTH];
#pragma unroll
    for (int tap = 0; tap < WINDOW; tap++) {
      inputs[tap] = load_f32(
          state, path.target.slot * state.strides[0] + channel * state.strides[1] + tap * state.strides[2]);
    }
    for (int token = 0; token < num_tokens; token++) {
      inputs[WINDOW] = load_f32(stash, path.rows[token] * stash.strides[0] + channel * stash.strides[1]);
      channels.of(token)[c] = rounded(conv_silu<float>(conv, inputs), stash.dtype);
#pragma unroll
      for (int tap = 0; tap < WINDOW; tap++) inputs[tap] = inputs[tap + 1];
    }
  }
}

// Replays half of a head, whose rows are in `tile`, and writes it.
template <bool ALIGNED>
__device__ __forceinline__ void replay_half(StateTile &tile, const Channels &channels, const Path &path,
                                            const StateRows<ALIGNED> &state, const StateRows<ALIGNED> &snapshot,
                                            int head, int half) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int num_tokens = path.target.num_tokens, snapshot_tokens = path.target.snapshot_tokens;
  const float *const key = channels.convolved;
  const float *const v =
      key + HEAD_DIM + head * HEAD_DIM + half * (HEAD_DIM / 2) + warp * WARP_ROWS + lane / ROW_LANES;
  float decay = 1.0f;
#pragma unroll 1
  for (int token = 0; token < num_tokens; token++) {
    const Gates gates = path.gates[head][token];
    step(tile, key + token * channels.count(), v + token * channels.count(), gates);
    decay = gates.decay;
    if (token + 1 == snapshot_tokens) snapshot.store(tile, decay, head, half);
  }
  state.store(tile, decay, head, half);
}

// One block replays block_heads value heads of one key head: grid (requests * groups of heads, layers).
// Half of a head is on its way to registers while the other half is replayed, and the first one while keys,
// values and gates of the path are computed.
template <bool ALIGNED>
__device__ __forceinline__ void replay(const ddt_cuda_commit &p) {
  extern __shared__ float4 dynamic_shared[];
  __shared__ Path path;

  let_next_kernel_start();
  const ddt_cuda_commit_gdn &layer = p.gdn_layers[blockIdx.y];
  const int blocks_per_request = gridDim.x / p.tree.num_reqs;
  const int r = blockIdx.x / blocks_per_request;
  const int num_heads = layer.block_heads;
  const int first_head = blockIdx.x % blocks_per_request * num_heads;
  if (first_head >= layer.num_v_heads) return;

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  // every warp reads the slot, so that the state need not wait for the rest
  const int slot = layer.state_slots[r];
  if (slot < 0 || slot >= layer.num_slots) return;
  if (warp == 0) {
    const int num_tokens = accepted_path(p, r, min(num_rows(p), layer.stash_rows), path.rows);
    if (lane == 0) path.target = state_target(p, layer, r, num_tokens);
    __syncwarp();
    const ddt_cuda_view &window = layer.conv_state, &stash = layer.stash_qkv;
    if (lane < WINDOW) {
      path.inputs[lane] =
          static_cast<const uint16_t *>(window.data) + slot * window.strides[0] + lane * window.strides[2];
    }
    for (int token = lane; token < num_tokens; token += 32) {
      path.inputs[WINDOW + token] =
          static_cast<const uint16_t *>(stash.data) + path.rows[token] * stash.strides[0];
    }
  }
  StateTile tile, next_tile;
  {
    const StateRows<ALIGNED> state(layer, slot, first_head);
    state.load(tile, 0, 0);
    state.load(next_tile, 0, 1);
  }
  __syncthreads();
  const int num_tokens = path.target.num_tokens;
  if (num_tokens == 0) return;

  // one thread per token and head; asynchronous, because registers are scarce during the convolution
  const int gate_token = thread / num_heads, gate_head = thread - gate_token * num_heads;
  if (gate_token < num_tokens) {
    const ddt_cuda_view &gates = layer.stash_gates;
    const float *const log_decay = static_cast<const float *>(gates.data) + path.rows[gate_token] * gates.strides[0] +
                                   (first_head + gate_head) * gates.strides[2];
    copy_async_4(&path.gates[gate_head][gate_token].decay, log_decay);
    copy_async_4(&path.gates[gate_head][gate_token].beta_by_decay, log_decay + gates.strides[1]);
  }
  copy_async_commit();
  const int k_head = first_head / (layer.num_v_heads / layer.num_k_heads);
  const Channels channels = {num_heads, (layer.num_k_heads + k_head) * HEAD_DIM,
                             (2 * layer.num_k_heads + first_head) * HEAD_DIM,
                             reinterpret_cast<float *>(dynamic_shared)};
  if (!layer.has_aligned_rows) {
    convolve(layer, channels, path, num_tokens);
  } else if (layer.stash_qkv.dtype == DDT_CUDA_BF16) {
    convolve_quads<__nv_bfloat16>(layer, channels, path, num_tokens);
  } else {
    convolve_quads<__half>(layer, channels, path, num_tokens);
  }
  copy_async_wait<0>();
  __syncthreads();

  for (int token = warp; token < num_tokens; token += REPLAY_WARPS) {
    float4 &k = reinterpret_cast<float4 *>(channels.of(token))[lane];
    const float norm2 = warp_sum(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w);
    k = scaled(k, inverse_norm(norm2, p.norm_eps));
  }
  if (warp == REPLAY_WARPS - 1 && lane < num_heads) accumulate_decays(path.gates[lane], num_tokens);
  __syncthreads();

  // the slot is read again, so that no pointer needs registers during the convolution
  const StateRows<ALIGNED> state(layer, path.target.slot, first_head);
  const StateRows<ALIGNED> snapshot(layer, path.target.snapshot_slot, first_head);
#pragma unroll 1
  for (int head = 0; head < num_heads; head++) {
    const bool has_next = head + 1 < num_heads;
    replay_half(tile, channels, path, state, snapshot, head, 0);
    if (has_next) state.load(tile, head + 1, 0);
    replay_half(next_tile, channels, path, state, snapshot, head, 1);
    if (has_next) state.load(next_tile, head + 1, 1);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(REPLAY_THREADS, DDT_CUDA_COMMIT_REPLAY_BLOCKS_PER_SM)
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

// Input number `input` of old window and path, of which each has its channels side by side.
__device__ const uint16_t *input_row(const ddt_cuda_commit_gdn &layer, const int *rows, int slot, int input) {
  const ddt_cuda_view &state = layer.conv_state, &stash = layer.stash_qkv;
  return input < WINDOW
             ? static_cast<const uint16_t *>(state.data) + slot * state.strides[0] + input * state.strides[2]
             : static_cast<const uint16_t *>(stash.data) + rows[input - WINDOW] * stash.strides[0];
}

// Four channels of a layer that has_aligned_rows.
__device__ void shift_quad(const ddt_cuda_commit_gdn &layer, const Target &target, const int *rows, int channel) {
  const ddt_cuda_view &state = layer.conv_state;
  const bool has_snapshot = target.snapshot_tokens > 0;
  uint2 window[WINDOW], snapshot[WINDOW];
#pragma unroll
  for (int tap = 0; tap < WINDOW; tap++) {
    window[tap] = *reinterpret_cast<const uint2 *>(
        input_row(layer, rows, target.slot, target.num_tokens + tap) + channel);
    if (has_snapshot) {
      snapshot[tap] = *reinterpret_cast<const uint2 *>(
          input_row(layer, rows, target.slot, target.snapshot_tokens + tap) + channel);
    }
  }
  // the replay reads the windows
  wait_for_previous_kernel();
  uint16_t *const data = static_cast<uint16_t *>(state.data) + channel;
#pragma unroll
  for (int tap = 0; tap < WINDOW; tap++) {
    uint16_t *const taps = data + tap * state.strides[2];
    *reinterpret_cast<uint2 *>(taps + target.slot * state.strides[0]) = window[tap];
    if (has_snapshot) *reinterpret_cast<uint2 *>(taps + target.snapshot_slot * state.strides[0]) = snapshot[tap];
  }
}

__device__ void shift_windows(const ddt_cuda_commit &p, const ddt_cuda_commit_gdn &layer, int r, int first_channel,
                              const int *rows, int num_tokens) {
  const Target target = state_target(p, layer, r, num_tokens);
  if (target.num_tokens == 0) return;
  const bool has_snapshot = target.snapshot_tokens > 0;
  const int num_channels = (2 * layer.num_k_heads + layer.num_v_heads) * HEAD_DIM;
  const int end = min(first_channel + DDT_CUDA_COMMIT_WINDOW_CHANNELS, num_channels);
  if (layer.has_aligned_rows) {
    const int channel = first_channel + 4 * threadIdx.x;
    if (channel < end) shift_quad(layer, target, rows, channel);
    return;
  }
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
