// SPDX-License-Identifier: Apache-2.0
//
// What the kernels of tree_attention share: how work is cut, what a line sees, partial results.
//
// Work. The query heads of one KV head at all rows of a request are its *lines*: line
// `row * group + head in group`. A *unit* is a tile of tile_rows lines of one request and KV head; it
// attends to the request's KV in tiles of tile_tokens tokens from token 0 on. Work items are pairs (unit, KV tile),
// numbered by request, then KV head, row tile and KV tile; all units of a request have the same number
// of KV tiles. The attend kernel's CTAs take equal contiguous spans of the items, found from
// seq_lens in the kernel (`Schedule`), so mixed lengths balance and a captured graph stays valid. CTAs that would get
// less than min_tiles items stay idle, which keeps short contexts from being split too finely.
//
// Partial results. A CTA walks over its span in *pieces*, one for each unit that it meets. A piece
// that is a whole unit goes straight to `out`. Any other leaves its unnormalised outputs and their
// (exponent of 2 that weights are relative to, sum) per line in the workspace, at slot
// `2 * cta + (piece starts where its unit starts)`:
// a CTA has at most one piece that starts inside a unit and at most one that ends inside one. A line
// that saw nothing has exponent -inf, sum 0 and any output. The combine kernel computes the same schedule, finds
// the pieces of every row with it, and also writes the zeros of idle rows.
#pragma once

#include "common.cuh"
#include "params/tree_attention.h"

namespace ddt::tree_attention {

using Params = ddt_cuda_tree_attention;

// One request with every device value clamped to what is safe.
struct Request {
  int first_row;
  int num_lines;    // of the rows that attend: those before the root, and nodes
  int prefix_rows;  // rows before the root
  int root_token;   // KV token of the root: the tokens that every node sees
  int num_tokens;   // one past the last token that a row may see
};

__device__ __forceinline__ Request load_request(const Params &p, int r) {
  // all loads before the first decision: their latencies overlap
  const RequestRows rows = request_rows(p.query_start, p.tree, r, p.num_rows);
  const int prefix_rows = p.prefix_rows == nullptr ? 0 : p.prefix_rows[r], seq_len = p.seq_lens[r];
  if (rows.num_nodes == 0) return {rows.start, 0, 0, 0, 0};
  const int num_rows = rows.end - rows.start;
  const int prefix = min(max(prefix_rows, 0), num_rows - rows.num_nodes);
  const int root_token = max(seq_len, num_rows) - num_rows + prefix;
  const int64_t capacity = int64_t(p.max_blocks) * p.block_size;
  const int num_tokens = static_cast<int>(min(int64_t(root_token + rows.num_nodes), capacity));
  return {rows.start, (prefix + rows.num_nodes) * p.group, prefix, root_token, num_tokens};
}

// Of numbers that are not negative; unsigned divisions are half as many instructions.
__device__ __forceinline__ int div(int a, int b) { return static_cast<int>(uint32_t(a) / uint32_t(b)); }
__device__ __forceinline__ int ceil_div(int a, int b) { return div(a + b - 1, b); }

// The work items of one request.
struct Work {
  Request request;
  int row_tiles, kv_tiles;

  // None from the last request on.
  __device__ Work(const Params &p, int r) : request{}, row_tiles(0), kv_tiles(1) {
    if (r >= p.tree.num_reqs) return;
    request = load_request(p, r);
    row_tiles = ceil_div(request.num_lines, p.tile_rows);
    // tile_tokens is a power of two; at least 1, so that every unit is written even if the block table holds no token
    kv_tiles = max((request.num_tokens + p.tile_tokens - 1) >> (__ffs(p.tile_tokens) - 1), 1);
  }

  __device__ int units(const Params &p) const { return p.num_kv_heads * row_tiles; }
  __device__ int64_t items(const Params &p) const { return int64_t(units(p)) * kv_tiles; }

  // What a lane of the warp has.
  __device__ Work of_lane(int lane) const {
    const auto get = [&](int x) { return __shfl_sync(FULL_WARP, x, lane); };
    Work work = *this;
    work.request = {get(request.first_row), get(request.num_lines), get(request.prefix_rows), get(request.root_token),
                    get(request.num_tokens)};
    work.row_tiles = get(row_tiles);
    work.kv_tiles = get(kv_tiles);
    return work;
  }
};

// Which CTA has which work items: those from cta * num_items / num_ctas on.
struct Schedule {
  int64_t num_items;
  int num_ctas;  // that have work

  __device__ Schedule(const Params &p, int64_t items, int units) : num_items(items) {
    // At least min_tiles items for each, and as many for each unit if that costs few CTAs: then no
    // CTA has to start twice.
    const int enough = p.num_ctas * p.min_tiles;
    const int ctas = items >= enough ? p.num_ctas : max(div(static_cast<int>(items), p.min_tiles), 1);
    const int even = units == 0 ? 0 : div(ctas, units) * units;
    num_ctas = 16 * (ctas - even) <= ctas ? even : ctas;
  }

