# SPDX-License-Identifier: Apache-2.0
"""tree_build on a GPU: every bit of every field against the CPU backend, and small trees against an enumeration of all
prefixes in float64."""

import itertools
import math
import random
import re
from dataclasses import dataclass, replace
from typing import Any

import abi
import pytest
import test_tree_accept as accept
import torch
from abi import TreeShape

DEVICE = "cuda"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NO_CANDIDATES, NONFINITE, EXHAUSTED = 1, 2, 4
CHUNK = 4096
# Words between two fields of an output, and around them all.
GUARD = 64
# What neighbours in the enumeration must be apart by, so that fixed point cannot swap them.
GAP = 5e-5


@dataclass
class Case:
    """Inputs of a call on the CPU; None is absent."""

    shape: TreeShape
    root_tokens: list[int]
    root_positions: list[int]
    logits: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    transitions: torch.Tensor | None = None
    node_budgets: list[int] | None = None
    depth_caps: list[int] | None = None
    candidate_caps: list[int] | None = None
    stop_min_depths: list[int] | None = None
    spine_depths: list[int] | None = None
    stop_tokens: list[list[int]] | None = None
    depth_scales: list[float] | None = None
    max_candidates: int = 0
    # int32 or int64; the shape is that of all trees then
    tree_index: torch.Tensor | None = None
    temperatures: list[float] | None = None
    seeds: list[int] | None = None


class Output:
    """The fields of a ddt_tree in poisoned memory, with guards between them; `tree` has those in `fields`."""

    def __init__(self, shape: TreeShape, device: str, fields: set[str] | None = None):
        lib, sizes = abi.lib(), shape.field_sizes()
        self.places, offset = {}, GUARD
        for name, size in sizes.items():
            self.places[name] = slice(offset, offset + math.prod(size))
            offset = (self.places[name].stop + GUARD + 3) & ~3
        self.shape = shape
        self.memory = abi.poisoned((offset,), torch.int32, device)
        self.tree = tree = lib.params("ddt_tree")
        tree.num_reqs, tree.max_nodes, tree.max_depth = (
            shape.num_reqs,
            shape.max_nodes,
            shape.max_depth,
        )
        for name, place in self.places.items():
            if fields is None or name in fields:
                kind = {"positions": "int64_t", "flags": "uint32_t", "ancestor_bits": "uint32_t"}
                address = self.memory.data_ptr() + 4 * place.start
                setattr(tree, name, lib.ffi.cast(f"{kind.get(name, 'int32_t')} *", address))

    def poison(self) -> None:
        self.memory.fill_(-1)

    def fields(self) -> dict[str, torch.Tensor]:
        memory, sizes = self.memory.cpu(), self.shape.field_sizes()
        fields = {name: memory[place].view(sizes[name]) for name, place in self.places.items()}
        fields["positions"] = fields["positions"].contiguous().view(torch.int64)[..., 0]
        return fields

    def check_guards(self) -> None:
        memory = self.memory.cpu().clone()
        for place in self.places.values():
            memory[place] = -1
        assert (memory == -1).all()

    def assert_same(self, other: "Output") -> None:
        """Bit by bit, guards included."""
        ours, theirs = self.memory.cpu(), other.memory.cpu()
        if torch.equal(ours, theirs):
            return
        for name, field in other.fields().items():
            mine = self.fields()[name]
            at = (mine != field).nonzero()
            if len(at):
                first = tuple(at[0].tolist())
                raise AssertionError(
                    f"{name}{list(first)}: got {mine[first]}, want {field[first]}; {len(at)} of {field.numel()} differ, "
                    f"requests {sorted(set(at[:, 0].tolist()))}"
                )
        raise AssertionError("a guard was written")


