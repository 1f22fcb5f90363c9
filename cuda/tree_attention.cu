// SPDX-License-Identifier: Apache-2.0
//
// Attention of tree nodes over a paged KV cache. See tree_attention.cuh for how work is cut,
// tree_attention.md for why.
#include "tree_attention.cuh"

namespace ddt::tree_attention {
namespace {

// ---- a line's result

// Writes two neighbouring elements of an output line.
__device__ __forceinline__ void store_pair(const ddt_cuda_view &out, int64_t offset, float a, float b) {
  switch (out.dtype) {
    case DDT_CUDA_F16:
      *reinterpret_cast<__half2 *>(static_cast<__half *>(out.data) + offset) = __floats2half2_rn(a, b);
      break;
    case DDT_CUDA_BF16: {
      __nv_bfloat16 *const pair = static_cast<__nv_bfloat16 *>(out.data) + offset;
      *reinterpret_cast<__nv_bfloat162 *>(pair) = __floats2bfloat162_rn(a, b);
      break;
    }
    default: *reinterpret_cast<float2 *>(static_cast<float *>(out.data) + offset) = make_float2(a, b);
  }
}

// ---- bf16 and f16 on tensor cores, after FlashAttention-2 (arXiv 2307.08691)
//
// One CTA works on a row tile with one warp per 16 lines. K and V tiles go through a ring of shared memory in the
// order K0 V0 K1 V1 ..., each stage with two mbarriers: `full`, that its tile has arrived, and `empty`, that all warps
// have read it. Warps take turns to load a whole tile. So there is no barrier of the whole CTA: warps
// drift apart, and the softmax of some overlaps with the matrix products of others.
// A row of a tile is cut into chunks of 16 bytes; chunk c of row r lies at c ^ (r % 8), so that
// the 8 rows that an ldmatrix reads at the same chunk lie in different banks.

template <typename T>
__device__ __forceinline__ uint32_t pack(float a, float b);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t &>(pair);
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float a, float b) {
  const __half2 pair = __floats2half2_rn(a, b);
  return reinterpret_cast<const uint32_t &>(pair);
}

// Whether one of two packed elements is NaN or infinite: all exponent bits set.
template <typename T>
__device__ __forceinline__ bool not_finite(uint32_t pair);
template <>
__device__ __forceinline__ bool not_finite<__nv_bfloat16>(uint32_t pair) {
  return (((pair & 0x7f807f80u) + 0x00800080u) & 0x80008000u) != 0;
}
template <>
__device__ __forceinline__ bool not_finite<__half>(uint32_t pair) {
  return (((pair & 0x7c007c00u) + 0x04000400u) & 0x80008000u) != 0;
}

template <int DIM>
struct Tiles {
  static constexpr int TOKENS = DIM == 256 ? DDT_CUDA_TREE_ATTENTION_TILE_TOKENS_256
                                           : DDT_CUDA_TREE_ATTENTION_TILE_TOKENS_128;
  static constexpr int WORDS = TOKENS / 32;      // of a mask with a bit per token
  static constexpr int CHUNKS = DIM / 8;         // of a row
  static constexpr int ROW_BYTES = DIM * 2;
  static constexpr int BYTES = TOKENS * ROW_BYTES;  // of a K or V tile

  __device__ static char *chunk(char *tile, int row, int chunk) {
    return tile + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
  }
};

__device__ __forceinline__ void barrier_init(uint64_t *barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t *barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
               : "memory");
}
// Arrives once the copies that this thread has started are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(uint64_t *barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t *barrier, uint32_t parity) {
  uint32_t done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
  } while (done == 0);
}

// A place in the ring, which everybody walks around in the same order.
struct Place {
  int stage;
  uint32_t phase;  // parity of the round

  __device__ Place plus(int tiles, int stages) const {
    const int to = stage + tiles;
    return to < stages ? Place{to, phase} : Place{to - stages, phase ^ 1};
  }
};

// Loads every `warps`-th tile of a piece, one per call. Blocks hold a multiple of GRANULE tokens; where
// the granules are is looked up by a lane each when the tile before has been loaded.
template <typename T, int DIM>
class Loader {
  using Tile = Tiles<DIM>;
  static constexpr int GRANULE = DDT_CUDA_TREE_ATTENTION_GRANULE, GRANULES = Tile::TOKENS / GRANULE;
  static constexpr int ROWS = 32 / Tile::CHUNKS;  // that a warp copies at a time

