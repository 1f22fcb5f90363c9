# SPDX-License-Identifier: Apache-2.0
"""`verify_mode` coupled: trees of anticipated samples give the text of no speculation, in fewer rounds."""

from typing import Any

import pytest
from engine import FULL, Engine, Run, assert_same_text, on_gpu, same_text
from test_lossless import (
    BUDGETS,
    CASES,
    MAX_TOKENS,
    NUM_PROMPTS,
    SAMPLING,
    accepted_counts,
    baseline,
    first_tokens,
    held_out,
    sampled,
)


def run_coupled(budget: int, cases: dict[str, dict[str, Any]]) -> dict[str, Run]:
    spec = {"method": "ddtree", "tree_budget": budget, "verify_mode": "coupled"}
    with Engine(spec) as engine:
        return {
            name: engine.generate(held_out(), {"max_tokens": MAX_TOKENS, **case})
            for name, case in cases.items()
        }


@pytest.mark.parametrize("budget", BUDGETS if FULL else (15,))
def test_text_is_that_of_no_speculation(budget):
    runs = run_coupled(budget, CASES)
    for name, run in runs.items():
        base = first_tokens(baseline(4)[name], MAX_TOKENS)
        near_ties = same_text(f"coupled {name}", base, run, budget)
        assert near_ties <= NUM_PROMPTS // 2, "too many near ties to show anything"
    # Greedy requests get the trees that they get without it.
    greedy, _ = accepted_counts("tree", budget)
    assert runs["greedy"].accepted == pytest.approx(greedy.accepted, rel=0.02)
    matched = sampled(budget)["T1.0"]
    assert runs["T1.0"].tokens_per_round > 1.1 * matched.tokens_per_round


in_full_tier = pytest.mark.skipif(not (FULL or on_gpu()), reason="the full tier takes the time")


@in_full_tier
def test_greedy_and_sampled_requests_in_one_batch():
    cases = [list(CASES)[i % len(CASES)] for i in range(NUM_PROMPTS)]
    params = [{"max_tokens": MAX_TOKENS, **CASES[name]} for name in cases]
    spec = {"method": "ddtree", "tree_budget": 15, "verify_mode": "coupled"}
    with Engine(spec) as engine:
        run = engine.generate(held_out(), params)
    base = Run(
        [first_tokens(baseline(4)[name], MAX_TOKENS).outputs[i] for i, name in enumerate(cases)]
    )
    near_ties = assert_same_text(base, run, "coupled, mixed batch")
    assert near_ties <= NUM_PROMPTS // 2


@in_full_tier
def test_noise_of_another_seed_costs_rounds_and_no_text(monkeypatch):
    """Negative control: the drafter's trees must be for the target's own noise."""
    from vllm_ddtree.speculator import DDTreeSpeculator

    generate = DDTreeSpeculator._generate_draft

    def salted(self, *args, **kwargs):
        self.seeds.bitwise_xor_(1 << 40)
        generate(self, *args, **kwargs)

    monkeypatch.setattr(DDTreeSpeculator, "_generate_draft", salted)
    run = run_coupled(15, {"T1.0": SAMPLING["T1.0"]})["T1.0"]
    assert_same_text(first_tokens(baseline(4)["T1.0"], MAX_TOKENS), run, "salted")
    assert run.tokens_per_round < sampled(15)["T1.0"].tokens_per_round
