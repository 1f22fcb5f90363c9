# SPDX-License-Identifier: Apache-2.0
"""Requests whose logits depend on the tokens before: the text of no speculation, from
trees that hold more than chains do. test_history.py looks at single rows.

https://github.com/sgl-project/sglang/pull/29907 and
https://github.com/Luce-Org/lucebox/issues/105 tell of parameters that were ignored
without a word: here each must change the text."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine import FULL, Engine, Run, assert_same_text, on_gpu, prompts, record
from test_history import Banned, BannedOnChains
from watch import Round, Watch, watching

pytestmark = pytest.mark.skipif(not (FULL or on_gpu()), reason="the full tier takes the time")

BUDGETS, HORIZON = (15, 31), 15
MAX_TOKENS = 32
# Which held-out prompt: one whose continuation the kind has something to say about.
PROMPTS = {
    "presence": 4,
    "frequency": 7,
    "repetition": 8,
    "bad words": 9,
    "thinking": 5,
    "custom": 6,
    "all": 10,
    "custom on chains": 6,
}
MODES = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "top_k": 40}}
ON_CHAINS = "custom on chains"


def settings() -> dict[str, Any]:
    from vllm.config import ReasoningConfig

    return {
        "max_num_seqs": 8,
        "logits_processors": [Banned, BannedOnChains],
        # Code: an assignment thinks of a value.
        "reasoning_config": ReasoningConfig(reasoning_start_str="=", reasoning_end_str="None,"),
    }


def kinds(bad_words: list[list[int]]) -> dict[str, dict]:
    alone = {
        "presence": {"presence_penalty": 1.0},
        "frequency": {"frequency_penalty": 0.7},
        "repetition": {"repetition_penalty": 1.2},
        "bad words": {"_bad_words_token_ids": bad_words},
        "thinking": {"thinking_token_budget": 2},
        "custom": {"extra_args": {"ban": 2}},
    }
    together = {name: value for params in alone.values() for name, value in params.items()}
    return {**alone, "all": together, ON_CHAINS: {"extra_args": {"ban_on_chain": 2}}}


def requests(bad_words: list[list[int]], **extra_args: Any) -> dict[tuple[str, str], dict]:
    return {
        (mode, kind): {
            "max_tokens": MAX_TOKENS,
            **MODES[mode],
            **params,
            "extra_args": {**params.get("extra_args", {}), **extra_args},
        }
        for mode in MODES
        for kind, params in kinds(bad_words).items()
    }


def texts() -> list[list[int]]:
    return [prompts(1, first=PROMPTS[kind])[0] for _, kind in requests([])]


class Base:
    def __init__(self, engine: Engine) -> None:
        plain = [{"max_tokens": MAX_TOKENS, **MODES[mode]} for mode, _ in requests([])]
        self.plain = engine.generate(texts(), plain)
        # What is said without them: words of two to four tokens.
        self.bad_words = [
            list(output.token_ids[i : i + length])
            for output in self.plain.outputs
            for i, length in ((3, 2), (8, 3), (14, 4))
        ]
        self.run = engine.generate(texts(), list(requests(self.bad_words).values()))


@pytest.fixture(scope="module")
def base() -> Base:
    with Engine(margins=True, **settings()) as engine:
        return Base(engine)


@pytest.fixture(scope="module")
def tree(base) -> Iterator[Engine]:
    speculative = {"method": "ddtree", "tree_budget": max(BUDGETS)}
    with Engine(speculative, **settings()) as engine:
        yield engine


def serve(engine: Engine, base: Base, **extra_args: Any) -> tuple[Run, Watch]:
    params = list(requests(base.bad_words, **extra_args).values())
    with watching(engine) as watch:
        return engine.generate(texts(), params), watch


@pytest.fixture(scope="module")
def served(tree, base) -> dict[int, tuple[Run, Watch]]:
    return {budget: serve(tree, base, ddtree_budget=budget) for budget in BUDGETS}


def check_text(base: Base, run: Run, what: str) -> None:
    near_ties = 0
    for i, key in enumerate(requests([])):
        want, got = Run([base.run.outputs[i]]), Run([run.outputs[i]])
        near_ties += assert_same_text(want, got, f"{what}, {', '.join(key)}")
    # A GPU has more of them, DESIGN.md F17.
    assert near_ties <= len(run.outputs) // (2 if on_gpu() else 3), "too many to show anything"


@pytest.mark.parametrize("budget", BUDGETS)
def test_text_is_that_of_no_speculation(base, served, budget):
    check_text(base, served[budget][0], f"budget {budget}")


def test_each_changes_the_text(base):
    changed = {
        kind
        for (_, kind), plain, got in zip(requests([]), base.plain.outputs, base.run.outputs)
        if plain.token_ids != got.token_ids
    }
    assert changed == set(kinds([]))


def branches(r: Round) -> int:
    """Accepted nodes that are not the best child of their parent."""
    node, found = 0, 0
    for token in r.sampled[:-1]:
        children = [i for i, parent in enumerate(r.parents) if parent == node]
        node = next(i for i in children if r.tokens[i] == token)
        found += node != children[0]
    return found


@pytest.mark.parametrize("budget", BUDGETS)
def test_they_have_trees(served, budget):
    watch = served[budget][1]
    for i, (_, kind) in enumerate(requests([])):
        rounds = watch.of(i)
        assert rounds
        if kind == ON_CHAINS:
            assert all(r.is_chain and r.num_nodes == HORIZON + 1 for r in rounds)
        else:
            assert all(r.num_nodes == budget + 1 for r in rounds), kind
            # With no more nodes than it is deep, the best tree of a sure drafter is a chain.
            assert not all(r.is_chain for r in rounds), kind
    # Rows behind another child were right, too.
    assert sum(branches(r) for r in watch.rounds) >= 10


def tokens_per_round(rounds: list[Round]) -> float:
    return sum(len(r.sampled) for r in rounds) / len(rounds)


def test_trees_take_fewer_rounds_than_chains(base, tree, served):
    run, chained = serve(tree, base, ddtree_shape="chain")
    check_text(base, run, "chain")
    by_shape: dict[str, list[Round]] = {"chain": [], "tree": []}
    for i, (mode, kind) in enumerate(requests([])):
        if kind == ON_CHAINS:
            continue
        for shape, watch in (("chain", chained), ("tree", served[31][1])):
            rounds = watch.of(i)
            by_shape[shape] += rounds
            record(
                test="history",
                kind=kind,
                mode=mode,
                shape=shape,
                budget=15 if shape == "chain" else 31,
                rounds=len(rounds),
                tokens_per_round=round(tokens_per_round(rounds), 2),
            )
    assert all(r.is_chain for r in chained.rounds)
    assert tokens_per_round(by_shape["tree"]) > tokens_per_round(by_shape["chain"])


def test_sampled_tokens_are_counted_once(base, tree):
    """What vLLM counts for penalties is what was sampled along the accepted paths."""
    key = ("greedy", "frequency")
    i = list(requests([])).index(key)
    params = {**requests([])[key], "max_tokens": 24}
    with watching(tree) as watch:
        output = tree.generate([texts()[i]], params).outputs[0]
    # The first token is the prefill's, the others the rounds'.
    sampled = [output.token_ids[0], *(t for r in watch.of(0) for t in r.sampled)]
    assert tuple(sampled[:24]) == output.token_ids
    assert sum(len(r.sampled) > 1 for r in watch.of(0)) > 2
    counts = tree.runner.sampler.penalties_state.output_bin_counts.cpu()
    expected = torch.bincount(torch.tensor(sampled), minlength=counts.shape[1])
    assert (counts.long() == expected).all(-1).any()


@pytest.mark.skipif(not FULL, reason="the full tier checks the checks")
def test_by_the_rows_before_the_text_changes(base, monkeypatch):
    """Negative control: penalties and all else taken from the previous rows."""
    from vllm_ddtree import history, sampler

    monkeypatch.setattr(sampler, "process_along_paths", lambda *args: history.CurrentPaths())
    speculative = {"method": "ddtree", "tree_budget": max(BUDGETS)}
    with Engine(speculative, **settings()) as engine:
        run, _ = serve(engine, base)
    changed = 0
    for i, key in enumerate(requests([])):
        try:
            assert_same_text(Run([base.run.outputs[i]]), Run([run.outputs[i]]), str(key))
        except AssertionError as error:
            assert "differs at token" in str(error)
            changed += 1
    assert changed >= 4
