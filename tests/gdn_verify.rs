// SPDX-License-Identifier: Apache-2.0
//! `gdn_verify` against the float64 recurrence along the path of every node.

mod common;

use std::ptr::{null, null_mut};

use ddtree::ffi::*;
use ddtree::{DType, GdnVerify, TensorMut, TensorRef};
use proptest::prelude::*;

use common::buffers::{ABSENT, Context, last_error};
use common::gdn::{self, DIM, Decoder, Forward, Layer, Spec, gates_of};
use common::numbers::{Rng, distance, fresh_seed, norm};
use common::tensor::Buffer;
use common::trees::{self, Parents};

/// Asserts success and shows the library's message otherwise.
#[track_caller]
fn assert_ok(status: ddt_status) {
    assert_eq!(status, DDT_OK, "{}", last_error());
}

/// Outputs by row, `[Hv][128]`, of the recurrence started from the state of each node's parent.
fn recurrence(layer: &Layer, forward: &Forward) -> Vec<(usize, Vec<Vec<f64>>)> {
    let mut outs = Vec::new();
    for (r, tree) in forward.batch.trees.iter().enumerate() {
        let Ok(slot) = usize::try_from(layer.state_slots[r]) else { continue };
        let mut decoders: Vec<Decoder<f64>> = Vec::new();
        for (node, &parent) in tree.iter().enumerate() {
            let row = forward.row_of(r, node);
            let gates: Vec<_> = (0..layer.spec.num_v).map(|head| forward.gate_inputs(row, head)).collect();
            let mut decoder =
                if node == 0 { Decoder::load(layer, slot) } else { decoders[parent as usize].clone() };
            outs.push((row, decoder.step(layer, &forward.mixed_qkv.row(&[row]), &gates)));
            decoders.push(decoder);
        }
    }
    outs
}

/// Largest error of the output of any node and head, as a vector, relative to the largest output
/// of the batch. (A single output can be small by cancellation in q . k, in f32 and f64 alike.)
fn largest_error(layer: &Layer, forward: &Forward) -> f64 {
    let (mut error, mut size) = (0.0f64, 0.0f64);
    for (row, want) in recurrence(layer, forward) {
        for (head, want) in want.iter().enumerate() {
            let distance = distance(&forward.out.row(&[row, head]), want);
            assert!(distance.is_finite(), "row {row} head {head} is not finite");
            error = error.max(distance);
            size = size.max(norm(want));
        }
    }
    error / size
}

/// One request with a tree, verified; the slot is 1.
fn verified(rng: &mut Rng, spec: &Spec, tree: Parents) -> (Layer, Forward) {
    let mut layer = Layer::new(rng, spec, tree.len());
    layer.state_slots = vec![1];
    let mut forward = Forward::new(rng, spec, vec![tree], 32, &[0]);
    assert_ok(forward.verify(&Context::new(), &layer));
    (layer, forward)
}

/// A batch with a padding request by node count, one by slot, idle rows and a shared slot.
fn mixed_batch(rng: &mut Rng, spec: &Spec) -> (Layer, Forward) {
    let mut trees: Vec<Parents> = (0..5)
        .map(|_| {
            let num_nodes = 1 + rng.below(16);
            trees::random(rng, num_nodes, 7)
        })
        .collect();
    trees[1].clear();
    let idle = [0, 3, 2, 1, 0];
    let forward = Forward::new(rng, spec, trees, 7, &idle);
    let mut layer = Layer::new(rng, spec, forward.num_rows());
    layer.state_slots = vec![2, 0, 3, -1, 2];
    (layer, forward)
}

