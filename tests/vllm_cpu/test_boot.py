# SPDX-License-Identifier: Apache-2.0
"""A process that serves on the CPU uses Model Runner V2 or does not start."""

import os
import subprocess
import sys

import pytest


def python(code, **environment):
    """Run `code` in a new process with only `environment` of this runtime's variables."""
    ours = ("DDTREE_CPU_RUNTIME", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, timeout=300
    )


V2 = "from vllm.config import VllmConfig; from vllm.triton_utils import HAS_TRITON; "
V2 += "print(HAS_TRITON, VllmConfig().use_v2_model_runner)"


@pytest.mark.parametrize("mode", ["fast", "interpreter"])
def test_the_variable_alone_selects_v2(mode):
    # the interpreter start-up file calls boot(), as in the server's child processes
    result = python(V2, DDTREE_CPU_RUNTIME=mode)
    assert result.stdout.split() == ["True", "True"], result.stderr


def test_without_it_vllm_has_no_triton():
    result = python(V2)
    assert result.stdout.split() == ["False", "False"], result.stderr


def test_child_processes_inherit_the_mode():
    code = "import vllm_cpu_runtime as r, subprocess, sys; r.boot('interpreter'); "
    code += (
        "subprocess.run([sys.executable, '-c', 'import vllm_cpu_runtime as r; print(r._booted)'])"
    )
    result = python(code)
    assert result.stdout.strip() == "interpreter", result.stderr


@pytest.mark.parametrize(
    "code, environment, message",
    [
        ("pass", {"DDTREE_CPU_RUNTIME": "slow"}, "use one of fast, interpreter"),
        (
            "import triton, vllm_cpu_runtime as r; r.boot()",
            {},
            "before vllm and triton are imported",
        ),
        (
            "import vllm_cpu_runtime as r; r.boot('fast'); r.boot('interpreter')",
            {},
            "must run once",
        ),
    ],
)
def test_refusals_end_the_process(code, environment, message):
    result = python(code, **environment)
    assert result.returncode != 0 and message in result.stderr


def test_threads_can_be_chosen():
    code = "import os, vllm_cpu_runtime as r; r.boot(); print(os.environ['OMP_NUM_THREADS'])"
    assert python(code).stdout.strip() == "1"
    assert python(code, OMP_NUM_THREADS="2").stdout.strip() == "2"
