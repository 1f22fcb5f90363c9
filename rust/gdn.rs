// SPDX-License-Identifier: Apache-2.0
//! The arithmetic of one gated-delta-net layer that verification and commit share.
//!
//! Everything is f32, and the order of every sum is fixed: over the keys of the state ascending,
//! over the elements of a head as [`dot`] says.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::DType;
use crate::error::{Result, bail};
use crate::lanes::{LANES, Lanes, dot, multiply};
use crate::tensor::{TensorMut, TensorRef};

/// Elements of one query, key or value head.
pub const GDN_HEAD_DIM: usize = 128;
/// Taps of the causal convolution, the current token included.
pub const GDN_CONV_WIDTH: usize = 4;
/// Raw inputs that a request's convolution window holds.
pub(crate) const WINDOW: usize = GDN_CONV_WIDTH - 1;

/// One head of one token.
pub(crate) type Head = [f32; GDN_HEAD_DIM];

/// Head counts of a layer, and where each head's channels lie in a row of raw inputs
/// (all queries, then all keys, then all values).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) num_k: usize,
    pub(crate) num_v: usize,
}

impl Heads {
    /// Derives the counts from the row length of `rows_name` and the heads of the state.
    pub(crate) fn new(rows_name: &str, channels: usize, num_v: usize) -> Result<Self> {
        let heads = channels / GDN_HEAD_DIM;
        let num_k = heads.saturating_sub(num_v) / 2;
        if num_v == 0 || num_k == 0 || (2 * num_k + num_v) * GDN_HEAD_DIM != channels {
            bail!(
                InvalidShape,
                "{rows_name} channels: got {channels} with {num_v} value heads, want (2 * key heads + value heads) * {GDN_HEAD_DIM}"
            );
        }
        if !num_v.is_multiple_of(num_k) {
            bail!(InvalidShape, "ssm_state heads: got {num_v}, want a multiple of the {num_k} key heads");
        }
        Ok(Self { num_k, num_v })
    }

    pub(crate) fn channels(self) -> usize {
        (2 * self.num_k + self.num_v) * GDN_HEAD_DIM
    }

    pub(crate) fn query_channel(self, k_head: usize) -> usize {
        k_head * GDN_HEAD_DIM
    }

    pub(crate) fn key_channel(self, k_head: usize) -> usize {
        (self.num_k + k_head) * GDN_HEAD_DIM
    }

    pub(crate) fn value_channel(self, v_head: usize) -> usize {
        (2 * self.num_k + v_head) * GDN_HEAD_DIM
    }

    /// The value heads that share key head `k_head`.
    pub(crate) fn value_heads(self, k_head: usize) -> Range<usize> {
        let group = self.num_v / self.num_k;
        k_head * group..(k_head + 1) * group
    }
}

/// Checks the tensors of a layer that both operations take, apart from the stash.
pub(crate) fn check_layer(
    heads: Heads,
    qkv_dtype: DType,
    conv_weight: &TensorRef,
    conv_bias: Option<&TensorRef>,
    conv_state: &TensorRef,
    ssm_state: &TensorRef,
) -> Result<()> {
    let channels = heads.channels();
    conv_weight.want_shape("conv_weight", &[channels, GDN_CONV_WIDTH])?;
    conv_weight.want_dtype("conv_weight", DType::FLOATS)?;
    if let Some(bias) = conv_bias {
        bias.want_shape("conv_bias", &[channels])?;
        bias.want_dtype("conv_bias", DType::FLOATS)?;
    }
    conv_state.want_ndim("conv_state", 3)?;
    conv_state.want_dim("conv_state", 1, channels, "channels")?;
    conv_state.want_dim("conv_state", 2, WINDOW, "taps before the current token")?;
    // a narrower window would round inputs that this round's convolution saw unrounded
    conv_state.want_dtype("conv_state", &[qkv_dtype, DType::F32])?;
    ssm_state.want_ndim("ssm_state", 4)?;
    ssm_state.want_dim("ssm_state", 1, heads.num_v, "value heads")?;
    ssm_state.want_dim("ssm_state", 2, GDN_HEAD_DIM, "value dim")?;
    ssm_state.want_dim("ssm_state", 3, GDN_HEAD_DIM, "key dim")?;
    ssm_state.want_dtype("ssm_state", &[DType::F32])
}

