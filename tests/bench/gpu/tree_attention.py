# SPDX-License-Identifier: Apache-2.0
"""Times ddt_tree_attention beside FlashInfer's paged prefill with a mask, vLLM's unified attention with qq_bias, and
FlashAttention 3, which vLLM runs on this GPU and which knows no trees: it attends the same rows as a chain.

The peers know one tree for all requests, so all requests get the same one. FlashInfer's plan and mask, which it
needs anew in every round, and FlashAttention's schedule are not timed."""

import random

import abi
import timing
import torch
from peers import flashinfer, vllm

QUICK = [(1, 64, 4096), (1, 64, 32768), (1, 16, 4096), (1, 16, 32768)]
SWEEP = [
    *(
        (1, nodes, context)
        for nodes in (8, 16, 32, 64, 128, 256)
        for context in (1024, 4096, 16384, 32768, 131072)
    ),
    *((requests, nodes, 4096) for requests in (4, 16) for nodes in (8, 16, 32, 64)),
    *((4, nodes, 32768) for nodes in (16, 64)),
    (16, 16, 32768),
]
# nodes, and the lengths of a batch
MIXED = [(16, [1024] * 7 + [131072]), (64, [1024, 2048, 4096, 65536])]


class Problem:
    """One layer's call: the rows of this step are in the cache."""

    def __init__(
        self, nodes: int, contexts: list[int], dtype: torch.dtype = torch.bfloat16, seed: int = 0
    ):
        torch.manual_seed(seed)
        requests, block_size = len(contexts), timing.KV_BLOCK_SIZE
        parents, _ = timing.drafter_tree(nodes, random.Random(seed))
        self.tree = abi.tree_batch([parents] * requests, nodes, 32)
        self.rows = abi.rows_of([nodes] * requests)
        shape = (requests * nodes, timing.QUERY_HEADS, timing.HEAD_DIM)
        self.query = torch.randn(shape, device="cuda").to(dtype)
        lengths = [context + nodes for context in contexts]
        blocks = [-(-length // block_size) for length in lengths]
        shape = (sum(blocks), 2, block_size, timing.KV_HEADS, timing.HEAD_DIM)
        cache = torch.randn(shape, device="cuda", dtype=dtype)
        self.key_cache, self.value_cache = cache[:, 0], cache[:, 1]
        order = torch.randperm(sum(blocks), device="cuda", dtype=torch.int32)
        self.block_table = torch.zeros(requests, max(blocks), dtype=torch.int32, device="cuda")
        for row, ids in zip(self.block_table, order.split(blocks)):
            row[: ids.numel()] = ids
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.out = torch.empty_like(self.query)
        self.scale = timing.HEAD_DIM**-0.5
        self.visible = torch.zeros(nodes, nodes, dtype=torch.bool)
        for node in range(nodes):
            i = node
            while i >= 0:
                self.visible[node, i] = True
                i = parents[i]
        self.visible = self.visible.cuda()
        element = self.query.element_size()
        self.num_bytes = (
            2 * element * timing.KV_HEADS * timing.HEAD_DIM * sum(lengths)
            + 2 * element * self.query.numel()
        )
        self.flops = 4 * nodes * timing.QUERY_HEADS * timing.HEAD_DIM * sum(lengths)

    def ours(self, portable: bool):
        lib, context = abi.lib(), abi.context("cuda", portable)
        params = lib.params("ddt_tree_attention_params")
        lib.fill_tensor(params.query, self.query)
        lib.fill_tensor(params.key_cache, self.key_cache.transpose(1, 2))
        lib.fill_tensor(params.value_cache, self.value_cache.transpose(1, 2))
        lib.fill_tensor(params.block_table, self.block_table)
        lib.fill_tensor(params.out, self.out)
        params.query_start = abi.i32_pointer(self.rows.query_start)
        params.seq_lens = abi.i32_pointer(self.seq_lens)
        tree = abi.tree_struct(self.tree)
        params.tree = tree
        params.softmax_scale = self.scale
        size = lib.ffi.new("size_t *")
        lib.check(lib.lib.ddt_tree_attention_workspace_size(context, params, size))
        workspace = torch.empty(size[0], dtype=torch.uint8, device="cuda")
        params.workspace = lib.ffi.cast("void *", workspace.data_ptr())
        params.workspace_bytes = size[0]

        def run(keep=(self, tree, workspace)) -> None:
            lib.check(lib.lib.ddt_tree_attention(context, params, lib.stream(torch.device("cuda"))))

        return run

    def peers(self) -> dict:
        paged = (
            self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens, self.scale,
        )  # fmt: skip
        found, missing = {}, {}
        for peer in (flashinfer, vllm):
            if (why := peer.available()) is None:
                found[peer.ATTENTION] = peer.Attention(*paged, self.visible)
            else:
                missing[peer.ATTENTION] = why
        if (why := vllm.flash_available()) is None:
            found[vllm.FLASH_ATTENTION] = vllm.FlashAttention(*paged)
        else:
            missing[vllm.FLASH_ATTENTION] = why
        for name in missing.keys() - _SAID:
            _SAID.add(name)
            print(f"no {name}: {missing[name]}")
        return found


_SAID: set = set()


def bench(
    problem: Problem, out: str | None, replays: int, requests: int, nodes: int, context: int, **more
) -> None:
    ours = {portable: problem.ours(portable) for portable in (False, True)}
    ours[True]()
    portable = problem.out.clone()
    ours[False]()
    difference = (problem.out - portable).float().norm() / portable.float().norm()
    assert difference < 1e-2, f"the variants differ by {difference}"
    peers = problem.peers()
    for name, peer in peers.items():
        peer()
        if name == vllm.FLASH_ATTENTION:  # another mask, other results
            continue
        difference = (peer.out - portable).float().norm() / portable.float().norm()
        if not difference < 2e-2:
            print(f"{name} differs by {difference}")
    cases = {"native": ours[False], "portable": ours[True], **peers}
    times = timing.measure(cases, replays=replays)
    floor = timing.floor_us(problem.num_bytes, problem.flops)
    for variant in ("native", "portable"):
        for name in peers or [None]:
            timing.record(
                out, op="tree_attention", requests=requests, nodes=nodes, context=context, dtype="bf16",
                timing=times[variant], floor_us=floor, peer=name, peer_timing=times[name] if name else None,
                variant=variant, **more,
            )  # fmt: skip


def main() -> None:
    args = timing.arguments(__doc__)
    for requests, nodes, context in SWEEP if args.sweep else QUICK:
        bench(
            Problem(nodes, [context] * requests), args.out, args.replays, requests, nodes, context
        )
    if args.sweep:
        for nodes, contexts in MIXED:
            problem = Problem(nodes, contexts)
            bench(
                problem,
                args.out,
                args.replays,
                len(contexts),
                nodes,
                max(contexts),
                contexts=contexts,
            )


if __name__ == "__main__":
    main()
