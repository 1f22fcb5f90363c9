// SPDX-License-Identifier: Apache-2.0
//! Launches `cuda/commit.cu`.

use std::ffi::c_void;

use super::params::{
    DDT_CUDA_COMMIT_MAX_BLOCK_HEADS, DDT_CUDA_COMMIT_MAX_GDN_LAYERS, DDT_CUDA_COMMIT_MAX_KV_LAYERS,
    DDT_CUDA_COMMIT_REPLAY_BLOCKS_PER_SM, DDT_CUDA_COMMIT_REPLAY_SHARED_BYTES,
    DDT_CUDA_COMMIT_REPLAY_THREADS, DDT_CUDA_COMMIT_SHIFT_THREADS, DDT_CUDA_COMMIT_WINDOW_CHANNELS,
    ddt_cuda_commit, ddt_cuda_commit_cache, ddt_cuda_commit_gdn, ddt_cuda_commit_kv,
};
use super::{Device, Kernel, Launch, Loader, View, tree_params};
use crate::commit::CommitGdnLayer;
use crate::error::{Result, bail};
use crate::ffi::{
    CommitLayers, commit_layers, ddt_commit_params, ddt_gdn_layer, ddt_kv_layer, gdn_layer_tensors,
    kv_layer_tensors, ptr,
};
use crate::gdn::{self, GDN_CONV_WIDTH, GDN_HEAD_DIM};
use crate::tensor::TensorRef;

const MAX_GDN_LAYERS: usize = DDT_CUDA_COMMIT_MAX_GDN_LAYERS as usize;
const MAX_KV_LAYERS: usize = DDT_CUDA_COMMIT_MAX_KV_LAYERS as usize;

/// The kernels of this operation.
pub(crate) struct Kernels {
    replay: Kernel,
    replay_strided: Kernel,
    shift: Kernel,
}

impl Kernels {
    pub(super) fn load(loader: &Loader<'_>) -> Result<Self> {
        Ok(Self {
            replay: loader.kernel("ddt_commit_replay", DDT_CUDA_COMMIT_REPLAY_SHARED_BYTES)?,
            replay_strided: loader
                .kernel("ddt_commit_replay_strided", DDT_CUDA_COMMIT_REPLAY_SHARED_BYTES)?,
            shift: loader.kernel("ddt_commit_shift", 0)?,
        })
    }
}

#[allow(clippy::unnecessary_wraps, reason = "the signature that all operations share")]
pub(crate) unsafe fn workspace_bytes(_device: &Device, _params: &ddt_commit_params) -> Result<usize> {
    Ok(0)
}

/// # Safety
/// The parameters must be as the header says.
pub(crate) unsafe fn launch(device: &Device, params: &ddt_commit_params, stream: *mut c_void) -> Result<()> {
    // SAFETY: the caller's promise.
    let CommitLayers { tree, dims, gdn_layers, kv_layers } = unsafe { commit_layers(params)? };
    let num_reqs = dims.num_reqs;
    ptr::device_array(tree.num_nodes, num_reqs, "tree.num_nodes")?;
    // SAFETY: plain old data.
    let mut kernel_params: ddt_cuda_commit = unsafe { std::mem::zeroed() };
    kernel_params.tree = tree_params(&tree, dims);
    kernel_params.query_start = ptr::device_array(params.query_start, num_reqs + 1, "query_start")?;
    kernel_params.num_accepted = ptr::device_array(params.num_accepted, num_reqs, "num_accepted")?;
    kernel_params.accepted_nodes =
        ptr::device_array(params.accepted_nodes, num_reqs * dims.max_depth, "accepted_nodes")?;
    kernel_params.snapshot_tokens =
        ptr::optional_device_array(params.snapshot_tokens, num_reqs, "snapshot_tokens")?;
    kernel_params.norm_eps = gdn::norm_eps(params.norm_eps)?;

    let num_tables = gdn_layers.len().div_ceil(MAX_GDN_LAYERS).max(kv_layers.len().div_ceil(MAX_KV_LAYERS));
    let tables = |i| {
        (
            part(gdn_layers, i * MAX_GDN_LAYERS, MAX_GDN_LAYERS),
            part(kv_layers, i * MAX_KV_LAYERS, MAX_KV_LAYERS),
        )
    };
    if num_tables > 1 {
        // an error in a later table must not come after the launch of an earlier one
        for i in 0..num_tables {
            // SAFETY: the caller's promise.
            unsafe { Shape::of(device, &mut kernel_params, num_reqs, tables(i))? };
        }
    }
    for i in 0..num_tables {
        // SAFETY: the caller's promise.
        unsafe {
            let shape = Shape::of(device, &mut kernel_params, num_reqs, tables(i))?;
            shape.launch(device, &kernel_params, stream)?;
        }
    }
    Ok(())
}

