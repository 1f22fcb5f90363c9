// SPDX-License-Identifier: Apache-2.0
//
// The attend kernels of tree_attention for Hopper, after FlashAttention-3 (arXiv 2407.08608). Work, masks and
// partial results are those of tree_attention.cuh; see tree_attention_sm90.md for why it is built this way.
//
// A block has a producer warp, which walks over the block's pieces and copies KV tiles into two rings in
// shared memory, and two consumer warpgroups of 64 lines each. A consumer computes the scores of
// the next tile while the tensor cores still add up the values of this one.
#include "params/tree_attention_sm90.h"
#include "sm90.cuh"
#include "tree_attention.cuh"

namespace ddt::tree_attention {
namespace {

using namespace sm90;

constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr int CONSUMER_WARPS = CONSUMERS * WARPGROUP / 32;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;
// Lines of one consumer.
constexpr int LINES = 64;
constexpr int KEY_BOX = DDT_CUDA_TREE_ATTENTION_SM90_KEY_BOX_TOKENS;
constexpr int VALUE_BOX = DDT_CUDA_TREE_ATTENTION_SM90_VALUE_BOX_TOKENS;
static_assert(PANEL_COLUMNS == DDT_CUDA_TREE_ATTENTION_SM90_PANEL_COLUMNS);
// Registers per thread after the roles have parted; with 168 for all at first, these are as many.
constexpr int PRODUCER_REGISTERS = 56;
constexpr int CONSUMER_REGISTERS = 224;
// Named barriers: one per consumer, then one of both.
constexpr int CONSUMER_BARRIER = 1;
constexpr int BOTH_BARRIER = CONSUMER_BARRIER + CONSUMERS;
// All threads: mbarriers are ready.
constexpr int START_BARRIER = BOTH_BARRIER + 1;

constexpr int TILE = DDT_CUDA_TREE_ATTENTION_SM90_TILE_TOKENS;
constexpr int KEY_BOXES = TILE / KEY_BOX;
constexpr uint32_t ALL_BOXES = (1u << KEY_BOXES) - 1;
constexpr int WORDS = (TILE + 31) / 32;  // of a mask with a bit per token

// Shared memory. Queries are panel after panel. K and V tiles are box after box, as copied, and a box
// is panel after panel of its tokens: 8 keys, so that the atoms of a panel are at equal distances over
// the whole tile, as a descriptor wants them; 16 values, which are what one wgmma takes.
template <int DIM>
struct alignas(1024) Shared {
  static constexpr int STAGES = DIM == 256 ? 2 : 4;
  static constexpr int PANELS = DIM / PANEL_COLUMNS;
  static constexpr int QUERY_PANEL = LINES * PANEL_ROW_BYTES;
  static constexpr int KEY_PANEL = KEY_BOX * PANEL_ROW_BYTES;
  static constexpr int VALUE_PANEL = VALUE_BOX * PANEL_ROW_BYTES;
  static constexpr int TOKEN_BYTES = DIM * 2;
  static constexpr int TILE_BYTES = TILE * TOKEN_BYTES;
  static_assert(KEY_PANEL == ATOM_BYTES && VALUE_PANEL == 2 * ATOM_BYTES);

  uint8_t queries[CONSUMERS][PANELS * QUERY_PANEL];
  uint8_t keys[STAGES][TILE_BYTES];
  uint8_t values[STAGES][TILE_BYTES];
  // mbarriers: a stage has arrived, a stage has been read by both consumers
  uint64_t keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
  uint64_t pieces_full[2], pieces_empty[2];
  Piece pieces[2];
  // bit b: the tokens of key box b are in the cache
  uint32_t present[STAGES];
  // bits of V rows with an element that is not finite
  uint32_t nonfinite[WORDS];
};
static_assert(sizeof(Shared<256>) <= DDT_CUDA_TREE_ATTENTION_SM90_SHARED_BYTES);
static_assert(sizeof(Shared<128>) <= DDT_CUDA_TREE_ATTENTION_SM90_SHARED_BYTES);

// Where a walk over a ring is.
template <int STAGES>
struct Cursor {
  int stage = 0;
  int phase = 0;

