// SPDX-License-Identifier: Apache-2.0
//! `tree_attention` against a float64 softmax over the gathered tokens that each row sees.

mod common;

use std::ptr::{null, null_mut};

use ddtree::ffi::*;
use ddtree::{DType, TensorMut, TensorRef, TreeAttention};
use proptest::prelude::*;

use common::buffers::{ABSENT, Context, last_error};
use common::gdn::round;
use common::numbers::{Rng, distance, fresh_seed, norm};
use common::tensor::{Buffer, Order};
use common::trees::{self, Batch, Parents};

/// Asserts success and shows the library's message otherwise.
#[track_caller]
fn assert_ok(status: ddt_status) {
    assert_eq!(status, DDT_OK, "{}", last_error());
}

#[derive(Clone, Debug)]
struct Spec {
    num_kv_heads: usize,
    /// Query heads per KV head.
    group: usize,
    head_dim: usize,
    block_size: usize,
    dtype: DType,
    cache_dtype: DType,
    out_dtype: DType,
    key_order: Order,
    value_order: Order,
    other_order: Order,
    softcap: f32,
}

impl Spec {
    fn new(head_dim: usize) -> Self {
        Self {
            num_kv_heads: 1,
            group: 1,
            head_dim,
            block_size: 16,
            dtype: DType::F32,
            cache_dtype: DType::F32,
            out_dtype: DType::F32,
            key_order: Order::dense(4),
            value_order: Order::dense(4),
            other_order: Order::dense(3),
            softcap: 0.0,
        }
    }
}

/// One request: its tree, rows before and after it, and tokens before all of them.
#[derive(Clone, Debug)]
struct Request {
    tree: Parents,
    prefix_rows: usize,
    idle_rows: usize,
    context: usize,
}

impl Request {
    fn num_rows(&self) -> usize {
        self.prefix_rows + self.tree.len() + self.idle_rows
    }

    fn root_token(&self) -> usize {
        self.context + self.prefix_rows
    }

    /// The tokens that row `row` sees; none if it is idle.
    fn visible(&self, row: usize) -> Vec<usize> {
        if row < self.prefix_rows {
            return (0..self.context + row + 1).collect();
        }
        let node = row - self.prefix_rows;
        if node >= self.tree.len() {
            return Vec::new();
        }
        let path = trees::path(&self.tree, node);
        (0..self.root_token()).chain(path.iter().map(|node| self.root_token() + node)).collect()
    }
}

/// A call; `block_table` and caches hold the tokens of every request in random blocks.
#[derive(Clone)]
struct Call {
    spec: Spec,
    requests: Vec<Request>,
    batch: Batch,
    query: Buffer,
    key_cache: Buffer,
    value_cache: Buffer,
    block_table: Buffer,
    query_start: Vec<i32>,
    seq_lens: Vec<i32>,
    prefix_rows: Option<Vec<i32>>,
    softmax_scale: f32,
    out: Buffer,
}

