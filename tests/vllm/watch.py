# SPDX-License-Identifier: Apache-2.0
"""What an engine's verifications looked like: tests of "X inside Y" assert here
that X really was inside Y."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from engine import Engine


@dataclass(frozen=True)
class Round:
    """One request's part of one verification."""

    request: str
    # Number of the batch that it was part of.
    batch: int
    # Scheduled: the tree's and the idle ones behind it.
    rows: int
    # Of the tree's nodes, the root first.
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    # Accepted tokens, then the bonus token.
    sampled: list[int]
    # The slot had no state: the request's first step was this one.
    fresh: bool

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, self.num_nodes - 1))


@dataclass(frozen=True)
class Batch:
    """One step: requests that verified a tree, and rows of those that prefilled."""

    num_verifying: int
    prefill_rows: list[int]


@dataclass
class Watch:
    first_request: int
    rounds: list[Round] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def of(self, request: int) -> list[Round]:
        """Rounds of the request-th prompt since the watch began."""
        number = str(self.first_request + request)
        return [r for r in self.rounds if r.request.split("-")[0] == number]


@contextmanager
def watching(engine: Engine) -> Iterator[Watch]:
    from vllm_ddtree import trace
    from vllm_ddtree.model_state import TreeStateMixin

    watch = Watch(engine.llm.request_counter.counter)
    start_step, record = TreeStateMixin._start_step, trace.record

    def watched_start(self: Any, batch: Any, *args: Any) -> Any:
        step = start_step(self, batch, *args)
        verifying = 0 if step is None else step.num_reqs
        behind = range(verifying, batch.num_reqs)
        rows = batch.num_scheduled_tokens
        prefilling = batch.is_prefilling_np
        watch.batches.append(
            Batch(verifying, [int(rows[i]) for i in behind if prefilling[i]])
        )
        return step

    def watched_record(step: Any, output_tokens: Any) -> None:
        rows = step.query_start.diff().tolist()
        for i, request in enumerate(step.req_ids):
            n = int(step.trees.num_nodes[i])
            accepted = int(step.num_accepted[i])
            watch.rounds.append(
                Round(
                    request,
                    len(watch.batches) - 1,
                    rows[i],
                    step.trees.tokens[i, :n].tolist(),
                    step.trees.parents[i, :n].tolist(),
                    step.trees.depths[i, :n].tolist(),
                    output_tokens[i, : accepted + 1].tolist(),
                    i in step.fresh_reqs,
                )
            )

    TreeStateMixin._start_step, trace.record = watched_start, watched_record
    try:
        yield watch
    finally:
        TreeStateMixin._start_step, trace.record = start_step, record
