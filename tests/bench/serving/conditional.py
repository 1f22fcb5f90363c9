# SPDX-License-Identifier: Apache-2.0
"""Tokens per round of a DFlash2 drafter: vLLM's chain, trees of independent depths, trees of nodes that know their parents.

    python tests/models/train_selector.py --out OUT            # the nano pair's selector
    python tests/bench/serving/conditional.py --drafter OUT/dflash2 --budget 7 15 31 --out conditional.jsonl

One engine per mode and budget, one after another in this process. `chain` is vLLM's own walk over the candidates, as deep
as the drafter's block; `marginal` and `conditional` are `tree_scores`, `spine` is conditional with `tree_spine`. Rounds and
accepted tokens are vLLM's own, per request. The interval is the bootstrap over prompts; `gain` is to the chain of the same
temperature in this run, with the interval over prompts that both have. Keys of the records: ../README.md."""

import argparse
import json
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


def measure(args: argparse.Namespace, mode: str, budget: int, prompts: list[list[int]]) -> dict[float, Rounds]:
    """(rounds, accepted tokens) of each prompt, by temperature."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    depth = dict(num_speculative_tokens=args.depth)
    speculation = dict(model=args.drafter, **MODES[mode], **depth)
    if mode != "chain":
        speculation |= dict(tree_budget=budget, verify_mode=args.verify_mode)
    arguments = dict(
        model=args.target, dtype="bfloat16", max_num_seqs=args.batch, max_model_len=1024, enable_prefix_caching=False,
        disable_log_stats=False, per_request_spec_decode_metrics="summary", seed=0, mamba_ssm_cache_dtype="float32",
        speculative_config=speculation,
    )  # fmt: skip
    llm = LLM(**(arguments | json.loads(args.llm)))
    found = {}
    for temperature in args.temperature:
        sampling = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=args.tokens, ignore_eos=True)
            for i in range(len(prompts))
        ]
        outputs = llm.generate([dict(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False)
        histograms = [output.outputs[0].spec_decode_metrics.histogram for output in outputs]
        found[temperature] = [(sum(h), sum(j * count for j, count in enumerate(h))) for h in histograms]
    llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    return found


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
            for temperature, rounds in measure(args, mode, budget, prompts).items():
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
