// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic that rust/scores.rs specifies bit by bit. Every operation is written as an
// intrinsic, so that the compiler fuses none of them.
#pragma once

#include <stdint.h>

#include "gumbel.cuh"

namespace ddt {

constexpr int32_t MIN_SCORE = -INT32_MAX;

__device__ __forceinline__ float bits_f32(uint32_t bits) { return __uint_as_float(bits); }

constexpr float EXP_CUTOFF = -87.0f;

// exp_spec, for EXP_CUTOFF <= t <= 0
__device__ __forceinline__ float exp_in_range(float t) {
  const float rounder = 12582912.0f;
  const float shifted = __fmaf_rn(t, bits_f32(0x3fb8aa3b), rounder);
  const float k = __fsub_rn(shifted, rounder);
  const float r = __fmaf_rn(k, -bits_f32(0xb102e308), __fmaf_rn(k, -bits_f32(0x3f317218), t));
  float q = bits_f32(0x3ab511e8);
  q = __fmaf_rn(q, r, bits_f32(0x3c091d10));
  q = __fmaf_rn(q, r, bits_f32(0x3d2aac79));
  q = __fmaf_rn(q, r, bits_f32(0x3e2aaa49));
  q = __fmaf_rn(q, r, bits_f32(0x3efffffe));
  const float p = __fadd_rn(__fmaf_rn(__fmul_rn(r, r), q, r), 1.0f);
  // p * 2^k: k is in the low bits of `shifted`, and neither factor nor product is denormal
  return bits_f32(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

// exp_spec, for t <= 0
__device__ __forceinline__ float exp_spec(float t) { return t >= EXP_CUTOFF ? exp_in_range(t) : 0.0f; }

// a / b as ln_spec needs it, correctly rounded: b is in [1, 4), |a| at most 1, both have at most 25
// significant bits. Newton's method for the reciprocal, then one correction by the remainder
// (P. Markstein, IBM J. Res. Dev. 34(1), 1990). The general division is a call, before which
// registers are spilled.
__device__ __forceinline__ double divide(double a, double b) {
  double r;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(b));
#pragma unroll
  for (int step = 0; step < 3; ++step) r = __fma_rn(r, __fma_rn(-b, r, 1.0), r);
  const double q = __dmul_rn(a, r);
  return __fma_rn(r, __fma_rn(-b, q, a), q);
}

// ln_spec, for s >= 1
__device__ __forceinline__ double ln_spec(float s) {
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(static_cast<double>(s)));
  double k = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  double m = __longlong_as_double(static_cast<int64_t>((bits & ((1ull << 52) - 1)) | 0x3ff0000000000000ull));
  if (m > 1.5) {
    m = __dmul_rn(m, 0.5);
    k = __dadd_rn(k, 1.0);
  }
  const double z = divide(__dsub_rn(m, 1.0), __dadd_rn(m, 1.0));
  const double w = __dmul_rn(z, z);
  double p = 1.0 / 23.0;
  constexpr double INVERSES[] = {1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11,
                                 1.0 / 9,  1.0 / 7,  1.0 / 5,  1.0 / 3,  1.0};
#pragma unroll
  for (double inverse : INVERSES) p = __dadd_rn(__dmul_rn(p, w), inverse);
  return __dadd_rn(__dmul_rn(k, 0.6931471805599453), __dmul_rn(__dmul_rn(2.0, z), p));
}

// A whole number below 2^16 as f32, without the conversion unit, which is slow.
__device__ __forceinline__ float small_f32(uint32_t x) { return __fsub_rn(bits_f32(0x4b000000 | x), 8388608.0f); }

struct Split {
  float k, m;
  // v = m * 2^k with m in [0.75, 1.5), for a normal positive number
  __device__ explicit Split(float v) {
    const int32_t exponent = static_cast<int32_t>(__float_as_uint(v) - 0x3f400000u) >> 23;
    // the low bits of 1.5 * 2^23 + k
    k = __fsub_rn(bits_f32(0x4b400000u + static_cast<uint32_t>(exponent)), 12582912.0f);
    m = bits_f32(__float_as_uint(v) - (static_cast<uint32_t>(exponent) << 23));
  }
};

__device__ __forceinline__ float ln_near(float f, float k) {
  float q = bits_f32(0xbd89a21e);
  q = __fmaf_rn(q, f, bits_f32(0x3e10eede));
  q = __fmaf_rn(q, f, bits_f32(0xbe31883f));
  q = __fmaf_rn(q, f, bits_f32(0x3e4dc6bc));
  q = __fmaf_rn(q, f, bits_f32(0xbe7fc9a8));
  q = __fmaf_rn(q, f, bits_f32(0x3eaaa739));
  q = __fmaf_rn(q, f, bits_f32(0xbf00001c));
  q = __fmaf_rn(q, f, 1.0f);
  return __fmaf_rn(k, bits_f32(0x3f317218), __fmul_rn(f, q));
}

__device__ __forceinline__ float noise_spec(uint32_t bits) {
  const float low = __fmul_rn(__fadd_rn(small_f32(bits & 0xffff), 0.5f), 0x1p-32f);
  const float u = __fmaf_rn(small_f32(bits >> 16), 0x1p-16f, low);
  const Split rest(fmaxf(__fsub_rn(1.0f, u), 0x1p-24f));
  const float y = -ln_near(u < 0.25f ? -u : __fsub_rn(rest.m, 1.0f), rest.k);
  const Split split(y);
  return -ln_near(__fsub_rn(split.m, 1.0f), split.k);
}

__device__ __forceinline__ int32_t edge_score(float x, double ln_z) {
  const double rounder = 6755399441055744.0;
  double scaled = __dmul_rn(__dsub_rn(static_cast<double>(x), ln_z), 2097152.0);
  scaled = fmin(fmax(scaled, static_cast<double>(MIN_SCORE)), 0.0);
  return static_cast<int32_t>(__dsub_rn(__dadd_rn(scaled, rounder), rounder));
}

__device__ __forceinline__ int32_t extend_path(int32_t path, int32_t edge) {
  return static_cast<int32_t>(max(static_cast<int64_t>(path) + edge, static_cast<int64_t>(MIN_SCORE)));
}

// Ascending keys are best first, equal scores by token id.
__device__ __forceinline__ uint64_t candidate_key(int32_t score, uint32_t token) {
  return static_cast<uint64_t>(static_cast<uint32_t>(-score)) << 32 | token;
}
__device__ __forceinline__ int32_t key_score(uint64_t key) { return -static_cast<int32_t>(key >> 32); }
__device__ __forceinline__ int32_t key_token(uint64_t key) { return static_cast<int32_t>(key); }

// f32 as integers of the same order.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float from_ordered(uint32_t key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

}  // namespace ddt