fn random_spec(rng: &mut Rng, dtype: DType) -> Spec {
    let num_k = 1 + rng.below(2);
    let num_v = num_k * (1 + rng.below(3));
    Spec {
        has_bias: rng.below(2) == 0,
        strided: true,
        norm_eps: [0.0, 1e-6, 1e-3][rng.below(3)],
        conv_state_dtype: [dtype, DType::F32][rng.below(2)],
        ..Spec::new(num_k, num_v, dtype)
    }
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { max_shrink_iters: 20, ..common::cases(cases) }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn batches_of_random_trees_match_the_recurrence(seed: u64) {
        let rng = &mut Rng(seed);
        let spec = random_spec(rng, DType::F32);
        let (layer, mut forward) = mixed_batch(rng, &spec);
        assert_ok(forward.verify(&Context::new(), &layer));
        let error = largest_error(&layer, &forward);
        prop_assert!(error <= 1e-5, "{error:e} of {spec:?}");
    }

    /// q, k and v are rounded in the reference as well, so the bound is that of f32.
    #[test]
    fn narrow_inputs_match_the_recurrence(seed: u64, is_f16: bool) {
        let rng = &mut Rng(seed);
        let dtype = if is_f16 { DType::F16 } else { DType::BF16 };
        let spec = random_spec(rng, dtype);
        let (layer, mut forward) = mixed_batch(rng, &spec);
        assert_ok(forward.verify(&Context::new(), &layer));
        let error = largest_error(&layer, &forward);
        prop_assert!(error <= 1e-5, "{error:e} of {spec:?}");
    }
}

#[test]
fn special_trees_match_the_recurrence() {
    let rng = &mut Rng(fresh_seed());
    let random_255 = trees::random(rng, 256, 32);
    let deep = trees::deep(rng, 32);
    for (name, tree) in [
        ("root alone", trees::chain(1)),
        ("chain", trees::chain(16)),
        ("chain of the largest depth", trees::chain(33)),
        ("star", trees::star(64)),
        ("deep with side branches", deep),
        ("255 nodes below the root", random_255),
    ] {
        let (layer, forward) = verified(rng, &Spec::new(1, 2, DType::F32), tree);
        let error = largest_error(&layer, &forward);
        println!("{name}: {error:e}");
        assert!(error <= 1e-5, "{name}: {error:e}");
    }
}

#[test]
fn equal_keys_that_replace_all_memory_match_the_recurrence() {
    let rng = &mut Rng(fresh_seed());
    let spec = Spec {
        equal_keys: true,
        norm_eps: 1e-12,
        a: (-40.0, -30.0),
        b: (30.0, 40.0),
        ..Spec::new(1, 1, DType::F32)
    };
    for tree in [trees::chain(33), trees::random(rng, 64, 32)] {
        let (layer, forward) = verified(rng, &spec, tree);
        // the premise: beta is 1 and nothing decays
        let gates: (f32, f32) = gates_of(&layer, forward.gate_inputs(0, 0), 0);
        assert!(gates.0 > -1e-10 && gates.1 == 1.0, "{gates:?}");
        let error = largest_error(&layer, &forward);
        println!("{error:e}");
        assert!(error <= 1e-5, "{error:e}");
    }
}

#[test]
fn saturated_decay_matches_the_recurrence() {
    let rng = &mut Rng(fresh_seed());
    let spec = Spec { a: (-60.0, 60.0), ..Spec::new(1, 2, DType::F32) };
    for tree in [trees::chain(33), trees::star(32), trees::random(rng, 64, 32)] {
        let (layer, forward) = verified(rng, &spec, tree);
        let decays: Vec<f64> = (0..forward.num_rows())
            .map(|row| gates_of::<f64>(&layer, forward.gate_inputs(row, 0), 0).0)
            .collect();
        assert!(decays.iter().any(|&g| g < -20.0) && decays.iter().any(|&g| g > -1e-3), "{decays:?}");
        let error = largest_error(&layer, &forward);
        println!("{error:e}");
        assert!(error <= 1e-5, "{error:e}");
    }
    // decays whose exponent underflows, and even overflows as a sum, leave finite outputs
    let spec = Spec { a: (1e38, 3e38), ..spec };
    let (layer, forward) = verified(rng, &spec, trees::chain(8));
    assert!(largest_error(&layer, &forward) <= 1e-5);
}

