# SPDX-License-Identifier: Apache-2.0
"""Tree rows in vLLM's FlashAttention layers: the stock kernel does prefills,
plain decodes and the drafter, ours the verify rows."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_ddtree.attention import attend
from vllm_ddtree.config import is_tree
from vllm_ddtree.step import VerifyStep, active_step


@dataclass
class TreeFlashAttentionMetadata(FlashAttentionMetadata):
    step: VerifyStep | None = None


class TreeFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if not is_tree(vllm_config.speculative_config):
            return support
        # A graph of tree rows serves no prefills.
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda s: s.value)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        step = active_step()
        # Without other rows the stock kernel, and so its schedule, is not used.
        fast_build = fast_build or (step is not None and not step.has_rest)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if step is None:
            return metadata
        return TreeFlashAttentionMetadata(**vars(metadata), step=step)


def split_kv_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a FLASH_ATTN cache [blocks, heads, block_size, 2 * head_dim] as
    views of half its width each."""
    head_dim = kv_cache.shape[-1] // 2
    return kv_cache[..., :head_dim], kv_cache[..., head_dim:]


class TreeFlashAttentionImpl(FlashAttentionImpl):
    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        step = getattr(attn_metadata, "step", None)
        if step is None or step.has_rest:
            # The stock kernel takes the whole batch: its schedule covers all rows.
            output = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
            )
        if step is not None:
            attend(self, step, attn_metadata, query, kv_cache, output)
        return output


class TreeFlashAttentionBackend(FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return TreeFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return TreeFlashAttentionMetadataBuilder
