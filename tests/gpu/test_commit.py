# SPDX-License-Identifier: Apache-2.0
"""commit on a GPU against the CPU backend, against the recurrence in float64, and against moving KV rows one by one."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import abi
import pytest
import torch

# small tensors: threads would wait for each other
torch.set_num_threads(1)

HEAD, WINDOW = 128, 3
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CACHES = (*FLOATS, torch.uint8, torch.int64)
# Values that round the other way after the convolution show in the state; they are rare.
ROUNDING = {torch.float32: 0.0, torch.float16: 2e-4, torch.bfloat16: 1e-3}
GDN = ("conv_weight", "conv_bias", "conv_state", "ssm_state", "stash_qkv", "stash_gates")


# ---- tensors of any strides, with the memory around them


def strided(rng: random.Random, values: torch.Tensor, order: list[int] | None = None, gap: int | None = None):
    """The same values, dimensions in memory in this order (default: any), gaps of 0xff bytes between rows."""
    order = rng.sample(range(values.ndim), values.ndim) if order is None else order
    gap = rng.randint(0, 3) if gap is None else gap
    shape = [values.shape[i] for i in order]
    shape[-1] += gap
    memory = abi.poisoned(shape, values.dtype, "cpu")
    view = memory[..., : shape[-1] - gap].permute([order.index(i) for i in range(values.ndim)])
    view.copy_(values)
    return view


def dense(rng: random.Random, values: torch.Tensor) -> torch.Tensor:
    return values.contiguous()


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage, gaps included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of the whole storage on a device, seen through the same strides."""
    flat = memory(tensor).to(device, copy=True).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(memory(a).cpu(), memory(b).cpu())


# ---- a call


@dataclass
class Case:
    """Inputs on the CPU. A layer is a dict of tensors; `accepted` has None for a padding request."""

    batch: Any
    query_start: list[int]
    accepted: list[list[int] | None]
    gdn: list[dict[str, torch.Tensor]] = field(default_factory=list)
    kv: list[dict[str, torch.Tensor]] = field(default_factory=list)
    snapshot_tokens: list[int] | None = None
    norm_eps: float = 0.0

    def path(self, r: int) -> list[int]:
        """Rows that request r commits."""
        if self.accepted[r] is None or int(self.batch.num_nodes[r]) == 0:
            return []
        return [self.query_start[r] + node for node in (0, *self.accepted[r])]


def on(case: Case, device: str) -> Case:
    layers = [[{k: moved(v, device) for k, v in layer.items()} for layer in kind] for kind in (case.gdn, case.kv)]
    return replace(case, gdn=layers[0], kv=layers[1])


class Call:
    """The parameter struct over the case's tensors, which the call changes; keeps alive what it points to."""

    def __init__(self, case: Case, device: str):
        lib, self.device = abi.lib(), device
        num_reqs, max_depth = case.batch.num_nodes.numel(), case.batch.shape.max_depth
        num_accepted = torch.tensor([-1 if path is None else len(path) for path in case.accepted], dtype=torch.int32)
        nodes = torch.full((num_reqs, max_depth), -1, dtype=torch.int32)
        for row, path in zip(nodes, case.accepted):
            row[: len(path or [])] = torch.tensor((path or [])[:max_depth], dtype=torch.int32)
        i32 = lambda values: torch.as_tensor(values, dtype=torch.int32).to(device)  # noqa: E731
        self.arrays = [i32(case.query_start), i32(num_accepted), nodes.to(device)]
        self.batch = abi.to_device(case.batch, device)
        self.case, self.tree = case, abi.tree_struct(self.batch)
        self.gdn = lib.ffi.new("ddt_gdn_layer[]", max(1, len(case.gdn)))
        self.kv = lib.ffi.new("ddt_kv_layer[]", max(1, len(case.kv)))
        for out, layer in zip(self.gdn, case.gdn):
            for name in GDN:
                lib.fill_tensor(getattr(out, name), layer.get(name))
            out.state_slots = abi.i32_pointer(layer["state_slots"])
            out.snapshot_slots = abi.i32_pointer(layer.get("snapshot_slots"))
        for out, layer in zip(self.kv, case.kv):
            lib.fill_tensor(out.key_cache, layer["key_cache"])
            lib.fill_tensor(out.value_cache, layer["value_cache"])
            out.row_slots = abi.i64_pointer(layer["row_slots"])
        self.params = params = lib.params("ddt_commit_params")
        params.num_gdn_layers, params.num_kv_layers = len(case.gdn), len(case.kv)
        params.gdn_layers, params.kv_layers, params.tree = self.gdn, self.kv, self.tree
        params.query_start, params.num_accepted, params.accepted_nodes = map(abi.i32_pointer, self.arrays)
        if case.snapshot_tokens is not None:
            self.arrays.append(i32(case.snapshot_tokens))
            params.snapshot_tokens = abi.i32_pointer(self.arrays[-1])
        params.norm_eps = case.norm_eps

    def run(self, ctx: Any = None, check: bool = True) -> int:
        return abi.call("commit", self.params, self.device, ctx, check)


