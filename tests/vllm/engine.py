# SPDX-License-Identifier: Apache-2.0
"""vLLM engines for the tests: in this process, one after the other, with the
margins of every sampled token and the counters of speculative decoding."""

import gc
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

MODELS = Path(__file__).resolve().parents[1] / "models"
TARGET, DRAFTER = MODELS / "target", MODELS / "drafter"
# One bf16 step at the size of these logits: a smaller margin is undecidable.
NEAR_TIE = 0.125
# The whole matrix, or the part of it that fits into CI.
FULL = os.environ.get("DDTREE_TEST_FULL") == "1"


@cache
def on_gpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cuda()


def platform_settings() -> dict[str, Any]:
    """Arguments of every engine. On a GPU CUDA graphs, unless DDTREE_TEST_EAGER=1; DDTREE_TEST_LLM
    holds more arguments as JSON."""
    if not on_gpu():
        return {"enforce_eager": True}
    settings = {
        # A trained model's states, as trees keep them: the nano target's config leaves it open.
        "mamba_ssm_cache_dtype": "float32",
        # Without FlashInfer, and without Inductor, which takes longer than the tests.
        "gdn_prefill_backend": "triton",
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        # Small, so that engines follow each other quickly, and may share the card.
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.3,
    }
    if os.environ.get("DDTREE_TEST_EAGER") == "1":
        settings["enforce_eager"] = True
        del settings["compilation_config"]
    return settings | json.loads(os.environ.get("DDTREE_TEST_LLM", "{}"))


@dataclass(frozen=True)
class Output:
    token_ids: tuple[int, ...]
    # Margin of each token over the runner-up, see _Margins.
    margins: tuple[float, ...]
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None = None
    text: str = ""
    # Of the prompt's tokens, of whose first there is none.
    prompt_logprobs: list[dict[int, float]] | None = None


