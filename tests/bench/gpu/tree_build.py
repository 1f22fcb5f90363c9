# SPDX-License-Identifier: Apache-2.0
"""tree_build from logits and from candidate lattices, and tree_mask alone.

Beside tree_build: torch.topk and torch.logsumexp, which find the candidates but build no tree, in coupled mode with
noise of PyTorch's; and end to end, by the
host's clock, the same followed by a copy to the host, a best-first heap in Python (the algorithm of DDTree, arXiv
2604.12989) and a copy of the tree back. Beside tree_mask: SGLang's kernel for EAGLE's trees.
"""

import functools
import heapq
import random
import statistics
import time
from collections.abc import Callable

import abi
import timing
import torch
from peers import sglang, torch_name, torch_ops
from vllm_ddtree.trees import TreeBatch, TreeShape

LATTICE_DEPTHS = 7


class _Call:
    """A call of an operation whose memory stays where it is."""

    op = ""

    def __init__(self, shape: TreeShape):
        self.batch = TreeBatch.zeros(shape, torch.device("cuda"))
        self.params = abi.lib().params(f"ddt_{self.op}_params")
        self.params.tree = self.tree = abi.tree_struct(self.batch)
        self.keep: list[torch.Tensor] = []

    def _tensor(self, values, dtype: torch.dtype) -> torch.Tensor:
        self.keep.append(torch.as_tensor(values, dtype=dtype, device="cuda"))
        return self.keep[-1]

    def __call__(self) -> None:
        lib = abi.lib()
        run = getattr(lib.lib, f"ddt_{self.op}")
        lib.check(run(abi.context("cuda"), self.params, lib.stream(torch.device("cuda"))))


class Build(_Call):
    """From logits [R, L, V], or tokens [R, L, K] with scores [R, L, K] or transitions [R, L, K, K] or both."""

    op = "tree_build"

    def __init__(
        self, budget: int, logits=None, tokens=None, scores=None, transitions=None, temperature=None, spine=None
    ):
        requests, depths = (tokens if logits is None else logits).shape[:2]
        super().__init__(TreeShape(requests, budget + 1, depths))
        lib, params = abi.lib(), self.params
        for name, tensor in (
            ("logits", logits), ("candidate_tokens", tokens), ("candidate_scores", scores),
            ("transition_scores", transitions),
        ):  # fmt: skip
            lib.fill_tensor(getattr(params, name), tensor)
        self.keep += [t for t in (logits, tokens, scores, transitions) if t is not None]
        params.root_tokens = abi.i32_pointer(self._tensor(range(requests), torch.int32))
        params.root_positions = abi.i64_pointer(self._tensor([1000] * requests, torch.int64))
        params.node_budgets = abi.i32_pointer(self._tensor([budget] * requests, torch.int32))
        if temperature is not None:
            noise = self._tensor([temperature] * requests, torch.float32)
            params.temperatures = abi.f32_pointer(noise)
            params.seeds = abi.i64_pointer(self._tensor(range(requests), torch.int64))
        if spine is not None:
            params.spine_depths = abi.i32_pointer(self._tensor([spine] * requests, torch.int32))
        size = lib.ffi.new("size_t *")
        lib.check(lib.lib.ddt_tree_build_workspace_size(abi.context("cuda"), params, size))
        workspace = torch.empty(size[0], dtype=torch.uint8, device="cuda")
        self.keep.append(workspace)
        params.workspace = lib.ffi.cast("void *", workspace.data_ptr())
        params.workspace_bytes = size[0]


class Mask(_Call):
    """From the parents of trees in preorder."""

    op = "tree_mask"

    def __init__(self, fields: dict[str, torch.Tensor]):
        requests, nodes = fields["parents"].shape
        super().__init__(TreeShape(requests, nodes, fields["ancestors"].shape[2] - 1))
        params = self.params
        params.num_reqs, params.max_nodes = requests, nodes
        for name in ("num_nodes", "parents", "tokens"):
            setattr(params, name, abi.i32_pointer(self._tensor(fields[name], torch.int32)))
        params.priorities = abi.i32_pointer(self._tensor(fields["pop_ranks"], torch.int32))
        positions = self._tensor(fields["positions"][:, 0].contiguous(), torch.int64)
        params.root_positions = abi.i64_pointer(positions)

    def num_bytes(self) -> int:
        return self.batch.storage.nbytes + sum(tensor.nbytes for tensor in self.keep)


