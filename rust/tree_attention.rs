// SPDX-License-Identifier: Apache-2.0
//! Attention of tree nodes over a paged KV cache: the whole prefix, then each node's ancestors.
//!
//! One online softmax in f32 per row and head. The prefix goes through it in tiles that all rows
//! of a request share; ancestors follow one by one, so a row never touches the KV of a node that
//! is not on its path, whatever that holds.

use std::ops::Range;

use crate::dtype::DType;
use crate::error::{Result, bail, want_len};
use crate::lanes::{LANES, Lanes, add_scaled, dot, multiply};
use crate::tensor::{TensorMut, TensorRef};
use crate::tree::{RequestRows, request_rows};

/// Head dims that the CPU backend has been built for.
const HEAD_DIMS: &[usize] = &[32, 64, 128, 256];
/// Most query heads that share a KV head.
const MAX_GROUP: usize = 16;
/// KV tokens that are widened to f32 at a time; a multiple of [`LANES`].
const TILE: usize = 64;

/// Arguments of [`tree_attention`]. T = rows, R = requests, N = `max_nodes`,
/// W = `N.div_ceil(32)`; Hq and Hkv = query and KV heads, query head h uses KV head
/// `h / (Hq / Hkv)`; Dh = head dim.
#[derive(Debug)]
pub struct TreeAttention<'a> {
    /// `[T,Hq,Dh]` f32, f16 or bf16.
    pub query: TensorRef<'a>,
    /// `[blocks,Hkv,block_size,Dh]` dtype of `query` or f32.
    pub key_cache: TensorRef<'a>,
    /// `[blocks,Hkv,block_size,Dh]` dtype of `query` or f32.
    pub value_cache: TensorRef<'a>,
    /// `[R,max_blocks]` i32.
    pub block_table: TensorRef<'a>,
    /// `[R + 1]` first row of each request.
    pub query_start: &'a [i32],
    /// `[R]` rows of each request that precede its root; 0 without it.
    pub prefix_rows: Option<&'a [i32]>,
    /// `[R]` tokens in the KV cache, all rows of the request included.
    pub seq_lens: &'a [i32],
    /// Row length of the tree fields.
    pub max_nodes: usize,
    /// `[R]` nodes with the root; 0 = padding request.
    pub num_nodes: &'a [i32],
    /// `[R][N][W]` bit j of row i: node j is i or one of its ancestors.
    pub ancestor_bits: &'a [u32],
    /// Factor of the scores.
    pub softmax_scale: f32,
    /// Scores become `cap * tanh(score / cap)`; 0 = none.
    pub logit_softcap: f32,
    /// `[T,Hq,Dh]` out, f32, f16 or bf16.
    pub out: TensorMut<'a>,
}

/// Attends every row of a batch to the KV cache, which already holds this step's rows: row q of a
/// request with n rows is KV token `seq_len - n + q`.
///
/// A row before the root sees all tokens up to itself. A node sees all tokens before the root,
/// and the nodes of its row in `ancestor_bits`. Rows of a request after its last node get zeros.
/// Rows of a padding request, and rows of no request, are not written.
///
/// # Errors
/// `InvalidShape`, `InvalidDtype`; `InvalidValue` for rows, lengths or blocks out of range and
/// for ancestor bits of a later node or without the node itself; `Unsupported` for a head dim
/// other than 32, 64, 128, 256 or more than 16 query heads per KV head. Nothing is written then.
pub fn tree_attention(mut args: TreeAttention) -> Result<()> {
    let plan = Plan::new(&args)?;
    let mut tile = Tile::new(plan.head_dim);
    for request in &plan.requests {
        for kv_head in 0..plan.num_kv_heads {
            let mut lines = Lines::load(&args.query, request, kv_head, &plan);
            let cache = Cache { args: &args, request, kv_head };
            for start in (0..request.root_token).step_by(TILE) {
                tile.load(&cache, start..request.root_token.min(start + TILE));
                lines.attend_tile(request, start, &tile);
            }
            lines.attend_ancestors(&cache);
            lines.store(&mut args.out, request, kv_head);
        }
        for row in request.first_row + request.num_rows()..request.end_row {
            for head in 0..plan.num_kv_heads * plan.group {
                args.out.at(row).at(head).store_f32(0, &vec![0.0; plan.head_dim]);
            }
        }
    }
    Ok(())
}