  __device__ __forceinline__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void wait_full(const uint64_t *full) const {
    barrier_wait(shared_address(full + stage), phase);
  }
  // A fresh ring is empty.
  __device__ __forceinline__ void wait_empty(const uint64_t *empty) const {
    barrier_wait(shared_address(empty + stage), phase ^ 1);
  }
};

// Called by one warp.
template <int DIM>
__device__ __forceinline__ void produce(const ddt_cuda_tree_attention_sm90 &maps, Shared<DIM> &shared) {
  using S = Shared<DIM>;
  const Params &p = maps.attention;
  const int lane = threadIdx.x % 32;
  // a lane copies a box of keys, and every second one a box of values; further lanes only look up as well
  const int token = lane % KEY_BOXES * KEY_BOX;
  const int place = token * S::TOKEN_BYTES;
  const bool copies_keys = lane < KEY_BOXES, copies_values = copies_keys && token % VALUE_BOX == 0;

  Pieces pieces(p);
  Piece piece;
  Cursor<2> mail;
  Cursor<S::STAGES> at;
  named_barrier(START_BARRIER, THREADS);
  while (pieces.next(piece)) {
    // Of this lane's box, looked up between the copies of the tile before. The tensor maps fill boxes of block -1 with
    // zeros.
    const int num_tokens = visible_tokens(p, piece);
    const auto find = [&](int tile) {
      return find_token(p, piece.request_index, tile * TILE + token, num_tokens);
    };
    CachePlace next = find(piece.first_tile);

    mail.wait_empty(shared.pieces_empty);
    if (lane == 0) {
      shared.pieces[mail.stage] = piece;
      barrier_arrive(shared_address(shared.pieces_full + mail.stage));
    }
    mail.next();

#pragma unroll 1
    for (int tile = piece.first_tile; tile < piece.last_tile; tile++) {
      const CachePlace here = next;
      const uint32_t present = __ballot_sync(FULL_WARP, here.block >= 0) & ALL_BOXES;
      at.wait_empty(shared.keys_empty);
      uint32_t full = shared_address(shared.keys_full + at.stage);
      if (lane == 0) {
        shared.present[at.stage] = present;
        barrier_arrive_expect(full, S::TILE_BYTES);
      }
      __syncwarp();
      if (copies_keys) {
        copy_box(shared_address(shared.keys[at.stage] + place), &maps.key_map, 0, here.offset, 0, piece.kv_head,
                 here.block, full);
      }
      if (tile + 1 < piece.last_tile) next = find(tile + 1);
      at.wait_empty(shared.values_empty);
      full = shared_address(shared.values_full + at.stage);
      if (lane == 0) barrier_arrive_expect(full, S::TILE_BYTES);
      __syncwarp();
      if (copies_values) {
        copy_box(shared_address(shared.values[at.stage] + place), &maps.value_map, 0, here.offset, 0, piece.kv_head,
                 here.block, full);
      }
      at.next();
    }
  }
  mail.wait_empty(shared.pieces_empty);
  if (lane == 0) {
    shared.pieces[mail.stage].request_index = -1;
    barrier_arrive(shared_address(shared.pieces_full + mail.stage));
  }
}

// Brings what every block will wait for from memory to L2, while the producer finds out which of it is for this block.
// Called by the producer's idle warps.
template <int DIM>
__device__ __forceinline__ void prefetch(const Params &p) {
  constexpr int LINE_BYTES = 128, ROW_LINES = DIM * 2 / LINE_BYTES;
  constexpr int IDLE = WARPGROUP - 32;
  const int first = blockIdx.x * IDLE + threadIdx.x - 32, step = gridDim.x * IDLE;
  constexpr int ENTRIES = LINE_BYTES / sizeof(int32_t);
  const int32_t *table = static_cast<const int32_t *>(p.block_table.data);
  const int table_lines = ceil_div(p.max_blocks, ENTRIES);
  for (int i = first; i < p.tree.num_reqs * table_lines; i += step) {
    const int r = i / table_lines, entry = (i - r * table_lines) * ENTRIES;
    prefetch_l2(table + r * p.block_table.strides[0] + entry * p.block_table.strides[1]);
  }
  const char *query = static_cast<const char *>(p.query.data);
  for (int i = first; i < p.num_rows * p.num_heads * ROW_LINES; i += step) {
    const int line = i / ROW_LINES, row = line / p.num_heads, head = line - row * p.num_heads;
    prefetch_l2(query + 2 * (row * p.query.strides[0] + head * p.query.strides[1]) + i % ROW_LINES * LINE_BYTES);
  }
}

// The lines of one consumer warpgroup. Accumulators of m64nNk16: warp w and lane l hold lines 16 w + l / 4
// and 8 further, columns 2 * (l % 4) and the next one of every 8.
template <typename T, int DIM>
struct Consumer {
  using S = Shared<DIM>;
  static constexpr int SCORES = TILE / 2;
  static constexpr int CHUNKS = DIM / 8;  // of 16 bytes, of a row