@dataclass
class Run:
    outputs: list[Output]
    rounds: int = 0
    accepted: int = 0
    drafted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens per verification of a request: accepted and the bonus."""
        return 1 + self.accepted / self.rounds


def record(**values: Any) -> None:
    """Print a result, and append it as a JSON line to the file DDTREE_RECORD."""
    print(", ".join(f"{name} {value}" for name, value in values.items()))
    path = os.environ.get("DDTREE_RECORD")
    if path:
        import vllm

        about = {"vllm": vllm.__version__, "torch": torch.__version__}
        about["commit"] = os.environ.get("DDTREE_COMMIT", "")
        about["device"] = torch.cuda.get_device_name() if on_gpu() else "cpu"
        with open(path, "a") as out:
            out.write(json.dumps({**values, **about}) + "\n")


def prompts(count: int, first: int = 0) -> list[list[int]]:
    """Token ids of held-out prompts of mixed lengths."""
    from tokenizers import Tokenizer

    held_out = json.loads((MODELS / "prompts.json").read_text())
    chosen = held_out[first : first + count]
    assert len(chosen) == count, f"prompts.json has {len(held_out)} prompts"
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    return [tokenizer.encode(prompt["text"]).ids for prompt in chosen]


class _Margins:
    """Records, per (seed, position), by how much the sampled token beat the rest,
    after filters and noise, in units of the logits before temperature.

    Asks vLLM's own sampling kernel twice, the second time without the winner. A
    filter decides by logits too. What it would keep if logits moved by NEAR_TIE
    counts as kept, and a sampled token that it would then drop has no margin:
    top-k compares logits, min-p a logit with the best one, top-p the mass of the
    tokens before one with p, see `_nucleus_edge`."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[int, int], float] = {}
        self._unfiltered: torch.Tensor | None = None
        self._top_p: torch.Tensor | None = None
        # Before min-p, and by how much each token beats what it keeps.
        self._before_min_p: tuple[torch.Tensor, torch.Tensor] | None = None

    def wrap_min_p(self, apply: Any) -> Any:
        def remembering(logits, idx, min_p):
            last = logits.amax(-1) + min_p[idx].log()
            self._before_min_p = logits.clone(), logits - last[:, None]
            return apply(logits, idx, min_p)

        return remembering

    def wrap_filter(self, apply: Any) -> Any:
        def remembering(logits, k, p, **kwargs):
            self._unfiltered, self._top_p = logits.float().clone(), p
            return apply(logits, k, p, **kwargs)

        return remembering

    @staticmethod
    def _nucleus_edge(
        logits: torch.Tensor, top_p: torch.Tensor, step: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which tokens top-p drops whatever the order within `step` of a logit, and
        which it may drop; bool [rows, vocabulary]. logits [rows, vocabulary] after
        temperature; top_p, step [rows].

        A token is dropped if the mass before it exceeds p. Logits that move by at
        most `step` against each other move the log-odds of a mass by at most that."""
        ascending, order = logits.double().sort(dim=-1)
        mass = ascending.softmax(-1)
        # mass_from[i]: of the i-th token and all above it
        mass_from = mass.flip(-1).cumsum(-1).flip(-1).clamp(max=1)
        mass_from = torch.cat([mass_from, torch.zeros_like(mass_from[:, :1])], -1)

        def log_odds_above(bound: torch.Tensor) -> torch.Tensor:
            first = torch.searchsorted(ascending, bound.contiguous(), right=True)
            return torch.logit(mass_from.gather(1, first))

        step = step[:, None].double()
        edge = torch.logit(top_p[:, None].double())
        surely = log_odds_above(ascending + step) > edge + step
        # those within a step may come before it, but not it itself
        around = log_odds_above(ascending - step).exp()
        before = around / (1 + around) - mass
        maybe = torch.logit(before.nan_to_num(1.0).clamp(0, 1)) > edge - step
        back = order.argsort(-1)
        return surely.gather(1, back), maybe.gather(1, back)

    @staticmethod
    def _best(sample: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The sampled token of each row, and its logit with noise."""
        from vllm.v1.worker.gpu.sample import gumbel

        values = []
        kernel = gumbel._gumbel_sample_kernel

        class Spy:
            def __getitem__(self, grid):
                def launch(local_argmax, stride, local_max, *rest, **options):
                    kernel[grid](local_argmax, stride, local_max, *rest, **options)
                    values.append(local_max.max(dim=-1).values)

                return launch

        gumbel._gumbel_sample_kernel = Spy()
        try:
            return sample(*args, **kwargs), values[0]
        finally:
            gumbel._gumbel_sample_kernel = kernel

    def wrap_sample(self, sample: Any) -> Any:
        def recording(logits, idx, temperature, seed, pos, *args, **kwargs):
            options = (idx, temperature, seed, pos, *args)
            token, first = self._best(sample, logits, *options, **kwargs)
            scale = torch.where(temperature[idx] > 0, temperature[idx], 1.0)
            logits = logits.float()
            unfiltered, self._unfiltered = self._unfiltered, None
            top_p, self._top_p = self._top_p, None
            if unfiltered is None:
                unfiltered = logits
            step = NEAR_TIE / scale
            at_min_p = torch.zeros_like(logits, dtype=torch.bool)
            before, self._before_min_p = self._before_min_p, None
            if before is not None:
                at_min_p = before[1].abs() <= step[:, None]
                unfiltered = torch.where(at_min_p, before[0], unfiltered)
            filtered = (unfiltered > logits).any(-1)
            if top_p is None:
                last_kept = logits.masked_fill(logits.isinf(), float("inf")).amin(-1)
                excluded = unfiltered < (last_kept - step)[:, None]
                droppable = unfiltered <= (last_kept + step)[:, None]
            else:
                excluded, droppable = self._nucleus_edge(unfiltered, top_p, step)
            rest = unfiltered.masked_fill(excluded, float("-inf"))
            rest = rest.scatter(1, token[:, None], float("-inf"))
            _, second = self._best(sample, rest, *options, **kwargs)
            droppable = (filtered[:, None] & droppable) | at_min_p
            droppable = droppable.gather(1, token[:, None])[:, 0]
            margins = torch.where(droppable, 0.0, (first - second) * scale)
            keys = zip(seed[idx].tolist(), pos.tolist(), strict=True)
            self.by_key.update(zip(keys, margins.tolist(), strict=True))
            return token

        return recording


def _plain_logprobs(positions: Any) -> list[dict[int, float]] | None:
    if positions is None:
        return None
    return [{token: e.logprob for token, e in entries.items()} for entries in positions]


class Engine:
    """`with Engine(...) as engine: engine.generate(...)`."""

    def __init__(
        self, speculative: dict[str, Any] | None = None, *, margins: bool = False, **config
    ) -> None:
        self.config = {
            "model": str(TARGET),
            "dtype": "bfloat16",
            "max_model_len": 512,
            "max_num_seqs": 4,
            "seed": 0,
            "disable_log_stats": False,
            **platform_settings(),
            **config,
        }
        if speculative is not None:
            self.config["speculative_config"] = {"model": str(DRAFTER), **speculative}
        self._margins = _Margins() if margins else None
        self._failed = False

    def __enter__(self) -> "Engine":
        from vllm import LLM
        from vllm.v1.worker.gpu.sample import sampler, states

        self._stock = sampler.gumbel_sample, sampler.apply_top_k_top_p, states.apply_min_p
        if self._margins is not None:
            states.apply_min_p = self._margins.wrap_min_p(self._stock[2])
            sampler.gumbel_sample = self._margins.wrap_sample(self._stock[0])
            sampler.apply_top_k_top_p = self._margins.wrap_filter(self._stock[1])
        try:
            self.llm = LLM(**self.config)
        except BaseException:
            self._restore()
            raise
        runner = self.runner
        # V1 would serve too, without a tree and without a word.
        assert "Runner" in type(runner).__name__ and hasattr(runner, "req_states")
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        self._restore()

    def _restore(self) -> None:
        """Leave the process as it was, also where an engine did not start."""
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.v1.worker.gpu.sample import sampler, states

        sampler.gumbel_sample, sampler.apply_top_k_top_p, states.apply_min_p = self._stock
        gc.collect()
        cleanup_dist_env_and_memory()

    @property
    def runner(self) -> Any:
        core = self.llm.llm_engine.engine_core.engine_core
        return core.model_executor.driver_worker.worker.model_runner

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def metric(self, name: str) -> Any:
        """The value of vLLM's own counter, or its values, by name without "vllm:"."""
        for m in self.llm.get_metrics():
            if m.name == f"vllm:{name}":
                return m.values if hasattr(m, "values") else m.value
        raise KeyError(name)

    def _counters(self) -> dict[str, Any]:
        prefix = "vllm:spec_decode_num_"
        return {
            m.name[len(prefix) :]: getattr(m, "value", None) or getattr(m, "values", 0)
            for m in self.llm.get_metrics()
            if m.name.startswith(prefix)
        }

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        params: dict[str, Any] | Sequence[dict],
        images: Sequence[list] | None = None,
    ) -> Run:
        """One request per prompt, all submitted at once. `seed` is unique per
        prompt unless given, so that margins can be told apart."""
        from vllm import SamplingParams

        if isinstance(params, dict):
            params = [params] * len(token_ids)
        # Seeds name a request in the margins also when greedy.
        sampling = [
            SamplingParams(**{"seed": 1000 + i, "ignore_eos": True, **p})
            for i, p in enumerate(params)
        ]
        before = self._counters()
        if self._margins is not None:
            self._margins.by_key.clear()
        # A failed step leaves its requests behind, and vLLM would wait for them.
        assert not self._failed, "this engine failed before"
        self._failed = True
        prompts = [{"prompt_token_ids": list(ids)} for ids in token_ids]
        for prompt, shown in zip(prompts, images or (), strict=False):
            if shown:
                prompt["multi_modal_data"] = {"image": shown}
        results = self.llm.generate(prompts, sampling, use_tqdm=False)
        self._failed = False
        after = self._counters()
        outputs = []
        for result, p in zip(results, sampling, strict=True):
            for choice in result.outputs:
                margins = ()
                if self._margins is not None:
                    # vLLM gives the samples of a request successive seeds.
                    margins = tuple(
                        self._margins.by_key[
                            p.seed + choice.index, len(result.prompt_token_ids) + j - 1
                        ]
                        for j in range(len(choice.token_ids))
                    )
                logprobs = _plain_logprobs(choice.logprobs)
                outputs.append(
                    Output(
                        tuple(choice.token_ids),
                        margins,
                        choice.finish_reason,
                        logprobs,
                        choice.text,
                        _plain_logprobs((result.prompt_logprobs or [])[1:] or None),
                    )
                )
        run = Run(outputs)
        if "drafts" in after:
            run.rounds = after["drafts"] - before["drafts"]
            run.accepted = after["accepted_tokens"] - before["accepted_tokens"]
            run.drafted = after["draft_tokens"] - before["draft_tokens"]
            now, then = (
                x["accepted_tokens_per_pos"] or [] for x in (after, before)
            )
            then = then or [0] * len(now)
            run.accepted_per_position = [a - b for a, b in zip(now, then, strict=True)]
        return run


