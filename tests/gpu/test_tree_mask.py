# SPDX-License-Identifier: Apache-2.0
"""tree_mask on a GPU: every bit of every field against the CPU backend and against fields derived the obvious way."""

import random
import re
from dataclasses import dataclass, replace
from typing import Any

import abi
import pytest
import torch
from abi import TreeShape
from test_tree_build import Output, assert_is_tree

DEVICE = "cuda"


@dataclass
class Case:
    """Inputs of a call; a row of `parents` may be longer than `num_nodes` says. None is absent."""

    shape: TreeShape
    num_nodes: list[int]
    parents: list[list[int]]
    tokens: list[list[int]] | None = None
    priorities: list[list[int]] | None = None
    root_positions: list[int] | None = None


class Call:
    """A case on a device, its outputs and its parameters, which stay where they are for graphs."""

    def __init__(
        self, case: Case, device: str, fields: set[str] | None = None, wants_order: bool = True
    ):
        lib = abi.lib()
        self.case, self.device, self.keep = case, device, []
        shape = case.shape
        self.out = Output(shape, device, fields)
        self.order = abi.poisoned((shape.num_reqs, shape.max_nodes), torch.int32, device)
        self.params = params = lib.params("ddt_tree_mask_params")
        params.num_reqs, params.max_nodes = shape.num_reqs, shape.max_nodes
        params.tree = self.out.tree
        params.num_nodes = self._i32(case.num_nodes)
        params.parents = self._rows(case.parents)
        if case.tokens is not None:
            params.tokens = self._rows(case.tokens)
        if case.priorities is not None:
            params.priorities = self._rows(case.priorities)
        if case.root_positions is not None:
            self.keep.append(torch.tensor(case.root_positions, dtype=torch.int64, device=device))
            params.root_positions = abi.i64_pointer(self.keep[-1])
        if wants_order:
            params.order = abi.i32_pointer(self.order)

    def _i32(self, values: list) -> Any:
        self.keep.append(torch.tensor(values, dtype=torch.int32, device=self.device))
        return abi.i32_pointer(self.keep[-1])

    def _rows(self, rows: list[list[int]]) -> Any:
        """[R, N]; what comes after a row is nonsense that nobody may read."""
        n = self.case.shape.max_nodes
        return self._i32([(row + [2**30 + 5] * n)[:n] for row in rows])

    def run(self, ctx: Any = None, check: bool = True) -> int:
        return abi.call("tree_mask", self.params, self.device, ctx, check)

    def assert_same(self, other: "Call") -> None:
        self.out.assert_same(other.out)
        assert torch.equal(self.order.cpu(), other.order.cpu())


def mask(case: Case, device: str, fields: set[str] | None = None, wants_order: bool = True) -> Call:
    call = Call(case, device, fields, wants_order)
    call.run()
    return call


def check(case: Case) -> Call:
    """The GPU's answer is the CPU's, and that of `derive`."""
    want = mask(case, "cpu")
    mask(case, DEVICE).assert_same(want)
    derive(case, want)
    return want


def derive(case: Case, got: Call) -> None:
    """Compares with a recursion over children sorted by priority."""
    orders, parents = [], []
    for r, count in enumerate(case.num_nodes):
        row = case.parents[r][:count]
        priority = case.priorities[r] if case.priorities else range(count)
        order, stack = [], [0] if count else []
        while stack:
            node = stack.pop()
            order.append(node)
            below = [i for i in range(count) if row[i] == node]
            stack += sorted(below, key=lambda i: (priority[i], i), reverse=True)
        at = {node: i for i, node in enumerate(order)}
        orders.append(order)
        parents.append([at.get(row[node], -1) for node in order])
    shape = case.shape
    batch = abi.tree_batch(
        parents,
        shape.max_nodes,
        shape.max_depth,
        "cpu",
        lambda r, i: case.tokens[r][orders[r][i]] if case.tokens else -1,
        lambda r: case.root_positions[r] if case.root_positions else 0,
    )
    want_order = torch.full((shape.num_reqs, shape.max_nodes), -1, dtype=torch.int32)
    for r, order in enumerate(orders):
        want_order[r, : len(order)] = torch.tensor(order, dtype=torch.int32)
        if case.priorities:
            ranks = [case.priorities[r][node] for node in order]
            batch.pop_ranks[r, : len(order)] = torch.tensor(ranks, dtype=torch.int32)
        else:
            batch.pop_ranks[r, : len(order)] = want_order[r, : len(order)]
    assert torch.equal(got.order.cpu(), want_order)
    fields = got.out.fields()
    for name in shape.field_sizes():
        assert torch.equal(fields[name], getattr(batch, name)), name


