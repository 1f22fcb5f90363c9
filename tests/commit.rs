// SPDX-License-Identifier: Apache-2.0
//! `commit` against plain decoding of the accepted tokens, and against gathering and scattering
//! KV rows one by one.

mod common;

use std::ptr::{null, null_mut};

use ddtree::DType;
use ddtree::ffi::*;
use proptest::prelude::*;

use common::buffers::{Context, last_error};
use common::gdn::{DIM, Decoder, Forward, Layer, Real, Spec};
use common::numbers::{Rng, distance, fresh_seed, norm};
use common::tensor::{Buffer, Order};
use common::trees::{self, Batch, Parents};

/// Asserts success and shows the library's message otherwise.
#[track_caller]
fn assert_ok(status: ddt_status) {
    assert_eq!(status, DDT_OK, "{}", last_error());
}

/// A KV cache, and the slots of the rows in it.
#[derive(Clone)]
struct KvLayer {
    key_cache: Buffer,
    value_cache: Buffer,
    row_slots: Vec<i64>,
}

/// Everything that a call takes.
#[derive(Clone)]
struct Call {
    batch: Batch,
    query_start: Vec<i32>,
    num_accepted: Vec<i32>,
    accepted_nodes: Vec<i32>,
    snapshot_tokens: Option<Vec<i32>>,
    norm_eps: f32,
    gdn_layers: Vec<Layer>,
    kv_layers: Vec<KvLayer>,
}

impl Call {
    /// `accepted` has the accepted nodes of each request, or nothing for a padding request.
    fn new(batch: &Batch, query_start: &[i32], accepted: &[Option<Vec<usize>>]) -> Self {
        let mut accepted_nodes = vec![-1; accepted.len() * batch.max_depth];
        for (row, nodes) in accepted_nodes.chunks_mut(batch.max_depth.max(1)).zip(accepted) {
            for (entry, &node) in row.iter_mut().zip(nodes.iter().flatten()) {
                *entry = node as i32;
            }
        }
        Self {
            batch: batch.clone(),
            query_start: query_start.to_vec(),
            num_accepted: accepted
                .iter()
                .map(|nodes| nodes.as_ref().map_or(-1, |nodes| nodes.len() as i32))
                .collect(),
            accepted_nodes,
            snapshot_tokens: None,
            norm_eps: 0.0,
            gdn_layers: Vec::new(),
            kv_layers: Vec::new(),
        }
    }

    fn run(&mut self, context: &Context) -> ddt_status {
        self.run_changed(context, |_, _, _, _| ())
    }

    /// Runs with parameters, tree and layers changed by `change`.
    fn run_changed(&mut self, context: &Context, change: Change) -> ddt_status {
        let mut gdn_layers: Vec<_> = self.gdn_layers.iter().map(Layer::raw).collect();
        let mut kv_layers: Vec<_> = self
            .kv_layers
            .iter()
            .map(|layer| ddt_kv_layer {
                key_cache: layer.key_cache.tensor(),
                value_cache: layer.value_cache.tensor(),
                row_slots: layer.row_slots.as_ptr(),
            })
            .collect();
        let mut tree = self.batch.tree();
        let mut params = ddt_commit_params {
            struct_size: size_of::<ddt_commit_params>() as u32,
            flags: 0,
            num_gdn_layers: gdn_layers.len() as i32,
            num_kv_layers: kv_layers.len() as i32,
            gdn_layers: null(),
            kv_layers: null(),
            tree: null_mut(),
            query_start: self.query_start.as_ptr(),
            num_accepted: self.num_accepted.as_ptr(),
            accepted_nodes: self.accepted_nodes.as_ptr(),
            snapshot_tokens: self.snapshot_tokens.as_ref().map_or(null(), |tokens| tokens.as_ptr()),
            norm_eps: self.norm_eps,
            reserved0: 0,
            workspace: null_mut(),
            workspace_bytes: 0,
        };
        // a change may take these away again
        let marker = &mut tree as *mut ddt_tree;
        params.tree = marker;
        params.gdn_layers = gdn_layers.as_ptr();
        params.kv_layers = kv_layers.as_ptr();
        // SAFETY: the tree is a local, and not used otherwise until the call.
        change(&mut params, unsafe { &mut *marker }, &mut gdn_layers, &mut kv_layers);
        // SAFETY: every pointer is NULL or to a buffer that lives during the call.
        unsafe { ddt_commit(context.0, &params, null_mut()) }
    }

