// SPDX-License-Identifier: Apache-2.0
//
// Instructions that only sm_90a has: wgmma on 128-byte swizzled tiles, tensor-map copies, mbarriers.
// Layouts are those of the PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout":
// https://docs.nvidia.com/cuda/parallel-thread-execution/
//
// A tile of 16-bit elements is cut into panels of 64 columns. A panel holds its rows one after the
// other, 128 bytes each, and starts at a multiple of 1024 bytes; within eight rows, an atom, the 16-byte
// piece c of row r is stored as piece c ^ (r % 8). Where atoms and panels lie is up to the tile:
// the operands' descriptors have their distances.
#pragma once

#include "common.cuh"

namespace ddt::sm90 {

constexpr int PANEL_COLUMNS = 64;
constexpr int PANEL_ROW_BYTES = 128;
// Eight rows of a panel, over which the swizzle repeats.
constexpr int ATOM_BYTES = 8 * PANEL_ROW_BYTES;

// Byte offset in a panel of the 16-byte piece `piece` of row `row`.
__device__ __forceinline__ int panel_offset(int row, int piece) {
  return row * PANEL_ROW_BYTES + ((piece ^ (row % 8)) * 16);
}

// ---- mbarriers

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; a block barrier must follow.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and the phase also waits for `bytes` of copies.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns when the phase of that parity has completed; a fresh barrier counts as having completed parity 1.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- copies

// One box of a five-dimensional tensor map, whose rows are panel rows; elements outside the tensor are zeros.
__device__ __forceinline__ void copy_box(uint32_t shared, const void *tensor_map, int x, int y, int z, int u,
                                         int v, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared),
      "l"(tensor_map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const void *tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void *global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Ordinary stores before it become visible to wgmma and to the copy engine; a barrier must follow.
__device__ __forceinline__ void publish_to_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- warps

template <int REGISTERS>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// A barrier of `threads` threads; 0 is __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at a barrier that others wait at.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and whether any of the threads says so.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.s32 mine, %3, 0;\n"
      "barrier.cta.red.or.pred all, %1, %2, mine;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(int(value))
      : "memory");
  return any != 0;
}

// ---- wgmma. Between wgmma_begin and wgmma_wait the registers of a product belong to the tensor cores.

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of registers over this place.
template <int N>
__device__ __forceinline__ void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

constexpr uint64_t SWIZZLE_128 = uint64_t(1) << 62;

// An operand whose columns are the k dimension ("K-major"); atoms of a panel are atom_stride bytes apart.
// 16 columns further within a panel: 32 bytes further.
__device__ __forceinline__ uint64_t descriptor_k_major(uint32_t address, int atom_stride) {
  return SWIZZLE_128 | uint64_t(atom_stride >> 4) << 32 | uint64_t(1) << 16 | (address >> 4 & 0x3fff);
}

// An operand whose rows are the k dimension ("MN-major"), 16 of them: the two atoms of a panel are atom_stride bytes
// apart, panels panel_stride.
__device__ __forceinline__ uint64_t descriptor_mn_major(uint32_t address, int atom_stride, int panel_stride) {
  return SWIZZLE_128 | uint64_t(atom_stride >> 4) << 32 | uint64_t(panel_stride >> 4) << 16 | (address >> 4 & 0x3fff);
}

// Operand lists: 8 accumulators, and the names of 32.
#define DDT_D8(d, i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define DDT_D32(d, i) DDT_D8(d, i), DDT_D8(d, i + 8), DDT_D8(d, i + 16), DDT_D8(d, i + 24)
#define DDT_NAMES_0                                                 \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DDT_NAMES_32                                                 \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DDT_NAMES_64                                                 \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define DDT_NAMES_96                                                 \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111," \
  "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

template <typename T>
constexpr bool IS_BF16 = false;
template <>
constexpr bool IS_BF16<__nv_bfloat16> = true;

