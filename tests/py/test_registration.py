# SPDX-License-Identifier: Apache-2.0
"""What a server says where libddtree cannot run on its device, before a model is loaded."""

from types import SimpleNamespace

import pytest
import torch
from vllm_ddtree import native, registration


@pytest.mark.parametrize(
    "text, is_of_the_build",
    [
        (
            "DDT_UNSUPPORTED: context_create: params.device: got CUDA, want CPU, the only backend of this build",
            True,
        ),
        ("DDT_ARCH_NOT_BUILT: context_create: GPU: got compute capability 9.0, want one that ...", True),
        ("DDT_NO_DEVICE: context_create: CUDA driver: got none; install NVIDIA's driver", False),
        ("DDT_UNSUPPORTED: context_create: GPU: got 1 bytes of shared memory per block, want 2", False),
    ],
)
def test_what_is_said_of_a_gpu(monkeypatch, text, is_of_the_build):
    def context(device):
        raise native.LibraryError(text)

    monkeypatch.setattr(registration, "library", lambda: SimpleNamespace(context=context))
    with pytest.raises(native.LibraryError) as refusal:
        registration.load_kernels(torch.device("cuda", 0))
    said = str(refusal.value)
    if is_of_the_build:
        start = f"libddtree was built without kernels for this GPU ({text}); rebuild it"
        assert said.startswith(start)
    else:
        assert said == text


def test_a_build_for_the_device_is_taken():
    registration.load_kernels(torch.device("cpu"))