    #[track_caller]
    fn assert_unwritten(&self, before: &Call) {
        for (layer, before) in self.gdn_layers.iter().zip(&before.gdn_layers) {
            layer.ssm_state.assert_untouched("ssm_state", &before.ssm_state);
            layer.conv_state.assert_untouched("conv_state", &before.conv_state);
        }
        for (layer, before) in self.kv_layers.iter().zip(&before.kv_layers) {
            layer.key_cache.assert_untouched("key_cache", &before.key_cache);
            layer.value_cache.assert_untouched("value_cache", &before.value_cache);
        }
    }
}

type Change = fn(&mut ddt_commit_params, &mut ddt_tree, &mut [ddt_gdn_layer], &mut [ddt_kv_layer]);

/// The nodes below the root on the path to a random node.
fn random_path(rng: &mut Rng, tree: &Parents) -> Vec<usize> {
    trees::path(tree, rng.below(tree.len()))[1..].to_vec()
}

/// Decoding of several sequences: rounds of verify and commit in the library, and the same tokens
/// one by one in the reference.
struct Session<T> {
    context: Context,
    spec: Spec,
    layer: Layer,
    /// One per state slot of the requests, 0 and 1.
    decoders: [Decoder<T>; 2],
}

const MAX_DEPTH: usize = 6;
const ROWS: usize = 14;

impl<T: Real> Session<T> {
    fn new(rng: &mut Rng, spec: Spec) -> Self {
        let mut layer = Layer::new(rng, &spec, 2 * ROWS);
        layer.state_slots = vec![0, 1];
        layer.snapshot_slots = Some(vec![-1, -1]);
        let decoders = [0, 1].map(|slot| Decoder::load(&layer, slot));
        Self { context: Context::new(), spec, layer, decoders }
    }

    /// Verifies new random trees, commits random paths of them and decodes the same tokens. Slots
    /// 2 and 3 take snapshots of some requests. `check` compares a slot with a decoder.
    fn round(&mut self, rng: &mut Rng, check: &mut dyn FnMut(&Layer, usize, &Decoder<T>)) {
        let trees: Vec<Parents> = (0..2)
            .map(|_| {
                let num_nodes = 1 + rng.below(ROWS);
                trees::random(rng, num_nodes, MAX_DEPTH)
            })
            .collect();
        let idle: Vec<_> = trees.iter().map(|tree| ROWS - tree.len()).collect();
        let accepted: Vec<_> = trees.iter().map(|tree| random_path(rng, tree)).collect();
        let mut forward = Forward::new(rng, &self.spec, trees, MAX_DEPTH, &idle);
        let states = (self.layer.conv_state.clone(), self.layer.ssm_state.clone());
        assert_ok(forward.verify(&self.context, &self.layer));
        self.layer.conv_state.assert_untouched("conv_state", &states.0);
        self.layer.ssm_state.assert_untouched("ssm_state", &states.1);

        let mut snapshot_tokens = vec![0; 2];
        for r in 0..2 {
            let has_snapshot = rng.below(2) == 0;
            self.layer.snapshot_slots.as_mut().unwrap()[r] = if has_snapshot { 2 + r as i32 } else { -1 };
            snapshot_tokens[r] = if has_snapshot { 1 + rng.below(accepted[r].len() + 1) as i32 } else { -7 };
        }
        let paths: Vec<_> = accepted.iter().cloned().map(Some).collect();
        let mut call = Call::new(&forward.batch, &forward.query_start, &paths);
        call.norm_eps = self.spec.norm_eps;
        call.snapshot_tokens = Some(snapshot_tokens.clone());
        call.gdn_layers.push(self.layer.clone());
        assert_ok(call.run(&self.context));
        self.layer = call.gdn_layers.pop().unwrap();

        for r in 0..2 {
            for (i, node) in [0].iter().chain(&accepted[r]).enumerate() {
                let row = forward.row_of(r, *node);
                let gates: Vec<_> = (0..self.spec.num_v).map(|head| forward.gate_inputs(row, head)).collect();
                self.decoders[r].step(&self.layer, &forward.mixed_qkv.row(&[row]), &gates);
                if snapshot_tokens[r] == i as i32 + 1 {
                    check(&self.layer, 2 + r, &self.decoders[r]);
                }
            }
            check(&self.layer, r, &self.decoders[r]);
        }
    }
}