impl Call {
    fn new(rng: &mut Rng, spec: &Spec, requests: Vec<Request>) -> Self {
        let most_nodes = requests.iter().map(|request| request.tree.len()).max().unwrap();
        let max_nodes = (most_nodes.max(1) + rng.below(40)).min(256);
        let batch = Batch::new(requests.iter().map(|request| request.tree.clone()).collect(), max_nodes, 32);
        let mut query_start = vec![0];
        for request in &requests {
            query_start.push(query_start[query_start.len() - 1] + request.num_rows() as i32);
        }
        // two rows that belong to no request
        let num_rows = *query_start.last().unwrap() as usize + 2;
        let seq_lens: Vec<_> =
            requests.iter().map(|request| (request.context + request.num_rows()) as i32).collect();
        let blocks_of = |len: i32| (len as usize).div_ceil(spec.block_size);
        let max_blocks = seq_lens.iter().map(|&len| blocks_of(len)).max().unwrap() + 1;
        let used: usize = seq_lens.iter().map(|&len| blocks_of(len)).sum();
        let num_blocks = used + 2;
        let mut blocks = rng.permutation(num_blocks).into_iter();
        let mut block_table =
            Buffer::filled(DType::I32, &[requests.len(), max_blocks], &Order::dense(2), |_| -1.0);
        for (r, &len) in seq_lens.iter().enumerate() {
            for i in 0..blocks_of(len) {
                block_table.set(&[r, i], blocks.next().unwrap() as f64);
            }
        }
        let num_heads = spec.num_kv_heads * spec.group;
        let cache_shape = [num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim];
        let mut normal =
            |dtype, shape: &[usize], order: &Order| Buffer::filled(dtype, shape, order, |_| rng.normal());
        let query = normal(spec.dtype, &[num_rows, num_heads, spec.head_dim], &spec.other_order);
        let key_cache = normal(spec.cache_dtype, &cache_shape, &spec.key_order);
        let value_cache = normal(spec.cache_dtype, &cache_shape, &spec.value_order);
        let prefix_rows: Vec<_> = requests.iter().map(|request| request.prefix_rows as i32).collect();
        let mut call = Self {
            out: Buffer::new(spec.out_dtype, &query.shape, &spec.other_order),
            // scores with a spread of about 2, so that many tokens count
            softmax_scale: 2.0 / (spec.head_dim as f32).sqrt(),
            spec: spec.clone(),
            batch,
            query,
            key_cache,
            value_cache,
            block_table,
            query_start,
            seq_lens,
            prefix_rows: prefix_rows.iter().any(|&rows| rows > 0).then_some(prefix_rows),
            requests,
        };
        call.poison_tokens_of_nobody();
        call
    }

    /// Writes NaN to the KV of every token that no row sees.
    fn poison_tokens_of_nobody(&mut self) {
        let mut seen = vec![false; self.key_cache.shape[0] * self.spec.block_size];
        for (r, request) in self.requests.iter().enumerate() {
            for token in 0..request.root_token() + request.tree.len() {
                let (block, offset) = self.place(r, token);
                seen[block * self.spec.block_size + offset] = true;
            }
        }
        for (slot, _) in seen.iter().enumerate().filter(|(_, seen)| !**seen) {
            self.poison((slot / self.spec.block_size, slot % self.spec.block_size));
        }
    }

    fn poison(&mut self, (block, offset): (usize, usize)) {
        for head in 0..self.spec.num_kv_heads {
            for i in 0..self.spec.head_dim {
                self.key_cache.set(&[block, head, offset, i], f64::NAN);
                self.value_cache.set(&[block, head, offset, i], f64::NAN);
            }
        }
    }

    fn place(&self, request: usize, token: usize) -> (usize, usize) {
        let block = self.block_table.get(&[request, token / self.spec.block_size]) as usize;
        (block, token % self.spec.block_size)
    }

    fn run(&mut self, context: &Context) -> ddt_status {
        self.run_changed(context, |_, _| ())
    }

    fn run_changed(&mut self, context: &Context, change: Change) -> ddt_status {
        let mut tree = self.batch.tree();
        let mut params = ddt_tree_attention_params {
            struct_size: size_of::<ddt_tree_attention_params>() as u32,
            flags: 0,
            query: self.query.tensor(),
            key_cache: self.key_cache.tensor(),
            value_cache: self.value_cache.tensor(),
            block_table: self.block_table.tensor(),
            query_start: self.query_start.as_ptr(),
            seq_lens: self.seq_lens.as_ptr(),
            prefix_rows: self.prefix_rows.as_ref().map_or(null(), |rows| rows.as_ptr()),
            tree: null_mut(),
            softmax_scale: self.softmax_scale,
            logit_softcap: self.spec.softcap,
            out: self.out.tensor(),
            workspace: null_mut(),
            workspace_bytes: 0,
        };
        let pointer = &mut tree as *mut ddt_tree;
        params.tree = pointer;
        // SAFETY: the tree is a local, and not used otherwise until the call.
        change(&mut params, unsafe { &mut *pointer });
        // SAFETY: every pointer is NULL or to a buffer that lives during the call.
        unsafe { ddt_tree_attention(context.0, &params, null_mut()) }
    }

