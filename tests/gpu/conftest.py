# SPDX-License-Identifier: Apache-2.0
"""Tests of the CUDA backend. They run with any Python that has PyTorch, pytest and cffi:
`PYTHONPATH=vllm_patch:tests/gpu pytest tests/gpu`. Without a GPU they are skipped."""

import pathlib
import random
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sanitize: small enough to run under compute-sanitizer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device: the CUDA kernels are tested on a machine with one")
        for item in items:
            if "no_gpu" not in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture
def lib():
    from vllm_ddtree.native import library

    return library()


@pytest.fixture
def rng() -> random.Random:
    """Fresh numbers in every run; a failing test shows the seed."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    return random.Random(seed)