/// Asserts that a slot holds the window, and returns the distance of its state from the
/// decoder's, relative to the latter.
fn state_error<T: Real>(layer: &Layer, slot: usize, decoder: &Decoder<T>) -> f64 {
    for channel in 0..layer.spec.channels() {
        for tap in 0..3 {
            let want = decoder.window[tap][channel].wide();
            assert_eq!(layer.conv_state.get(&[slot, channel, tap]), want, "channel {channel} tap {tap}");
        }
    }
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for (head, state) in decoder.state.iter().enumerate() {
        for (k, row) in state.iter().enumerate() {
            for (v, x) in row.iter().enumerate() {
                got.push(layer.ssm_state.get(&[slot, head, v, k]));
                want.push(x.wide());
            }
        }
    }
    distance(&got, &want) / norm(&want)
}

#[test]
fn states_do_not_drift_from_plain_decoding_over_200_rounds() {
    let rng = &mut Rng(fresh_seed());
    let f32_spec = Spec::new(1, 1, DType::F32);
    for spec in [
        // hardly any decay, which forgets no error
        Spec { a: (-12.0, -8.0), ..f32_spec.clone() },
        f32_spec,
        Spec { strided: true, ..Spec::new(1, 1, DType::BF16) },
    ] {
        let mut session = Session::<f64>::new(rng, spec.clone());
        let mut largest = 0.0f64;
        for _ in 0..200 {
            session.round(rng, &mut |layer, slot, decoder| {
                let error = state_error(layer, slot, decoder);
                assert!(error <= 1e-5, "slot {slot}: {error:e} with {spec:?}");
                largest = largest.max(error);
            });
        }
        println!("a in {:?}, {}: {largest:e}", spec.a, spec.dtype.name());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 10, ..common::cases(12) })]

    /// The reference is written in the documented order of operations, so nothing may differ.
    #[test]
    fn states_equal_token_by_token_decoding_bit_for_bit(seed: u64, dtype in 0..3usize) {
        let rng = &mut Rng(seed);
        let dtype = [DType::F32, DType::F16, DType::BF16][dtype];
        let num_k = 1 + rng.below(2);
        let num_v = num_k * (1 + rng.below(2));
        let spec = Spec {
            strided: true,
            has_bias: rng.below(2) == 0,
            conv_state_dtype: [dtype, DType::F32][rng.below(2)],
            norm_eps: [0.0, 1e-3][rng.below(2)],
            ..Spec::new(num_k, num_v, dtype)
        };
        let mut session = Session::<f32>::new(rng, spec);
        for _ in 0..6 {
            session.round(rng, &mut |layer, slot, decoder| assert_eq!(state_error(layer, slot, decoder), 0.0));
        }
    }

    /// Random caches, paths and slots; what is not moved must keep its bytes, gaps included.
    #[test]
    fn kv_rows_move_as_if_gathered_and_scattered(seed: u64) {
        let rng = &mut Rng(seed);
        let mut trees: Vec<Parents> = (0..4).map(|_| {
            let num_nodes = 1 + rng.below(20);
            trees::random(rng, num_nodes, 8)
        }).collect();
        trees[2].clear();
        let query_start = [0, 24, 47, 49, 69];
        let accepted: Vec<_> = trees.iter().enumerate().map(|(r, tree)| match r {
            2 => Some(vec![]),
            3 => None,
            _ => Some(random_path(rng, tree)),
        }).collect();
        let batch = Batch::new(trees, 24, 8);
        let mut call = Call::new(&batch, &query_start, &accepted);
        call.accepted_nodes[2 * 8] = 77;
        call.num_accepted[2] = 1;
        let mut want = Vec::new();
        for _ in 0..3 {
            let layer = random_kv_layer(rng, 69);
            let mut moved = layer.clone();
            for cache in [&mut moved.key_cache, &mut moved.value_cache] {
                scatter(cache, &layer.row_slots, &query_start, &accepted);
            }
            want.push(moved);
            call.kv_layers.push(layer);
        }
        assert_ok(call.run(&Context::new()));
        for (layer, want) in call.kv_layers.iter().zip(&want) {
            prop_assert!(layer.key_cache.bytes() == want.key_cache.bytes());
            prop_assert!(layer.value_cache.bytes() == want.value_cache.bytes());
        }
    }
}

