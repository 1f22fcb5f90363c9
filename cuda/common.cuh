// SPDX-License-Identifier: Apache-2.0
//
// Device code that kernels of several operations use.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "params/common.h"

namespace ddt {

constexpr unsigned FULL_WARP = 0xffffffffu;

// ---- elements of any floating-point dtype as f32

__device__ __forceinline__ float to_f32(float x) { return x; }
__device__ __forceinline__ float to_f32(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_f32(float x);
template <>
__device__ __forceinline__ float from_f32<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_f32<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_f32<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// Element `offset` of a tensor whose dtype is known only at run time.
__device__ __forceinline__ float load_f32(const ddt_cuda_view &view, int64_t offset) {
  switch (view.dtype) {
    case DDT_CUDA_F16: return to_f32(static_cast<const __half *>(view.data)[offset]);
    case DDT_CUDA_BF16: return to_f32(static_cast<const __nv_bfloat16 *>(view.data)[offset]);
    default: return static_cast<const float *>(view.data)[offset];
  }
}

__device__ __forceinline__ void store_f32(const ddt_cuda_view &view, int64_t offset, float x) {
  switch (view.dtype) {
    case DDT_CUDA_F16: static_cast<__half *>(view.data)[offset] = from_f32<__half>(x); break;
    case DDT_CUDA_BF16: static_cast<__nv_bfloat16 *>(view.data)[offset] = from_f32<__nv_bfloat16>(x); break;
    default: static_cast<float *>(view.data)[offset] = x;
  }
}

// Entry i of a vector of i32 or i64.
__device__ __forceinline__ int64_t load_index(const ddt_cuda_view &view, int64_t i) {
  const int64_t offset = i * view.strides[0];
  if (view.dtype == DDT_CUDA_I64) return static_cast<const int64_t *>(view.data)[offset];
  return static_cast<const int32_t *>(view.data)[offset];
}

// ---- the row rule of ddtree.h

struct RequestRows {
  int start;      // first row
  int end;        // one past the last row
  int num_nodes;  // 0 = padding request
};

// Device values are never an error: what cannot be is clamped to what is safe to read.
__device__ __forceinline__ RequestRows request_rows(const int32_t *query_start, const ddt_cuda_tree &tree, int r,
                                                    int num_rows) {
  const int start = min(max(query_start[r], 0), num_rows);
  const int end = min(max(query_start[r + 1], start), num_rows);
  const int num_nodes = min(min(max(tree.num_nodes[r], 0), tree.max_nodes), end - start);
  return {start, end, num_nodes};
}

// ---- programmatic dependent launch: a kernel launched with Launch::overlaps_previous may start
// before the kernel ahead of it in the stream has ended, and must wait before it touches memory

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// ---- asynchronous copies to shared memory

__device__ __forceinline__ uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes; zeros instead of reading if !valid. Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void *shared, const void *global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_4(void *shared, const void *global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// ---- tensor cores, every architecture from sm_80 on

__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], const void *shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared)));
}
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], const void *shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(shared)));
}

// c += a b, m16n8k16, f32 accumulators
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- reductions over a warp; every lane gets the result

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(FULL_WARP, x, step);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, step));
  return x;
}

}  // namespace ddt
