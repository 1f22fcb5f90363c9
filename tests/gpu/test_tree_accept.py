# SPDX-License-Identifier: Apache-2.0
"""tree_accept on a GPU against the CPU backend and against a walk over choices made in float64."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import abi
import pytest
import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLAG_NONFINITE = 2
OTHER_FLAG = 4
# What a sampled row's best sum must be ahead by, so that the last bits of log cannot matter.
GAP = 1e-3


@dataclass
class Case:
    """Inputs of a call on the CPU; `choices` are the nodes' tokens by float64, -1 where a row is nobody's."""

    batch: Any
    query_start: list[int]
    logits: torch.Tensor
    choices: list[int]
    temperatures: list[float] | None = None
    seeds: list[int] | None = None
    node_tokens: torch.Tensor | None = None


def murmur3(words: list[torch.Tensor]) -> torch.Tensor:
    """MurmurHash3_x86_32 of 32-bit words, each an int64 tensor."""
    mask = 0xFFFFFFFF

    def rotate(x: torch.Tensor, by: int) -> torch.Tensor:
        return (x << by | x >> (32 - by)) & mask

    hash_ = torch.zeros_like(words[-1])
    for word in words:
        word = rotate(word * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
        hash_ = (rotate(hash_ ^ word, 13) * 5 + 0xE6546B64) & mask
    hash_ = hash_ ^ 4 * len(words)
    hash_ = (hash_ ^ hash_ >> 16) * 0x85EBCA6B & mask
    hash_ = (hash_ ^ hash_ >> 13) * 0xC2B2AE35 & mask
    return hash_ ^ hash_ >> 16


def noise(seed: int, position: int, vocab: int) -> torch.Tensor:
    """Gumbel noise of every token in float64."""
    words = [torch.tensor(x & 0xFFFFFFFF) for x in (seed, seed >> 32, position)]
    uniform = (murmur3([*words, torch.arange(vocab)]).double() + 0.5) / 2**32
    return -torch.log(-torch.log1p(-uniform))


def choose(values: torch.Tensor) -> int:
    """The largest, the lowest id among equals, never a NaN; 0 if nothing is above -inf."""
    values = torch.where(values.isnan(), -math.inf, values.double())
    best = values.max()
    return int((values == best).nonzero()[0, 0]) if best > -math.inf else 0


def layout(values: torch.Tensor, kind: str) -> torch.Tensor:
    """The same values in other memory."""
    rows, vocab = values.shape
    if kind == "padded":  # rows that start anywhere
        memory = torch.full((rows * (vocab + 3) + 5,), math.nan, dtype=values.dtype)
        view = memory[5:].view(rows, vocab + 3)[:, :vocab]
    elif kind == "transposed":
        view = torch.full((vocab, rows + 1), math.nan, dtype=values.dtype)[:, :rows].T
    elif kind == "gaps":
        view = torch.full((rows, vocab, 2), math.nan, dtype=values.dtype)[..., 1]
    else:
        view = torch.empty_like(values)
    return view.copy_(values)


def to(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on the device with the same strides and the same alignment."""
    offset = tensor.storage_offset()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = torch.full((offset + extent,), math.nan, dtype=tensor.dtype, device=device)
    view = memory.as_strided(tensor.shape, tensor.stride(), offset)
    return view.copy_(tensor)