class HostHeap:
    """Candidates by the GPU, the tree by the host, its arrays on the GPU again."""

    def __init__(self, logits: torch.Tensor, budget: int):
        self.candidates, self.budget, self.out = torch_ops.TopK(logits, budget), budget, None

    def __call__(self) -> None:
        self.candidates()
        scores, tokens = (tensor.cpu().tolist() for tensor in self.candidates.out)
        trees = [self._tree(*row) for row in zip(scores, tokens)]
        nodes = self.budget + 1
        # tokens, parents and depths in best-first order; then which nodes see which
        table = torch.tensor(trees, dtype=torch.int32)
        sees = torch.zeros(len(trees), nodes, nodes, dtype=torch.bool)
        parents = table[:, 1].tolist()
        for r, row in enumerate(parents):
            mine = sees[r].numpy()
            mine[0, 0] = True
            for node, parent in enumerate(row[1:], 1):
                mine[node] = mine[parent]
                mine[node, node] = True
        self.out = table.cuda(), sees.cuda()

    def _tree(self, scores: list[list[float]], candidates: list[list[int]]) -> list[list[int]]:
        depth_limit = len(scores)
        heap = [(-scores[0][0], 0, 0, 0)]  # cost, parent, depth of the parent, rank among siblings
        tokens, parents, depths = [0], [-1], [0]
        while heap and len(tokens) <= self.budget:
            cost, parent, depth, rank = heapq.heappop(heap)
            node, row = len(tokens), scores[depth]
            tokens.append(candidates[depth][rank])
            parents.append(parent)
            depths.append(depth + 1)
            if rank + 1 < len(row):
                heapq.heappush(heap, (cost + row[rank] - row[rank + 1], parent, depth, rank + 1))
            if depth + 1 < depth_limit:
                heapq.heappush(heap, (cost - scores[depth + 1][0], node, depth + 1, 0))
        return [tokens, parents, depths]


def host_times(cases: dict[str, Callable[[], None]], replays: int) -> dict[str, timing.Timing]:
    """From an idle GPU until it is idle again, by the host's clock; L2 cold."""
    flush, samples = timing._flush(), {name: [] for name in cases}
    for run in cases.values():
        run()
    for _ in range(replays):
        for name, run in cases.items():
            flush()
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            samples[name].append(1e6 * (time.perf_counter() - start))
    return {
        name: timing.Timing(statistics.median(values), tenths[-1] - tenths[0])
        for name, values in samples.items()
        for tenths in [statistics.quantiles(values, n=10)]
    }


def drafter_logits(requests: int, depths: int, seed: int = 0) -> torch.Tensor:
    """bf16 logits whose most likely token has a probability of about 0.5 to 0.85, the others less by a Zipf law, over
    noise that nearly never matters."""
    torch.manual_seed(seed)
    rng, count = random.Random(seed), 400
    logits = torch.randn(requests, depths, timing.VOCAB, device="cuda") * 2
    zipf = torch.arange(1, count, device="cuda").float().reciprocal()
    for row in logits.view(-1, timing.VOCAB):
        first = rng.uniform(0.5, 0.85)
        likely = torch.cat([torch.tensor([first], device="cuda"), (1 - first) / zipf.sum() * zipf])
        at = torch.randperm(timing.VOCAB, device="cuda")[:count]
        row[at] = 22 + likely.log()
    return logits.bfloat16()


def bench_logits(requests: int, budgets: list[int], depths: int, args) -> None:
    logits = drafter_logits(requests, depths)
    ours = {budget: Build(budget, logits) for budget in budgets}
    peers = {budget: torch_ops.TopK(logits, budget) for budget in budgets}
    times = timing.measure(
        {f"ours {b}": call for b, call in ours.items()}
        | {f"peer {b}": call for b, call in peers.items()},
        args.replays,
    )
    if args.profile:
        return
    # the graph of one call, as a serving engine replays it
    graphs = {}
    for budget, call in ours.items():
        graphs[budget] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[budget]):
            call()
    host = host_times(
        {f"ours {b}": graph.replay for b, graph in graphs.items()}
        | {f"peer {b}": HostHeap(logits, b) for b in budgets},
        replays=min(args.replays, 15),
    )
    record = functools.partial(
        timing.record, args.out, op="tree_build", requests=requests, context=None, dtype="bf16", depth=depths,
        floor_us=timing.floor_us(logits.nbytes),
    )  # fmt: skip
    for budget in budgets:
        topk = torch_name(f"topk({budget}) + logsumexp")
        ours_key, peer_key = f"ours {budget}", f"peer {budget}"
        record(
            nodes=budget + 1, timing=times[ours_key], peer=topk, peer_timing=times[peer_key], mode="logits"
        )  # fmt: skip
        record(
            nodes=budget + 1, timing=host[ours_key], peer=f"{topk} + heap in Python", peer_timing=host[peer_key],
            mode="logits, end to end",
        )  # fmt: skip


