# SPDX-License-Identifier: Apache-2.0
"""tree_gather on a GPU: every bit of every output against the CPU backend."""

import random
from dataclasses import dataclass, replace
from typing import Any

import abi
import pytest
import torch
from abi import TreeBatch, TreeShape
from test_tree_build import Output

DEVICE = "cuda"
AXES = 3


@dataclass
class Case:
    """Inputs of a call on the CPU."""

    source: TreeBatch
    shape: TreeShape
    tree_index: torch.Tensor
    # rows of each gathered tree
    rows: list[int]
    with_positions: bool = True
    with_axes: bool = True


class Call:
    """A case on a device and its outputs, which stay where they are for graphs."""

    def __init__(self, case: Case, device: str, fields: set[str] | None = None):
        lib = abi.lib()
        self.device = device
        self.out = Output(case.shape, device, fields)
        self.source = abi.to_device(case.source, device)
        self.described = abi.tree_struct(self.source)
        # every other entry is not the index's
        self.tree_index = case.tree_index.repeat_interleave(2).to(device)[::2]
        rows = abi.rows_of(case.rows, device)
        self.query_start = rows.query_start
        self.positions = torch.empty(rows.total + 2, dtype=torch.int64, device=device)
        self.axes = torch.empty(AXES, rows.total + 5, dtype=torch.int64, device=device)
        self.reset()
        self.params = params = lib.params("ddt_tree_gather_params")
        params.source, params.tree = self.described, self.out.tree
        lib.fill_tensor(params.tree_index, self.tree_index)
        params.query_start = abi.i32_pointer(self.query_start)
        if case.with_positions:
            lib.fill_tensor(params.positions, self.positions)
        if case.with_axes:
            lib.fill_tensor(params.mrope_positions, self.axes[:, : rows.total + 2])

    def reset(self) -> None:
        self.out.poison()
        for positions in (self.positions, self.axes):
            count = positions.numel()
            positions.copy_((2**40 + torch.arange(count)).view(positions.shape))

    def run(self, ctx: Any = None, check: bool = True) -> int:
        return abi.call("tree_gather", self.params, self.device, ctx, check)

    def assert_same(self, other: "Call") -> None:
        self.out.assert_same(other.out)
        assert torch.equal(self.positions.cpu(), other.positions.cpu())
        assert torch.equal(self.axes.cpu(), other.axes.cpu())


def check(case: Case, fields: set[str] | None = None) -> None:
    want, got = Call(case, "cpu", fields), Call(case, DEVICE, fields)
    want.run()
    got.run()
    got.assert_same(want)


def make(
    rng: random.Random, requests: int, max_nodes: int, max_depth: int = 15, rows: int | None = None
) -> Case:
    """Trees of `requests` + 3 slots; `rows`: rows of each gathered tree and its longest length."""
    slots = requests + 3
    trees = [
        abi.random_parents(rng, rng.choice([1, rng.randint(1, max_nodes), max_nodes]), max_depth)
        if max_depth and rng.random() < 0.9
        else [-1]
        for _ in range(slots)
    ]
    source = abi.tree_batch(
        trees,
        max_nodes,
        max_depth,
        "cpu",
        tokens=lambda r, i: rng.randrange(2**31),
        root_position=lambda r: rng.randrange(2**40),
    )
    source.flags.copy_(torch.arange(slots) % 8)
    index = rng.sample(range(slots), requests)
    index = [i if rng.random() < 0.9 else -1 - i for i in index]
    counts = [rng.randint(0, max_nodes + 2) if rows is None else rows for _ in range(requests)]
    return Case(
        source,
        TreeShape(requests + rng.choice([0, 2, 700]), rows or rng.randint(1, max_nodes), max_depth),
        torch.tensor(index, dtype=rng.choice([torch.int32, torch.int64])),
        counts,
        rng.random() < 0.8,
        rng.random() < 0.5,
    )


@pytest.mark.parametrize("max_nodes", [1, 2, 8, 31, 32, 33, 64, 65, 200, 256])
def test_sizes(rng: random.Random, max_nodes: int) -> None:
    for _ in range(4):
        check(make(rng, 5, max_nodes))