def make(
    rng: random.Random,
    trees: list[list[int]],
    max_nodes: int,
    max_depth: int,
    vocab: int,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "contiguous",
    sampled: bool = False,
    idle: int = 2,
    logits: torch.Tensor | None = None,
) -> Case:
    """Trees over given parents whose tokens follow the target's choices now and then."""
    query_start = [1]
    for tree in trees:
        query_start.append(query_start[-1] + len(tree) + rng.randint(0, idle))
    rows = query_start[-1] + 2
    values = torch.randn(rows, vocab).to(dtype) if logits is None else logits.clone()
    mine = [start + node for start, tree in zip(query_start, trees) for node in range(len(tree))]
    for row in set(range(rows)) - set(mine):
        values[row] = math.nan if row % 2 else math.inf  # nobody's
    temperatures = [rng.choice([0.0, 0.3, 1.0]) for _ in trees] if sampled else None
    seeds = [rng.getrandbits(64) - 2**63 for _ in trees] if sampled else None
    positions = [rng.randint(0, 2**33) for _ in trees]
    choices = [-1] * rows
    for r, tree in enumerate(trees):
        depths: list[int] = []
        for node, parent in enumerate(tree):
            depths.append(0 if parent < 0 else depths[parent] + 1)
            row = query_start[r] + node
            total = values[row].double()
            if sampled and temperatures[r] != 0.0:
                total = total + noise(seeds[r], positions[r] + depths[node], vocab)
                if vocab > 1 and total.isfinite().all():
                    first, second = total.topk(2).values
                    if first - second < GAP:
                        values[row, choose(total)] += 1
            choices[row] = choose(total)
    tokens: dict[tuple[int, int], int] = {}
    for r, tree in enumerate(trees):
        for node in range(len(tree)):
            children = [i for i, parent in enumerate(tree) if parent == node]
            wanted = choices[query_start[r] + node]
            for child in children:
                tokens[r, child] = vocab + child  # nobody's choice
            if children and rng.random() < 0.8:
                tokens[r, rng.choice(children)] = wanted
    batch = abi.tree_batch(
        trees,
        max_nodes,
        max_depth,
        "cpu",
        lambda r, i: tokens.get((r, i), 0),
        lambda r: positions[r],
    )
    return Case(batch, query_start, layout(values, kind), choices, temperatures, seeds)


def expected(case: Case) -> dict[str, list]:
    """The walk by hand, over parents."""
    batch, depth_limit = case.batch, case.batch.shape.max_depth
    out: dict[str, list] = {name: [] for name in (*OUTPUTS, "flags")}
    for r in range(batch.shape.num_reqs):
        start, n = case.query_start[r], int(batch.num_nodes[r])
        path, choices = [], []
        node = 0
        while n:
            token = (
                case.choices[start + node]
                if case.node_tokens is None
                else int(case.node_tokens[start + node])
            )
            choices.append(token)
            below = [
                i
                for i in range(n)
                if int(batch.parents[r, i]) == node and int(batch.tokens[r, i]) == token
            ]
            if not below:
                break
            node = below[0]
            path.append(node)
        visited = [0, *path] if n else []
        bad = case.node_tokens is None and any(
            bool(
                case.logits[start + i].isnan().any()
                or not (case.logits[start + i] > -math.inf).any()
            )
            for i in visited
        )
        out["flags"].append(OTHER_FLAG | (FLAG_NONFINITE if bad else 0))
        out["num_accepted"].append(len(path) if n else -1)
        out["accepted_nodes"].append(path + [-1] * (depth_limit - len(path)))
        out["output_tokens"].append(choices + [-1] * (depth_limit + 1 - len(choices)))
        out["accepted_rows"].append(
            [start + i for i in visited] + [-1] * (depth_limit + 1 - len(visited))
        )
        out["next_positions"].append(int(batch.positions[r, 0]) + len(path) + 1 if n else 0)
        out["num_rejected"].append(case.query_start[r + 1] - start - 1 - len(path) if n else 0)
    return out


OUTPUTS = {
    "num_accepted": (torch.int32, lambda r, d: (r,)),
    "accepted_nodes": (torch.int32, lambda r, d: (r, d)),
    "output_tokens": (torch.int64, lambda r, d: (r, d + 1)),
    "accepted_rows": (torch.int32, lambda r, d: (r, d + 1)),
    "next_positions": (torch.int64, lambda r, d: (r,)),
    "num_rejected": (torch.int32, lambda r, d: (r,)),
}
REQUIRED = ("num_accepted", "accepted_nodes", "output_tokens")


