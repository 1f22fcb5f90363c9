# SPDX-License-Identifier: Apache-2.0
"""tree_attention on a GPU against the CPU backend and against float64 attention with explicit masks."""

import dataclasses
import random
from collections.abc import Sequence

import abi
import pytest
import torch
from vllm_ddtree.trees import TreeBatch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# of a result against float64 on the same inputs: rounding of the output, and of the softmax's weights
TOLERANCE = {F32: 2e-5, F16: 2e-3, BF16: 1e-2}


@dataclasses.dataclass
class Case:
    """A call: all tensors on one device."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    prefix_rows: torch.Tensor | None
    tree: TreeBatch
    out: torch.Tensor
    scale: float
    softcap: float = 0.0

    def to(self, device: str) -> "Case":
        def move(value):
            if isinstance(value, torch.Tensor):
                # keeps strides and gaps between elements
                if value.is_contiguous():
                    return value.to(device, copy=True)
                moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                return moved.copy_(value)
            return abi.to_device(value, device) if isinstance(value, TreeBatch) else value

        return Case(**{field.name: move(getattr(self, field.name)) for field in dataclasses.fields(self)})

    def params(self):
        lib = abi.lib()
        params = lib.params("ddt_tree_attention_params")
        for name in ("query", "key_cache", "value_cache", "block_table", "out"):
            lib.fill_tensor(getattr(params, name), getattr(self, name))
        params.query_start = abi.i32_pointer(self.query_start)
        params.seq_lens = abi.i32_pointer(self.seq_lens)
        params.prefix_rows = abi.i32_pointer(self.prefix_rows)
        self.tree_struct = abi.tree_struct(self.tree)  # cffi keeps nothing alive that a struct points to
        params.tree = self.tree_struct
        params.softmax_scale = self.scale
        params.logit_softcap = self.softcap
        return params

    def run(self, ctx=None) -> torch.Tensor:
        abi.call("tree_attention", self.params(), self.out.device, ctx)
        return self.out


def strided(shape: list[int], order: list[int], dtype: torch.dtype, pad: int = 0) -> torch.Tensor:
    """NaN, with dimension order[-1] innermost, whose rows have `pad` more elements than needed."""
    sizes = [shape[i] for i in order]
    sizes[-1] += pad
    full = torch.full(sizes, float("nan"), dtype=dtype)
    inverse = [order.index(i) for i in range(len(order))]
    return full.permute(inverse).narrow(order[-1], 0, shape[order[-1]])


def make_case(
    rng: random.Random,
    requests: list[tuple[int, int]],
    *,
    dim: int = 256,
    kv_heads: int = 2,
    group: int = 6,
    block_size: int = 16,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    prefix: bool = False,
    idle: bool = True,
    softcap: float = 0.0,
    max_nodes: int | None = None,
    key_order: Sequence[int] = (0, 2, 1, 3),
    value_order: Sequence[int] = (0, 2, 1, 3),
    pad: int = 0,
    interleaved: bool = False,
) -> Case:
    """requests: (tokens before the rows of this step, nodes); 0 nodes is a padding request. KV that nobody may see,
    and everything that is not written, is NaN."""
    dtype_kv, num_reqs = cache_dtype or dtype, len(requests)
    max_nodes = max_nodes or max(nodes for _, nodes in requests)
    trees = [abi.random_parents(rng, nodes, 32) if nodes else [] for _, nodes in requests]
    tree = abi.tree_batch(trees, max_nodes, 32, "cpu")
    prefixes = [rng.choice([0, 1, 3, 40]) if prefix else 0 for _ in requests]
    idles = [rng.choice([0, 0, 1, 5]) if idle else 0 for _ in requests]
    counts = [p + n + i for p, (_, n), i in zip(prefixes, requests, idles)]
    rows = abi.rows_of(counts, "cpu")
    seq_lens = [context + count for (context, _), count in zip(requests, counts)]
    blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(blocks_of) + 3
    order = list(range(num_blocks))
    rng.shuffle(order)
    table = torch.full((num_reqs, max(1, max(blocks_of))), 1 << 30, dtype=torch.int32)
    shape = [num_blocks, kv_heads, block_size, dim]
    if interleaved:
        both = torch.full((num_blocks, 2, block_size, kv_heads, dim), float("nan"), dtype=dtype_kv)
        key_cache, value_cache = both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)
    else:
        key_cache, value_cache = strided(shape, key_order, dtype_kv, pad), strided(shape, value_order, dtype_kv, pad)
    for r, (context, nodes) in enumerate(requests):
        taken = [order.pop() for _ in range(blocks_of[r])]
        table[r, : len(taken)] = torch.tensor(taken, dtype=torch.int32)
        visible = context + prefixes[r] + nodes  # idle rows follow
        for b in range(-(-visible // block_size)):
            size = min(block_size, visible - b * block_size)
            for cache in (key_cache, value_cache):
                cache[taken[b], :, :size] = torch.randn(kv_heads, size, dim).to(dtype_kv)
    heads = kv_heads * group
    query = torch.randn(rows.total + 2, heads, dim).to(dtype)
    out = abi.poisoned((rows.total + 2, heads, dim), out_dtype or dtype, "cpu")
    return Case(
        query, key_cache, value_cache, table, rows.query_start, torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor(prefixes, dtype=torch.int32) if prefix else None, tree, out, dim**-0.5, softcap,
    )  # fmt: skip


def expected(case: Case) -> torch.Tensor:
    """Float64 on the GPU; NaN at rows that must not be written."""
    heads, kv_heads = case.query.shape[1], case.key_cache.shape[1]
    block_size = case.key_cache.shape[2]
    out = torch.full(case.query.shape, float("nan"), dtype=torch.float64, device="cuda")
    query = case.query.cuda().double()
    key_cache, value_cache = case.key_cache.cuda(), case.value_cache.cuda()
    start = case.query_start.tolist()
    for r, nodes in enumerate(case.tree.num_nodes.tolist()):
        if nodes == 0:
            continue
        count, seq_len = start[r + 1] - start[r], int(case.seq_lens[r])
        prefix = 0 if case.prefix_rows is None else int(case.prefix_rows[r])
        first_row, root = seq_len - count, seq_len - count + prefix
        visible = torch.zeros(count, seq_len, dtype=torch.bool)
        for row in range(prefix):
            visible[row, : first_row + row + 1] = True
        parents = case.tree.parents[r].tolist()
        for node in range(nodes):
            visible[prefix + node, :root] = True
            i = node
            while i >= 0:
                visible[prefix + node, root + i] = True
                i = parents[i]
        visible = visible.cuda()
        blocks = case.block_table[r, : -(-seq_len // block_size)].cuda().long()

        def rows_of(cache, blocks=blocks, seq_len=seq_len):
            flat = cache[blocks].transpose(1, 2).reshape(-1, kv_heads, cache.shape[3])[:seq_len]
            return flat.double().repeat_interleave(heads // kv_heads, 1)

        keys, values = rows_of(key_cache), rows_of(value_cache)
        scores = torch.einsum("qhd,khd->hqk", query[start[r] : start[r + 1]], keys) * case.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores.masked_fill_(~visible, float("-inf"))
        weights = torch.softmax(scores, -1).masked_fill_(~visible, 0.0)
        lines = torch.zeros(heads, count, case.query.shape[2], dtype=torch.float64, device="cuda")
        finite = values.isfinite().all(-1).all(-1)
        lines += torch.einsum("hqk,khd->hqd", weights[..., finite], values[finite])
        for token in (~finite).nonzero().flatten().tolist():
            sees = visible[:, token]
            lines[:, sees] += weights[:, sees, token, None] * values[token, :, None]
        lines[:, prefix + nodes :] = 0.0
        out[start[r] : start[r + 1]] = lines.transpose(0, 1)
    return out


def check(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    got, want = got.double().cuda(), want.double().cuda()
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0)
    assert torch.equal(got[want.abs().amax(-1) == 0], want[want.abs().amax(-1) == 0])
    # row by row, so that one wrong row among many right ones is seen
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
    worst = float(error.max())
    assert worst < TOLERANCE[dtype], f"relative error {worst} at {divmod(int(error.argmax()), error.shape[-1])}"


def run_both(case: Case, cpu: bool = True) -> None:
    # the weights have the precision of the query
    dtype = max(case.query.dtype, case.out.dtype, key=TOLERANCE.get)
    want = expected(case)
    on_gpu = case.to("cuda")
    check(on_gpu.run(), want, dtype)
    portable = case.to("cuda")
    check(portable.run(abi.context("cuda", True)), want, dtype)
    if cpu:
        check(case.run(), want, dtype)  # the references agree
        check(on_gpu.out, case.out, dtype)


CONTEXTS = [0, 1, 15, 16, 17, 31, 33, 127, 500]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_matches_references(device, rng, dtype, dim):
    requests = [(context, rng.randint(1, 24)) for context in CONTEXTS]
    run_both(make_case(rng, requests, dim=dim, dtype=dtype, kv_heads=2, group=rng.choice([1, 2, 6, 8])))


@pytest.mark.parametrize("block_size", [1, 16, 48, 784, 1056])
def test_block_sizes(device, rng, block_size):
    requests = [(context, rng.randint(1, 17)) for context in (0, 5, 783, 1600)]
    run_both(make_case(rng, requests, block_size=block_size, interleaved=True), cpu=block_size == 784)


@pytest.mark.parametrize("nodes", [1, 2, 11, 22, 31, 64, 65, 128, 255, 256])
def test_node_counts(device, rng, nodes):
    run_both(make_case(rng, [(rng.randint(0, 3000), nodes)], block_size=784), cpu=False)


@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_groups(device, rng, group):
    run_both(make_case(rng, [(100, 9), (7, 40)], group=group, dim=128))


@pytest.mark.parametrize("dim", [64, 256])
def test_rows_before_the_root(device, rng, dim):
    requests = [(context, rng.randint(1, 20)) for context in (0, 3, 31, 64, 400)]
    run_both(make_case(rng, requests, dim=dim, prefix=True))


def test_mixed_lengths_and_padding_requests(device, rng):
    requests = [(9000, 16), (0, 0), (3, 1), (0, 0), (700, 5), (0, 16), (4100, 16)]
    run_both(make_case(rng, requests, block_size=1056, max_nodes=16), cpu=False)


def test_many_requests(device, rng):
    requests = [(rng.randint(0, 300), rng.choice([0, 1, 2, 4])) for _ in range(70)]
    run_both(make_case(rng, requests, dim=128, max_nodes=7))


@pytest.mark.parametrize("dim", [64, 256])
def test_softcap(device, rng, dim):
    case = make_case(rng, [(50, 12), (300, 3)], dim=dim, softcap=2.0)
    case.scale = -0.3
    run_both(case)


@pytest.mark.parametrize("scale", [0.25, 2.0])
def test_maxima_that_grow(device, rng, scale):
    # by less than what makes the kernels rescale, and by more
    case = make_case(rng, [(900, 12), (70, 3)])
    case.scale = scale
    run_both(case)


GENERIC = {
    "f32": dict(dtype=F32),
    "f32 cache": dict(dtype=BF16, cache_dtype=F32),
    "f32 out": dict(dtype=BF16, out_dtype=F32),
    "f16 out": dict(dtype=BF16, out_dtype=F16),
    "dim-major keys": dict(dtype=BF16, key_order=[0, 1, 3, 2]),
    "dim-major both": dict(dtype=F16, key_order=[0, 1, 3, 2], value_order=[1, 3, 0, 2]),
    "unaligned rows": dict(dtype=BF16, pad=3),
    "heads first": dict(dtype=BF16, key_order=[1, 0, 2, 3], value_order=[0, 1, 2, 3], pad=8),
}


@pytest.mark.parametrize("dim", [32, 256])
@pytest.mark.parametrize("name", GENERIC)
def test_every_dtype_and_stride(device, rng, name, dim):
    requests = [(0, 3), (40, 17), (0, 0), (333, 5)]
    run_both(make_case(rng, requests, dim=dim, prefix=True, **GENERIC[name]))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_unseen_nodes_never_reach_a_row(device, rng, dtype, value):
    case = make_case(rng, [(45, 20), (200, 8)], dtype=dtype, prefix=True)
    start, block_size = case.query_start.tolist(), case.key_cache.shape[2]
    for r, nodes in enumerate(case.tree.num_nodes.tolist()):
        root = int(case.seq_lens[r]) - (start[r + 1] - start[r]) + int(case.prefix_rows[r])
        for node in rng.sample(range(1, nodes), 3):
            token = root + node
            block = int(case.block_table[r, token // block_size])
            case.value_cache[block, 0, token % block_size, rng.randrange(256)] = value
            case.value_cache[block, 1, token % block_size, rng.randrange(256)] = -value
    want = expected(case)
    for portable in (False, True):
        moved = case.to("cuda")
        got = moved.run(abi.context("cuda", portable)).double()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
        assert want.isfinite().any(-1).any(-1).sum() > 20
        check(torch.where(got.isinf(), 0.0, got), torch.where(want.isinf(), 0.0, want), dtype)


def test_nan_keys_of_unseen_nodes(device, rng):
    case = make_case(rng, [(45, 20)], idle=False)
    leaf = 19
    token = 45 + leaf
    case.key_cache[int(case.block_table[0, token // 16]), :, token % 16] = float("nan")
    got = case.to("cuda").run()
    assert got[:leaf].isfinite().all()
    assert got[leaf].isnan().all()


def hostile(case: Case, what: str) -> Case:
    case = case.to("cuda")
    if what == "blocks":
        case.block_table[:, ::2] = torch.tensor([-1, 1 << 30, -(1 << 31), case.key_cache.shape[0]]).repeat(
            case.block_table.shape[1]
        )[: case.block_table[:, ::2].shape[1]].to(case.block_table)
    elif what == "seq_lens":
        case.seq_lens.copy_(torch.tensor([-5, 0, (1 << 31) - 1, 1], dtype=torch.int32))
    elif what == "query_start":
        case.query_start.copy_(torch.tensor([-7, 1 << 30, 3, -1, 40], dtype=torch.int32))
    elif what == "num_nodes":
        case.tree.num_nodes.copy_(torch.tensor([-1, 1 << 30, 300, 2], dtype=torch.int32))
    elif what == "prefix_rows":
        case.prefix_rows = torch.tensor([-1, 1 << 30, 3, -(1 << 31)], dtype=torch.int32, device="cuda")
    elif what == "ancestor_bits":
        case.tree.ancestor_bits.fill_(-1)
    return case


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("what", ["blocks", "seq_lens", "query_start", "num_nodes", "prefix_rows", "ancestor_bits"])
def test_hostile_device_values_do_no_harm(device, rng, what, dtype):
    case = hostile(make_case(rng, [(30, 7), (5, 12), (100, 3), (64, 9)], dim=64, dtype=dtype), what)
    case.run()
    torch.cuda.synchronize()
    if what != "query_start":
        assert case.out[-2:].isnan().all()  # rows of no request


def test_later_nodes_and_missing_blocks_are_not_seen(device, rng):
    case = make_case(rng, [(40, 9)], idle=False)
    all_bits = case.to("cuda")
    all_bits.tree.ancestor_bits.fill_(-1)  # a chain, once later nodes are cut
    for i in range(9):
        case.tree.parents[0, i] = i - 1
    check(all_bits.run(), expected(case), BF16)
    # the block of tokens 16 to 31 is out of range: as if they were not there
    missing = case.to("cuda")
    missing.tree.ancestor_bits.fill_(-1)
    missing.block_table[0, 1] = case.key_cache.shape[0]
    shorter = make_case(rng, [(24, 9)], idle=False).to("cpu")
    shorter.query.copy_(case.query)
    for name in ("key_cache", "value_cache"):
        old, new = getattr(case, name), getattr(shorter, name)
        for to, source in ((0, 0), (1, 2), (2, 3)):
            size = (33 - to * 16) if to == 2 else 16
            new[shorter.block_table[0, to], :, :size] = old[case.block_table[0, source], :, :size]
    for i in range(9):
        shorter.tree.parents[0, i] = i - 1
    check(missing.run(), expected(shorter), BF16)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_small_for_the_sanitizer(device, rng, dtype):
    case = make_case(rng, [(70, 5), (0, 3)], dim=64, dtype=dtype, kv_heads=1, group=3, prefix=True)
    check(case.to("cuda").run(), expected(case), dtype)


@pytest.mark.parametrize("portable", [False, True])
def test_graphs_streams_and_contexts_give_the_same_bits(device, rng, portable):
    cases = [make_case(rng, [(2000, 16), (90, 16)], block_size=784).to("cuda") for _ in range(2)]
    lib = abi.lib()
    contexts = [abi.context("cuda", portable), lib.new_context(torch.device("cuda"), portable)]
    eager = [case.run(contexts[0]).clone() for case in cases]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    for case, stream, ctx in zip(cases, streams, contexts):
        case.out.view(torch.uint8).fill_(0xFF)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                case.run(ctx)
    torch.cuda.synchronize()
    for case, want in zip(cases, eager):
        assert torch.equal(case.out.view(torch.int16), want.view(torch.int16))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        cases[0].run(contexts[1])
    # a captured call reads lengths and trees when it is replayed
    cases[0].out.view(torch.uint8).fill_(0xFF)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(cases[0].out.view(torch.int16), eager[0].view(torch.int16))
    cases[0].seq_lens.sub_(600)
    cases[0].seq_lens.clamp_(min=40)
    again = cases[0].run(contexts[0]).clone()
    cases[0].out.view(torch.uint8).fill_(0xFF)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(cases[0].out.view(torch.int16), again.view(torch.int16))


@pytest.mark.parametrize(
    "what", ["flags", "head dim", "dtype", "scale", "softcap", "heads", "null", "workspace", "misaligned workspace"]
)
def test_refusals_are_those_of_the_cpu(device, rng, what):
    case = make_case(rng, [(20, 4)], dim=64, kv_heads=1, group=2)
    lib = abi.lib()

    def refuse(where: str) -> tuple[int, str]:
        moved = case.to(where)
        params = moved.params()
        if what == "flags":
            params.flags = 1
        elif what == "head dim":
            params.query.shape[2] = params.key_cache.shape[3] = params.value_cache.shape[3] = params.out.shape[2] = 48
        elif what == "dtype":
            params.query.dtype = lib.lib.DDT_DTYPE_F16
        elif what == "scale":
            params.softmax_scale = float("inf")
        elif what == "softcap":
            params.logit_softcap = -1.0
        elif what == "heads":
            params.query.shape[1] = 1
        elif what == "null":
            params.seq_lens = lib.ffi.NULL
        before = moved.out.clone()
        ctx = abi.context(where)
        if what.endswith("workspace"):
            memory = torch.empty(1 << 20, dtype=torch.uint8, device=where)
            params.workspace = lib.ffi.cast("void *", memory.data_ptr() + (what != "workspace"))
            params.workspace_bytes = 8
        status = lib.lib.ddt_tree_attention(ctx, params, lib.stream(torch.device(where)))
        text = lib.ffi.new("char[1024]")
        _ = lib.lib.ddt_last_error(text, 1024, lib.ffi.NULL)
        assert torch.equal(moved.out.view(torch.int16), before.view(torch.int16))
        return status, lib.ffi.string(text).decode()

    gpu = refuse("cuda")
    if what.endswith("workspace"):
        assert gpu[0] == (lib.lib.DDT_WORKSPACE_TOO_SMALL if what == "workspace" else lib.lib.DDT_MISALIGNED)
    else:
        assert gpu[0] != 0
        assert gpu == refuse("cpu")
