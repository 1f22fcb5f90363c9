# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's paged attention with a mask. Needs the package `flashinfer`, which compiles the kernel on first use
(about a minute on 16 cores) unless `fetch.py --build` did."""

import functools
import importlib
import os
import time

import torch

from . import add_wheel

VERSION = "0.7.4"
ATTENTION = f"flashinfer-{VERSION} BatchPrefillWithPagedKVCacheWrapper(custom_mask, fa2)"


@functools.cache
def _package():
    add_wheel(f"flashinfer-{VERSION}")
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    return importlib.import_module("flashinfer.prefill")


def available() -> str | None:
    """Why FlashInfer cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    try:
        _package()
    except Exception as error:  # whatever the peer's import runs into
        return f"FlashInfer does not load: {error!r}"
    return None


class Attention:
    """Attention of N rows per request to a paged cache that holds them already, with a mask among those rows.

    Tensors as in `vllm.Attention`. The wrapper wants the mask over all columns, the prefix included, one bit each: it is
    made here, together with the plan, outside of what is timed, although both change every round. `plan_us` is the time
    that they take, on the host.
    """

    def __init__(self, query, key_cache, value_cache, block_table, seq_lens, scale, visible):
        requests, nodes = seq_lens.shape[0], visible.shape[0]
        device = query.device
        block_size = key_cache.shape[1]
        lengths = seq_lens.cpu()
        blocks = (lengths + block_size - 1) // block_size
        zero = torch.zeros(1, dtype=torch.int32)
        block_start = torch.cat([zero, blocks.cumsum(0).to(torch.int32)])
        last_block = ((lengths - 1) % block_size + 1).to(torch.int32)
        block_ids = torch.cat([row[:n] for row, n in zip(block_table, blocks.tolist())]).to(
            torch.int32
        )
        mask = torch.cat(
            [
                torch.cat([visible.new_ones(nodes, length - nodes), visible], dim=1).flatten()
                for length in lengths.tolist()
            ]
        )
        self.query, self.cache = query, (key_cache, value_cache)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        self.wrapper = _package().BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", backend="fa2"
        )
        query_start = torch.arange(requests + 1, dtype=torch.int32) * nodes
        for _ in range(2):  # the first also loads the kernel
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.wrapper.plan(
                query_start, block_start, block_ids, last_block, query.shape[1], key_cache.shape[2], query.shape[2],
                block_size, custom_mask=mask, sm_scale=scale, q_data_type=query.dtype, kv_data_type=key_cache.dtype,
            )  # fmt: skip
            torch.cuda.synchronize()
            self.plan_us = 1e6 * (time.perf_counter() - begin)
        self.out = torch.empty_like(query)

    def __call__(self) -> None:
        self.wrapper.run(self.query, self.cache, out=self.out)
