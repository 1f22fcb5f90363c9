// SPDX-License-Identifier: Apache-2.0
//! One gated-delta-net layer with random weights, and plain decoding of it, one token at a time.

use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};
use std::ptr::{null, null_mut};

use ddtree::DType;
use ddtree::ffi::*;
use half::{bf16, f16};

use super::buffers::{ABSENT, Context};
use super::numbers::Rng;
use super::tensor::{Buffer, Order};
use super::trees::{Batch, Parents};

pub const DIM: usize = 128;

/// What a test wants of a layer and a batch.
#[derive(Clone, Debug)]
pub struct Spec {
    pub num_k: usize,
    pub num_v: usize,
    /// Of mixed_qkv, a and b, the weights and the stash.
    pub dtype: DType,
    pub out_dtype: DType,
    pub conv_state_dtype: DType,
    pub num_slots: usize,
    pub has_bias: bool,
    /// Memory order of every tensor at random, instead of dense.
    pub strided: bool,
    pub norm_eps: f32,
    /// Range of a, the input of the decay.
    pub a: (f64, f64),
    /// Range of b, the input of beta.
    pub b: (f64, f64),
    /// Every token has the same raw input, and only the newest tap counts: all keys are equal.
    pub equal_keys: bool,
}

impl Spec {
    pub fn new(num_k: usize, num_v: usize, dtype: DType) -> Self {
        Self {
            num_k,
            num_v,
            dtype,
            out_dtype: DType::F32,
            conv_state_dtype: dtype,
            num_slots: 4,
            has_bias: true,
            strided: false,
            norm_eps: 1e-6,
            a: (-4.0, 2.0),
            b: (-3.0, 3.0),
            equal_keys: false,
        }
    }

    pub fn channels(&self) -> usize {
        (2 * self.num_k + self.num_v) * DIM
    }
}

/// The layer's tensors.
#[derive(Clone)]
pub struct Layer {
    pub spec: Spec,
    pub conv_weight: Buffer,
    pub conv_bias: Option<Buffer>,
    pub a_log: Buffer,
    pub dt_bias: Buffer,
    pub conv_state: Buffer,
    pub ssm_state: Buffer,
    pub stash_qkv: Buffer,
    pub stash_gates: Buffer,
    pub state_slots: Vec<i32>,
    pub snapshot_slots: Option<Vec<i32>>,
}

impl Layer {
    /// A layer whose stash has room for `num_rows` rows. `order` is called once per tensor.
    pub fn new(rng: &mut Rng, spec: &Spec, num_rows: usize) -> Self {
        let order = |rng: &mut Rng, ndim| {
            if spec.strided { Order::random(rng, ndim) } else { Order::dense(ndim) }
        };
        let channels = spec.channels();
        let mut random = |shape: &[usize], dtype, scale: f64| {
            let order = order(rng, shape.len());
            Buffer::filled(dtype, shape, &order, |_| scale * rng.normal())
        };
        let mut conv_weight = random(&[channels, 4], spec.dtype, 0.5);
        if spec.equal_keys {
            for index in conv_weight.indices().filter(|index| index[1] < 3) {
                conv_weight.set(&index, 0.0);
            }
        }
        let conv_bias = spec.has_bias.then(|| random(&[channels], spec.dtype, 0.2));
        let conv_state = random(&[spec.num_slots, channels, 3], spec.conv_state_dtype, 1.0);
        // what f32 conv states can hold beside inputs of another dtype
        let mut conv_state = conv_state;
        for index in conv_state.indices() {
            conv_state.set(&index, round(spec.dtype, conv_state.get(&index)));
        }
        let ssm_state = random(&[spec.num_slots, spec.num_v, DIM, DIM], DType::F32, 0.5);
        let mut a_log = random(&[spec.num_v], DType::F32, 1.0);
        for head in 0..spec.num_v {
            // decay rates from 0.6 to 4.5
            a_log.set(&[head], a_log.get(&[head]).clamp(-0.5, 1.5));
        }
        let dt_bias = random(&[spec.num_v], spec.dtype, 0.5);
        Self {
            spec: spec.clone(),
            conv_weight,
            conv_bias,
            a_log,
            dt_bias,
            conv_state,
            ssm_state,
            stash_qkv: Buffer::new(spec.dtype, &[num_rows, channels], &order(rng, 2)),
            stash_gates: Buffer::new(DType::F32, &[num_rows, 2, spec.num_v], &order(rng, 3)),
            state_slots: Vec::new(),
            snapshot_slots: None,
        }
    }

    pub fn raw(&self) -> ddt_gdn_layer {
        ddt_gdn_layer {
            conv_weight: self.conv_weight.tensor(),
            conv_bias: self.conv_bias.as_ref().map_or(ABSENT, Buffer::tensor),
            conv_state: self.conv_state.tensor(),
            ssm_state: self.ssm_state.tensor(),
            stash_qkv: self.stash_qkv.tensor(),
            stash_gates: self.stash_gates.tensor(),
            state_slots: self.state_slots.as_ptr(),
            snapshot_slots: self.snapshot_slots.as_ref().map_or(null(), |slots| slots.as_ptr()),
        }
    }
}