def any_parents(rng: random.Random, count: int, max_depth: int) -> list[int]:
    """Parents in any topological order, not too deep."""
    parents, depths = [-1], [0]
    depth_first, recent = rng.random() < 0.3, rng.choice([2, 8, 256])
    if depth_first:
        return abi.random_parents(rng, count, max_depth) if max_depth else parents
    while len(parents) < count and max_depth:
        i = len(parents)
        parent = rng.randrange(max(0, i - recent), i)
        while depths[parent] >= max_depth:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def make(
    rng: random.Random, requests: int, max_nodes: int, max_depth: int, full: bool = False
) -> Case:
    trees = []
    for _ in range(requests):
        count = max_nodes if full else rng.choice([0, 1, rng.randint(1, max_nodes), max_nodes])
        trees.append(any_parents(rng, count, max_depth) if count else [])
    counts = [len(tree) for tree in trees]

    def rows(*choices: int) -> list[list[int]] | None:
        if rng.random() < 0.25:
            return None
        return [[rng.choice(choices) for _ in range(count)] for count in counts]

    far = [rng.randrange(-(2**31), 2**31) for _ in range(50)]
    return Case(
        TreeShape(requests, max_nodes, max_depth),
        counts,
        trees,
        rows(*far, -1, 0),
        rng.choice([rows(*far), rows(1, 2, 3), rows(-(2**31), 2**31 - 1), rows(0)]),
        rng.choice([None, [rng.choice([0, 7, 2**40, 2**63 - 33]) for _ in range(requests)]]),
    )


@pytest.mark.parametrize("max_nodes", [1, 2, 3, 8, 31, 32, 33, 63, 64, 65, 127, 128, 200, 255, 256])
def test_sizes(rng: random.Random, max_nodes: int) -> None:
    for _ in range(4):
        check(make(rng, 5, max_nodes, rng.choice([1, 3, 15, 32])))


@pytest.mark.parametrize("max_depth", [0, 1, 2, 15, 31, 32])
def test_depths(rng: random.Random, max_depth: int) -> None:
    for _ in range(4):
        check(make(rng, 4, 70, max_depth))


@pytest.mark.parametrize("shape", ["roots", "star", "chain", "comb", "full"])
def test_extreme_trees(rng: random.Random, shape: str) -> None:
    comb = [-1]
    while len(comb) < 64:
        comb += [len(comb) - 1 if len(comb) % 2 else len(comb) - 2]
    trees = {
        "roots": [[-1]] * 40,
        "star": [[-1] + [0] * 255],
        "chain": [list(range(-1, 32))],
        "comb": [comb],
        "full": [any_parents(rng, 256, 32) for _ in range(3)],
    }[shape]
    case = Case(TreeShape(len(trees), 256, 32), [len(tree) for tree in trees], trees)
    check(case)
    # worst first
    check(replace(case, priorities=[[-i for i in range(len(tree))] for tree in trees]))


def test_many_requests(rng: random.Random) -> None:
    check(make(rng, 400, 6, 4))


def test_no_requests(rng: random.Random) -> None:
    check(make(rng, 0, 6, 4))


def test_padding_requests(rng: random.Random) -> None:
    shape = TreeShape(3, 33, 5)
    nonsense = [[rng.randrange(-(2**31), 2**31) for _ in range(33)]] * 3
    case = Case(shape, [0, 0, 0], nonsense, root_positions=[1, 2, 3])
    check(case)


def test_own_layout_is_kept(rng: random.Random) -> None:
    """A tree in preorder without priorities comes back as it is."""
    trees = [abi.random_parents(rng, 64, 12) for _ in range(4)]
    case = Case(TreeShape(4, 64, 12), [64] * 4, trees)
    got = check(case)
    assert got.order.tolist() == [list(range(64))] * 4
    assert got.out.fields()["parents"].tolist() == trees


def test_fields_that_nobody_wants(rng: random.Random) -> None:
    case = make(rng, 5, 70, 9, full=True)
    want = mask(case, "cpu")
    everything, names = want.out.fields(), sorted(case.shape.field_sizes())
    for wants_order in (False, True):
        for wanted in [{"num_nodes"}] + [{"num_nodes", *rng.sample(names, 3)} for _ in range(6)]:
            got = mask(case, DEVICE, wanted, wants_order)
            got.out.check_guards()
            for name, field in got.out.fields().items():
                expected = everything[name] if name in wanted else torch.full_like(field, -1)
                assert torch.equal(field, expected), (wanted, name)
            expected = want.order if wants_order else torch.full_like(want.order, -1)
            assert torch.equal(got.order.cpu(), expected)


# ---- values that only the device sees


def clamped(case: Case) -> Case:
    """What the device makes of values that the CPU refuses."""
    shape, parents, counts = case.shape, [], []
    for r, count in enumerate(case.num_nodes):
        count = min(max(count, 0), 1 if shape.max_depth == 0 else shape.max_nodes)
        row, depths = [-1] * min(count, 1), [0]
        for i in range(1, count):
            parent = min(max(case.parents[r][i], 0), i - 1)
            while depths[parent] >= shape.max_depth:
                parent = row[parent]
            row.append(parent)
            depths.append(depths[parent] + 1)
        parents.append(row)
        counts.append(count)
    return replace(case, num_nodes=counts, parents=parents)