  const Params &p;
  S &shared;
  Cursor<S::STAGES> key_at, value_at;
  Cursor<2> mail;
  float out[DIM / 2];
  float scores[SCORES];
  uint32_t weights[SCORES / 2];
  float top[2];
  float sum[2];  // of this lane's columns only
  float factor[2];

  __device__ __forceinline__ Consumer(const Params &p, S &shared) : p(p), shared(shared) {}

  __device__ __forceinline__ static int index() { return threadIdx.x / WARPGROUP - 1; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  // In the row tile.
  __device__ __forceinline__ static int first_line() {
    return index() * LINES + threadIdx.x % WARPGROUP / 32 * 16 + lane() / 4;
  }

  // One lane arrives for its warp, after the warp's wgmma have read the stage.
  __device__ __forceinline__ void release(uint64_t *empty, int stage) {
    __syncwarp();
    if (lane() == 0) barrier_arrive(shared_address(empty + stage));
  }

  // Read by the lane that arrives for the warp. Nearly all tiles are whole, and the shuffle without the vote
  // makes the kernel spill.
  __device__ __forceinline__ uint32_t present_boxes() const {
    uint32_t present = ALL_BOXES;
    if (lane() == 0) present = shared.present[key_at.stage];
    if (__all_sync(FULL_WARP, present == ALL_BOXES)) return ALL_BOXES;
    return __shfl_sync(FULL_WARP, present, 0);
  }

  // Each warp loads the 16 lines of its accumulators.
  __device__ __forceinline__ void load_queries(const Piece &piece) {
    // A negative scale becomes a sign of the queries, so that the largest product has the largest score.
    const uint32_t sign = p.score_scale < 0.0f ? 0x80008000u : 0u;
    const int first_line = index() * LINES + threadIdx.x % WARPGROUP / 32 * 16;
    // lane l finds line l % 16
    const int line = piece.first_line + first_line + lane() % 16, q = line / p.group;
    int64_t offset = -1;
    if (line < piece.request.num_lines) {
      offset = (piece.request.first_row + q) * p.query.strides[0] +
               (piece.kv_head * p.group + line - q * p.group) * p.query.strides[1];
    }
    // all loads at a time: a block does nothing else before it has its queries
    constexpr int ROWS_AT_ONCE = 32 / CHUNKS, LOADS = 16 / ROWS_AT_ONCE;
    const int chunk = lane() % CHUNKS, first_row = lane() / CHUNKS;
    const T *query = static_cast<const T *>(p.query.data) + chunk * 8;
    uint4 x[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int64_t start = __shfl_sync(FULL_WARP, offset, first_row + i * ROWS_AT_ONCE);
      x[i] = make_uint4(0, 0, 0, 0);
      if (start >= 0) x[i] = *reinterpret_cast<const uint4 *>(query + start);
    }
    // every warp has left the piece before
    named_barrier(CONSUMER_BARRIER + index(), WARPGROUP);
    uint8_t *queries = shared.queries[index()] + chunk / 8 * S::QUERY_PANEL;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int row = first_line % LINES + first_row + i * ROWS_AT_ONCE;
      *reinterpret_cast<uint4 *>(queries + panel_offset(row, chunk % 8)) =
          make_uint4(x[i].x ^ sign, x[i].y ^ sign, x[i].z ^ sign, x[i].w ^ sign);
    }
    publish_to_async_proxy();
    named_barrier(CONSUMER_BARRIER + index(), WARPGROUP);
  }

  __device__ __forceinline__ void start_scores() {
    const uint64_t a = descriptor_k_major(shared_address(shared.queries[index()]), ATOM_BYTES);
    const uint64_t b = descriptor_k_major(shared_address(shared.keys[key_at.stage]), KEY_BOX * S::TOKEN_BYTES);
    pin(scores);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
      const int in_panel = k % 4 * 32;
      wgmma_shared<T>(scores, a + ((k / 4 * S::QUERY_PANEL + in_panel) >> 4),
                      b + ((k / 4 * S::KEY_PANEL + in_panel) >> 4), k == 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_values() {
    const uint64_t b = descriptor_mn_major(shared_address(shared.values[value_at.stage]), ATOM_BYTES, S::VALUE_PANEL);
    pin(out);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < TILE / VALUE_BOX; k++) {
      wgmma_registers<T>(out, weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3],
                         b + (k * VALUE_BOX * S::TOKEN_BYTES >> 4));
    }
    wgmma_commit();
  }

