# SPDX-License-Identifier: Apache-2.0
"""The trained pair that `text.py` and `sampling.py` measure, and the held-out prompts."""

import argparse
import json
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
