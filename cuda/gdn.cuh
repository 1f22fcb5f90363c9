// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of a gated-delta-net layer that verification and commit share, so that both see
// the same queries, keys, values and gates: rust/gdn.rs and the gates of rust/gdn_verify.rs.
#pragma once

#include "common.cuh"

namespace ddt {

constexpr int GDN_HEAD_DIM = 128;
constexpr int GDN_CONV_WIDTH = 4;
// Raw inputs that a request's convolution window holds.
constexpr int GDN_WINDOW = GDN_CONV_WIDTH - 1;

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Log decay `-exp(a_log) * softplus(a + dt_bias)`, never positive.
__device__ __forceinline__ float log_decay(float a, float a_log, float dt_bias) {
  const float x = a + dt_bias;
  // beyond 20 the two are equal in f32, and exp would overflow at last
  const float softplus = x > 20.0f ? x : log1pf(expf(x));
  return -expf(a_log) * softplus;
}

// The nearest value of the raw inputs' type.
template <typename T>
__device__ __forceinline__ float round_to(float x) {
  return to_f32(from_f32<T>(x));
}

// Weights of one channel's convolution, oldest tap first.
struct ConvChannel {
  float bias;
  float weight[GDN_CONV_WIDTH];
};

__device__ __forceinline__ ConvChannel load_conv_channel(const ddt_cuda_view &weight, const ddt_cuda_view &bias,
                                                         int64_t channel) {
  ConvChannel c;
  c.bias = bias.data == nullptr ? 0.0f : load_f32(bias, channel * bias.strides[0]);
#pragma unroll
  for (int tap = 0; tap < GDN_CONV_WIDTH; ++tap) {
    c.weight[tap] = load_f32(weight, channel * weight.strides[0] + tap * weight.strides[1]);
  }
  return c;
}

// silu of the convolution of raw inputs of type T, oldest first, rounded to T.
template <typename T>
__device__ __forceinline__ float conv_silu(const ConvChannel &c, const float (&taps)[GDN_CONV_WIDTH]) {
  float x = c.bias;
#pragma unroll
  for (int tap = 0; tap < GDN_CONV_WIDTH; ++tap) x = fmaf(c.weight[tap], taps[tap], x);
  return round_to<T>(silu(x));
}

// Queries and keys are multiplied by this.
__device__ __forceinline__ float inverse_norm(float sum_of_squares, float eps) {
  return rsqrtf(sum_of_squares + eps);
}

}  // namespace ddt