/// The arguments that say what shape everything has, and the scalars: what every backend checks before it runs.
pub(crate) struct Tensors<'a> {
    pub(crate) query: &'a TensorRef<'a>,
    pub(crate) key_cache: &'a TensorRef<'a>,
    pub(crate) value_cache: &'a TensorRef<'a>,
    pub(crate) block_table: &'a TensorRef<'a>,
    pub(crate) out: &'a TensorRef<'a>,
    pub(crate) softmax_scale: f32,
    pub(crate) logit_softcap: f32,
}

/// The extents that [`Tensors::check`] has found to agree.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) struct Dims {
    pub(crate) num_rows: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    /// Query heads per KV head.
    pub(crate) group: usize,
    pub(crate) head_dim: usize,
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
    pub(crate) max_blocks: usize,
}

impl Tensors<'_> {
    pub(crate) fn check(&self, num_reqs: usize) -> Result<Dims> {
        self.query.want_ndim("query", 3)?;
        self.query.want_dtype("query", DType::FLOATS)?;
        let &[num_rows, num_heads, head_dim] = self.query.shape() else { unreachable!("ndim is 3") };
        self.key_cache.want_ndim("key_cache", 4)?;
        let &[num_blocks, num_kv_heads, block_size, _] = self.key_cache.shape() else {
            unreachable!("ndim is 4")
        };
        for (name, cache) in [("key_cache", self.key_cache), ("value_cache", self.value_cache)] {
            cache.want_shape(name, &[num_blocks, num_kv_heads, block_size, head_dim])?;
            cache.want_dtype(name, &[self.query.dtype(), DType::F32])?;
        }
        self.out.want_shape("out", &[num_rows, num_heads, head_dim])?;
        self.out.want_dtype("out", DType::FLOATS)?;
        if !HEAD_DIMS.contains(&head_dim) {
            bail!(Unsupported, "query shape[2]: got head dim {head_dim}, want one of {HEAD_DIMS:?}");
        }
        if num_kv_heads == 0 || num_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            bail!(
                InvalidShape,
                "query shape[1]: got {num_heads} heads, want a multiple of the {num_kv_heads} KV heads"
            );
        }
        let group = num_heads / num_kv_heads;
        if group > MAX_GROUP {
            bail!(Unsupported, "query heads per KV head: got {group}, want at most {MAX_GROUP}");
        }
        if block_size == 0 {
            bail!(InvalidShape, "key_cache shape[2]: got block size 0, want >= 1");
        }
        if !self.softmax_scale.is_finite() {
            bail!(InvalidValue, "softmax_scale: got {}, want a finite number", self.softmax_scale);
        }
        if !self.logit_softcap.is_finite() || self.logit_softcap < 0.0 {
            bail!(InvalidValue, "logit_softcap: got {}, want a finite number >= 0", self.logit_softcap);
        }
        self.block_table.want_ndim("block_table", 2)?;
        self.block_table.want_dim("block_table", 0, num_reqs, "requests")?;
        self.block_table.want_dtype("block_table", &[DType::I32])?;
        let max_blocks = self.block_table.shape()[1];
        Ok(Dims { num_rows, num_heads, num_kv_heads, group, head_dim, num_blocks, block_size, max_blocks })
    }
}

/// The checked arguments, padding requests left out.
struct Plan {
    head_dim: usize,
    num_kv_heads: usize,
    /// Query heads per KV head.
    group: usize,
    score: Score,
    requests: Vec<Request>,
}

