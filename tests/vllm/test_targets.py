# SPDX-License-Identifier: Apache-2.0
"""Targets of other shapes: a vision tower, experts, FP8, two ranks. All hold the nano target's weights, so that
the drafter's trees are accepted; the text is that of no speculation."""

import gc
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import targets
import torch
from engine import NEAR_TIE, Engine, Output, Run, assert_same_text, on_gpu, prompts, record

BUDGET, MAX_TOKENS, NUM_PROMPTS = 31, 32, 8
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS}


def compare(
    models: tuple[Path, Path],
    what: str,
    token_ids: list[list[int]],
    images: list[list] | None = None,
    near_tie: float = NEAR_TIE,
    **config: Any,
) -> tuple[Run, Run]:
    target, drafter = models
    config |= {"model": str(target)}
    with Engine(margins=True, **config) as engine:
        base = engine.generate(token_ids, GREEDY, images)
    spec = {"method": "ddtree", "tree_budget": BUDGET, "model": str(drafter)}
    with Engine(spec, **config) as engine:
        tree = engine.generate(token_ids, GREEDY, images)
    near_ties = assert_same_text(base, tree, what, near_tie)
    record(
        test=what,
        budget=BUDGET,
        prompts=len(token_ids),
        near_ties=near_ties,
        tokens_per_round=round(tree.tokens_per_round, 4),
    )
    assert near_ties <= len(token_ids) // 2, "too many near ties to show anything"
    assert tree.tokens_per_round > 1.5, "too little was accepted to show anything"
    return base, tree


def test_experts(tmp_path):
    compare(targets.experts(tmp_path), "experts", prompts(NUM_PROMPTS))


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="the image processor needs torchvision"
)
def test_images_and_text(tmp_path, monkeypatch):
    """Image positions advance on three axes; text requests beside them share their batches."""
    from PIL import Image

    if not on_gpu():
        # The interpreter that runs vLLM's kernels on the CPU lacks what the tower's needs.
        monkeypatch.setattr("vllm.model_executor.models.qwen3_vl.HAS_TRITON", False)

    random = np.random.default_rng(0)

    def image(width: int, height: int) -> Image.Image:
        return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))

    models = targets.vision(tmp_path)
    first = 1024  # the nano vocabulary's size
    start, end, pad, _ = range(first, first + 4)
    shown = [start, pad, end]
    text = prompts(NUM_PROMPTS)
    token_ids, images = [], []
    for i, ids in enumerate(text):
        half = len(ids) // 2
        token_ids.append(
            [ids, shown + ids, ids[:half] + shown + ids[half:], shown + ids + shown][i % 4]
        )
        images.append([image(64 + 32 * (i % 3), 96) for _ in range(token_ids[-1].count(pad))])
    limits = {"limit_mm_per_prompt": {"image": 2, "video": 0}}
    base, _ = compare(models, "images and text", token_ids, images, **limits)
    # The tower's output is noise, but it is not without effect.
    with Engine(model=str(models[0]), **limits) as engine:
        alone = engine.generate([text[1]], GREEDY)
    assert alone.outputs[0].token_ids != base.outputs[1].token_ids


@pytest.mark.skipif(not on_gpu(), reason="FP8 needs a GPU")
def test_fp8(tmp_path):
    """A step of FP8 is coarser than one of bf16: an activation that rounds the other way moves logits by more."""
    compare(
        targets.more_heads(tmp_path),
        "fp8",
        prompts(NUM_PROMPTS),
        near_tie=4 * NEAR_TIE,
        quantization="fp8_per_tensor",
    )


@pytest.mark.skipif(not on_gpu() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks(tmp_path, monkeypatch):
    """The sampler runs in the workers, out of reach of the margins: those are one rank's."""
    target, drafter = targets.more_heads(tmp_path)
    token_ids = prompts(NUM_PROMPTS)
    with Engine(margins=True, model=str(target)) as engine:
        base = engine.generate(token_ids, GREEDY)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import LLM, SamplingParams

    spec = {"method": "ddtree", "tree_budget": BUDGET, "model": str(drafter)}
    config = Engine(spec, model=str(target), tensor_parallel_size=2).config
    llm = LLM(**config)
    try:
        results = llm.generate(
            [{"prompt_token_ids": ids} for ids in token_ids],
            SamplingParams(**GREEDY, ignore_eos=True),
            use_tqdm=False,
        )
        drafts, accepted = (
            next(m.value for m in llm.get_metrics() if m.name == f"vllm:spec_decode_num_{name}")
            for name in ("drafts", "accepted_tokens")
        )
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    tree = Run([Output(tuple(r.outputs[0].token_ids), (), "length") for r in results])
    near_ties = assert_same_text(base, tree, "two ranks")
    assert near_ties <= NUM_PROMPTS // 2
    assert accepted > drafts / 2