def run(case: Case, device: str, ctx: Any = None) -> Case:
    """A copy of the case after the call."""
    result = on(case, device)
    call = Call(result, device)
    call.run(ctx)
    if device == "cuda":
        torch.cuda.synchronize()
    del call
    return on(result, "cpu")


# ---- random cases


def gdn_layer(
    rng: random.Random,
    rows: int,
    num_reqs: int,
    dtype: torch.dtype,
    k_heads: int = 1,
    v_heads: int = 2,
    state_dtype: torch.dtype | None = None,
    bias: bool = False,
    snapshots: bool = True,
    order=dense,
    decay: float = 1.0,
) -> dict[str, torch.Tensor]:
    channels, slots = (2 * k_heads + v_heads) * HEAD, 2 * num_reqs + 1
    normal, place = torch.randn, lambda x: order(rng, x)
    used = rng.sample(range(slots), 2 * num_reqs)
    layer = {
        "conv_weight": place((normal(channels, 4) * 0.5).to(dtype)),
        "conv_state": place(normal(slots, channels, WINDOW).to(dtype).to(state_dtype or dtype)),
        "ssm_state": place(normal(slots, v_heads, HEAD, HEAD) * 0.3),
        "stash_qkv": place(normal(rows + rng.randint(0, 2), channels).to(dtype)),
        "stash_gates": place(
            torch.stack([-decay * normal(rows + 1, v_heads).abs(), torch.sigmoid(normal(rows + 1, v_heads))], 1)
        ),
        "state_slots": torch.tensor(used[:num_reqs], dtype=torch.int32),
    }
    if bias:
        layer["conv_bias"] = place((normal(channels) * 0.2).to(dtype))
    if snapshots:
        chosen = [slot if rng.random() < 0.6 else -1 for slot in used[num_reqs:]]
        layer["snapshot_slots"] = torch.tensor(chosen, dtype=torch.int32)
    return layer


def kv_layer(rng: random.Random, rows: int, dtype: torch.dtype, heads=(2, 2), dims=(64, 64), block=16, order=dense):
    blocks = -(-rows // block) + 2

    def cache(num_heads: int, dim: int) -> torch.Tensor:
        size = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (blocks, num_heads, block, dim * size), dtype=torch.uint8)
        return order(rng, raw.view(dtype))

    slots = rng.sample(range(blocks * block), rows)
    caches = [cache(*shape) for shape in zip(heads, dims)]
    return {"key_cache": caches[0], "value_cache": caches[1], "row_slots": torch.tensor(slots, dtype=torch.int64)}