def move(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of all of its memory on the device: same strides, same alignment."""
    if not tensor.numel():
        return tensor.to(device)
    offset = tensor.storage_offset()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = tensor.as_strided((offset + extent,), (1,), 0).to(device, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


class Call:
    """A case on a device, its outputs and its parameters, which stay where they are for graphs."""

    def __init__(self, case: Case, device: str, fields: set[str] | None = None):
        lib = abi.lib()
        self.case, self.device, self.keep = case, device, []
        self.out = Output(case.shape, device, fields)
        self.params = params = lib.params("ddt_tree_build_params")
        params.tree = self.out.tree
        for name, value in (
            ("logits", case.logits), ("candidate_tokens", case.tokens), ("candidate_scores", case.scores),
            ("transition_scores", case.transitions),
        ):  # fmt: skip
            if value is not None:
                self.keep.append(move(value, device))
                lib.fill_tensor(getattr(params, name), self.keep[-1])
        params.root_tokens = self._i32(case.root_tokens)
        positions = torch.tensor(case.root_positions, dtype=torch.int64, device=device)
        self.keep.append(positions)
        params.root_positions = abi.i64_pointer(positions)
        for name in (
            "node_budgets", "depth_caps", "candidate_caps", "stop_min_depths", "spine_depths",
        ):  # fmt: skip
            if getattr(case, name) is not None:
                setattr(params, name, self._i32(getattr(case, name)))
        if case.stop_tokens is not None:
            params.max_stop_tokens = len(case.stop_tokens[0]) if case.stop_tokens else 0
            params.stop_tokens = self._i32(list(itertools.chain(*case.stop_tokens)))
        if case.depth_scales is not None:
            scales = torch.tensor(case.depth_scales, dtype=torch.float32, device=device)
            self.keep.append(scales)
            params.depth_scales = abi.f32_pointer(scales)
        if case.temperatures is not None:
            temperatures = torch.tensor(case.temperatures, dtype=torch.float32, device=device)
            seeds = torch.tensor(case.seeds, dtype=torch.int64, device=device)
            self.keep += [temperatures, seeds]
            params.temperatures = abi.f32_pointer(temperatures)
            params.seeds = abi.i64_pointer(seeds)
        params.max_candidates = case.max_candidates
        if case.tree_index is not None:
            self.keep.append(move(case.tree_index, device))
            lib.fill_tensor(params.tree_index, self.keep[-1])

    def _i32(self, values: list[int]) -> Any:
        self.keep.append(torch.tensor(values, dtype=torch.int32, device=self.device))
        return abi.i32_pointer(self.keep[-1])

    def run(self, ctx: Any = None, check: bool = True) -> int:
        return abi.call("tree_build", self.params, self.device, ctx, check)


def build(case: Case, device: str, fields: set[str] | None = None) -> Output:
    call = Call(case, device, fields)
    call.run()
    return call.out


def check(case: Case) -> Output:
    """The GPU's trees are the CPU's, which are returned."""
    want = build(case, "cpu")
    build(case, DEVICE).assert_same(want)
    return want


# ---- inputs


def layout(values: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values [R, L, V] in other memory; what lies between is NaN."""
    requests, depths, vocab = values.shape
    nan = {"fill_value": math.nan, "dtype": values.dtype}
    if kind == "contiguous":
        return values.clone()
    if kind == "gaps":  # rows that start anywhere
        memory = torch.full((requests, depths + 1, vocab + 3), **nan).flatten()
        memory = torch.cat([torch.full((5,), **nan), memory])
        view = memory[5:].view(requests, depths + 1, vocab + 3)[:, :depths, :vocab]
    elif kind == "aligned gaps":
        view = torch.full((requests, depths + 1, (vocab + 63) // 32 * 32), **nan)[
            :, :depths, :vocab
        ]
    elif kind == "depth first":
        view = torch.full((depths, requests, vocab), **nan).transpose(0, 1)
    elif kind == "transposed":
        view = torch.full((vocab, depths + 1, requests), **nan)[:, :depths].permute(2, 1, 0)
    elif kind == "strided":
        view = torch.full((requests, depths, vocab, 2), **nan)[..., 1]
    else:
        raise ValueError(kind)
    return view.copy_(values)


LAYOUTS = ("contiguous", "gaps", "aligned gaps", "depth first", "transposed", "strided")


def drafter_logits(
    rng: random.Random, requests: int, depths: int, vocab: int, dtype: torch.dtype
) -> torch.Tensor:
    """A few likely tokens over noise; trees become neither chains nor stars."""
    logits = torch.randn(requests, depths, vocab)
    for row in logits.view(-1, vocab):
        count = min(vocab, rng.randint(1, 40))
        at = torch.randint(0, vocab, (count,))
        row[at] += torch.linspace(rng.uniform(4, 14), 4, count)
    return logits.to(dtype)


def sampling(rng: random.Random, requests: int) -> dict[str, Any]:
    """Requests that are sampled, and some that are not."""
    return dict(
        temperatures=[
            rng.choice([0.0, 0.01, 0.3, 0.6, 1.0, 1.0, 1.5, 30.0]) for _ in range(requests)
        ],
        seeds=[rng.getrandbits(64) - 2**63 for _ in range(requests)],
    )


def arguments(
    rng: random.Random,
    shape: TreeShape,
    depths: int,
    likely: list[list[int]],
    lattice: bool = False,
) -> dict[str, Any]:
    """Any optional arguments. likely: tokens of each request that its tree could have."""
    requests, largest = shape.num_reqs, shape.max_nodes - 1

    def maybe(value: Any) -> Any:
        return value() if rng.random() < 0.75 else None

    def each(*values: int) -> list[int]:
        return [rng.choice(values) for _ in range(requests)]

    budgets = [b for b in (0, -1, 1, 2, 15, 31, 63, 255) if b <= largest]
    budgets += [largest, largest, rng.randint(0, largest)]
    stops = rng.choice([0, 1, 3, 40])
    return dict(
        root_tokens=[rng.choice([-1, 0, rng.randrange(2**31)]) for _ in range(requests)],
        root_positions=[rng.choice([0, rng.randrange(2**40), 2**63 - 33]) for _ in range(requests)],
        node_budgets=maybe(lambda: each(*budgets)),
        depth_caps=maybe(lambda: each(0, 1, 2, 5, 15, 32, 2**31 - 1, *[depths] * 3)),
        candidate_caps=maybe(lambda: each(-(2**31), -1, 0, 0, 0, 1, 2, 5, 100, 2**31 - 1)),
        stop_min_depths=maybe(lambda: each(-(2**31), 0, 1, 2, 4, 2**31 - 1)),
        spine_depths=maybe(lambda: each(-(2**31), 0, 0, 0, 1, 3, depths, 2**31 - 1)),
        stop_tokens=maybe(
            lambda: [
                [rng.choice([-1, -7, rng.randrange(2**31), *likely[r] * 2]) for _ in range(stops)]
                for r in range(requests)
            ]
        ),
        depth_scales=maybe(lambda: [rng.choice([1.0, 0.37, 2.5, 1e-3]) for _ in range(depths)]),
        max_candidates=0 if lattice else rng.choice([0, 0, 0, 1, 2, 7, 40, 300]),
        **(sampling(rng, requests) if rng.random() < 0.4 else {}),
    )


def likely_tokens(logits: torch.Tensor) -> list[list[int]]:
    requests, depths, vocab = logits.shape
    if not depths:
        return [[3]] * requests
    row = torch.nan_to_num(logits[:, 0].float(), -1e30, -1e30, -1e30)
    return row.topk(min(vocab, 6), dim=-1).indices.tolist()


def make(
    rng: random.Random,
    requests: int,
    depths: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "contiguous",
    max_nodes: int = 64,
    max_depth: int | None = None,
    logits: torch.Tensor | None = None,
) -> Case:
    if logits is None:
        logits = drafter_logits(rng, requests, depths, vocab, dtype)
    shape = TreeShape(requests, max_nodes, min(depths, 32) if max_depth is None else max_depth)
    return Case(
        shape, logits=layout(logits, kind), **arguments(rng, shape, depths, likely_tokens(logits))
    )


def plain(logits: torch.Tensor, max_nodes: int, max_depth: int | None = None, **more: Any) -> Case:
    """Only what is required."""
    requests, depths, _ = logits.shape
    shape = TreeShape(requests, max_nodes, min(depths, 32) if max_depth is None else max_depth)
    return Case(shape, list(range(requests)), [7] * requests, logits=logits, **more)


# ---- from logits


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_dtype_and_layout(rng: random.Random, dtype: torch.dtype, kind: str) -> None:
    for _ in range(2):
        vocab = rng.choice([257, 1000, 4095, 4099, 9000])
        check(
            make(
                rng, 5, rng.choice([1, 7, 15]), vocab, dtype, kind, rng.choice([2, 16, 33, 64, 256])
            )
        )


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 4095, 4096, 4097, 8192, 20011])
def test_vocabularies(rng: random.Random, vocab: int) -> None:
    for dtype in FLOATS:
        check(make(rng, 3, 7, vocab, dtype, rng.choice(LAYOUTS), rng.choice([8, 64, 256])))


