# SPDX-License-Identifier: Apache-2.0
"""One verification step, shared by the model state, the sampler, the attention
layers and the drafter of one engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ddtree.trees import TreeBatch


@dataclass
class VerifyStep:
    """The verify requests lead the batch: rows [0, num_rows) are theirs."""

    trees: TreeBatch
    num_reqs: int
    num_rows: int
    req_ids: list[str]
    # int32 [num_reqs + 1]
    query_start: torch.Tensor
    # int64 [num_reqs] request slots
    idx_mapping: torch.Tensor
    # int64 [num_reqs], tokens computed before this step; None if no path can cross a
    # boundary of state blocks.
    num_computed: torch.Tensor | None
    # Batch indices of requests that have no state yet.
    fresh_reqs: list[int]
    # Whether requests without draft rows follow in the batch.
    has_rest: bool
    attn_metadata: dict[str, Any] = field(default_factory=dict)
    # int64 [groups, T], where vLLM keeps them
    slot_mappings: torch.Tensor | None = None
    # Written by the sampler: int32 [num_reqs] and [num_reqs, max_depth].
    num_accepted: torch.Tensor | None = None
    accepted_nodes: torch.Tensor | None = None

    def nodes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [num_rows] each: whose row it is, and its node or, for idle rows, a
        number past the last one."""
        device = self.query_start.device
        requests = torch.repeat_interleave(
            torch.arange(self.num_reqs, device=device),
            self.query_start.diff(),
            output_size=self.num_rows,
        )
        rows = torch.arange(self.num_rows, device=device)
        return requests, rows - self.query_start[requests]


_ACTIVE: VerifyStep | None = None


@contextmanager
def building(step: VerifyStep | None) -> Iterator[None]:
    """Make `step` visible to the attention metadata builders. Target and drafter
    share the builders, and only the target's metadata may carry trees."""
    global _ACTIVE
    _ACTIVE = step
    try:
        yield
    finally:
        _ACTIVE = None


def active_step() -> VerifyStep | None:
    return _ACTIVE
