# SPDX-License-Identifier: Apache-2.0
"""What a server says where libddtree cannot run on its device, before a model is loaded."""

from types import SimpleNamespace

import pytest
import torch
from vllm_ddtree import native, registration


def refuse_with(monkeypatch, text):
    def context(device):
        raise native.LibraryError(text)

    monkeypatch.setattr(registration, "library", lambda: SimpleNamespace(context=context))


@pytest.mark.parametrize(
    "text",
    [
        "DDT_UNSUPPORTED: context_create: params.device: got CUDA, want CPU, the only backend of this build",
        "DDT_ARCH_NOT_BUILT: context_create: GPU: got compute capability 9.0, want one that ...",
    ],
)
def test_a_build_without_this_gpu(monkeypatch, text):
    refuse_with(monkeypatch, text)
    with pytest.raises(native.LibraryError) as refusal:
        registration.load_kernels(torch.device("cuda", 0))
    said = str(refusal.value)
    assert said.startswith(f"libddtree was built without kernels for this GPU ({text}); rebuild it")


@pytest.mark.parametrize(
    "text",
    [
        "DDT_NO_DEVICE: context_create: CUDA driver: got none; install NVIDIA's driver",
        "DDT_UNSUPPORTED: context_create: GPU: got 1 bytes of shared memory per block, want 2",
    ],
)
def test_other_refusals_are_the_librarys_own_words(monkeypatch, text):
    refuse_with(monkeypatch, text)
    with pytest.raises(native.LibraryError) as refusal:
        registration.load_kernels(torch.device("cuda", 0))
    assert str(refusal.value) == text


def test_a_build_for_the_device_is_taken():
    registration.load_kernels(torch.device("cpu"))