/// A cache of random bytes, with distinct random slots for all rows.
fn random_kv_layer(rng: &mut Rng, num_rows: usize) -> KvLayer {
    let block_size = [1, 5, 16, 48][rng.below(4)];
    let num_blocks = num_rows.div_ceil(block_size) + 2;
    let num_heads = 1 + rng.below(3);
    let mut cache = |dims: &[usize]| {
        let dtype = [DType::U8, DType::F16, DType::BF16, DType::F32, DType::I64][rng.below(5)];
        let shape = [num_blocks, num_heads, block_size, dims[rng.below(dims.len())]];
        let order = Order::random(rng, 4);
        let mut cache = Buffer::new(dtype, &shape, &order);
        for index in cache.indices() {
            let bytes = rng.next().to_ne_bytes();
            cache.set_raw(&index, &bytes[..dtype.size()]);
        }
        cache
    };
    let (key_cache, value_cache) = (cache(&[1, 7, 32]), cache(&[3, 32]));
    let slots = rng.permutation(num_blocks * block_size);
    KvLayer { key_cache, value_cache, row_slots: slots[..num_rows].iter().map(|&slot| slot as i64).collect() }
}

/// Moves rows one request after the other: gather all that move, then scatter them.
fn scatter(cache: &mut Buffer, row_slots: &[i64], query_start: &[i32], accepted: &[Option<Vec<usize>>]) {
    let [_, num_heads, block_size, dim] = cache.shape[..] else { unreachable!() };
    for (r, nodes) in accepted.iter().enumerate() {
        let slot = |node: usize| row_slots[query_start[r] as usize + node] as usize;
        let elements = |slot: usize| {
            (0..num_heads)
                .flat_map(move |head| (0..dim).map(move |d| [slot / block_size, head, slot % block_size, d]))
        };
        let nodes = nodes.as_deref().unwrap_or_default();
        let gathered: Vec<Vec<Vec<u8>>> = nodes
            .iter()
            .map(|&node| elements(slot(node)).map(|index| cache.raw(&index).to_vec()).collect())
            .collect();
        for (i, row) in gathered.iter().enumerate() {
            for (index, element) in elements(slot(i + 1)).zip(row) {
                cache.set_raw(&index, element);
            }
        }
    }
}

/// One verified request with tree and cache, in a batch with a padding request.
fn small_call(rng: &mut Rng) -> Call {
    let spec = Spec::new(1, 2, DType::F32);
    let mut layer = Layer::new(rng, &spec, 11);
    layer.state_slots = vec![1, 3];
    // 0 - 1 - 2, 1 - 3 - 4, 0 - 5
    let mut forward = Forward::new(rng, &spec, vec![vec![-1, 0, 1, 1, 3, 0], trees::chain(3)], 4, &[1, 1]);
    assert_ok(forward.verify(&Context::new(), &layer));
    let accepted = [Some(vec![1, 3, 4]), Some(vec![])];
    let mut call = Call::new(&forward.batch, &forward.query_start, &accepted);
    layer.snapshot_slots = Some(vec![2, -1]);
    call.snapshot_tokens = Some(vec![2, 0]);
    call.gdn_layers = vec![layer.clone(), layer];
    call.kv_layers = vec![random_kv_layer(rng, 11), random_kv_layer(rng, 11)];
    call
}

#[test]
fn skipped_requests_and_their_slots_stay_as_they_are() {
    let rng = &mut Rng(fresh_seed());
    let context = Context::new();
    for skip in 0..3 {
        let mut call = small_call(rng);
        match skip {
            0 => call.num_accepted[0] = -1,
            1 => call.batch.num_nodes[0] = 0,
            _ => call.gdn_layers[0].state_slots[0] = -5,
        }
        let before = call.clone();
        assert_ok(call.run(&context));
        for layer in 0..2 {
            let (now, then) = (&call.gdn_layers[layer], &before.gdn_layers[layer]);
            // with the slot of one layer missing, the other layers go on
            let is_skipped = skip < 2 || layer == 0;
            let may_write = |index: &[usize]| index[0] == 3 || !is_skipped && index[0] != 0;
            now.ssm_state.assert_only_written("ssm_state", &then.ssm_state, may_write);
            now.conv_state.assert_only_written("conv_state", &then.conv_state, may_write);
            let request_1 = [3, 0, 0, 0];
            assert_ne!(now.ssm_state.raw(&request_1), then.ssm_state.raw(&request_1));
            let request_0 = [1, 0, 0, 0];
            assert_eq!(now.ssm_state.raw(&request_0) == then.ssm_state.raw(&request_0), is_skipped);
            let (now, then) = (&call.kv_layers[layer], &before.kv_layers[layer]);
            assert_eq!(now.key_cache.bytes() == then.key_cache.bytes(), skip < 2);
        }
    }
}