  // The online softmax: scores become weights relative to the new maximum, `factor` is what older sums are worth.
  __device__ __forceinline__ void update(const Piece &piece, int token, uint32_t present, bool beyond) {
    // never 0, which would make NaN of -inf
    float unit = fmaxf(fabsf(p.score_scale), 1e-30f);
    if (p.softcap != 0.0f) {
      // tanh(x) = 1 - 2 / (e^2x + 1)
#pragma unroll
      for (int i = 0; i < SCORES; i++) scores[i] = 1.0f - __fdividef(2.0f, __expf(2.0f * unit * scores[i]) + 1.0f);
      unit = p.softcap;
    }
    if (beyond || present != ALL_BOXES) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const Line line(p, piece.request, piece.request_index, piece.first_line + first_line() + half * 8);
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
          // bits 0 to 3 to the lowest bits of the bytes, and from there to all bits
          const uint32_t in_cache = ((present >> (4 * w) & 15) * 0x00204081u & 0x01010101u) * 0xffu;
          const uint32_t bits = (line.mask(piece.request, token + 32 * w) & in_cache) >> (lane() % 4 * 2);
#pragma unroll
          for (int n = 0; n < 4 && 32 * w + 8 * n < TILE; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
              if (!(bits >> (n * 8 + i) & 1)) scores[(w * 4 + n) * 4 + half * 2 + i] = -INFINITY;
            }
          }
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float largest = -INFINITY;
#pragma unroll
      for (int i = half * 2; i < SCORES; i += 4) largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, 2));
      const float new_top = largest * unit <= top[half] + SLACK ? top[half] : largest * unit;
      // nothing seen yet: any finite number keeps the weights 0
      const float base = new_top == -INFINITY ? 0.0f : new_top;
      factor[half] = exp2f(top[half] - base);
      top[half] = new_top;
      float sums = 0.0f;
#pragma unroll
      for (int i = half * 2; i < SCORES; i += 4) {
#pragma unroll
        for (int j = i; j < i + 2; j++) {
          scores[j] = exp2_approx(scores[j] * unit - base);
          sums += scores[j];
        }
      }
      sum[half] = sum[half] * factor[half] + sums;
    }
  }

  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < SCORES / 2; i++) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
  }

  // A weight of 0 does not keep NaN out of a sum: takes rows of the V tile that have elements that are not finite out
  // of it, and adds them for the lines that do give them a weight. All tiles that not all lines see in full.
  __device__ __forceinline__ void scrub(const Piece &piece, int tile) {
    uint8_t *values = shared.values[value_at.stage];
    const int thread = threadIdx.x - WARPGROUP;
    const auto is_bad = [&](int i) {
      const uint4 x = *reinterpret_cast<const uint4 *>(values + i * 16);
      return not_finite(x.x) || not_finite(x.y) || not_finite(x.z) || not_finite(x.w);
    };
    const auto row_of = [](int i) { return i / (VALUE_BOX * CHUNKS) * VALUE_BOX + i / 8 % VALUE_BOX; };
    bool bad = false;
#pragma unroll 2
    for (int i = thread; i < S::TILE_BYTES / 16; i += CONSUMERS * WARPGROUP) bad |= is_bad(i);
    if (!named_barrier_or(BOTH_BARRIER, CONSUMERS * WARPGROUP, bad)) return;

    if (thread < WORDS) shared.nonfinite[thread] = 0;
    named_barrier(BOTH_BARRIER, CONSUMERS * WARPGROUP);
    for (int i = thread; i < S::TILE_BYTES / 16; i += CONSUMERS * WARPGROUP) {
      const int row = row_of(i);
      if (is_bad(i)) atomicOr(&shared.nonfinite[row / 32], 1u << row % 32);
    }
    named_barrier(BOTH_BARRIER, CONSUMERS * WARPGROUP);
    for (int i = thread; i < S::TILE_BYTES / 16; i += CONSUMERS * WARPGROUP) {
      const int row = row_of(i);
      if (!(shared.nonfinite[row / 32] >> row % 32 & 1)) continue;
      *reinterpret_cast<uint4 *>(values + i * 16) = make_uint4(0, 0, 0, 0);
    }
    publish_to_async_proxy();
    named_barrier(BOTH_BARRIER, CONSUMERS * WARPGROUP);
    for (int row = 0; row < TILE; row++) {
      if (shared.nonfinite[row / 32] >> row % 32 & 1) add_value(piece, tile * TILE + row, row);
    }
    named_barrier(BOTH_BARRIER, CONSUMERS * WARPGROUP);
  }

  // Adds one row of values, in global memory, for the lines that give it a weight.
  __device__ __forceinline__ void add_value(const Piece &piece, int token, int row) {
    float weight[2] = {0.0f, 0.0f};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t pair = 0;
#pragma unroll
      for (int k = 0; k < TILE / 8; k++) {
        pair |= weights[k / 2 * 4 + k % 2 * 2 + half] & -uint32_t(row / 8 == k);
      }
      pair = __shfl_sync(FULL_WARP, pair, lane() / 4 * 4 + row % 8 / 2);
      weight[half] = unpack(row % 2 ? pair >> 16 : pair & 0xffff);
    }
    if (!__any_sync(FULL_WARP, weight[0] != 0.0f || weight[1] != 0.0f)) return;
    const CachePlace place = find_token(p, piece.request_index, token, token + 1);
    const T *value = static_cast<const T *>(p.value_cache.data) + place.of(p.value_cache, piece.kv_head);
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float x = to_f32(value[n * 8 + lane() % 4 * 2 + i]);
        if (weight[0] != 0.0f) out[n * 4 + i] += weight[0] * x;
        if (weight[1] != 0.0f) out[n * 4 + 2 + i] += weight[1] * x;
      }
    }
  }

  // Bits of two elements are NaN or infinite: all exponent bits set.
  __device__ __forceinline__ static bool not_finite(uint32_t pair) {
    constexpr uint32_t EXPONENT = IS_BF16<T> ? 0x7f807f80u : 0x7c007c00u;
    constexpr uint32_t UNIT = IS_BF16<T> ? 0x00800080u : 0x04000400u;
    return (((pair & EXPONENT) + UNIT) & 0x80008000u) != 0;
  }

  __device__ __forceinline__ static uint32_t pack(float low, float high) {
    uint32_t bits;
    if constexpr (IS_BF16<T>) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    }
    return bits;
  }

  __device__ __forceinline__ static float unpack(uint32_t bits) {
    if constexpr (IS_BF16<T>) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }

  // Writes to `out` if the lines have seen all that they see, else a partial result.
  __device__ __forceinline__ void store(const Piece &piece) {
    const int column = lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float total = sum[half];
      total += __shfl_xor_sync(FULL_WARP, total, 1);
      total += __shfl_xor_sync(FULL_WARP, total, 2);
      const int line = piece.first_line + first_line() + half * 8;
      if (first_line() + half * 8 >= p.tile_rows || line >= piece.request.num_lines) continue;
      if (piece.whole) {
        const int row = line / p.group, head = piece.kv_head * p.group + line - row * p.group;
        const int64_t offset = (piece.request.first_row + row) * p.out.strides[0] + head * p.out.strides[1] + column;
        const float scale = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
        for (int n = 0; n < DIM / 8; n++) {
          store_pair(p.out, offset + n * 8, out[n * 4 + half * 2] * scale, out[n * 4 + half * 2 + 1] * scale);
        }
      } else {
        const int64_t slot = int64_t(piece.slot) * p.tile_rows;
        float *partial = p.partial_out + slot * DIM + partial_offset(DIM, first_line() + half * 8, column);
#pragma unroll
        for (int n = 0; n < DIM / 8; n += 2) {
          *reinterpret_cast<float4 *>(partial + n * 64) =
              make_float4(out[n * 4 + half * 2], out[n * 4 + half * 2 + 1], out[n * 4 + half * 2 + 4],
                          out[n * 4 + half * 2 + 5]);
        }
        if (column == 0) {
          reinterpret_cast<float2 *>(p.partial_stats)[slot + first_line() + half * 8] = make_float2(top[half], total);
        }
      }
    }
  }

  __device__ __forceinline__ static void store_pair(const ddt_cuda_view &view, int64_t offset, float a, float b) {
    switch (view.dtype) {
      case DDT_CUDA_F16:
        *reinterpret_cast<__half2 *>(static_cast<__half *>(view.data) + offset) = __floats2half2_rn(a, b);
        break;
      case DDT_CUDA_BF16:
        *reinterpret_cast<__nv_bfloat162 *>(static_cast<__nv_bfloat16 *>(view.data) + offset) =
            __floats2bfloat162_rn(a, b);
        break;
      default: *reinterpret_cast<float2 *>(static_cast<float *>(view.data) + offset) = make_float2(a, b);
    }
  }

  __device__ __forceinline__ void attend(const Piece &piece) {
    load_queries(piece);
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) out[i] = 0.0f;
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
    const int mask_free = shared_tokens(p, piece);
    const int last_tile = piece.last_tile;
    int tile = piece.first_tile;
    const auto beyond = [&](int tile) { return (tile + 1) * TILE > mask_free; };
    const auto scrub_if_needed = [&] {
      if (beyond(tile)) {
        value_at.wait_full(shared.values_full);
        scrub(piece, tile);
      }
    };

    key_at.wait_full(shared.keys_full);
    uint32_t present = present_boxes();
    start_scores();
    wgmma_wait<0>();
    pin(scores);
    release(shared.keys_empty, key_at.stage);
    key_at.next();
    update(piece, tile * TILE, present, beyond(tile));
    pack_weights();
    for (; tile + 1 < last_tile; tile++) {
      scrub_if_needed();
      key_at.wait_full(shared.keys_full);
      present = present_boxes();
      start_scores();
      value_at.wait_full(shared.values_full);
      start_values();
      wgmma_wait<1>();
      pin(scores);
      release(shared.keys_empty, key_at.stage);
      key_at.next();
      update(piece, (tile + 1) * TILE, present, beyond(tile + 1));
      wgmma_wait<0>();
      pin(out);
      release(shared.values_empty, value_at.stage);
      value_at.next();
      if (__any_sync(FULL_WARP, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) out[i] *= factor[i / 2 % 2];
      }
      pack_weights();
    }
    scrub_if_needed();
    value_at.wait_full(shared.values_full);
    start_values();
    wgmma_wait<0>();
    pin(out);
    release(shared.values_empty, value_at.stage);
    value_at.next();
    store(piece);
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      mail.wait_full(shared.pieces_full);
      const Piece &piece = shared.pieces[mail.stage];
      if (piece.request_index < 0) return;
      attend(piece);
      // every lane has read the piece
      barrier_arrive(shared_address(shared.pieces_empty + mail.stage));
      mail.next();
    }
  }
};

