# SPDX-License-Identifier: Apache-2.0
"""Tree rows in full-attention layers, whatever the platform's backend."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType

from vllm_ddtree.ops import AttentionPlan
from vllm_ddtree.step import VerifyStep


def split_kv_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer's cache as [blocks, heads, block_size, head_dim] views."""
    if current_platform.is_cpu():
        from vllm_ddtree.attention_cpu import split_kv_cache as split
    else:
        from vllm_ddtree.attention_cuda import split_kv_cache as split
    return split(kv_cache)


def attend(
    impl: Any,
    step: VerifyStep,
    attn_metadata: Any,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """The tree kernel on the rows of `step`, which lead the batch. Always called inside
    of vLLM's opaque attention op.

    query, output [T, Hq, Dh]; kv_cache holds the rows' own keys and values already."""
    planned_for = kv_cache.data_ptr(), kv_cache.shape
    if getattr(impl, "tree_planned_for", None) != planned_for:
        impl.tree_planned_for = planned_for
        softcap = float(impl.logits_soft_cap or 0.0)
        impl.tree_plan = AttentionPlan(*split_kv_cache(kv_cache), impl.scale, softcap)
    rows, reqs = step.num_rows, step.num_reqs
    impl.tree_plan.run(
        query[:rows],
        attn_metadata.block_table[:reqs],
        step.query_start,
        attn_metadata.seq_lens[:reqs],
        step.trees,
        output[:rows].view(rows, impl.num_heads, impl.head_size),
    )


@dataclass
class TreeKVLayer:
    """A target attention layer whose KV rows move when a path is accepted."""

    name: str
    layer: Attention

    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, [blocks, heads, block_size, head_dim]."""
        return split_kv_cache(self.layer.kv_cache)


def find_kv_layers(forward_context: dict[str, Any]) -> list[TreeKVLayer]:
    """Every target layer that owns a KV cache; shared caches move once."""
    return [
        TreeKVLayer(name, layer)
        for name, layer in forward_context.items()
        if isinstance(layer, Attention)
        and layer.attn_type == AttentionType.DECODER
        and not getattr(layer, "is_draft_layer", False)
        and layer.kv_sharing_target_layer_name is None
    ]
