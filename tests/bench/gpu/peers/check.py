# SPDX-License-Identifier: Apache-2.0
"""Compares every peer that is here with float64 on small inputs, or times it at the sizes of the goals.

    python -m peers.check [--time] [--out FILE.jsonl] [gdn attention sample sglang build]

in tests/bench/gpu.
"""

import argparse
import random
import sys
import time
import traceback

import timing
import torch

from . import flashinfer, sglang, torch_ops, vllm


def compare(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    """The norm of the difference over the norm of what was expected must be that of bf16 arithmetic."""
    error = float((out.double() - expected).norm() / expected.norm())
    print(f"{name}: error {error:.1e}")
    assert error < 1e-2, name


def gdn_inputs(
    requests: int, rows: int, key_heads: int, value_heads: int, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random inputs of a layer as a trained one has them: decays of a few percent a token, states of unit scale."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, dtype=torch.bfloat16, scale=1.0):
        return (scale * torch.randn(shape, generator=generator, device="cuda")).to(dtype)

    channels, size = (2 * key_heads + value_heads) * 128, requests * rows
    return {
        "mixed_qkv": normal(size, channels), "a": normal(size, value_heads), "b": normal(size, value_heads),
        "a_log": normal(value_heads, dtype=torch.float32, scale=0.5) - 2,
        "dt_bias": normal(value_heads, dtype=torch.float32),
        "conv_weight": normal(channels, 4, scale=0.5), "conv_bias": None,
        "conv_state": normal(requests, channels, 3),
        "ssm_state": normal(requests, value_heads, 128, 128, dtype=torch.float32, scale=0.1),
    }  # fmt: skip


def gdn_chain_float64(
    mixed_qkv, a, b, a_log, dt_bias, conv_weight, conv_bias, conv_state, ssm_state
) -> torch.Tensor:
    """Outputs [T, Hv, 128] of plain decoding, the recurrence of ddtree.h row by row; only the convolution's output is
    rounded, to the dtype of its input, as all backends do."""
    requests, value_heads = ssm_state.shape[:2]
    x = mixed_qkv.double().view(requests, -1, mixed_qkv.shape[1])
    rows, key_heads = x.shape[1], (x.shape[2] // 128 - value_heads) // 2
    window = torch.cat([conv_state.double().transpose(1, 2), x], dim=1)
    y = sum(conv_weight.double()[:, tap] * window[:, tap : tap + rows] for tap in range(4))
    if conv_bias is not None:
        y = y + conv_bias.double()
    y = torch.nn.functional.silu(y).to(mixed_qkv.dtype).double()
    q, k, v = (
        part.unflatten(2, (-1, 128))
        for part in y.split([key_heads * 128] * 2 + [value_heads * 128], dim=2)
    )
    q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    q, k = (part.repeat_interleave(value_heads // key_heads, dim=2) for part in (q, k))
    decay = torch.exp(
        -a_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double())
    )
    decay, beta = (
        decay.view(requests, rows, -1, 1),
        b.double().sigmoid().view(requests, rows, -1, 1),
    )
    state, out = ssm_state.double(), []
    for t in range(rows):
        state = state * decay[:, t, ..., None]
        u = beta[:, t] * (v[:, t] - (state @ k[:, t, ..., None])[..., 0])
        state = state + u[..., None] * k[:, t, :, None]
        out.append((state @ q[:, t, ..., None])[..., 0] * 128**-0.5)
    return torch.stack(out, dim=1).flatten(0, 1)


class Paged:
    """A filled KV cache of equal requests, blocks in random order, and the mask of one tree."""

    def __init__(self, requests, nodes, context, query_heads, kv_heads, dim, block_size, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)
        per_request = -(-(context + nodes) // block_size)
        shape = (requests * per_request, block_size, kv_heads, dim)
        self.key_cache, self.value_cache = (
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        self.query = torch.randn(
            requests * nodes,
            query_heads,
            dim,
            generator=generator,
            device="cuda",
            dtype=torch.bfloat16,
        )
        order = torch.randperm(requests * per_request, generator=generator, device="cuda").to(
            torch.int32
        )
        self.block_table = order.view(requests, per_request)
        self.seq_lens = torch.full((requests,), context + nodes, dtype=torch.int32, device="cuda")
        self.scale = dim**-0.5
        parents, _ = timing.drafter_tree(nodes, random.Random(seed))
        visible = torch.zeros(nodes, nodes, dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                visible[node] = visible[parent]
            visible[node, node] = True
        self.visible = visible.cuda()
        self.context, self.nodes, self.requests = context, nodes, requests

    def arguments(self) -> tuple:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.seq_lens,
            self.scale,
            self.visible,
        )

    def float64(self, visible: torch.Tensor) -> torch.Tensor:
        """What attention writes where a row sees the columns `visible` of its request's rows."""
        group = self.query.shape[1] // self.key_cache.shape[2]
        length, outs = self.context + self.nodes, []
        mask = torch.cat([visible.new_ones(self.nodes, self.context), visible], dim=1)
        for r in range(self.requests):
            blocks = self.block_table[r].long()
            k, v = (
                cache[blocks].flatten(0, 1)[:length].double()
                for cache in (self.key_cache, self.value_cache)
            )
            q = self.query[r * self.nodes : (r + 1) * self.nodes].double()
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(outs)


def check_gdn() -> None:
    inputs = gdn_inputs(requests=3, rows=12, key_heads=2, value_heads=6)
    peer = vllm.GdnChain(**inputs)
    expected = gdn_chain_float64(**inputs)
    peer.layer()
    compare(vllm.GDN_LAYER, peer.out, expected)
    if reason := vllm.fused_available():
        print(f"{vllm.FUSED_GDN}: {reason}")
    else:
        peer, expected = fused_gdn(3, 7, 2)
        peer()
        compare(vllm.FUSED_GDN, peer.out, expected)


def fused_gdn(
    requests: int, rows: int, key_heads: int, seed: int = 0
) -> tuple[vllm.FusedGdnChain, torch.Tensor]:
    """The fused peer and what it should write."""
    inputs = gdn_inputs(requests, rows, key_heads, 3 * key_heads, seed)
    gate = torch.randn(requests * rows, 3 * key_heads, 128, device="cuda").bfloat16()
    weight = torch.randn(128, device="cuda")
    expected = gdn_chain_float64(**inputs).bfloat16().double()
    expected = (
        expected * (expected.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    )
    expected = expected * torch.nn.functional.silu(gate.double())
    return vllm.FusedGdnChain(**inputs, gate=gate, norm_weight=weight), expected


def time_gdn(out: str | None, replays: int) -> None:
    for requests, rows in (1, 8), (1, 16), (1, 64), (16, 16):
        peer = vllm.GdnChain(**gdn_inputs(requests, rows, timing.KEY_HEADS, timing.VALUE_HEADS))
        cases = {vllm.GDN: peer, vllm.GDN_LAYER: peer.layer}
        if rows <= 8 and not vllm.fused_available():
            cases[vllm.FUSED_GDN], _ = fused_gdn(requests, rows, timing.KEY_HEADS)
        times = timing.measure(cases, replays)
        for name, value in times.items():
            timing.record(
                out, op="gdn_verify", requests=requests, nodes=rows, context=None, dtype="bf16", timing=value,
                floor_us=None, variant=name,
            )  # fmt: skip
        if (requests, rows) == (1, 64):
            for kernel, us in timing.kernel_times(peer.layer):
                print(f"    {us:8.2f} us {kernel[:90]}")


def attention_peers(paged: Paged) -> dict:
    peers = {}
    if not vllm.available():
        peers[vllm.ATTENTION] = vllm.Attention(*paged.arguments())
    if not flashinfer.available():
        peers[flashinfer.ATTENTION] = flashinfer.Attention(*paged.arguments())
    if not vllm.flash_available():
        peers[vllm.FLASH_ATTENTION] = vllm.FlashAttention(*paged.arguments()[:-1])
    return peers


def check_attention() -> None:
    for dim, block_size in (256, 16), (256, timing.KV_BLOCK_SIZE):
        paged = Paged(2, 21, 300, 12, 2, dim, block_size)
        tree, chain = (
            paged.float64(paged.visible),
            paged.float64(paged.visible.new_ones(21, 21).tril()),
        )
        for name, peer in attention_peers(paged).items():
            peer.out.fill_(float("nan"))
            peer()
            expected = chain if name == vllm.FLASH_ATTENTION else tree
            compare(f"{name}, blocks of {block_size}", peer.out, expected)


def time_attention(out: str | None, replays: int) -> None:
    for requests, nodes, context in (
        (1, 8, 4096),
        (1, 16, 4096),
        (1, 64, 4096),
        (1, 64, 32768),
        (16, 16, 4096),
    ):
        paged = Paged(
            requests,
            nodes,
            context,
            timing.QUERY_HEADS,
            timing.KV_HEADS,
            timing.HEAD_DIM,
            timing.KV_BLOCK_SIZE,
        )
        peers = attention_peers(paged)
        if flashinfer.ATTENTION in peers:
            print(
                f"    {flashinfer.ATTENTION}: mask and plan take {peers[flashinfer.ATTENTION].plan_us:.0f} us"
            )
        for name, value in timing.measure(peers, replays).items():
            timing.record(
                out, op="tree_attention", requests=requests, nodes=nodes, context=context, dtype="bf16", timing=value,
                floor_us=None, variant=name,
            )  # fmt: skip
        if (requests, nodes, context) == (1, 64, 4096):
            for name, peer in peers.items():
                for kernel, us in timing.kernel_times(peer):
                    print(f"    {name}: {us:.2f} us {kernel[:100]}")


def check_sampling() -> None:
    logits = torch.randn(5, 1000, device="cuda")
    peer = vllm.Sample(logits)
    peer()
    assert torch.equal(peer.out, logits.argmax(-1))
    # Its noise must give the softmax: a chi-squared statistic over many positions, about 7 for 8 tokens.
    draws, temperature = 100_000, 0.7
    row = torch.randn(1, 8, device="cuda")
    peer = vllm.Sample(row.expand(draws, 8).contiguous(), temperature, seed=5)
    peer()
    expected = draws * (row[0] / temperature).softmax(-1)
    statistic = ((torch.bincount(peer.out, minlength=8) - expected) ** 2 / expected).sum()
    print(f"{vllm.SAMPLE}: chi-squared {statistic:.1f}, 7 degrees of freedom")
    assert statistic < 30


def time_sampling(out: str | None, replays: int) -> None:
    for rows in 1, 16, 64, 256:
        for dtype, label in (torch.bfloat16, "bf16"), (torch.float32, "f32"):
            logits = torch.randn(rows, timing.VOCAB, device="cuda").to(dtype)
            cases = {torch_ops.ARGMAX: torch_ops.Argmax(logits)}
            if not vllm.available():
                cases[f"{vllm.SAMPLE} greedy"] = vllm.Sample(logits)
                cases[f"{vllm.SAMPLE} temperature 1"] = vllm.Sample(logits, 1.0)
            for name, value in timing.measure(cases, replays).items():
                timing.record(
                    out, op="tree_accept", requests=1, nodes=rows, context=None, dtype=label, timing=value,
                    floor_us=timing.floor_us(logits.nbytes), variant=name,
                )  # fmt: skip


def check_sglang() -> None:
    fields = timing.drafter_trees(3, 40, context=100)
    peer = sglang.Mask(fields)
    peer()
    names = ("first_child", "next_sibling")
    same = [torch.equal(peer.links[i + 1].int(), fields[name]) for i, name in enumerate(names)]
    same.append(torch.equal(peer.positions.view(3, 40), fields["positions"]))
    nodes = torch.arange(40, device="cuda")
    expected = (nodes[None, :] <= nodes[:, None]) & (
        nodes[:, None] < fields["subtree_end"][:, None, :]
    )
    same.append(torch.equal(peer.mask.view(3, 40, 40), expected))
    assert all(same), same
    # The target follows a leaf of each tree and then chooses a token that no child has.
    choices = torch.full((3, 40), timing.VOCAB + 1, device="cuda")
    paths = []
    for r, leaf in enumerate((39, 20, 8)):
        path = [node for node in fields["ancestors"][r, leaf].tolist() if node >= 0]
        choices[r, path[:-1]] = fields["tokens"][r, path[1:]].long()
        paths.append([40 * r + node for node in path])
    walk = sglang.Accept(fields, choices=choices.flatten())
    walk()
    got = [row[: n + 1] for row, n in zip(walk.accepted.tolist(), walk.num_accepted.tolist())]
    assert got == paths
    print(f"{sglang.MASK}, {sglang.ACCEPT}: links, positions, mask and paths are right")


def time_sglang(out: str | None, replays: int) -> None:
    for requests, nodes in (1, 16), (1, 64), (16, 16), (16, 64):
        fields = timing.drafter_trees(requests, nodes)
        logits = torch.randn(requests * nodes, timing.VOCAB, device="cuda").bfloat16()
        times = timing.measure(
            {
                sglang.MASK: sglang.Mask(fields),
                sglang.ACCEPT: sglang.Accept(
                    fields, choices=torch.zeros_like(logits[:, 0], dtype=torch.int64)
                ),
                sglang.ARGMAX_ACCEPT: sglang.Accept(fields, logits=logits),
            },
            replays,
        )
        for name, value in times.items():
            op = "tree_mask" if name == sglang.MASK else "tree_accept"
            timing.record(
                out, op=op, requests=requests, nodes=nodes, context=None, dtype="bf16", timing=value, floor_us=None,
                variant=name,
            )  # fmt: skip


def time_build(out: str | None, replays: int) -> None:
    for requests in 1, 16:
        logits = torch.randn(requests * timing.HORIZON, timing.VOCAB, device="cuda").bfloat16()
        cases = {torch_ops.TOPK: torch_ops.TopK(logits, 64)}
        for name, value in timing.measure(cases, replays).items():
            timing.record(
                out, op="tree_build", requests=requests, nodes=64, context=None, dtype="bf16", timing=value,
                floor_us=timing.floor_us(logits.nbytes), variant=name,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--out", help="JSON lines file to append times to")
    parser.add_argument("--replays", type=int, default=40)
    parser.add_argument("peers", nargs="*")
    args = parser.parse_args()
    reasons = {module.__name__: module.available() for module in (vllm, flashinfer, sglang)}
    reasons["vLLM's FlashAttention 3"] = vllm.flash_available()
    print(", ".join(f"{name}: {reason or 'here'}" for name, reason in reasons.items()), flush=True)
    steps = {
        "gdn": (check_gdn, time_gdn, vllm),
        "sample": (check_sampling, time_sampling, vllm),
        "attention": (check_attention, time_attention, None),
        "sglang": (check_sglang, time_sglang, sglang),
        "build": (None, time_build, None),
    }
    failed = False
    for name, (check, measure, module) in steps.items():
        step = measure if args.time else check
        if step is None or (args.peers and name not in args.peers):
            continue
        if module is not None and reasons[module.__name__]:
            continue
        begin = time.time()
        try:
            step(args.out, args.replays) if args.time else step()
        except Exception:  # the other peers still count
            traceback.print_exc()
            failed = True
        print(f"    {step.__name__}: {time.time() - begin:.1f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