 public:
  // item: first K or V tile to load, K0 is 0, V0 is 1
  __device__ Loader(const Params &p, const Piece &piece, int item)
      : p_(p), request_(piece.request_index), kv_head_(piece.kv_head), item_(item) {
    num_items_ = 2 * (piece.last_tile - piece.first_tile);
    first_token_ = piece.first_tile * Tile::TOKENS;
    num_tokens_ = visible_tokens(p, piece);
    look_up();
  }

  __device__ int item() const { return item_; }

  // Loads the tile to its stage; afterwards the next one is `step` tiles later.
  __device__ void load(char *tile, uint64_t *full, uint32_t *valid, int step) {
    const int lane = threadIdx.x % 32, first_row = lane / Tile::CHUNKS, chunk = lane % Tile::CHUNKS;
    const ddt_cuda_view &cache = item_ % 2 == 0 ? p_.key_cache : p_.value_cache;
    const T *head = static_cast<const T *>(cache.data) + kv_head_ * cache.strides[1] + chunk * 8;
    const int left = num_tokens_ - (first_token_ + item_ / 2 * Tile::TOKENS);
    const int64_t step_bytes = ROWS * cache.strides[2];
    uint32_t bits[Tile::WORDS] = {};
#pragma unroll
    for (int g = 0; g < GRANULES; g++) {
      const int block = __shfl_sync(FULL_WARP, block_, g), offset = __shfl_sync(FULL_WARP, offset_, g);
      const bool exists = block >= 0 && block < p_.num_blocks;
      const int count = exists ? min(max(left - g * GRANULE, 0), GRANULE) : 0;
      bits[g / 2] |= ((1u << count) - 1) << (g % 2 * GRANULE);
      const T *source = head + (exists ? block : 0) * cache.strides[0] + (offset + first_row) * cache.strides[2];
#pragma unroll
      for (int row = 0; row < GRANULE; row += ROWS) {
        copy_async_16(Tile::chunk(tile, g * GRANULE + row + first_row, chunk), source, row + first_row < count);
        source += step_bytes;
      }
    }
    if (lane == 0) {
#pragma unroll
      for (int w = 0; w < Tile::WORDS; w++) valid[w] = bits[w];
      barrier_arrive(full);
    }
    barrier_arrive_after_copies(full);
    item_ += step;
    look_up();
  }

 private:
  __device__ void look_up() {
    const int lane = threadIdx.x % 32;
    const int token = first_token_ + item_ / 2 * Tile::TOKENS + lane * GRANULE;
    const int index = token / p_.block_size;
    offset_ = token - index * p_.block_size;
    block_ = -1;
    if (item_ < num_items_ && lane < GRANULES && token < num_tokens_) {
      const int32_t *table = static_cast<const int32_t *>(p_.block_table.data) + request_ * p_.block_table.strides[0];
      block_ = table[index * p_.block_table.strides[1]];
    }
  }

  const Params &p_;
  int request_, kv_head_;
  int item_, num_items_;
  int first_token_, num_tokens_;
  int block_, offset_;  // of granule `lane` of the tile
};

// Each warp loads the lines that it works on.
template <typename T, int DIM>
__device__ void load_queries(const Params &p, const Piece &piece, char *queries) {
  using Tile = Tiles<DIM>;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16;
  if (first >= p.tile_rows) return;
  // lane l finds line l
  const int line = piece.first_line + first + lane % 16, row = line / p.group;
  const int64_t head = piece.kv_head * p.group + line - row * p.group;
  int64_t offset = -1;
  if (line < piece.request.num_lines) {
    offset = (piece.request.first_row + row) * p.query.strides[0] + head * p.query.strides[1];
  }
#pragma unroll
  for (int i = 0; i < 16 * Tile::CHUNKS; i += 32) {
    const int tile_line = (i + lane) / Tile::CHUNKS, chunk = (i + lane) % Tile::CHUNKS;
    const int64_t start = __shfl_sync(FULL_WARP, offset, tile_line);
    const T *source = static_cast<const T *>(p.query.data) + max(start, int64_t(0)) + chunk * 8;
    copy_async_16(Tile::chunk(queries, first + tile_line, chunk), source, start >= 0);
  }
}

