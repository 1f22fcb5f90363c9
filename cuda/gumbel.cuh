// SPDX-License-Identifier: Apache-2.0
//
// The noise of vLLM's sampler, so that a seed gives the tokens that it gives there: vLLM 0.32 and
// 0.33, vllm/v1/worker/gpu/sample/gumbel.py, f32, target side. rust/gumbel.rs is its twin on the CPU.
#pragma once

#include <stdint.h>

namespace ddt {

// MurmurHash3 (https://github.com/aappleby/smhasher, x86_32) of four words.
__device__ __forceinline__ uint32_t murmur3_mix(uint32_t hash, uint32_t word) {
  word = __funnelshift_l(word * 0xcc9e2d51u, word * 0xcc9e2d51u, 15) * 0x1b873593u;
  hash ^= word;
  return __funnelshift_l(hash, hash, 13) * 5 + 0xe6546b64u;
}

// The part of the hash that all tokens of a row share. vLLM takes 32 bits of the position.
__device__ __forceinline__ uint32_t gumbel_prefix(int64_t seed, int64_t position) {
  uint32_t hash = murmur3_mix(0, static_cast<uint32_t>(seed));
  hash = murmur3_mix(hash, static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32));
  return murmur3_mix(hash, static_cast<uint32_t>(position));
}

// 32 random bits per token.
__device__ __forceinline__ uint32_t gumbel_bits(uint32_t prefix, int token) {
  uint32_t hash = murmur3_mix(prefix, static_cast<uint32_t>(token)) ^ 16;
  hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
  hash = (hash ^ (hash >> 13)) * 0xc2b2ae35u;
  return hash ^ (hash >> 16);
}

// -ln(-ln(1 - u)) of u = (bits + 0.5) / 2^32, rounded where vLLM rounds: small bits, much noise.
__device__ __forceinline__ float gumbel_noise(uint32_t bits) {
  const float u = __fmaf_rn(static_cast<float>(bits >> 16), 0x1p-16f,
                            (static_cast<float>(bits & 0xffff) + 0.5f) * 0x1p-32f);
  float log1p;
  if (u < 0.25f) {
    float series = 1.0f / 8;
    series = __fmaf_rn(u, series, 1.0f / 7);
    series = __fmaf_rn(u, series, 1.0f / 6);
    series = __fmaf_rn(u, series, 1.0f / 5);
    series = __fmaf_rn(u, series, 1.0f / 4);
    series = __fmaf_rn(u, series, 1.0f / 3);
    series = __fmaf_rn(u, series, 1.0f / 2);
    series = __fmaf_rn(u, series, 1.0f);
    log1p = -u * series;
  } else {
    log1p = logf(fmaxf(1.0f - u, 0x1p-24f));
  }
  return -logf(-log1p);
}

// At least gumbel_noise(bits), for a third of its cost: -ln(1 - u) >= u, so the noise is at most
// -ln(u). The margin covers every rounding and the error of the hardware's logarithm.
__device__ __forceinline__ float gumbel_bound(uint32_t bits) {
  constexpr float LN_2 = 0x1.62e43p-1f;
  constexpr float MARGIN = 1e-3f;
  float log2;  // the argument is no denormal number
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(static_cast<float>(bits) + 0.5f));
  return __fmaf_rn(-LN_2, log2, 32 * LN_2 + MARGIN);
}

// At least every gumbel_noise.
constexpr float MAX_GUMBEL_NOISE = 22.9f;

}  // namespace ddt