/// The inputs and the output of one verification.
#[derive(Clone)]
pub struct Forward {
    pub batch: Batch,
    pub query_start: Vec<i32>,
    pub mixed_qkv: Buffer,
    pub a: Buffer,
    pub b: Buffer,
    pub out: Buffer,
}

impl Forward {
    /// Random inputs; request `r` gets `idle[r]` rows after those of its nodes.
    pub fn new(rng: &mut Rng, spec: &Spec, trees: Vec<Parents>, max_depth: usize, idle: &[usize]) -> Self {
        let order = |rng: &mut Rng, ndim| {
            if spec.strided { Order::random(rng, ndim) } else { Order::dense(ndim) }
        };
        let mut query_start = vec![0];
        for (tree, idle) in trees.iter().zip(idle) {
            query_start.push(query_start[query_start.len() - 1] + (tree.len() + idle) as i32);
        }
        let num_rows = *query_start.last().unwrap() as usize;
        let most = trees.iter().map(Vec::len).max().unwrap_or(0);
        let max_nodes = (most.max(1) + rng.below(3)).min(256);
        let common: Vec<f64> = (0..spec.channels()).map(|_| rng.normal()).collect();
        let (qkv_order, out_order) = (order(rng, 2), order(rng, 3));
        let mixed_qkv = Buffer::filled(spec.dtype, &[num_rows, spec.channels()], &qkv_order, |index| {
            if spec.equal_keys { common[index[1]] } else { rng.normal() }
        });
        let mut gate = |range: (f64, f64)| {
            let order = order(rng, 2);
            Buffer::filled(spec.dtype, &[num_rows, spec.num_v], &order, |_| rng.uniform(range.0, range.1))
        };
        Self {
            a: gate(spec.a),
            b: gate(spec.b),
            batch: Batch::new(trees, max_nodes, max_depth),
            query_start,
            mixed_qkv,
            out: Buffer::new(spec.out_dtype, &[num_rows, spec.num_v, DIM], &out_order),
        }
    }

    pub fn num_rows(&self) -> usize {
        self.mixed_qkv.shape[0]
    }

    /// Parameters with everything but the tree.
    pub fn params(&self, layer: &Layer) -> ddt_gdn_verify_params {
        ddt_gdn_verify_params {
            struct_size: size_of::<ddt_gdn_verify_params>() as u32,
            flags: 0,
            layer: layer.raw(),
            mixed_qkv: self.mixed_qkv.tensor(),
            a: self.a.tensor(),
            b: self.b.tensor(),
            a_log: layer.a_log.tensor(),
            dt_bias: layer.dt_bias.tensor(),
            query_start: self.query_start.as_ptr(),
            tree: null_mut(),
            scale: 0.0,
            norm_eps: layer.spec.norm_eps,
            out: self.out.tensor(),
            workspace: null_mut(),
            workspace_bytes: 0,
        }
    }

    pub fn verify(&mut self, context: &Context, layer: &Layer) -> ddt_status {
        let mut tree = self.batch.tree();
        let mut params = self.params(layer);
        params.tree = &mut tree;
        // SAFETY: every pointer is to a buffer of `self` or `layer` that lives during the call.
        unsafe { ddt_gdn_verify(context.0, &params, null_mut()) }
    }

    pub fn row_of(&self, request: usize, node: usize) -> usize {
        self.query_start[request] as usize + node
    }

    /// The raw gate inputs of a row and value head.
    pub fn gate_inputs(&self, row: usize, v_head: usize) -> (f64, f64) {
        (self.a.get(&[row, v_head]), self.b.get(&[row, v_head]))
    }
}

/// The number types that plain decoding is written for.
pub trait Real:
    Copy
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    fn of(x: f64) -> Self;
    fn wide(self) -> f64;
    fn exp(self) -> Self;
    fn ln_1p(self) -> Self;
    fn sqrt(self) -> Self;
}

macro_rules! real {
    ($type:ty) => {
        impl Real for $type {
            fn of(x: f64) -> Self {
                x as $type
            }
            fn wide(self) -> f64 {
                self as f64
            }
            fn exp(self) -> Self {
                self.exp()
            }
            fn ln_1p(self) -> Self {
                self.ln_1p()
            }
            fn sqrt(self) -> Self {
                self.sqrt()
            }
        }
    };
}
real!(f32);
real!(f64);

/// The state of one sequence in one layer.
#[derive(Clone)]
pub struct Decoder<T> {
    /// Last three raw inputs, oldest first.
    pub window: [Vec<T>; 3],
    /// `[Hv][key][value]`.
    pub state: Vec<Vec<[T; DIM]>>,
}

