# SPDX-License-Identifier: Apache-2.0
"""More requests get smaller trees, so that a step never has more rows of trees than
it may hold; the text stays that of no speculation."""

from collections import defaultdict

import pytest
from engine import Engine, Run, assert_same_text, prompts
from watch import Watch, watching

ROWS, BUDGET, REQUESTS = 64, 31, 10
SETTINGS = {"max_num_seqs": REQUESTS}


def requests() -> tuple[list[list[int]], list[dict]]:
    """They end one after the other, so that every number of them is met."""
    return prompts(REQUESTS, first=20), [
        {"temperature": 0.0, "max_tokens": 6 + 8 * i} for i in range(REQUESTS)
    ]


@pytest.fixture(scope="module")
def base() -> Run:
    with Engine(margins=True, **SETTINGS) as engine:
        return engine.generate(*requests())


@pytest.fixture(scope="module")
def served(base) -> tuple[Run, Watch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_ddtree.config.MAX_VERIFY_ROWS", ROWS)
        with (
            Engine({"method": "ddtree", "tree_budget": BUDGET}, **SETTINGS) as engine,
            watching(engine) as watch,
        ):
            return engine.generate(*requests()), watch


def test_text_is_that_of_no_speculation(base, served):
    assert assert_same_text(base, served[0], "tiers") <= REQUESTS // 2


def test_rows_stay_within_the_limit(served):
    rows = defaultdict(list)
    for r in served[1].rounds:
        assert r.num_nodes == r.rows
        rows[r.batch].append(r.rows)
    # Up to 2 requests get 31 nodes, 4 get 15, 8 get 7, more get none.
    assert {n for batch in rows.values() for n in batch} == {32, 16, 8}
    assert all(sum(batch) <= ROWS for batch in rows.values())
    assert any(len(batch) > 4 for batch in rows.values())