    /// Output of one row and head.
    fn softmax(&self, r: usize, row: usize, head: usize) -> Vec<f64> {
        let kv_head = head / self.spec.group;
        let query = self.query.row(&[self.query_start[r] as usize + row, head]);
        let (mut scores, mut values) = (Vec::new(), Vec::new());
        for token in self.requests[r].visible(row) {
            let (block, offset) = self.place(r, token);
            let key = self.key_cache.row(&[block, kv_head, offset]);
            let product: f64 = query.iter().zip(&key).map(|(q, k)| q * k).sum();
            let score = product * f64::from(self.softmax_scale);
            let cap = f64::from(self.spec.softcap);
            scores.push(if cap == 0.0 { score } else { cap * (score / cap).tanh() });
            values.push(self.value_cache.row(&[block, kv_head, offset]));
        }
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<_> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..self.spec.head_dim)
            .map(|i| weights.iter().zip(&values).map(|(w, value)| w * value[i]).sum::<f64>() / total)
            .collect()
    }

    /// Checks every row against the reference: at most `bound` away, relative to the output.
    /// Looks at no more than `limit` heads of each row, chosen at random.
    fn check(&self, rng: &mut Rng, bound: f64, limit: usize) {
        let num_heads = self.query.shape[1];
        for (r, request) in self.requests.iter().enumerate() {
            for row in 0..request.num_rows() {
                for &head in rng.permutation(num_heads).iter().take(limit) {
                    let got = self.out.row(&[self.query_start[r] as usize + row, head]);
                    if request.tree.is_empty() {
                        assert!(got.iter().all(|x| x.is_nan()), "padding request {r} was written");
                    } else if request.visible(row).is_empty() {
                        assert_eq!(got, vec![0.0; self.spec.head_dim], "idle row {row} of request {r}");
                    } else {
                        let want = self.softmax(r, row, head);
                        let error = distance(&got, &want) / norm(&want);
                        assert!(
                            error <= bound,
                            "request {r} row {row} head {head}: {error:e} with {:?}",
                            self.spec
                        );
                    }
                }
            }
        }
    }
}

fn request(rng: &mut Rng, max_nodes: usize, max_context: usize) -> Request {
    let num_nodes = 1 + rng.below(max_nodes);
    Request {
        tree: trees::random(rng, num_nodes, 8),
        prefix_rows: rng.below(4),
        idle_rows: rng.below(3),
        context: rng.below(max_context + 1),
    }
}

/// The dim-major order of the CPU backend of vLLM: tokens of one element are adjacent.
fn dim_major() -> Order {
    Order::axes(&[0, 1, 3, 2])
}

const F32_BOUND: f64 = 1e-5;

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 10, ..common::cases(32) })]

    #[test]
    fn random_batches_match_the_dense_softmax(seed: u64) {
        let rng = &mut Rng(seed);
        let dtype = [DType::F32, DType::F16, DType::BF16][rng.below(3)];
        let spec = Spec {
            num_kv_heads: 1 + rng.below(3),
            group: 1 + rng.below(16),
            block_size: [1, 3, 16, 48, 100][rng.below(5)],
            dtype,
            cache_dtype: [dtype, DType::F32][rng.below(2)],
            key_order: if rng.below(2) == 0 { dim_major() } else { Order::random(rng, 4) },
            value_order: Order::random(rng, 4),
            other_order: Order::random(rng, 3),
            softcap: [0.0, 1.5][rng.below(2)],
            ..Spec::new([32, 64, 128, 256][rng.below(4)])
        };
        let mut requests: Vec<_> = (0..4).map(|_| request(rng, 12, 150)).collect();
        requests[1].tree.clear();
        requests[1].prefix_rows = 0;
        let mut call = Call::new(rng, &spec, requests);
        let before = call.clone();
        assert_ok(call.run(&Context::new()));
        // inputs are exact in f64, so dtypes make no difference
        call.check(rng, F32_BOUND, 3);
        let owned = 0..call.query_start[4] as usize;
        call.out.assert_only_written("out", &before.out, |index| owned.contains(&index[0]));
        call.key_cache.assert_untouched("key_cache", &before.key_cache);
        call.value_cache.assert_untouched("value_cache", &before.value_cache);
    }
}

