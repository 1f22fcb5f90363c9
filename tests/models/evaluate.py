# SPDX-License-Identifier: Apache-2.0
"""Plain greedy chain drafting on held-out prompts, without any cache: every round recomputes the whole sequence.

    python3 tests/models/evaluate.py        # tests/models/{target,drafter,prompts.json}

prints the tokens that one round yields (accepted tokens and the target's own next one), for several chain lengths.
"""

import argparse
import json
from pathlib import Path

import nano
import torch
from torch import Tensor


@torch.no_grad()
def chain_rounds(target: nano.Target, drafter: nano.Drafter, prompts: list[list[int]], k: int, max_tokens: int) -> list[list[int]]:
    """Greedy speculation with a chain of k tokens. Returns, for each prompt, the number of tokens that each round gave until
    `max_tokens` were generated; the token that the prompt itself yields belongs to no round and does not count."""
    device = next(target.parameters()).device
    longest = max(map(len, prompts)) + max_tokens + 2 * k + 2  # a finished row may be a round over, and is drafted for still
    tokens = torch.zeros(len(prompts), longest + -longest % 8, dtype=torch.long, device=device)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    ends = lengths + 1 + max_tokens
    rows = torch.arange(len(prompts), device=device)
    tokens[rows, lengths] = greedy(target, tokens)[0][rows, lengths - 1]
    lengths = lengths + 1
    rounds = [[] for _ in prompts]
    while (lengths < ends).any():
        last = (lengths - 1)[:, None]
        _, taps = greedy(target, tokens, drafter.layer_ids)
        drafts = drafter(target, tokens.gather(1, last), last, taps, k)[:, 0].argmax(-1)
        slots = lengths[:, None] + torch.arange(k, device=device)
        trial = tokens.scatter(1, slots, drafts)
        wanted = greedy(target, trial)[0].gather(1, last + torch.arange(k + 1, device=device))
        accepted = (drafts == wanted[:, :k]).int().cumprod(1).sum(1)
        active = lengths < ends
        written = torch.arange(k + 1, device=device) <= torch.where(active, accepted, -1)[:, None]
        slots = lengths[:, None] + torch.arange(k + 1, device=device)
        tokens.scatter_(1, slots, torch.where(written, wanted, tokens.gather(1, slots)))
        for i in rows[active].tolist():
            rounds[i].append(int(accepted[i]) + 1)
        lengths = lengths + torch.where(active, accepted + 1, 0)
    return rounds


def greedy(target: nano.Target, tokens: Tensor, layer_ids=()) -> tuple[Tensor, Tensor | None]:
    hidden, taps = target(tokens, layer_ids)
    return target.logits(hidden).argmax(-1), taps


def tokens_per_round(rounds: list[list[int]]) -> float:
    return sum(map(sum, rounds)) / sum(map(len, rounds))


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=here, help="folder with target/ and drafter/")
    parser.add_argument("--prompts", type=Path, default=here / "prompts.json")
    parser.add_argument("--count", type=int, default=96, help="prompts to use")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, nargs="+", default=[3, 7, 15], help="chain lengths")
    args = parser.parse_args()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(args.models / "target/tokenizer.json"))
    target, drafter = nano.load(nano.Target, args.models / "target"), nano.load(nano.Drafter, args.models / "drafter")
    prompts = [tokenizer.encode(p["text"]).ids for p in json.loads(args.prompts.read_text())[: args.count]]
    for k in args.k:
        rounds = chain_rounds(target, drafter, prompts, k, args.max_tokens)
        print(f"k={k}: {tokens_per_round(rounds):.3f} tokens per round in {sum(map(len, rounds))} rounds", flush=True)


if __name__ == "__main__":
    main()
