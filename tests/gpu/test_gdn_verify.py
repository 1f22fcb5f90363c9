# SPDX-License-Identifier: Apache-2.0
"""gdn_verify on a GPU against the CPU backend and against the recurrence of each path in float64."""

import random
from dataclasses import dataclass
from typing import Any

import abi
import pytest
import torch

HEAD = 128
WINDOW = 3
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Case:
    """Inputs on the CPU in memory of any strides; `moved` puts them on a device with the same strides."""

    batch: Any
    query_start: list[int]
    slots: list[int]
    tensors: dict[str, torch.Tensor]
    scale: float = 0.0
    norm_eps: float = 0.0


def like(tensor: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A copy on the device with the same strides."""
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if 0 in tensor.stride():
        return tensor[:1].to(device).expand(tensor.shape)
    return out.copy_(tensor)


def strided(tensor: torch.Tensor, order: list[int], gap: int = 0) -> torch.Tensor:
    """The same values with the dimensions in memory in this order, outermost first, and a gap after each row."""
    shape = [tensor.shape[i] for i in order]
    shape[-1] += gap
    memory = torch.zeros(shape, dtype=tensor.dtype)
    view = memory[..., : shape[-1] - gap].permute([order.index(i) for i in range(tensor.ndim)])
    view.copy_(tensor)
    return view


def make(
    rng: random.Random,
    parents: list[list[int]],
    max_nodes: int,
    max_depth: int,
    k_heads: int = 2,
    v_heads: int = 6,
    dtype: torch.dtype = torch.bfloat16,
    gates_dtype: torch.dtype | None = None,
    idle: int = 2,
    slots: int | None = None,
) -> Case:
    num_reqs = len(parents)
    counts = [len(tree) + rng.randint(0, idle) for tree in parents]
    query_start = [0]
    for count in counts:
        query_start.append(query_start[-1] + count)
    rows, channels = query_start[-1] + rng.randint(0, 3), (2 * k_heads + v_heads) * HEAD
    slots = num_reqs + 1 if slots is None else slots
    gates_dtype = dtype if gates_dtype is None else gates_dtype
    normal = torch.randn
    tensors = {
        "conv_weight": (normal(channels, 4) * 0.5).to(dtype),
        "conv_state": normal(slots, channels, WINDOW).to(dtype),
        "ssm_state": normal(slots, v_heads, HEAD, HEAD) * 0.3,
        "mixed_qkv": normal(rows, channels).to(dtype),
        "a": (normal(rows, v_heads) * 2).to(gates_dtype),
        "b": (normal(rows, v_heads) * 2).to(gates_dtype),
        "a_log": normal(v_heads).to(torch.float32),
        "dt_bias": normal(v_heads).to(gates_dtype),
    }
    return Case(
        batch=abi.tree_batch(parents, max_nodes, max_depth, "cpu"),
        query_start=query_start,
        slots=rng.sample(range(slots), num_reqs) if slots >= num_reqs else [0] * num_reqs,
        tensors=tensors,
    )


def call(case: Case, device: str, out: torch.Tensor, stash_qkv: torch.Tensor, stash_gates: torch.Tensor, ctx=None):
    """Returns what must stay alive until the stream has passed the call."""
    lib = abi.lib()
    batch = abi.to_device(case.batch, device)
    tree = abi.tree_struct(batch)
    tensors = {name: like(tensor, device) for name, tensor in case.tensors.items()}
    query_start = torch.tensor(case.query_start, dtype=torch.int32, device=device)
    slots = torch.tensor(case.slots, dtype=torch.int32, device=device)
    params = lib.params("ddt_gdn_verify_params")
    for name in ("conv_weight", "conv_bias", "conv_state", "ssm_state"):
        if name in tensors:
            lib.fill_tensor(getattr(params.layer, name), tensors[name])
    for name in ("mixed_qkv", "a", "b", "a_log", "dt_bias"):
        lib.fill_tensor(getattr(params, name), tensors[name])
    lib.fill_tensor(params.layer.stash_qkv, stash_qkv)
    lib.fill_tensor(params.layer.stash_gates, stash_gates)
    lib.fill_tensor(params.out, out)
    params.layer.state_slots = abi.i32_pointer(slots)
    params.query_start = abi.i32_pointer(query_start)
    params.tree = tree
    params.scale = case.scale
    params.norm_eps = case.norm_eps
    abi.call("gdn_verify", params, device, ctx)
    return batch, tree, tensors, query_start, slots, params


def outputs(case: Case, device: str, out_dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    rows, channels = case.tensors["mixed_qkv"].shape
    v_heads = case.tensors["ssm_state"].shape[1]
    return (
        abi.poisoned((rows, v_heads, HEAD), out_dtype, device),
        abi.poisoned((rows + 1, channels), case.tensors["mixed_qkv"].dtype, device),
        abi.poisoned((rows + 1, 2, v_heads), torch.float32, device),
    )


def run(case: Case, device: str, out_dtype: torch.dtype = torch.float32, ctx=None) -> tuple[torch.Tensor, ...]:
    result = outputs(case, device, out_dtype)
    alive = call(case, device, *result, ctx)
    if device == "cuda":
        torch.cuda.synchronize()
    del alive
    return tuple(tensor.cpu() for tensor in result)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def reference(case: Case) -> torch.Tensor:
    """Outputs by the recurrence along each path, state after state, in float64. NaN where nothing is written."""
    t = case.tensors
    dtype = t["mixed_qkv"].dtype
    rows, channels = t["mixed_qkv"].shape
    v_heads = t["ssm_state"].shape[1]
    k_heads = (channels // HEAD - v_heads) // 2
    group = v_heads // k_heads
    scale = case.scale or HEAD**-0.5
    eps = case.norm_eps or 1e-6
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = {name: tensor.to(device).double() for name, tensor in t.items()}
    out = torch.full((rows, v_heads, HEAD), float("nan"), dtype=torch.float64, device=device)
    for r, slot in enumerate(case.slots):
        num_nodes = int(case.batch.num_nodes[r])
        if slot < 0 or num_nodes == 0:
            continue
        start, end = case.query_start[r], case.query_start[r + 1]
        out[start + num_nodes : end] = 0
        window = x["conv_state"][slot].T
        states, paths = [], []
        for node in range(num_nodes):
            row, parent = start + node, int(case.batch.parents[r, node])
            path = [*(paths[parent] if parent >= 0 else list(window)), x["mixed_qkv"][row]]
            paths.append(path)
            y = torch.stack(path[-4:], 1).mul(x["conv_weight"]).sum(1)
            if "conv_bias" in x:
                y = y + x["conv_bias"]
            y = (y * torch.sigmoid(y)).to(dtype).double().view(-1, HEAD)
            q, k, v = y[:k_heads], y[k_heads : 2 * k_heads], y[2 * k_heads :]
            q, k = (z / (z.square().sum(1, keepdim=True) + eps).sqrt() for z in (q, k))
            q, k = q.repeat_interleave(group, 0), k.repeat_interleave(group, 0)
            g = -x["a_log"].exp() * torch.nn.functional.softplus(x["a"][row] + x["dt_bias"])
            beta = torch.sigmoid(x["b"][row])
            state = (states[parent] if parent >= 0 else x["ssm_state"][slot]) * g.exp()[:, None, None]
            u = beta[:, None] * (v - (state @ k[:, :, None]).squeeze(2))
            state = state + u[:, :, None] * k[:, None, :]
            states.append(state)
            out[row] = scale * (state @ q[:, :, None]).squeeze(2)
    return out.cpu()


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Over the rows that are written; those that are not must be poison still."""
    written = ~want[:, 0, 0].isnan()
    assert bits(got[~written]).eq(0xFF).all(), "a row of no request was written"
    got, want = got[written].double(), want[written]
    assert got.isfinite().all()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def check_stash(case: Case, got: tuple[torch.Tensor, ...]) -> None:
    """Raw rows bit for bit, gates as in float64, and poison at every other row."""
    _, qkv, gates = got
    written = torch.zeros(qkv.shape[0], dtype=torch.bool)
    for r, slot in enumerate(case.slots):
        if slot >= 0:
            start = case.query_start[r]
            written[start : start + int(case.batch.num_nodes[r])] = True
    assert bits(qkv[~written]).eq(0xFF).all() and bits(gates[~written]).eq(0xFF).all()
    rows = written.nonzero().squeeze(1)
    assert torch.equal(bits(qkv[rows]), bits(case.tensors["mixed_qkv"][rows]))
    t = {name: case.tensors[name].double() for name in ("a", "b", "a_log", "dt_bias")}
    g = -t["a_log"].exp() * torch.nn.functional.softplus(t["a"][rows] + t["dt_bias"])
    # the sum a + dt_bias is rounded before the exponential
    torch.testing.assert_close(gates[rows, 0].double(), g, rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(gates[rows, 1].double(), torch.sigmoid(t["b"][rows]), rtol=1e-6, atol=1e-30)


def check(case: Case, bound: float = 2e-5) -> None:
    """The outputs of the GPU in f32 within `bound` of float64, the stash, and inputs that stay as they were."""
    got = run(case, "cuda")
    error = relative_error(got[0], reference(case))
    print(f"relative error {error:.2e}")
    # a value that the convolution rounds the other way than float64 does is rare, but shows
    rounding = {torch.float32: 0, torch.float16: 2e-5, torch.bfloat16: 2e-4}[case.tensors["mixed_qkv"].dtype]
    assert error < bound + rounding
    check_stash(case, got)


def trees(rng: random.Random, sizes: list[int], max_depth: int, descend: float | None = None) -> list[list[int]]:
    return [abi.random_parents(rng, size, max_depth, descend) if size else [] for size in sizes]


SIZES = [
    ([1], 1, 0),
    ([16], 16, 15),
    ([64, 5, 0, 33], 64, 15),
    ([256, 77], 256, 32),
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes, max_nodes, max_depth", SIZES)
def test_outputs(rng, dtype, sizes, max_nodes, max_depth):
    check(make(rng, trees(rng, sizes, max_depth), max_nodes, max_depth, dtype=dtype))


@pytest.mark.parametrize("num_reqs, max_nodes", [(96, 16), (2, 32), (2, 64)])
def test_serving_layout(rng, num_reqs, max_nodes):
    """Channels of the window lie side by side. Of many small trees a block has all value heads of a key head."""
    case = make(rng, trees(rng, [rng.randint(1, max_nodes) for _ in range(num_reqs)], 15), max_nodes, 15)
    case.tensors["conv_state"] = case.tensors["conv_state"].transpose(1, 2).contiguous().transpose(1, 2)
    check(case)


@pytest.mark.parametrize("dtype", FLOATS)
def test_deep_trees_in_chunks(rng, dtype):
    """Paths as long as they may be, that reach from one chunk of nodes into the next."""
    check(make(rng, trees(rng, [256, 200], 32, descend=0.97), 256, 32, k_heads=1, v_heads=3, dtype=dtype))


@pytest.mark.parametrize("k_heads, v_heads", [(1, 1), (3, 3), (2, 4), (1, 5), (2, 8)])
def test_head_counts(rng, k_heads, v_heads):
    check(make(rng, trees(rng, [9, 40], 8), 40, 8, k_heads, v_heads))


@pytest.mark.sanitize
def test_small(rng):
    """Every phase once, with a second chunk: small enough for the sanitizer."""
    check(make(rng, trees(rng, [70, 0, 3], 9), 70, 9, k_heads=1, v_heads=2))


@pytest.mark.parametrize("dtype", FLOATS)
def test_saturated_gates(rng, dtype):
    """Decays of e^-60 per node beside none at all: sums along a path, not differences, keep their digits."""
    case = make(rng, trees(rng, [64, 100], 20, descend=0.9), 100, 20, dtype=dtype, gates_dtype=torch.float32)
    a = case.tensors["a"]
    a.copy_(torch.where(torch.rand_like(a) < 0.3, 60.0, -60.0) * torch.rand_like(a).mul(0.7).add(0.3))
    case.tensors["a_log"].fill_(0.0)
    case.tensors["b"].mul_(20)
    check(case)


@pytest.mark.parametrize("dtype", FLOATS)
def test_identical_keys(rng, dtype):
    """One key for all nodes, no decay and beta 1: each node undoes what its parent wrote."""
    case = make(rng, trees(rng, [64], 32, descend=0.97), 64, 32, dtype=dtype, gates_dtype=torch.float32)
    t = case.tensors
    t["conv_weight"][:, :3] = 0
    t["conv_weight"][:, 3] = 1
    t["mixed_qkv"][:, 2 * HEAD : 4 * HEAD] = t["mixed_qkv"][:1, 2 * HEAD : 4 * HEAD]
    t["a"].fill_(-80)
    t["b"].fill_(30)
    check(case)


def test_scale_eps_bias_and_wide_window(rng):
    case = make(rng, trees(rng, [20, 20], 10), 20, 10)
    case.scale, case.norm_eps = 0.7, 0.5
    channels = case.tensors["mixed_qkv"].shape[1]
    case.tensors["conv_bias"] = torch.randn(channels).half()
    case.tensors["conv_state"] = torch.randn(case.tensors["conv_state"].shape)
    check(case)


@pytest.mark.parametrize("out_dtype", FLOATS)
def test_output_dtypes_are_roundings(rng, out_dtype):
    case = make(rng, trees(rng, [50], 9), 50, 9)
    want = run(case, "cuda", torch.float32)[0]
    got = run(case, "cuda", out_dtype)[0]
    written = ~want.isnan()
    assert torch.equal(bits(got[written]), bits(want[written].to(out_dtype)))


def test_mixed_dtypes(rng):
    """Small tensors each of another dtype."""
    case = make(rng, trees(rng, [30], 9), 30, 9)
    t = case.tensors
    for name, dtype in (("conv_weight", torch.float32), ("a", torch.float16), ("b", torch.float32), ("a_log", torch.bfloat16)):
        t[name] = t[name].to(dtype)
    check(case)


@pytest.mark.parametrize("dtype", FLOATS)
def test_strides(rng, dtype):
    """Every tensor in another order or with gaps gives the same bits as packed ones."""
    case = make(rng, trees(rng, [20, 70], 12), 70, 12, dtype=dtype)
    packed = run(case, "cuda")
    t = dict(case.tensors)
    for change in (
        {"ssm_state": strided(t["ssm_state"], [0, 1, 3, 2])},
        {"ssm_state": strided(t["ssm_state"], [1, 0, 2, 3], gap=4)},
        {"conv_state": strided(t["conv_state"], [0, 2, 1])},
        {"conv_state": strided(t["conv_state"], [2, 1, 0], gap=1)},
        {"mixed_qkv": strided(t["mixed_qkv"], [0, 1], gap=8)},
        {"mixed_qkv": strided(t["mixed_qkv"], [0, 1], gap=3)},
        {"mixed_qkv": strided(t["mixed_qkv"], [1, 0])},
        {"conv_weight": strided(t["conv_weight"], [1, 0])},
        {"a": strided(t["a"], [1, 0]), "b": strided(t["b"], [0, 1], gap=5)},
        {"a_log": strided(t["a_log"][:, None], [0, 1], gap=1)[:, 0]},
        {"a_log": t["a_log"][:1].expand(t["a_log"].shape[0]), "dt_bias": t["dt_bias"][:1].expand(t["dt_bias"].shape[0])},
    ):
        case.tensors = {**t, **change}
        want = packed
        if "a_log" in change and change["a_log"].stride(0) == 0:
            case.tensors = {name: tensor.contiguous() for name, tensor in case.tensors.items()}
            want = run(case, "cuda")
            case.tensors = {**t, **change}
        for got, tensor in zip(run(case, "cuda"), want):
            assert torch.equal(bits(got), bits(tensor)), change.keys()


def test_strided_outputs(rng):
    case = make(rng, trees(rng, [20, 70], 12), 70, 12)
    want = run(case, "cuda")
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        out, qkv, gates = (tensor.cuda() for tensor in outputs(case, "cuda"))
        wide = strided(out.cpu(), order, gap=3)
        result = (
            like(wide, "cuda").fill_(float("nan")),
            like(strided(qkv.cpu(), [1, 0]), "cuda").fill_(float("nan")),
            like(strided(gates.cpu(), order, gap=1), "cuda").fill_(float("nan")),
        )
        call(case, "cuda", *result)
        torch.cuda.synchronize()
        for got, tensor in zip(result, want):
            assert torch.equal(got.cpu().nan_to_num(7e7), tensor.nan_to_num(7e7))


@pytest.mark.parametrize("dtype", FLOATS)
def test_cpu_backend(rng, dtype):
    case = make(rng, trees(rng, [17, 0, 64], 10), 64, 10, dtype=dtype)
    case.slots[1] = -1
    gpu, cpu = run(case, "cuda"), run(case, "cpu")
    want = cpu[0].double()
    assert relative_error(gpu[0], want) < 2e-5 + {torch.bfloat16: 2e-4, torch.float16: 2e-5}.get(dtype, 0)
    assert torch.equal(bits(gpu[1]), bits(cpu[1]))
    torch.testing.assert_close(gpu[2], cpu[2], rtol=5e-7, atol=1e-30, equal_nan=True)


def test_padding_requests_and_shared_slots(rng):
    case = make(rng, trees(rng, [7, 4, 0, 9], 5), 12, 5, slots=2)
    case.slots = [1, -1, 0, 1]
    check(case)


def test_no_requests_and_no_rows(rng):
    case = make(rng, [], 8, 5, slots=1)
    assert all(bits(tensor).eq(0xFF).all() for tensor in run(case, "cuda"))
    case = make(rng, [[], []], 8, 5, idle=0)
    assert all(bits(tensor).eq(0xFF).all() for tensor in run(case, "cuda"))


def test_inputs_stay(rng):
    case = make(rng, trees(rng, [40], 9), 40, 9)
    result = outputs(case, "cuda")
    _, _, tensors, *_ = alive = call(case, "cuda", *result)
    torch.cuda.synchronize()
    for name, tensor in tensors.items():
        assert torch.equal(bits(tensor.cpu()), bits(case.tensors[name])), name
    del alive


def test_hostile_device_values(rng):
    """Nothing that device memory holds makes a kernel hang or write to rows that it does not own."""
    wild = [-(2**31), -1000, -2, -1, 0, 1, 2, 31, 32, 33, 100, 255, 256, 10**6, 2**31 - 1]
    for _ in range(30):
        case = make(rng, trees(rng, [70, 30], 12), 70, 12, k_heads=1, v_heads=2)
        last = case.query_start[-1]
        for name in ("parents", "depths", "ancestors"):
            values = getattr(case.batch, name)
            hit = torch.rand(values.shape) < rng.choice([0.02, 0.5, 1.0])
            values[hit] = torch.tensor(rng.choices(wild, k=int(hit.sum())), dtype=torch.int32)
        if rng.random() < 0.5:
            case.batch.num_nodes.copy_(torch.tensor(rng.choices(wild, k=2)))
            case.query_start = rng.choices([*wild, 5, last], k=3)
            case.slots = rng.choices(wild, k=2)
        got = run(case, "cuda")
        after = min(max(0, *case.query_start), case.tensors["mixed_qkv"].shape[0])
        assert bits(got[0][after:]).eq(0xFF).all() and bits(got[1][after:]).eq(0xFF).all()


def test_slot_out_of_range_is_skipped(rng):
    case = make(rng, trees(rng, [5, 5], 4), 5, 4, idle=1)
    good = run(case, "cuda")
    case.slots[0] = case.tensors["ssm_state"].shape[0]
    got = run(case, "cuda")
    end = case.query_start[1]
    for tensor, before in zip(got, good):
        assert bits(tensor[:end]).eq(0xFF).all()
        assert torch.equal(bits(tensor[end:]), bits(before[end:]))


def test_lowered_num_nodes(rng):
    """The first nodes of a tree are a tree."""
    case = make(rng, trees(rng, [70, 30], 12), 70, 12)
    whole = run(case, "cuda")[0]
    case.batch.num_nodes.copy_(torch.tensor([66, 11]))
    got = run(case, "cuda")[0]
    for r, count in enumerate((66, 11)):
        start, end = case.query_start[r], case.query_start[r + 1]
        assert torch.equal(got[start : start + count], whole[start : start + count])
        assert bits(got[start + count : end]).eq(0).all()


def test_graph_streams_and_contexts(rng):
    """The same bits from a graph, from two streams at once, and from other contexts."""
    case = make(rng, trees(rng, [64, 30], 12), 64, 12)
    want = [bits(tensor) for tensor in run(case, "cuda")]

    def matches(result) -> bool:
        return all(torch.equal(bits(got.cpu()), tensor) for got, tensor in zip(result, want))

    result = outputs(case, "cuda")
    *alive, params = call(case, "cuda", *result)
    lib, device = abi.lib(), torch.device("cuda")
    torch.cuda.synchronize()
    workspace = abi.poisoned(params.workspace_bytes, torch.uint8)
    params.workspace = lib.ffi.cast("void *", workspace.data_ptr())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lib.check(lib.lib.ddt_gdn_verify(abi.context("cuda"), params, lib.stream(device)))
    for tensor in result:
        tensor.view(torch.uint8).fill_(0xFF)
    graph.replay()
    torch.cuda.synchronize()
    assert matches(result)

    streams = [torch.cuda.Stream() for _ in range(2)]
    results = [outputs(case, "cuda") for _ in streams]
    torch.cuda.synchronize()
    kept = []
    for _ in range(5):
        for stream, tensors in zip(streams, results):
            with torch.cuda.stream(stream):
                kept.append(call(case, "cuda", *tensors))
    torch.cuda.synchronize()
    assert all(matches(tensors) for tensors in results)

    for ctx in (abi.context("cuda", portable=True), lib.new_context(device, False)):
        assert matches([tensor.cuda() for tensor in run(case, "cuda", ctx=ctx)])


def test_workspace_is_checked(rng):
    case = make(rng, trees(rng, [5], 4), 5, 4)
    result = outputs(case, "cuda")
    *alive, params = call(case, "cuda", *result)
    torch.cuda.synchronize()
    lib, workspace = abi.lib(), params.workspace
    for tensor in result:
        tensor.view(torch.uint8).fill_(0xFF)
    for pointer, missing, status in (
        (lib.ffi.NULL, 0, lib.lib.DDT_NULL_POINTER),
        (lib.ffi.cast("char *", workspace) + 16, 0, lib.lib.DDT_MISALIGNED),
        (workspace, 1, lib.lib.DDT_WORKSPACE_TOO_SMALL),
    ):
        params.workspace = pointer
        params.workspace_bytes -= missing
        stream = lib.stream(torch.device("cuda"))
        assert lib.lib.ddt_gdn_verify(abi.context("cuda"), params, stream) == status
    torch.cuda.synchronize()
    assert all(bits(tensor.cpu()).eq(0xFF).all() for tensor in result)


@pytest.mark.parametrize("mistake", [
    lambda t: t.update(a=t["a"][:, :-1]),
    lambda t: t.update(a_log=t["a_log"].int()),
    lambda t: t.update(conv_state=t["conv_state"][:, :, :2]),
    lambda t: t.update(conv_state=t["conv_state"].half()),
    lambda t: t.update(ssm_state=t["ssm_state"].bfloat16()),
    lambda t: t.update(mixed_qkv=t["mixed_qkv"][:, :-HEAD]),
])
def test_mistakes_get_the_same_words(rng, mistake):
    case = make(rng, trees(rng, [5], 4), 5, 4)
    rows, channels = case.tensors["mixed_qkv"].shape
    mistake(case.tensors)
    messages = []
    for device in ("cpu", "cuda"):
        result = (
            abi.poisoned((rows, 6, HEAD), torch.float32, device),
            abi.poisoned((rows, channels), torch.bfloat16, device),
            abi.poisoned((rows, 2, 6), torch.float32, device),
        )
        with pytest.raises(RuntimeError) as error:
            call(case, device, *result)
        # on a GPU the size query is the first to say it
        messages.append(str(error.value).replace("_workspace_size", ""))
        assert all(bits(tensor).eq(0xFF).all() for tensor in result)
    assert messages[0] == messages[1]
