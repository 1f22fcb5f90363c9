# SPDX-License-Identifier: Apache-2.0
"""A DFlash2 drafter around a DFlash drafter, in plain PyTorch and in the checkpoint format of vLLM's `DFlash2DraftModel`
(https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/models/qwen3_dflash2.py): the drafter's layers,
convolutions over the block that change nothing, and a selector that scores each candidate below each of its parents.

Shapes as in nano.py; L drafted positions, K candidates each.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import nano
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

TAPS, GROUP = 2, 32


class Selector(nn.Module):
    """score[parent, child] = logit(child) + sum over r of predecessor[parent, r] * (P h)[r] * successor[child, r], with
    the hidden state h of the child's row. Names are those of the checkpoint."""

    def __init__(self, vocab: int, hidden: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank))
        # Nothing is added before training.
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, hidden: Tensor, parents: Tensor, children: Tensor, logits: Tensor) -> Tensor:
        """hidden [..., H], parents i64 [..., P], children i64 [..., K] and their logits [..., K] -> [..., P, K]."""
        gate = self.hidden_projection(hidden)[..., None, :]
        pairs = (self.predecessor_codebook[parents] * gate) @ self.successor_codebook[children].mT
        return logits[..., None, :] + pairs


def hidden_states(drafter: nano.Drafter, target: nano.Target, *args) -> Tensor:
    """`drafter(target, *args)` before the output embedding, [B, N, L, H]."""
    return drafter(SimpleNamespace(model=target.model, logits=lambda states: states), *args)


def walk(selector: Selector, hidden: Tensor, anchors: Tensor, tokens: Tensor, logits: Tensor) -> Tensor:
    """The chain that vLLM drafts: the best child of the anchor, its best child, and so on. hidden [B, L, H], anchors
    i64 [B], tokens i64 and logits [B, L, K] -> i64 [B, L]."""
    path, parent = [], anchors
    for step in range(hidden.shape[1]):
        scores = selector(hidden[:, step], parent[:, None], tokens[:, step], logits[:, step])
        parent = tokens[:, step].gather(1, scores[:, 0].argmax(-1, keepdim=True))[:, 0]
        path.append(parent)
    return torch.stack(path, 1)


def identity_convolutions(layers: int, hidden: int) -> dict[str, Tensor]:
    """Weights of convolutions of which only the tap of the row itself is 1, before and after attention and MLP."""
    weights = {}
    for layer in range(layers):
        for name in ("attention_conv", "mlp_conv"):
            base = torch.zeros(2, TAPS, hidden)
            base[:, 0] = 1
            weights[f"layers.{layer}.{name}.base_kernel"] = base
            weights[f"layers.{layer}.{name}.kernel_projection.weight"] = torch.zeros(
                2 * TAPS * hidden // GROUP, hidden
            )
    return weights


def save(drafter: nano.Drafter, selector: Selector, top_k: int, block_size: int, folder: Path) -> None:
    """Writes config.json and model.safetensors (bf16)."""
    config = dict(vars(drafter.config))
    hidden = config["hidden_size"]
    config |= {"architectures": ["DFlash2DraftModel"], "block_size": block_size}
    config["dflash_config"] = config["dflash_config"] | {
        "conv_kernel_size": TAPS,
        "conv_group_size": GROUP,
        "selector_rank": selector.predecessor_codebook.shape[1],
        "selector_top_k": top_k,
    }
    weights = drafter.state_dict() | identity_convolutions(config["num_hidden_layers"], hidden)
    weights |= {f"candidate_selector.{name}": x for name, x in selector.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.detach().to("cpu", torch.bfloat16).contiguous() for name, x in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