#[test]
fn every_head_dim_group_and_layout_matches_the_dense_softmax() {
    let rng = &mut Rng(fresh_seed());
    for head_dim in [32, 64, 128, 256] {
        for group in [1, 2, 3, 4, 6, 8, 16] {
            for key_order in [Order::dense(4), dim_major()] {
                let spec = Spec { group, key_order, block_size: 48, ..Spec::new(head_dim) };
                let requests = vec![request(rng, 9, 131)];
                let mut call = Call::new(rng, &spec, requests);
                assert_ok(call.run(&Context::new()));
                call.check(rng, F32_BOUND, 2);
            }
        }
    }
}

#[test]
fn special_batches_match_the_dense_softmax() {
    let rng = &mut Rng(fresh_seed());
    let plain = |tree, context| Request { tree, prefix_rows: 0, idle_rows: 0, context };
    let random = trees::random(rng, 256, 32);
    let chunk = Request { tree: trees::chain(1), prefix_rows: 99, idle_rows: 0, context: 37 };
    for (name, block_size, requests) in [
        ("context 0, root alone", 16, vec![plain(trees::chain(1), 0)]),
        ("context 0, tree", 16, vec![plain(trees::star(9), 0)]),
        ("a chain", 784, vec![plain(trees::chain(33), 1001)]),
        ("a tree across blocks of 7", 7, vec![plain(trees::random(rng, 40, 8), 65)]),
        ("contexts around the tile", 32, [63, 64, 65, 127, 128].map(|n| plain(trees::star(3), n)).to_vec()),
        ("255 nodes below the root", 48, vec![plain(random, 70)]),
        ("a prompt chunk beside a tree", 48, vec![chunk, plain(trees::star(5), 200)]),
    ] {
        for key_order in [Order::dense(4), dim_major()] {
            println!("{name}");
            let spec = Spec { num_kv_heads: 2, group: 2, block_size, key_order, ..Spec::new(32) };
            let mut call = Call::new(rng, &spec, requests.clone());
            assert_ok(call.run(&Context::new()));
            call.check(rng, F32_BOUND, 2);
        }
    }
}

#[test]
fn large_scores_do_not_overflow() {
    let rng = &mut Rng(fresh_seed());
    let requests = vec![request(rng, 12, 300)];
    let mut call = Call::new(rng, &Spec::new(64), requests);
    call.softmax_scale = 300.0;
    assert_ok(call.run(&Context::new()));
    // scores near 1e4 carry an absolute f32 error of 1e-3, which the softmax makes relative
    call.check(rng, 2e-2, 1);
}

#[test]
fn a_row_never_touches_kv_that_it_does_not_see() {
    let rng = &mut Rng(fresh_seed());
    let tree = trees::random(rng, 24, 5);
    let requests = vec![Request { tree: tree.clone(), prefix_rows: 3, idle_rows: 1, context: 50 }];
    let mut call = Call::new(rng, &Spec { group: 3, ..Spec::new(32) }, requests);
    let context = Context::new();
    assert_ok(call.run(&context));
    let clean = call.out.clone();
    // NaN in one node, then also in the last row before the root, which all nodes see
    let poisoned = 1 + rng.below(23);
    call.poison(call.place(0, 53 + poisoned));
    assert_ok(call.run(&context));
    for row in 0..27 {
        let is_below = row >= 3 && trees::path(&tree, row - 3).contains(&poisoned);
        for head in 0..3 {
            let out = call.out.row(&[row, head]);
            if is_below {
                assert!(out.iter().all(|x| x.is_nan()), "row {row}");
            } else {
                assert_eq!(out, clean.row(&[row, head]), "row {row}");
            }
        }
    }
    call.poison(call.place(0, 52));
    assert_ok(call.run(&context));
    for row in 0..27 {
        assert_eq!(call.out.row(&[row, 0]).iter().all(|x| x.is_nan()), row >= 2, "row {row}");
    }
}