#[test]
fn outputs_are_rounded_to_their_dtype() {
    let seed = fresh_seed();
    let run = |out_dtype| {
        let rng = &mut Rng(seed);
        verified(rng, &Spec { out_dtype, ..Spec::new(1, 1, DType::F32) }, trees::chain(9)).1.out
    };
    let exact = run(DType::F32);
    for dtype in [DType::F16, DType::BF16] {
        let narrow = run(dtype);
        for index in exact.indices() {
            assert_eq!(narrow.get(&index), gdn::round(dtype, exact.get(&index)), "{index:?}");
        }
    }
}

#[test]
fn writes_outputs_and_stash_of_nodes_and_nothing_else() {
    let rng = &mut Rng(fresh_seed());
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let spec = Spec { strided: true, ..Spec::new(1, 2, dtype) };
        let (layer, mut forward) = mixed_batch(rng, &spec);
        let (layer_before, before) = (layer.clone(), forward.clone());
        assert_ok(forward.verify(&Context::new(), &layer));
        let is_active = |r: usize| layer.state_slots[r] >= 0 && !forward.batch.trees[r].is_empty();
        let owner = |row: usize| {
            let row = row as i32;
            (0..5).find(|&r| (forward.query_start[r]..forward.query_start[r + 1]).contains(&row)).unwrap()
        };
        let is_node = |row: usize| {
            let r = owner(row);
            is_active(r) && row < forward.row_of(r, forward.batch.trees[r].len())
        };
        forward.out.assert_only_written("out", &before.out, |index| is_active(owner(index[0])));
        layer.stash_qkv.assert_only_written("stash_qkv", &layer_before.stash_qkv, |index| is_node(index[0]));
        layer
            .stash_gates
            .assert_only_written("stash_gates", &layer_before.stash_gates, |index| is_node(index[0]));
        layer.conv_state.assert_untouched("conv_state", &layer_before.conv_state);
        layer.ssm_state.assert_untouched("ssm_state", &layer_before.ssm_state);
        forward.mixed_qkv.assert_untouched("mixed_qkv", &before.mixed_qkv);
        let mut idle_rows = 0;
        for row in 0..forward.num_rows() {
            if is_node(row) {
                for channel in 0..spec.channels() {
                    assert_eq!(layer.stash_qkv.raw(&[row, channel]), forward.mixed_qkv.raw(&[row, channel]));
                }
                for head in 0..2 {
                    let gates: (f32, f32) = gates_of(&layer, forward.gate_inputs(row, head), head);
                    assert_eq!(layer.stash_gates.get(&[row, 0, head]), f64::from(gates.0));
                    assert_eq!(layer.stash_gates.get(&[row, 1, head]), f64::from(gates.1));
                }
            } else if is_active(owner(row)) {
                idle_rows += 1;
                for head in 0..2 {
                    assert_eq!(forward.out.row(&[row, head]), [0.0; DIM]);
                }
            }
        }
        assert_eq!(idle_rows, 2);
    }
}

#[test]
fn a_request_does_not_depend_on_the_others() {
    let rng = &mut Rng(fresh_seed());
    let spec = Spec::new(1, 1, DType::F32);
    let (mut layer, mut forward) = mixed_batch(rng, &spec);
    let context = Context::new();
    assert_ok(forward.verify(&context, &layer));
    let together = forward.out.clone();
    for alone in [0, 2, 4] {
        let mut slots = vec![-1; 5];
        slots[alone] = layer.state_slots[alone];
        let all = std::mem::replace(&mut layer.state_slots, slots);
        assert_ok(forward.verify(&context, &layer));
        layer.state_slots = all;
        assert_eq!(forward.out.bytes(), together.bytes());
    }
}