struct Request {
    index: usize,
    first_row: usize,
    end_row: usize,
    /// Rows before the root.
    prefix_rows: usize,
    num_nodes: usize,
    /// KV token of the root, which is the number of tokens that all nodes see.
    root_token: usize,
    /// Blocks of all tokens that its rows see. A copy, as is `ancestors`: what was checked must stay
    /// so while `out` is written, wherever that is.
    blocks: Vec<usize>,
    /// The nodes that each node sees, ascending.
    ancestors: Vec<Vec<usize>>,
}

impl Request {
    /// Rows that attend: those before the root, and the nodes.
    fn num_rows(&self) -> usize {
        self.prefix_rows + self.num_nodes
    }

    /// Tokens up to the root that `row` sees; they are the first ones.
    fn visible(&self, row: usize) -> usize {
        self.root_token - self.prefix_rows.saturating_sub(row + 1)
    }
}

impl Plan {
    fn new(args: &TreeAttention) -> Result<Self> {
        let num_reqs = args.num_nodes.len();
        let dims = Tensors {
            query: &args.query,
            key_cache: &args.key_cache,
            value_cache: &args.value_cache,
            block_table: &args.block_table,
            out: &args.out.view(),
            softmax_scale: args.softmax_scale,
            logit_softcap: args.logit_softcap,
        }
        .check(num_reqs)?;
        want_len("seq_lens", args.seq_lens.len(), num_reqs)?;
        if let Some(prefix_rows) = args.prefix_rows {
            want_len("prefix_rows", prefix_rows.len(), num_reqs)?;
        }
        let bits = num_reqs * args.max_nodes * args.max_nodes.div_ceil(32);
        want_len("tree.ancestor_bits", args.ancestor_bits.len(), bits)?;
        let mut requests = Vec::new();
        for (index, rows) in request_rows(args.query_start, args.num_nodes, dims.num_rows)?.iter().enumerate()
        {
            if rows.num_nodes > 0 {
                let mut request = Request::new(args, index, rows)?;
                request.read_blocks(args)?;
                request.read_ancestors(args)?;
                requests.push(request);
            }
        }
        let score = Score { scale: args.softmax_scale, softcap: args.logit_softcap };
        let Dims { head_dim, num_kv_heads, group, .. } = dims;
        Ok(Self { head_dim, num_kv_heads, group, score, requests })
    }
}

impl Request {
    fn new(args: &TreeAttention, index: usize, rows: &RequestRows) -> Result<Self> {
        let num_nodes = rows.num_nodes;
        let num_rows = rows.end - rows.start;
        if num_nodes > args.max_nodes {
            bail!(
                InvalidValue,
                "tree.num_nodes[{index}]: got {num_nodes}, want <= {} (max_nodes)",
                args.max_nodes
            );
        }
        let prefix_rows = args.prefix_rows.map_or(0, |prefix_rows| prefix_rows[index]);
        if prefix_rows < 0 || prefix_rows as usize > num_rows - num_nodes {
            bail!(
                InvalidValue,
                "prefix_rows[{index}]: got {prefix_rows}, want 0..={} (rows without a node)",
                num_rows - num_nodes
            );
        }
        let prefix_rows = prefix_rows as usize;
        let seq_len = args.seq_lens[index];
        if seq_len < 0 || (seq_len as usize) < num_rows {
            bail!(InvalidValue, "seq_lens[{index}]: got {seq_len}, want >= {num_rows} (rows of the request)");
        }
        Ok(Self {
            index,
            first_row: rows.start,
            end_row: rows.end,
            prefix_rows,
            num_nodes,
            root_token: seq_len as usize - num_rows + prefix_rows,
            blocks: Vec::new(),
            ancestors: Vec::new(),
        })
    }