class Call:
    """A case on a device, its outputs and its parameters, which stay where they are for graphs."""

    def __init__(self, case: Case, device: str, outputs: tuple[str, ...] = tuple(OUTPUTS)):
        self.device = device
        self.batch = abi.to_device(case.batch, device)
        self.batch.flags.fill_(OTHER_FLAG)
        shape = case.batch.shape
        self.query_start = torch.tensor(case.query_start, dtype=torch.int32, device=device)
        self.out = {
            name: abi.poisoned(
                OUTPUTS[name][1](shape.num_reqs, shape.max_depth), OUTPUTS[name][0], device
            )
            for name in outputs
        }
        lib = abi.lib()
        self.params = lib.params("ddt_tree_accept_params")
        self.tree = abi.tree_struct(self.batch)
        self.params.tree = self.tree
        self.params.query_start = abi.i32_pointer(self.query_start)
        if case.node_tokens is None:
            self.logits = to(case.logits, device)
            lib.fill_tensor(self.params.logits, self.logits)
        else:
            self.node_tokens = case.node_tokens.to(device)
            self.params.node_tokens = abi.i64_pointer(self.node_tokens)
        if case.temperatures is not None:
            self.temperatures = torch.tensor(case.temperatures, dtype=torch.float32, device=device)
            self.seeds = torch.tensor(case.seeds, dtype=torch.int64, device=device)
            self.params.temperatures = abi.f32_pointer(self.temperatures)
            self.params.seeds = abi.i64_pointer(self.seeds)
        for name, tensor in self.out.items():
            pointer = abi.i32_pointer if tensor.dtype == torch.int32 else abi.i64_pointer
            setattr(self.params, name, pointer(tensor))

    def run(self, ctx: Any = None, check: bool = True) -> int:
        return abi.call("tree_accept", self.params, self.device, ctx, check)

    def results(self) -> dict[str, list]:
        return {name: tensor.tolist() for name, tensor in self.out.items()} | {
            "flags": self.batch.flags.tolist()
        }


def outputs(case: Case, device: str, ctx: Any = None) -> dict[str, list]:
    call = Call(case, device)
    call.run(ctx)
    return call.results()


def check(case: Case) -> None:
    want = expected(case)
    assert outputs(case, "cuda") == want
    assert outputs(case, "cpu") == want


def forest(rng: random.Random, requests: int, max_nodes: int, max_depth: int) -> list[list[int]]:
    """Trees of any size; some requests are padding."""
    sizes = [0 if rng.random() < 0.2 else rng.randint(1, max_nodes) for _ in range(requests)]
    return [abi.random_parents(rng, size, max_depth) if size else [] for size in sizes]


