# SPDX-License-Identifier: Apache-2.0
"""Cost of a draft + verify round in vLLM on a GPU, at a model's dimensions with dummy weights.

    python tests/bench/serving/rounds.py --method chain --budget 15 --batch 1 8 --context 1024 --out serving.jsonl

One engine per process: alternate methods by running this in turns. Dummy weights accept next to nothing, so a round is
one step of the engine. `--method`: none (no drafter), chain (vLLM's own DFlash), ddtree, ddtree-chain (our path, every
tree a chain). `--drafter dflash2`: a block of 8 whose candidates are scored below their parents; chain is then vLLM's
walk over them. Keys of the records: ../README.md."""

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Qwen3.6-27B's, and something that starts in seconds
DIMENSIONS = {
    "27b": dict(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48, vocab_size=248320,
    ),
    "tiny": dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, vocab_size=4096,
    ),
}  # fmt: skip
DRAFTERS = {
    "27b": dict(num_hidden_layers=5, num_attention_heads=32, num_key_value_heads=8, head_dim=128),
    "tiny": dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64),
}
# What a DFlash2 drafter has beside a DFlash drafter; the sizes of its heads are a guess at a 27B's.
DFLASH2 = dict(conv_kernel_size=4, conv_group_size=64, selector_rank=256, selector_top_k=16)
METHODS = ("none", "chain", "ddtree", "ddtree-chain")
SHORT, LONG = 8, 72


def write_models(size: str, folder: Path, drafter: str = "dflash") -> tuple[Path, Path]:
    """config.json of a target and its drafter, from Qwen3.6's with this size's dimensions."""
    target, draft = folder / "target", folder / "drafter"
    dims = DIMENSIONS[size]
    layers = dims["num_hidden_layers"]
    common = dict(
        torch_dtype="bfloat16", hidden_act="silu", max_position_embeddings=40960, rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )  # fmt: skip
    configs = {
        target: dict(
            dims, **common, architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", linear_conv_kernel_dim=4,
            linear_key_head_dim=128, linear_value_head_dim=128, attn_output_gate=True, full_attention_interval=4,
            layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
            rope_parameters=dict(
                rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_interleaved=True,
                mrope_section=[11, 11, 10] if dims["head_dim"] == 256 else [3, 3, 2],
            ),
            mamba_ssm_dtype="float32", eos_token_id=0, bos_token_id=1, pad_token_id=0,
        ),
        draft: dict(
            DRAFTERS[size], **common, architectures=["DFlashDraftModel"], model_type="qwen3", rope_theta=1e7,
            **{name: dims[name] for name in ("hidden_size", "intermediate_size", "vocab_size")},
            block_size=16, num_target_layers=layers,
            dflash_config=dict(mask_token_id=3, target_layer_ids=[1, max(2, layers // 2 - 1), layers - 1 - 2 * (layers > 8)]),
        ),
    }  # fmt: skip
    if drafter == "dflash2":
        configs[draft] |= dict(architectures=["DFlash2DraftModel"], block_size=8)
        configs[draft]["dflash_config"] |= DFLASH2
    for path, config in configs.items():
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config))
    return target, draft


def speculative_config(method: str, budget: int, drafter: Path, scores: str | None) -> dict | None:
    if method == "none":
        return None
    config = dict(model=str(drafter), draft_load_config=dict(load_format="dummy"))
    if method == "chain":
        return config | dict(method="dflash", num_speculative_tokens=budget)
    return config | dict(method="ddtree", tree_budget=budget, tree_scores=scores)


class Generation(NamedTuple):
    """Seconds until every request has a token, and all rounds; then of the rounds in which all
    requests decode: seconds, how many, tokens of one request."""

    ttft: float
    rounds: int
    steady_seconds: float
    steady_rounds: int
    steady_tokens: float


def generate(engine, name: str, prompts: list[list[int]], params: list) -> Generation:
    """All prompts at once, each with its vllm.SamplingParams, of output kind DELTA. `name`: new for each call."""
    batch = len(prompts)
    made = {}
    begin = time.perf_counter()
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"{name}-{i}", dict(prompt_token_ids=prompt), param)
        made[f"{name}-{i}"] = 0
    first, start, end = None, None, (0.0, 0, 0)
    rounds = 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if not outputs:
            continue
        now = time.perf_counter()
        for output in outputs:
            made[output.request_id] += len(output.outputs[0].token_ids)
        rounds += 1
        if first is None and all(made.values()):
            first = now - begin
        # Requests whose prefill came first are ahead of the others, and end before them.
        if start is None and min(made.values()) >= min(SHORT, params[0].max_tokens):
            start = end = now, rounds, sum(made.values())
        elif start is not None and len(outputs) == batch and end[1] == rounds - 1:
            end = now, rounds, sum(made.values())
    # Short texts may end before the steady part begins.
    seconds, steady, total = (b - a for a, b in zip(start or end, end, strict=True))
    return Generation(first, rounds, seconds, steady, total / batch)


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        from vllm import LLM

        self.args = args
        self.vocab = DIMENSIONS[args.size]["vocab_size"]
        target, drafter = write_models(args.size, folder, args.drafter)
        begin = time.perf_counter()
        arguments = dict(
            model=str(target), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
            max_model_len=max(4096, max(args.context) + 512), max_num_seqs=max(args.batch), disable_log_stats=False,
            gpu_memory_utilization=0.9, speculative_config=speculative_config(args.method, args.budget, drafter, args.scores),
        )  # fmt: skip
        self.llm = LLM(**(arguments | json.loads(args.llm)))
        self.start_s = time.perf_counter() - begin
        self.calls = 0

    def generate(self, batch: int, context: int, tokens: int) -> Generation:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        shape = dict(ddtree_shape="chain") if self.args.method == "ddtree-chain" else None
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=0, detokenize=False, extra_args=shape,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        prompts = [[random.randrange(10, self.vocab) for _ in range(context)] for _ in range(batch)]
        self.calls += 1
        return generate(self.llm.llm_engine, str(self.calls), prompts, [params] * batch)

    def requests_that_fit(self, tokens: int = 4096) -> float | None:
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

        core = self.llm.llm_engine.engine_core.engine_core
        config = core.scheduler.kv_cache_config
        if core.vllm_config.model_config.max_model_len != tokens:
            return None
        return round(get_max_concurrency_for_kv_cache_config(core.vllm_config, config), 1)

    def profile(self, batch: int, context: int) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
        """Per round: what the host calls, and (times, microseconds) of each kernel."""
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        on_device = torch.autograd.DeviceType.CUDA
        calls, kernels, rounds = Counter(), defaultdict(lambda: [0, 0.0]), 0
        # What a start and an end cost is in both.
        for sign, tokens in ((-1, SHORT), (1, SHORT + 16)):
            with torch.profiler.profile(activities=activities) as trace:
                rounds += sign * self.generate(batch, context, tokens).rounds
            for event in trace.events():
                name = event.name
                if name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")):
                    calls["launches_per_round"] += sign
                # vLLM's copy of the output waits on an event; everything else would show here
                elif name in ("cudaStreamSynchronize", "cudaDeviceSynchronize"):
                    calls["host_syncs_per_round"] += sign
                elif name.startswith("Memcpy DtoH"):
                    calls["copies_to_host_per_round"] += sign
                if event.device_type == on_device:
                    kernels[name][0] += sign
                    kernels[name][1] += sign * event.time_range.elapsed_us()
        names = ("launches_per_round", "host_syncs_per_round", "copies_to_host_per_round")
        return (
            {name: round(calls[name] / rounds, 2) for name in names},
            {name: (n / rounds, us / rounds) for name, (n, us) in kernels.items()},
        )

    def write_profile(self, kernels: dict[str, tuple[float, float]], what: str) -> None:
        """The kernels that take longest, as a table."""
        longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:40]
        total = sum(us for _, us in kernels.values())
        with open(self.args.profile, "a", encoding="utf-8") as file:
            file.write(f"{what}: {total / 1e3:.2f} ms of kernels a round\n\n| us | times | kernel |\n|--:|--:|---|\n")
            for name, (times, us) in longest:
                file.write(f"| {us:.1f} | {times:.1f} | `{name[:100].replace('|', ' ')}` |\n")
            file.write("\n")

    def run(self, batch: int, context: int) -> dict:
        self.generate(batch, context, SHORT)
        runs = [self.generate(batch, context, LONG) for _ in range(self.args.repeat)]
        times = [1e3 * run.steady_seconds / run.steady_rounds for run in runs]
        ms = statistics.median(times)
        tokens = sum(run.steady_tokens for run in runs) / sum(run.steady_rounds for run in runs)
        calls = {}
        if self.args.launches or self.args.profile:
            calls, kernels = self.profile(batch, context)
        if self.args.profile:
            self.write_profile(kernels, f"{self.args.method} {self.args.budget}, batch {batch}, context {context}")
        return dict(
            ms_per_round=round(ms, 3), spread=round(max(times) - min(times), 3),
            tokens_per_round=round(tokens, 3), tokens_per_s=round(1e3 * tokens * batch / ms, 1),
            ttft_ms=round(1e3 * statistics.median(run.ttft for run in runs), 1), requests_4k_that_fit=self.requests_that_fit(),
            start_s=round(self.start_s, 1),
            **calls,
        )  # fmt: skip