// The 16 lines of one warp: accumulators of m16n8k16. Lane l holds lines l / 4 and l / 4 + 8, and
// columns 2 * (l % 4) and the next one of every 8.
template <typename T, int DIM>
struct Lines {
  using Tile = Tiles<DIM>;
  float out[DIM / 8][4];
  float max[2];
  float sum[2];  // of this lane's columns only
  uint32_t weights[Tile::TOKENS / 16][4];  // of the tile at hand, as operand A

  __device__ Lines() {
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) out[n][i] = 0.0f;
    }
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }

  // Scores of a K tile, and with them the weights of its V tile.
  template <typename Mask>
  __device__ void attend_keys(const Params &p, char *queries, char *keys, bool masked, Mask mask) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float scores[Tile::TOKENS / 8][4] = {};
    // rows of both tiles: their number % 8 is that of the lane
    const int query_row = warp * 16 + lane % 16, key_row = lane % 8 + lane / 16 * 8;
    const char *query = queries + query_row * Tile::ROW_BYTES;
    const char *key = keys + key_row * Tile::ROW_BYTES;
    const int query_chunk = lane / 16, key_chunk = lane / 8 % 2, flip = lane % 8;
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
      uint32_t a[4];
      load_matrix_x4(a, query + (k / 4 * 8 + ((k % 4 * 2 + query_chunk) ^ flip)) * 16);
#pragma unroll
      for (int n = 0; n < Tile::TOKENS / 16; n++) {
        uint32_t b[4];
        load_matrix_x4(b, key + n * 16 * Tile::ROW_BYTES + (k / 4 * 8 + ((k % 4 * 2 + key_chunk) ^ flip)) * 16);
        mma_m16n8k16<T>(scores[2 * n], a, b[0], b[1]);
        mma_m16n8k16<T>(scores[2 * n + 1], a, b[2], b[3]);
      }
    }
    if (p.softcap == 0.0f) {
#pragma unroll
      for (int n = 0; n < Tile::TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) scores[n][i] *= p.score_scale;
      }
    } else {
#pragma unroll
      for (int n = 0; n < Tile::TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) scores[n][i] = score_of(p, scores[n][i]);
      }
    }
    if (masked) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int w = 0; w < Tile::WORDS; w++) {
          const uint32_t bits = mask(half, w) >> (lane % 4 * 2);
#pragma unroll
          for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
              if (!(bits >> (n * 8 + i) & 1)) scores[w * 4 + n][half * 2 + i] = -INFINITY;
            }
          }
        }
      }
    }
    update(scores);
  }

  // Adds the weighted values of a V tile.
  __device__ void attend_values(char *values) {
    const int lane = threadIdx.x % 32;
    const char *value = values + lane % 16 * Tile::ROW_BYTES;
    const int value_chunk = lane / 16, flip = lane % 8;
#pragma unroll
    for (int k = 0; k < Tile::TOKENS / 16; k++) {
#pragma unroll
      for (int n = 0; n < DIM / 16; n++) {
        uint32_t b[4];
        load_matrix_x4_transposed(
            b, value + k * 16 * Tile::ROW_BYTES + (n / 4 * 8 + ((n % 4 * 2 + value_chunk) ^ flip)) * 16);
        mma_m16n8k16<T>(out[2 * n], weights[k], b[0], b[1]);
        mma_m16n8k16<T>(out[2 * n + 1], weights[k], b[2], b[3]);
      }
    }
  }

  // Adds one row of values, in global memory, for the lines that give it a weight.
  __device__ void attend_value(int token, const T *value) {
    const int lane = threadIdx.x % 32;
    const int owner = lane / 4 * 4 + token % 8 / 2;
    float weight[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t pair = 0;
#pragma unroll
      for (int k = 0; k < Tile::TOKENS / 16; k++) {
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
          if (token / 8 == 2 * k + upper) pair = weights[k][half + 2 * upper];
        }
      }
      pair = __shfl_sync(FULL_WARP, pair, owner);
      const uint16_t bits = token % 2 == 0 ? pair & 0xffff : pair >> 16;
      weight[half] = to_f32(reinterpret_cast<const T &>(bits));
    }
