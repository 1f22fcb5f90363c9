# SPDX-License-Identifier: Apache-2.0
"""Drafters with candidate heads around the nano drafter: its layers, convolutions that change nothing, and a head of
random weights. Each function writes a checkpoint that vLLM's own class loads, and returns its folder."""

import json
import sys
from pathlib import Path

import torch
from engine import DRAFTER, MODELS
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(MODELS))
import dflash2 as models  # noqa: E402
import nano  # noqa: E402

TOP_K, RANK = 8, 16


def dflash2(folder: Path, scale: float = 1.0) -> Path:
    """A selector of random weights; what it adds to a score is about `scale`, 0 is nothing."""
    drafter = nano.load(nano.Drafter, DRAFTER)
    hidden, vocab = drafter.config.hidden_size, drafter.config.vocab_size
    torch.manual_seed(0)
    selector = models.Selector(vocab, hidden, RANK).requires_grad_(False)
    torch.nn.init.normal_(selector.successor_codebook, std=scale / RANK**0.5)
    torch.nn.init.normal_(selector.hidden_projection.weight, std=hidden**-0.5)
    models.save(drafter, selector, TOP_K, drafter.config.block_size, folder)
    return folder


def lilicorr(folder: Path) -> Path:
    """One layer over the lattice. Its pair scores replace the unary ones, so drafts are hardly better than random."""
    config = json.loads((DRAFTER / "config.json").read_text())
    hidden, block, inner, heads, factor = config["hidden_size"], config["block_size"], 64, 2, 16
    random = torch.Generator().manual_seed(0)
    head: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int, kind: str = "{}.{}") -> None:
        weight = torch.randn(rows, columns, generator=random) / columns**0.5
        head[kind.format(name, "weight")] = weight
        head[kind.format(name, "bias")] = torch.zeros(rows)

    for name in ("token_proj", "pass_hidden_proj", "context_proj"):
        linear(name, inner, hidden)
    linear("feature_mlp.up_proj", inner, 5)
    linear("feature_mlp.down_proj", inner, inner)
    linear("layers.0.mlp.up_proj", 2 * inner, inner)
    linear("layers.0.mlp.down_proj", inner, 2 * inner)
    linear("layers.0.attn.in_proj", 3 * inner, inner, kind="{}_{}")
    linear("layers.0.attn.out_proj", inner, inner)
    linear("factor_input_proj", inner, 3 * inner)
    for name in ("out_head", "in_head", "anchor_out_head"):
        linear(name, factor, inner)
    for name, size in (
        ("feature_norm", 5), ("output_norm", inner), ("anchor_norm", inner), ("layers.0.attn_norm", inner),
        ("layers.0.mlp_norm", inner),
    ):  # fmt: skip
        head[f"{name}.weight"] = torch.ones(size)
    head |= {
        "feature_norm.bias": torch.zeros(5),
        "slot_embedding": torch.zeros(1, 1, block - 1, 1, inner),
        "rank_embedding": torch.zeros(1, 1, 1, TOP_K, inner),
        "relative_slot_bias": torch.zeros(heads, 2 * block - 1),
        "same_slot_bias": torch.zeros(heads),
    }
    config["architectures"] = ["LiLiCorrDraftModel"]
    config["dflash_config"] |= {
        "block_size": block,
        "conv_kernel_size": models.TAPS,
        "conv_group_size": models.GROUP,
        "lilicorr_hidden_size": inner,
        "lilicorr_candidate_topk": TOP_K,
        "lilicorr_num_heads": heads,
        "lilicorr_num_layers": 1,
        "lilicorr_mlp_ratio": 2.0,
        "lilicorr_factor_dim": factor,
        "lilicorr_vector_eps": 1e-6,
        "lilicorr_logit_scale": 10.0,
    }
    weights = {f"lilicorr.{name}": w for name, w in head.items()}
    weights |= models.identity_convolutions(config["num_hidden_layers"], hidden)
    weights = load_file(DRAFTER / "model.safetensors") | {
        n: w.bfloat16() for n, w in weights.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors")
    return folder