@pytest.mark.parametrize("kind", ["contiguous", "gaps", "transposed"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_large_vocabulary(rng: random.Random, dtype: torch.dtype, kind: str) -> None:
    check(make(rng, 2, 3, 248320, dtype, kind, 256))


def test_target_size(rng: random.Random) -> None:
    """The sizes of the benchmark, all budgets at once."""
    logits = drafter_logits(rng, 7, 15, 248320, torch.bfloat16)
    budgets = [7, 15, 31, 63, 127, 255, -1]
    check(plain(logits, 256, node_budgets=budgets))


def test_vocabulary_beyond_registers(rng: random.Random) -> None:
    """More blocks of ids than the threads of a block keep maxima of."""
    for vocab in (262144, 262145, 700001):
        check(make(rng, 1, 2, vocab, torch.bfloat16, max_nodes=rng.choice([16, 256])))


@pytest.mark.parametrize("depths", [0, 1, 2, 7, 15, 31, 32, 40])
def test_depths(rng: random.Random, depths: int) -> None:
    for max_depth in {0, 1, min(depths, 32), 32, rng.randint(0, 32)}:
        check(make(rng, 4, depths, 300, torch.float32, "gaps", 128, max_depth))


@pytest.mark.parametrize("max_nodes", [1, 2, 3, 16, 31, 32, 33, 63, 64, 65, 128, 255, 256])
def test_sizes_of_trees(rng: random.Random, max_nodes: int) -> None:
    check(make(rng, 6, 9, 2000, torch.bfloat16, max_nodes=max_nodes))
    check(plain(drafter_logits(rng, 2, 9, 2000, torch.float32), max_nodes))


def test_arguments(rng: random.Random) -> None:
    for _ in range(12):
        check(make(rng, 17, 8, 500, rng.choice(FLOATS), max_nodes=rng.choice([40, 256])))


def test_many_requests(rng: random.Random) -> None:
    check(make(rng, 300, 4, 130, torch.float32, max_nodes=20))


def test_no_requests(rng: random.Random) -> None:
    check(make(rng, 0, 4, 130))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_an_index_names_the_trees(rng: random.Random, dtype: torch.dtype) -> None:
    for case in (make(rng, 5, 6, 3000), make_lattice(rng, 5, 6, 8, True)):
        shape = replace(case.shape, num_reqs=9)
        index = torch.tensor(rng.sample(range(9), 5), dtype=dtype)
        index[rng.randrange(5)] = -1
        strided = index.repeat_interleave(3)[::3]
        case = replace(case, shape=shape, tree_index=strided)
        want = check(case)
        # what is not there is skipped on a GPU
        far = torch.where(strided < 0, 2**31 - 1, strided)
        build(replace(case, tree_index=far), DEVICE).assert_same(want)


def test_requests_that_share_scores(rng: random.Random) -> None:
    """Strides of 0."""
    logits = drafter_logits(rng, 1, 1, 3000, torch.bfloat16)
    case = make(rng, 4, 6, 3000, logits=logits.expand(4, 6, 3000).clone())
    check(replace(case, logits=logits.expand(4, 6, 3000)))


def test_chains(rng: random.Random) -> None:
    logits = drafter_logits(rng, 3, 15, 5000, torch.bfloat16)
    want = check(plain(logits, 64, candidate_caps=[1] * 3))
    fields = want.fields()
    assert fields["num_nodes"].tolist() == [16] * 3
    best = logits.argmax(dim=-1)
    assert torch.equal(fields["tokens"][:, 1:16].long(), best)


def test_stars(rng: random.Random) -> None:
    """The whole budget at one depth: as many candidates as there can be."""
    logits = torch.randn(2, 1, 30000)
    likely = torch.stack([torch.randperm(30000)[:255] for _ in range(2)])
    logits[:, 0].scatter_(1, likely, torch.linspace(30, 10, 255).expand(2, 255))
    want = check(plain(logits, 256)).fields()
    assert torch.equal(want["tokens"][:, 1:].long(), likely)


# ---- scores that are hard to rank


def test_candidates_in_one_chunk(rng: random.Random) -> None:
    """All of the best ids are neighbours: few blocks have all candidates."""
    for dtype in FLOATS:
        logits = torch.randn(4, 5, 20011)
        for r in range(4):
            start = rng.choice([0, 64, 4096, 8000, 20011 - 300])
            length = rng.choice([64, 100, 300])
            logits[r, :, start : start + length] += 12
        check(plain(logits.to(dtype), 256))
        check(plain(logits.to(dtype), 32))


@pytest.mark.parametrize("vocab", [70, 4097, 20011, 248320])
def test_many_exact_ties(rng: random.Random, vocab: int) -> None:
    """Rows made of few values: more equals than any buffer holds, from any id on."""
    for dtype in FLOATS:
        rows = torch.tensor([0.0, -0.0, -1.0, -2.0])[torch.randint(0, 4, (2, 2, vocab))]
        rows[0, 0, torch.randint(0, vocab, (rng.choice([1, 20, 400]),))] = 1.0
        rows[1, 1, rng.randrange(vocab) :] = 3.0
        check(plain(rows.to(dtype), rng.choice([8, 64, 256])))


@pytest.mark.parametrize("value", [0.0, -1e4, 6e4, 1e-7])
def test_all_equal(rng: random.Random, value: float) -> None:
    for vocab, max_nodes in ((1, 16), (64, 256), (255, 256), (256, 256), (20011, 256), (248320, 8)):
        logits = torch.full((2, 2, vocab), value, dtype=rng.choice(FLOATS))
        want = check(plain(logits, max_nodes)).fields()
        assert want["tokens"][0, 1] == 0


def test_scores_that_round_to_the_same(rng: random.Random) -> None:
    """f32 logits a fraction of a unit of 2^-21 apart: lower ids with slightly lower logits win ties of the score, also
    across blocks of 64 and chunks, around the last candidate."""
    unit = 2.0**-21
    for vocab in (64, 300, 4200, 20011):
        for step in (0.02, 0.1, 0.3, 0.9):
            logits = torch.full((3, 3, vocab), -6.0)
            for r in range(3):
                for depth in range(3):
                    count = min(vocab, rng.choice([10, 64, 260, 2000]))
                    at = torch.randperm(vocab)[:count]
                    if r == 0:
                        at = at.sort().values  # the lower the id, the lower the logit
                    logits[r, depth, at] = 0.4 + torch.arange(count) * (step * unit)
            for max_nodes in (4, 16, 64, 256):
                check(plain(logits, max_nodes))


@pytest.mark.parametrize("vocab", [200, 9000])
def test_normalisers_to_the_last_bit(rng: random.Random, vocab: int) -> None:
    """All depths have the same few scores at other ids, so that paths through the same tokens in another order tie
    but for the rounding of each edge, which hangs on the last bits of the normalisers. Few scores, because errors of
    many would cancel; some ids share a lane of the sum, and in the large vocabulary they lie in three chunks."""
    requests, depths, count = 128, 6, 12
    logits = torch.full((requests, depths, vocab), -25.0)
    for r in range(requests):
        scores = torch.randn(count)
        for depth in range(depths):
            ids = torch.randperm(vocab)[:count]
            ids[: count // 2] = ids[: count // 2] // 64 * 64 + 5 if r % 2 else ids[: count // 2]
            logits[r, depth, ids.clamp(max=vocab - 1)] = scores
    for max_nodes in (16, 64, 256):
        check(plain(logits, max_nodes))


def test_ties_of_large_numbers(rng: random.Random) -> None:
    """Scores at the lower limit of fixed point are all equal, however far apart their logits are."""
    for spread in (1.0, 900.0, 1100.0, 3e4, 1e30, 1e38):
        logits = torch.randn(3, 4, 6000) * spread
        check(plain(logits, 256))
        check(plain(logits.half(), 64))
        check(plain(logits.bfloat16(), 64, depth_scales=[1.0, 1e-3, 1e-30, 1e10]))


def test_scores_that_never_count(rng: random.Random) -> None:
    for dtype in FLOATS:
        for vocab in (1, 5, 64, 4100, 20011):
            logits = torch.randn(8, 5, vocab).to(dtype)
            for row in logits.view(-1, vocab):
                case = rng.randrange(9)
                for bad in (math.nan, math.inf, -math.inf):
                    if rng.random() < 0.5:
                        row[torch.rand(vocab) < rng.choice([0.01, 0.3, 0.9])] = bad
                if case == 0:
                    row[:] = -math.inf
                elif case == 1:
                    row[:] = math.nan
                elif case == 2:
                    row[:] = math.inf
                elif case == 3:
                    row[rng.randrange(vocab)] = torch.finfo(dtype).max
                elif case == 4:  # candidates run out
                    row[3:] = -math.inf
                elif case == 5:
                    row[: vocab // 2] = -math.inf
            case = make(rng, 8, 5, vocab, dtype, rng.choice(LAYOUTS), 64, logits=logits)
            check(case)
            check(replace(case, node_budgets=None, depth_caps=None))


def test_flags(rng: random.Random) -> None:
    logits = torch.randn(6, 3, 400)
    logits[1, 0] = -math.inf
    logits[2, 0] = math.nan
    logits[3, 1, 77] = math.inf
    logits[4, 2, 77] = math.nan  # too deep to be looked at
    case = plain(logits, 32, depth_caps=[3, 3, 3, 3, 2, 3], max_candidates=400)
    flags = check(case).fields()["flags"].tolist()
    assert flags == [0, NO_CANDIDATES, NO_CANDIDATES | NONFINITE, NONFINITE, 0, 0]
    flags = check(replace(case, max_candidates=2)).fields()["flags"]
    assert int(flags[0]) == EXHAUSTED


def test_denormal_scores(rng: random.Random) -> None:
    """Nothing is flushed to zero."""
    logits = torch.randint(-50, 50, (2, 3, 500)).float() * 1e-42
    check(plain(logits, 64))
    check(plain(logits, 64, depth_scales=[1e37, 3e38, 1.0]))
    check(plain((torch.randint(-50, 50, (2, 3, 500)) * 6e-8).half(), 64))


# ---- against an enumeration


def enumerated(
    edges: list[list[list[float]]],
    tokens: list[list[int]],
    budget: int,
    depth_limit: int,
    cap: int,
    stops: set[int],
    stop_min_depth: int,
    pairs: bool,
) -> list[tuple[tuple[int, ...], float]]:
    """The best prefixes of columns, best first, one more than the budget. edges[depth][parent][column]: log-probability,
    -inf for never."""
    found, level = [], [((), 0.0)]
    for depth in range(depth_limit):
        below = []
        for path, score in level:
            ends = any(
                tokens[d][column] in stops and d + 1 >= stop_min_depth
                for d, column in enumerate(path)
            )
            if ends:
                continue
            row = edges[depth][path[-1] if pairs and path else 0]
            order = sorted((-x, tokens[depth][column], column) for column, x in enumerate(row))
            order = [column for cost, _, column in order if cost < math.inf]
            below += [((*path, column), score + row[column]) for column in order[:cap]]
        found += below
        level = below
    found.sort(key=lambda node: -node[1])
    return found[: budget + 1]


def preorder(paths: list[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """Parents and pop ranks in preorder, children as they come in `paths`; entries of `ranks` are 1-based."""
    children: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    rank = {path: i for i, path in enumerate(paths, 1)} | {(): 0}
    for path in paths:
        children.setdefault(path[:-1], []).append(path)
    parents, ranks, stack = [], [], [((), -1)]
    while stack:
        path, parent = stack.pop()
        stack += [(child, len(parents)) for child in reversed(children.get(path, []))]
        parents.append(parent)
        ranks.append(rank[path])
    return parents, ranks


def assert_tree(
    out: Output,
    r: int,
    paths: list[tuple[int, ...]],
    tokens: list[list[int]],
    root: tuple[int, int],
) -> None:
    """Request r has exactly these prefixes; every field follows."""
    parents, ranks = preorder(paths)
    shape = out.shape
    token = [
        root[0] if rank == 0 else tokens[len(paths[rank - 1]) - 1][paths[rank - 1][-1]]
        for rank in ranks
    ]
    batch = abi.tree_batch(
        [parents],
        shape.max_nodes,
        shape.max_depth,
        "cpu",
        lambda _, i: token[i],
        lambda _: root[1],
    )
    batch.pop_ranks[0, : len(ranks)] = torch.tensor(ranks, dtype=torch.int32)
    fields = out.fields()
    for name in shape.field_sizes():
        if name != "flags":
            assert torch.equal(fields[name][r], getattr(batch, name)[0]), name


def is_separated(nodes: list[tuple[tuple[int, ...], float]]) -> bool:
    return all(a[1] - b[1] > GAP for a, b in itertools.pairwise(nodes))


def check_enumeration(rng: random.Random, lattice: bool, sampled: bool) -> bool:
    """One random small tree; False if two scores were too close to tell."""
    depths, width = rng.randint(1, 4), rng.randint(1, 6)
    budget = rng.choice([1, 3, 10, 30])
    scale = [rng.choice([1.0, 0.5, 2.0]) for _ in range(depths)]
    scores = torch.randn(1, depths, width) * 2
    scores[torch.rand(scores.shape) < 0.1] = rng.choice([math.nan, math.inf, -math.inf])
    pairs = lattice and rng.random() < 0.7
    transitions = torch.randn(1, depths, width, width) if pairs else None
    tokens = [
        rng.sample(range(1000), width) if lattice else list(range(width)) for _ in range(depths)
    ]
    if lattice:
        for row in tokens:
            if rng.random() < 0.3:
                row[rng.randrange(width)] = -1
    total = scores[0, :, None].double().repeat(1, width, 1)
    if pairs:
        total = (scores[0, :, None] + transitions[0]).double()
    root = rng.randrange(1000), rng.randrange(10**6)
    temperature, seed = rng.choice([0.3, 0.7, 1.0, 1.5]), rng.getrandbits(64) - 2**63
    if sampled:
        noise = [accept.noise(seed, root[1] + depth, 1000) for depth in range(depths)]
        noise = torch.stack([row[names] for row, names in zip(noise, tokens)])
        total = total / temperature + noise[:, None]
    total = total * torch.tensor(scale).double()[:, None, None]
    total = torch.where(total.isfinite(), total, -math.inf)
    absent = torch.tensor(tokens)[:, None].expand_as(total) < 0
    total = torch.where(absent, -math.inf, total)
    edges = total.log_softmax(-1)
    edges = torch.where(edges.isnan(), -math.inf, edges).tolist()  # nothing at all is usable
    cap = rng.choice([1, 2, width, width])
    stops = (
        {rng.choice(rng.choice(tokens)) for _ in range(2)} - {-1} if rng.random() < 0.5 else set()
    )
    stop_min_depth, depth_cap = rng.randint(0, 3), rng.choice([depths, rng.randint(0, depths)])
    shape = TreeShape(1, budget + 1, depths)
    nodes = enumerated(
        edges, tokens, budget, min(depth_cap, budget), cap, stops, stop_min_depth, pairs
    )
    if not is_separated(nodes):
        return False
    case = Case(
        shape, [root[0]], [root[1]], depth_scales=scale, candidate_caps=[cap], depth_caps=[depth_cap],
        stop_min_depths=[stop_min_depth], stop_tokens=[list(stops)],
        temperatures=[temperature] if sampled else None, seeds=[seed] if sampled else None,
    )  # fmt: skip
    if lattice:
        case.tokens = torch.tensor([tokens], dtype=torch.int32)
        case.scores, case.transitions = scores, transitions
    else:
        case.logits = scores
    want = [path for path, _ in nodes[:budget]]
    assert_tree(build(case, DEVICE), 0, want, tokens, root)
    return True


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lattice", [False, True], ids=["logits", "lattice"])
def test_enumeration_of_all_prefixes(rng: random.Random, lattice: bool, sampled: bool) -> None:
    checked = sum(check_enumeration(rng, lattice, sampled) for _ in range(150))
    assert checked > 100


def test_log_probabilities_of_a_large_vocabulary(rng: random.Random) -> None:
    """The tree over the float64 log-softmax of large rows."""
    nodes: list = []
    # now and then two prefixes are as likely as each other
    while not nodes or not is_separated(nodes):
        logits = torch.randn(1, 4, 30000)
        likely = torch.stack([torch.randperm(30000)[:30] for _ in range(4)])
        logits[0].scatter_add_(1, likely, torch.linspace(14, 8, 30).expand(4, 30))
        best, columns = logits[0].double().log_softmax(-1).topk(12, dim=-1)
        edges = [[row] for row in best.tolist()]
        nodes = enumerated(edges, columns.tolist(), 40, 4, 12, set(), 0, pairs=False)
    case = plain(logits, 41, candidate_caps=[12])
    want = [path for path, _ in nodes[:40]]
    assert_tree(build(case, DEVICE), 0, want, columns.tolist(), (0, 7))


# ---- with the target's noise


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_noise(rng: random.Random, dtype: torch.dtype, kind: str) -> None:
    for vocab in (1, 63, 4096, 9001):
        case = make(rng, 5, rng.choice([1, 7, 15]), vocab, dtype, kind, rng.choice([16, 64, 256]))
        check(replace(case, **sampling(rng, 5)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_noise_over_a_large_vocabulary(rng: random.Random, dtype: torch.dtype) -> None:
    logits = drafter_logits(rng, 4, 15, 248320, dtype)
    for max_nodes in (16, 64, 256):
        noise = dict(temperatures=[0.0, 0.6, 1.0, 1.5], seeds=[5, -7, 2**62, 0])
        check(plain(logits, max_nodes, **noise))


def test_noise_alone(rng: random.Random) -> None:
    """Equal logits, and logits that a temperature makes large or infinite."""
    for value, temperature in ((0.0, 1.0), (-1e4, 0.3), (6e4, 0.01), (1e-7, 40.0), (3e38, 0.1)):
        logits = torch.full((2, 2, 20011), value)
        logits[0, 1, torch.randint(0, 20011, (500,))] = -math.inf
        check(plain(logits, 256, temperatures=[temperature] * 2, seeds=[1, -1]))


def test_noise_that_nothing_survives(rng: random.Random) -> None:
    for value in (math.nan, math.inf, -math.inf):
        logits = torch.randn(3, 4, 5000)
        logits[1, rng.randrange(4)] = value
        logits[2, :, torch.randint(0, 5000, (300,))] = value
        check(plain(logits, 64, temperatures=[0.7] * 3, seeds=[1, 2, 3]))


def test_temperature_zero_is_no_noise(rng: random.Random) -> None:
    for case in (make(rng, 5, 7, 9000), make_lattice(rng, 5, 7, 8, True)):
        case = replace(case, temperatures=None, seeds=None)
        greedy = replace(case, temperatures=[0.0, -0.0, 0.0, 0.0, 0.0], seeds=[7] * 5)
        build(greedy, DEVICE).assert_same(build(case, DEVICE))


def test_temperatures_that_cannot_be(rng: random.Random) -> None:
    for bad in (-1.0, math.nan, -math.inf):
        logits = drafter_logits(rng, 3, 5, 700, torch.float32)
        never = logits.clone()
        never[1] = math.nan
        noise = dict(temperatures=[0.0, bad, 0.0], seeds=[1] * 3)
        out = build(plain(logits, 64, **noise), DEVICE)
        out.assert_same(build(plain(never, 64), "cpu"))


@pytest.mark.parametrize("vocab", [1000, 248320])
def test_the_spine_is_what_the_target_samples(rng: random.Random, vocab: int) -> None:
    """A drafter that knows the target's logits: tree_accept takes the whole chain."""
    depths, requests = 7, 4
    logits = (torch.randn(requests, depths, vocab) * 3).bfloat16()
    temperatures, seeds = [0.3, 0.6, 1.0, 1.5], [rng.getrandbits(64) - 2**63 for _ in range(4)]
    case = plain(
        logits, depths + 1, candidate_caps=[1] * requests, temperatures=temperatures, seeds=seeds
    )
    tokens = build(case, DEVICE).fields()["tokens"]
    batch = abi.tree_batch(
        [list(range(-1, depths))] * requests, depths + 1, depths, "cpu",
        lambda r, node: int(tokens[r, node]), lambda _: case.root_positions[0],
    )  # fmt: skip
    rows = torch.cat([logits, logits[:, :1]], dim=1).float()
    rows = (rows / torch.tensor(temperatures)[:, None, None]).view(-1, vocab)
    query_start = list(range(0, len(rows) + 1, depths + 1))
    walk = accept.Case(batch, query_start, rows, [], temperatures=temperatures, seeds=seeds)
    accepted = accept.outputs(walk, DEVICE)["num_accepted"]
    # a near tie may end a walk: the noises' logarithms differ in their last bits
    assert sum(accepted) >= depths * requests - depths, accepted
    assert accepted.count(depths) >= requests - 1, accepted


# ---- from a lattice


def make_lattice(
    rng: random.Random,
    requests: int,
    depths: int,
    width: int,
    transitions: bool,
    max_nodes: int = 64,
    palette: bool = False,
    bad: bool = True,
) -> Case:
    shape = TreeShape(requests, max_nodes, min(depths, 32))
    tokens = torch.rand(requests, depths, max(3 * width, 8)).argsort(-1)[..., :width].int() * 1000
    tokens += torch.randint(0, 1000, (1,), dtype=torch.int32)
    absent = rng.choice([0.0, 0.1, 0.6])
    tokens[torch.rand(tokens.shape) < absent] = rng.choice([-1, -1, -(2**31)])

    def draw(*size: int) -> torch.Tensor:
        values = torch.randint(-2, 2, size).float() if palette else torch.randn(*size) * 2
        if bad and values.numel():
            for value in (math.nan, math.inf, -math.inf):
                if rng.random() < 0.4:
                    values[torch.rand(size) < rng.choice([0.003, 0.2])] = value
        return values

    scores = draw(requests, depths, width)
    pairs = draw(requests, depths, width, width) if transitions else None
    if requests and depths and rng.random() < 0.2:
        tokens[0, rng.randrange(depths)] = -1
    # a head may give one sum per pair
    is_summed = transitions and bad and rng.random() < 0.25
    likely = [row[row >= 0].tolist()[:6] for row in tokens[:, 0]] if depths else [[3]] * requests
    case = Case(shape, tokens=tokens, scores=scores, transitions=pairs,
                **arguments(rng, shape, depths, likely, lattice=True))  # fmt: skip
    kind = rng.choice(["contiguous", "gaps", "transposed"])
    if kind == "gaps" and width:
        case.scores = layout(case.scores, "gaps")
        case.tokens = torch.nn.functional.pad(tokens, (1, 2, 0, 1), value=5)[
            :, :depths, 1 : 1 + width
        ]
        if transitions:
            padded = torch.full((requests, depths, width + 1, width + 2), math.nan)
            case.transitions = padded[:, :, 1:, 2:].copy_(pairs)
    elif kind == "transposed":
        case.scores = scores.permute(2, 1, 0).contiguous().permute(2, 1, 0)
        case.tokens = tokens.permute(1, 2, 0).contiguous().permute(2, 0, 1)
        if transitions:
            case.transitions = pairs.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)
    if is_summed:
        case.scores = None
    return case


@pytest.mark.parametrize("transitions", [False, True], ids=["alone", "pairs"])
@pytest.mark.parametrize("width", [0, 1, 2, 8, 32, 33, 200])
def test_lattices(rng: random.Random, width: int, transitions: bool) -> None:
    for depths in (0, 1, 2, 7):
        for max_nodes in (16, 64, 256):
            for palette in (False, True):
                check(make_lattice(rng, 3, depths, width, transitions, max_nodes, palette))


def test_wide_lattices(rng: random.Random) -> None:
    check(make_lattice(rng, 2, 3, 4096, transitions=False, max_nodes=256))
    check(make_lattice(rng, 1, 2, 700, transitions=True, max_nodes=256))


def test_deep_lattices(rng: random.Random) -> None:
    check(make_lattice(rng, 2, 32, 8, transitions=True, max_nodes=256))
    check(make_lattice(rng, 2, 32, 300, transitions=False, max_nodes=256, bad=False))


def test_many_lattices(rng: random.Random) -> None:
    check(make_lattice(rng, 100, 7, 8, transitions=True, max_nodes=64))


def test_lattices_that_do_not_fit_into_shared_memory(rng: random.Random) -> None:
    for width in (32, 33, 64):
        for max_nodes in (8, 64, 65, 256):
            check(make_lattice(rng, 3, 32, width, transitions=True, max_nodes=max_nodes))


def test_transitions_may_hold_the_scores(rng: random.Random) -> None:
    case = make_lattice(rng, 4, 7, 16, transitions=True, bad=False)
    sums = case.scores[:, :, None] + case.transitions
    alone = replace(case, scores=None, transitions=sums.contiguous())
    build(alone, DEVICE).assert_same(build(case, DEVICE))


def test_zero_transitions_are_no_transitions(rng: random.Random) -> None:
    for width in (1, 8, 32):
        case = make_lattice(rng, 4, 7, width, transitions=False)
        zeros = torch.zeros(4, 7, width, width)
        build(replace(case, transitions=zeros), DEVICE).assert_same(build(case, DEVICE))


# ---- with a spine


@pytest.mark.parametrize("max_nodes", [2, 4, 16, 64, 65, 256])
def test_spines(rng: random.Random, max_nodes: int) -> None:
    for depths in (1, 2, 7, 15, 32):
        spines = [0, 1, 3, depths, 2**31 - 1]
        for case in (
            make(rng, 5, depths, rng.choice([70, 9000]), max_nodes=max_nodes),
            make_lattice(rng, 5, depths, 16, True, max_nodes, bad=False),
            make_lattice(rng, 5, depths, 8, False, max_nodes, palette=True),
        ):
            case = replace(case, spine_depths=spines, node_budgets=None)
            check(case)
            check(replace(case, temperatures=[1.0] * 5, seeds=list(range(5))))


def test_a_spine_is_the_chain_of_best_children(rng: random.Random) -> None:
    """Over flat scores, of which a best-first tree makes a star."""
    for budget in (3, 7, 40, 63, 64, 255):
        flat = torch.rand(1, 7, 3000) * 0.1
        lattice = make_lattice(rng, 1, 7, 32, True, budget + 1, bad=False)
        lattice = Case(
            lattice.shape, [0], [7], tokens=torch.arange(32, dtype=torch.int32).repeat(1, 7, 1),
            transitions=torch.rand(1, 7, 32, 32) * 0.1,
        )  # fmt: skip
        for case in (plain(flat, budget + 1), lattice):
            depth = min(7, budget)
            chain = build(replace(case, candidate_caps=[1]), DEVICE).fields()["tokens"]
            without = build(case, DEVICE).fields()["tokens"]
            with_spine = build(replace(case, spine_depths=[7]), DEVICE).fields()
            assert torch.equal(with_spine["tokens"][:, : depth + 1], chain[:, : depth + 1])
            ranks = list(range(depth + 1))
            assert with_spine["pop_ranks"][0, : depth + 1].tolist() == ranks
            assert not torch.equal(without[:, : depth + 1], chain[:, : depth + 1])


def test_flags_of_lattices(rng: random.Random) -> None:
    tokens = torch.arange(4, dtype=torch.int32).repeat(5, 3, 1)
    scores, transitions = torch.randn(5, 3, 4), torch.randn(5, 3, 4, 4)
    tokens[1, 0] = -1
    transitions[2, 1, 3, 2] = math.nan
    tokens[3, 0, 3] = -1
    transitions[3, 1, 3, 2] = math.nan  # below nobody
    tokens[4, 2, 1] = -1
    scores[4, 2, 1] = math.inf  # of nobody
    shape = TreeShape(5, 5, 3)
    case = Case(shape, [0] * 5, [0] * 5, tokens=tokens, scores=scores, transitions=transitions)
    flags = check(case).fields()["flags"].tolist()
    assert flags == [0, NO_CANDIDATES, NONFINITE, 0, 0]


# ---- what is and is not written


def test_fields_that_nobody_wants(rng: random.Random) -> None:
    case = make(rng, 5, 6, 900, max_nodes=70)
    everything = build(case, "cpu").fields()
    names = set(case.shape.field_sizes())
    choices = [{"num_nodes"}] + [
        {"num_nodes", *rng.sample(sorted(names), rng.randint(1, 6))} for _ in range(8)
    ]
    for wanted in choices:
        out = build(case, DEVICE, wanted)
        out.check_guards()
        for name, field in out.fields().items():
            want = everything[name] if name in wanted else torch.full_like(field, -1)
            assert torch.equal(field, want), (wanted, name)


def test_the_workspace_is_big_enough(rng: random.Random) -> None:
    """Nothing around it is written, and what it held does not matter."""
    lib = abi.lib()
    cases = [
        make(rng, 3, 15, 4097, max_nodes=64), make(rng, 2, 3, 65, max_nodes=256), make(rng, 1, 32, 20011, max_nodes=17),
        make_lattice(rng, 3, 7, 8, True), make_lattice(rng, 2, 9, 33, False, 256), make_lattice(rng, 1, 1, 200, True, 256),
    ]  # fmt: skip
    around = 1 << 16
    for case in cases:
        want = build(case, "cpu")
        call = Call(case, DEVICE)
        size = lib.ffi.new("size_t *")
        lib.check(lib.lib.ddt_tree_build_workspace_size(abi.context(DEVICE), call.params, size))
        for fill in (0, 0xFF, 0x55):
            memory = torch.full(
                (size[0] + 2 * around + 256,), fill, dtype=torch.uint8, device=DEVICE
            )
            start = around + -memory.data_ptr() % 256
            call.params.workspace = lib.ffi.cast("void *", memory.data_ptr() + start)
            call.params.workspace_bytes = size[0]
            call.out.poison()
            lib.check(
                lib.lib.ddt_tree_build(
                    abi.context(DEVICE), call.params, lib.stream(torch.device(DEVICE))
                )
            )
            call.out.assert_same(want)
            assert (memory[:start] == fill).all() and (memory[start + size[0] :] == fill).all()


def test_inputs_are_not_written(rng: random.Random) -> None:
    for case in (make(rng, 4, 7, 5000), make_lattice(rng, 4, 7, 8, True, bad=False)):
        call = Call(case, DEVICE)
        before = [tensor.clone() for tensor in call.keep]
        call.run()
        assert all(torch.equal(a, b) for a, b in zip(before, call.keep))


# ---- values that only the device sees


def assert_is_tree(out: Output) -> None:
    """Whatever it is, it is a tree, and all fields agree."""
    out.check_guards()
    fields, shape = out.fields(), out.shape
    assert ((fields["num_nodes"] >= 0) & (fields["num_nodes"] <= shape.max_nodes)).all()
    trees = [
        fields["parents"][r, : int(fields["num_nodes"][r])].tolist() for r in range(shape.num_reqs)
    ]
    for tree in trees:
        assert all(-1 < parent < i or i == 0 and parent == -1 for i, parent in enumerate(tree))
    assert int(fields["depths"].max()) <= shape.max_depth if shape.num_reqs else True
    batch = abi.tree_batch(
        trees, shape.max_nodes, shape.max_depth, "cpu", root_position=lambda r: int(fields["positions"][r, 0])
    )  # fmt: skip
    for name in shape.field_sizes():
        if name not in ("tokens", "flags", "pop_ranks"):
            assert torch.equal(fields[name], getattr(batch, name)), name


def test_budgets_and_caps_are_clamped(rng: random.Random) -> None:
    far = [-(2**31), -2, 2**31 - 1, 1000, 64, 63]
    for case in (make(rng, 6, 7, 3000), make_lattice(rng, 6, 7, 8, True)):
        case = replace(case, node_budgets=far, depth_caps=[-(2**31), 5, 33, -1, 2**31 - 1, 0])
        clamped = replace(
            case,
            node_budgets=[max(-1, min(63, budget)) for budget in far],
            depth_caps=[max(0, cap) for cap in case.depth_caps],
        )
        build(case, DEVICE).assert_same(build(clamped, "cpu"))


def test_scales_that_cannot_be(rng: random.Random) -> None:
    for bad in (0.0, -0.0, -1.0, math.nan, math.inf, -math.inf):
        logits = drafter_logits(rng, 3, 5, 700, torch.float32)
        at = rng.randrange(5)
        scales = [1.0] * 5
        scales[at] = bad
        never = logits.clone()
        never[:, at] = math.nan
        out = build(plain(logits, 64, depth_scales=scales), DEVICE)
        out.assert_same(build(plain(never, 64), "cpu"))


def test_tokens_twice_in_a_lattice(rng: random.Random) -> None:
    for transitions in (False, True):
        case = make_lattice(rng, 4, 6, 20, transitions)
        case.tokens = torch.randint(-1, 4, (4, 6, 20), dtype=torch.int32)
        out = build(case, DEVICE)
        assert_is_tree(out)
        build(case, DEVICE).assert_same(out)


def test_anything_in_device_memory(rng: random.Random) -> None:
    """Random bits everywhere: a tree comes out, inside its memory."""
    for round_ in range(20):
        case = make(rng, 5, 6, 1500) if round_ % 2 else make_lattice(rng, 5, 6, 12, round_ % 4 == 0)
        case = replace(
            case,
            node_budgets=[0] * 5,
            depth_caps=[0] * 5,
            candidate_caps=[0] * 5,
            stop_min_depths=[0] * 5,
            spine_depths=[0] * 5,
            stop_tokens=[[0, 0]] * 5,
            depth_scales=[1.0] * 6,
        )
        call = Call(case, DEVICE)
        for tensor in call.keep:
            if rng.random() < 0.7 and tensor.is_contiguous():
                bits = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8)
                tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))
        call.run()
        assert_is_tree(call.out)


# ---- how it runs


def mixed_cases(rng: random.Random) -> list[Case]:
    return [
        make(rng, 4, 15, 9000, torch.bfloat16), make(rng, 7, 7, 5000, torch.float32, "gaps", 128),
        make(rng, 1, 15, 70000, torch.float16, max_nodes=256), make_lattice(rng, 5, 7, 8, True),
        make_lattice(rng, 2, 7, 32, False, 256),
    ]  # fmt: skip


def test_graphs(rng: random.Random) -> None:
    cases = mixed_cases(rng)
    want = [build(case, "cpu") for case in cases]
    calls = [Call(case, DEVICE) for case in cases]
    abi.context(DEVICE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call.run()
    for _ in range(4):
        for call in calls:
            call.out.poison()
        graph.replay()
        for call, expected in zip(calls, want):
            call.out.assert_same(expected)


def test_graphs_read_what_the_buffers_hold_now(rng: random.Random) -> None:
    case = make(rng, 3, 7, 5000)
    case = replace(case, node_budgets=[63, 5, 20])
    call = Call(case, DEVICE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    for _ in range(3):
        case = replace(
            case,
            logits=drafter_logits(rng, 3, 7, 5000, torch.bfloat16),
            node_budgets=[rng.randint(-1, 63) for _ in range(3)],
        )
        call.keep[0].copy_(case.logits)
        budgets = torch.tensor(case.node_budgets, dtype=torch.int32)
        call.keep[3].copy_(budgets)
        call.out.poison()
        graph.replay()
        call.out.assert_same(build(case, "cpu"))


def test_streams_and_contexts(rng: random.Random) -> None:
    cases = mixed_cases(rng)
    want = [build(case, "cpu") for case in cases]
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
        call.out.assert_same(expected)


def test_one_after_another_on_a_stream(rng: random.Random) -> None:
    """The next call's first kernel starts after the last one's trees are done, with the same workspace."""
    lib = abi.lib()
    cases = [make(rng, 2, 7, 5000, max_nodes=rng.choice([8, 64, 256])) for _ in range(6)]
    calls = [Call(case, DEVICE) for case in cases]
    size = lib.ffi.new("size_t *")
    needed = 0
    for call in calls:
        lib.check(lib.lib.ddt_tree_build_workspace_size(abi.context(DEVICE), call.params, size))
        needed = max(needed, size[0])
    memory = torch.full((needed,), 0xFF, dtype=torch.uint8, device=DEVICE)
    for call in calls:
        call.params.workspace = lib.ffi.cast("void *", memory.data_ptr())
        call.params.workspace_bytes = needed
    stream = lib.stream(torch.device(DEVICE))
    for _ in range(20):
        for call in calls:
            lib.check(lib.lib.ddt_tree_build(abi.context(DEVICE), call.params, stream))
    for call, case in zip(calls, cases):
        call.out.assert_same(build(case, "cpu"))


def answers(call: Call, device: str) -> tuple[int, str]:
    """Status and message without a workspace."""
    lib = abi.lib()
    status = lib.lib.ddt_tree_build(
        abi.context(device), call.params, lib.stream(torch.device(device))
    )
    text = lib.ffi.new("char[512]")
    lib.lib.ddt_last_error(text, 512, lib.ffi.NULL)
    assert (call.out.memory == -1).all()
    return status, re.sub("0x[0-9a-f]+", "somewhere", lib.ffi.string(text).decode())


def test_mistakes_get_the_same_answer_on_both_devices(rng: random.Random) -> None:
    lib = abi.lib()
    null = lib.ffi.NULL
    logits = plain(torch.randn(2, 3, 40), 8, stop_tokens=[[1], [2]])
    lattice = make_lattice(rng, 2, 3, 4, True, 8, bad=False)

    def assign(path: str, value: Any):
        *where, name = path.split(".")

        def change(call: Call) -> None:
            target = call.params
            for step in where:
                target = getattr(target, step)
            setattr(target, name, value)

        return change

    def set_item(path: str, index: int, value: int):
        tensor, name = path.split(".")
        return lambda call: getattr(getattr(call.params, tensor), name).__setitem__(index, value)

    def misalign(path: str):
        def change(call: Call) -> None:
            *where, name = path.split(".")
            target = call.params
            for step in where:
                target = getattr(target, step)
            old = getattr(target, name)
            address = int(lib.ffi.cast("uintptr_t", old)) + 1
            setattr(target, name, lib.ffi.cast(lib.ffi.typeof(old), address))

        return change

    both = [
        assign("flags", 1), assign("struct_size", 20), assign("tree", null), assign("root_tokens", null),
        assign("root_positions", null), assign("max_stop_tokens", -1), assign("max_candidates", -1),
        assign("tree.num_nodes", null), assign("tree.max_nodes", 0), assign("tree.max_nodes", 257),
        assign("tree.max_depth", 33), assign("tree.max_depth", -1), assign("tree.num_reqs", -1),
        assign("tree.struct_size", 4), assign("seeds", lib.ffi.cast("int64_t *", 64)), misalign("root_positions"),
        assign("temperatures", lib.ffi.cast("float *", 64)),
        misalign("spine_depths"),
        misalign("tree.tokens"), misalign("tree.positions"), misalign("tree.ancestor_bits"), misalign("root_tokens"),
    ]  # fmt: skip
    of_logits = [
        assign("stop_tokens", null), assign("logits.ndim", 2), assign("logits.dtype", lib.lib.DDT_DTYPE_I32),
        assign("logits.dtype", 77), assign("logits.data", null), set_item("logits.shape", 0, 3),
        set_item("logits.shape", 2, 2**31), set_item("logits.shape", 1, -1), set_item("logits.strides", 1, -1),
        misalign("logits.data"),
    ]  # fmt: skip
    of_lattices = [
        assign("max_candidates", 3), assign("candidate_tokens.dtype", lib.lib.DDT_DTYPE_I64),
        assign("candidate_scores.dtype", lib.lib.DDT_DTYPE_F16), assign("candidate_scores.ndim", 2),
        set_item("candidate_tokens.shape", 0, 1), set_item("candidate_scores.shape", 2, 3),
        set_item("transition_scores.shape", 2, 3), set_item("candidate_tokens.shape", 2, 5000),
        assign("candidate_tokens.data", null), misalign("transition_scores.data"),
    ]  # fmt: skip
    for case, changes in ((logits, both + of_logits), (lattice, both + of_lattices)):
        for i, change in enumerate(changes):
            found = []
            for device in ("cpu", DEVICE):
                call = Call(case, device)
                change(call)
                found.append(answers(call, device))
            assert found[0] == found[1] and found[0][0] != 0, (i, found)


def test_the_workspace_is_checked(rng: random.Random) -> None:
    lib = abi.lib()
    call = Call(make(rng, 2, 5, 700), DEVICE)
    size = lib.ffi.new("size_t *")
    lib.check(lib.lib.ddt_tree_build_workspace_size(abi.context(DEVICE), call.params, size))
    assert size[0] > 0
    assert answers(call, DEVICE)[0] == lib.lib.DDT_NULL_POINTER
    memory = torch.empty(size[0] + 512, dtype=torch.uint8, device=DEVICE)
    call.params.workspace = lib.ffi.cast("void *", memory.data_ptr())
    call.params.workspace_bytes = size[0] - 1
    assert answers(call, DEVICE)[0] == lib.lib.DDT_WORKSPACE_TOO_SMALL
    call.params.workspace_bytes = size[0]
    call.params.workspace = lib.ffi.cast("void *", memory.data_ptr() + 16)
    assert answers(call, DEVICE)[0] == lib.lib.DDT_MISALIGNED


@pytest.mark.sanitize
def test_small_batch(rng: random.Random) -> None:
    for dtype in FLOATS:
        check(make(rng, 3, 4, 4200, dtype, rng.choice(LAYOUTS), 64))


@pytest.mark.sanitize
def test_small_ties(rng: random.Random) -> None:
    check(plain(torch.zeros(1, 2, 5000), 256))
    check(plain(torch.randn(1, 2, 70), 256))


@pytest.mark.sanitize
def test_small_lattices(rng: random.Random) -> None:
    check(make_lattice(rng, 2, 4, 9, transitions=True))
    check(make_lattice(rng, 2, 4, 33, transitions=False, max_nodes=256))