impl<T: Real> Decoder<T> {
    pub fn load(layer: &Layer, slot: usize) -> Self {
        let spec = &layer.spec;
        let window = std::array::from_fn(|tap| {
            (0..spec.channels()).map(|c| T::of(layer.conv_state.get(&[slot, c, tap]))).collect()
        });
        let state = (0..spec.num_v)
            .map(|head| {
                (0..DIM)
                    .map(|k| std::array::from_fn(|v| T::of(layer.ssm_state.get(&[slot, head, v, k]))))
                    .collect()
            })
            .collect();
        Self { window, state }
    }

    /// One token of plain decoding; returns the outputs `[Hv][128]`. `raw` is the row of
    /// mixed_qkv, `gates` are a and b of each value head.
    ///
    /// In f32 the order of operations is the one that the library documents.
    pub fn step(&mut self, layer: &Layer, raw: &[f64], gates: &[(f64, f64)]) -> Vec<Vec<T>> {
        let spec = &layer.spec;
        let raw: Vec<T> = raw.iter().map(|&x| T::of(x)).collect();
        let one = T::of(1.0);
        let convolved: Vec<T> = (0..spec.channels())
            .map(|c| {
                let taps = [self.window[0][c], self.window[1][c], self.window[2][c], raw[c]].map(T::wide);
                match spec.dtype {
                    DType::F32 => convolve(layer, c, taps),
                    // what is rounded is the f32 value, by definition
                    dtype => T::of(round(dtype, convolve::<f32>(layer, c, taps).wide())),
                }
            })
            .collect();
        self.window.rotate_left(1);
        self.window[2] = raw;

        let head = |head: usize| -> [T; DIM] { std::array::from_fn(|i| convolved[head * DIM + i]) };
        let norm_eps = if spec.norm_eps == 0.0 { 1e-6 } else { spec.norm_eps };
        let normalized = |x: [T; DIM]| {
            let inverse = one / (sum_of_squares(&x) + T::of(norm_eps.into())).sqrt();
            x.map(|x| x * inverse)
        };
        let scale = T::of((DIM as f64).sqrt().recip());
        let mut outs = Vec::new();
        for (v_head, (state, &gates)) in self.state.iter_mut().zip(gates).enumerate() {
            let k_head = v_head / (spec.num_v / spec.num_k);
            let q = normalized(head(k_head));
            let k = normalized(head(spec.num_k + k_head));
            let v = head(2 * spec.num_k + v_head);
            let (log_decay, beta): (T, T) = gates_of(layer, gates, v_head);
            let alpha = log_decay.exp();
            let mut memory = [T::of(0.0); DIM];
            for (row, &k) in state.iter_mut().zip(&k) {
                for (s, memory) in row.iter_mut().zip(&mut memory) {
                    *s = *s * alpha;
                    *memory += k * *s;
                }
            }
            let u: [T; DIM] = std::array::from_fn(|i| beta * (v[i] - memory[i]));
            let mut out = vec![T::of(0.0); DIM];
            for (row, (&k, &q)) in state.iter_mut().zip(k.iter().zip(&q)) {
                for i in 0..DIM {
                    row[i] += k * u[i];
                    out[i] += scale * q * row[i];
                }
            }
            outs.push(out);
        }
        outs
    }
}

/// `silu(bias + sum of taps)` of one channel, taps oldest first.
fn convolve<T: Real>(layer: &Layer, channel: usize, taps: [f64; 4]) -> T {
    let mut sum = T::of(layer.conv_bias.as_ref().map_or(0.0, |bias| bias.get(&[channel])));
    for (tap, x) in taps.into_iter().enumerate() {
        sum += T::of(layer.conv_weight.get(&[channel, tap])) * T::of(x);
    }
    sum / (T::of(1.0) + (-sum).exp())
}

/// Log decay and beta of one head.
pub fn gates_of<T: Real>(layer: &Layer, (a, b): (f64, f64), v_head: usize) -> (T, T) {
    let one = T::of(1.0);
    let x = T::of(a) + T::of(layer.dt_bias.get(&[v_head]));
    let softplus = if x.wide() > 20.0 { x } else { x.exp().ln_1p() };
    let log_decay = -T::of(layer.a_log.get(&[v_head])).exp() * softplus;
    (log_decay, one / (one + (-T::of(b)).exp()))
}

/// Element i goes to lane i % 16; lanes are added in halves.
fn sum_of_squares<T: Real>(x: &[T; DIM]) -> T {
    let mut lanes = [T::of(0.0); 16];
    for (i, &x) in x.iter().enumerate() {
        lanes[i % 16] += x * x;
    }
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            let other = lanes[lane + half];
            lanes[lane] += other;
        }
    }
    lanes[0]
}

/// The nearest value of a dtype. (half's from_f64 ignores the lower half of the mantissa when it
/// decides a tie, so this goes through f32.)
pub fn round(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        DType::BF16 => bf16::from_f32(x as f32).to_f64(),
        DType::F32 => x,
        _ => unreachable!("not a floating-point dtype"),
    }
}