/// A slice and the index of its first element.
type Part<'a, T> = (usize, &'a [T]);

fn part<T>(all: &[T], start: usize, len: usize) -> Part<'_, T> {
    let start = start.min(all.len());
    (start, &all[start..(start + len).min(all.len())])
}

/// The extents of the launches for one table of layers.
struct Shape {
    num_reqs: usize,
    num_gdn_layers: usize,
    num_kv_layers: usize,
    max_tokens: usize,
    /// Blocks of the replay that the device runs at the same time.
    replay_slots: usize,
    /// Blocks that a layer needs to replay one request.
    max_replay_blocks: usize,
    max_block_heads: usize,
    max_channels: usize,
    /// Rows of all states are contiguous and fit for 16-byte accesses.
    is_aligned: bool,
}

impl Shape {
    /// Checks the layers of a table and fills it.
    ///
    /// # Safety
    /// The layers must be as the header says.
    unsafe fn of(
        device: &Device,
        kernel_params: &mut ddt_cuda_commit,
        num_reqs: usize,
        ((first_gdn, gdn_layers), (first_kv, kv_layers)): (Part<'_, ddt_gdn_layer>, Part<'_, ddt_kv_layer>),
    ) -> Result<Self> {
        let mut shape = Self {
            num_reqs,
            num_gdn_layers: gdn_layers.len(),
            num_kv_layers: kv_layers.len(),
            max_tokens: kernel_params.tree.max_depth as usize + 1,
            replay_slots: device.sm_count() as usize * DDT_CUDA_COMMIT_REPLAY_BLOCKS_PER_SM as usize,
            max_replay_blocks: 0,
            max_block_heads: 0,
            max_channels: 0,
            is_aligned: true,
        };
        for (i, (layer, out)) in gdn_layers.iter().zip(&mut kernel_params.gdn_layers).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { shape.gdn_layer(layer, kernel_params.snapshot_tokens, out) }
                .map_err(|error| error.context(format!("gdn_layers[{}]", first_gdn + i)))?;
        }
        for (i, (layer, out)) in kv_layers.iter().zip(&mut kernel_params.kv_layers).enumerate() {
            // SAFETY: the caller's promise.
            unsafe { kv_layer(layer, out) }
                .map_err(|error| error.context(format!("kv_layers[{}]", first_kv + i)))?;
        }
        kernel_params.num_gdn_layers = gdn_layers.len() as i32;
        kernel_params.num_kv_layers = kv_layers.len() as i32;
        for blocks in [shape.replay_blocks(), shape.shift_blocks()] {
            if i32::try_from(blocks).is_err() {
                bail!(InvalidShape, "tree.num_reqs: got {num_reqs}, want fewer");
            }
        }
        Ok(shape)
    }

    /// # Safety
    /// The layer must be as the header says.
    unsafe fn gdn_layer(
        &mut self,
        layer: &ddt_gdn_layer,
        snapshot_tokens: *const i32,
        out: &mut ddt_cuda_commit_gdn,
    ) -> Result<()> {
        // SAFETY: the caller's promise; data is not read here.
        let tensors = unsafe { gdn_layer_tensors(layer)? };
        // the rows of this step are known to the device only
        let heads = tensors.check_tensors(0)?;
        let (conv_state, ssm_state) = (tensors.conv_state.view(), tensors.ssm_state.view());
        let all_heads = self.num_reqs * self.num_gdn_layers * heads.num_v;
        let block_heads = block_heads(heads.num_v / heads.num_k, all_heads / self.replay_slots);
        *out = ddt_cuda_commit_gdn {
            conv_weight: View::of(&tensors.conv_weight),
            conv_bias: View::optional(tensors.conv_bias.as_ref()),
            conv_state: View::of(&conv_state),
            ssm_state: View::of(&ssm_state),
            stash_qkv: View::of(&tensors.stash_qkv),
            stash_gates: View::of(&tensors.stash_gates),
            state_slots: ptr::device_array(layer.state_slots, self.num_reqs, "state_slots")?,
            snapshot_slots: ptr::optional_device_array(
                layer.snapshot_slots,
                self.num_reqs,
                "snapshot_slots",
            )?,
            num_slots: conv_state.shape()[0].min(ssm_state.shape()[0]) as i64,
            stash_rows: clamped(tensors.stash_qkv.shape()[0].min(tensors.stash_gates.shape()[0])),
            num_k_heads: clamped(heads.num_k),
            num_v_heads: clamped(heads.num_v),
            block_heads: block_heads as i32,
            has_aligned_rows: has_aligned_rows(&tensors).into(),
            reserved: 0,
        };
        if !out.snapshot_slots.is_null() && snapshot_tokens.is_null() {
            bail!(NullPointer, "snapshot_tokens: got NULL, want a pointer because snapshot_slots is given");
        }
        self.max_replay_blocks = self.max_replay_blocks.max(heads.num_v / block_heads);
        self.max_block_heads = self.max_block_heads.max(block_heads);
        self.max_channels = self.max_channels.max(heads.channels());
        self.is_aligned &= unit_bytes(&ssm_state) == 16;
        Ok(())
    }

    fn replay_blocks(&self) -> usize {
        self.num_reqs * self.max_replay_blocks
    }

    fn shift_blocks(&self) -> usize {
        let windows = self.max_channels.div_ceil(DDT_CUDA_COMMIT_WINDOW_CHANNELS as usize);
        // the two caches of an attention layer
        let caches = if self.num_kv_layers > 0 { 2 } else { 0 };
        self.num_reqs * windows.max(caches)
    }

    /// # Safety
    /// What the kernels' parameters point to must be as the header says.
    unsafe fn launch(
        &self,
        device: &Device,
        kernel_params: &ddt_cuda_commit,
        stream: *mut c_void,
    ) -> Result<()> {
        let kernels = &device.kernels().commit;
        let replay = Launch {
            grid: [self.replay_blocks() as u32, self.num_gdn_layers as u32, 1],
            block: DDT_CUDA_COMMIT_REPLAY_THREADS,
            // a key and the values of each token, in f32
            shared_bytes: (self.max_tokens * (1 + self.max_block_heads) * GDN_HEAD_DIM * 4) as u32,
            overlaps_previous: false,
        };
        let shift = Launch {
            grid: [self.shift_blocks() as u32, (self.num_gdn_layers + self.num_kv_layers) as u32, 1],
            block: DDT_CUDA_COMMIT_SHIFT_THREADS,
            shared_bytes: 0,
            overlaps_previous: self.num_gdn_layers > 0,
        };
        let replay_kernel = if self.is_aligned { &kernels.replay } else { &kernels.replay_strided };
        // SAFETY: both kernels take this struct, and the caller vouches for what it points to.
        unsafe {
            device.launch(replay_kernel, &replay, kernel_params, stream)?;
            device.launch(&kernels.shift, &shift, kernel_params, stream)
        }
    }
}