def assert_same_text(base: Run, other: Run, what: str, near_tie: float = NEAR_TIE) -> int:
    """Equal tokens, or a first difference where the base's margin is a near tie.
    Prints and counts those; `base` must have been run with margins."""
    near_ties = 0
    assert len(base.outputs) == len(other.outputs)
    for i, (want, got) in enumerate(zip(base.outputs, other.outputs, strict=True)):
        if want.token_ids == got.token_ids:
            continue
        shorter = min(len(want.token_ids), len(got.token_ids))
        at = next(
            (
                j
                for j in range(shorter)
                if want.token_ids[j] != got.token_ids[j]
            ),
            shorter,
        )
        assert at < len(want.margins), f"{what}: request {i} has other length: {got}"
        margin = want.margins[at]
        print(f"{what}: request {i} differs at token {at}, margin {margin:.4f}")
        assert margin <= near_tie, (
            f"{what}: request {i} differs at token {at} where the margin is {margin:.4f}"
            f"\n want {want.token_ids[at:]}\n got  {got.token_ids[at:]}"
        )
        near_ties += 1
    return near_ties


def same_text(test: str, base: Run, run: Run, budget: int, batch: int = 4) -> int:
    """Near ties at which texts part that are otherwise those of `base`, recorded."""
    near_ties = assert_same_text(base, run, f"{test}, budget {budget}, batch {batch}")
    record(
        test=test,
        budget=budget,
        batch=batch,
        prompts=len(run.outputs),
        tokens=max(len(output.token_ids) for output in run.outputs),
        near_ties=near_ties,
        tokens_per_round=round(run.tokens_per_round, 4),
    )
    return near_ties
