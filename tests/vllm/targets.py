# SPDX-License-Identifier: Apache-2.0
"""Other targets with the nano target's weights in them, so that its drafter drafts for them: more heads, experts,
a vision tower. Each function writes two checkpoints and returns the target's and the drafter's folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from engine import DRAFTER, TARGET
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _write(folder: Path, source: Path, change: Callable[[dict, Weights], tuple[dict, Weights]]):
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config, weights = change(config, load_file(source / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    return folder


def more_heads(folder: Path) -> tuple[Path, Path]:
    """Every head twice, and half of each one's output: the same functions on two ranks."""

    def twice(config: dict, weights: Weights) -> tuple[dict, Weights]:
        for name in config:
            if name.endswith(("_heads", "_value_heads", "_key_heads")):
                config[name] *= 2
        for name, w in weights.items():
            part = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
            if part in ("in_proj_qkv", "conv1d"):
                # one key head and two value heads of 128
                weights[name] = torch.cat([x for x in w.split((128, 128, 256)) for _ in range(2)])
            elif part in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias"):
                weights[name] = torch.cat([w, w])
            elif part in ("q_proj", "k_proj", "v_proj"):
                weights[name] = torch.cat([w, w])
            elif part in ("out_proj", "o_proj"):
                weights[name] = torch.cat([w, w], 1) / 2
        return config, weights

    return (
        _write(folder / "target", TARGET, twice),
        _write(folder / "drafter", DRAFTER, twice),
    )


def experts(folder: Path, count: int = 8, used: int = 2) -> tuple[Path, Path]:
    """Each expert a little different from the nano target's MLP; the shared expert adds little."""

    def change(config: dict, weights: Weights) -> tuple[dict, Weights]:
        random = torch.Generator().manual_seed(0)

        def noise(shape: tuple[int, ...], scale: float) -> torch.Tensor:
            return (scale * torch.randn(shape, generator=random)).to(torch.bfloat16)

        hidden, inner = config["hidden_size"], config.pop("intermediate_size")
        config |= {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            "moe_intermediate_size": inner,
            "shared_expert_intermediate_size": inner,
            "num_experts": count,
            "num_experts_per_tok": used,
        }
        for layer in range(config["num_hidden_layers"]):
            mlp = f"model.layers.{layer}.mlp."
            for part in ("gate_proj", "up_proj", "down_proj"):
                w = weights.pop(f"{mlp}{part}.weight")
                for i in range(count):
                    weights[f"{mlp}experts.{i}.{part}.weight"] = w * (1 + noise(w.shape, 0.02))
                weights[f"{mlp}shared_expert.{part}.weight"] = noise(w.shape, 0.02)
            weights[f"{mlp}gate.weight"] = noise((count, hidden), 1.0)
            weights[f"{mlp}shared_expert_gate.weight"] = noise((1, hidden), 0.02)
        return config, weights

    return _write(folder / "target", TARGET, change), DRAFTER


def vision(folder: Path) -> tuple[Path, Path]:
    """A random vision tower before the nano target, and four more tokens for it."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer, Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    target, drafter = folder / "target", folder / "drafter"
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    first = len(tokenizer)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in VISION_TOKENS])
    ids = {name: first + i for i, name in enumerate(VISION_TOKENS)}

    def target_of(config: dict, weights: Weights) -> tuple[dict, Weights]:
        tower = Qwen3_5VisionConfig(
            depth=2,
            hidden_size=128,
            intermediate_size=256,
            num_heads=2,
            out_hidden_size=config["hidden_size"],
            num_position_embeddings=64,
        )
        torch.manual_seed(0)
        model = Qwen3_5VisionModel(tower).to(torch.bfloat16)
        text = {name: config[name] for name in config if name != "architectures"}
        text["vocab_size"] += len(VISION_TOKENS)
        # Text has equal positions on all three axes, so it is the nano target's.
        text["rope_parameters"] |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
        embedding = weights["model.embed_tokens.weight"]
        none = embedding.new_zeros(len(VISION_TOKENS), embedding.shape[1])
        weights["model.embed_tokens.weight"] = torch.cat([embedding, none])
        weights = {
            name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()
        }
        weights |= {f"model.visual.{name}": w for name, w in model.state_dict().items()}
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "dtype": "bfloat16",
            "tie_word_embeddings": config["tie_word_embeddings"],
            "text_config": text,
            "vision_config": tower.to_dict(),
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
        }, weights

    def drafter_of(config: dict, weights: Weights) -> tuple[dict, Weights]:
        return config | {"vocab_size": config["vocab_size"] + len(VISION_TOKENS)}, weights

    _write(target, TARGET, target_of)
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    sizes = {"size": size, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
    processor = Qwen3VLProcessor(
        Qwen2VLImageProcessor(**sizes), tokenizer, Qwen3VLVideoProcessor(**sizes)
    )
    processor.save_pretrained(target)
    return target, _write(drafter, DRAFTER, drafter_of)
