# SPDX-License-Identifier: Apache-2.0
"""Random arrivals, ends, aborts and budgets for DDTREE_SOAK_SECONDS: every request gets its own text, once."""

import os
import random
import time
from dataclasses import dataclass

from engine import NEAR_TIE, Engine, Output, on_gpu, prompts, record

BUDGET, LONGEST = 31, 96 if on_gpu() else 32
NUM_PROMPTS, MAX_NUM_SEQS = (96, 32) if on_gpu() else (12, 6)
SECONDS = float(os.environ.get("DDTREE_SOAK_SECONDS", "20"))
# Too few for all slots at once, so that requests are preempted.
SETTINGS = {"max_num_seqs": MAX_NUM_SEQS, "num_gpu_blocks_override": 2 * MAX_NUM_SEQS}


@dataclass
class Request:
    prompt: int
    max_tokens: int
    tokens: tuple[int, ...] = ()
    ended: bool = False
    aborted: bool = False


def expected() -> list[Output]:
    with Engine(margins=True, max_num_seqs=MAX_NUM_SEQS) as engine:
        params = {"temperature": 0.0, "max_tokens": LONGEST}
        return engine.generate(prompts(NUM_PROMPTS), params).outputs


def is_near_tie(request: Request, want: Output) -> bool:
    """Whether the request's text leaves its prompt's; fails where that is no near tie."""
    for j, (a, b) in enumerate(zip(want.token_ids, request.tokens, strict=False)):
        if a != b:
            assert want.margins[j] <= NEAR_TIE, (request, want.token_ids, j, want.margins[j])
            return True
    return False


class Soak:
    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine.llm.llm_engine
        self.random = random.Random(seed)
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.prompts = prompts(NUM_PROMPTS)

    def arrive(self) -> None:
        from vllm import SamplingParams

        choose = self.random
        request = Request(choose.randrange(NUM_PROMPTS), choose.randint(1, LONGEST))
        extra = {}
        if choose.random() < 0.5:
            extra["ddtree_budget"] = choose.choice((0, 1, 3, 7, 15, BUDGET))
        if choose.random() < 0.2:
            extra["ddtree_shape"] = "chain"
        params = SamplingParams(
            temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, extra_args=extra
        )
        name = f"soak {len(self.requests)}"
        self.requests[name] = self.running[name] = request
        prompt = {"prompt_token_ids": self.prompts[request.prompt]}
        self.engine.add_request(name, prompt, params)

    def abort(self) -> None:
        name = self.random.choice(list(self.running))
        self.engine.abort_request([name])
        request = self.running.pop(name)
        request.ended = request.aborted = True

    def step(self) -> None:
        for output in self.engine.step():
            request = self.requests[output.request_id]
            assert not request.ended, f"{output.request_id} goes on after its end"
            tokens = tuple(output.outputs[0].token_ids)
            assert tokens[: len(request.tokens)] == request.tokens
            request.tokens, request.ended = tokens, output.finished
            if output.finished:
                del self.running[output.request_id]

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            # Rarely idle, at times more than fit.
            if len(self.running) < 2 * MAX_NUM_SEQS:
                for _ in range(self.random.choice((0, 0, 0, 1, 2, MAX_NUM_SEQS))):
                    self.arrive()
            if self.running and self.random.random() < 0.03:
                self.abort()
            self.step()
        while self.engine.has_unfinished_requests():
            self.step()
        # An asynchronous step may still be on its way.
        for _ in range(3):
            self.step()


def test_soak():
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    texts = expected()
    spec = {"method": "ddtree", "tree_budget": BUDGET}
    with Engine(spec, **SETTINGS) as engine:
        pool = engine.scheduler.kv_cache_manager.block_pool
        free = pool.get_num_free_blocks()
        soak = Soak(engine, seed)
        soak.run(SECONDS)
        preemptions = engine.metric("num_preemptions")
        assert pool.get_num_free_blocks() == free, "blocks were lost"
    requests = list(soak.requests.values())
    near_ties = sum(is_near_tie(r, texts[r.prompt]) for r in requests)
    for request in requests:
        assert request.ended
        assert request.aborted or len(request.tokens) == request.max_tokens
    record(
        test="soak",
        seconds=SECONDS,
        requests=len(requests),
        aborted=sum(r.aborted for r in requests),
        preemptions=preemptions,
        near_ties=near_ties,
    )
    assert len(requests) > MAX_NUM_SEQS
    assert near_ties <= len(requests) // 2, "too many near ties to show anything"
