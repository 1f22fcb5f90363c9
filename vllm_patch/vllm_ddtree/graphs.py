# SPDX-License-Identifier: Apache-2.0
"""FULL CUDA graphs of exactly the batches that rounds meet. vLLM rounds every size of
its list up to whole requests of every tier's length: over a hundred graphs, most of
them of no batch that is met, and still batches that find none."""

from collections import defaultdict

from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
)

from vllm_ddtree.config import graph_batches, max_tree_rows

logger = init_logger(__name__)


def capture_trees(manager: CudaGraphManager) -> None:
    """Choose the target's graphs, before any is captured."""
    capture_batches(manager, graph_batches(manager.vllm_config))
    if manager.device.type == "cuda" and (advice := advise(manager)):
        logger.warning_once(advice)


def advise(manager: CudaGraphManager) -> str | None:
    """What to change where rounds run without a FULL graph, which works but is slow."""
    config, mode = manager.vllm_config, manager.cudagraph_mode
    if mode.decode_mode() != CUDAGraphMode.FULL:
        change = (
            "remove --enforce-eager"
            if config.model_config.enforce_eager
            else "set cudagraph_mode to FULL_AND_PIECEWISE"
        )
        return (
            "ddtree: rounds are slow without FULL CUDA graphs (cudagraph_mode is "
            f"{mode.name}); {change}."
        )
    largest = config.compilation_config.max_cudagraph_capture_size or 0
    rows = max_tree_rows(config)
    if largest < rows:
        return (
            f"ddtree: rounds of more than {largest} rows are slow, since the largest CUDA graph "
            f"ends there; set max_cudagraph_capture_size to {rows}."
        )
    return None


def capture_batches(manager: CudaGraphManager, batches: list[tuple[int, int]]) -> None:
    """Make `batches`, (rows per request, requests), the FULL graphs of `manager`. A batch
    gets the smallest of its rows per request that holds it. Others stay as they are."""
    full = CUDAGraphMode.FULL
    if not manager._capture_descs.get(full):
        return
    for candidates in manager._candidates.values():
        candidates[:] = [desc for desc in candidates if desc.cg_mode != full]
    descs = [
        BatchExecutionDescriptor(
            cg_mode=full,
            num_tokens=rows * count,
            num_reqs=count,
            uniform_token_count=rows,
            num_active_loras=loras,
        )
        for loras in manager.lora_capture_cases
        for rows, count in sorted(batches)
    ]
    covered: dict[tuple[int, int], int] = defaultdict(int)
    for desc in descs:
        rows, loras = desc.uniform_token_count, desc.num_active_loras
        for count in range(covered[rows, loras] + 1, desc.num_reqs + 1):
            candidates = manager._candidates.setdefault((count * rows, loras), [])
            # before those of PIECEWISE graphs
            candidates.insert(0, desc)
        covered[rows, loras] = desc.num_reqs
    # The first capture is the largest: vLLM takes its outputs' buffers from it.
    descs.sort(key=lambda desc: desc.num_tokens, reverse=True)
    manager._capture_descs[full] = descs
