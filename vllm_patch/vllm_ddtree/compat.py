# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this package runs on. The only place that compares versions."""

from functools import cache
from importlib import import_module

SUPPORTED_VLLM = ("0.32.0", "0.33.0")


@cache
def vllm_version() -> str:
    """The running vLLM's version, without a local part such as +cu129."""
    return str(import_module("vllm.version").__version__).split("+")[0]


def is_0_32() -> bool:
    return vllm_version().startswith("0.32.")


def check_vllm() -> None:
    """Raises ValueError on a vLLM that no patch series and no test covers."""
    if vllm_version() not in SUPPORTED_VLLM:
        raise ValueError(
            f"ddtree does not support vLLM {vllm_version()}; install one of "
            + ", ".join(SUPPORTED_VLLM)
        )