@pytest.mark.parametrize("kind", ["contiguous", "padded", "transposed", "gaps"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_every_dtype_and_layout(
    rng: random.Random, kind: str, dtype: torch.dtype, sampled: bool
) -> None:
    vocab = rng.choice([257, 1000, 4099])
    check(make(rng, forest(rng, 5, 20, 6), 22, 7, vocab, dtype, kind, sampled))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_large_vocabulary(rng: random.Random, sampled: bool) -> None:
    trees = [abi.random_parents(rng, 3, 4), abi.random_parents(rng, 2, 4)]
    check(make(rng, trees, 8, 6, 248320 - rng.randint(0, 9), torch.bfloat16, "contiguous", sampled))


@pytest.mark.parametrize("vocab", [1, 2, 7, 8, 9, 31, 2048, 2049])
def test_small_vocabularies(rng: random.Random, vocab: int) -> None:
    for dtype in FLOATS:
        check(make(rng, forest(rng, 3, 9, 4), 9, 4, vocab, dtype, "padded", sampled=True))


@pytest.mark.parametrize("shape", ["roots", "star", "chain", "full"])
def test_extreme_trees(rng: random.Random, shape: str) -> None:
    trees = {
        "roots": [[-1]] * 40,
        "star": [[-1] + [0] * 255],
        "chain": [list(range(-1, 32))],
        "full": [abi.random_parents(rng, 256, 32) for _ in range(3)],
    }[shape]
    for sampled in (False, True):
        check(make(rng, trees, 256, 32, 97, sampled=sampled))


def test_many_requests(rng: random.Random) -> None:
    check(make(rng, forest(rng, 300, 6, 3), 6, 3, 300, sampled=True))


def test_no_requests(rng: random.Random) -> None:
    check(make(rng, [], 4, 3, 10))


def test_tokens_of_the_caller(rng: random.Random) -> None:
    case = make(rng, forest(rng, 6, 30, 8), 30, 8, 50)
    tokens = torch.tensor(case.choices)
    # only all 64 bits of a token may match
    far = torch.tensor([rng.random() < 0.2 for _ in case.choices])
    check(replace(case, node_tokens=torch.where(far, tokens + (1 << 40), tokens)))


def test_ties_and_numbers_that_never_win(rng: random.Random) -> None:
    """Rows made of few values, so that equals abound, across lanes, warps and blocks."""
    for dtype in FLOATS:
        trees = [[-1]] * 48
        vocab = 20011
        palette = torch.tensor([1.0, 1.0, -0.0, 0.0, -math.inf, -3.0])
        rows = palette[torch.randint(0, 6, (200, vocab))]
        for row in range(200):
            top = rng.choice([math.inf, 2.0, 0.0, -0.0, -math.inf])
            if top <= 0:
                rows[row] = (
                    rows[row].clamp(max=top) if top else torch.where(rows[row] > 0, -1.0, rows[row])
                )
            for _ in range(rng.randint(0, 3)):
                rows[row, rng.randrange(vocab)] = top
            if row % 3 == 0:
                rows[row, rng.randrange(vocab)] = math.nan
            if row % 10 == 0:
                rows[row] = -math.inf
            if row % 14 == 0:
                rows[row] = math.nan
        kind = rng.choice(["contiguous", "padded", "transposed"])
        check(
            make(rng, trees, 1, 0, vocab, dtype, kind, idle=1, logits=rows[: 48 * 2 + 3].to(dtype))
        )


def test_equal_sums_go_to_the_lowest_id() -> None:
    """Logits so large that the noise is rounded away."""
    vocab = 30000
    logits = torch.full((1, vocab), 3e8)
    logits[0, :17] = 0.0
    logits[0, 20:23] = math.nan
    batch = abi.tree_batch([[-1]], 1, 0, "cpu")
    case = Case(batch, [0, 1], logits, [17], temperatures=[1.0], seeds=[5])
    check(case)


def test_filtered_rows(rng: random.Random) -> None:
    """Rows after top-k: almost everything is -inf."""
    rows = torch.full((40, 5000), -math.inf)
    for row in rows:
        kept = torch.randperm(5000)[: rng.randint(1, 20)]
        row[kept] = torch.randn(len(kept)) * 3
    check(make(rng, [[-1]] * 30, 1, 0, 5000, torch.float32, sampled=True, idle=0, logits=rows[:33]))


def test_flags_of_visited_rows_only(rng: random.Random) -> None:
    case = make(rng, [[-1, 0, 0]] * 4, 3, 2, 40, torch.float32, idle=0)
    for r in range(4):
        # request r: a NaN in the row of node r - 1
        if r:
            case.logits[case.query_start[r] + r - 1, 7] = math.nan
    # the walk goes to node 1 or stops; NaN never wins, so the choices may change
    case.choices = [choose(row) for row in case.logits]
    for r in range(4):
        case.batch.tokens[r, 1] = case.choices[case.query_start[r]]
        case.batch.tokens[r, 2] = 1000
    check(case)
    assert outputs(case, "cuda")["flags"] == [4, 6, 6, 4]
    call = Call(case, "cuda")
    call.tree.flags = abi.lib().ffi.NULL
    call.run()
    assert call.batch.flags.tolist() == [4] * 4


def test_trees_may_be_cut_after_the_build(rng: random.Random) -> None:
    case = make(rng, [abi.random_parents(rng, 40, 8) for _ in range(8)], 40, 8, 60, sampled=True)
    for r in range(8):
        case.batch.num_nodes[r] = rng.randint(0, 40)
    check(case)


def test_optional_outputs_may_be_absent(rng: random.Random) -> None:
    case = make(rng, forest(rng, 4, 9, 4), 9, 4, 60)
    call = Call(case, "cuda", REQUIRED)
    call.tree.positions = abi.lib().ffi.NULL
    call.run()
    want = expected(case)
    assert call.results() == {name: want[name] for name in (*REQUIRED, "flags")}
    # a caller that was compiled before they existed
    call = Call(case, "cuda", REQUIRED)
    call.params.struct_size = abi.lib().ffi.offsetof("ddt_tree_accept_params", "temperatures")
    call.run()
    assert call.results() == {name: want[name] for name in (*REQUIRED, "flags")}


@pytest.mark.sanitize
def test_hostile_values_on_the_device(rng: random.Random) -> None:
    """Links, rows and counts that the CPU backend refuses: nothing out of bounds, every output written."""
    case = make(rng, [abi.random_parents(rng, 12, 5) for _ in range(6)], 12, 5, 40, sampled=True)
    far = [-(2**31), -7, 0, 5, 12, 300, 2**31 - 1]
    for _ in range(30):
        call = Call(case, "cuda")
        for name in ("first_child", "next_sibling", "num_nodes"):
            field = getattr(call.batch, name)
            at = torch.rand(field.shape, device="cuda") < 0.3
            field.copy_(
                torch.where(
                    at, torch.tensor(rng.choices(far, k=field.numel())).view_as(field).cuda(), field
                )
            )
        if rng.random() < 0.5:
            call.query_start[rng.randrange(7)] = rng.choice(far)
        call.batch.tokens.copy_(torch.randint(0, 40, call.batch.tokens.shape))
        call.run()
        out = {name: tensor.cpu() for name, tensor in call.out.items()}
        for r in range(6):
            accepted = int(out["num_accepted"][r])
            assert -1 <= accepted <= 5
            nodes, count = out["accepted_nodes"][r].tolist(), max(accepted, 0)
            assert nodes[:count] == sorted(set(nodes[:count])) and set(nodes[count:]) <= {-1}
            tokens = out["output_tokens"][r].tolist()
            assert all(0 <= token < 40 for token in tokens[: accepted + 1])
            assert set(tokens[accepted + 1 :]) <= {-1}
            assert set(out["accepted_rows"][r].tolist()[accepted + 1 :]) <= {-1}


def test_bad_links_count_as_none(rng: random.Random) -> None:
    case = make(rng, [list(range(-1, 5))], 6, 5, 40, idle=0)
    for node in range(1, 6):
        case.batch.tokens[0, node] = case.choices[case.query_start[0] + node - 1]
    check(case)
    assert outputs(case, "cuda")["num_accepted"] == [5]
    for link in (3, 0, 6, 2**31 - 1, -5):
        call = Call(case, "cuda")
        call.batch.first_child[0, 3] = link
        call.run()
        assert call.results()["num_accepted"] == [3]


def test_paths_end_at_max_depth(rng: random.Random) -> None:
    case = make(rng, [list(range(-1, 5))], 6, 5, 40, idle=0)
    for node in range(1, 6):
        case.batch.tokens[0, node] = case.choices[case.query_start[0] + node - 1]
    call = Call(case, "cuda")
    call.tree.max_depth = 3
    call.run()
    out = call.results()
    assert out["num_accepted"] == [3]
    assert call.out["output_tokens"].flatten().tolist()[:4] == case.choices[1:5]
    # the rest of the memory, which was for a depth of 5, is poison
    assert call.out["accepted_nodes"].flatten().tolist() == [1, 2, 3, -1, -1]
    assert call.out["output_tokens"].flatten().tolist()[4:] == [-1, -1]


def test_graphs_streams_and_contexts(rng: random.Random) -> None:
    cases = [make(rng, forest(rng, 8, 30, 8), 30, 8, 9000, dtype, sampled=True) for dtype in FLOATS]
    want = [outputs(case, "cuda") for case in cases]
    calls = [Call(case, "cuda") for case in cases]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for call in calls:
            call.run()
    for _ in range(3):
        for call in calls:
            for tensor in call.out.values():
                tensor.view(torch.uint8).fill_(0xFF)
            call.batch.flags.fill_(OTHER_FLAG)
        graph.replay()
        assert [call.results() for call in calls] == want

    streams = [torch.cuda.Stream() for _ in cases]
    contexts = [abi.lib().new_context(torch.device("cuda")) for _ in cases]
    calls = [Call(case, "cuda") for case in cases]
    torch.cuda.synchronize()
    for _ in range(5):
        for call, stream, ctx in zip(calls, streams, contexts):
            with torch.cuda.stream(stream):
                call.run(ctx)
    torch.cuda.synchronize()
    assert [call.results() for call in calls] == want


def test_mistakes_get_the_same_answer_on_both_devices(rng: random.Random) -> None:
    case = make(rng, [[-1, 0]], 2, 1, 20, torch.float32, sampled=True, idle=0)
    lib = abi.lib()
    null = lib.ffi.NULL

    def answers(change) -> list[tuple[int, str]]:
        found = []
        for device in ("cpu", "cuda"):
            call = Call(case, device)
            change(call)
            stream = lib.stream(torch.device(device))
            status = lib.lib.ddt_tree_accept(abi.context(device), call.params, stream)
            text = lib.ffi.new("char[512]")
            lib.lib.ddt_last_error(text, 512, null)
            found.append((status, lib.ffi.string(text).decode()))
            assert all((tensor.view(torch.uint8) == 0xFF).all() for tensor in call.out.values())
        return found

    def assign(name: str, value: Any, where: str = "params"):
        return lambda call: setattr(getattr(call, where), name, value)

    def ndim(call: Call) -> None:
        call.params.logits.ndim = 3

    def dtype(call: Call) -> None:
        call.params.logits.dtype = lib.lib.DDT_DTYPE_I32

    def vocabulary(call: Call) -> None:
        call.params.logits.shape[1] = 0

    for change in (
        assign("flags", 1), assign("query_start", null), assign("num_accepted", null), assign("accepted_nodes", null),
        assign("output_tokens", null), assign("seeds", null), assign("temperatures", null), assign("tree", null),
        assign("struct_size", 20), assign("tokens", null, "tree"), assign("first_child", null, "tree"),
        assign("next_sibling", null, "tree"), assign("num_nodes", null, "tree"), assign("positions", null, "tree"),
        assign("max_nodes", 300, "tree"), ndim, dtype, vocabulary,
    ):  # fmt: skip
        cpu, cuda = answers(change)
        assert cpu == cuda and cpu[0] != 0, (cpu, cuda)


def test_workspace_is_checked(rng: random.Random) -> None:
    case = make(rng, [[-1, 0]], 2, 1, 20)
    lib = abi.lib()
    size = lib.ffi.new("size_t *")
    call = Call(case, "cuda")

    def run() -> int:
        return lib.lib.ddt_tree_accept(
            abi.context("cuda"), call.params, lib.stream(torch.device("cuda"))
        )

    lib.check(lib.lib.ddt_tree_accept_workspace_size(abi.context("cuda"), call.params, size))
    assert size[0] > 0
    assert run() == lib.lib.DDT_NULL_POINTER
    memory = torch.empty(size[0] + 512, dtype=torch.uint8, device="cuda")
    call.params.workspace = lib.ffi.cast("void *", memory.data_ptr())
    call.params.workspace_bytes = size[0] - 1
    assert run() == lib.lib.DDT_WORKSPACE_TOO_SMALL
    call.params.workspace_bytes = size[0]
    assert run() == lib.lib.DDT_OK


@pytest.mark.sanitize
def test_small_batch(rng: random.Random) -> None:
    for dtype in FLOATS:
        check(
            make(
                rng,
                forest(rng, 3, 9, 4),
                9,
                4,
                2100,
                dtype,
                rng.choice(["contiguous", "padded"]),
                sampled=True,
            )
        )


def test_tokens_are_those_of_vllm(rng: random.Random) -> None:
    """Every row of a batch against vLLM's own kernel: not even near ties differ."""
    vllm = pytest.importorskip("peers.vllm")
    if vllm.available():
        pytest.skip(vllm.available())
    vocab, rows = 151936, 256
    for dtype in (torch.bfloat16, torch.float32):
        logits = (torch.randn(rows, vocab) * rng.choice([0.3, 1.0, 5.0])).to(dtype)
        seed, first = rng.getrandbits(64) - 2**63, rng.randrange(2**32)
        peer = vllm.Sample(logits.cuda(), temperature=1.0, seed=seed)
        peer.positions += first
        peer()
        batch = abi.tree_batch(
            [[-1]] * rows, 1, 0, "cpu", root_position=lambda r, first=first: first + r
        )
        case = Case(
            batch, list(range(rows + 1)), logits, [], temperatures=[1.0] * rows, seeds=[seed] * rows
        )
        assert [tokens[0] for tokens in outputs(case, "cuda")["output_tokens"]] == peer.out.tolist()


def test_samples_follow_the_distribution() -> None:
    """Chi-squared over 8 tokens: 200,000 seeds and positions."""
    probabilities = torch.tensor([0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01], dtype=torch.float64)
    rows, rounds = 4000, 50
    logits = probabilities.log().float().repeat(rows, 1)
    counts = torch.zeros(8, dtype=torch.float64)
    for round_ in range(rounds):
        batch = roots(rows, round_ * 1000)
        case = Case(batch, list(range(rows + 1)), logits, [], [0.7] * rows, list(range(rows)))
        call = Call(case, "cuda", REQUIRED)
        call.run()
        counts += torch.bincount(call.out["output_tokens"].flatten().cpu(), minlength=8)
    total = rows * rounds
    statistic = float(((counts - total * probabilities) ** 2 / (total * probabilities)).sum())
    assert statistic < 35, counts  # 7 degrees of freedom: p = 1e-5


def roots(count: int, position: int) -> Any:
    """Trees that are their root alone."""
    batch = abi.TreeBatch.zeros(abi.TreeShape(count, 1, 0), torch.device("cpu"))
    batch.num_nodes.fill_(1)
    batch.first_child.fill_(-1)
    batch.next_sibling.fill_(-1)
    batch.positions.fill_(position)
    return batch
