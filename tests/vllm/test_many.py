# SPDX-License-Identifier: Apache-2.0
"""Hundreds of prompts in large batches: the text of no speculation, greedy and seeded."""

from functools import cache

import pytest
from engine import FULL, Engine, Run, on_gpu, prompts, same_text

NUM_PROMPTS, MAX_TOKENS = 288, 64
CASES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "seeded, top-p": {"temperature": 0.7, "top_p": 0.9},
}
# Node budget and requests at a time. 32 trees of 31 nodes are more than a step may hold.
ENGINES = [(63, 8), (31, 32), (15, 32)]


@cache
def many() -> list[list[int]]:
    """Each held-out prompt whole, and its two halves."""
    whole = prompts(NUM_PROMPTS // 3)
    halves = [half for p in whole for half in (p[: len(p) // 2], p[len(p) // 2 :])]
    return whole + halves


def run(engine: Engine) -> dict[str, Run]:
    return {
        name: engine.generate(many(), {"max_tokens": MAX_TOKENS, **case})
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def base() -> dict[str, Run]:
    with Engine(margins=True, max_num_seqs=32) as engine:
        return run(engine)


@pytest.mark.skipif(not (FULL or on_gpu()), reason="the full tier takes the time")
@pytest.mark.parametrize("budget, max_num_seqs", ENGINES)
def test_text_is_that_of_no_speculation(base, budget, max_num_seqs):
    spec = {"method": "ddtree", "tree_budget": budget}
    with Engine(spec, max_num_seqs=max_num_seqs) as engine:
        runs = run(engine)
    for name, got in runs.items():
        near_ties = same_text(f"many, {name}", base[name], got, budget, max_num_seqs)
        assert near_ties <= NUM_PROMPTS // 2, "too many near ties to show anything"