  __device__ int64_t begin_of(int cta) const { return cta * num_items / num_ctas; }
  __device__ int cta_of(int64_t item) const { return static_cast<int>(((item + 1) * num_ctas - 1) / num_items); }
};

// The work of all requests. A warp adds it up: lanes take a request each, 32 at a time; mostly there are no more.
//
// A kernel starts with this, when its instructions are as cold as its data. So there is as little code as possible on
// the way of a batch of one request: loops are not unrolled, and nothing is computed twice.
class Batch {
 public:
  __device__ explicit Batch(const Params &p)
      : p_(p), mine_(p, lane()), end_(sum_up_to_lane(mine_.items(p))), schedule_(add_up()) {}

  __device__ const Schedule &schedule() const { return schedule_; }

  // The first request that `owns(request, its first item, its items)` says yes to, -1 if none; its first item and work.
  template <typename Owns>
  __device__ int find(Owns owns, int64_t &first_item, Work &work) const {
    Work mine = mine_;
    int64_t end = end_, passed = 0;
#pragma unroll 1
    for (int base = 0; base < p_.tree.num_reqs; base += 32) {
      if (base > 0) {
        mine = Work(p_, base + lane());
        end = sum_up_to_lane(mine.items(p_));
      }
      const int64_t items = mine.items(p_), first = passed + end - items;
      const bool is_request = base + lane() < p_.tree.num_reqs;
      const unsigned owners = __ballot_sync(FULL_WARP, is_request && owns(base + lane(), first, items));
      if (owners != 0) {
        const int owner = __ffs(owners) - 1;
        first_item = __shfl_sync(FULL_WARP, first, owner);
        work = mine.of_lane(owner);
        return base + owner;
      }
      passed += __shfl_sync(FULL_WARP, end, 31);
    }
    return -1;
  }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  __device__ int64_t sum_up_to_lane(int64_t x) const {
    // lanes without a request have 0, and lane 31 the sum of all
    if (p_.tree.num_reqs == 1) return __shfl_sync(FULL_WARP, x, 0);
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const int64_t before = __shfl_up_sync(FULL_WARP, x, step);
      if (lane() >= step) x += before;
    }
    return x;
  }

  __device__ Schedule add_up() const {
    int64_t items = end_;
    int units = mine_.units(p_);
#pragma unroll 1
    for (int base = 32; base < p_.tree.num_reqs; base += 32) {
      const Work other(p_, base + lane());
      items += sum_up_to_lane(other.items(p_));
      units += other.units(p_);
    }
    return Schedule(p_, __shfl_sync(FULL_WARP, items, 31), __reduce_add_sync(FULL_WARP, units));
  }

  const Params &p_;
  Work mine_;    // of request `lane`
  int64_t end_;  // items of the requests up to `lane`
  Schedule schedule_;
};

// One piece of a CTA's span: KV tiles [first_tile, last_tile) of a unit.
struct alignas(16) Piece {
  Request request;
  int request_index;
  int kv_head;
  int first_line;  // of the row tile
  int first_tile;
  int last_tile;
  bool whole;  // the unit has no other piece
  int slot;    // of its partial result
};

// Walks over the pieces of this CTA. Every warp does so for itself, with the same result.
class Pieces {
 public:
  __device__ explicit Pieces(const Params &p) : p_(p), work_(p, p.tree.num_reqs) {
    const Batch batch(p);
    const int cta = blockIdx.x;
    if (cta >= batch.schedule().num_ctas) return;
    // one division for both
    const int64_t border = batch.schedule().begin_of(cta + threadIdx.x % 2);
    const int64_t begin = __shfl_sync(FULL_WARP, border, 0), end = __shfl_sync(FULL_WARP, border, 1);
    int64_t first_item = 0;
    request_ = batch.find([&](int, int64_t first, int64_t items) { return first + items > begin; }, first_item, work_);
    item_ = begin - first_item;
    left_ = end - begin;
  }

  __device__ bool next(Piece &piece) {
    if (left_ <= 0) return false;
    // true for padding requests, too
    for (int64_t items; item_ >= (items = work_.items(p_));) {
      item_ -= items;
      work_ = Work(p_, ++request_);
    }
    const int tiles = work_.kv_tiles, unit = static_cast<int>(uint64_t(item_) / tiles);
    piece.request = work_.request;
    piece.request_index = request_;
    piece.kv_head = div(unit, work_.row_tiles);
    piece.first_line = (unit - piece.kv_head * work_.row_tiles) * p_.tile_rows;
    piece.first_tile = static_cast<int>(item_ - int64_t(unit) * tiles);
    piece.last_tile = static_cast<int>(min(int64_t(tiles), piece.first_tile + left_));
    piece.whole = piece.last_tile - piece.first_tile == tiles;
    piece.slot = 2 * blockIdx.x + (piece.first_tile == 0);
    item_ += piece.last_tile - piece.first_tile;
    left_ -= piece.last_tile - piece.first_tile;
    return true;
  }