#[test]
fn a_spine_moves_no_kv_and_needs_no_slots() {
    let rng = &mut Rng(fresh_seed());
    let batch = Batch::new(vec![trees::chain(5)], 8, 7);
    let mut call = Call::new(&batch, &[0, 6], &[Some(vec![1, 2, 3, 4])]);
    call.kv_layers.push(random_kv_layer(rng, 6));
    call.kv_layers[0].row_slots.fill(-1);
    let before = call.clone();
    assert_ok(call.run(&Context::new()));
    call.assert_unwritten(&before);
}

#[test]
fn layers_may_use_different_slots() {
    let rng = &mut Rng(fresh_seed());
    let mut call = small_call(rng);
    call.gdn_layers[1].snapshot_slots = None;
    call.gdn_layers[1].state_slots = vec![0, 2];
    let before = call.clone();
    assert_ok(call.run(&Context::new()));
    let written = |layer: usize, slot: usize| {
        let states = (&call.gdn_layers[layer].ssm_state, &before.gdn_layers[layer].ssm_state);
        let index = [slot, 0, DIM - 1, DIM - 1];
        states.0.raw(&index) != states.1.raw(&index)
    };
    assert_eq!([0, 1, 2, 3].map(|slot| written(0, slot)), [false, true, true, true]);
    assert_eq!([0, 1, 2, 3].map(|slot| written(1, slot)), [true, false, true, false]);
}

#[test]
fn nothing_to_commit_is_fine() {
    let context = Context::new();
    let mut call = Call::new(&Batch::new(vec![], 1, 0), &[0], &[]);
    assert_ok(call.run(&context));
    let mut call = small_call(&mut Rng(1));
    call.gdn_layers.clear();
    call.kv_layers.clear();
    call.snapshot_tokens = None;
    assert_ok(call.run(&context));
}