#[test]
fn outputs_are_rounded_to_their_dtype() {
    let seed = fresh_seed();
    let run = |out_dtype| {
        let rng = &mut Rng(seed);
        let requests = vec![request(rng, 12, 30)];
        let mut call = Call::new(rng, &Spec { out_dtype, ..Spec::new(32) }, requests);
        assert_ok(call.run(&Context::new()));
        call
    };
    let exact = run(DType::F32);
    let num_rows = exact.query_start[1] as usize;
    for dtype in [DType::F16, DType::BF16] {
        let narrow = run(dtype);
        for index in exact.out.indices().filter(|index| index[0] < num_rows) {
            assert_eq!(narrow.out.get(&index), round(dtype, exact.out.get(&index)), "{index:?}");
        }
    }
}

#[test]
fn a_request_does_not_depend_on_the_others() {
    let rng = &mut Rng(fresh_seed());
    let requests: Vec<_> = (0..3).map(|_| request(rng, 12, 100)).collect();
    let mut call = Call::new(rng, &Spec { group: 5, ..Spec::new(64) }, requests);
    let context = Context::new();
    assert_ok(call.run(&context));
    let together = call.out.clone();
    for r in 0..3 {
        let mut alone = call.clone();
        alone.batch.num_nodes.iter_mut().enumerate().filter(|(i, _)| *i != r).for_each(|(_, n)| *n = 0);
        assert_ok(alone.run(&context));
        assert_eq!(alone.out.bytes(), together.bytes());
    }
}

#[test]
fn the_rust_entry_is_the_same_operation() {
    let rng = &mut Rng(fresh_seed());
    let requests = vec![Request { tree: trees::star(3), prefix_rows: 1, idle_rows: 0, context: 20 }];
    let mut call = Call::new(rng, &Spec::new(32), requests);
    assert_ok(call.run(&Context::new()));
    let values =
        |buffer: &Buffer| -> Vec<f32> { buffer.indices().map(|index| buffer.get(&index) as f32).collect() };
    let (query, keys, cached) = (values(&call.query), values(&call.key_cache), values(&call.value_cache));
    let table: Vec<i32> =
        call.block_table.indices().map(|index| call.block_table.get(&index) as i32).collect();
    let mut out = vec![f32::NAN; query.len()];
    ddtree::tree_attention(TreeAttention {
        query: TensorRef::new(&query, &call.query.shape).unwrap(),
        key_cache: TensorRef::new(&keys, &call.key_cache.shape).unwrap(),
        value_cache: TensorRef::new(&cached, &call.value_cache.shape).unwrap(),
        block_table: TensorRef::new(&table, &call.block_table.shape).unwrap(),
        query_start: &[0, 4],
        prefix_rows: Some(&[1]),
        seq_lens: &[24],
        max_nodes: 3,
        num_nodes: &[3],
        ancestor_bits: &[0b1, 0b11, 0b101],
        softmax_scale: call.softmax_scale,
        logit_softcap: 0.0,
        out: TensorMut::new(&mut out, &call.query.shape).unwrap(),
    })
    .unwrap();
    let want = values(&call.out);
    assert_eq!(out[..4 * 32], want[..4 * 32]);
    assert!(out[4 * 32..].iter().all(|x| x.is_nan()));
}

type Change = fn(&mut ddt_tree_attention_params, &mut ddt_tree);