#pragma unroll
    for (int n = 0; n < DIM / 8; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float x = to_f32(value[n * 8 + lane % 4 * 2 + i]);
        if (weight[0] != 0.0f) out[n][i] += weight[0] * x;
        if (weight[1] != 0.0f) out[n][2 + i] += weight[1] * x;
      }
    }
  }

 private:
  // The online softmax: brings sums and outputs to the new maximum, scores become weights.
  __device__ void update(float (&scores)[Tile::TOKENS / 8][4]) {
    float factor[2];
    bool changed = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < Tile::TOKENS / 8; n++) top = fmaxf(top, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
      top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 1));
      top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, 2));
      if (top <= max[half] + SLACK) top = max[half];
      // nothing seen yet: any finite number keeps the weights 0
      const float base = top == -INFINITY ? 0.0f : top;
      factor[half] = exp2f(max[half] - base);
      changed |= top > max[half];
      max[half] = top;
      float sums = 0.0f;
#pragma unroll
      for (int n = 0; n < Tile::TOKENS / 8; n++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          scores[n][half * 2 + i] = exp2_approx(scores[n][half * 2 + i] - base);
          sums += scores[n][half * 2 + i];
        }
      }
      sum[half] = sum[half] * factor[half] + sums;
    }
    if (__any_sync(FULL_WARP, changed)) {
#pragma unroll
      for (int n = 0; n < DIM / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) out[n][i] *= factor[i / 2];
      }
    }
#pragma unroll
    for (int k = 0; k < Tile::TOKENS / 16; k++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float *pair = &scores[2 * k + i / 2][i % 2 * 2];
        weights[k][i] = pack<T>(pair[0], pair[1]);
      }
    }
  }
};

// A weight of 0 does not keep NaN and infinity out of a sum. So the tokens of a V tile with such an element are taken
// out of the tile, and added from global memory to the lines that see them. Called by the whole CTA; `tokens` has
// room for a bit per token.
template <typename T, int DIM>
__device__ void keep_out_nonfinite(const Params &p, const Piece &piece, int first_token, char *values, uint32_t *tokens,
                                   bool has_lines, Lines<T, DIM> &lines) {
  using Tile = Tiles<DIM>;
  const int threads = blockDim.x;
  constexpr int CHUNKS = Tile::TOKENS * Tile::CHUNKS;
  const auto is_out = [&](int i) {
    const uint4 x = reinterpret_cast<const uint4 *>(values)[i];
    return not_finite<T>(x.x) || not_finite<T>(x.y) || not_finite<T>(x.z) || not_finite<T>(x.w);
  };
  bool any = false;
  for (int i = threadIdx.x; i < CHUNKS; i += threads) any |= is_out(i);
  if (!__syncthreads_or(any)) return;
  if (threadIdx.x < Tile::WORDS) tokens[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < CHUNKS; i += threads) {
    const int token = i / Tile::CHUNKS;
    if (is_out(i)) atomicOr(&tokens[token / 32], 1u << token % 32);
  }
  __syncthreads();
  const auto is_set = [&](int token) { return (tokens[token / 32] >> token % 32 & 1) != 0; };
  for (int i = threadIdx.x; i < CHUNKS; i += threads) {
    if (is_set(i / Tile::CHUNKS)) reinterpret_cast<uint4 *>(values)[i] = make_uint4(0, 0, 0, 0);
  }
  if (has_lines) {
    for (int token = 0; token < Tile::TOKENS; token++) {
      if (!is_set(token)) continue;
      const CachePlace place = find_token(p, piece.request_index, first_token + token, piece.request.num_tokens);
      lines.attend_value(token, static_cast<const T *>(p.value_cache.data) + place.of(p.value_cache, piece.kv_head));
    }
  }
  __syncthreads();
}

// Writes the lines of this warp: to `out` if they have seen all that they see, else as a partial result.
template <typename T, int DIM>
__device__ void store(const Params &p, const Piece &piece, Lines<T, DIM> &lines, int first_line) {
  const int column = threadIdx.x % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum = lines.sum[half];
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    const int line = first_line + half * 8;
    if (line - piece.first_line >= p.tile_rows || line >= piece.request.num_lines) continue;
    if (piece.whole) {
      const int row = line / p.group, head = piece.kv_head * p.group + line - row * p.group;
      const int64_t offset = (piece.request.first_row + row) * p.out.strides[0] + head * p.out.strides[1] + column;
      const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
      for (int n = 0; n < DIM / 8; n++) {
        store_pair(p.out, offset + n * 8, lines.out[n][half * 2] * scale, lines.out[n][half * 2 + 1] * scale);
      }
    } else {
      const int64_t slot = int64_t(piece.slot) * p.tile_rows;
      const int tile_line = line - piece.first_line;
      float *out = p.partial_out + slot * DIM + partial_offset(DIM, tile_line, column);
#pragma unroll
      for (int n = 0; n < DIM / 8; n += 2) {
        *reinterpret_cast<float4 *>(out + n * 64) =
            make_float4(lines.out[n][half * 2], lines.out[n][half * 2 + 1], lines.out[n + 1][half * 2],
                        lines.out[n + 1][half * 2 + 1]);
      }
      if (column == 0) {
        reinterpret_cast<float2 *>(p.partial_stats)[slot + tile_line] = make_float2(lines.max[half], sum);
      }
    }
  }
}

