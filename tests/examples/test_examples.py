# SPDX-License-Identifier: Apache-2.0
"""Every program of include/examples does what it says, from an installed library."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from commands import CARGO_OPTIONS, CXX, EXAMPLES, ROOT, run


def find_cuda() -> Path:
    """The toolkit that the wheels of ci/requirements-cuda.in make."""
    cuda = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
    if not (cuda / "include" / "cuda_runtime_api.h").is_file():
        pytest.skip("no CUDA headers in this environment")
    return cuda


def test_rust():
    """Cargo has built it with the tests, if those ran before."""
    text = run("cargo", "run", "--release", "--locked", *CARGO_OPTIONS, "--example", "round", cwd=ROOT)
    assert "rounds without trees" in text


def test_torch(prefix, monkeypatch):
    """The texts are transformers' own, and each round accepts what an independent loop (trees by a
    heap in float64, no library) says it should."""
    monkeypatch.setenv("DDTREE_LIBRARY", str(prefix / "lib" / "libddtree.so"))
    for folder in ("vllm_patch", "include/examples", "tests/vllm"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    import torch_loop
    from reference_loop import ReferenceLoop

    budget, horizon = 31, 15
    reference = ReferenceLoop(torch_loop.MODELS / "target", torch_loop.MODELS / "drafter")
    for prompt, text, accepted in torch_loop.compare("cpu", 2, 48, budget):
        # the reference starts behind a token that has been sampled: the prompt's last one
        text = [prompt[-1], *text]
        count = len(text) - horizon - 1
        rounds = reference.rounds(prompt[:-1], text, count, budget, horizon)
        assert len(rounds) > 3 and accepted[: len(rounds)] == rounds


def test_cuda_graph(prefix, tmp_path):
    """Compiles wherever the CUDA headers are; runs where there is a GPU, else says that there is none."""
    cuda = find_cuda()
    program = tmp_path / "graph"
    run(
        *(CXX, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", EXAMPLES / "graph.cpp", "-o", program),
        *(f"-I{prefix}/include", "-isystem", cuda / "include", f"-L{prefix}/lib", "-lddtree"),
        *(cuda / "lib" / "libcudart_static.a", "-ldl", "-lrt", "-lpthread", f"-Wl,-rpath,{prefix}/lib"),
    )
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    if result.returncode == 0:
        assert "20 replays as on the CPU" in result.stdout
    else:
        assert re.match("DDT_(NO_DEVICE|CUDA_ERROR|UNSUPPORTED): context_create: ", result.stderr)
        pytest.skip(f"compiled, not run: {result.stderr}")
