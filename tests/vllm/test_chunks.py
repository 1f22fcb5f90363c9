# SPDX-License-Identifier: Apache-2.0
"""Rows are sampled in chunks of whole requests, to bound the memory of float32 logits: no
token and no log-probability depends on where the chunks end."""

import pytest
import vllm_ddtree.sampler
from engine import Engine, Run, prompts

BUDGET, REQUESTS = 15, 4
PARAMS = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "presence_penalty": 1.0, "logprobs": 2},
    {"temperature": 0.0, "bad_words": ["the"]},
]


def served(engine: Engine, max_chunk_logits: int, mode: str) -> tuple[Run, int]:
    """What came out, and the largest number of chunks in a step."""
    most = 0
    chunks = vllm_ddtree.sampler._iter_request_chunks

    def counted(*args):
        nonlocal most
        of_step = list(chunks(*args))
        most = max(most, len(of_step))
        return of_step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_ddtree.sampler, "_iter_request_chunks", counted)
        patch.setattr(vllm_ddtree.sampler, "get_max_chunk_logits", lambda _: max_chunk_logits)
        patch.setattr(engine.runner.sampler, "logprobs_mode", mode)
        params = [{"max_tokens": 24 - 4 * i, **p} for i, p in enumerate(PARAMS)]
        return engine.generate(prompts(REQUESTS, first=30), params), most


def assert_same(got: Run, whole: Run, case: tuple[str, int]) -> None:
    """Same tokens, and scores up to the order of summation: a chunk in which no request needs
    processing stays bf16, whose rows a GPU sums in another order. Which of two tokens with equal
    scores is listed depends on how many rows it sorts at once."""
    for a, b in zip(got.outputs, whole.outputs, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), case
        for mine, other in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert sorted(mine.values()) == pytest.approx(sorted(other.values()), abs=1e-5), case


def test_chunks_change_nothing():
    with Engine(
        {"method": "ddtree", "tree_budget": BUDGET},
        max_num_seqs=REQUESTS,
        enable_prefix_caching=False,
    ) as engine:
        for mode in ("raw_logprobs", "processed_logprobs"):
            whole, chunks = served(engine, 1 << 20, mode)
            assert chunks == 1
            # smaller than a request, one whole request, and two of them
            for limit, want in ((1, 4), (BUDGET + 1, 4), (2 * (BUDGET + 1), 2)):
                got, chunks = served(engine, limit, mode)
                assert chunks == want
                assert_same(got, whole, (mode, limit))