    /// Reads and checks the blocks of all tokens that the request's rows see.
    fn read_blocks(&mut self, args: &TreeAttention) -> Result<()> {
        let (num_blocks, block_size) = (args.key_cache.shape()[0], args.key_cache.shape()[2]);
        let max_blocks = args.block_table.shape()[1];
        let used = (self.root_token + self.num_nodes).div_ceil(block_size);
        if used > max_blocks {
            bail!(
                InvalidValue,
                "seq_lens[{}]: got {}, want one that {max_blocks} blocks of {block_size} hold",
                self.index,
                args.seq_lens[self.index]
            );
        }
        for i in 0..used {
            let block = args.block_table.get_i32(&[self.index, i]);
            if block < 0 || block as usize >= num_blocks {
                bail!(
                    InvalidValue,
                    "block_table[{}][{i}]: got {block}, want 0..{num_blocks} (blocks)",
                    self.index
                );
            }
            self.blocks.push(block as usize);
        }
        Ok(())
    }

    fn read_ancestors(&mut self, args: &TreeAttention) -> Result<()> {
        for node in 0..self.num_nodes {
            let ancestors: Vec<_> = ancestors(args, self.index, node).collect();
            let last = ancestors.last().copied();
            if last != Some(node) {
                bail!(
                    InvalidValue,
                    "tree.ancestor_bits[{}][{node}]: got {last:?} as the last bit set, want {node}",
                    self.index
                );
            }
            self.ancestors.push(ancestors);
        }
        Ok(())
    }
}

/// The nodes that `node` of request `request` sees, ascending.
fn ancestors(args: &TreeAttention, request: usize, node: usize) -> impl Iterator<Item = usize> {
    let words = args.max_nodes.div_ceil(32);
    let row = &args.ancestor_bits[(request * args.max_nodes + node) * words..][..words];
    row.iter()
        .enumerate()
        .flat_map(|(i, &word)| (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| i * 32 + bit))
}

/// How a product of query and key becomes a score.
#[derive(Clone, Copy)]
struct Score {
    scale: f32,
    softcap: f32,
}

impl Score {
    fn of(&self, product: f32) -> f32 {
        let score = product * self.scale;
        if self.softcap == 0.0 { score } else { self.softcap * (score / self.softcap).tanh() }
    }
}

/// One KV head of the cache, as one request sees it.
struct Cache<'a> {
    args: &'a TreeAttention<'a>,
    request: &'a Request,
    kv_head: usize,
}

impl Cache<'_> {
    /// Cuts `tokens` where blocks end: calls `load(i, block, offsets)` for each run, whose first
    /// token is `tokens.start + i`.
    fn for_each_run(&self, tokens: Range<usize>, mut load: impl FnMut(usize, usize, Range<usize>)) {
        let block_size = self.args.key_cache.shape()[2];
        let mut token = tokens.start;
        while token < tokens.end {
            let offset = token % block_size;
            let len = (block_size - offset).min(tokens.end - token);
            let block = self.request.blocks[token / block_size];
            load(token - tokens.start, block, offset..offset + len);
            token += len;
        }
    }

    /// `[block_size,Dh]` of one block.
    fn keys(&self, block: usize) -> TensorRef<'_> {
        self.args.key_cache.at(block).at(self.kv_head)
    }

    /// `[block_size,Dh]` of one block.
    fn values(&self, block: usize) -> TensorRef<'_> {
        self.args.value_cache.at(block).at(self.kv_head)
    }
}

/// Up to [`TILE`] tokens of one KV head in f32, laid out for [`multiply`].
struct Tile {
    len: usize,
    /// `[TILE / LANES][Dh]`: one lane per token.
    keys: Vec<Lanes>,
    /// `[Dh / LANES][TILE]`: one lane per element.
    values: Vec<Lanes>,
    /// `[Dh]` of one token.
    row: Vec<f32>,
}

impl Tile {
    fn new(head_dim: usize) -> Self {
        Self {
            len: 0,
            keys: vec![[0.0; LANES]; TILE / LANES * head_dim],
            values: vec![[0.0; LANES]; head_dim / LANES * TILE],
            row: vec![0.0; head_dim],
        }
    }