/// How many value heads a block replays of those that share a key head: the more the better, as long as
/// every multiprocessor is full.
fn block_heads(group: usize, most: usize) -> usize {
    (1..=most.min(DDT_CUDA_COMMIT_MAX_BLOCK_HEADS as usize))
        .rev()
        .find(|&heads| group.is_multiple_of(heads))
        .unwrap_or(1)
}

/// Whether all operands of the convolution have the same 16-bit type, with contiguous channels that can be
/// accessed four at a time.
fn has_aligned_rows(layer: &CommitGdnLayer<'_>) -> bool {
    let dtype = layer.stash_qkv.dtype();
    let fits = |tensor: &TensorRef<'_>, axis: usize| {
        tensor.dtype() == dtype
            && (tensor.data() as usize).is_multiple_of(4 * dtype.size())
            && tensor
                .strides()
                .iter()
                .enumerate()
                .all(|(i, &stride)| if i == axis { stride == 1 } else { stride.is_multiple_of(4) })
    };
    dtype.size() == 2
        && fits(&layer.stash_qkv, 1)
        && fits(&layer.conv_state.view(), 1)
        && fits(&layer.conv_weight, 1)
        && layer.conv_weight.strides()[0] == GDN_CONV_WIDTH
        && layer.conv_bias.as_ref().is_none_or(|bias| fits(bias, 0))
}