template <typename T, int DIM>
__device__ void attend(const Params &p) {
  using Tile = Tiles<DIM>;
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t full[DDT_CUDA_TREE_ATTENTION_MAX_STAGES], empty[DDT_CUDA_TREE_ATTENTION_MAX_STAGES];
  __shared__ uint32_t valid[DDT_CUDA_TREE_ATTENTION_MAX_STAGES][Tile::WORDS];
  __shared__ uint32_t nonfinite[Tile::WORDS];
  char *queries = shared, *tiles = shared + p.tile_rows * Tile::ROW_BYTES;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, ahead = p.stages - 1;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < p.stages; stage++) {
      barrier_init(&full[stage], 33);  // the copies of 32 lanes, and what lane 0 stores
      barrier_init(&empty[stage], warps);
    }
  }
  Pieces pieces(p);
  Piece piece;
  __syncthreads();

  Place place = {0, 0};  // of the tile that this warp reads next
  while (pieces.next(piece)) {
    const int num_items = 2 * (piece.last_tile - piece.first_tile);
    Loader<T, DIM> loader(p, piece, warp);
    const auto load = [&](Place to) {
      barrier_wait(&empty[to.stage], to.phase ^ 1);
      loader.load(tiles + to.stage * Tile::BYTES, &full[to.stage], valid[to.stage], warps);
    };
    while (loader.item() < min(ahead, num_items)) load(place.plus(loader.item(), p.stages));
    load_queries<T, DIM>(p, piece, queries);
    copy_async_commit();

    const int mask_free = shared_tokens(p, piece);
    const int first_line = piece.first_line + warp * 16 + lane / 4;
    const bool has_lines = warp * 16 < p.tile_rows && piece.first_line + warp * 16 < piece.request.num_lines;
    Lines<T, DIM> lines;
    int item = 0;
    const auto arrive = [&] {
      if (item + ahead == loader.item() && loader.item() < num_items) load(place.plus(ahead, p.stages));
      barrier_wait(&full[place.stage], place.phase);
    };
    const auto leave = [&] {
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[place.stage]);
      place = place.plus(1, p.stages);
      item++;
    };
    copy_async_wait<0>();
    __syncwarp();
    for (int tile = piece.first_tile; tile < piece.last_tile; tile++) {
      const int token = tile * Tile::TOKENS;
      const bool beyond = token + Tile::TOKENS > mask_free;
      arrive();
      if (has_lines) {
        bool masked = beyond;
        uint32_t present[Tile::WORDS];
#pragma unroll
        for (int w = 0; w < Tile::WORDS; w++) {
          present[w] = valid[place.stage][w];
          masked |= present[w] != ~0u;
        }
        lines.attend_keys(p, queries, tiles + place.stage * Tile::BYTES, masked, [&](int half, int w) {
          const Line line(p, piece.request, piece.request_index, first_line + half * 8);
          return line.mask(piece.request, token + 32 * w) & present[w];
        });
      }
      leave();

      arrive();
      char *values = tiles + place.stage * Tile::BYTES;
      if (beyond) keep_out_nonfinite<T, DIM>(p, piece, token, values, nonfinite, has_lines, lines);
      if (has_lines) lines.attend_values(values);
      leave();
    }
    let_next_kernel_start();
    store(p, piece, lines, first_line);
  }
}

// ---- every dtype, stride and head dim: f32 on CUDA cores
//
// The same work items with small tiles. A warp owns LINES_PER_WARP lines; in the scores a lane is a token,
// in the outputs a lane owns every 32nd column.