template <typename T, int DIM>
__device__ __forceinline__ void attend(const ddt_cuda_tree_attention_sm90 &p) {
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  Shared<DIM> &shared = *reinterpret_cast<Shared<DIM> *>(shared_memory);
  // not by the producer, which has the longest way to go
  if (threadIdx.x == WARPGROUP) {
    for (int i = 0; i < Shared<DIM>::STAGES; i++) {
      barrier_init(shared_address(shared.keys_full + i), 1);
      barrier_init(shared_address(shared.keys_empty + i), CONSUMER_WARPS);
      barrier_init(shared_address(shared.values_full + i), 1);
      barrier_init(shared_address(shared.values_empty + i), CONSUMER_WARPS);
    }
    for (int i = 0; i < 2; i++) {
      barrier_init(shared_address(shared.pieces_full + i), 1);
      barrier_init(shared_address(shared.pieces_empty + i), CONSUMERS * WARPGROUP);
    }
    barrier_init_fence();
    prefetch_tensor_map(&p.key_map);
    prefetch_tensor_map(&p.value_map);
  }
  __syncwarp();
  if (threadIdx.x < WARPGROUP) {
    lower_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32) {
      produce<DIM>(p, shared);
    } else {
      named_barrier_arrive(START_BARRIER, THREADS);
      prefetch<DIM>(p.attention);
    }
    let_next_kernel_start();
  } else {
    raise_registers<CONSUMER_REGISTERS>();
    named_barrier(START_BARRIER, THREADS);
    Consumer<T, DIM>(p.attention, shared).run();
  }
}

}  // namespace
}  // namespace ddt::tree_attention

#define DDT_ATTEND_SM90(dtype, T, DIM)                                                                         \
  extern "C" __global__ void __launch_bounds__(ddt::tree_attention::THREADS, 1)                                 \
      ddt_tree_attention_sm90_attend_##dtype##_##DIM(const __grid_constant__ ddt_cuda_tree_attention_sm90 p) {  \
    ddt::tree_attention::attend<T, DIM>(p);                                                                     \
  }
DDT_ATTEND_SM90(bf16, __nv_bfloat16, 256)
DDT_ATTEND_SM90(bf16, __nv_bfloat16, 128)
DDT_ATTEND_SM90(f16, __half, 128)
DDT_ATTEND_SM90(f16, __half, 256)
