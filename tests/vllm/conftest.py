# SPDX-License-Identifier: Apache-2.0
"""Engines of these tests live in the test process and take little memory."""

import os

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Unused: it cannot draw by a request's seed.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(name, value)
