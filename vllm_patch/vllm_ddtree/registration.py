# SPDX-License-Identifier: Apache-2.0
"""Puts our layer and backends in the place of vLLM's, in processes that serve
with trees and only there."""

import vllm_ddtree.ops  # noqa: F401  (defines torch.ops.ddtree)
from vllm_ddtree.trees import require_library

_registered = False


def register() -> None:
    """Idempotent; called before the target model is built."""
    global _registered
    require_library()
    if _registered:
        return
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    from vllm_ddtree.gdn import TreeGatedDeltaNet

    PluggableLayer.register_oot(TreeGatedDeltaNet, name="QwenGatedDeltaNetAttention")
    if current_platform.is_cpu():
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            "vllm_ddtree.attention_cpu.TreeCPUAttentionBackend",
        )
    else:
        register_backend(
            AttentionBackendEnum.FLASH_ATTN,
            "vllm_ddtree.attention_cuda.TreeFlashAttentionBackend",
        )
    # An engine that this process ran before may have resolved the stock backend.
    selector._cached_get_attn_backend.cache_clear()
    _registered = True