/// Each change to a valid call, with the status and a word of the message it must give.
const REFUSED: &[(ddt_status, &str, Change)] = &[
    (DDT_INVALID_STRUCT, "struct_size", |params, _, _, _| params.struct_size = 8),
    (DDT_UNSUPPORTED, "flags", |params, _, _, _| params.flags = 4),
    (DDT_UNSUPPORTED, "reserved0", |params, _, _, _| params.reserved0 = 1),
    (DDT_INVALID_VALUE, "num_gdn_layers", |params, _, _, _| params.num_gdn_layers = -1),
    (DDT_INVALID_VALUE, "num_kv_layers", |params, _, _, _| params.num_kv_layers = i32::MIN),
    (DDT_NULL_POINTER, "gdn_layers", |params, _, _, _| params.gdn_layers = null()),
    (DDT_NULL_POINTER, "kv_layers", |params, _, _, _| params.kv_layers = null()),
    (DDT_NULL_POINTER, "tree", |params, _, _, _| params.tree = null_mut()),
    (DDT_NULL_POINTER, "tree.num_nodes", |_, tree, _, _| tree.num_nodes = null_mut()),
    (DDT_NULL_POINTER, "query_start", |params, _, _, _| params.query_start = null()),
    (DDT_NULL_POINTER, "num_accepted", |params, _, _, _| params.num_accepted = null()),
    (DDT_NULL_POINTER, "accepted_nodes", |params, _, _, _| params.accepted_nodes = null()),
    (DDT_NULL_POINTER, "snapshot_tokens", |params, _, _, _| params.snapshot_tokens = null()),
    (DDT_NULL_POINTER, "gdn_layers[1]: state_slots", |_, _, layers, _| layers[1].state_slots = null()),
    (DDT_NULL_POINTER, "kv_layers[1]: row_slots", |_, _, _, layers| layers[1].row_slots = null()),
    (DDT_NULL_POINTER, "kv_layers[1]: key_cache", |_, _, _, layers| layers[1].key_cache.data = null_mut()),
    (DDT_MISALIGNED, "accepted_nodes", |params, _, _, _| {
        params.accepted_nodes = params.accepted_nodes.wrapping_byte_add(1)
    }),
    (DDT_MISALIGNED, "gdn_layers[1]: ssm_state", |_, _, layers, _| {
        layers[1].ssm_state.data = layers[1].ssm_state.data.wrapping_byte_add(1)
    }),
    (DDT_MISALIGNED, "kv_layers[0]: row_slots", |_, _, _, layers| {
        layers[0].row_slots = layers[0].row_slots.wrapping_byte_add(4)
    }),
    (DDT_INVALID_DTYPE, "gdn_layers[1]: ssm_state", |_, _, layers, _| {
        layers[1].ssm_state.dtype = DDT_DTYPE_BF16
    }),
    (DDT_INVALID_DTYPE, "gdn_layers[1]: conv_state", |_, _, layers, _| {
        layers[1].conv_state.dtype = DDT_DTYPE_BF16
    }),
    (DDT_INVALID_DTYPE, "gdn_layers[1]: stash_qkv", |_, _, layers, _| {
        layers[1].stash_qkv.dtype = DDT_DTYPE_U8
    }),
    (DDT_INVALID_DTYPE, "kv_layers[1]: key_cache", |_, _, _, layers| layers[1].key_cache.dtype = 9),
    (DDT_INVALID_SHAPE, "gdn_layers[1]: stash_qkv", |_, _, layers, _| layers[1].stash_qkv.shape[0] = 10),
    (DDT_INVALID_SHAPE, "gdn_layers[1]: stash_gates", |_, _, layers, _| layers[1].stash_gates.shape[0] = 10),
    (DDT_INVALID_SHAPE, "gdn_layers[1]: stash_qkv channels", |_, _, layers, _| {
        layers[1].stash_qkv.shape[1] -= 128
    }),
    (DDT_INVALID_SHAPE, "gdn_layers[1]: conv_weight", |_, _, layers, _| layers[1].conv_weight.shape[0] -= 1),
    (DDT_INVALID_SHAPE, "gdn_layers[1]: conv_state", |_, _, layers, _| layers[1].conv_state.shape[2] = 4),
    (DDT_INVALID_SHAPE, "gdn_layers[1]: ssm_state", |_, _, layers, _| layers[1].ssm_state.shape[2] = 127),
    (DDT_INVALID_SHAPE, "gdn_layers[1]: ssm_state", |_, _, layers, _| {
        layers[1].ssm_state.strides[0] = i64::MAX / 2;
    }),
    (DDT_INVALID_SHAPE, "kv_layers[1]: value_cache", |_, _, _, layers| layers[1].value_cache.shape[0] -= 1),
    (DDT_INVALID_SHAPE, "kv_layers[1]: value_cache", |_, _, _, layers| layers[1].value_cache.shape[2] += 1),
    (DDT_INVALID_SHAPE, "max_depth", |_, tree, _, _| tree.max_depth = 64),
    (DDT_INVALID_VALUE, "norm_eps", |params, _, _, _| params.norm_eps = f32::NAN),
    (DDT_INVALID_VALUE, "gdn_layers[1]: state_slots[1]", |_, _, layers, _| {
        layers[1].ssm_state.shape[0] = 3;
        layers[1].snapshot_slots = null();
    }),
    (DDT_INVALID_VALUE, "gdn_layers[1]: snapshot_slots[0]", |_, _, layers, _| {
        layers[1].conv_state.shape[0] = 2;
    }),
    (DDT_INVALID_VALUE, "kv_layers[1]: row_slots[", |_, _, _, layers| {
        layers[1].key_cache.shape[0] = 0;
        layers[1].value_cache.shape[0] = 0;
    }),
];