#[test]
fn a_node_does_not_depend_on_nodes_off_its_path() {
    let rng = &mut Rng(fresh_seed());
    let spec = Spec::new(1, 1, DType::F32);
    let parents = trees::random(rng, 24, 6);
    let mut layer = Layer::new(rng, &spec, 24);
    layer.state_slots = vec![0];
    let mut forward = Forward::new(rng, &spec, vec![parents.clone()], 6, &[0]);
    let context = Context::new();
    assert_ok(forward.verify(&context, &layer));
    let clean = forward.out.clone();
    let poisoned = 1 + rng.below(23);
    for channel in 0..spec.channels() {
        forward.mixed_qkv.set(&[poisoned, channel], f64::NAN);
    }
    assert_ok(forward.verify(&context, &layer));
    for node in 0..24 {
        let out = forward.out.row(&[node, 0]);
        if trees::path(&parents, node).contains(&poisoned) {
            assert!(out.iter().all(|x| x.is_nan()), "node {node} under {poisoned}");
        } else {
            assert_eq!(out, clean.row(&[node, 0]), "node {node} beside {poisoned}");
        }
    }
}

#[test]
fn scale_multiplies_the_outputs() {
    let rng = &mut Rng(fresh_seed());
    let (layer, mut forward) = verified(rng, &Spec::new(1, 1, DType::F32), trees::chain(4));
    let default = forward.out.clone();
    let mut tree = forward.batch.tree();
    let mut params = forward.params(&layer);
    params.tree = &mut tree;
    params.scale = 3.0;
    // SAFETY: every pointer is to a buffer that lives.
    assert_ok(unsafe { ddt_gdn_verify(Context::new().0, &params, null_mut()) });
    for row in 0..4 {
        let want: Vec<f64> = default.row(&[row, 0]).iter().map(|x| x * 3.0 * (DIM as f64).sqrt()).collect();
        assert!(distance(&forward.out.row(&[row, 0]), &want) < 1e-6 * norm(&want));
    }
}

#[test]
fn the_rust_entry_is_the_same_operation() {
    let rng = &mut Rng(fresh_seed());
    let (layer, forward) = verified(rng, &Spec::new(1, 1, DType::F32), trees::star(3));
    let values =
        |buffer: &Buffer| -> Vec<f32> { buffer.indices().map(|index| buffer.get(&index) as f32).collect() };
    let inputs = [
        &layer.conv_weight,
        layer.conv_bias.as_ref().unwrap(),
        &layer.conv_state,
        &layer.ssm_state,
        &forward.mixed_qkv,
        &forward.a,
        &forward.b,
        &layer.a_log,
        &layer.dt_bias,
    ]
    .map(|buffer| (values(buffer), buffer.shape.clone()));
    let [conv_weight, conv_bias, conv_state, ssm_state, mixed_qkv, a, b, a_log, dt_bias] =
        inputs.each_ref().map(|(values, shape)| TensorRef::new(values, shape).unwrap());
    let (mut out, mut qkv, mut gates) = (vec![0.0f32; 3 * DIM], vec![0.0f32; 3 * 3 * DIM], vec![0.0f32; 6]);
    ddtree::gdn_verify(GdnVerify {
        conv_weight,
        conv_bias: Some(conv_bias),
        conv_state,
        ssm_state,
        state_slots: &[1],
        mixed_qkv,
        a,
        b,
        a_log,
        dt_bias,
        query_start: &[0, 3],
        max_nodes: 3,
        max_depth: 1,
        num_nodes: &[3],
        parents: &[-1, 0, 0],
        depths: &[0, 1, 1],
        ancestors: &[0, -1, 0, 1, 0, 2],
        scale: 0.0,
        norm_eps: layer.spec.norm_eps,
        stash_qkv: TensorMut::new(&mut qkv, &[3, 3 * DIM]).unwrap(),
        stash_gates: TensorMut::new(&mut gates, &[3, 2, 1]).unwrap(),
        out: TensorMut::new(&mut out, &[3, 1, DIM]).unwrap(),
    })
    .unwrap();
    assert_eq!(out, values(&forward.out));
    assert_eq!(qkv, values(&layer.stash_qkv));
    assert_eq!(gates, values(&layer.stash_gates));
}

type Change = fn(&mut ddt_gdn_verify_params, &mut ddt_tree);