    fn load(&mut self, cache: &Cache, tokens: Range<usize>) {
        self.len = tokens.len();
        cache.for_each_run(tokens, |first, block, offsets| {
            self.load_keys(first, cache.keys(block), offsets.clone());
            self.load_values(first, cache.values(block), offsets);
        });
    }

    fn load_keys(&mut self, first: usize, keys: TensorRef, offsets: Range<usize>) {
        let head_dim = keys.shape()[1];
        if keys.strides()[0] == 1 {
            // dim-major: the tokens of one element are adjacent
            let by_element = keys.transposed();
            for element in 0..head_dim {
                let tokens_of_element = by_element.at(element);
                let mut done = 0;
                while done < offsets.len() {
                    let token = first + done;
                    let block = &mut self.keys[token / LANES * head_dim + element];
                    let len = (LANES - token % LANES).min(offsets.len() - done);
                    let lanes = &mut block[token % LANES..][..len];
                    tokens_of_element.load_f32(offsets.start + done, lanes);
                    done += len;
                }
            }
        } else {
            for (token, offset) in (first..).zip(offsets) {
                keys.at(offset).load_f32(0, &mut self.row);
                let block = &mut self.keys[token / LANES * head_dim..][..head_dim];
                for (lanes, &x) in block.iter_mut().zip(&self.row) {
                    lanes[token % LANES] = x;
                }
            }
        }
    }

    fn load_values(&mut self, first: usize, values: TensorRef, offsets: Range<usize>) {
        for (token, offset) in (first..).zip(offsets) {
            values.at(offset).load_f32(0, &mut self.row);
            for (lanes, x) in self.values.chunks_exact_mut(TILE).zip(self.row.chunks_exact(LANES)) {
                lanes[token].copy_from_slice(x);
            }
        }
    }
}

/// Running maximum and sum of one softmax.
#[derive(Clone, Copy)]
struct Softmax {
    max: f32,
    total: f32,
}

impl Softmax {
    const EMPTY: Self = Self { max: f32::NEG_INFINITY, total: 0.0 };

    /// Turns products into weights, and brings what was summed before, `sums`, to their maximum.
    fn update(&mut self, weights: &mut [f32], sums: &mut [f32], score: Score) {
        let mut max = self.max;
        for x in &mut *weights {
            *x = score.of(*x);
            max = max.max(*x);
        }
        if max > self.max {
            let factor = (self.max - max).exp();
            self.total *= factor;
            for sum in sums {
                *sum *= factor;
            }
            self.max = max;
        }
        for x in weights {
            *x = (*x - max).exp();
            self.total += *x;
        }
    }
}

/// The query heads of all attending rows of a request that share one KV head: line
/// `row * group + i` is head `i` of the group at `row`.
struct Lines {
    head_dim: usize,
    group: usize,
    score: Score,
    /// `[lines][Dh]`.
    queries: Vec<f32>,
    /// `[lines][Dh]` weighted values.
    sums: Vec<f32>,
    softmaxes: Vec<Softmax>,
    /// `[lines]` products, then weights, of the tile at hand.
    weights: Vec<[f32; TILE]>,
}

impl Lines {
    fn load(query: &TensorRef, request: &Request, kv_head: usize, plan: &Plan) -> Self {
        let (head_dim, group) = (plan.head_dim, plan.group);
        let num_lines = request.num_rows() * group;
        let mut queries = vec![0.0; num_lines * head_dim];
        for (line, query_line) in queries.chunks_exact_mut(head_dim).enumerate() {
            let (row, head) = (request.first_row + line / group, kv_head * group + line % group);
            query.at(row).at(head).load_f32(0, query_line);
        }
        Self {
            head_dim,
            group,
            score: plan.score,
            sums: vec![0.0; queries.len()],
            queries,
            softmaxes: vec![Softmax::EMPTY; num_lines],
            weights: vec![[0.0; TILE]; num_lines],
        }
    }

