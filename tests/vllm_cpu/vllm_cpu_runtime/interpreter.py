# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter as the "cpu" Triton backend that vLLM looks for."""

import sys
import types

import triton.backends
from triton.runtime import interpreter as triton_interpreter


class _Driver:
    @staticmethod
    def is_active():
        return False


class _Backend:
    """What vLLM looks for: an entry "cpu" whose driver is not active. Nothing is ever compiled with it."""

    driver = _Driver
    compiler = None


def register_backend():
    triton.backends.backends["cpu"] = _Backend


def use_fast_interpreter():
    """Launch with fast_interpreter.py each kernel that it supports."""
    from . import fast_interpreter

    interpret = triton_interpreter.InterpretedFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        if warmup or fast_interpreter.unsupported(self.fn):
            return interpret(self, *args, grid=grid, warmup=warmup, **kwargs)
        fast_interpreter.run(self, *args, grid=grid, **kwargs)

    triton_interpreter.InterpretedFunction.run = run


def replace_top_k_top_p():
    """Use vLLM's PyTorch top-k/top-p on the CPU; its Triton kernel needs more than the interpreter offers."""
    name = "vllm.v1.sample.ops.topk_topp_triton"
    module = types.ModuleType(name)

    def apply_top_k_top_p_triton(logits, k, p):
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

        return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    module.apply_top_k_top_p_triton = apply_top_k_top_p_triton
    module.reset_buffer_cache = lambda: None
    # imported with it, and launched nowhere but on an accelerator
    for kernel in ("_topk_topp", "_topp_split_mask", "_topp_split_stats", "_topp_split_step"):
        setattr(module, kernel, None)
    sys.modules[name] = module
