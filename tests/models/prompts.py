# SPDX-License-Identifier: Apache-2.0
"""Held-out prompts: windows of 8 to 160 tokens, each starting at a line of a standard library file never trained on.

    python3 tests/models/prompts.py --count 96 > tests/models/prompts.json

writes a JSON list of {"file", "num_tokens", "text"}. The committed list is what the tests use: another Python version has other text.
"""

import argparse
import json
import random
from pathlib import Path

import corpus
from tokenizers import Tokenizer

MIN_TOKENS, MAX_TOKENS = 8, 160


def extract(tokenizer: Tokenizer, texts: dict[str, str], count: int, seed: int = 0) -> list[dict]:
    """`count` prompts from `texts`, going round the files; lengths are spread evenly over the range."""
    rng = random.Random(seed)
    files = [(name, text) for name, text in texts.items() if len(text) > 4000]
    if not files:
        raise ValueError("no held-out file is long enough: is the standard library's source installed?")
    lengths = [MIN_TOKENS + i * (MAX_TOKENS - MIN_TOKENS) // max(1, count - 1) for i in range(count)]
    rng.shuffle(lengths)
    prompts = []
    while len(prompts) < count:
        name, text = files[len(prompts) % len(files)]
        lines = text.split("\n")
        start = rng.randrange(len(lines))
        if not lines[start].strip():
            continue
        ids = tokenizer.encode("\n".join(lines[start:])).ids[: lengths[len(prompts)]]
        prompt = tokenizer.decode(ids)
        # A cut inside a multi-byte character, or one that tokenizes otherwise on its own, is not a usable prompt.
        if len(ids) < lengths[len(prompts)] or tokenizer.encode(prompt).ids != ids:
            continue
        prompts.append({"file": name, "num_tokens": len(ids), "text": prompt})
    return prompts


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--tokenizer", type=Path, default=here / "target/tokenizer.json")
    args = parser.parse_args()
    prompts = extract(Tokenizer.from_file(str(args.tokenizer)), corpus.load("heldout"), args.count)
    print(json.dumps(prompts, indent=1))


if __name__ == "__main__":
    main()