def bench_coupled(requests: int, budgets: list[int], depths: int, args) -> None:
    """With the target's noise; at temperature 0 this is what a greedy request pays on a coupled server."""
    logits = drafter_logits(requests, depths)
    cases = {
        (budget, temperature): Build(budget, logits, temperature=temperature)
        for budget in budgets
        for temperature in (0.0, 1.0)
    }
    peers = {(budget, "peer"): torch_ops.NoisedTopK(logits, budget, 1.0) for budget in budgets}
    times = timing.measure(cases | peers, args.replays)
    for budget, temperature in cases:
        is_sampled = temperature > 0
        timing.record(
            args.out, op="tree_build", requests=requests, nodes=budget + 1, context=None, dtype="bf16", depth=depths,
            timing=times[budget, temperature], floor_us=timing.floor_us(logits.nbytes),
            peer=torch_name(f"noise + topk({budget}) + logsumexp") if is_sampled else None,
            peer_timing=times[budget, "peer"] if is_sampled else None,
            mode=f"logits, coupled, temperature {temperature:g}",
        )  # fmt: skip


def bench_lattices(requests: int, budgets: list[int], args) -> None:
    """A block of 8 as DFlash2 has it: alone, with pairs beside the scores, with pairs alone (as its selector gives
    them), and those with a spine. The peer is our builder from the logits of the same depths."""
    torch.manual_seed(0)
    logits = drafter_logits(requests, LATTICE_DEPTHS)
    cases, floors = {}, {}
    for budget in budgets:
        cases[budget, None, "logits"] = Build(budget, logits)
        for width in (8, 16, 32):
            shape = (requests, LATTICE_DEPTHS, width)
            tokens = torch.rand(*shape[:2], 4096, device="cuda").argsort(-1)[..., :width].int()
            tokens, scores = tokens.contiguous(), torch.randn(*shape, device="cuda") * 2
            pairs = torch.randn(*shape, width, device="cuda")
            for mode, unary, transitions, spine in (
                ("lattice", scores, None, None),
                ("lattice, transitions", scores, pairs, None),
                ("lattice, transitions alone", None, pairs, None),
                ("lattice, transitions alone, spine", None, pairs, LATTICE_DEPTHS),
            ):
                tensors = [t for t in (tokens, unary, transitions) if t is not None]
                case = budget, width, mode
                cases[case] = Build(budget, None, tokens, unary, transitions, spine=spine)
                floors[case] = timing.floor_us(sum(t.nbytes for t in tensors))
    times = timing.measure(cases, args.replays)
    for budget, width, mode in floors:
        timing.record(
            args.out, op="tree_build", requests=requests, nodes=budget + 1, context=None, dtype="f32",
            depth=LATTICE_DEPTHS, timing=times[budget, width, mode], floor_us=floors[budget, width, mode],
            peer="ours from logits", peer_timing=times[budget, None, "logits"], mode=f"{mode}, K {width}",
            candidates=width,
        )  # fmt: skip


def bench_mask(sizes: list[tuple[int, int]], args) -> None:
    cases, has_peer = {}, sglang.available() is None
    for size in sizes:
        fields = timing.drafter_trees(*size, context=1000)
        cases["ours", *size] = Mask(fields)
        if has_peer:
            cases["peer", *size] = sglang.Mask(fields)
    times = timing.measure(cases, args.replays)
    for size in sizes:
        timing.record(
            args.out, op="tree_mask", requests=size[0], nodes=size[1], context=None, dtype="i32",
            timing=times["ours", *size], floor_us=timing.floor_us(cases["ours", *size].num_bytes()),
            peer=sglang.MASK if has_peer else None, peer_timing=times.get(("peer", *size)),
        )  # fmt: skip


def main() -> None:
    args = timing.arguments(__doc__)
    budgets = [7, 15, 31, 63, 127, 255]
    for requests in (1, 2, 4, 8, 16, 32) if args.sweep else (1, 4, 16):
        bench_logits(requests, budgets, timing.HORIZON, args)
    if args.sweep:
        for depths in (1, 7, 31):
            bench_logits(1, [63], depths, args)
    for requests in (1, 4, 16):
        bench_coupled(requests, [15, 63] if args.quick else budgets, timing.HORIZON, args)
    for requests in (1, 16) if args.quick else (1, 4, 16):
        bench_lattices(requests, [15, 63] if args.quick else [7, 15, 31, 63], args)
    nodes = (64,) if args.quick else (8, 16, 32, 64, 128, 256)
    bench_mask([(requests, n) for requests in (1, 4, 16) for n in nodes], args)


if __name__ == "__main__":
    main()
