# SPDX-License-Identifier: Apache-2.0
"""tree_accept from logits, greedy and sampled, beside what makes the same choices elsewhere: torch.argmax (no walk),
SGLang's walk after torch.argmax, vLLM's Gumbel sampler (no walk). Also the walk over a caller's tokens."""

import abi
import timing
import torch
from peers import sglang, torch_ops, vllm
from vllm_ddtree.trees import TreeBatch, TreeShape


class Accept:
    """One call: logits [R * N, V], or choices [R * N]; temperature None = the call has no temperatures."""

    def __init__(
        self,
        fields: dict[str, torch.Tensor],
        logits=None,
        choices=None,
        temperature: float | None = None,
    ):
        requests, nodes = fields["tokens"].shape
        shape = TreeShape(requests, nodes, fields["ancestors"].shape[2] - 1)
        self.batch = TreeBatch.zeros(shape, torch.device("cuda"))
        for name, field in fields.items():
            getattr(self.batch, name).copy_(field)
        self.keep = [logits, choices]
        lib = abi.lib()
        self.params = params = lib.params("ddt_tree_accept_params")
        self.tree = abi.tree_struct(self.batch)
        params.tree = self.tree
        params.query_start = abi.i32_pointer(
            self._tensor(range(0, requests * nodes + 1, nodes), torch.int32)
        )
        if logits is None:
            params.node_tokens = abi.i64_pointer(choices)
        else:
            lib.fill_tensor(params.logits, logits)
        if temperature is not None:
            params.temperatures = abi.f32_pointer(
                self._tensor([temperature] * requests, torch.float32)
            )
            params.seeds = abi.i64_pointer(self._tensor(range(requests), torch.int64))
        params.num_accepted = abi.i32_pointer(self._output(requests, torch.int32))
        params.accepted_nodes = abi.i32_pointer(
            self._output(requests * shape.max_depth, torch.int32)
        )
        params.output_tokens = abi.i64_pointer(
            self._output(requests * (shape.max_depth + 1), torch.int64)
        )
        params.accepted_rows = abi.i32_pointer(
            self._output(requests * (shape.max_depth + 1), torch.int32)
        )
        params.next_positions = abi.i64_pointer(self._output(requests, torch.int64))
        params.num_rejected = abi.i32_pointer(self._output(requests, torch.int32))
        size = lib.ffi.new("size_t *")
        lib.check(lib.lib.ddt_tree_accept_workspace_size(abi.context("cuda"), params, size))
        workspace = self._output(size[0], torch.uint8)
        params.workspace = lib.ffi.cast("void *", workspace.data_ptr())
        params.workspace_bytes = size[0]

    def _tensor(self, values, dtype: torch.dtype) -> torch.Tensor:
        self.keep.append(torch.tensor(list(values), dtype=dtype, device="cuda"))
        return self.keep[-1]

    def _output(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        self.keep.append(torch.empty(size, dtype=dtype, device="cuda"))
        return self.keep[-1]

    def __call__(self) -> None:
        lib = abi.lib()
        lib.check(
            lib.lib.ddt_tree_accept(
                abi.context("cuda"), self.params, lib.stream(torch.device("cuda"))
            )
        )


def follow_choices(fields: dict[str, torch.Tensor], choices: torch.Tensor) -> None:
    """Gives each best child the token that its parent's row chose, so that the walk goes down the greedy spine."""
    requests, nodes = fields["tokens"].shape
    first = fields["first_child"].long()
    rows, parents = torch.nonzero(first >= 0, as_tuple=True)
    fields["tokens"].fill_(timing.VOCAB)
    fields["tokens"][rows, first[rows, parents]] = choices.view(requests, nodes)[
        rows, parents
    ].int()


def bench(requests: int, nodes: int, args) -> None:
    logits = torch.randn(requests * nodes, timing.VOCAB, device="cuda") * 3
    half = logits.bfloat16()
    argmax = torch_ops.Argmax(half)
    argmax()
    fields = timing.drafter_trees(requests, nodes, context=1000)
    follow_choices(fields, argmax.out)
    cases = {
        "greedy": Accept(fields, half),
        "sampled": Accept(fields, half, temperature=1.0),
        "sampled f32": Accept(fields, logits, temperature=1.0),
        "tokens": Accept(fields, choices=argmax.out),
        torch_ops.ARGMAX: argmax,
    }
    peers = {"greedy": torch_ops.ARGMAX}
    if vllm.available() is None:
        cases |= {"vllm": vllm.Sample(half, 1.0), "vllm f32": vllm.Sample(logits, 1.0)}
        peers |= {"sampled": "vllm", "sampled f32": "vllm f32"}
    if sglang.available() is None:
        cases |= {
            "sglang": sglang.Accept(fields, half),
            "sglang tokens": sglang.Accept(fields, choices=argmax.out),
        }
        peers |= {"tokens": "sglang tokens"}
    times = timing.measure(cases, args.replays)
    names = {
        "vllm": vllm.SAMPLE,
        "vllm f32": vllm.SAMPLE,
        "sglang": sglang.ARGMAX_ACCEPT,
        "sglang tokens": sglang.ACCEPT,
    }
    for name, dtype, mode in (
        ("greedy", "bf16", "greedy"), ("sampled", "bf16", "sampled"), ("sampled f32", "f32", "sampled"),
        ("tokens", "i64", "tokens"),
    ):  # fmt: skip
        num_bytes = (
            {"i64": 8, "bf16": 2 * timing.VOCAB, "f32": 4 * timing.VOCAB}[dtype] * requests * nodes
        )
        peer = peers.get(name)
        timing.record(
            args.out, op="tree_accept", requests=requests, nodes=nodes, context=None, dtype=dtype,
            timing=times[name], floor_us=timing.floor_us(num_bytes), peer=names.get(peer, peer),
            peer_timing=times.get(peer), mode=mode,
        )  # fmt: skip
    if "sglang" in times:
        timing.record(
            args.out, op="tree_accept", requests=requests, nodes=nodes, context=None, dtype="bf16",
            timing=times["greedy"], floor_us=timing.floor_us(2 * timing.VOCAB * requests * nodes),
            peer=names["sglang"], peer_timing=times["sglang"], mode="greedy",
        )  # fmt: skip


def main() -> None:
    args = timing.arguments(__doc__)
    sizes = [(1, 64), (16, 64)]
    if args.sweep:
        sizes = [(1, n) for n in (8, 16, 32, 64, 128, 256)] + [
            (r, n) for r in (4, 16) for n in (8, 16, 32, 64)
        ]
    elif not args.quick:
        sizes = [(1, 16), (1, 64), (1, 256), (4, 64), (16, 16), (16, 64)]
    for requests, nodes in sizes:
        bench(requests, nodes, args)


if __name__ == "__main__":
    main()
