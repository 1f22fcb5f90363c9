# SPDX-License-Identifier: Apache-2.0
"""The trained pair that `text.py`, `sampling.py` and `conditional.py` measure, the held-out prompts, and what drafts are accepted."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=str(MODELS / "target"))
    parser.add_argument("--drafter", default=str(MODELS / "drafter"))
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--llm", default="{}", help="more arguments for vllm.LLM, as JSON")
    parser.add_argument("--out", help="JSON lines file to append to")


def held_out(args: argparse.Namespace) -> list[list[int]]:
    """Token ids of the first `args.prompts` prompts, or of all there are."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(args.target) / "tokenizer.json"))
    texts = [prompt["text"] for prompt in json.loads((MODELS / "prompts.json").read_text())]
    return [tokenizer.encode(text).ids for text in texts[: args.prompts]]


def name(args: argparse.Namespace) -> str:
    """`nano pair`, or `small pair` of a folder `small`."""
    folder = Path(args.target).resolve().parent
    return f"{'nano' if folder == MODELS else folder.name} pair"


def rounds_by_prompt(
    args: argparse.Namespace, speculation: dict, prompts: list[list[int]], **filters
) -> Iterator[tuple[float, list[tuple[int, int]]]]:
    """Serves the prompts at each of `args.temperature`, seeded by their place, `args.batch` in flight: the temperature
    and (rounds, accepted tokens) of each prompt, by vLLM's own counts. `filters`: more of vllm.SamplingParams."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    arguments = dict(
        model=args.target, dtype="bfloat16", max_num_seqs=args.batch, max_model_len=1024, enable_prefix_caching=False,
        disable_log_stats=False, per_request_spec_decode_metrics="summary", seed=0, mamba_ssm_cache_dtype="float32",
        speculative_config=speculation,
    )  # fmt: skip
    llm = LLM(**(arguments | json.loads(args.llm)))
    for temperature in args.temperature:
        sampling = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=args.tokens, ignore_eos=True, **filters)
            for i in range(len(prompts))
        ]
        outputs = llm.generate(
            [dict(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False
        )
        histograms = [output.outputs[0].spec_decode_metrics.histogram for output in outputs]
        yield temperature, [(sum(h), sum(j * count for j, count in enumerate(h))) for h in histograms]
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