// Fills a [ROWS][PITCH] f32 tile from strided elements; `locate(row)` is the offset of a row, -1 for zeros.
template <int ROWS, int DIM, int PITCH, typename Locate>
__device__ void load_tile(float *tile, const ddt_cuda_view &view, int64_t row_stride, int64_t element_stride,
                          Locate locate) {
  // neighbouring threads read along the smaller stride
  const bool by_element = element_stride <= row_stride;
  for (int i = threadIdx.x; i < ROWS * DIM; i += blockDim.x) {
    const int row = by_element ? i / DIM : i % ROWS, element = by_element ? i % DIM : i / ROWS;
    const int64_t offset = locate(row);
    tile[row * PITCH + element] = offset < 0 ? 0.0f : load_f32(view, offset + element * element_stride);
  }
}

template <int DIM>
__device__ void attend_any(const Params &p) {
  constexpr int ROWS = DDT_CUDA_TREE_ATTENTION_GENERIC_TILE_ROWS, TOKENS = DDT_CUDA_TREE_ATTENTION_GENERIC_TILE_TOKENS;
  static_assert(TOKENS == 32, "a lane is a token");
  constexpr int WARPS = 8, LINES = ROWS / WARPS, COLUMNS = DIM / 32, KEY_PITCH = DIM + 1;
  extern __shared__ __align__(128) float tiles[];
  __shared__ int64_t key_offsets[TOKENS], value_offsets[TOKENS];
  float *queries = tiles, *keys = queries + ROWS * DIM, *values = keys + TOKENS * KEY_PITCH;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  Pieces pieces(p);
  Piece piece;
  while (pieces.next(piece)) {
    const Request &request = piece.request;
    __syncthreads();
    load_tile<ROWS, DIM, DIM>(queries, p.query, p.query.strides[1], p.query.strides[2], [&](int row) {
      const int line = piece.first_line + row;
      if (line >= request.num_lines) return int64_t(-1);
      return (request.first_row + line / p.group) * p.query.strides[0] +
             (piece.kv_head * p.group + line % p.group) * p.query.strides[1];
    });
    float out[LINES][COLUMNS] = {}, max[LINES], sum[LINES] = {};
#pragma unroll
    for (int i = 0; i < LINES; i++) max[i] = -INFINITY;
    const int num_tokens = visible_tokens(p, piece);

    for (int tile = piece.first_tile; tile < piece.last_tile; tile++) {
      __syncthreads();
      if (threadIdx.x < TOKENS) {
        const CachePlace place = find_token(p, piece.request_index, tile * TOKENS + threadIdx.x, num_tokens);
        key_offsets[threadIdx.x] = place.block < 0 ? -1 : place.of(p.key_cache, piece.kv_head);
        value_offsets[threadIdx.x] = place.block < 0 ? -1 : place.of(p.value_cache, piece.kv_head);
      }
      __syncthreads();
      load_tile<TOKENS, DIM, KEY_PITCH>(keys, p.key_cache, p.key_cache.strides[2], p.key_cache.strides[3],
                                        [&](int row) { return key_offsets[row]; });
      load_tile<TOKENS, DIM, DIM>(values, p.value_cache, p.value_cache.strides[2], p.value_cache.strides[3],
                                  [&](int row) { return value_offsets[row]; });
      const uint32_t present = __ballot_sync(FULL_WARP, key_offsets[lane] >= 0);
      __syncthreads();

      float scores[LINES] = {};
      const float *query = queries + warp * LINES * DIM, *key = keys + lane * KEY_PITCH;
#pragma unroll 4
      for (int d = 0; d < DIM; d += 4) {
        const float k[4] = {key[d], key[d + 1], key[d + 2], key[d + 3]};
#pragma unroll
        for (int i = 0; i < LINES; i++) {
          const float4 q = *reinterpret_cast<const float4 *>(query + i * DIM + d);
          scores[i] += q.x * k[0] + q.y * k[1] + q.z * k[2] + q.w * k[3];
        }
      }
      uint32_t masks[LINES];
#pragma unroll
      for (int i = 0; i < LINES; i++) {
        const Line line(p, request, piece.request_index, piece.first_line + warp * LINES + i);
        masks[i] = line.mask(request, tile * TOKENS) & present;
        const bool visible = masks[i] >> lane & 1;
        const float score = visible ? score_of(p, scores[i]) : -INFINITY;
        const float top = fmaxf(max[i], warp_max(score));
        const float factor = top == -INFINITY ? 1.0f : exp2f(max[i] - top);
        max[i] = top;
        scores[i] = visible ? exp2f(score - top) : 0.0f;
        sum[i] = sum[i] * factor + scores[i];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) out[i][c] *= factor;
      }
      for (int token = 0; token < TOKENS; token++) {
        float value[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) value[c] = values[token * DIM + c * 32 + lane];
#pragma unroll
        for (int i = 0; i < LINES; i++) {
          const float weight = __shfl_sync(FULL_WARP, scores[i], token);
          if (masks[i] >> token & 1) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) out[i][c] += weight * value[c];
          }
        }
      }
    }