@pytest.mark.parametrize("max_depth", [0, 1, 2, 31, 32])
def test_depths(rng: random.Random, max_depth: int) -> None:
    check(make(rng, 4, 70, max_depth))


def test_rows_of_a_smaller_budget(rng: random.Random) -> None:
    for rows in (1, 8, 16, 32):
        check(make(rng, 6, 64, rows=rows))


def test_many_requests(rng: random.Random) -> None:
    check(make(rng, 500, 16))


def test_no_requests(rng: random.Random) -> None:
    check(make(rng, 0, 16))


def test_fields_that_nobody_wants(rng: random.Random) -> None:
    for fields in ({"num_nodes"}, {"num_nodes", "tokens", "ancestor_bits"}, {"num_nodes", "positions"}):
        check(make(rng, 5, 40), fields)


def test_what_cannot_be_is_skipped_or_clamped(rng: random.Random) -> None:
    case = replace(make(rng, 6, 40), with_positions=True)
    far = case.tree_index.clone()
    far[::2] = torch.tensor([2**31 - 1, 9, -(2**31)], dtype=far.dtype)
    none = case.tree_index.clone()
    none[::2] = -1
    want, got = Call(replace(case, tree_index=none), "cpu"), Call(replace(case, tree_index=far), DEVICE)
    want.run()
    got.run()
    got.assert_same(want)

    source = abi.to_device(case.source, "cpu")
    source.num_nodes[0], source.num_nodes[1] = 2**31 - 1, -5
    call = Call(replace(case, source=source), DEVICE)
    call.query_start[2] = 2**31 - 1
    call.query_start[3] = -(2**31)
    call.run()
    torch.cuda.synchronize()
    call.out.check_guards()
    num_nodes = call.out.fields()["num_nodes"]
    assert ((num_nodes >= 0) & (num_nodes <= case.shape.max_nodes)).all()


def test_graphs(rng: random.Random) -> None:
    case = make(rng, 5, 64)
    want = Call(case, "cpu")
    want.run()
    call = Call(case, DEVICE)
    abi.context(DEVICE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    for _ in range(3):
        call.reset()
        graph.replay()
        call.assert_same(want)


def test_mistakes_get_the_same_answer_on_both_devices(rng: random.Random) -> None:
    lib = abi.lib()
    null = lib.ffi.NULL
    case = replace(make(rng, 3, 20, rows=8), with_positions=True)

    def assign(name: str, value: Any, where: str = "params"):
        def change(call: Call) -> None:
            out = {"params": call.params, "source": call.described, "tree": call.out.tree}[where]
            setattr(out, name, value)

        return change

    for i, change in enumerate((
        assign("flags", 1), assign("struct_size", 12), assign("tree", null), assign("source", null),
        assign("query_start", null), assign("max_depth", 14, "tree"), assign("max_nodes", 4, "source"),
        assign("num_reqs", 2, "tree"), assign("num_nodes", null, "tree"), assign("num_nodes", null, "source"),
        assign("tokens", null, "source"), assign("ancestors", null, "source"), assign("flags", null, "source"),
        assign("positions", null, "source"), assign("ancestor_bits", null, "source"),
        lambda call: setattr(call.params.positions, "dtype", lib.lib.DDT_DTYPE_F32),
        lambda call: setattr(call.params.mrope_positions, "ndim", 1),
        lambda call: setattr(call.params.tree_index, "dtype", lib.lib.DDT_DTYPE_U8),
    )):  # fmt: skip
        found = []
        for device in ("cpu", DEVICE):
            call = Call(replace(case, with_axes=True), device)
            change(call)
            status = call.run(check=False)
            text = lib.ffi.new("char[512]")
            lib.lib.ddt_last_error(text, 512, null)
            found.append((status, lib.ffi.string(text).decode()))
            assert (call.out.memory == -1).all()
        assert found[0] == found[1] and found[0][0] != 0, (i, found)


@pytest.mark.sanitize
def test_small_batch(rng: random.Random) -> None:
    check(make(rng, 4, 40, 7))
    check(make(rng, 2, 256, 32))
