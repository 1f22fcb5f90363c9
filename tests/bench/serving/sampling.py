# SPDX-License-Identifier: Apache-2.0
"""Tokens per round of sampled text: vLLM's DFlash chain, trees that are matched, trees that are coupled.

    python tests/bench/serving/sampling.py --budget 15 63 --temperature 0 0.6 1 --out sampling.jsonl

One engine per mode and budget, one after another in this process. `chain` drafts as many tokens as the drafter's block
holds, whatever the budget; `chain-probabilistic` samples its drafts and verifies them by ratio. Rounds and accepted
tokens are vLLM's own, per request. The interval is the bootstrap over prompts. Keys of the records: ../README.md."""

import argparse
import os
import random

import pair
from rounds import provenance, report

MODES = ("chain", "match", "coupled", "chain-probabilistic")
RESAMPLES = 2000


def tokens_per_round(rounds: list[tuple[int, int]]) -> float:
    """Of (rounds, accepted tokens) by prompt."""
    return 1 + sum(accepted for _, accepted in rounds) / sum(count for count, _ in rounds)


def interval(rounds: list[tuple[int, int]]) -> list[float]:
    """The middle 95 % of the mean over resampled prompts."""
    rng = random.Random(0)
    means = sorted(tokens_per_round(rng.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    return [round(means[int(share * RESAMPLES)], 3) for share in (0.025, 0.975)]


def speculation(args: argparse.Namespace, mode: str, budget: int) -> dict:
    if mode.startswith("chain"):
        chain = dict(model=args.drafter, method="dflash", num_speculative_tokens=budget)
        return chain | (dict(draft_sample_method="probabilistic") if mode != "chain" else {})
    return dict(model=args.drafter, method="ddtree", tree_budget=budget, verify_mode=mode)


def measure(args: argparse.Namespace, mode: str, budget: int, prompts: list[list[int]]) -> None:
    filters = dict(top_k=args.top_k, top_p=args.top_p)
    for temperature, rounds in pair.rounds_by_prompt(args, speculation(args, mode, budget), prompts, **filters):
        line = dict(
            mode=mode, temperature=temperature, **filters, budget=budget,
            tokens_per_round=round(tokens_per_round(rounds), 3),
            ci95=interval(rounds), prompts=len(prompts), rounds=sum(count for count, _ in rounds), tokens=args.tokens,
            batch=args.batch, model=pair.name(args),
            **provenance("sampling.py"),
        )  # fmt: skip
        report(line, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pair.add_arguments(parser)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES[:3])
    parser.add_argument("--budget", type=int, nargs="+", default=[15, 63], help="nodes of a tree")
    parser.add_argument("--chain", type=int, default=15, help="drafted tokens of a chain")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--top-k", type=int, default=0, help="0: all")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16, help="requests in flight")
    args = parser.parse_args()
    prompts = pair.held_out(args)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    for mode in args.mode:
        for budget in [args.chain] if mode.startswith("chain") else args.budget:
            measure(args, mode, budget, prompts)


if __name__ == "__main__":
    main()
