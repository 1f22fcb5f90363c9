# SPDX-License-Identifier: Apache-2.0
"""The operations on tensors: schemas, fakes and results against plain PyTorch."""

import pytest
import torch
from vllm_ddtree.ops import AttentionPlan, tree_gather
from vllm_ddtree.trees import TreeBatch, TreeShape

VOCAB, HORIZON, NODES = 97, 6, 16
SHAPE = TreeShape(num_reqs=3, max_nodes=NODES, max_depth=HORIZON)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def build_args(storage, n=2, caps=(0, 0)):
    return (
        torch.randn(n, HORIZON, VOCAB),
        i32(*range(5, 5 + n)),
        torch.arange(10, 10 + n),
        i32(*[NODES - 1] * n),
        i32(*caps[:n]),
        torch.full((n, 2), -1, dtype=torch.int32),
        i32(*[0] * n),
        storage,
        SHAPE.num_reqs,
        SHAPE.max_nodes,
        SHAPE.max_depth,
    )


def built(caps=(0, 0)):
    trees = TreeBatch.zeros(SHAPE, torch.device("cpu"))
    torch.ops.ddtree.tree_build(*build_args(trees.storage, caps=caps))
    return trees


def test_opcheck():
    """Schema, fake tensors and mutation annotations of an op with all kinds of arguments."""
    trees = TreeBatch.zeros(SHAPE, torch.device("cpu"))
    torch.library.opcheck(torch.ops.ddtree.tree_build.default, build_args(trees.storage))


def test_storage_holds_every_field():
    trees = TreeBatch.zeros(SHAPE, torch.device("cpu"))
    for value, field in enumerate(trees.fields(), start=1):
        field.fill_(value)
    for value, field in enumerate(trees.fields(), start=1):
        assert (field == value).all(), "fields overlap"
    assert trees.positions.dtype == torch.int64


def test_trees_of_slots_come_back_in_batch_order():
    torch.manual_seed(5)
    args = build_args(built().storage)
    trees = TreeBatch.zeros(SHAPE, torch.device("cpu"))
    torch.ops.ddtree.tree_build(*args[:7], trees.storage, *args[8:])

    slots = TreeBatch.zeros(TreeShape(7, NODES, HORIZON), torch.device("cpu"))
    slots.storage.fill_(-7)
    index = torch.tensor([[4, 0], [1, 0]])[:, 0]
    torch.ops.ddtree.tree_build(*args[:7], slots.storage, 7, NODES, HORIZON, index)
    assert (slots.tokens[[0, 2, 3, 5, 6]] == -7).all()
    slots.num_nodes[[0, 2, 3, 5, 6]] = 0

    back = TreeBatch.zeros(SHAPE, torch.device("cpu"))
    back.storage.fill_(-7)
    rows = int(trees.num_nodes[0])
    positions = torch.arange(rows + 3)
    axes = positions.repeat(3, 1)
    tree_gather(slots, back, index, i32(0, rows, rows + 2), positions, axes)
    assert back.num_nodes.tolist() == [rows, min(2, int(trees.num_nodes[1])), 0]
    for name in SHAPE.field_sizes():
        if name != "num_nodes":
            assert (getattr(back, name)[:2] == getattr(trees, name)[:2]).all(), name
    assert positions[:rows].tolist() == trees.depths[0, :rows].tolist()
    assert positions[rows + 2] == rows + 2
    assert (axes == positions).all()


def test_candidate_cap_of_one_is_the_greedy_chain():
    torch.manual_seed(3)
    trees = TreeBatch.zeros(SHAPE, torch.device("cpu"))
    args = build_args(trees.storage, caps=(1, 0))
    torch.ops.ddtree.tree_build(*args)
    assert trees.num_nodes[0] == HORIZON + 1
    assert trees.parents[0, : HORIZON + 1].tolist() == list(range(-1, HORIZON))
    assert trees.tokens[0, 1 : HORIZON + 1].tolist() == args[0][0].argmax(-1).tolist()