#pragma unroll
    for (int i = 0; i < LINES; i++) {
      const float total = warp_sum(sum[i]);
      const int row = warp * LINES + i, line = piece.first_line + row;
      if (line >= request.num_lines) continue;
      if (piece.whole) {
        const int64_t offset = (request.first_row + line / p.group) * p.out.strides[0] +
                               (piece.kv_head * p.group + line % p.group) * p.out.strides[1];
        const float scale = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          store_f32(p.out, offset + (c * 32 + lane) * p.out.strides[2], out[i][c] * scale);
        }
      } else {
        const int64_t slot = int64_t(piece.slot) * ROWS;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          p.partial_out[slot * DIM + partial_offset(DIM, row, c * 32 + lane)] = out[i][c];
        }
        if (lane == 0) reinterpret_cast<float2 *>(p.partial_stats)[slot + row] = make_float2(max[i], total);
      }
    }
  }
}

// ---- combine

// What a thread, and then a team, has of a line: 4 columns and the sum of the weights, relative to 2^top.
struct Sums {
  float4 columns;
  float total;
  float top;

  // Brings the sums to a maximum that is not below their own.
  __device__ void raise(float new_top) {
    // nothing seen yet: any finite number keeps the sums 0
    const float factor = exp2f(top - (new_top == -INFINITY ? 0.0f : new_top));
    columns.x *= factor;
    columns.y *= factor;
    columns.z *= factor;
    columns.w *= factor;
    total *= factor;
    top = new_top;
  }
  __device__ void add(const float4 &x, float weight, float sum) {
    columns.x += weight * x.x;
    columns.y += weight * x.y;
    columns.z += weight * x.z;
    columns.w += weight * x.w;
    total += weight * sum;
  }
};

