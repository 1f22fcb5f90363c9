// SPDX-License-Identifier: Apache-2.0
//! The kernels of `cuda/tree_attention_sm90.cu`: which calls they take, and their tensor maps.

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle,
};

use crate::cuda::driver::check;
use crate::cuda::params::{
    DDT_CUDA_TREE_ATTENTION_SM90_KEY_BOX_TOKENS, DDT_CUDA_TREE_ATTENTION_SM90_PANEL_COLUMNS,
    DDT_CUDA_TREE_ATTENTION_SM90_SHARED_BYTES, DDT_CUDA_TREE_ATTENTION_SM90_VALUE_BOX_TOKENS,
    ddt_cuda_tensor_map, ddt_cuda_tree_attention, ddt_cuda_tree_attention_sm90, ddt_cuda_view,
};
use crate::cuda::{Kernel, Loader};
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::TensorRef;
use crate::tree_attention::{Dims, Tensors};

/// Threads of a block: a warpgroup that loads, two that compute.
pub(super) const THREADS: u32 = 384;
/// Fewest KV tiles that are worth a CTA.
pub(super) const MIN_TILES: u32 = 2;

/// Tensor maps take strides below this, in bytes.
const MAX_STRIDE: usize = 1 << 40;

pub(super) struct Kernels {
    /// Head dims 128, 256.
    bf16: [Kernel; 2],
    f16: [Kernel; 2],
}

impl Kernels {
    pub(super) fn load(loader: &Loader<'_>) -> Result<Self> {
        let kernel = |name| loader.kernel(name, DDT_CUDA_TREE_ATTENTION_SM90_SHARED_BYTES);
        Ok(Self {
            bf16: [
                kernel("ddt_tree_attention_sm90_attend_bf16_128")?,
                kernel("ddt_tree_attention_sm90_attend_bf16_256")?,
            ],
            f16: [
                kernel("ddt_tree_attention_sm90_attend_f16_128")?,
                kernel("ddt_tree_attention_sm90_attend_f16_256")?,
            ],
        })
    }

    /// The kernel for tensors that the mma.sync kernels could take as well; `None` if only those can.
    pub(super) fn find(&self, tensors: &Tensors<'_>, dims: &Dims) -> Option<&Kernel> {
        let kernels = match tensors.query.dtype() {
            DType::BF16 => &self.bf16,
            DType::F16 => &self.f16,
            _ => return None,
        };
        let kernel = match dims.head_dim {
            128 => &kernels[0],
            256 => &kernels[1],
            _ => return None,
        };
        let has_map = |cache: &TensorRef<'_>| {
            let extents = cache.shape().iter().zip(cache.strides());
            extents.clone().all(|(&extent, _)| (1..1 << 31).contains(&extent))
                && extents.clone().all(|(&extent, &stride)| {
                    extent == 1 || (1..MAX_STRIDE).contains(&(stride * cache.dtype().size()))
                })
        };
        let pages_are_boxes =
            dims.block_size.is_multiple_of(DDT_CUDA_TREE_ATTENTION_SM90_VALUE_BOX_TOKENS as usize);
        (pages_are_boxes && has_map(tensors.key_cache) && has_map(tensors.value_cache)).then_some(kernel)
    }
}

/// The kernels' parameters.
pub(super) fn params(attention: ddt_cuda_tree_attention) -> Result<ddt_cuda_tree_attention_sm90> {
    Ok(ddt_cuda_tree_attention_sm90 {
        key_map: tensor_map(&attention, &attention.key_cache, DDT_CUDA_TREE_ATTENTION_SM90_KEY_BOX_TOKENS)?,
        value_map: tensor_map(
            &attention,
            &attention.value_cache,
            DDT_CUDA_TREE_ATTENTION_SM90_VALUE_BOX_TOKENS,
        )?,
        attention,
    })
}

fn tensor_map(
    attention: &ddt_cuda_tree_attention,
    cache: &ddt_cuda_view,
    box_tokens: u32,
) -> Result<ddt_cuda_tensor_map> {
    const COLUMNS: u32 = DDT_CUDA_TREE_ATTENTION_SM90_PANEL_COLUMNS;
    const ELEMENT: u64 = 2;
    let [head_dim, tokens, heads, blocks] =
        [attention.head_dim, attention.block_size, attention.num_kv_heads, attention.num_blocks]
            .map(|extent| extent as u64);
    let panels = head_dim / u64::from(COLUMNS);
    let extents = [u64::from(COLUMNS), tokens, panels, heads, blocks];
    // a stride along a single element is never used, but has to be one that the driver accepts
    let stride = |extent: u64, stride: i64| ELEMENT * if extent == 1 { head_dim } else { stride as u64 };
    let strides = [
        stride(tokens, cache.strides[2]),
        ELEMENT * u64::from(COLUMNS),
        stride(heads, cache.strides[1]),
        stride(blocks, cache.strides[0]),
    ];
    let boxes = [COLUMNS, box_tokens, panels as u32, 1, 1];
    let dtype = if cache.dtype == DType::BF16 as u32 {
        CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    } else {
        CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    };
    let mut map = CUtensorMap { opaque: [0; 16] };
    // SAFETY: describes device memory without touching it; every array has the length that the rank asks for.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            dtype,
            extents.len() as u32,
            cache.data,
            extents.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            [1; 5].as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    check(result, "cuTensorMapEncodeTiled")?;
    Ok(ddt_cuda_tensor_map { words: map.opaque })
}