// d = a b (first) or d += a b. a: [64,16], b: [N,16], both K-major in shared memory.
#define DDT_WGMMA_SHARED(N, TYPE, NAMES, A, B, FIRST, ...)                                                    \
  asm volatile("{\n.reg .pred accumulate;\nsetp.eq.s32 accumulate, %" FIRST ", 0;\n"                             \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, %" A ", %" B          \
               ", accumulate, 1, 1, 0, 0;\n}\n"                                                                   \
               : __VA_ARGS__                                                                                      \
               : "l"(a), "l"(b), "r"(int(first)))

// d += a b. a: [64,16] in registers, b: [16,N] MN-major in shared memory.
#define DDT_WGMMA_REGISTERS(N, TYPE, NAMES, A, B, ...)                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, %" B \
               ", 1, 1, 1, 1;"                                                                             \
               : __VA_ARGS__                                                                               \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b))

template <typename T>
__device__ __forceinline__ void wgmma_shared(float (&d)[32], uint64_t a, uint64_t b, bool first) {
  if constexpr (IS_BF16<T>) {
    DDT_WGMMA_SHARED("64", "bf16", DDT_NAMES_0, "32", "33", "34", DDT_D32(d, 0));
  } else {
    DDT_WGMMA_SHARED("64", "f16", DDT_NAMES_0, "32", "33", "34", DDT_D32(d, 0));
  }
}
template <typename T>
__device__ __forceinline__ void wgmma_shared(float (&d)[40], uint64_t a, uint64_t b, bool first) {
  if constexpr (IS_BF16<T>) {
    DDT_WGMMA_SHARED("80", "bf16", DDT_NAMES_0 ",%32,%33,%34,%35,%36,%37,%38,%39", "40", "41", "42", DDT_D32(d, 0),
                     DDT_D8(d, 32));
  } else {
    DDT_WGMMA_SHARED("80", "f16", DDT_NAMES_0 ",%32,%33,%34,%35,%36,%37,%38,%39", "40", "41", "42", DDT_D32(d, 0),
                     DDT_D8(d, 32));
  }
}

template <typename T>
__device__ __forceinline__ void wgmma_registers(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b) {
  if constexpr (IS_BF16<T>) {
    DDT_WGMMA_REGISTERS("128", "bf16", DDT_NAMES_0 "," DDT_NAMES_32, "%64,%65,%66,%67", "68", DDT_D32(d, 0),
                        DDT_D32(d, 32));
  } else {
    DDT_WGMMA_REGISTERS("128", "f16", DDT_NAMES_0 "," DDT_NAMES_32, "%64,%65,%66,%67", "68", DDT_D32(d, 0),
                        DDT_D32(d, 32));
  }
}
template <typename T>
__device__ __forceinline__ void wgmma_registers(float (&d)[128], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                uint64_t b) {
  if constexpr (IS_BF16<T>) {
    DDT_WGMMA_REGISTERS("256", "bf16", DDT_NAMES_0 "," DDT_NAMES_32 "," DDT_NAMES_64 "," DDT_NAMES_96,
                        "%128,%129,%130,%131", "132", DDT_D32(d, 0), DDT_D32(d, 32), DDT_D32(d, 64), DDT_D32(d, 96));
  } else {
    DDT_WGMMA_REGISTERS("256", "f16", DDT_NAMES_0 "," DDT_NAMES_32 "," DDT_NAMES_64 "," DDT_NAMES_96,
                        "%128,%129,%130,%131", "132", DDT_D32(d, 0), DDT_D32(d, 32), DDT_D32(d, 64), DDT_D32(d, 96));
  }
}

#undef DDT_WGMMA_SHARED
#undef DDT_WGMMA_REGISTERS
#undef DDT_D8
#undef DDT_D32
#undef DDT_NAMES_0
#undef DDT_NAMES_32
#undef DDT_NAMES_64
#undef DDT_NAMES_96

}  // namespace ddt::sm90