/// Each change to a valid call, with the status and a word of the message it must give.
const REFUSED: &[(ddt_status, &str, Change)] = &[
    (DDT_INVALID_STRUCT, "struct_size", |params, _| params.struct_size = 0),
    (DDT_UNSUPPORTED, "flags", |params, _| params.flags = 2),
    (DDT_NULL_POINTER, "tree", |params, _| params.tree = null_mut()),
    (DDT_NULL_POINTER, "tree.num_nodes", |_, tree| tree.num_nodes = null_mut()),
    (DDT_NULL_POINTER, "tree.ancestor_bits", |_, tree| tree.ancestor_bits = null_mut()),
    (DDT_NULL_POINTER, "query_start", |params, _| params.query_start = null()),
    (DDT_NULL_POINTER, "seq_lens", |params, _| params.seq_lens = null()),
    (DDT_NULL_POINTER, "block_table", |params, _| params.block_table = ABSENT),
    (DDT_NULL_POINTER, "key_cache", |params, _| params.key_cache.data = null_mut()),
    (DDT_MISALIGNED, "seq_lens", |params, _| params.seq_lens = params.seq_lens.wrapping_byte_add(1)),
    (DDT_MISALIGNED, "query", |params, _| params.query.data = params.query.data.wrapping_byte_add(2)),
    (DDT_MISALIGNED, "tree.ancestor_bits", |_, tree| {
        tree.ancestor_bits = tree.ancestor_bits.wrapping_byte_add(2)
    }),
    (DDT_INVALID_DTYPE, "query", |params, _| params.query.dtype = DDT_DTYPE_U8),
    (DDT_INVALID_DTYPE, "key_cache", |params, _| params.key_cache.dtype = DDT_DTYPE_BF16),
    (DDT_INVALID_DTYPE, "value_cache", |params, _| params.value_cache.dtype = DDT_DTYPE_U8),
    (DDT_INVALID_DTYPE, "block_table", |params, _| params.block_table.dtype = DDT_DTYPE_F32),
    (DDT_INVALID_DTYPE, "out", |params, _| params.out.dtype = DDT_DTYPE_I32),
    (DDT_INVALID_SHAPE, "query ndim", |params, _| params.query.ndim = 4),
    (DDT_INVALID_SHAPE, "value_cache", |params, _| params.value_cache.shape[0] -= 1),
    (DDT_INVALID_SHAPE, "key_cache", |params, _| params.key_cache.shape[3] = 16),
    (DDT_INVALID_SHAPE, "out", |params, _| params.out.shape[0] -= 1),
    (DDT_INVALID_SHAPE, "out strides", |params, _| params.out.strides[1] = 0),
    (DDT_INVALID_SHAPE, "block_table", |params, _| params.block_table.shape[0] = 1),
    (DDT_INVALID_SHAPE, "query strides", |params, _| params.query.strides[0] = -32),
    (DDT_INVALID_SHAPE, "memory", |params, _| {
        params.key_cache.shape[0] = 1 << 40;
        params.key_cache.strides[0] = 1 << 40;
    }),
    (DDT_INVALID_SHAPE, "block size", |params, _| {
        params.key_cache.shape[2] = 0;
        params.value_cache.shape[2] = 0;
    }),
    (DDT_INVALID_SHAPE, "heads", |params, _| {
        params.query.shape[1] = 3;
        params.out.shape[1] = 3;
    }),
    (DDT_INVALID_SHAPE, "heads", |params, _| {
        params.key_cache.shape[1] = 0;
        params.value_cache.shape[1] = 0;
    }),
    (DDT_UNSUPPORTED, "head dim", |params, _| {
        for tensor in [&mut params.query, &mut params.out] {
            tensor.shape[2] = 16;
        }
        for tensor in [&mut params.key_cache, &mut params.value_cache] {
            tensor.shape[3] = 16;
        }
    }),
    (DDT_UNSUPPORTED, "query heads", |params, _| {
        for tensor in [&mut params.query, &mut params.out] {
            tensor.shape[1] = 34;
            tensor.shape[0] = 1;
        }
    }),
    (DDT_INVALID_SHAPE, "num_reqs", |_, tree| tree.num_reqs = i32::MIN),
    (DDT_INVALID_SHAPE, "max_nodes", |_, tree| tree.max_nodes = 0),
    (DDT_INVALID_VALUE, "softmax_scale", |params, _| params.softmax_scale = f32::INFINITY),
    (DDT_INVALID_VALUE, "logit_softcap", |params, _| params.logit_softcap = -1.0),
    (DDT_INVALID_VALUE, "logit_softcap", |params, _| params.logit_softcap = f32::NAN),
    (DDT_INVALID_VALUE, "query_start", |params, _| {
        params.query.shape[0] = 9;
        params.out.shape[0] = 9;
    }),
    (DDT_INVALID_VALUE, "seq_lens[1]", |params, _| params.block_table.shape[1] = 4),
    (DDT_INVALID_VALUE, "block_table[0]", |params, _| {
        params.key_cache.shape[0] = 1;
        params.value_cache.shape[0] = 1;
    }),
];

