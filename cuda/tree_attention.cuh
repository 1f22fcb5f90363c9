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
// (maximum to the base 2, sum) per line in the workspace, at slot `2 * cta + (piece starts where its unit starts)`:
// a CTA has at most one piece that starts inside a unit and at most one that ends inside one. A line
// that saw nothing has maximum -inf, sum 0 and any output. CTA 0 writes `schedule`, from which the combine kernel
// finds the pieces of every row. The combine kernel also writes the zeros of idle rows.
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
  const RequestRows rows = request_rows(p.query_start, p.tree, r, p.num_rows);
  if (rows.num_nodes == 0) return {rows.start, 0, 0, 0, 0};
  const int num_rows = rows.end - rows.start;
  const int prefix = p.prefix_rows == nullptr ? 0 : min(max(p.prefix_rows[r], 0), num_rows - rows.num_nodes);
  const int root_token = max(p.seq_lens[r], num_rows) - num_rows + prefix;
  const int64_t capacity = int64_t(p.max_blocks) * p.block_size;
  const int num_tokens = static_cast<int>(min(int64_t(root_token + rows.num_nodes), capacity));
  return {rows.start, (prefix + rows.num_nodes) * p.group, prefix, root_token, num_tokens};
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ int row_tiles(const Params &p, const Request &request) {
  return ceil_div(request.num_lines, p.tile_rows);
}

// At least 1, so that every unit is written even if the block table holds no token of it.
__device__ __forceinline__ int kv_tiles(const Params &p, const Request &request) {
  return max((request.num_tokens + p.tile_tokens - 1) / p.tile_tokens, 1);
}

// Which CTA has which work items.
struct Schedule {
  int64_t num_items;
  int num_ctas;  // that have work

  __device__ int64_t begin(int cta) const { return cta * num_items / num_ctas; }
  __device__ int cta_of(int64_t item) const { return static_cast<int>(((item + 1) * num_ctas - 1) / num_items); }
};

// One piece of a CTA's span: KV tiles [first_tile, last_tile) of a unit.
struct Piece {
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
  __device__ explicit Pieces(const Params &p) : p_(p) {
    const int lane = threadIdx.x % 32, num_reqs = p.tree.num_reqs;
    // lanes take a request each, 32 at a time; mostly there are no more
    Work mine(p, lane);
    int64_t items = mine.items;
    int units = mine.units;
    for (int r = lane + 32; r < num_reqs; r += 32) {
      const Work other(p, r);
      items += other.items;
      units += other.units;
    }
    units = __reduce_add_sync(FULL_WARP, units);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) items += __shfl_xor_sync(FULL_WARP, items, step);
    const Schedule schedule = {items, worthwhile_ctas(items, units)};
    const int cta = blockIdx.x;
    const bool writes = cta == 0 && threadIdx.x < 32;
    int64_t begin = 0;
    if (cta < schedule.num_ctas) {
      begin = schedule.begin(cta);
      left_ = schedule.begin(cta + 1) - begin;
    }
    if (writes && lane == 0) {
      p.schedule[num_reqs] = items;
      p.schedule[num_reqs + 1] = schedule.num_ctas;
    }
    int64_t passed = 0;
    bool found = false;
    for (int base = 0; base < num_reqs && (!found || writes); base += 32) {
      if (base > 0) mine = Work(p, base + lane);
      int64_t end = mine.items;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int64_t before = __shfl_up_sync(FULL_WARP, end, step);
        if (lane >= step) end += before;
      }
      end += passed;
      if (writes && base + lane < num_reqs) p.schedule[base + lane] = end - mine.items;
      const unsigned beyond = __ballot_sync(FULL_WARP, end > begin);
      if (beyond != 0 && !found) {
        const int owner = __ffs(beyond) - 1;
        request_ = base + owner;
        item_ = begin - __shfl_sync(FULL_WARP, end - mine.items, owner);
        found = true;
      }
      passed = __shfl_sync(FULL_WARP, end, 31);
    }
  }

  __device__ bool next(Piece &piece) {
    if (left_ <= 0) return false;
    // looked up again, since registers are scarce while a piece is worked on
    Work work(p_, request_);
    while (item_ >= work.items) {  // true for padding requests, too
      item_ -= work.items;
      work = Work(p_, ++request_);
    }
    const int tiles = work.kv_tiles, unit = static_cast<int>(item_ / tiles);
    piece.request = work.request;
    piece.request_index = request_;
    piece.kv_head = unit / work.row_tiles;
    piece.first_line = (unit - piece.kv_head * work.row_tiles) * p_.tile_rows;
    piece.first_tile = static_cast<int>(item_ - int64_t(unit) * tiles);
    piece.last_tile = static_cast<int>(min(int64_t(tiles), piece.first_tile + left_));
    piece.whole = piece.last_tile - piece.first_tile == tiles;
    piece.slot = 2 * blockIdx.x + (piece.first_tile == 0);
    item_ += piece.last_tile - piece.first_tile;
    left_ -= piece.last_tile - piece.first_tile;
    return true;
  }

 private:
  struct Work {
    Request request;
    int row_tiles, kv_tiles, units;
    int64_t items;

    __device__ Work(const Params &p, int r) : request{}, row_tiles(0), kv_tiles(1), units(0), items(0) {
      if (r >= p.tree.num_reqs) return;
      request = load_request(p, r);
      row_tiles = tree_attention::row_tiles(p, request);
      kv_tiles = tree_attention::kv_tiles(p, request);
      units = p.num_kv_heads * row_tiles;
      items = int64_t(units) * kv_tiles;
    }
  };

  // At least min_tiles items for each, and as many for each unit if that costs few CTAs: then no
  // CTA has to start twice.
  __device__ int worthwhile_ctas(int64_t items, int units) const {
    const int ctas = static_cast<int>(max(min(int64_t(p_.num_ctas), items / p_.min_tiles), int64_t(1)));
    const int even = units == 0 ? 0 : ctas - ctas % units;
    return 16 * (ctas - even) <= ctas ? even : ctas;
  }

  const Params &p_;
  int64_t left_ = 0;  // items that are still to be done
  int request_ = 0;   // that the next one belongs to
  int64_t item_ = 0;  // its number in that request
};

// What one line sees: the tokens below `limit`, and the ancestors of `node` from the root's token on.
struct Line {
  int limit;
  int node;  // -1 before the root
  const uint32_t *ancestor_bits;

  __device__ Line(const Params &p, const Request &request, int request_index, int line) {
    const int row = line / p.group;
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
  const int index = token / p.block_size;
  CachePlace place = {-1, token - index * p.block_size};
  if (token < num_tokens) {
    const int32_t *table = static_cast<const int32_t *>(p.block_table.data);
    const int block = table[request * p.block_table.strides[0] + index * p.block_table.strides[1]];
    if (block >= 0 && block < p.num_blocks) place.block = block;
  }
  return place;
}

// A product of query and key as a score to the base 2.
__device__ __forceinline__ float score_of(const Params &p, float product) {
  const float x = product * p.score_scale;
  // tanh(x) = 1 - 2 / (e^2x + 1)
  return p.softcap == 0.0f ? x : p.softcap * (1.0f - __fdividef(2.0f, __expf(2.0f * x) + 1.0f));
}

}  // namespace ddt::tree_attention