/// # Safety
/// The layer must be as the header says.
unsafe fn kv_layer(layer: &ddt_kv_layer, out: &mut ddt_cuda_commit_kv) -> Result<()> {
    // SAFETY: the caller's promise; data is not read here.
    let tensors = unsafe { kv_layer_tensors(layer)? };
    let (num_blocks, block_size) = tensors.check_tensors()?;
    let (key_cache, value_cache) = (tensors.key_cache.view(), tensors.value_cache.view());
    *out = ddt_cuda_commit_kv {
        key_cache: cache("key_cache", &key_cache)?,
        value_cache: cache("value_cache", &value_cache)?,
        // as many as the device's query_start says
        row_slots: ptr::device_array(layer.row_slots, 1, "row_slots")?,
        num_blocks: num_blocks as i64,
        block_size: block_size as i64,
        num_key_heads: clamped(key_cache.shape()[1]),
        num_value_heads: clamped(value_cache.shape()[1]),
    };
    Ok(())
}

fn cache(name: &str, tensor: &TensorRef<'_>) -> Result<ddt_cuda_commit_cache> {
    let unit_bytes = unit_bytes(tensor);
    let size = tensor.dtype().size();
    let &[_, num_heads, _, head_dim] = tensor.shape() else { unreachable!("ndim is 4") };
    let num_units = head_dim * size / unit_bytes;
    if num_heads.checked_mul(num_units).is_none_or(|units| i32::try_from(units).is_err()) {
        bail!(
            InvalidShape,
            "{name} heads: got {num_heads} of {head_dim}, want a token of less than 2^31 elements"
        );
    }
    // a stride that does not fit belongs to an axis of one entry
    let bytes = |axis: usize| tensor.strides()[axis].wrapping_mul(size) as i64;
    Ok(ddt_cuda_commit_cache {
        data: tensor.data().cast_mut().cast(),
        block_stride: bytes(0),
        head_stride: bytes(1),
        token_stride: bytes(2),
        unit_stride: if unit_bytes == size { bytes(3) } else { unit_bytes as i64 },
        unit_bytes: unit_bytes as u32,
        num_units: clamped(num_units),
    })
}

/// The size of the largest accesses, up to 16 bytes, that fit the rows of the last axis: one element if
/// these are not contiguous.
fn unit_bytes(tensor: &TensorRef<'_>) -> usize {
    let size = tensor.dtype().size();
    let ([.., last], Some((&1, strides))) = (tensor.shape(), tensor.strides().split_last()) else {
        return size;
    };
    let row_bytes = last * size;
    let offsets = strides
        .iter()
        .fold(row_bytes | tensor.data() as usize, |bits, stride| bits | stride.wrapping_mul(size));
    // the lowest set bit
    1 << offsets.trailing_zeros().min(4)
}

/// Counts beyond what an i32 holds are cut: nothing on the device counts that far.
fn clamped(count: usize) -> i32 {
    count.min(i32::MAX as usize) as i32
}
