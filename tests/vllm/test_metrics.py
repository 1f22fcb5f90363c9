# SPDX-License-Identifier: Apache-2.0
"""vLLM's own counters are right about trees, and unchanged about chains."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from engine import Engine, prompts
from watch import Watch, watching

HORIZON = 15
NUM_PROMPTS, MAX_TOKENS = 6, 25
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos", "tree_nodes")


@dataclass
class Counted:
    outputs: list[Any]
    watch: Watch
    # What was added, by the names of COUNTERS; without those that are not exported.
    counters: dict[str, Any]


def read(engine: Engine) -> dict[str, Any]:
    exported = {m.name for m in engine.llm.get_metrics()}
    return {
        name: engine.metric(f"spec_decode_num_{name}")
        for name in COUNTERS
        if f"vllm:spec_decode_num_{name}" in exported
    }


def count(engine: Engine, **params: Any) -> Counted:
    from vllm import SamplingParams

    before = read(engine)
    with watching(engine) as watch:
        results = engine.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts(NUM_PROMPTS)],
            SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params}),
            use_tqdm=False,
        )
    added = {
        name: [a - b for a, b in zip(after, before[name] or [0] * len(after), strict=True)]
        if isinstance(after, list)
        else after - before[name]
        for name, after in read(engine).items()
    }
    return Counted([result.outputs[0] for result in results], watch, added)


def with_spec(*configs: dict[str, Any]):
    names = ["-".join(map(str, config.values())) for config in configs]
    return pytest.mark.parametrize("served", configs, indirect=True, ids=names)


@pytest.fixture(scope="module")
def served(request) -> Iterator[Engine]:
    # Asynchronously, a request may be verified once more after its end, which nobody counts.
    settings = {"per_request_spec_decode_metrics": "detailed", "async_scheduling": False}
    with Engine(request.param, **settings) as engine:
        yield engine


def check_text_adds_up(c: Counted, beyond: int) -> None:
    """Each request gets one token from its prefill, and per round the accepted
    ones and the bonus; `beyond` of those came after max_tokens."""
    tokens = sum(len(output.token_ids) for output in c.outputs)
    assert tokens == NUM_PROMPTS * MAX_TOKENS
    gained = c.counters["accepted_tokens"] + c.counters["drafts"]
    assert tokens + beyond == NUM_PROMPTS + gained


def check_positions(c: Counted, horizon: int) -> None:
    per_position = c.counters["accepted_tokens_per_pos"]
    assert len(per_position) == horizon
    assert sum(per_position) == c.counters["accepted_tokens"] > 0
    assert per_position == sorted(per_position, reverse=True)


def check_requests(c: Counted, horizon: int) -> None:
    """The request's own metrics add up to the server's."""
    own = [output.spec_decode_metrics for output in c.outputs]
    assert all(m.num_spec_tokens == horizon for m in own)
    assert all(len(m.histogram) == horizon + 1 for m in own)
    assert sum(sum(m.histogram) for m in own) == c.counters["drafts"]
    assert sum(sum(m.per_step_accepted) for m in own) == c.counters["accepted_tokens"]
    assert sum(m.num_draft_tokens for m in own) == c.counters["draft_tokens"]


TREES = [{"method": "ddtree", "tree_budget": 7}, {"method": "ddtree", "tree_budget": 31}]


@with_spec(*TREES)
def test_trees_are_counted_by_depth(served):
    budget = served.config["speculative_config"]["tree_budget"]
    horizon = min(HORIZON, budget)
    c = count(served, max_tokens=MAX_TOKENS)
    rounds = c.watch.rounds
    accepted = [len(r.sampled) - 1 for r in rounds]
    # Against what the walk really accepted, not only against each other.
    assert c.counters["drafts"] == len(rounds)
    assert c.counters["accepted_tokens"] == sum(accepted)
    assert c.counters["accepted_tokens_per_pos"] == [
        sum(a > depth for a in accepted) for depth in range(horizon)
    ]
    assert all(r.rows == budget + 1 for r in rounds), "no tree was cut"
    assert c.counters["draft_tokens"] == len(rounds) * horizon
    assert c.counters["tree_nodes"] == len(rounds) * budget
    sampled = [sum(len(r.sampled) for r in c.watch.of(i)) for i in range(NUM_PROMPTS)]
    beyond = sum(1 + n - MAX_TOKENS for n in sampled)
    assert beyond > 0, "max_tokens was never inside a path"
    check_text_adds_up(c, beyond)
    check_positions(c, horizon)
    check_requests(c, horizon)
    for i, output in enumerate(c.outputs):
        steps = [len(r.sampled) - 1 for r in c.watch.of(i)]
        assert output.spec_decode_metrics.per_step_accepted == steps


@with_spec(TREES[1])
def test_cut_trees_are_counted_as_cut(served):
    """Prompts near the model's length: fewer nodes, and at last fewer levels."""
    from vllm import SamplingParams

    before = read(served)
    ids = (prompts(NUM_PROMPTS)[4] * 20)[: 512 - 24]
    with watching(served) as watch:
        served.llm.generate(
            {"prompt_token_ids": ids},
            SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=64),
            use_tqdm=False,
        )
    after = read(served)
    drafted = [r.rows - 1 for r in watch.rounds]
    assert min(drafted) < HORIZON < 31
    assert after["tree_nodes"] - before["tree_nodes"] == sum(drafted)
    levels = sum(min(n, HORIZON) for n in drafted)
    assert after["draft_tokens"] - before["draft_tokens"] == levels


@with_spec({"method": "dflash", "num_speculative_tokens": HORIZON})
def test_chains_are_counted_as_ever(served):
    c = count(served, max_tokens=MAX_TOKENS)
    assert "tree_nodes" not in c.counters
    assert not c.watch.rounds
    assert c.counters["draft_tokens"] == c.counters["drafts"] * HORIZON
    # Up to HORIZON tokens of a request's last round are beyond max_tokens.
    gained = NUM_PROMPTS + c.counters["accepted_tokens"] + c.counters["drafts"]
    beyond = gained - NUM_PROMPTS * MAX_TOKENS
    assert 0 <= beyond <= NUM_PROMPTS * HORIZON
    check_text_adds_up(c, beyond)
    check_positions(c, HORIZON)
    check_requests(c, HORIZON)


def test_statistics_of_chains_by_hand():
    """The patched arithmetic, where there is no tree, is counting."""
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    rng = random.Random()
    stats, observed = SpecDecodingStats.new(HORIZON), []
    for _ in range(200):
        drafted = rng.randint(0, HORIZON)
        observed.append((drafted, rng.randint(0, drafted)))
        stats.observe_draft(*observed[-1])
    assert stats.num_drafts == 200
    assert stats.num_draft_tokens == sum(d for d, _ in observed)
    assert stats.num_accepted_tokens == sum(a for _, a in observed)
    for i in range(HORIZON):
        assert stats.num_draft_tokens_per_pos[i] == sum(d > i for d, _ in observed)
        assert stats.num_accepted_tokens_per_pos[i] == sum(a > i for _, a in observed)