def hostile(rng: random.Random, requests: int, max_nodes: int, max_depth: int) -> Case:
    far = [-(2**31), 2**31 - 1, -1, 0, 1, max_nodes, max_nodes + 1, 65536, 256, -2]

    def row() -> list[int]:
        """Parents after their children, cycles, nodes of their own, anything."""
        kind = rng.randrange(4)
        if kind == 0:
            return [rng.choice(far) for _ in range(max_nodes)]
        if kind == 1:
            return [rng.randrange(-3, max_nodes + 3) for _ in range(max_nodes)]
        if kind == 2:
            return [i for i in range(max_nodes)]
        return list(range(-1, max_nodes - 1))  # a chain, too deep

    return Case(
        TreeShape(requests, max_nodes, max_depth),
        [rng.choice([*far, max_nodes, max_nodes]) for _ in range(requests)],
        [row() for _ in range(requests)],
    )


def test_parents_and_counts_are_clamped(rng: random.Random) -> None:
    for max_nodes in (1, 2, 20, 64, 256):
        for max_depth in (0, 1, 5, 32):
            case = hostile(rng, 6, max_nodes, max_depth)
            got = mask(case, DEVICE)
            assert_is_tree(got.out)
            got.assert_same(mask(clamped(case), "cpu"))


def test_anything_in_device_memory(rng: random.Random) -> None:
    for _ in range(20):
        case = replace(
            make(rng, 6, 50, 7), priorities=[[0] * 50] * 6, tokens=[[0] * 50] * 6, root_positions=[0] * 6
        )  # fmt: skip
        call = Call(case, DEVICE)
        for tensor in call.keep[:-1]:
            bits = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8)
            tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))
        call.keep[0].copy_(torch.randint(-3, 60, (6,)))
        call.run()
        assert_is_tree(call.out)


# ---- how it runs


def test_graphs_streams_and_contexts(rng: random.Random) -> None:
    cases = [make(rng, 5, n, 15) for n in (16, 64, 256)]
    want = [mask(case, "cpu") for case in cases]
    calls = [Call(case, DEVICE) for case in cases]
    abi.context(DEVICE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call.run()
    for _ in range(3):
        for call in calls:
            call.out.poison()
            call.order.fill_(-1)
        graph.replay()
        for call, expected in zip(calls, want):
            call.assert_same(expected)

    calls = [Call(case, DEVICE) for case in cases]
    contexts = [abi.lib().new_context(torch.device(DEVICE)) for _ in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for _ in range(10):
        for call, stream, ctx in zip(calls, streams, contexts):
            with torch.cuda.stream(stream):
                call.run(ctx)
    torch.cuda.synchronize()
    for call, expected in zip(calls, want):
        call.assert_same(expected)


def test_mistakes_get_the_same_answer_on_both_devices(rng: random.Random) -> None:
    lib = abi.lib()
    null = lib.ffi.NULL
    trees = [[-1, 0, 0], [-1, 0, 1]]
    case = Case(TreeShape(2, 3, 2), [3, 3], trees, trees, trees, [1, 2])

    def assign(name: str, value: Any, where: str = "params"):
        return lambda call: setattr(
            call.params if where == "params" else call.out.tree, name, value
        )

    def misalign(name: str):
        def change(call: Call) -> None:
            old = getattr(call.params, name)
            address = int(lib.ffi.cast("uintptr_t", old)) + 1
            setattr(call.params, name, lib.ffi.cast(lib.ffi.typeof(old), address))

        return change

    for i, change in enumerate((
        assign("flags", 1), assign("struct_size", 12), assign("tree", null), assign("num_nodes", null),
        assign("parents", null), assign("num_reqs", 3), assign("num_reqs", -1), assign("max_nodes", 4),
        assign("num_nodes", null, "tree"), assign("max_nodes", 257, "tree"), assign("max_depth", 33, "tree"),
        assign("struct_size", 4, "tree"), misalign("num_nodes"), misalign("tokens"), misalign("parents"),
        misalign("priorities"), misalign("root_positions"), misalign("order"),
    )):  # fmt: skip
        found = []
        for device in ("cpu", DEVICE):
            call = Call(case, device)
            change(call)
            status = call.run(check=False)
            text = lib.ffi.new("char[512]")
            lib.lib.ddt_last_error(text, 512, null)
            message = re.sub("0x[0-9a-f]+", "somewhere", lib.ffi.string(text).decode())
            found.append((status, message))
            assert (call.out.memory == -1).all() and (call.order == -1).all()
        assert found[0] == found[1] and found[0][0] != 0, (i, found)


@pytest.mark.sanitize
def test_small_batch(rng: random.Random) -> None:
    check(make(rng, 4, 40, 7))
    check(make(rng, 1, 256, 32, full=True))


@pytest.mark.sanitize
def test_small_hostile_batch(rng: random.Random) -> None:
    case = hostile(rng, 4, 40, 7)
    mask(case, DEVICE).assert_same(mask(clamped(case), "cpu"))