def make(rng: random.Random, sizes: list[int], max_nodes: int, max_depth: int, idle: int = 2) -> Case:
    """Trees of these sizes with a random accepted path each; size 0 is a padding request, -n one of n nodes whose
    num_accepted is -1."""
    parents = [abi.random_parents(rng, abs(size), max_depth) if size else [] for size in sizes]
    accepted: list[list[int] | None] = []
    for size, tree in zip(sizes, parents):
        path, node = [], rng.randrange(max(1, len(tree)))
        while node > 0:
            path.append(node)
            node = tree[node]
        accepted.append(path[::-1] if size >= 0 else None)
    query_start = [0]
    for tree in parents:
        query_start.append(query_start[-1] + len(tree) + rng.randint(0, idle))
    case = Case(abi.tree_batch(parents, max_nodes, max_depth, "cpu"), query_start, accepted)
    case.snapshot_tokens = [rng.randint(1, max(1, len(case.path(r)))) for r in range(len(sizes))]
    return case


# ---- references


def replay(layer: dict[str, torch.Tensor], slot: int, rows: list[int], eps: float) -> list[torch.Tensor]:
    """States after each row in float64; the state and the window before are those of the slot."""
    x = {name: layer[name].double() for name in GDN if name in layer}
    v_heads = x["ssm_state"].shape[1]
    k_heads = (x["conv_weight"].shape[0] // HEAD - v_heads) // 2
    inputs = torch.cat([x["conv_state"][slot].T, x["stash_qkv"][rows]])
    state, states = x["ssm_state"][slot], []
    for i, row in enumerate(rows):
        y = (inputs[i : i + 4].T * x["conv_weight"]).sum(1) + x.get("conv_bias", 0)
        y = (y * torch.sigmoid(y)).to(layer["stash_qkv"].dtype).double().view(-1, HEAD)
        k, v = y[k_heads : 2 * k_heads], y[2 * k_heads :]
        k = (k / (k.square().sum(1, keepdim=True) + (eps or 1e-6)).sqrt()).repeat_interleave(v_heads // k_heads, 0)
        g, beta = x["stash_gates"][row]
        state = state * g.exp()[:, None, None]
        u = beta[:, None] * (v - (state @ k[:, :, None]).squeeze(2))
        state = state + u[:, :, None] * k[:, None, :]
        states.append(state)
    return states


def expected(case: Case) -> list[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """For each recurrent layer the slots that are written: float64 state and window."""
    written = []
    for layer in case.gdn:
        slots = {}
        snapshots = layer.get("snapshot_slots", torch.full_like(layer["state_slots"], -1))
        for r in range(layer["state_slots"].numel()):
            slot, snapshot, rows = int(layer["state_slots"][r]), int(snapshots[r]), case.path(r)
            if slot < 0 or not rows:
                continue
            states = replay(layer, slot, rows, case.norm_eps)
            inputs = torch.cat([layer["conv_state"][slot].T.double(), layer["stash_qkv"][rows].double()])
            for target, tokens in ((slot, len(rows)), (snapshot, case.snapshot_tokens[r] if snapshot >= 0 else 0)):
                if tokens:
                    slots[target] = states[tokens - 1], inputs[tokens : tokens + WINDOW].T
        written.append(slots)
    return written


def check_states(before: Case, after: Case, bound: float = 1e-6) -> float:
    """The written slots, and the bits of everything else, gaps included."""
    largest = 0.0
    for old, new, slots in zip(before.gdn, after.gdn, expected(before)):
        for name in (*GDN, "state_slots"):
            restored = moved(new[name], "cpu") if name in new else None
            for slot, (state, window) in slots.items() if name in ("ssm_state", "conv_state") else ():
                if name == "ssm_state":
                    got = new[name][slot].double()
                    assert got.isfinite().all()
                    largest = max(largest, float((got - state).norm() / state.norm()))
                else:
                    assert torch.equal(new[name][slot].double(), window), "window"
                restored[slot] = old[name][slot]
            assert restored is None or same(restored, old[name]), f"{name} changed elsewhere"
        assert largest < bound + ROUNDING[old["stash_qkv"].dtype], f"relative error {largest:.2e}"
    return largest


def check_caches(before: Case, after: Case) -> None:
    for old, new in zip(before.kv, after.kv):
        block = old["key_cache"].shape[2]
        for name in ("key_cache", "value_cache"):
            want = moved(old[name], "cpu")
            for r, start in enumerate(before.query_start[:-1]):
                for i, row in enumerate(before.path(r)):
                    source, target = int(old["row_slots"][row]), int(old["row_slots"][start + i])
                    want[target // block, :, target % block] = old[name][source // block, :, source % block]
            assert same(want, new[name]), name


def check(case: Case) -> Case:
    """The GPU against float64, row by row moves, and the CPU backend."""
    got, cpu = run(case, "cuda"), run(case, "cpu")
    error = check_states(case, got)
    check_caches(case, got)
    for a, b in zip(got.gdn, cpu.gdn):
        assert same(a["conv_state"], b["conv_state"])
        distance = float((a["ssm_state"].double() - b["ssm_state"].double()).norm() / b["ssm_state"].double().norm())
        assert distance < 1e-6 + ROUNDING[a["stash_qkv"].dtype], f"GPU and CPU differ by {distance:.2e}"
    for a, b in zip(got.kv, cpu.kv):
        assert same(a["key_cache"], b["key_cache"]) and same(a["value_cache"], b["value_cache"])
    print(f"relative error {error:.2e}")
    return got


def vllm_window(rng: random.Random, values: torch.Tensor) -> torch.Tensor:
    """The convolution window as vLLM has it, channels innermost; other tensors dense."""
    if values.ndim == 3 and values.shape[2] == WINDOW:
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    return values.contiguous()


# ---- tests


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", [dense, vllm_window, strided])
def test_states(rng, dtype, order):
    case = make(rng, [17, 1, 0, -6, 40, 12], 40, 12)
    rows = case.query_start[-1]
    for k_heads, v_heads, state_dtype, bias in [(1, 1, None, True), (2, 6, None, False), (1, 3, torch.float32, True)]:
        case.gdn.append(gdn_layer(rng, rows, 6, dtype, k_heads, v_heads, state_dtype, bias, order=order))
    # one layer has no slot for a request, another no snapshots
    case.gdn[0]["state_slots"][4] = -1
    del case.gdn[1]["snapshot_slots"]
    case.norm_eps = rng.choice([0.0, 1e-3])
    check(case)


@pytest.mark.parametrize("decay", [8.0, 200.0, -3.0])
def test_decays_whose_product_leaves_the_range_of_f32(rng, decay):
    case = make(rng, [40, 30, 35], 40, 12)
    for dtype in (torch.float32, torch.bfloat16):
        case.gdn.append(gdn_layer(rng, case.query_start[-1], 3, dtype, 1, 2, order=vllm_window, decay=decay))
    check(case)


def test_many_requests(rng):
    """So many that a block replays several value heads of a key head, which it does not for one layer alone."""
    case = make(rng, [rng.randint(0, 6) for _ in range(54)], 6, 3)
    rows = case.query_start[-1]
    for dtype, v_heads, order in (
        (torch.bfloat16, 2, vllm_window),
        (torch.float16, 3, vllm_window),
        (torch.float32, 3, dense),
        (torch.bfloat16, 4, dense),
        (torch.bfloat16, 8, vllm_window),
    ):
        case.gdn.append(gdn_layer(rng, rows, 54, dtype, 1, v_heads, bias=True, order=order))
    together = run(case, "cuda")
    for layer, got in zip(case.gdn, together.gdn):
        alone = run(replace(case, gdn=[layer]), "cuda").gdn[0]
        for name in ("ssm_state", "conv_state"):
            assert torch.allclose(got[name], alone[name], rtol=1e-4, atol=1e-5), name


def test_states_padded_as_in_vllm(rng):
    # recurrent states in pages that are larger than they are, as the KV cache of a hybrid model has them
    case = make(rng, [9, 30], 32, 15)
    for order in ([0, 1, 2, 3], [0, 1, 3, 2]):
        layer = gdn_layer(rng, case.query_start[-1], 2, torch.bfloat16, 2, 4)
        for name, dims in (("ssm_state", order), ("conv_state", [0, 2, 1])):
            values = layer[name]
            page = values[0].numel() + 64
            flat = abi.poisoned((values.shape[0], page), values.dtype, "cpu")
            shape = [values.shape[i] for i in dims[1:]]
            view = flat[:, : values[0].numel()].unflatten(1, shape)
            layer[name] = view.permute([0, *(1 + dims[1:].index(i) for i in range(1, values.ndim))])
            layer[name].copy_(values)
        case.gdn.append(layer)
    check(case)


@pytest.mark.parametrize("sizes, max_nodes, max_depth", [([1], 1, 0), ([256, 33], 256, 32), ([1] * 9, 4, 2)])
def test_sizes(rng, sizes, max_nodes, max_depth):
    case = make(rng, sizes, max_nodes, max_depth, idle=0)
    if max_depth == 32:  # the longest path there is, in a tree that is a chain
        parents = [i - 1 for i in range(33)]
        case.batch = abi.tree_batch([abi.random_parents(rng, 256, 32), parents], 256, 32, "cpu")
        case.accepted = [sorted(rng.sample(range(1, 256), 32)), list(range(1, 33))]
        case.query_start = [0, 256, 289]
        case.snapshot_tokens = [33, 1]
    rows = case.query_start[-1]
    case.gdn.append(gdn_layer(rng, rows, len(sizes), torch.float32, 1, 2))
    case.kv.append(kv_layer(rng, rows, torch.bfloat16, (4, 4), (256, 256), 784))
    check(case)


@pytest.mark.parametrize("dtype", CACHES)
def test_kv_moves(rng, dtype):
    case = make(rng, [24, 0, -7, 33, 1], 40, 10)
    for _ in range(3):
        order = rng.choice([dense, strided])
        shapes = [(rng.randint(1, 5), rng.choice([1, 7, 32, 128])) for _ in range(2)]
        heads, dims = zip(*shapes)
        case.kv.append(kv_layer(rng, case.query_start[-1], dtype, heads, dims, rng.choice([1, 5, 16, 784]), order))
    # as vLLM has it: both caches in one tensor, tokens before heads
    layer = kv_layer(rng, case.query_start[-1], dtype, (2, 2), (64, 64))
    both = torch.stack([layer["key_cache"].transpose(1, 2), layer["value_cache"].transpose(1, 2)], 1).contiguous()
    layer["key_cache"], layer["value_cache"] = (moved(both[:, i].transpose(1, 2), "cpu") for i in (0, 1))
    case.kv.append(layer)
    check(case)


def test_a_spine_moves_nothing(rng):
    case = make(rng, [12, 20], 20, 10)
    case.accepted = [list(range(1, 8)), []]
    layer = kv_layer(rng, case.query_start[-1], torch.bfloat16)
    # rows that stay where they are may have no slot
    layer["row_slots"][3] = -1
    case.kv.append(layer)
    got = run(case, "cuda")
    assert same(got.kv[0]["key_cache"], layer["key_cache"]) and same(got.kv[0]["value_cache"], layer["value_cache"])


def test_more_layers_than_one_launch_takes(rng):
    case = make(rng, [5, 9], 9, 4)
    for _ in range(67):
        case.gdn.append(gdn_layer(rng, case.query_start[-1], 2, torch.bfloat16, 1, 1))
    for _ in range(130):
        case.kv.append(kv_layer(rng, case.query_start[-1], torch.uint8, (1, 1), (16, 16)))
    check(case)


@pytest.mark.parametrize("decay", [1.0, 1e-3])
def test_states_do_not_drift(rng, decay):
    """200 rounds of verify-free trees: stash and gates are drawn, the state is carried on by both."""
    layer = {k: v.cuda() for k, v in gdn_layer(rng, 32, 2, torch.float32, 1, 2, snapshots=False, decay=decay).items()}
    reference = {**layer, "ssm_state": layer["ssm_state"].double(), "conv_state": layer["conv_state"].double()}
    errors = []
    for _ in range(200):
        case = make(rng, [rng.randint(1, 16), rng.randint(1, 16)], 16, 8, idle=0)
        case.snapshot_tokens = None
        rows = case.query_start[-1]
        layer["stash_qkv"].normal_()
        layer["stash_gates"][:, 0] = -decay * torch.randn(layer["stash_gates"][:, 0].shape, device="cuda").abs()
        layer["stash_gates"][:, 1].uniform_(0, 1)
        case.gdn = [layer]
        call = Call(case, "cuda")
        call.run()
        for r in range(2):
            slot, path = int(layer["state_slots"][r]), case.path(r)
            states = replay(reference, slot, path, 0.0)
            inputs = torch.cat([reference["conv_state"][slot].T, layer["stash_qkv"][path].double()])
            reference["conv_state"][slot] = inputs[-WINDOW:].T
            reference["ssm_state"][slot] = states[-1]
            error = (layer["ssm_state"][slot].double() - states[-1]).norm() / states[-1].norm()
            errors.append(float(error))
            assert torch.equal(layer["conv_state"][slot].double(), reference["conv_state"][slot])
        assert rows <= 32
    # by the hundredth round as much is forgotten as is added
    third, fourth = max(errors[200:300]), max(errors[300:])
    print(f"relative error: first {errors[0]:.2e}, rounds 100 to 150 {third:.2e}, to 200 {fourth:.2e}")
    # with hardly any decay each token's rounding stays for hundreds of tokens
    assert errors[0] < 1e-6 and max(errors) < 1e-5 and fourth < 2 * third


def small(rng: random.Random) -> Case:
    case = make(rng, [6, 9, 4], 9, 4)
    rows = case.query_start[-1]
    case.gdn.append(gdn_layer(rng, rows, 3, torch.bfloat16, 1, 2, order=rng.choice([dense, vllm_window])))
    case.kv.append(kv_layer(rng, rows, torch.bfloat16))
    return case


def assert_equal(a: Case, b: Case) -> None:
    for kind in ("gdn", "kv"):
        for x, y in zip(getattr(a, kind), getattr(b, kind)):
            for name in x:
                assert same(x[name], y[name]), name


@pytest.mark.sanitize
def test_small(rng):
    check(small(rng))


@pytest.mark.sanitize
def test_small_strided(rng):
    case = make(rng, [6, 3], 9, 4)
    case.gdn.append(gdn_layer(rng, case.query_start[-1], 2, torch.float16, 1, 1, bias=True, order=strided))
    case.kv.append(kv_layer(rng, case.query_start[-1], torch.uint8, order=strided))
    check(case)


def impossible(case: Case, what: str) -> None:
    """Makes request 1 one that cannot be."""
    nodes = case.batch.num_nodes
    layer = case.gdn[0]
    if what == "nodes that do not ascend":
        case.accepted[1] = [3, 2]
    elif what == "a node twice":
        case.accepted[1] = [2, 2]
    elif what == "the root":
        case.accepted[1] = [0, 2]
    elif what == "a node that is not there":
        case.accepted[1] = [1, int(nodes[1])]
    elif what == "a huge node":
        case.accepted[1] = [2**31 - 1]
    elif what == "a negative node":
        case.accepted[1] = [-5]
    elif what == "fewer rows than nodes":
        case.query_start[2] = case.query_start[1] + 2
        case.query_start[3] = case.query_start[2] + int(nodes[2])
        case.accepted[1] = [2, 5]
    elif what == "a slot beyond the pool":
        layer["state_slots"][1] = layer["ssm_state"].shape[0]
        case.kv.clear()
    elif what == "a huge slot":
        layer["state_slots"][1] = 2**31 - 1
        case.kv.clear()
    elif what == "no nodes":
        nodes[1] = -3
    elif what == "negative rows":
        case.query_start[1], case.query_start[2] = -(2**31), -5
        case.accepted = [None, [1], None]


@pytest.mark.sanitize
@pytest.mark.parametrize("what", [
    "nodes that do not ascend", "a node twice", "the root", "a node that is not there", "a huge node",
    "a negative node", "fewer rows than nodes", "a slot beyond the pool", "a huge slot", "no nodes", "negative rows",
])  # fmt: skip
def test_a_request_that_cannot_be_is_skipped(rng, what):
    case = small(rng)
    impossible(case, what)
    want = replace(case, accepted=[case.accepted[0], None, case.accepted[2]])
    if what == "negative rows":
        want.accepted[1] = None
    after = run(case, "cuda")
    check_states(replace(want, query_start=[max(0, start) for start in want.query_start]), after)
    check_caches(want, after)


@pytest.mark.sanitize
def test_lengths_that_cannot_be(rng):
    case = small(rng)
    for length in (5, 2**31 - 1, -2, -(2**31)):
        result = on(case, "cuda")
        call = Call(result, "cuda")
        call.arrays[1].fill_(length)
        call.run()
        torch.cuda.synchronize()
        assert_equal(on(result, "cpu"), case)


@pytest.mark.sanitize
def test_snapshots_and_rows_that_cannot_be(rng):
    case = small(rng)
    case.gdn[0]["snapshot_slots"] = torch.tensor([case.gdn[0]["ssm_state"].shape[0], 2**31 - 1, -(2**31)])
    case.gdn[0]["snapshot_slots"] = case.gdn[0]["snapshot_slots"].to(torch.int32)
    blocks, _, block, _ = case.kv[0]["key_cache"].shape
    case.kv[0]["row_slots"].copy_(torch.tensor([-1, blocks * block, 2**63 - 1, -(2**63)])[
        torch.randint(0, 4, case.kv[0]["row_slots"].shape)
    ])
    want = replace(case, gdn=[{k: v for k, v in case.gdn[0].items() if k != "snapshot_slots"}])
    after = run(case, "cuda")
    check_states(want, after)
    assert same(after.kv[0]["key_cache"], case.kv[0]["key_cache"])
    for tokens in (0, -1, 40, 2**31 - 1):
        odd = replace(case, snapshot_tokens=[tokens] * 3, kv=[])
        odd.gdn = [{**case.gdn[0], "snapshot_slots": gdn_layer(rng, 1, 3, torch.bfloat16)["snapshot_slots"]}]
        taken = set(odd.gdn[0]["state_slots"].tolist())
        free = [slot for slot in range(odd.gdn[0]["ssm_state"].shape[0]) if slot not in taken]
        odd.gdn[0]["snapshot_slots"] = torch.tensor(free[:3], dtype=torch.int32)
        check_states(replace(want, kv=[]), run(odd, "cuda"))


def test_a_graph_repeats_the_call(rng):
    case = small(rng)
    eager = run(case, "cuda")
    result = on(case, "cuda")
    call = Call(result, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    for _ in range(2):
        fresh = on(case, "cuda")
        for kind in ("gdn", "kv"):
            for old, new in zip(getattr(result, kind), getattr(fresh, kind)):
                for name in old:
                    memory(old[name]).copy_(memory(new[name]))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(on(result, "cpu"), eager)


def test_streams_and_contexts_at_once(rng):
    cases = [small(rng) for _ in range(4)]
    want = [run(case, "cuda") for case in cases]
    contexts = [abi.lib().new_context(torch.device("cuda"), portable) for portable in (False, True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = [on(case, "cuda") for case in cases]
    calls = [Call(result, "cuda") for result in results]
    torch.cuda.synchronize()
    for i, call in enumerate(calls):
        with torch.cuda.stream(streams[i % 2]):
            call.run(contexts[i // 2])
    torch.cuda.synchronize()
    for result, expected_case in zip(results, want):
        assert_equal(on(result, "cpu"), expected_case)


MISTAKES = {
    "flags": lambda call: setattr(call.params, "flags", 1),
    "reserved": lambda call: setattr(call.params, "reserved0", 1),
    "struct size": lambda call: setattr(call.params, "struct_size", 4),
    "layer count": lambda call: setattr(call.params, "num_gdn_layers", -1),
    "kv layer count": lambda call: setattr(call.params, "num_kv_layers", -2),
    "no layers": lambda call: setattr(call.params, "gdn_layers", abi.lib().ffi.NULL),
    "no tree": lambda call: setattr(call.params, "tree", abi.lib().ffi.NULL),
    "no num_nodes": lambda call: setattr(call.tree, "num_nodes", abi.lib().ffi.NULL),
    "no num_accepted": lambda call: setattr(call.params, "num_accepted", abi.lib().ffi.NULL),
    "no accepted_nodes": lambda call: setattr(call.params, "accepted_nodes", abi.lib().ffi.NULL),
    "no query_start": lambda call: setattr(call.params, "query_start", abi.lib().ffi.NULL),
    "no state_slots": lambda call: setattr(call.gdn[0], "state_slots", abi.lib().ffi.NULL),
    "no row_slots": lambda call: setattr(call.kv[0], "row_slots", abi.lib().ffi.NULL),
    "no snapshot_tokens": lambda call: setattr(call.params, "snapshot_tokens", abi.lib().ffi.NULL),
    "norm_eps": lambda call: setattr(call.params, "norm_eps", float("nan")),
    "absent state": lambda call: setattr(call.gdn[0].ssm_state, "dtype", 0) or setattr(call.gdn[0].ssm_state, "data", abi.lib().ffi.NULL),  # fmt: skip
    "state dtype": lambda call: setattr(call.gdn[0].ssm_state, "dtype", abi.lib().lib.DDT_DTYPE_BF16),
    "stash dtype": lambda call: setattr(call.gdn[0].stash_qkv, "dtype", abi.lib().lib.DDT_DTYPE_I32),
    "window dtype": lambda call: setattr(call.gdn[0].conv_state, "dtype", abi.lib().lib.DDT_DTYPE_F16),
    "window taps": lambda call: call.gdn[0].conv_state.shape.__setitem__(2, 4),
    "value heads": lambda call: call.gdn[0].ssm_state.shape.__setitem__(1, 3),
    "gate stride": lambda call: call.gdn[0].stash_gates.strides.__setitem__(0, -1),
    "cache blocks": lambda call: call.kv[0].value_cache.shape.__setitem__(0, 1),
    "cache dimensions": lambda call: setattr(call.kv[0].key_cache, "ndim", 3),
    "cache block size": lambda call: call.kv[0].value_cache.shape.__setitem__(2, 3),
    "tree depth": lambda call: setattr(call.tree, "max_depth", 33),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_get_the_answer_of_the_cpu(rng, name):
    case = small(rng)
    case.gdn[0]["snapshot_slots"][0] = int(case.gdn[0]["ssm_state"].shape[0]) - 1
    used = set(case.gdn[0]["state_slots"].tolist())
    free = [slot for slot in range(case.gdn[0]["ssm_state"].shape[0]) if slot not in used]
    case.gdn[0]["snapshot_slots"].copy_(torch.tensor(free[:3]))
    lib, answers = abi.lib(), []
    for device in ("cpu", "cuda"):
        result = on(case, device)
        call = Call(result, device)
        MISTAKES[name](call)
        # straight to the operation: the size query would object first
        ctx = abi.context(device)
        status = lib.lib.ddt_commit(ctx, call.params, lib.stream(torch.device(device)))
        assert status != lib.lib.DDT_OK
        text = lib.ffi.new("char[1024]")
        lib.lib.ddt_last_error(text, 1024, lib.ffi.NULL)
        answers.append((status, lib.ffi.string(text).decode()))
        assert_equal(on(result, "cpu"), case)
    assert answers[0] == answers[1]
