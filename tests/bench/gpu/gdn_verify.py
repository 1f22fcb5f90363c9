# SPDX-License-Identifier: Apache-2.0
"""Times ddt_gdn_verify beside what vLLM launches for a chain of as many rows: its causal convolution and its recurrence,
and the recurrence alone. vLLM's rows are a chain, ours a drafter's tree; neither kernel's time depends on the values."""

import random

import abi
import timing
import torch
from peers import vllm

QUICK = [(1, 16), (1, 64), (16, 16)]
SWEEP = [
    *((requests, nodes) for requests in (1, 4, 16) for nodes in (8, 16, 32, 64, 128, 256)),
    *((32, nodes) for nodes in (8, 16, 32, 64)),
]
# vLLM keeps a state of 3 MB per row
PEER_ROWS = 1024
RECURRENCE = f"vllm-{vllm.VERSION} fused_sigmoid_gating_delta_rule_update"


class Problem:
    """One layer's call. Memory layouts are vLLM's: the rows are part of a wider projection, the window is stored
    channel by channel within each of its three rows."""

    def __init__(self, requests: int, nodes: int, seed: int = 0, tree: list[int] | None = None):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.requests, self.nodes = requests, nodes
        rows, channels, heads = requests * nodes, timing.CONV_CHANNELS, timing.VALUE_HEADS
        head = timing.GDN_HEAD_DIM
        trees = [tree or timing.drafter_tree(nodes, rng)[0] for _ in range(requests)]
        max_depth = timing.HORIZON if tree is None else 32
        self.tree = abi.tree_batch(trees, nodes, max_depth)
        self.rows = abi.rows_of([nodes] * requests)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, device="cuda").to(dtype)

        self.mixed_qkv = normal(rows, channels + heads * head)[:, :channels]
        self.a, self.b = normal(rows, heads), normal(rows, heads)
        self.a_log, self.dt_bias = normal(heads, dtype=torch.float32), normal(heads)
        self.conv_weight = normal(channels, timing.CONV_WIDTH)
        self.conv_state = normal(requests, timing.CONV_WIDTH - 1, channels).transpose(1, 2)
        self.ssm_state = normal(requests, heads, head, head, dtype=torch.float32)
        self.slots = torch.randperm(requests, device="cuda").int()
        self.stash_qkv = torch.empty(rows, channels, dtype=torch.bfloat16, device="cuda")
        self.stash_gates = torch.empty(rows, 2, heads, device="cuda")
        self.out = torch.empty(rows, heads, head, dtype=torch.bfloat16, device="cuda")
        bf16 = 2
        self.num_bytes = (
            self.ssm_state.numel() * 4
            + bf16
            * (2 * rows * channels + requests * 3 * channels + channels * 4 + self.out.numel())
            + rows * heads * (2 * bf16 + 2 * 4)
        )
        # the state with two bf16 parts, times keys and queries
        self.flops = 2 * 2 * 2 * rows * heads * head * head

    def ours(self):
        lib = abi.lib()
        context, device = abi.context("cuda"), torch.device("cuda")
        params = lib.params("ddt_gdn_verify_params")
        layer = params.layer
        for name in ("conv_weight", "conv_state", "ssm_state", "stash_qkv", "stash_gates"):
            lib.fill_tensor(getattr(layer, name), getattr(self, name))
        for name in ("mixed_qkv", "a", "b", "a_log", "dt_bias", "out"):
            lib.fill_tensor(getattr(params, name), getattr(self, name))
        layer.state_slots = abi.i32_pointer(self.slots)
        params.query_start = abi.i32_pointer(self.rows.query_start)
        params.tree = tree = abi.tree_struct(self.tree)
        size = lib.ffi.new("size_t *")
        lib.check(lib.lib.ddt_gdn_verify_workspace_size(context, params, size))
        workspace = torch.empty(size[0], dtype=torch.uint8, device="cuda")
        params.workspace = lib.ffi.cast("void *", workspace.data_ptr())
        params.workspace_bytes = size[0]

        def run(keep=(self, tree, workspace)) -> None:
            lib.check(lib.lib.ddt_gdn_verify(context, params, lib.stream(device)))

        return run

    def peers(self) -> dict:
        if (why := vllm.available()) is not None:
            print(f"no {vllm.GDN}: {why}")
            return {}
        if self.requests * self.nodes > PEER_ROWS:
            return {}
        chain = vllm.GdnChain(
            self.mixed_qkv, self.a, self.b, self.a_log, self.dt_bias, self.conv_weight, None,
            self.conv_state, self.ssm_state,
        )  # fmt: skip
        return {vllm.GDN: chain, RECURRENCE: chain._delta_rule}


def bench(problem: Problem, out: str | None, replays: int, **more) -> None:
    cases = {"ours": problem.ours(), **problem.peers()}
    times = timing.measure(cases, replays=replays)
    floor = timing.floor_us(problem.num_bytes, problem.flops)
    for name in [name for name in cases if name != "ours"] or [None]:
        timing.record(
            out, op="gdn_verify", requests=problem.requests, nodes=problem.nodes, context=None, dtype="bf16",
            timing=times["ours"], floor_us=floor, peer=name, peer_timing=times[name] if name else None, **more,
        )  # fmt: skip


def main() -> None:
    args = timing.arguments(__doc__)
    for requests, nodes in SWEEP if args.sweep else QUICK:
        bench(Problem(requests, nodes), args.out, args.replays)
    if args.sweep:
        # two chains below the root, the first as deep as the library allows
        deep = [-1, *range(32), 0, *range(33, 63)]
        bench(Problem(1, 64, tree=deep), args.out, args.replays, shape="two chains")


if __name__ == "__main__":
    main()
