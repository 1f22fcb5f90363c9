# SPDX-License-Identifier: Apache-2.0
"""A seed gives one text: whatever the budget of its trees, its batch mates, the chunks of its
prompt, what the prefix cache has, and without speculation. Preempted ones are in
test_scheduling.py."""

from collections.abc import Iterator

import pytest
from engine import FULL, Engine, Run, assert_same_text, on_gpu, prompts, record
from test_scheduling import BLOCK, CONFIGS, engine, stretch
from watch import Watch, watching

pytestmark = pytest.mark.skipif(not (FULL or on_gpu()), reason="the full tier takes the time")

BUDGET = 63
# Prompts come in chunks, and more than one tree leaves no room for another whole one.
SETTINGS = {"max_num_batched_tokens": 160}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 24}


def texts() -> list[list[int]]:
    """Three that need a further block while they decode, and one of two blocks, three times."""
    crowd = [stretch(250 * i, BLOCK - 10 + 2 * i) for i in range(3)]
    return [*crowd, *[stretch(1000, 2 * BLOCK) + stretch(200, 40)] * 3]


def seeded(**params) -> list[dict]:
    return [{**SAMPLED, "seed": 70 + 10 * i, **params} for i in range(len(texts()))]


@pytest.fixture(scope="module")
def base() -> Run:
    with engine("few_blocks", margins=True, **SETTINGS) as plain:
        return plain.generate(texts(), seeded())


@pytest.fixture(scope="module")
def tree(base) -> Iterator[Engine]:
    spec = {"method": "ddtree", "tree_budget": BUDGET, **CONFIGS["few_blocks"].speculative}
    with engine("few_blocks", spec, **SETTINGS) as served:
        yield served


class Same:
    """Compares runs with the base and counts near ties, which may not be most of them."""

    def __init__(self, base: Run) -> None:
        self.base, self.compared, self.near_ties = base, 0, 0

    def check(self, run: Run, what: str, which: list[int] | None = None) -> None:
        which = list(range(len(texts()))) if which is None else which
        want = Run([self.base.outputs[i] for i in which])
        self.near_ties += assert_same_text(want, run, what)
        self.compared += len(which)

    def end(self, test: str) -> None:
        record(test=test, texts=self.compared, near_ties=self.near_ties)
        assert self.near_ties <= self.compared // 2, "too many near ties to show anything"


def nodes(watch: Watch) -> int:
    return max(r.num_nodes for r in watch.rounds) - 1


def test_budgets(base, tree):
    same = Same(base)
    for budget in (0, 7, 31, BUDGET):
        # As the server's own budget, and with none of it cut by a neighbour.
        extra = {"extra_args": {"ddtree_budget": budget}}
        with watching(tree) as watch:
            for i, params in enumerate(seeded(**extra)):
                same.check(tree.generate([texts()[i]], [params]), f"{budget} nodes, alone", [i])
        assert nodes(watch) == budget
        same.check(tree.generate(texts(), seeded(**extra)), f"{budget} nodes, together")
    same.end("invariance, budgets")


def test_batch_mates(base, tree):
    mates = prompts(4, first=30)
    params = [
        {"temperature": 0.0, "max_tokens": 30, "seed": 1},
        {"temperature": 1.4, "max_tokens": 9, "seed": 2, "extra_args": {"ddtree_budget": 15}},
        {"temperature": 0.5, "max_tokens": 17, "seed": 3, "extra_args": {"ddtree_shape": "chain"}},
        {"temperature": 1.0, "max_tokens": 24, "seed": 4, "presence_penalty": 1.0},
    ]
    same = Same(base)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        mixed = [request for i in order for request in (mates[i], texts()[i])]
        run = tree.generate(mixed, [p for i in order for p in (params[i], seeded()[i])])
        same.check(Run(run.outputs[1::2]), f"mates, order {order}", order)
    same.end("invariance, batch mates")


def test_prefix_cache(base, tree):
    same = Same(base)
    for is_cold in (True, False):
        for i in (3, 4, 5):
            if is_cold:
                assert tree.llm.reset_prefix_cache()
            before = tree.metric("prefix_cache_hits")
            same.check(tree.generate([texts()[i]], [seeded()[i]]), f"cold cache {is_cold}", [i])
            assert (tree.metric("prefix_cache_hits") == before) == is_cold
    same.end("invariance, prefix cache")


def test_chunks(base, tree):
    assert tree.llm.reset_prefix_cache()
    same = Same(base)
    crowd = [0, 1, 2, 0, 1, 2]
    with watching(tree) as watch:
        run = tree.generate([texts()[i] for i in crowd], [seeded()[i] for i in crowd])
    same.check(run, "crowd", crowd)
    assert any(b.num_verifying and max(b.prefill_rows, default=0) > 1 for b in watch.batches)
    same.end("invariance, chunks")
