# SPDX-License-Identifier: Apache-2.0
"""Whatever the scheduler does to a request, its text is that of no speculation
under the same engine settings: prefix hits, chunks, preemption, reused slots,
cut trees, early ends."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine import Engine, Run, assert_same_text, on_gpu, prompts
from watch import Round, Watch, watching

# One state and one attention block of this target: what vLLM finds on the CPU, and takes on a GPU.
BLOCK = 384
# Max_model_len of the engine that also has room for two blocks.
LONG = 896


@dataclass(frozen=True)
class Config:
    budget: int
    engine: dict
    speculative: dict
    asynchronous: bool = False


CONFIGS = {
    "default": Config(31, {"max_model_len": LONG}, {}),
    "async": Config(31, {"max_model_len": LONG}, {}, asynchronous=True),
    # Two trees and the drafter's slots leave 8 rows of a step to a third request.
    "chunks": Config(
        15,
        {
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 88,
            "num_gpu_blocks_override": 10,
        },
        {},
    ),
    "few_blocks": Config(
        15,
        {"max_model_len": LONG, "num_gpu_blocks_override": 12},
        {"disable_eagle_block_drop": True},
    ),
}


def engine(name: str, speculative: dict | None = None, **config) -> Engine:
    if on_gpu():
        config |= {"block_size": BLOCK, "async_scheduling": CONFIGS[name].asynchronous}
    return Engine(speculative, **CONFIGS[name].engine, **config)


@cache
def corpus() -> list[int]:
    return sum(prompts(48), [])


def stretch(first: int, count: int) -> list[int]:
    part = corpus()[first : first + count]
    assert len(part) == count
    return part


PLAIN = {"temperature": 0.0, "max_tokens": 40}
NUM_PLAIN = 8


def scenarios(config: str) -> dict[str, tuple[list[list[int]], list[dict]]]:
    """Prompts and parameters by name, as served without speculation."""

    def greedy(prompt_list, *max_tokens):
        counts = list(max_tokens) * len(prompt_list)
        return prompt_list, [
            {"temperature": 0.0, "max_tokens": n} for n, _ in zip(counts, prompt_list)
        ]

    if config == "chunks":
        lengths = (20, 130, 45, 200, 3, 1, 390)
        return {
            "mixed": greedy([stretch(100 * i, n) for i, n in enumerate(lengths)], 32)
        }
    if config == "few_blocks":
        shared = stretch(1000, 2 * BLOCK)
        return {
            # The last one is a hit but for one token.
            "shared": greedy(
                [
                    shared + stretch(200, 40),
                    shared + stretch(300, 20),
                    stretch(700, 30),
                    shared + stretch(400, 1),
                ],
                24,
            ),
            # Every one needs further blocks after a few tokens.
            "crowd": (
                [stretch(250 * i, BLOCK - 12 + i) for i in range(4)],
                [{"temperature": t, "max_tokens": 28} for t in (0.0, 0.8, 0.0, 0.8)],
            ),
        }
    ends = (LONG - 46, LONG - 19, LONG - 10, LONG - 5, LONG - 2, LONG - 1)
    return {
        "plain": (prompts(NUM_PLAIN), [PLAIN] * NUM_PLAIN),
        "one token": greedy(
            [*prompts(4, first=8), *([t] for t in stretch(50, 3)), *prompts(1, first=12)],
            *(6, 24, 12, 20, 16, 20, 12, 16),
        ),
        "boundary": greedy([stretch(500 * i, BLOCK - 9 + 3 * i) for i in range(3)], 24),
        "near the end": greedy(
            [stretch(300 * i, n) for i, n in enumerate(ends)], 64
        ),
        "samples": (
            prompts(2, first=14),
            [
                {"temperature": 1.0, "n": 3, "seed": seed, "max_tokens": 20}
                for seed in (5000, 6000)
            ],
        ),
        "shared": greedy([stretch(1000, 800) + stretch(20 * i, 10 + 15 * i) for i in range(3)], 16),
    }


@contextmanager
def forced_async() -> Iterator[None]:
    """vLLM's CPU platform turns async scheduling off; it works nevertheless."""
    if on_gpu():
        yield
        return
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config.__func__

    def check(cls, vllm_config):
        stock(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = classmethod(stock)


@cache
def baseline(name: str) -> dict[str, Run]:
    if name == "async":
        return baseline("default")
    with engine(name, margins=True) as plain:
        return {key: plain.generate(*case) for key, case in scenarios(name).items()}


class Served:
    """A tree engine and what no speculation says."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.budget = CONFIGS[name].budget
        self.engine = engine
        self.base = baseline(name)
        self._scenarios = scenarios(name)

    def run(self, scenario: str, extra: list[dict] | None = None) -> tuple[Run, Watch]:
        """Serve a scenario, each request with further parameters; check the text."""
        token_ids, params = self._scenarios[scenario]
        params = [{**p, **e} for p, e in zip(params, extra or [{}] * len(params))]
        with watching(self.engine) as watch:
            run = self.engine.generate(token_ids, params)
        near_ties = assert_same_text(self.base[scenario], run, scenario)
        # DESIGN.md F17: a GPU meets more of them, and three of the four "shared" texts did.
        most = len(run.outputs) * 3 // 4 if on_gpu() else len(run.outputs) // 2
        assert near_ties <= most, "too many to show anything"
        return run, watch

    @cache
    def plain(self) -> tuple[Run, Watch]:
        return self.run("plain", [{"extra_args": a} for a in PLAIN_ARGS])


# In one batch: the server's budget, its own, and none at all.
BUDGETS = (None, 0, 1, 7, 31, 15, 0, 7)
PLAIN_ARGS = [{} if b is None else {"ddtree_budget": b} for b in BUDGETS]


@pytest.fixture(scope="module")
def served(request) -> Iterator[Served]:
    config = CONFIGS[request.param]
    baseline(request.param)
    spec = {"method": "ddtree", "tree_budget": config.budget, **config.speculative}
    with forced_async() if config.asynchronous else nullcontext():
        tree = engine(request.param, spec)
        tree.__enter__()
    try:
        is_async = type(tree.scheduler).__name__ == "AsyncScheduler"
        assert is_async == config.asynchronous
        assert tree.runner.vllm_config.cache_config.block_size == BLOCK
        yield Served(request.param, tree)
    finally:
        tree.__exit__()


def on(*names: str):
    return pytest.mark.parametrize("served", names, indirect=True)


sync_and_async = on("default", "async")


@sync_and_async
def test_requests_keep_their_own_budgets(served):
    _, watch = served.plain()
    for i, budget in enumerate(BUDGETS):
        rounds = watch.of(i)
        assert rounds
        assert {r.rows for r in rounds[:-1]} == {served.budget + 1}
        want = 1 + (served.budget if budget is None else budget)
        assert {r.num_nodes for r in rounds} == {want}, f"budget {budget}"
    assert all(len(r.sampled) == 1 for r in watch.of(1)), "plain decoding"
    assert any(len(r.sampled) > 2 for r in watch.of(0))
    # Trees of several sizes in one batch; more requests than slots.
    assert max(batch.num_verifying for batch in watch.batches) == 4


@sync_and_async
def test_one_token_prompts_take_over_used_slots(served):
    _, watch = served.run("one token")
    fresh = [r for i in (4, 5, 6) for r in watch.of(i) if r.fresh]
    # They join a running batch, so vLLM pads them with draft rows.
    assert len(fresh) >= 2
    assert all(r.num_nodes == 1 and len(r.sampled) == 1 for r in fresh)


@sync_and_async
def test_state_blocks_are_crossed(served):
    run, _ = served.run("boundary")
    assert all(len(o.token_ids) == 24 for o in run.outputs)


@on("default")
def test_state_at_a_crossed_boundary_is_kept(served, monkeypatch):
    """Commit leaves the state after the block's last token in the block's slot,
    though the path went on: compared with prefills of as many tokens."""
    from vllm_ddtree import gdn
    from vllm_ddtree.model_state import TreeStateMixin

    layers = gdn.find_gdn_layers(
        served.engine.runner.vllm_config.compilation_config.static_forward_context
    )

    def states(slots):
        return [
            (layer.tree_conv_state()[slot].float(), layer.tree_ssm_state()[slot].clone())
            for layer, slot in zip(layers, slots, strict=True)
        ]

    kept = []
    commit = TreeStateMixin._commit

    def watched_commit(self, step):
        commit(self, step)
        slots = [int(self._snapshot_slots[self._groups[x.prefix]][0]) for x in layers]
        if slots[0] >= 0:
            kept.append((int(self._snapshot_tokens[0]), states(slots)))

    monkeypatch.setattr(TreeStateMixin, "_commit", watched_commit)
    params = {"temperature": 0.0, "max_tokens": 28}
    for attempt in range(12):
        kept.clear()
        room = 9 + attempt
        start = stretch(200 * attempt, BLOCK - room)
        with watching(served.engine) as watch:
            output = served.engine.generate([start], params).outputs[0]
        assert len(kept) == 1
        rows, kept_states = kept[0]
        # The last token of a round is sampled, not computed.
        if rows > 1 and tokens_after(watch.of(0), room + 1) > 0:
            break
    else:
        pytest.fail("no boundary was inside a path")

    after: dict[str, int] = {}
    build = gdn.TreeGDNMetadataBuilder.build

    def watched_build(self, *args, **kwargs):
        metadata = build(self, *args, **kwargs)
        slots = getattr(metadata, "state_slots", None)
        if slots is None:
            slots = metadata.non_spec_state_indices_tensor
        after.update(dict.fromkeys(self.layer_names, int(slots[0])))
        return metadata

    monkeypatch.setattr(gdn.TreeGDNMetadataBuilder, "build", watched_build)
    text = start + list(output.token_ids)
    errors = []
    for length in (BLOCK - 1, BLOCK, BLOCK + 1):
        served.engine.generate([text[:length]], {**params, "max_tokens": 1})
        wanted = states([after[layer.prefix] for layer in layers])
        errors.append(
            [
                max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))
                for got, want in zip(kept_states, wanted, strict=True)
            ]
        )
    for before, at, behind in zip(*errors, strict=True):
        # bf16 inputs of another order of summation against another token.
        assert at < 0.2 * min(before, behind), errors


@sync_and_async
def test_trees_end_with_the_model_length(served):
    run, watch = served.run("near the end")
    prompt_lengths = [len(p) for p in scenarios("default")["near the end"][0]]
    for length, output in zip(prompt_lengths, run.outputs, strict=True):
        assert len(output.token_ids) == min(64, LONG - length)
        assert output.finish_reason == "length"
    cut = [r for r in watch.rounds if r.rows < served.budget + 1]
    assert cut and all(r.num_nodes <= r.rows for r in cut)
    # A cut tree of more than its root was worth something.
    assert any(len(r.sampled) > 1 for r in cut)


@sync_and_async
def test_samples_of_one_request_differ(served):
    run, _ = served.run("samples")
    for first in (0, 3):
        texts = {output.token_ids for output in run.outputs[first : first + 3]}
        assert len(texts) == 3


def tokens_after(rounds: list[Round], count: int) -> int:
    """How many tokens the round that sampled the count-th token had beyond it.
    The first token of a request is sampled by its prefill."""
    sampled = 1
    for r in rounds:
        sampled += len(r.sampled)
        if sampled >= count:
            return sampled - count
    raise AssertionError(f"{sampled} tokens in all, not {count}")


def inside_paths(served: Served) -> dict[int, int]:
    """Per request of the plain run a place in its text, where a token appears
    for the first time and in the middle of an accepted path."""
    run, watch = served.plain()
    found = {}
    for i, output in enumerate(run.outputs):
        if output.token_ids != served.base["plain"].outputs[i].token_ids:
            continue
        start = 1
        for r in watch.of(i):
            inner = range(start + 1, min(start + len(r.sampled) - 1, 32))
            for at in inner:
                if output.token_ids[at] not in output.token_ids[:at]:
                    found.setdefault(i, at)
            start += len(r.sampled)
    assert len(found) >= 2, "the models accept too little for this test"
    return found


@sync_and_async
def test_stop_token_inside_an_accepted_path(served):
    places = inside_paths(served)
    texts = served.base["plain"].outputs
    token_ids = prompts(NUM_PLAIN)
    stops = {i: texts[i].token_ids[at] for i, at in places.items()}
    with watching(served.engine) as watch:
        run = served.engine.generate(
            [token_ids[i] for i in places],
            [{**PLAIN, "stop_token_ids": [stops[i]]} for i in places],
        )
    for k, (i, at) in enumerate(places.items()):
        output, rounds = run.outputs[k], watch.of(k)
        assert output.token_ids == texts[i].token_ids[: at + 1]
        assert output.finish_reason == "stop"
        assert tokens_after(rounds, at + 1) > 0, "the stop was the last token"
        below_stops = [
            r for r in rounds for p in r.parents[1:] if p > 0 and r.tokens[p] == stops[i]
        ]
        assert not below_stops, "nodes that could never be used"


@sync_and_async
def test_stop_string_inside_an_accepted_path(served):
    tokenizer = served.engine.llm.get_tokenizer()
    texts = served.base["plain"].outputs
    places, cases = inside_paths(served), {}
    for i, at in places.items():
        ids = texts[i].token_ids
        # What the tokens up to the middle of the path spell, from its own end.
        before, upto = (tokenizer.decode(ids[:n]) for n in (at, at + 1))
        stop = upto[len(before) :]
        if upto == before + stop and stop and texts[i].text.find(stop) == len(before):
            cases[i] = stop
    assert cases
    token_ids = prompts(NUM_PLAIN)
    with watching(served.engine) as watch:
        run = served.engine.generate(
            [token_ids[i] for i in cases],
            [{**PLAIN, "stop": [stop]} for stop in cases.values()],
        )
    for k, (i, stop) in enumerate(cases.items()):
        assert run.outputs[k].text == texts[i].text[: texts[i].text.find(stop)]
        assert run.outputs[k].finish_reason == "stop"
        assert tokens_after(watch.of(k), places[i] + 1) > 0


@sync_and_async
def test_max_tokens_inside_an_accepted_path(served):
    counts = [5, 7, 9, 13, 17, 23, 29, 33]
    with watching(served.engine) as watch:
        run = served.engine.generate(
            prompts(NUM_PLAIN), [{**PLAIN, "max_tokens": n} for n in counts]
        )
    surplus, cut = [], Run([])
    for i, (n, want, got) in enumerate(
        zip(counts, served.base["plain"].outputs, run.outputs, strict=True)
    ):
        assert len(got.token_ids) == n and got.finish_reason == "length"
        cut.outputs.append(
            type(want)(want.token_ids[:n], want.margins[:n], want.finish_reason)
        )
        surplus.append(tokens_after(watch.of(i), n))
    assert_same_text(cut, run, "odd max_tokens")
    assert sum(s > 0 for s in surplus) >= 2, "max_tokens fell between paths"


@sync_and_async
def test_prefix_hits_of_a_drafting_engine(served):
    before = served.engine.metric("prefix_cache_hits")
    served.run("shared")
    first = served.engine.metric("prefix_cache_hits")
    served.run("shared")
    second = served.engine.metric("prefix_cache_hits")
    # 0.32 computes the last full block again, for the drafter's sake.
    spec = served.engine.runner.vllm_config.speculative_config
    blocks = 1 if spec.use_eagle_block_drop() else 2
    assert first - before in range(0, 2 * blocks * BLOCK + 1, BLOCK)
    assert second - first == 3 * blocks * BLOCK


@on("few_blocks")
def test_prefix_hits(served):
    served.run("shared")
    first = served.engine.metric("prefix_cache_hits")
    _, watch = served.run("shared")
    hits = served.engine.metric("prefix_cache_hits") - first
    assert hits >= 2 * BLOCK
    # The hit leaves one token, which is padded with draft rows.
    started = watch.of(3)[0]
    assert not started.fresh and started.num_nodes == 1


@on("few_blocks")
def test_preemption(served):
    before = served.engine.metric("num_preemptions")
    run, _ = served.run("crowd")
    assert served.engine.metric("num_preemptions") > before
    assert all(len(o.token_ids) == 28 for o in run.outputs)


@on("chunks")
def test_chunks_beside_trees(served):
    _, watch = served.run("mixed")
    mixed = [b for b in watch.batches if b.num_verifying and max(b.prefill_rows, default=0) > 1]
    assert len(mixed) >= 5
    assert any(b.num_verifying >= 2 for b in mixed)
    # What was left of a step cuts a tree, in the middle of the text. 0.33 takes no room
    # from a step for the drafter, so that four trees always fit.
    if on_gpu():
        return
    cut = [r for r in watch.rounds if r.num_nodes == r.rows < served.budget + 1]
    assert cut and any(len(r.sampled) > 1 for r in cut)


@on("chunks")
def test_one_state_slot_whatever_the_budget(served):
    from vllm.v1.kv_cache_interface import MambaSpec

    groups = served.engine.scheduler.kv_cache_config.kv_cache_groups
    states = [g for g in groups if isinstance(g.kv_cache_spec, MambaSpec)]
    assert states
    for group in states:
        assert group.kv_cache_spec.num_speculative_blocks == 0
        assert group.kv_cache_spec.shapes[0][0] == 3
    context = served.engine.runner.vllm_config.compilation_config.static_forward_context
    conv, _ = context[states[0].layer_names[0]].kv_cache
    assert conv.shape[1] == 3


def test_the_stock_chain_needs_more_blocks():
    """The engine of "chunks" is too small for vLLM's own verification."""
    spec = {"method": "dflash", "num_speculative_tokens": 15}
    with pytest.raises(ValueError, match="To serve at least one request"):
        engine("chunks", spec).__enter__()


def boundary_by_walking(start, accepted, rows, block):
    """(rows replayed, column) of the boundary that a round passes, or None."""
    passed = None
    for row in range(accepted + 1):
        if (start + row + 1) % block == 0:
            passed = row + 1, (start + row + 1) // block - 1
    running = (start + rows - 1) // block
    return None if passed is None or passed[1] == running else passed


def test_boundary_snapshots_by_hand():
    from vllm_ddtree.model_state import boundary_snapshots

    rng = np.random.default_rng()
    block, budget, num_reqs = 16, 15, 64
    start = rng.integers(1, 100, num_reqs)
    accepted = rng.integers(0, budget + 1, num_reqs)
    rows = np.maximum(accepted + 1, rng.integers(1, budget + 2, num_reqs))
    tables = [rng.integers(0, 5, (num_reqs, 8)).astype(np.int32) for _ in range(2)]
    step = SimpleNamespace(
        num_computed=torch.from_numpy(start),
        num_accepted=torch.from_numpy(accepted.astype(np.int32)),
        query_start=torch.from_numpy(np.concatenate([[0], rows.cumsum()]).astype(np.int32)),
    )
    tokens, slots = boundary_snapshots(step, block, [torch.from_numpy(t) for t in tables])
    crossed = 0
    for i in range(num_reqs):
        want = boundary_by_walking(start[i], accepted[i], rows[i], block)
        for table, slot in zip(tables, slots, strict=True):
            # Block 0 is vLLM's null block: nothing may be written there.
            expected = -1 if want is None else int(table[i, want[1]]) or -1
            assert slot[i] == expected, (start[i], accepted[i], rows[i])
        if want is not None:
            assert tokens[i] == want[0]
            crossed += 1
        assert 1 <= tokens[i] <= accepted[i] + 1
    assert crossed


def test_no_boundary_is_missed_by_what_the_host_knows():
    from vllm_ddtree.model_state import TreeStateMixin

    rng = np.random.default_rng()
    block, budget = 784, 31
    state = SimpleNamespace(
        cache_config=SimpleNamespace(mamba_block_size=block), tree_budget=budget
    )
    guesses = []
    for _ in range(20_000):
        start, accepted, in_flight = (int(x) for x in rng.integers((1, 0, 0), (4000, 32, 32)))
        rows = int(rng.integers(accepted + 1, budget + 2))
        batch = SimpleNamespace(
            num_computed_tokens_np=np.array([start + in_flight], np.int32),
            num_scheduled_tokens=np.array([rows], np.int32),
        )
        guesses.append(TreeStateMixin._may_cross_blocks(state, batch, 1))
        if boundary_by_walking(start, accepted, rows, block) is not None:
            assert guesses[-1], (start, accepted, in_flight, rows)
    assert np.mean(guesses) < 0.25