/// Each change to a valid call, with the status and a word of the message it must give.
const REFUSED: &[(ddt_status, &str, Change)] = &[
    (DDT_INVALID_STRUCT, "struct_size", |params, _| params.struct_size = 12),
    (DDT_UNSUPPORTED, "flags", |params, _| params.flags = 1),
    (DDT_NULL_POINTER, "tree", |params, _| params.tree = null_mut()),
    (DDT_NULL_POINTER, "tree.parents", |_, tree| tree.parents = null_mut()),
    (DDT_NULL_POINTER, "tree.depths", |_, tree| tree.depths = null_mut()),
    (DDT_NULL_POINTER, "tree.ancestors", |_, tree| tree.ancestors = null_mut()),
    (DDT_NULL_POINTER, "tree.num_nodes", |_, tree| tree.num_nodes = null_mut()),
    (DDT_NULL_POINTER, "query_start", |params, _| params.query_start = null()),
    (DDT_NULL_POINTER, "state_slots", |params, _| params.layer.state_slots = null()),
    (DDT_NULL_POINTER, "mixed_qkv", |params, _| params.mixed_qkv.data = null_mut()),
    (DDT_NULL_POINTER, "out", |params, _| params.out = ABSENT),
    (DDT_MISALIGNED, "state_slots", |params, _| {
        params.layer.state_slots = params.layer.state_slots.wrapping_byte_add(2)
    }),
    (DDT_MISALIGNED, "out", |params, _| params.out.data = params.out.data.wrapping_byte_add(1)),
    (DDT_MISALIGNED, "ssm_state", |params, _| {
        params.layer.ssm_state.data = params.layer.ssm_state.data.wrapping_byte_add(2)
    }),
    (DDT_INVALID_DTYPE, "mixed_qkv", |params, _| params.mixed_qkv.dtype = DDT_DTYPE_I32),
    (DDT_INVALID_DTYPE, "ssm_state", |params, _| params.layer.ssm_state.dtype = DDT_DTYPE_F16),
    (DDT_INVALID_DTYPE, "conv_state", |params, _| params.layer.conv_state.dtype = DDT_DTYPE_BF16),
    (DDT_INVALID_DTYPE, "stash_qkv", |params, _| params.layer.stash_qkv.dtype = DDT_DTYPE_F16),
    (DDT_INVALID_DTYPE, "stash_gates", |params, _| params.layer.stash_gates.dtype = DDT_DTYPE_F16),
    (DDT_INVALID_DTYPE, "out dtype", |params, _| params.out.dtype = 77),
    (DDT_INVALID_SHAPE, "mixed_qkv ndim", |params, _| params.mixed_qkv.ndim = 3),
    (DDT_INVALID_SHAPE, "channels", |params, _| params.mixed_qkv.shape[1] -= 1),
    (DDT_INVALID_SHAPE, "mixed_qkv", |params, _| params.mixed_qkv.shape[0] = -1),
    (DDT_INVALID_SHAPE, "memory", |params, _| {
        params.mixed_qkv.shape[0] = i64::MAX / 2;
        params.mixed_qkv.strides[0] = 1 << 40;
    }),
    (DDT_INVALID_SHAPE, "a shape", |params, _| params.a.shape[0] -= 1),
    (DDT_INVALID_SHAPE, "b shape", |params, _| params.b.shape[1] -= 1),
    (DDT_INVALID_SHAPE, "a_log", |params, _| params.a_log.shape[0] = 3),
    (DDT_INVALID_SHAPE, "dt_bias", |params, _| params.dt_bias.shape[0] = 3),
    (DDT_INVALID_SHAPE, "conv_weight", |params, _| params.layer.conv_weight.shape[1] = 3),
    (DDT_INVALID_SHAPE, "conv_bias", |params, _| params.layer.conv_bias.shape[0] -= 1),
    (DDT_INVALID_SHAPE, "conv_state", |params, _| params.layer.conv_state.shape[2] = 2),
    (DDT_INVALID_SHAPE, "ssm_state", |params, _| params.layer.ssm_state.shape[3] = 64),
    (DDT_INVALID_SHAPE, "heads", |params, _| params.layer.ssm_state.shape[1] = 1),
    (DDT_INVALID_SHAPE, "stash_qkv", |params, _| params.layer.stash_qkv.shape[0] -= 1),
    (DDT_INVALID_SHAPE, "stash_gates", |params, _| params.layer.stash_gates.shape[1] = 1),
    (DDT_INVALID_SHAPE, "stash_gates", |params, _| params.layer.stash_gates.shape[0] -= 1),
    (DDT_INVALID_SHAPE, "out shape", |params, _| params.out.shape[2] = 64),
    (DDT_INVALID_SHAPE, "out strides", |params, _| params.out.strides[0] = 0),
    (DDT_INVALID_SHAPE, "num_reqs", |_, tree| tree.num_reqs = -1),
    (DDT_INVALID_SHAPE, "max_nodes", |_, tree| tree.max_nodes = 257),
    (DDT_INVALID_SHAPE, "max_depth", |_, tree| tree.max_depth = 33),
    (DDT_INVALID_VALUE, "scale", |params, _| params.scale = f32::NAN),
    (DDT_INVALID_VALUE, "norm_eps", |params, _| params.norm_eps = -1.0),
    (DDT_INVALID_VALUE, "norm_eps", |params, _| params.norm_eps = f32::INFINITY),
    (DDT_INVALID_VALUE, "state_slots[0]", |params, _| {
        params.layer.ssm_state.shape[0] = 1;
    }),
    (DDT_INVALID_VALUE, "state_slots[0]", |params, _| {
        params.layer.conv_state.shape[0] = 1;
    }),
];