def provenance(script: str = "rounds.py") -> dict:
    import torch
    import vllm

    # Where the results go says nothing about them.
    asked = sys.argv[1:]
    for option in {"--out", "--profile"} & set(asked):
        at = asked.index(option)
        del asked[at : at + 2]
    commit = os.environ.get("DDTREE_COMMIT")
    if not commit:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    return dict(
        gpu=torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        vllm=vllm.__version__, torch=torch.__version__, commit=commit,
        command=shlex.join(["python", f"tests/bench/serving/{script}", *asked]),
    )  # fmt: skip


def report(line: dict, out: str | None) -> None:
    print(json.dumps(line), flush=True)
    if out:
        with open(out, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--budget", type=int, default=15, help="drafted nodes, or tokens of the chain")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--drafter", choices=("dflash", "dflash2"), default="dflash")
    parser.add_argument("--scores", choices=("conditional", "marginal"), help="tree_scores, default vLLM's")
    parser.add_argument("--size", choices=DIMENSIONS, default="27b")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--launches", action="store_true", help="also count launches and waits per round")
    parser.add_argument("--profile", help="file to append a table of the longest kernels to")
    parser.add_argument("--llm", default="{}", help="more arguments for vllm.LLM, as JSON")
    parser.add_argument("--out", help="JSON lines file to append to")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for context in args.context:
            for batch in args.batch:
                line = dict(
                    method=args.method, budget=args.budget if args.method != "none" else 0, batch=batch,
                    context=context, drafter=args.drafter, model=f"Qwen3.6 dimensions {args.size}, dummy bf16 weights",
                    **bench.run(batch, context), **provenance(),
                )  # fmt: skip
                report(line, args.out)


if __name__ == "__main__":
    main()
