# SPDX-License-Identifier: Apache-2.0
"""Tree rows in vLLM's full-attention layers on the CPU: the stock backend does
prefills, plain decodes and the drafter, our kernel does the verify rows."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_ddtree.attention import attend
from vllm_ddtree.config import is_tree
from vllm_ddtree.step import VerifyStep, active_step


@dataclass
class TreeCPUAttentionMetadata(CPUAttentionMetadata):
    step: VerifyStep | None = None


class TreeCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.isa == "amx" and is_tree(self.vllm_config.speculative_config):
            # AMX packs K and V in tiles that strides cannot describe.
            self.isa = "vec"
            self._set_isa_to_layers(self.layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return TreeCPUAttentionMetadata(**vars(metadata), step=active_step())


def split_kv_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a CPU_ATTN cache as [blocks, heads, block_size, head_dim] views.

    Per block and head, block_size * head_dim elements of K stored dim-major
    are followed by as many of V stored token-major."""
    blocks, heads, block_size, width = kv_cache.shape
    head_dim = width // 2
    block_stride, head_stride = kv_cache.stride(0), kv_cache.stride(1)
    size = (blocks, heads, block_size, head_dim)
    offset = kv_cache.storage_offset()
    key = kv_cache.as_strided(size, (block_stride, head_stride, 1, block_size), offset)
    value = kv_cache.as_strided(
        size,
        (block_stride, head_stride, head_dim, 1),
        offset + block_size * head_dim,
    )
    return key, value


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step = getattr(attn_metadata, "step", None)
        if step is None or step.has_rest:
            # The stock kernel takes the whole batch: its schedule covers all rows.
            output = super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if step is None:
            return output
        attend(self, step, attn_metadata, query, kv_cache, output)
        return output


class TreeCPUAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return TreeCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return TreeCPUAttentionMetadataBuilder
