# SPDX-License-Identifier: Apache-2.0
"""tree_accept samples the tokens that vLLM's own sampler does."""

import pytest
import torch
import vllm_ddtree.ops  # noqa: F401  (defines the ops)
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm_ddtree.trees import TreeBatch, TreeShape

ROWS, VOCAB = 12, 2500


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_same_tokens_as_vllm(scale):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(ROWS, VOCAB, generator=generator) * scale
    logits[3, 100:] = float("-inf")
    temperatures = torch.rand(ROWS, generator=generator) + 0.1
    temperatures[::4] = 0.0
    info = torch.iinfo(torch.int64)
    seeds = torch.randint(info.min, info.max, (ROWS,), generator=generator)
    positions = torch.randint(0, 1 << 18, (ROWS,), generator=generator)
    want = gumbel_sample(
        logits,
        torch.arange(ROWS, dtype=torch.int32),
        temperatures,
        seeds,
        positions,
        apply_temperature=False,
        is_drafting=False,
    )

    shape = TreeShape(num_reqs=ROWS, max_nodes=1, max_depth=0)
    trees = TreeBatch.zeros(shape, torch.device("cpu"))
    trees.num_nodes.fill_(1)
    trees.first_child.fill_(-1)
    trees.positions[:, 0] = positions
    accepted = torch.empty(ROWS, dtype=torch.int32)
    tokens = torch.empty(ROWS, 1, dtype=torch.int64)
    torch.ops.ddtree.tree_accept(
        None,
        torch.arange(ROWS + 1, dtype=torch.int32),
        trees.storage,
        shape.max_nodes,
        shape.max_depth,
        shape.num_reqs,
        accepted,
        torch.empty(ROWS, 0, dtype=torch.int32),
        tokens,
        logits,
        temperatures,
        seeds,
    )
    assert tokens[:, 0].tolist() == want.tolist()
    # without noise other tokens would have come out
    sampled = temperatures != 0
    assert (tokens[sampled, 0] != logits[sampled].argmax(-1)).any()
