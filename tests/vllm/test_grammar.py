# SPDX-License-Identifier: Apache-2.0
"""Structured output on trees, served: the text of no speculation with the same grammar,
greedy and seeded, beside requests without one, with and without asynchronous scheduling.

Others refuse structured output on trees (https://github.com/tmt-ai-corp/vllm_ddtree), turn
the tree off for tools (https://github.com/Luce-Org/lucebox) or change what tool calls say
(https://github.com/vllm-project/vllm/issues/54928)."""

import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import pytest
from engine import FULL, Engine, Run, assert_same_text, on_gpu, prompts, record
from test_scheduling import forced_async
from watch import Watch, watching

BUDGET = 31
# How the record of tokens per round is written again.
COMMAND = (
    "DDTREE_TEST_FULL=1 DDTREE_RECORD=grammar.jsonl "
    "python -m pytest tests/vllm/test_grammar.py -k tokens_per_round"
)
MAX_TOKENS = 48
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "about": {"type": "string", "maxLength": 60},
        "age": {"type": "integer"},
    },
    "required": ["name", "about", "age"],
    "additionalProperties": False,
}
# What a forced tool call asks of the grammar: https://docs.vllm.ai/en/latest/features/tool_calling.html
TOOL_CALL = {
    "type": "array",
    "minItems": 1,
    "maxItems": 1,
    "items": {
        "type": "object",
        "properties": {
            "name": {"enum": ["get_weather", "get_time"]},
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    },
}
WORDS = r"[A-Z][a-z]+( [a-z]+){6,40}\."
CHOICES = ["the green oak", "the green oaks of the valley", "the old mill by the river"]
SAMPLED = {"temperature": 1.0, "top_k": 40}


def settings(backend: str) -> dict:
    # Between the spaces that JSON allows, greedy decoding only meets ties.
    disable = {} if backend == "outlines" else {"disable_any_whitespace": True}
    return {"max_num_seqs": 8, "structured_outputs_config": {"backend": backend, **disable}}


@dataclass(frozen=True)
class Case:
    name: str
    constraint: dict | None
    params: dict

    def check(self, text: str) -> None:
        """The whole text, of a request that the grammar ended."""
        if self.constraint is None:
            return
        ((kind, value),) = self.constraint.items()
        if kind == "regex":
            assert re.fullmatch(value, text)
        elif kind == "choice":
            assert text in value
        else:
            parsed = json.loads(text)
            assert isinstance(parsed, dict if value is PERSON else list)


CONSTRAINTS = {
    "schema": {"json": PERSON},
    "tool call": {"json": TOOL_CALL},
    "regex": {"regex": WORDS},
    "choice": {"choice": CHOICES},
    "free": None,
}
CASES = [
    Case(f"{name} {how}", constraint, params)
    for name, constraint in CONSTRAINTS.items()
    for how, params in {"greedy": {"temperature": 0.0}, "sampled": SAMPLED}.items()
]


def run_cases(engine: Engine, extra: dict | None = None) -> Run:
    from vllm.sampling_params import StructuredOutputsParams

    params = []
    for case in CASES:
        grammar = {}
        if case.constraint is not None:
            grammar["structured_outputs"] = StructuredOutputsParams(**case.constraint)
        # The grammar ends the text.
        params.append(
            {
                "max_tokens": MAX_TOKENS,
                "ignore_eos": False,
                **case.params,
                **grammar,
                **(extra or {}),
            }
        )
    return engine.generate(prompts(len(CASES), first=20), params)


@cache
def base(backend: str) -> Run:
    with Engine(margins=True, **settings(backend)) as engine:
        run = run_cases(engine)
    for case, output in zip(CASES, run.outputs, strict=True):
        print(case.name, output.finish_reason, repr(output.text))
        if output.finish_reason == "stop":
            case.check(output.text)
    ended = [c.name for c, o in zip(CASES, run.outputs, strict=True) if o.finish_reason == "stop"]
    assert len(ended) >= 4, "too few grammars ended their text"
    return run


CONFIGS = [("xgrammar", False), ("xgrammar", True)]
if FULL:
    CONFIGS += [("guidance", True), ("outlines", True)]


class Served:
    def __init__(self, backend: str, is_async: bool) -> None:
        self.base = base(backend)
        config = {"async_scheduling": is_async} if on_gpu() else {}
        with forced_async() if is_async else nullcontext():
            self.engine = Engine(
                {"method": "ddtree", "tree_budget": BUDGET}, **settings(backend), **config
            )
            self.engine.__enter__()
        self.about = {
            "backend": backend,
            "asynchronous": type(self.engine.scheduler).__name__ == "AsyncScheduler",
        }
        assert self.about["asynchronous"] == is_async

    def run(self, extra: dict | None = None) -> tuple[Run, Watch]:
        with watching(self.engine) as watch:
            return run_cases(self.engine, extra), watch


@pytest.fixture(
    scope="module", params=CONFIGS, ids=lambda c: f"{c[0]}-{'async' if c[1] else 'sync'}"
)
def served(request) -> Iterator[Served]:
    tree = Served(*request.param)
    try:
        yield tree
    finally:
        tree.engine.__exit__()


def test_text_is_that_of_no_speculation(served):
    run, watch = served.run()
    near_ties = assert_same_text(served.base, run, "grammars")
    assert near_ties <= len(CASES) // 3, "too many to show anything"
    constrained = [i for i, case in enumerate(CASES) if case.constraint is not None]
    for i in constrained:
        assert all(r.num_nodes == r.rows == BUDGET + 1 for r in watch.of(i)[:-1]), CASES[i].name
        assert not any(r.is_chain for r in watch.of(i)), CASES[i].name
    # They shared batches with requests that have no grammar.
    batches = [
        {r.batch for i in group for r in watch.of(i)}
        for group in (constrained, [i for i in range(len(CASES)) if i not in constrained])
    ]
    assert batches[0] & batches[1]
    # What was accepted came from beside the first branch too: a chain has nothing there.
    aside = 0
    for i in constrained:
        for r in watch.of(i):
            node = 0
            for token in r.sampled[:-1]:
                node = next(
                    n for n, p in enumerate(r.parents) if p == node and r.tokens[n] == token
                )
            aside += node + 1 != len(r.sampled)
    assert aside >= 3


@pytest.mark.skipif(not FULL, reason="full tier")
def test_tokens_per_round(served):
    """Recorded. A tree holds the chain that it is compared with."""
    means = {}
    for shape, extra in (("tree", None), ("chain", {"extra_args": {"ddtree_shape": "chain"}})):
        run, watch = served.run(extra)
        assert_same_text(served.base, run, shape)
        rounds = {case.name: watch.of(i) for i, case in enumerate(CASES)}
        per_round = {
            name: round(sum(len(r.sampled) for r in mine) / len(mine), 3)
            for name, mine in rounds.items()
        }
        constrained = [r for c in CASES if c.constraint for r in rounds[c.name]]
        means[shape] = sum(len(r.sampled) for r in constrained) / len(constrained)
        record(
            what="grammar",
            shape=shape,
            budget=BUDGET if shape == "tree" else 15,
            **served.about,
            rounds=len(constrained),
            tokens_per_round=round(means[shape], 3),
            by_case=per_round,
            command=COMMAND,
        )
    assert means["tree"] > means["chain"]


def test_masks_in_list_order_change_the_text(monkeypatch):
    """The negative control: every node taken for the child of the one before it."""
    from vllm_ddtree import grammar

    fill = grammar.fill_rows

    def as_a_chain(manager, request, nodes, first_row):
        chain = [
            depth << grammar.DEPTH_SHIFT | node & grammar.TOKEN_MASK if node > 0 else node
            for depth, node in enumerate(nodes, 1)
        ]
        fill(manager, request, chain, first_row)

    want = base("xgrammar")
    monkeypatch.setattr(grammar, "fill_rows", as_a_chain)
    with Engine({"method": "ddtree", "tree_budget": BUDGET}, **settings("xgrammar")) as tree:
        run = run_cases(tree)
    with pytest.raises(AssertionError):
        assert_same_text(want, run, "masks in list order")
