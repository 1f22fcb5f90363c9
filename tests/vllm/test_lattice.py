# SPDX-License-Identifier: Apache-2.0
"""Drafters with candidate heads: trees of nodes that know their parents. The heads are random, so acceptance says
nothing; texts are those of no speculation, and a chain drafts what vLLM's own walk over the lattice drafts."""

from functools import cache
from pathlib import Path
from typing import Any

import drafters
import pytest
import test_lossless
from engine import FULL, Engine, Run, on_gpu, prompts, same_text

NUM_PROMPTS, MAX_TOKENS = (24, 48) if FULL else (6, 24)
HORIZON, BUDGET = 7, 15
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
SAMPLED = {"temperature": 1.0, "max_tokens": MAX_TOKENS}
CHAIN = GREEDY | {"extra_args": {"ddtree_shape": "chain"}}
in_full_tier = pytest.mark.skipif(not (FULL or on_gpu()), reason="the full tier takes the time")


@cache
def baseline(name: str) -> Run:
    """No speculation, as test_lossless.py has run it."""
    run = test_lossless.baseline(4)[{"greedy": "greedy", "sampled": "T1.0"}[name]]
    return test_lossless.first_tokens(Run(run.outputs[:NUM_PROMPTS]), MAX_TOKENS)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "dflash2": drafters.dflash2(folder / "dflash2"),
        "silent": drafters.dflash2(folder / "silent", scale=0.0),
        "lilicorr": drafters.lilicorr(folder / "lilicorr"),
    }


def spec(drafter: Path, method: str = "ddtree", **more: Any) -> dict[str, Any]:
    sizes = {"tree_budget": BUDGET} if method == "ddtree" else {}
    return {
        "method": method,
        "model": str(drafter),
        "num_speculative_tokens": HORIZON,
        **sizes,
        **more,
    }


def assert_text(what: str, name: str, run: Run) -> None:
    near_ties = same_text(f"lattice, {what}, {name}", baseline(name), run, BUDGET)
    assert near_ties <= NUM_PROMPTS // 2, "too many near ties to show anything"


def assert_spines(engine: Engine) -> None:
    """The trees of the last rounds have the chain of best children first."""
    trees = engine.runner.speculator._trees
    # The rest have had no request, or its last round or a warm-up's, without drafts.
    served = (trees.num_nodes > 1).nonzero()[:, 0].tolist()
    assert served
    for slot in served:
        depths = trees.depths[slot, : HORIZON + 1].tolist()
        assert depths == trees.pop_ranks[slot, : HORIZON + 1].tolist() == list(range(HORIZON + 1))
        assert int(trees.num_nodes[slot]) == BUDGET + 1


# Best-first trees of a head that is noise are not deep by themselves.
@pytest.mark.parametrize(("head", "spine"), [("dflash2", None), ("lilicorr", True)])
def test_text_is_that_of_no_speculation(models, head, spine):
    with Engine(spec(models[head], tree_spine=spine)) as engine:
        greedy = engine.generate(prompts(NUM_PROMPTS), GREEDY)
        if spine:
            assert_spines(engine)
        sampled = engine.generate(prompts(NUM_PROMPTS), SAMPLED)
        chain = engine.generate(prompts(NUM_PROMPTS), CHAIN)
    assert_text(head, "greedy", greedy)
    assert_text(head, "sampled", sampled)
    assert_text(f"{head} as a chain", "greedy", chain)
    # Even random heads keep the better candidates; with parent and child exchanged DFlash2's has 1.1.
    least = 1.5 if head == "dflash2" else 1.2
    assert greedy.tokens_per_round >= chain.tokens_per_round > least


@in_full_tier
@pytest.mark.parametrize("head", ["dflash2", "lilicorr"])
def test_a_chain_is_that_of_vllms_own_walk(models, head):
    runs = {}
    for name, config in (
        ("chain", spec(models[head])),
        ("stock", spec(models[head], "dflash")),
    ):
        with Engine(config) as engine:
            runs[name] = engine.generate(prompts(NUM_PROMPTS), CHAIN if name == "chain" else GREEDY)
        assert_text(f"{head} {name}", "greedy", runs[name])
    # Texts part at near ties. LiLiCorr's scores are those of bf16 vectors, and equal ones are ranked by token, not
    # by column.
    near = 0.05 if head == "dflash2" and not on_gpu() else 0.1
    assert runs["chain"].accepted == pytest.approx(runs["stock"].accepted, rel=near)
    assert runs["stock"].accepted > 0


@in_full_tier
@pytest.mark.parametrize("head", ["dflash2", "lilicorr"])
@pytest.mark.parametrize(
    "option", [{"tree_scores": "marginal"}, {"verify_mode": "coupled"}, {"verify_mode": "match"}]
)
def test_options_keep_the_text(models, head, option):
    with Engine(spec(models[head], **option)) as engine:
        runs = {
            name: engine.generate(prompts(NUM_PROMPTS), params)
            for name, params in (("greedy", GREEDY), ("sampled", SAMPLED))
        }
    for name, run in runs.items():
        assert_text(f"{head} with {next(iter(option.values()))}", name, run)


@in_full_tier
def test_a_head_that_says_nothing_makes_marginal_trees(models):
    """Negative control of the option too: with a head that speaks they differ."""
    accepted = {}
    for name in ("silent", "dflash2"):
        for scores in ("conditional", "marginal"):
            with Engine(spec(models[name], tree_scores=scores)) as engine:
                run = engine.generate(prompts(NUM_PROMPTS), GREEDY)
            assert_text(f"{name}, {scores}", "greedy", run)
            accepted[name, scores] = run.accepted
    # but for near ties
    same = pytest.approx(accepted["silent", "marginal"], rel=0.02)
    assert accepted["silent", "conditional"] == same and accepted["dflash2", "marginal"] == same
    assert accepted["dflash2", "conditional"] != same