#[test]
fn a_bad_call_is_refused_and_writes_nothing() {
    let rng = &mut Rng(fresh_seed());
    let context = Context::new();
    let spec = Spec { num_kv_heads: 2, group: 1, ..Spec::new(32) };
    let requests = vec![
        Request { tree: trees::star(5), prefix_rows: 1, idle_rows: 2, context: 20 },
        // the last node lies in a block of its own
        Request { tree: trees::chain(3), prefix_rows: 0, idle_rows: 0, context: 78 },
    ];
    let mut call = Call::new(rng, &spec, requests);
    let before = call.clone();
    for (i, (status, text, change)) in REFUSED.iter().enumerate() {
        let got = call.run_changed(&context, *change);
        let message = last_error();
        assert_eq!(got, *status, "case {i} ({text}): {message}");
        assert!(
            message.starts_with("tree_attention: ") && message.contains(text),
            "case {i} ({text}): {message}"
        );
        call.out.assert_untouched("out", &before.out);
    }

    let refuse = |text: &str, change: fn(&mut Call)| {
        let mut call = before.clone();
        change(&mut call);
        assert_eq!(call.run(&context), DDT_INVALID_VALUE, "{text}: {}", last_error());
        assert!(last_error().contains(text), "{text}: {}", last_error());
        call.out.assert_untouched("out", &before.out);
    };
    refuse("query_start", |call| call.query_start[1] = -1);
    refuse("query_start", |call| call.query_start[2] = 99);
    refuse("num_nodes[1]", |call| call.batch.num_nodes[1] = 4);
    refuse("num_nodes[0]", |call| call.batch.num_nodes[0] = -1);
    // the idle rows make room for two nodes more, but the row before the root stays
    refuse("prefix_rows[0]", |call| call.prefix_rows.as_mut().unwrap()[0] = 4);
    refuse("prefix_rows[0]", |call| call.prefix_rows.as_mut().unwrap()[0] = -1);
    refuse("seq_lens[0]", |call| call.seq_lens[0] = 7);
    refuse("seq_lens[1]", |call| call.seq_lens[1] = i32::MAX);
    refuse("seq_lens[1]", |call| call.seq_lens[1] = -1);
    refuse("block_table[1][5]", |call| call.block_table.set(&[1, 5], -1.0));
    refuse("block_table[1][0]", |call| call.block_table.set(&[1, 0], 1e9));
    let no_bits: fn(&mut Call) = |call| {
        let words = call.batch.max_nodes.div_ceil(32);
        call.batch.ancestor_bits[2 * words..3 * words].fill(0);
    };
    refuse("tree.ancestor_bits[0][2]", no_bits);
    refuse("tree.ancestor_bits[0][2]", |call| {
        let words = call.batch.max_nodes.div_ceil(32);
        call.batch.ancestor_bits[2 * words] |= 1 << 3;
    });
    refuse("tree.ancestor_bits[0][2]", |call| {
        let words = call.batch.max_nodes.div_ceil(32);
        call.batch.ancestor_bits[2 * words] = 0b11;
    });

    // SAFETY: NULL is allowed.
    assert_eq!(unsafe { ddt_tree_attention(null(), null(), null_mut()) }, DDT_NULL_POINTER);
    // SAFETY: as above.
    assert_eq!(unsafe { ddt_tree_attention(context.0, null(), null_mut()) }, DDT_NULL_POINTER);
    // the same call without a change works
    assert_ok(call.run(&context));
    call.check(rng, F32_BOUND, 2);
}

#[test]
fn the_cpu_needs_no_workspace() {
    let params = ddt_tree_attention_params {
        struct_size: size_of::<ddt_tree_attention_params>() as u32,
        flags: 0,
        query: ABSENT,
        key_cache: ABSENT,
        value_cache: ABSENT,
        block_table: ABSENT,
        query_start: null(),
        seq_lens: null(),
        prefix_rows: null(),
        tree: null_mut(),
        softmax_scale: 1.0,
        logit_softcap: 0.0,
        out: ABSENT,
        workspace: null_mut(),
        workspace_bytes: 0,
    };
    let (context, mut bytes) = (Context::new(), 1);
    // SAFETY: both pointers are to locals.
    assert_ok(unsafe { ddt_tree_attention_workspace_size(context.0, &params, &mut bytes) });
    assert_eq!(bytes, 0);
}