/// Checks that a stash has at least `num_rows` rows, and all but the dtype of its raw inputs.
pub(crate) fn check_stash(heads: Heads, num_rows: usize, qkv: &TensorRef, gates: &TensorRef) -> Result<()> {
    qkv.want_ndim("stash_qkv", 2)?;
    gates.want_ndim("stash_gates", 3)?;
    for (name, stash) in [("stash_qkv", qkv), ("stash_gates", gates)] {
        if stash.shape()[0] < num_rows {
            bail!(InvalidShape, "{name} shape[0]: got {}, want >= {num_rows} (rows)", stash.shape()[0]);
        }
    }
    qkv.want_dim("stash_qkv", 1, heads.channels(), "channels")?;
    gates.want_dim("stash_gates", 1, 2, "log decay and beta")?;
    gates.want_dim("stash_gates", 2, heads.num_v, "value heads")?;
    gates.want_dtype("stash_gates", &[DType::F32])
}

/// Checks that `slot` exists in both states of a layer.
pub(crate) fn check_slot(
    name: &str,
    request: usize,
    slot: i32,
    conv_state: &TensorRef,
    ssm_state: &TensorRef,
) -> Result<()> {
    let slots = conv_state.shape()[0].min(ssm_state.shape()[0]);
    if slot as i64 >= slots as i64 {
        bail!(InvalidValue, "{name}[{request}]: got {slot}, want < {slots} slots");
    }
    Ok(())
}

/// The epsilon of the query and key norm: 0 stands for 1e-6.
pub(crate) fn norm_eps(norm_eps: f32) -> Result<f32> {
    if !norm_eps.is_finite() || norm_eps < 0.0 {
        bail!(InvalidValue, "norm_eps: got {norm_eps}, want a finite number >= 0");
    }
    Ok(if norm_eps == 0.0 { 1e-6 } else { norm_eps })
}

/// The causal convolution of a layer, widened to f32.
pub(crate) struct Conv {
    /// One row of channels per tap, oldest first.
    weight: [Vec<f32>; GDN_CONV_WIDTH],
    bias: Vec<f32>,
    /// Raw inputs and outputs of the convolution have this precision.
    dtype: DType,
}

impl Conv {
    pub(crate) fn new(weight: &TensorRef, bias: Option<&TensorRef>, dtype: DType) -> Self {
        let channels = weight.shape()[0];
        let taps = weight.transposed();
        let weight = std::array::from_fn(|tap| {
            let mut row = vec![0.0; channels];
            taps.at(tap).load_f32(0, &mut row);
            row
        });
        let mut row = vec![0.0; channels];
        if let Some(bias) = bias {
            bias.load_f32(0, &mut row);
        }
        Self { weight, bias: row, dtype }
    }

    /// `silu(bias + sum of taps)` of the 128 channels from `channel`, rounded to the raw
    /// inputs' dtype. `taps` are the rows of `inputs` to convolve, oldest first.
    pub(crate) fn head(&self, inputs: &Inputs, taps: [usize; GDN_CONV_WIDTH], channel: usize) -> Head {
        let range = channel..channel + GDN_HEAD_DIM;
        let mut out = [0.0; GDN_HEAD_DIM];
        out.copy_from_slice(&self.bias[range.clone()]);
        for (weight, tap) in self.weight.iter().zip(taps) {
            let input = &inputs.row(tap)[range.clone()];
            for ((out, &w), &x) in out.iter_mut().zip(&weight[range.clone()]).zip(input) {
                *out += w * x;
            }
        }
        for x in &mut out {
            *x /= 1.0 + (-*x).exp();
        }
        round(self.dtype, &mut out);
        out
    }

    /// [`Conv::head`] followed by the L2 norm of queries and keys.
    pub(crate) fn normalized_head(
        &self,
        inputs: &Inputs,
        taps: [usize; GDN_CONV_WIDTH],
        channel: usize,
        norm_eps: f32,
    ) -> Head {
        let mut out = self.head(inputs, taps, channel);
        let scale = 1.0 / (dot(&out, &out) + norm_eps).sqrt();
        for x in &mut out {
            *x *= scale;
        }
        out
    }
}

/// Rounds f32 values to the nearest value of a narrower type, half to even.
fn round(dtype: DType, values: &mut Head) {
    match dtype {
        DType::F16 => {
            let mut narrow = [f16::ZERO; GDN_HEAD_DIM];
            narrow.convert_from_f32_slice(values);
            narrow.convert_to_f32_slice(values);
        }
        DType::BF16 => {
            for x in values {
                *x = bf16::from_f32(*x).to_f32();
            }
        }
        _ => {}
    }
}

/// Raw convolution inputs of one request, widened to f32: the three rows of the window,
/// oldest first, then the rows of this round.
pub(crate) struct Inputs {
    channels: usize,
    values: Vec<f32>,
}

impl Inputs {
    pub(crate) fn new(channels: usize) -> Self {
        Self { channels, values: Vec::new() }
    }