def test_lattices_and_spines():
    """A chain follows the best child of each node, parents before children in the pairs."""
    torch.manual_seed(6)
    width = 5
    tokens = torch.stack([torch.randperm(90)[:width] for _ in range(2 * HORIZON)])
    tokens = tokens.view(2, HORIZON, width).int()
    scores, pairs = torch.randn(2, HORIZON, width), torch.randn(2, HORIZON, width, width) * 3
    trees = TreeBatch.zeros(SHAPE, torch.device("cpu"))
    args = (None, *build_args(trees.storage)[1:])
    lattice = {"candidate_tokens": tokens, "transition_scores": scores[:, :, None] + pairs}
    lattice["spine_depths"] = i32(HORIZON, 2)
    torch.library.opcheck(torch.ops.ddtree.tree_build.default, args, lattice)
    torch.ops.ddtree.tree_build(*args, **lattice)
    for r, depth in enumerate((HORIZON, 2)):
        parent, path = 0, []
        for d in range(depth):
            parent = int((scores[r, d] + pairs[r, d, parent]).argmax())
            path.append(int(tokens[r, d, parent]))
        assert trees.tokens[r, 1 : depth + 1].tolist() == path
        assert trees.pop_ranks[r, : depth + 1].tolist() == list(range(depth + 1))
        assert trees.num_nodes[r] == NODES
    same = TreeBatch.zeros(SHAPE, torch.device("cpu"))
    lattice |= {"candidate_scores": scores, "transition_scores": pairs}
    torch.ops.ddtree.tree_build(*args[:7], same.storage, *args[8:], **lattice)
    assert torch.equal(same.storage, trees.storage)


def test_noise_is_for_requests_that_are_sampled():
    torch.manual_seed(4)
    trees = TreeBatch.zeros(SHAPE, torch.device("cpu"))
    args = build_args(trees.storage, caps=(1, 1))
    noise = {"temperatures": torch.tensor([0.0, 1.0]), "seeds": torch.tensor([5, -5])}
    torch.library.opcheck(torch.ops.ddtree.tree_build.default, args, noise)
    torch.ops.ddtree.tree_build(*args, **noise)
    best = args[0].argmax(-1)
    assert trees.tokens[0, 1 : HORIZON + 1].tolist() == best[0].tolist()
    assert trees.tokens[1, 1 : HORIZON + 1].tolist() != best[1].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_sees_ancestors_and_context(dtype):
    trees = built()
    heads, kv_heads, dim, block = 4, 2, 64, 48
    context = 61
    nodes = int(trees.num_nodes[0])
    query = torch.randn(nodes, heads, dim).to(dtype)
    key = torch.randn(3, kv_heads, block, dim).to(dtype)
    value = torch.randn(3, kv_heads, block, dim).to(dtype)
    table = i32(2, 0)[None]
    out = torch.full_like(query, float("nan"))
    plan = AttentionPlan(key, value, dim**-0.5, 0.0)
    plan.run(query, table, i32(0, nodes), i32(context + nodes), trees, out)
    total = context + nodes
    keys, values = (
        x[table[0].long()].transpose(0, 1).flatten(1, 2)[:, :total].double()
        for x in (key, value)
    )
    mask = torch.zeros(nodes, total, dtype=torch.bool)
    mask[:, :context] = True
    for node in range(nodes):
        ancestor = node
        while ancestor >= 0:
            mask[node, context + ancestor] = True
            ancestor = int(trees.parents[0, ancestor])
    scores = torch.einsum(
        "nhd,hkd->nhk", query.double(), keys.repeat_interleave(heads // kv_heads, 0)
    ) * dim**-0.5
    scores = scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    want = torch.einsum("nhk,hkd->nhd", scores, values.repeat_interleave(heads // kv_heads, 0))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


def test_accept_follows_sampled_tokens():
    trees = built()
    nodes = int(trees.num_nodes[0])
    # every node samples the token of its first child, leaves sample one that is no child
    samples = torch.full((nodes,), VOCAB - 1)
    for node in range(nodes):
        child = int(trees.first_child[0, node])
        if child >= 0:
            samples[node] = trees.tokens[0, child]
    accepted, path, out = (
        torch.full((1,), -7, dtype=torch.int32),
        torch.full((1, HORIZON), -7, dtype=torch.int32),
        torch.full((1, HORIZON + 1), -7),
    )
    torch.ops.ddtree.tree_accept(
        samples, i32(0, nodes), trees.storage, NODES, HORIZON, SHAPE.num_reqs,
        accepted, path, out,
    )  # fmt: skip
    depth = int(accepted[0])
    # best child first: the greedy path is the first rows
    assert path[0].tolist() == [*range(1, depth + 1), *[-1] * (HORIZON - depth)]
    assert out[0, :depth].tolist() == trees.tokens[0, 1 : depth + 1].tolist()
    assert out[0, depth] == samples[depth] and (out[0, depth + 1 :] == -1).all()
