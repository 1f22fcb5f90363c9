# SPDX-License-Identifier: Apache-2.0
"""The corrections of vLLM's CPU build do what they say, and are still needed."""

from types import SimpleNamespace

import torch


def by_layer(keys, weights, eps):
    variance = keys.double().pow(2).mean(-1, keepdim=True)
    return keys.double() * (variance + eps).rsqrt() * weights[:, None, None].double()


def test_context_keys_are_normalised_with_their_own_layers_weight():
    from vllm.model_executor.models import qwen3_dflash

    layers, tokens, heads, dim = 3, 5, 2, 128
    keys = torch.randn(layers, tokens, heads, dim)
    weights = torch.rand(layers, dim) + 0.5
    want = by_layer(keys, weights, 1e-6)
    model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    got = qwen3_dflash.DFlashQwen3Model._normalize_context_k(model, keys)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    # when this fails, vLLM's kernel has learnt it and the correction can go
    stock = torch.empty_like(keys)
    qwen3_dflash.ops.rms_norm(stock, keys, weights, 1e-6)
    torch.testing.assert_close(stock[0].double(), want[0], rtol=1e-5, atol=1e-5)
    assert (stock[1:].double() - want[1:]).abs().max() > 0.1
