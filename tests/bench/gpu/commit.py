# SPDX-License-Identifier: Apache-2.0
"""Times ddt_commit for all layers of the target beside what a design with a state per node has to do in PyTorch:
gather the accepted node's state, scatter it, move KV rows by index.

The peer reads states of a few nodes only, so that it fits into memory at any size; it copies no windows. Beside it
stands the least that such a design could do: one kernel that reads and writes as many bytes as the states have."""

import random
import time

import abi
import timing
import torch
from peers import torch_name

COPY = torch_name("neg of all states, one kernel")
GATHER = torch_name("index_select + index_copy_ of states, indexing of KV rows")
# requests, nodes, accepted
QUICK = [(1, 64, 5), (16, 64, 5)]
SWEEP = [
    *((1, nodes, 5) for nodes in (8, 16, 32, 64, 128, 256)),
    *((1, 64, accepted) for accepted in (0, 1, 10, 15)),
    *((requests, 64, 5) for requests in (2, 4, 8, 16, 32)),
]
STATE = timing.VALUE_HEADS * timing.GDN_HEAD_DIM**2
PEER_NODES = 2


def path_of(parents: list[int], length: int) -> list[int]:
    """The last path of this length, which leaves the spine, or of the largest length there is."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([] if parent < 0 else [*paths[parent], node])
    longest = min(length, max(map(len, paths)))
    return [path for path in paths if len(path) == longest][-1]


class Problem:
    """A step of all layers: states and caches of the target, stashes as gdn_verify leaves them."""

    def __init__(self, requests: int, nodes: int, accepted: int, seed: int = 0):
        torch.manual_seed(seed)
        parents, _ = timing.drafter_tree(nodes, random.Random(seed))
        path = path_of(parents, accepted)
        self.requests, self.path, rows = requests, path, requests * nodes
        self.tree = abi.tree_batch([parents] * requests, nodes, 32)
        self.query_start = abi.rows_of([nodes] * requests).query_start
        self.num_accepted = torch.full((requests,), len(path), dtype=torch.int32, device="cuda")
        self.accepted = torch.full((requests, 32), -1, dtype=torch.int32, device="cuda")
        self.accepted[:, : len(path)] = torch.tensor(path, dtype=torch.int32, device="cuda")
        self.slots = torch.randperm(requests, device="cuda").int()

        def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=dtype)

        channels, heads, dim = timing.CONV_CHANNELS, timing.VALUE_HEADS, timing.GDN_HEAD_DIM
        gates = torch.stack([-torch.rand(rows, heads), torch.rand(rows, heads)], 1).cuda()
        self.gdn = [
            {
                "conv_weight": tensor(channels, timing.CONV_WIDTH) * 0.5,
                "conv_state": tensor(requests, timing.CONV_WIDTH - 1, channels).transpose(1, 2),
                "ssm_state": tensor(requests, heads, dim, dim, dtype=torch.float32),
                "stash_qkv": tensor(rows, channels),
                "stash_gates": gates.clone(),
            }
            for _ in range(timing.GDN_LAYERS)
        ]
        block, blocks = timing.KV_BLOCK_SIZE, -(-rows // timing.KV_BLOCK_SIZE) + 1
        shape = (blocks, 2, block, timing.KV_HEADS, timing.HEAD_DIM)
        self.kv = [tensor(*shape) for _ in range(timing.ATTENTION_LAYERS)]
        self.row_slots = torch.randperm(blocks * block, device="cuda")[:rows]
        kv_bytes = (
            2 * 2 * timing.KV_HEADS * timing.HEAD_DIM * 2 * len(path) * timing.ATTENTION_LAYERS
        )
        window_bytes = 2 * 2 * channels * (timing.CONV_WIDTH - 1) * timing.GDN_LAYERS
        stash_bytes = (len(path) + 1) * (2 * channels + 8 * heads) * timing.GDN_LAYERS
        state_bytes = 2 * 4 * STATE * timing.GDN_LAYERS
        self.num_bytes = requests * (state_bytes + window_bytes + stash_bytes + kv_bytes)

    def ours(self, gdn_layers: int = timing.GDN_LAYERS, kv_layers: int = timing.ATTENTION_LAYERS):
        lib = abi.lib()
        params, ctx = lib.params("ddt_commit_params"), abi.context("cuda")
        gdn, kv = lib.ffi.new("ddt_gdn_layer[]", 64), lib.ffi.new("ddt_kv_layer[]", 64)
        for out, layer in zip(gdn, self.gdn):
            for name, value in layer.items():
                lib.fill_tensor(getattr(out, name), value)
            out.state_slots = abi.i32_pointer(self.slots)
        for out, cache in zip(kv, self.kv):
            lib.fill_tensor(out.key_cache, cache[:, 0].transpose(1, 2))
            lib.fill_tensor(out.value_cache, cache[:, 1].transpose(1, 2))
            out.row_slots = abi.i64_pointer(self.row_slots)
        params.gdn_layers, params.num_gdn_layers = gdn, gdn_layers
        params.kv_layers, params.num_kv_layers = kv, kv_layers
        params.tree = tree = abi.tree_struct(self.tree)
        params.query_start = abi.i32_pointer(self.query_start)
        params.num_accepted = abi.i32_pointer(self.num_accepted)
        params.accepted_nodes = abi.i32_pointer(self.accepted)

        def run(keep=(self, gdn, kv, tree)) -> None:
            lib.check(lib.lib.ddt_commit(ctx, params, lib.stream(torch.device("cuda"))))

        return run

    def gather(self):
        """The peer. All requests have the same tree and path."""
        nodes = torch.arange(self.requests, device="cuda") * PEER_NODES + PEER_NODES - 1
        per_node = [layer["ssm_state"].repeat_interleave(PEER_NODES, 0) for layer in self.gdn]
        slots = self.slots.long()
        starts = self.query_start[:-1].long()[:, None]
        sources = self.row_slots[
            (starts + torch.tensor(self.path, dtype=torch.int64, device="cuda")).flatten()
        ]
        targets = self.row_slots[
            (starts + torch.arange(1, len(self.path) + 1, device="cuda")).flatten()
        ]
        block = timing.KV_BLOCK_SIZE
        source, target = ((rows // block, rows % block) for rows in (sources, targets))

        def run() -> None:
            for states, layer in zip(per_node, self.gdn):
                layer["ssm_state"].index_copy_(0, slots, states.index_select(0, nodes))
            for cache in self.kv:
                for rows in (cache[:, 0], cache[:, 1]):
                    rows[target] = rows[source]

        return run

    def copy(self):
        """The states of all layers, from one buffer to another."""
        states = torch.randn(timing.GDN_LAYERS * self.requests * STATE, device="cuda")
        out = torch.empty_like(states)
        return lambda: torch.neg(states, out=out)


def host_us(run) -> float:
    """Microseconds of the host per call: with cffi, without waiting for the GPU."""
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(10):
            run()
        times.append(1e5 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
    return sorted(times)[len(times) // 2]


def bench(requests: int, nodes: int, accepted: int, out: str | None, replays: int) -> None:
    problem = Problem(requests, nodes, accepted)
    cases = {
        "all": problem.ours(),
        "gdn": problem.ours(kv_layers=0),
        "kv": problem.ours(gdn_layers=0),
        COPY: problem.copy(),
    }
    peers = [COPY]
    if requests <= 16:
        cases[GATHER] = problem.gather()
        peers.append(GATHER)
    times = timing.measure(cases, replays)
    what = {
        "requests": requests,
        "nodes": nodes,
        "context": None,
        "dtype": "bf16",
        "accepted": len(problem.path),
    }
    for peer in peers:
        timing.record(
            out, op="commit", timing=times["all"], floor_us=timing.floor_us(problem.num_bytes),
            peer=peer, peer_timing=times[peer], host_us=round(host_us(cases["all"]), 1), **what,
        )  # fmt: skip
    for part in ("gdn", "kv"):
        timing.record(
            out,
            op="commit",
            timing=times[part],
            floor_us=None,
            variant=f"{part} layers only",
            **what,
        )


def main() -> None:
    args = timing.arguments(__doc__)
    for case in SWEEP if args.sweep else QUICK:
        bench(*case, args.out, 30 if args.quick else args.replays)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