#[test]
fn a_bad_call_is_refused_and_writes_nothing() {
    let rng = &mut Rng(fresh_seed());
    let spec = Spec::new(1, 2, DType::F32);
    let context = Context::new();
    let mut layer = Layer::new(rng, &spec, 9);
    layer.state_slots = vec![1];
    let tree = trees::random(rng, 8, 4);
    let mut forward = Forward::new(rng, &spec, vec![tree], 4, &[1]);
    let (layer_before, before) = (layer.clone(), forward.clone());
    let unwritten = |layer: &Layer, forward: &Forward| {
        forward.out.assert_untouched("out", &before.out);
        layer.stash_qkv.assert_untouched("stash_qkv", &layer_before.stash_qkv);
        layer.stash_gates.assert_untouched("stash_gates", &layer_before.stash_gates);
    };
    for (i, (status, text, change)) in REFUSED.iter().enumerate() {
        let mut tree = forward.batch.tree();
        let tree_pointer: *mut ddt_tree = &mut tree;
        let mut params = forward.params(&layer);
        params.tree = tree_pointer;
        // SAFETY: `tree` is a local and only used through this pointer.
        change(&mut params, unsafe { &mut *tree_pointer });
        // SAFETY: sizes and pointers are checked before anything is read, or are still valid.
        let got = unsafe { ddt_gdn_verify(context.0, &params, null_mut()) };
        let message = last_error();
        assert_eq!(got, *status, "case {i} ({text}): {message}");
        assert!(
            message.starts_with("gdn_verify: ") && message.contains(text),
            "case {i} ({text}): {message}"
        );
        unwritten(&layer, &forward);
    }

    // values of the tree, each put back afterwards
    let width = forward.batch.max_depth + 1;
    let refuse = |forward: &mut Forward, text: &str| {
        assert_eq!(forward.verify(&context, &layer), DDT_INVALID_VALUE, "{text}");
        assert!(last_error().contains(text), "{text}: {}", last_error());
        unwritten(&layer, forward);
        forward.batch = before.batch.clone();
        forward.query_start = before.query_start.clone();
    };
    forward.batch.parents[0] = 0;
    refuse(&mut forward, "tree.parents[0][0]");
    forward.batch.parents[3] = 3;
    refuse(&mut forward, "tree.parents[0][3]");
    forward.batch.parents[3] = 5;
    refuse(&mut forward, "tree.parents[0][3]");
    forward.batch.parents[3] = -1;
    refuse(&mut forward, "tree.parents[0][3]");
    forward.batch.depths[7] += 1;
    refuse(&mut forward, "tree.depths[0][7]");
    forward.batch.ancestors[7 * width] = 1;
    refuse(&mut forward, "tree.ancestors[0][7]");
    forward.batch.ancestors[7 * width] = i32::MAX;
    refuse(&mut forward, "tree.ancestors[0][7]");
    forward.batch.num_nodes[0] = 10;
    refuse(&mut forward, "num_nodes[0]");
    forward.batch.num_nodes[0] = -1;
    refuse(&mut forward, "num_nodes[0]");
    forward.query_start[0] = -1;
    refuse(&mut forward, "query_start");
    forward.query_start[1] = 10;
    refuse(&mut forward, "query_start");
    forward.query_start = vec![5, 4];
    refuse(&mut forward, "query_start");

    // SAFETY: NULL is allowed.
    assert_eq!(unsafe { ddt_gdn_verify(null(), null(), null_mut()) }, DDT_NULL_POINTER);
    // SAFETY: as above.
    assert_eq!(unsafe { ddt_gdn_verify(context.0, null(), null_mut()) }, DDT_NULL_POINTER);
    // the same call without a change works
    assert_ok(forward.verify(&context, &layer));
}

