# SPDX-License-Identifier: Apache-2.0
"""Tokens per round of a DFlash2 drafter: vLLM's chain, trees of independent depths, trees of nodes that know their parents.

    python tests/models/train_selector.py --out OUT            # the nano pair's selector
    python tests/bench/serving/conditional.py --drafter OUT/dflash2 --budget 7 15 31 --out conditional.jsonl

One engine per mode and budget, one after another in this process. `chain` is vLLM's own walk over the candidates, as deep
as the drafter's block; `marginal` and `conditional` are `tree_scores`, `spine` is conditional with `tree_spine`. Rounds and
accepted tokens are vLLM's own, per request. The interval is the bootstrap over prompts; `gain` is to the chain of the same
temperature in this run, with the interval over prompts that both have. Keys of the records: ../README.md."""

import argparse
import os
import random

import pair
from rounds import provenance, report
from sampling import RESAMPLES, interval, tokens_per_round

MODES = {
    "chain": dict(method="dflash"),
    "marginal": dict(method="ddtree", tree_scores="marginal"),
    "conditional": dict(method="ddtree", tree_scores="conditional"),
    "spine": dict(method="ddtree", tree_scores="conditional", tree_spine=True),
}
Rounds = list[tuple[int, int]]


def gain(rounds: Rounds, base: Rounds) -> dict[str, float | list[float]]:
    """Ratio of tokens per round over the same prompts, and its 95 % interval."""
    rng, pairs = random.Random(0), list(zip(rounds, base, strict=True))

    def ratio(chosen: list[tuple[tuple[int, int], tuple[int, int]]]) -> float:
        ours, theirs = zip(*chosen, strict=True)
        return tokens_per_round(list(ours)) / tokens_per_round(list(theirs))

    ratios = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    middle = [round(ratios[int(share * RESAMPLES)], 3) for share in (0.025, 0.975)]
    return dict(gain=round(ratio(pairs), 3), gain_ci95=middle)


def speculation(args: argparse.Namespace, mode: str, budget: int) -> dict:
    config = dict(model=args.drafter, num_speculative_tokens=args.depth, **MODES[mode])
    return config if mode == "chain" else config | dict(tree_budget=budget, verify_mode=args.verify_mode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pair.add_arguments(parser)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--budget", type=int, nargs="+", default=[7, 15, 31], help="nodes of a tree")
    parser.add_argument("--depth", type=int, default=7, help="drafted tokens of the chain, and depth of a tree")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--verify-mode", choices=("match", "coupled"), default="match", help="of the trees")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16, help="requests in flight")
    args = parser.parse_args()
    prompts = pair.held_out(args)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    chains: dict[float, Rounds] = {}
    for mode in args.mode:
        for budget in [args.depth] if mode == "chain" else args.budget:
            for temperature, rounds in pair.rounds_by_prompt(args, speculation(args, mode, budget), prompts):
                if mode == "chain":
                    chains[temperature] = rounds
                compared = gain(rounds, chains[temperature]) if temperature in chains else {}
                line = dict(
                    mode=mode, temperature=temperature, budget=budget, depth=args.depth, verify_mode=args.verify_mode,
                    tokens_per_round=round(tokens_per_round(rounds), 3), ci95=interval(rounds), **compared,
                    prompts=len(prompts), rounds=sum(count for count, _ in rounds), tokens=args.tokens, batch=args.batch,
                    model=pair.name(args), **provenance("conditional.py"),
                )  # fmt: skip
                report(line, args.out)


if __name__ == "__main__":
    main()