 private:
  const Params &p_;
  int64_t left_ = 0;  // items that are still to be done
  int request_ = 0;   // that the next one belongs to
  int64_t item_ = 0;  // its number in that request
  Work work_;         // of that request
};

// Where column `column` of a line is in a partial result of `dim` columns: in blocks of 8 lines and 16 columns, in
// the order in which the lanes of a warp hold accumulators, so that these are written 16 bytes per lane at a time.
__device__ __forceinline__ int partial_offset(int dim, int line, int column) {
  const int block = line / 8 * (dim / 16) + column / 16;
  return block * 128 + line % 8 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}

// What one line sees: the tokens below `limit`, and the ancestors of `node` from the root's token on.
struct Line {
  int limit;
  int node;  // -1 before the root
  const uint32_t *ancestor_bits;

  __device__ Line(const Params &p, const Request &request, int request_index, int line) {
    const int row = div(line, p.group);
    node = row - request.prefix_rows;
    limit = request.root_token + min(node + 1, 0);
    ancestor_bits = nullptr;
    if (line >= request.num_lines) {
      limit = 0;
      node = -1;
    } else if (node >= 0) {
      ancestor_bits = p.tree.ancestor_bits + (int64_t(request_index) * p.tree.max_nodes + node) * p.tree.words;
    } else {
      node = -1;
    }
  }

  // Bit b: the line sees token `token + b`. Knows nothing of where the KV ends.
  __device__ uint32_t mask(const Request &request, int token) const {
    const int below = limit - token;
    uint32_t bits = below >= 32 ? ~0u : below <= 0 ? 0u : (1u << below) - 1;
    const int first = token - request.root_token;
    if (node >= 0 && first > -32) {
      const int word = first >> 5;
      bits |= __funnelshift_r(ancestors(word), ancestors(word + 1), first & 31);
    }
    return bits;
  }

 private:
  // Word of the ancestor bits, cut after the node itself.
  __device__ uint32_t ancestors(int word) const {
    const int last = node >> 5;
    if (word < 0 || word > last) return 0;
    const uint32_t bits = ancestor_bits[word];
    return word < last ? bits : bits & ((2u << (node & 31)) - 1);
  }
};

// One past the last token that a line of the piece sees.
__device__ __forceinline__ int visible_tokens(const Params &p, const Piece &piece) {
  const Request &request = piece.request;
  const int last_row = (min(piece.first_line + p.tile_rows, request.num_lines) - 1) / p.group;
  return min(request.root_token + last_row - request.prefix_rows + 1, request.num_tokens);
}

// Tokens that every line of the piece sees: KV tiles below need no mask.
__device__ __forceinline__ int shared_tokens(const Params &p, const Piece &piece) {
  const int first_row = piece.first_line / p.group;
  return piece.request.root_token + min(first_row - piece.request.prefix_rows + 1, 0);
}

// Where a token of a request is in the caches.
struct CachePlace {
  int block;  // -1 if nowhere
  int offset;

  __device__ int64_t of(const ddt_cuda_view &cache, int kv_head) const {
    return block * cache.strides[0] + kv_head * cache.strides[1] + offset * cache.strides[2];
  }
};

// Tokens from num_tokens on are nowhere.
__device__ __forceinline__ CachePlace find_token(const Params &p, int request, int token, int num_tokens) {
  const int index = div(token, p.block_size);
  CachePlace place = {-1, token - index * p.block_size};
  if (token < num_tokens) {
    const int32_t *table = static_cast<const int32_t *>(p.block_table.data);
    const int block = table[request * p.block_table.strides[0] + index * p.block_table.strides[1]];
    if (block >= 0 && block < p.num_blocks) place.block = block;
  }
  return place;
}

// The online softmax keeps its base until a score is this much above it: weights are at most 2^8 then, which costs
// no precision, and outputs are rarely rescaled (after FlashAttention-4).
constexpr float SLACK = 8.0f;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A product of query and key as a score to the base 2.
__device__ __forceinline__ float score_of(const Params &p, float product) {
  const float x = product * p.score_scale;
  // tanh(x) = 1 - 2 / (e^2x + 1)
  return p.softcap == 0.0f ? x : p.softcap * (1.0f - __fdividef(2.0f, __expf(2.0f * x) + 1.0f));
}

}  // namespace ddt::tree_attention
