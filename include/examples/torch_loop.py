# SPDX-License-Identifier: Apache-2.0
"""DDTree decoding of a transformers model in plain PyTorch, without vLLM.

    PYTHONPATH=vllm_patch DDTREE_LIBRARY=PREFIX/lib/libddtree.so python include/examples/torch_loop.py

The target is transformers' own `Qwen3_5ForCausalLM`: its projections, norms and MLPs run as they
are, its attention and its gated delta nets on the rows of a tree are the library's. The drafter is
the nano DFlash drafter in plain PyTorch. Tensors may be on the CPU or on a GPU (`--device cuda`).

Shapes: n = rows of a round, V = vocabulary, H = hidden size, N and D = nodes and depth of a tree.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MODELS = Path(__file__).resolve().parents[2] / "tests" / "models"
sys.path.insert(0, str(MODELS))
import nano  # noqa: E402
from vllm_ddtree import ops  # noqa: E402
from vllm_ddtree.native import library  # noqa: E402
from vllm_ddtree.trees import TreeBatch, TreeShape  # noqa: E402

MAX_DEPTH = 32  # DDT_MAX_DEPTH
BLOCK = 16


class TreeTarget:
    """A hybrid target that runs all nodes of one tree in a forward, and keeps what it has committed:
    KV pages of each attention layer, one state and one window of each recurrent layer."""

    def __init__(self, model, max_tokens: int, max_nodes: int) -> None:
        self.model, self.device = model, model.device
        self.shape = TreeShape(1, max_nodes, MAX_DEPTH)
        self.trees = TreeBatch.zeros(self.shape, self.device)
        self.committed = 0  # tokens before the root

        blocks = -(-(max_tokens + max_nodes) // BLOCK)
        self.block_table = self.i32(*range(blocks)).view(1, -1)
        self.query_start, self.seq_lens = self.i32(0, 0), self.i32(0)
        self.state_slots = self.i32(0)
        self.row_slots = torch.zeros(max_nodes, dtype=torch.int64, device=self.device)
        self.num_accepted = self.i32(0)
        self.accepted_nodes = self.i32(*[0] * MAX_DEPTH).view(1, -1)
        self.output_tokens = torch.zeros(1, MAX_DEPTH + 1, dtype=torch.int64, device=self.device)

        self.attention, self.recurrent = {}, {}
        kv, gdn = [], []
        for i, layer in enumerate(model.model.layers):
            if hasattr(layer, "self_attn"):
                config = model.config
                size = (blocks, config.num_key_value_heads, BLOCK, config.head_dim)
                caches = self.zeros(*size), self.zeros(*size)
                kv.append((*caches, self.row_slots))
                scale = layer.self_attn.scaling
                self.attention[i] = caches, ops.AttentionPlan(*caches, scale, 0.0)
            else:
                net = layer.linear_attn
                conv_weight = net.conv1d.weight.squeeze(1)
                tensors = (
                    conv_weight,
                    self.zeros(1, net.conv_dim, net.conv_kernel_size - 1),
                    self.zeros(1, net.num_v_heads, net.head_v_dim, net.head_k_dim),
                    self.zeros(max_nodes, net.conv_dim),
                    self.zeros(max_nodes, 2, net.num_v_heads),
                )
                gdn.append((*tensors, self.state_slots, None))
                plan = ops.GdnVerifyPlan(net.A_log, net.dt_bias, conv_weight, None, *tensors[1:])
                self.recurrent[i] = plan
                net.forward = lambda hidden_states, net=net, **_: self.run_recurrent(net, hidden_states)
        # plans borrow: the library keeps no tensor alive
        self.kept = gdn, kv
        self.commit_plan = ops.CommitPlan(
            self.trees, gdn, kv, self.query_start, self.num_accepted, self.accepted_nodes, None
        )
        ALL_ATTENTION_FUNCTIONS.register("ddtree", self.run_attention)
        model.config._attn_implementation = "ddtree"

    def zeros(self, *size: int) -> torch.Tensor:
        return torch.zeros(size, device=self.device)

    def i32(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def run_attention(self, module, query, key, value, attention_mask, **_):
        """query [1, Hq, n, Dh], key and value [1, Hkv, n, Dh], rotated: writes the rows' KV, then
        attends to the committed tokens and to each row's path."""
        (keys, values), plan = self.attention[module.layer_idx]
        slots = self.row_slots[: query.shape[2]]
        keys[slots // BLOCK, :, slots % BLOCK] = key[0].transpose(0, 1)
        values[slots // BLOCK, :, slots % BLOCK] = value[0].transpose(0, 1)
        rows = query[0].transpose(0, 1)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        plan.run(rows, self.block_table, self.query_start, self.seq_lens, self.trees, out)
        return out[None], None

    def run_recurrent(self, net, x):
        """One gated delta net, x [1, n, H]: projections and norm are the module's own."""
        rows = x[0]
        out = torch.empty(len(rows), net.num_v_heads, net.head_v_dim, device=self.device)
        self.recurrent[net.layer_idx].run(
            net.in_proj_qkv(rows),
            net.in_proj_a(rows),
            net.in_proj_b(rows),
            self.state_slots,
            self.query_start,
            self.trees,
            out,
        )
        gated = net.norm(out.flatten(0, 1), net.in_proj_z(rows).view(-1, net.head_v_dim))
        return net.out_proj(gated.view(1, len(rows), -1))

    def forward(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Logits [n, V] of every node of `trees`, and each layer's outputs [1, n, H]."""
        n = int(self.trees.num_nodes[0])
        self.query_start[1], self.seq_lens[0] = n, self.committed + n
        self.row_slots.copy_(self.committed + torch.arange(len(self.row_slots)))
        out = self.model.model(
            input_ids=self.trees.tokens[:, :n].long(),
            position_ids=self.trees.positions[:, :n],
            # the library knows who sees whom
            attention_mask={"full_attention": None, "linear_attention": None},
            use_cache=False,
            output_hidden_states=True,
        )
        return self.model.lm_head(out.last_hidden_state[0]), out.hidden_states[1:]

    def accept(self, node_tokens: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Walks along the target's token after each node, i64 [n], and commits the path: the
        tokens that follow the root, and the rows of the root and of the accepted nodes."""
        torch.ops.ddtree.tree_accept(
            node_tokens,
            self.query_start,
            self.trees.storage,
            self.shape.max_nodes,
            MAX_DEPTH,
            1,
            self.num_accepted,
            self.accepted_nodes,
            self.output_tokens,
        )
        self.commit_plan.run(1)
        accepted = int(self.num_accepted[0])
        self.committed += accepted + 1
        rows = torch.cat([self.i32(0), self.accepted_nodes[0, :accepted]])
        return self.output_tokens[0, : accepted + 1].tolist(), rows.long()

    def chain(self, tokens: list[int]) -> None:
        """Makes `trees` the chain of these tokens: a prompt is verified like a tree whose every
        node is right."""
        lib = library()
        params = lib.params("ddt_tree_mask_params")
        params.num_reqs, params.max_nodes = 1, self.shape.max_nodes
        padding = [0] * (self.shape.max_nodes - len(tokens))
        inputs = {
            "num_nodes": self.i32(len(tokens)),
            "tokens": self.i32(*tokens, *padding),
            "parents": self.i32(*range(-1, len(tokens) - 1), *padding),
        }
        for name, tensor in inputs.items():
            setattr(params, name, lib.pointer(tensor, "int32_t", torch.int32))
        position = torch.tensor([self.committed], device=self.device)
        params.root_positions = lib.pointer(position, "int64_t", torch.int64)
        params.tree = self.trees.described()
        lib.call("tree_mask", params, self.device)


@torch.no_grad()
def decode(model, drafter, prompt: list[int], count: int, budget: int) -> tuple[list[int], list[int]]:
    """Greedy text of at least `count` tokens after the prompt, and how many drafted tokens each round accepted."""
    horizon = min(drafter.config.block_size - 1, budget)
    target = TreeTarget(model, len(prompt) + count, max(budget + 1, MAX_DEPTH))
    draft_head = SimpleNamespace(model=model.model, logits=model.lm_head)
    taps = torch.zeros(1, 0, 0, device=model.device)

    def forward_and_accept(given: list[int] | None) -> list[int]:
        nonlocal taps
        logits, layers = target.forward()
        choices = logits.argmax(-1) if given is None else torch.tensor(given, device=model.device)
        tokens, rows = target.accept(choices)
        tapped = torch.cat([layers[i][:, rows] for i in drafter.layer_ids], -1)
        taps = torch.cat([taps, tapped], 1) if taps.shape[1] else tapped
        return tokens

    for start in range(0, len(prompt) - 1, MAX_DEPTH):
        chunk = prompt[start : min(start + MAX_DEPTH, len(prompt) - 1)]
        target.chain(chunk)
        forward_and_accept(prompt[start + 1 : start + 1 + len(chunk)])

    text, accepted = [], []
    root = prompt[-1]
    while len(text) < count:
        position = torch.tensor([target.committed], device=model.device)
        anchor = torch.tensor([[root]], device=model.device)
        if taps.shape[1]:
            logits = drafter(draft_head, anchor, position, taps, horizon)[0]
        else:  # nothing before the root to draft from
            logits = torch.zeros(1, horizon, model.config.vocab_size, device=model.device)
        torch.ops.ddtree.tree_build(
            logits,
            anchor[0].int(),
            position,
            target.i32(budget),
            target.i32(0),
            target.i32(-1).view(1, 1),
            target.i32(0),
            target.trees.storage,
            1,
            target.shape.max_nodes,
            MAX_DEPTH,
        )
        tokens = forward_and_accept(None)
        text += tokens
        accepted.append(len(tokens) - 1)
        root = tokens[-1]
    return text, accepted


def compare(device: str, num_prompts: int, count: int, budget: int) -> list[tuple[list[int], ...]]:
    """Decodes held-out prompts with trees, and checks that the texts are those that transformers
    generates by itself: for each the prompt, the text and what its rounds accepted."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    entries = json.loads((MODELS / "prompts.json").read_text())[:num_prompts]
    prompts = [tokenizer(entry["text"]).input_ids for entry in entries]
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    model = model.to(device).eval()
    drafter = nano.load(nano.Drafter, MODELS / "drafter").to(device)

    # before the first tree: afterwards the model's layers read trees
    plain = []
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=device)
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        plain.append(out[0, len(prompt) :].tolist())

    results = []
    for prompt, want in zip(prompts, plain, strict=True):
        text, accepted = decode(model, drafter, prompt, count, budget)
        assert text[:count] == want, f"{text}\nis not transformers' own\n{want}"
        print(repr(tokenizer.decode(want))[:100])
        results.append((prompt, text, accepted))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--budget", type=int, default=31)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()

    results = compare(arguments.device, arguments.prompts, arguments.tokens, arguments.budget)
    rounds = sum(len(accepted) for _, _, accepted in results)
    tokens = sum(len(text) for _, text, _ in results)
    print(f"{len(results)} texts as transformers generates them, {tokens / rounds:.2f} tokens a round")


if __name__ == "__main__":
    main()