// A CTA combines heads of a row. A team of threads takes a head: a thread adds up 4 columns of every `parts`-th
// piece; what the threads of a column have is added up in shared memory.
__device__ void combine(const Params &p) {
  constexpr int THREADS = DDT_CUDA_TREE_ATTENTION_COMBINE_THREADS;
  // pieces that a thread loads at a time
  constexpr int BATCH = 6;
  struct Owner {
    Request request;
    int row_tiles, kv_tiles;
    int64_t first_item;
    Schedule schedule;
  };
  __shared__ Sums sums[THREADS];
  __shared__ __align__(alignof(Owner)) char owner_memory[sizeof(Owner)];
  Owner &owner = reinterpret_cast<Owner &>(owner_memory);
  const int row = blockIdx.x;
  // only inputs of the call, which the attend kernel does not write either
  if (threadIdx.x < 32) {
    const Batch batch(p);
    const auto owns = [&](int r, int64_t, int64_t) { return p.query_start[r] <= row && row < p.query_start[r + 1]; };
    int64_t first_item = 0;
    Work work(p, p.tree.num_reqs);
    batch.find(owns, first_item, work);
    if (threadIdx.x == 0) {
      owner = {work.request, work.row_tiles, work.kv_tiles, first_item, batch.schedule()};
    }
  }
  __syncthreads();
  const Request request = owner.request;
  if (request.num_lines == 0) return;
  const Schedule schedule = owner.schedule;
  const int tiles = owner.kv_tiles, slot_floats = p.tile_rows * p.head_dim;
  const int columns = p.head_dim / 4, parts = p.combine_parts, teams = THREADS / (columns * parts);
  const int column = threadIdx.x % columns, part = threadIdx.x / columns % parts;
  const int team = threadIdx.x / (columns * parts), q = row - request.first_row;
  const bool idle = q * p.group >= request.num_lines;
  const float2 *stats = reinterpret_cast<const float2 *>(p.partial_stats);
  wait_for_previous_kernel();

  for (int first_head = blockIdx.y * teams; first_head < p.num_heads; first_head += gridDim.y * teams) {
    const int head = first_head + team;
    bool writes = head < p.num_heads;
    Sums mine = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), 0.0f, -INFINITY};
    if (writes && !idle) {
      const int kv_head = head / p.group, line = q * p.group + head - kv_head * p.group;
      const int tile = line / p.tile_rows, tile_line = line - tile * p.tile_rows;
      const int64_t first = owner.first_item + (int64_t(kv_head) * owner.row_tiles + tile) * tiles;
      const int first_cta = schedule.cta_of(first), last_cta = schedule.cta_of(first + tiles - 1);
      writes = first_cta != last_cta;  // else by the attend kernel
      // columns 16 * (column / 4) + 2 * (column % 4), the next one, and both 8 further
      const float *outs =
          p.partial_out + partial_offset(p.head_dim, tile_line, column / 4 * 16 + column % 4 * 2);
      for (int cta = writes ? first_cta + part : last_cta + 1; cta <= last_cta; cta += BATCH * parts) {
        float2 stat[BATCH];
        float4 x[BATCH];
        float top = mine.top;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          stat[i] = make_float2(-INFINITY, 0.0f);
          x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          const int from = cta + i * parts;
          if (from <= last_cta) {
            // the first piece starts its unit, the others do not
            const int slot = 2 * from + (from == first_cta);
            stat[i] = stats[slot * p.tile_rows + tile_line];
            x[i] = *reinterpret_cast<const float4 *>(outs + slot * slot_floats);
          }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) top = fmaxf(top, stat[i].x);
        mine.raise(top);
        const float base = top == -INFINITY ? 0.0f : top;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
          if (stat[i].y != 0.0f) mine.add(x[i], exp2f(stat[i].x - base), stat[i].y);
        }
      }
    }
    if (parts > 1) {
      __syncthreads();  // the heads before have been read
      sums[threadIdx.x] = mine;
      __syncthreads();
      if (part == 0) {
        float top = mine.top;
        for (int i = 1; i < parts; i++) top = fmaxf(top, sums[threadIdx.x + i * columns].top);
        mine.raise(top);
        for (int i = 1; i < parts; i++) {
          Sums other = sums[threadIdx.x + i * columns];
          other.raise(top);
          mine.add(other.columns, 1.0f, other.total);
        }
      }
    }
    if (!writes || part > 0) continue;
    const float scale = mine.total == 0.0f ? 0.0f : 1.0f / mine.total;
    const int64_t step = p.out.strides[2];
    const int64_t offset =
        row * p.out.strides[0] + head * p.out.strides[1] + (column / 4 * 16 + column % 4 * 2) * step;
    const float4 x = mine.columns;
    if (p.out_has_pairs) {
      store_pair(p.out, offset, x.x * scale, x.y * scale);
      store_pair(p.out, offset + 8, x.z * scale, x.w * scale);
    } else {
      store_f32(p.out, offset, x.x * scale);
      store_f32(p.out, offset + step, x.y * scale);
      store_f32(p.out, offset + 8 * step, x.z * scale);
      store_f32(p.out, offset + 9 * step, x.w * scale);
    }
  }
}

}  // namespace
}  // namespace ddt::tree_attention

#define DDT_ATTEND(dtype, T, DIM)                                                              \
  extern "C" __global__ void __launch_bounds__(256, 1)                                         \
      ddt_tree_attention_attend_##dtype##_##DIM(const __grid_constant__ ddt_cuda_tree_attention p) { \
    ddt::tree_attention::attend<T, DIM>(p);                                                    \
  }
DDT_ATTEND(bf16, __nv_bfloat16, 64)
DDT_ATTEND(bf16, __nv_bfloat16, 128)
DDT_ATTEND(bf16, __nv_bfloat16, 256)
DDT_ATTEND(f16, __half, 64)
DDT_ATTEND(f16, __half, 128)
DDT_ATTEND(f16, __half, 256)

#define DDT_ATTEND_ANY(DIM)                                                                    \
  extern "C" __global__ void __launch_bounds__(256, 1)                                         \
      ddt_tree_attention_attend_any_##DIM(const __grid_constant__ ddt_cuda_tree_attention p) { \
    ddt::tree_attention::attend_any<DIM>(p);                                                   \
  }
DDT_ATTEND_ANY(32)
DDT_ATTEND_ANY(64)
DDT_ATTEND_ANY(128)
DDT_ATTEND_ANY(256)

extern "C" __global__ void __launch_bounds__(DDT_CUDA_TREE_ATTENTION_COMBINE_THREADS, 3)
    ddt_tree_attention_combine(const __grid_constant__ ddt_cuda_tree_attention p) {
  ddt::tree_attention::combine(p);
}