#[test]
fn a_bad_call_is_refused_and_writes_nothing() {
    let rng = &mut Rng(fresh_seed());
    let context = Context::new();
    let mut call = small_call(rng);
    let before = call.clone();
    for (i, (status, text, change)) in REFUSED.iter().enumerate() {
        let got = call.run_changed(&context, *change);
        let message = last_error();
        assert_eq!(got, *status, "case {i} ({text}): {message}");
        assert!(message.starts_with("commit: ") && message.contains(text), "case {i} ({text}): {message}");
        call.assert_unwritten(&before);
    }

    let refuse = |text: &str, change: fn(&mut Call)| {
        let mut call = before.clone();
        change(&mut call);
        assert_eq!(call.run(&context), DDT_INVALID_VALUE, "{text}: {}", last_error());
        assert!(last_error().contains(text), "{text}: {}", last_error());
        call.assert_unwritten(&before);
    };
    refuse("num_accepted[0]", |call| call.num_accepted[0] = -2);
    refuse("num_accepted[0]", |call| call.num_accepted[0] = 5);
    // no more than the nodes below the root
    refuse("num_accepted[1]", |call| call.num_accepted[1] = 3);
    refuse("accepted_nodes[0][0]", |call| call.accepted_nodes[0] = 0);
    refuse("accepted_nodes[0][0]", |call| call.accepted_nodes[0] = -1);
    refuse("accepted_nodes[0][1]", |call| call.accepted_nodes[1] = 1);
    refuse("accepted_nodes[0][2]", |call| call.accepted_nodes[2] = 6);
    refuse("accepted_nodes[0][2]", |call| call.accepted_nodes[2] = i32::MAX);
    refuse("num_nodes[0]", |call| call.batch.num_nodes[0] = 8);
    refuse("query_start", |call| call.query_start[0] = -1);
    refuse("query_start", |call| call.query_start[1] = 12);
    refuse("snapshot_tokens[0]", |call| call.snapshot_tokens.as_mut().unwrap()[0] = 0);
    refuse("snapshot_tokens[0]", |call| call.snapshot_tokens.as_mut().unwrap()[0] = 5);
    refuse("gdn_layers[1]: state_slots[0]", |call| call.gdn_layers[1].state_slots[0] = 4);
    refuse("gdn_layers[1]: state_slots[0]", |call| call.gdn_layers[1].state_slots[0] = i32::MAX);
    refuse("gdn_layers[1]: state_slots and snapshot_slots: got 1 twice", |call| {
        call.gdn_layers[1].state_slots[1] = 1
    });
    refuse("gdn_layers[1]: state_slots and snapshot_slots: got 1 twice", |call| {
        call.gdn_layers[1].snapshot_slots.as_mut().unwrap()[0] = 1
    });
    refuse("gdn_layers[1]: state_slots and snapshot_slots: got 3 twice", |call| {
        call.gdn_layers[1].snapshot_slots.as_mut().unwrap()[0] = 3
    });
    // accepted nodes 3 and 4 move to nodes 2 and 3
    refuse("kv_layers[1]: row_slots[4]", |call| call.kv_layers[1].row_slots[4] = -1);
    refuse("kv_layers[1]: row_slots[2]", |call| call.kv_layers[1].row_slots[2] = -1);
    refuse("kv_layers[1]: row_slots[4]", |call| call.kv_layers[1].row_slots[4] = i64::MAX);
    refuse("kv_layers[1]: row_slots of rows that are moved to", |call| {
        call.kv_layers[1].row_slots[3] = call.kv_layers[1].row_slots[2]
    });

    // SAFETY: NULL is allowed.
    assert_eq!(unsafe { ddt_commit(null(), null(), null_mut()) }, DDT_NULL_POINTER);
    // SAFETY: as above.
    assert_eq!(unsafe { ddt_commit(context.0, null(), null_mut()) }, DDT_NULL_POINTER);
    // the same call without a change works
    assert_ok(call.run(&context));
}

#[test]
fn the_cpu_needs_no_workspace() {
    let params = ddt_commit_params {
        struct_size: size_of::<ddt_commit_params>() as u32,
        flags: 0,
        num_gdn_layers: 0,
        num_kv_layers: 0,
        gdn_layers: null(),
        kv_layers: null(),
        tree: null_mut(),
        query_start: null(),
        num_accepted: null(),
        accepted_nodes: null(),
        snapshot_tokens: null(),
        norm_eps: 0.0,
        reserved0: 0,
        workspace: null_mut(),
        workspace_bytes: 0,
    };
    let (context, mut bytes) = (Context::new(), 1);
    // SAFETY: both pointers are to locals.
    assert_ok(unsafe { ddt_commit_workspace_size(context.0, &params, &mut bytes) });
    assert_eq!(bytes, 0);
}