#[test]
fn more_nodes_than_a_row_holds_are_refused() {
    let rng = &mut Rng(fresh_seed());
    let spec = Spec::new(1, 1, DType::F32);
    let mut layer = Layer::new(rng, &spec, 12);
    layer.state_slots = vec![0, 1];
    let mut forward = Forward::new(rng, &spec, vec![trees::star(4), trees::star(2)], 4, &[6, 0]);
    forward.batch.num_nodes[0] = forward.batch.max_nodes as i32 + 1;
    assert_eq!(forward.verify(&Context::new(), &layer), DDT_INVALID_VALUE);
    assert!(last_error().contains("max_nodes"), "{}", last_error());
}

#[test]
fn an_empty_batch_is_fine() {
    let rng = &mut Rng(fresh_seed());
    let spec = Spec::new(1, 1, DType::F32);
    let layer = Layer::new(rng, &spec, 0);
    let mut forward = Forward::new(rng, &spec, vec![], 1, &[]);
    let context = Context::new();
    assert_ok(forward.verify(&context, &layer));

    // extents that no memory stands behind are not taken for sizes of scratch memory
    let mut tree = forward.batch.tree();
    let mut params = forward.params(&layer);
    params.tree = &mut tree;
    let heads = 1 << 34;
    let channels = 3 * heads * DIM as i64;
    for (tensor, axis, extent) in [
        (&mut params.mixed_qkv, 1, channels),
        (&mut params.layer.stash_qkv, 1, channels),
        (&mut params.layer.conv_state, 1, channels),
        (&mut params.layer.conv_weight, 0, channels),
        (&mut params.layer.conv_bias, 0, channels),
        (&mut params.layer.ssm_state, 1, heads),
        (&mut params.layer.stash_gates, 2, heads),
        (&mut params.a, 1, heads),
        (&mut params.b, 1, heads),
        (&mut params.a_log, 0, heads),
        (&mut params.dt_bias, 0, heads),
        (&mut params.out, 1, heads),
    ] {
        tensor.shape[axis] = extent;
        tensor.strides[axis] = 0;
    }
    // SAFETY: nothing is read, because there is no row.
    assert_ok(unsafe { ddt_gdn_verify(context.0, &params, null_mut()) });
}

#[test]
fn the_cpu_needs_no_workspace() {
    let rng = &mut Rng(1);
    let spec = Spec::new(1, 1, DType::F32);
    let layer = Layer::new(rng, &spec, 1);
    let forward = Forward::new(rng, &spec, vec![trees::chain(1)], 1, &[0]);
    let (context, mut bytes) = (Context::new(), 1);
    // SAFETY: both pointers are to locals.
    assert_ok(unsafe { ddt_gdn_verify_workspace_size(context.0, &forward.params(&layer), &mut bytes) });
    assert_eq!(bytes, 0);
}
