# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a trained pair on held-out prompts: no speculation, vLLM's DFlash chains, our trees.

    python tests/bench/serving/text.py --chain 3 7 15 --budget 7 15 31 63 --batch 1 4 16 --temperature 0 1 --out text.jsonl

One engine after another in this process. A batch of requests starts at once; only rounds in which all of them decode
count, as in rounds.py, so the speed is that of decoding. Keys of the records: ../README.md."""

import argparse
import gc
import json
import os
import statistics

import pair
from rounds import generate, provenance, report


class Served:
    """One engine, alive until `close`."""

    def __init__(self, args: argparse.Namespace, method: str, size: int) -> None:
        from vllm import LLM

        arguments = dict(
            model=args.target, max_num_seqs=max(args.batch), max_model_len=1024, enable_prefix_caching=False,
            disable_log_stats=False, seed=0, mamba_ssm_cache_dtype="float32", kv_cache_memory_bytes=4 << 30,
        )  # fmt: skip
        if method == "chain":
            arguments["speculative_config"] = dict(
                model=args.drafter, method="dflash", num_speculative_tokens=size
            )
        elif method != "none":
            arguments["speculative_config"] = dict(
                model=args.drafter, method="ddtree", tree_budget=size,
                verify_mode="coupled" if method == "ddtree-coupled" else "match",
            )  # fmt: skip
        self.shape = dict(ddtree_shape="chain") if method == "ddtree-chain" else None
        self.llm = LLM(**(arguments | json.loads(args.llm)))
        self.calls = 0

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()

    def run(self, prompts: list[list[int]], batch: int, temperature: float, tokens: int) -> dict:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        runs = []
        for start in range(0, len(prompts), batch):
            some = prompts[start : start + batch]
            params = [
                SamplingParams(
                    temperature=temperature, seed=start + i, max_tokens=tokens, ignore_eos=True, detokenize=False,
                    output_kind=RequestOutputKind.DELTA, extra_args=self.shape,
                )
                for i in range(len(some))
            ]  # fmt: skip
            self.calls += 1
            runs.append(generate(self.llm.llm_engine, str(self.calls), some, params))
        seconds, rounds, made = (
            sum(getattr(run, f"steady_{what}") for run in runs) for what in ("seconds", "rounds", "tokens")
        )
        if not rounds:
            raise SystemExit(f"texts of {tokens} tokens end before {batch} requests decode side by side; raise --tokens")
        return dict(
            ms_per_round=round(1e3 * seconds / rounds, 3), tokens_per_round=round(made / rounds, 3),
            tokens_per_s=round(made * batch / seconds, 1), ttft_ms=round(1e3 * statistics.median(run.ttft for run in runs), 1),
            rounds=rounds,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pair.add_arguments(parser)
    parser.add_argument("--chain", type=int, nargs="*", default=[3, 7, 15], help="drafted tokens of vLLM's chain")
    parser.add_argument("--budget", type=int, nargs="*", default=[7, 15, 31, 63], help="nodes of our trees")
    parser.add_argument("--coupled", type=int, nargs="*", default=[], help="nodes of trees with verify_mode coupled")
    parser.add_argument("--our-chain", type=int, nargs="*", default=[], help="drafted tokens of trees that are chains")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=64, help="per 16 requests at once; at least 8")
    parser.add_argument("--repeat", type=int, default=3, help="runs, of which the median counts")
    args = parser.parse_args()
    prompts = pair.held_out(args)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    engines = [("none", 0), *(("chain", k) for k in args.chain)]
    engines += [*(("ddtree-chain", k) for k in args.our_chain), *(("ddtree", b) for b in args.budget)]
    engines += [("ddtree-coupled", b) for b in args.coupled]
    for method, size in engines:
        served = Served(args, method, size)
        for batch in args.batch:
            some = prompts[: max(8, args.prompts * batch // 16) // batch * batch]
            for temperature in args.temperature:
                # Triton compiles kernels when a shape comes up.
                served.run(some, batch, temperature, args.tokens)
                runs = [served.run(some, batch, temperature, args.tokens) for _ in range(args.repeat)]
                runs.sort(key=lambda run: run["tokens_per_s"])
                line = dict(
                    method=method, budget=size, batch=batch, temperature=temperature,
                    context=round(sum(map(len, some)) / len(some)), prompts=len(some),
                    model=pair.name(args),
                    **runs[len(runs) // 2], spread=round(runs[-1]["tokens_per_s"] - runs[0]["tokens_per_s"], 1),
                    **provenance("text.py"),
                )  # fmt: skip
                report(line, args.out)
        served.close()


if __name__ == "__main__":
    main()
