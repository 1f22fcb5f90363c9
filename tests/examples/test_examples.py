# SPDX-License-Identifier: Apache-2.0
"""Every program of include/examples does what it says, from an installed library."""

from conftest import CARGO_OPTIONS, ROOT, run


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

    budget, horizon = 15, 15
    reference = ReferenceLoop(torch_loop.MODELS / "target", torch_loop.MODELS / "drafter")
    for prompt, text, accepted in torch_loop.compare("cpu", 2, 40, budget):
        # the reference starts behind a token that has been sampled: the prompt's last one
        text = [prompt[-1], *text]
        count = len(text) - horizon - 1
        rounds = reference.rounds(prompt[:-1], text, count, budget, horizon)
        assert len(rounds) > 3 and accepted[: len(rounds)] == rounds
