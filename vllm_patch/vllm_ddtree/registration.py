# SPDX-License-Identifier: Apache-2.0
"""Puts our layer and backends in the place of vLLM's, in processes that serve
with trees and only there."""

import torch

import vllm_ddtree.ops  # noqa: F401  (defines torch.ops.ddtree)
from vllm_ddtree.native import LibraryError, library

_registered = False


def load_kernels(device: torch.device) -> None:
    """Load libddtree's kernels for `device`: before the model is loaded, and never while
    a CUDA graph is captured."""
    try:
        library().context(device)
    except LibraryError as error:
        text = str(error)
        if text.startswith("DDT_ARCH_NOT_BUILT") or "backend of this build" in text:
            raise LibraryError(
                f"libddtree was built without kernels for this GPU ({text}); rebuild it with "
                "nvcc 13, and without DDTREE_CUDA_ARCHS or with this GPU in it."
            ) from error
        raise


def register(device: torch.device) -> None:
    """Idempotent; called before the target model is built."""
    global _registered
    load_kernels(device)
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
