# SPDX-License-Identifier: Apache-2.0
"""Optional trace of every verified tree, one JSON line per request and round.

Set DDTREE_TRACE to a file path. For looking at trees: it synchronises with the
device each round."""

import json
import os
from functools import cache
from typing import TextIO

import torch

from vllm_ddtree.step import VerifyStep


@cache
def _file() -> TextIO | None:
    path = os.environ.get("DDTREE_TRACE")
    return open(path, "a", buffering=1) if path else None  # noqa: SIM115


def record(step: VerifyStep, output_tokens: torch.Tensor) -> None:
    """Append the step's trees, accepted nodes and bonus tokens."""
    out = _file()
    if out is None:
        return
    trees = step.trees
    for i, req_id in enumerate(step.req_ids):
        n = int(trees.num_nodes[i])
        m = int(step.num_accepted[i])
        line = {
            "request": req_id,
            "tokens": trees.tokens[i, :n].tolist(),
            "parents": trees.parents[i, :n].tolist(),
            "depths": trees.depths[i, :n].tolist(),
            "pop_ranks": trees.pop_ranks[i, :n].tolist(),
            "accepted": step.accepted_nodes[i, :m].tolist(),
            "bonus": int(output_tokens[i, m]),
        }
        out.write(json.dumps(line) + "\n")