    /// Adds the tokens of a tile, which starts with token `start`, to all rows that see them.
    fn attend_tile(&mut self, request: &Request, start: usize, tile: &Tile) {
        let seen = |row| request.visible(row).saturating_sub(start).min(tile.len);
        let mut row = 0;
        while row < request.num_rows() {
            let count = seen(row);
            let first = row;
            while row < request.num_rows() && seen(row) == count {
                row += 1;
            }
            if count > 0 {
                self.attend_tokens(first * self.group..row * self.group, tile, count);
            }
        }
    }

    /// Adds the first `count` tokens of a tile to a range of lines.
    fn attend_tokens(&mut self, lines: Range<usize>, tile: &Tile, count: usize) {
        let head_dim = self.head_dim;
        let queries = &self.queries[lines.start * head_dim..lines.end * head_dim];
        let sums = &mut self.sums[lines.start * head_dim..lines.end * head_dim];
        let softmaxes = &mut self.softmaxes[lines.clone()];
        let weights = &mut self.weights[lines];
        let line = |i: usize| i * head_dim..(i + 1) * head_dim;
        for (b, keys) in tile.keys.chunks_exact(head_dim).take(count.div_ceil(LANES)).enumerate() {
            multiply(
                weights.len(),
                |i| &queries[line(i)],
                keys,
                |i, products| {
                    weights[i][b * LANES..(b + 1) * LANES].copy_from_slice(products);
                },
            );
        }
        for (i, softmax) in softmaxes.iter_mut().enumerate() {
            softmax.update(&mut weights[i][..count], &mut sums[line(i)], self.score);
        }
        for (b, values) in tile.values.chunks_exact(TILE).enumerate() {
            multiply(
                weights.len(),
                |i| &weights[i][..count],
                &values[..count],
                |i, products| {
                    add_scaled(&mut sums[line(i)][b * LANES..(b + 1) * LANES], 1.0, products);
                },
            );
        }
    }

    /// Adds to every node itself and its ancestors.
    fn attend_ancestors(&mut self, cache: &Cache) {
        let request = cache.request;
        let head_dim = self.head_dim;
        let mut keys = vec![0.0; request.num_nodes * head_dim];
        let mut values = keys.clone();
        let tokens = request.root_token..request.root_token + request.num_nodes;
        cache.for_each_run(tokens, |first, block, offsets| {
            for (node, offset) in (first..).zip(offsets) {
                let node = node * head_dim..(node + 1) * head_dim;
                cache.keys(block).at(offset).load_f32(0, &mut keys[node.clone()]);
                cache.values(block).at(offset).load_f32(0, &mut values[node]);
            }
        });
        let mut weights = Vec::new();
        for node in 0..request.num_nodes {
            let path: Vec<_> = request.ancestors[node]
                .iter()
                .map(|&ancestor| ancestor * head_dim..(ancestor + 1) * head_dim)
                .collect();
            let first_line = (request.prefix_rows + node) * self.group;
            for line in first_line..first_line + self.group {
                let query = &self.queries[line * head_dim..(line + 1) * head_dim];
                let sums = &mut self.sums[line * head_dim..(line + 1) * head_dim];
                weights.clear();
                weights.extend(path.iter().map(|range| dot(query, &keys[range.clone()])));
                self.softmaxes[line].update(&mut weights, sums, self.score);
                for (&weight, range) in weights.iter().zip(&path) {
                    add_scaled(sums, weight, &values[range.clone()]);
                }
            }
        }
    }

    /// Divides by the sums of weights and writes the lines to their rows.
    fn store(&mut self, out: &mut TensorMut, request: &Request, kv_head: usize) {
        for (line, sums) in self.sums.chunks_exact_mut(self.head_dim).enumerate() {
            let (row, head) =
                (request.first_row + line / self.group, kv_head * self.group + line % self.group);
            let total = self.softmaxes[line].total;
            for sum in &mut *sums {
                *sum /= total;
            }
            out.at(row).at(head).store_f32(0, sums);
        }
    }
}