    /// Starts a request from its window `[channels, 3]`.
    pub(crate) fn start(&mut self, window: &TensorRef) {
        self.values.clear();
        let taps = window.transposed();
        for tap in 0..WINDOW {
            self.push(&taps.at(tap));
        }
    }

    /// Appends the raw inputs `[channels]` of one token.
    pub(crate) fn push(&mut self, row: &TensorRef) {
        let start = self.values.len();
        self.values.resize(start + self.channels, 0.0);
        row.load_f32(0, &mut self.values[start..]);
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.channels..(row + 1) * self.channels]
    }

    /// Writes rows `first..first + 3` to a window `[channels, 3]`.
    pub(crate) fn store_window(&self, first: usize, window: TensorMut) {
        let mut taps = window.transposed();
        for tap in 0..WINDOW {
            taps.at(tap).store_f32(0, self.row(first + tap));
        }
    }
}

/// The recurrent state S of one head, `[key][value]` cut into blocks of 16 value lanes, so
/// that each block streams through registers.
pub(crate) struct HeadState {
    blocks: Box<[StateBlock]>,
}

type StateBlock = [Lanes; GDN_HEAD_DIM];

impl HeadState {
    pub(crate) fn new() -> Self {
        Self { blocks: vec![[[0.0; LANES]; GDN_HEAD_DIM]; GDN_HEAD_DIM / LANES].into() }
    }

    /// Reads a head's `[value][key]` state of any strides.
    pub(crate) fn load(&mut self, state: &TensorRef) {
        if state.strides()[0] == 1 {
            let by_key = state.transposed();
            let mut lanes = [0.0; GDN_HEAD_DIM];
            for key in 0..GDN_HEAD_DIM {
                by_key.at(key).load_f32(0, &mut lanes);
                for (block, lanes) in self.blocks.iter_mut().zip(lanes.chunks_exact(LANES)) {
                    block[key].copy_from_slice(lanes);
                }
            }
        } else {
            let mut keys = [0.0; GDN_HEAD_DIM];
            for value in 0..GDN_HEAD_DIM {
                state.at(value).load_f32(0, &mut keys);
                let block = &mut self.blocks[value / LANES];
                for (lanes, &x) in block.iter_mut().zip(&keys) {
                    lanes[value % LANES] = x;
                }
            }
        }
    }

    /// Writes a head's `[value][key]` state of any strides.
    pub(crate) fn store(&self, mut state: TensorMut) {
        if state.strides()[0] == 1 {
            let mut by_key = state.transposed();
            let mut lanes = [0.0; GDN_HEAD_DIM];
            for key in 0..GDN_HEAD_DIM {
                for (block, lanes) in self.blocks.iter().zip(lanes.chunks_exact_mut(LANES)) {
                    lanes.copy_from_slice(&block[key]);
                }
                by_key.at(key).store_f32(0, &lanes);
            }
        } else {
            let mut keys = [0.0; GDN_HEAD_DIM];
            for value in 0..GDN_HEAD_DIM {
                let block = &self.blocks[value / LANES];
                for (lanes, x) in block.iter().zip(&mut keys) {
                    *x = lanes[value % LANES];
                }
                state.at(value).store_f32(0, &keys);
            }
        }
    }

    /// `out[i] = S^T rows[i]`, keys in ascending order.
    pub(crate) fn project(&self, rows: &[Head], out: &mut [Head]) {
        for (b, block) in self.blocks.iter().enumerate() {
            let start = b * LANES;
            multiply(
                rows.len(),
                |i| &rows[i],
                block,
                |i, sums| {
                    out[i][start..start + LANES].copy_from_slice(sums);
                },
            );
        }
    }

    /// One token of plain decoding:
    /// `S = alpha * S; u = beta * (v - S^T k); S += k u^T`, keys in ascending order.
    pub(crate) fn step(&mut self, k: &Head, v: &Head, alpha: f32, beta: f32) {
        for (block, v) in self.blocks.iter_mut().zip(v.chunks_exact(LANES)) {
            let mut memory = [0.0; LANES];
            for (lanes, &k) in block.iter_mut().zip(k) {
                for (s, memory) in lanes.iter_mut().zip(&mut memory) {
                    *s *= alpha;
                    *memory += k * *s;
                }
            }
            let u: Lanes = std::array::from_fn(|lane| beta * (v[lane] - memory[lane]));
            for (lanes, &k) in block.iter_mut().zip(k) {
                for (s, u) in lanes.iter_mut().zip(&u) {
                    *s += k * u;
                }
            }
        }
    }
}
