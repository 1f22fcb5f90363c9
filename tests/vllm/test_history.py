# SPDX-License-Identifier: Apache-2.0
"""Logits of a tree's rows are processed by the tokens on the row's own path. Without
an engine: vLLM's sampler over random trees, against plain Python that replays each
path, and bit for bit against vLLM's sampler for a request that has decoded the path.

Others have refused all of it with trees, penalties and bad words among it
(https://github.com/tmt-ai-corp/vllm_ddtree), ignored sampling parameters without a
word (https://github.com/sgl-project/sglang/pull/29907,
https://github.com/Luce-Org/lucebox/issues/105), or mixed up rows of requests whose
trees are as large as each other
(https://github.com/rmagur1203/vllm-ddtree/blob/ddtree-multireq/docs/DDTREE-FINDINGS-EN.md)."""

import logging
import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine import on_gpu
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor
from vllm_ddtree import history
from vllm_ddtree import sampler as tree_sampler
from vllm_ddtree.request_params import RequestParams
from vllm_ddtree.step import VerifyStep
from vllm_ddtree.trees import TreeBatch, TreeShape

VOCAB, DEPTH, NODES, SLOTS, MAX_LEN = 203, 7, 24, 9, 160
# Histories are made of few tokens, so that these come again and again.
COMMON = list(range(40, 52))


@dataclass(frozen=True)
class Markers:
    """Of thinking, in tokens."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    # With words before the end, maybe.
    forced: tuple[int, ...]


MARKERS = [
    Markers((40, 41), (42,), (43, 44, 43, 42)),
    Markers((40,), (42, 43), (42, 43)),
    Markers((40,), (41,), (41,)),
]


@dataclass
class Request:
    prompt: list[int]
    # The last one is the root's token, or the prompt's last where there is none yet.
    output: list[int]
    params: dict
    # Of the nodes, the root first; a request without drafts has the root alone.
    parents: list[int] = field(default_factory=lambda: [-1])
    drafted: list[int] = field(default_factory=list)
    rows: int = 1

    def path(self, node: int) -> list[int]:
        """Drafted tokens from below the root to the node."""
        tokens = []
        while node > 0:
            tokens.append(self.drafted[node - 1])
            node = self.parents[node]
        return tokens[::-1]

    @property
    def root(self) -> int:
        return (self.prompt + self.output)[-1]

    @property
    def num_nodes(self) -> int:
        return len(self.parents)


def preorder(rng: random.Random, nodes: int) -> list[int]:
    """Parents of a random tree in depth-first order."""
    parents, depths = [-1], [0]
    for _ in range(nodes - 1):
        # the last node or one of its ancestors
        open_nodes, node = [], len(parents) - 1
        while node >= 0:
            if depths[node] < DEPTH:
                open_nodes.append(node)
            node = parents[node]
        parent = open_nodes[0] if rng.random() < 0.6 else rng.choice(open_nodes)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


PENALTIES = {
    "repetition_penalty": lambda rng: rng.choice([0.8, 1.3]),
    "presence_penalty": lambda rng: rng.choice([-0.7, 1.1]),
    "frequency_penalty": lambda rng: rng.choice([-0.3, 0.9]),
}
KINDS = [*PENALTIES, "bad words", "thinking", "custom"]


def params_of(rng: random.Random, kinds: list[str], request: Request) -> dict:
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.7, 1.0]), "seed": 1}
    for name in kinds:
        if name in PENALTIES:
            params[name] = PENALTIES[name](rng)
    if "bad words" in kinds:
        words = [[rng.choice(COMMON)], rng.choices(COMMON, k=2)]
        for _ in range(rng.randint(1, 10)):
            # To be met at some node; the prompt's tokens are none of the output's.
            path = request.path(rng.randrange(request.num_nodes))
            text = request.prompt[-2:] + request.output + path
            words.append([*text[-rng.randint(1, 9) :], rng.choice(COMMON)])
        params["_bad_words_token_ids"] = words
    if "thinking" in kinds:
        params["thinking_token_budget"] = rng.choice([0, 0, 1, 2, 4, 8])
    if "custom" in kinds:
        params["extra_args"] = {"ban": rng.randint(1, 4)}
    if kinds and rng.random() < 0.5:
        params["logit_bias"] = {t: rng.uniform(-3, 3) for t in rng.sample(COMMON, 4)}
    return params


def make_requests(seed: int, kinds: list[str], count: int = 6) -> list[Request]:
    """Trees lead: the last of them has no parameters, and the one before is a prompt of
    one token whose rows are padding. Then one without drafts, which may have no output."""
    rng = random.Random(seed)
    requests = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))]
        prompt += rng.choices(COMMON, k=rng.randint(1, 30))
        output = rng.choices(COMMON, k=rng.randint(1, 40))
        nodes = rng.randint(2, NODES)
        if i == count - 1:
            prompt, nodes = [0, *prompt], 1
            output *= rng.randrange(2)
        elif i == count - 3:
            prompt, output, nodes = [rng.choice(COMMON)], [], 1
        parents = preorder(rng, nodes)
        drafted = rng.choices(COMMON, k=nodes - 1)
        own = [] if i == count - 2 else [k for k in kinds if rng.random() < 0.8]
        request = Request(prompt, output, {}, parents, drafted)
        request.params = params_of(rng, own, request)
        # Idle rows behind the nodes, as a batch of one shape has them.
        request.rows = 1 if i == count - 1 else rng.choice([max(nodes, 2), NODES, NODES])
        requests.append(request)
    return requests


class Banned(LogitsProcessor):
    """Bans the last `ban` tokens of the output, for requests that ask for it."""

    supports_trees = True
    argument = "ban"

    def __init__(self, vllm_config, req_states):
        self.req_states = req_states
        self.ban = torch.zeros(req_states.max_num_reqs, dtype=torch.int32, device=req_states.device)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        count = (sampling_params.extra_args or {}).get(self.argument, 0)
        self.ban[req_idx].fill_(count)
        return count > 0

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        states, slots = self.req_states, ctx.expanded_idx_mapping
        lens = states.total_len.gpu[slots]
        on_tree = isinstance(ctx, history.TreeLogitsContext)
        drafted = ctx.path_lens if on_tree else ctx.expanded_local_pos
        rows = torch.arange(len(slots), device=slots.device)
        for back in range(4):
            committed = states.all_token_ids.gpu[slots, (lens + drafted - 1 - back).clamp(min=0)]
            if on_tree:
                column = (drafted - 1 - back).clamp(min=0)
                path = ctx.path_tokens.gather(1, column[:, None])[:, 0]
            else:
                # A chain's rows follow each other.
                path = ctx.input_ids[(rows - back).clamp(min=0)].long()
            token = torch.where(drafted > back, path, committed.long())
            in_output = lens + drafted - 1 - back >= states.prompt_len.gpu[slots]
            banned = (back < self.ban[slots]) & in_output
            old = logits.gather(1, token[:, None])
            logits.scatter_(1, token[:, None], old.masked_fill(banned[:, None], -math.inf))
        return logits


class BannedOnChains(Banned):
    supports_trees = False
    argument = "ban_on_chain"


def device() -> torch.device:
    return torch.device("cuda" if on_gpu() else "cpu")


def new_sampler(slots: int, markers: Markers = MARKERS[0], processors=(Banned,)) -> Any:
    if not on_gpu():
        import vllm.v1.worker.cpu.shm  # noqa: F401  (buffers in the CPU's memory)
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcRequestState
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    states = RequestState(slots, MAX_LEN, 512, NODES - 1, VOCAB, device())
    config = SimpleNamespace(
        reasoning_config=SimpleNamespace(
            reasoning_start_token_ids=list(markers.start),
            reasoning_end_token_ids=list(markers.forced),
            natural_reasoning_end_token_ids=list(markers.end),
        )
    )
    shared = LogitsProcRequestState.from_request_state(states)
    return Sampler(
        config,
        slots,
        VOCAB,
        device(),
        states,
        custom_logits_processors=[cls(config, shared) for cls in processors],
    )


def on_trees(sampler: Any) -> Any:
    params = RequestParams(sampler.req_states.max_num_reqs, NODES - 1, DEPTH, device())
    state = SimpleNamespace(request_params=params, step=None, accept=None)
    return tree_sampler.TreeRejectionSampler(sampler, state)


def add(sampler: Any, name: str, prompt: list[int], prefilled: list[int], params: dict) -> int:
    states = sampler.req_states
    states.add_request(name, len(prompt), prompt + prefilled, 0, 100)
    slot = states.req_id_to_index[name]
    sampler.add_request(slot, SamplingParams(**params))
    return slot


def staged(sampler: Any) -> None:
    sampler.req_states.apply_staged_writes()
    sampler.apply_staged_writes()


def generate(sampler: Any, slots: list[int], outputs: list[list[int]], rng: random.Random) -> None:
    """Append the outputs to the requests as vLLM does after it sampled them, some at a time."""
    from vllm.v1.worker.gpu.input_batch import post_update

    states, done = sampler.req_states, [0] * len(slots)
    while any(d < len(o) for d, o in zip(done, outputs)):
        counts = [min(rng.randint(0, 5), len(o) - d) for d, o in zip(done, outputs)]
        sampled = torch.full((len(slots), DEPTH + 1), -1, dtype=torch.int64)
        for i, count in enumerate(counts):
            sampled[i, :count] = torch.tensor(outputs[i][done[i] : done[i] + count])
            done[i] += count
        counts = torch.tensor(counts, dtype=torch.int32, device=device())
        post_update(
            torch.tensor(slots, device=device()),
            states.num_computed_tokens.gpu,
            states.last_sampled_tokens,
            sampler.penalties_state.output_bin_counts,
            sampled.to(device()),
            counts,
            torch.zeros_like(counts),
            None,
            states.all_token_ids.gpu,
            states.total_len.gpu,
        )


@dataclass
class Verification:
    """A batch of requests before it is sampled."""

    requests: list[Request]
    batch: Any
    step: VerifyStep
    slots: list[int]
    markers: Markers


def verification(
    requests: list[Request], slots: list[int], markers: Markers, rng: random.Random
) -> Verification:
    verified = [r for r in requests if r.rows > 1]
    trees = TreeBatch.zeros(TreeShape(len(requests) + 1, NODES, DEPTH), torch.device("cpu"))
    # What is left of other trees, behind the last node.
    trees.ancestors.copy_(torch.randint(-1, NODES, trees.ancestors.shape))
    for i, request in enumerate(verified):
        trees.num_nodes[i] = request.num_nodes
        for node in range(request.num_nodes):
            path, at = [], node
            while at >= 0:
                path.append(at)
                at = request.parents[at]
            trees.ancestors[i, node] = -1
            trees.ancestors[i, node, : len(path)] = torch.tensor(path[::-1])
    input_ids, positions = [], []
    for request in requests:
        root = len(request.prompt) + len(request.output) - 1
        depths = [len(request.path(node)) for node in range(request.num_nodes)]
        idle = request.rows - request.num_nodes
        input_ids += [request.root, *request.drafted, *rng.choices(COMMON, k=idle)]
        positions += [root + d for d in depths] + [
            root + request.num_nodes + i for i in range(idle)
        ]
    starts = np.cumsum([0] + [r.rows for r in requests]).astype(np.int32)
    on_device = dict(device=device())
    expanded = [slot for slot, r in zip(slots, requests) for _ in range(r.rows)]
    lengths = [len(r.prompt) + len(r.output) + r.rows - 1 for r in requests]
    batch = SimpleNamespace(
        num_reqs=len(requests),
        idx_mapping_np=np.array(slots),
        idx_mapping=torch.tensor(slots, **on_device),
        expanded_idx_mapping=torch.tensor(expanded, **on_device),
        expanded_local_pos=torch.tensor(
            [i for r in requests for i in range(r.rows)], dtype=torch.int32, **on_device
        ),
        logits_indices=torch.arange(starts[-1], **on_device),
        positions=torch.tensor(positions, **on_device),
        input_ids=torch.tensor(input_ids, dtype=torch.int32, **on_device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, **on_device),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        cu_num_logits_np=starts,
        cu_num_logits=torch.tensor(starts, **on_device),
    )
    n = len(verified)
    step = VerifyStep(
        trees=TreeBatch(trees.shape, trees.storage.to(device())),
        num_reqs=n,
        num_rows=int(starts[n]),
        req_ids=[],
        query_start=batch.cu_num_logits[: n + 1],
        idx_mapping=batch.idx_mapping[:n],
        num_computed=None,
        fresh_reqs=[],
        has_rest=n < len(requests),
    )
    return Verification(requests, batch, step, slots, markers)


def processed(tree: Any, v: Verification, logits: torch.Tensor) -> torch.Tensor:
    """What the rows are sampled from, float32 [rows, VOCAB]."""
    seen, sampler = [], tree.sampler
    sample = sampler.sample

    def spying(*args, **kwargs):
        tokens, out = sample(*args, **kwargs)
        seen.append(out.clone())
        return tokens, out

    def accept(node_tokens, batch, invalid):
        none = torch.zeros(batch.num_reqs, DEPTH, dtype=torch.int32, device=device())
        assert len(node_tokens) == len(logits)
        return none[:, 0], none - 1, none.long()

    tree.model_state.step, tree.model_state.accept = v.step, accept
    sampler.sample = spying
    try:
        tree(logits, v.batch)
    finally:
        del sampler.sample
    return torch.cat(seen)


def prepared(seed: int, kinds: list[str]) -> tuple[Any, Verification, torch.Tensor]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    requests = make_requests(seed, kinds)
    markers = MARKERS[seed % len(MARKERS)]
    sampler = new_sampler(SLOTS, markers)
    tree = on_trees(sampler)
    # Slots in another order than the batch; some outputs were there before a preemption.
    order = rng.sample(range(len(requests)), len(requests))
    cut = [rng.choice([0, 0, len(r.output) // 2]) for r in requests]
    slots = [0] * len(requests)
    for i in order:
        r = requests[i]
        slots[i] = add(sampler, f"r{i}", r.prompt, r.output[: cut[i]], r.params)
    staged(sampler)
    generate(sampler, slots, [r.output[c:] for r, c in zip(requests, cut)], rng)
    v = verification(requests, slots, markers, rng)
    rows = int(v.batch.cu_num_logits_np[-1])
    logits = (torch.randn(rows, VOCAB) * 3).to(torch.bfloat16).to(device())
    return tree, v, logits


def nodes_of(v: Verification):
    """(row, request, node) of all rows that are not idle."""
    for request, start in zip(v.requests, v.batch.cu_num_logits_np.tolist()):
        for node in range(request.num_nodes):
            yield start + node, request, node


def replayed(
    logits: torch.Tensor, request: Request, drafted: list[int], markers: Markers
) -> list[float]:
    """One row in float64, from nothing but the tokens before it."""
    params, out = request.params, request.output + drafted
    row = logits.double().tolist()
    for token, bias in params.get("logit_bias", {}).items():
        row[token] += bias
    repetition = params.get("repetition_penalty", 1.0)
    for token in range(VOCAB):
        count = out.count(token)
        if count or token in request.prompt:
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        row[token] -= params.get("frequency_penalty", 0.0) * count
        row[token] -= params.get("presence_penalty", 0.0) * (count > 0)
    for *prefix, last in params.get("_bad_words_token_ids", []):
        if len(prefix) <= len(out) and out[len(out) - len(prefix) :] == prefix:
            row[last] = -math.inf
    for token in out[max(0, len(out) - (params.get("extra_args") or {}).get("ban", 0)) :]:
        row[token] = -math.inf
    budget, text = params.get("thinking_token_budget"), tuple(request.prompt + out)
    if budget is not None:
        row = forced(row, budget, text, markers)
    temperature = params["temperature"]
    return [x / temperature for x in row] if temperature else row


def forced(row: list[float], budget: int, text: tuple[int, ...], markers: Markers) -> list[float]:
    def last(marker: tuple[int, ...]) -> int:
        ends = range(len(text) - len(marker) + 1)
        return max((i for i in ends if text[i : i + len(marker)] == marker), default=-1)

    start = last(markers.start)
    if start <= last(markers.end) or len(text) - start - len(markers.start) < budget:
        return row
    forced = markers.forced
    begun = max(i for i in range(len(forced)) if i == 0 or text[-i:] == forced[:i])
    row[forced[begun]] = 1e9
    return row


def mismatches(v: Verification, logits: torch.Tensor, got: torch.Tensor) -> list[tuple[int, int]]:
    """(row, node) where the processed logits are not those of the replayed path."""
    wrong = []
    for row, request, node in nodes_of(v):
        want = torch.tensor(replayed(logits[row].cpu(), request, request.path(node), v.markers))
        close = torch.isclose(got[row].cpu().double(), want.double(), rtol=1e-5, atol=1e-5)
        if not close.all():
            wrong.append((row, node))
    return wrong


CASES = [[kind] for kind in KINDS] + [[*PENALTIES], KINDS, []]


@pytest.mark.parametrize("kinds", CASES, ids="+".join)
@pytest.mark.parametrize("seed", range(6))
def test_rows_are_processed_by_their_paths(kinds, seed):
    tree, v, logits = prepared(seed, kinds)
    got = processed(tree, v, logits)
    assert not mismatches(v, logits, got)


@pytest.mark.parametrize("kind", KINDS)
def test_by_the_rows_before_it_would_not_be(kind, monkeypatch):
    """Negative control: what vLLM does, and what it was given for chains."""
    monkeypatch.setattr(tree_sampler, "process_along_paths", lambda *args: history.CurrentPaths())
    wrong = []
    for seed in range(6):
        tree, v, logits = prepared(seed, [kind])
        wrong += mismatches(v, logits, processed(tree, v, logits))
    assert wrong
    # Before the second child of any node, rows are a chain.
    assert all(node > 1 for _, node in wrong)


@pytest.mark.parametrize("kinds", CASES, ids="+".join)
def test_same_bits_as_decoding_the_path(kinds):
    for seed in range(10, 13):
        tree, v, logits = prepared(seed, kinds)
        got = processed(tree, v, logits)
        rows = list(nodes_of(v))
        decoding = new_sampler(len(rows), v.markers)
        slots = [
            add(decoding, f"row{row}", r.prompt, r.output + r.path(node), r.params)
            for row, r, node in rows
        ]
        staged(decoding)
        at = torch.tensor([row for row, _, _ in rows], device=device())
        slots_np = np.array(slots)
        _, want = decoding.sample(
            logits[at],
            torch.tensor(slots, device=device()),
            torch.tensor(slots, device=device()),
            slots_np,
            v.batch.positions[at],
            v.batch.input_ids[at],
            torch.zeros(len(rows), dtype=torch.int32, device=device()),
            np.full(len(rows), MAX_LEN),
        )
        assert torch.equal(got[at], want)


def test_chunks_change_nothing(monkeypatch):
    for seed in range(3):
        tree, v, logits = prepared(seed, KINDS)
        whole = processed(tree, v, logits)
        for rows in (1, NODES + 3, 2 * NODES):
            monkeypatch.setattr(tree_sampler, "get_max_chunk_logits", lambda vocab, rows=rows: rows)
            at = [row for row, _, _ in nodes_of(v)]
            assert torch.equal(processed(tree, v, logits)[at], whole[at])
        monkeypatch.undo()


def test_a_second_round_counts_what_was_accepted():
    """vLLM counts the accepted tokens and the bonus, and no other draft."""
    for seed in range(3):
        rng = random.Random(seed)
        tree, v, logits = prepared(seed, KINDS)
        processed(tree, v, logits)
        accepted = []
        for request in v.requests:
            path = request.path(rng.randrange(request.num_nodes))
            accepted.append(path + [rng.choice(COMMON)])
            request.output = request.output + accepted[-1]
        generate(tree.sampler, v.slots, accepted, rng)
        counts = tree.sampler.penalties_state.output_bin_counts.cpu()
        for request, slot in zip(v.requests, v.slots):
            if not PENALTIES.keys().isdisjoint(request.params):
                expected = torch.bincount(torch.tensor(request.output), minlength=VOCAB)
                assert torch.equal(counts[slot].long(), expected)
        v = verification(v.requests, v.slots, v.markers, rng)
        assert not mismatches(v, logits, processed(tree, v, logits))


def test_nothing_is_done_without_need(monkeypatch):
    """Parameters that look at no tokens before a row cost nothing."""
    tree, v, logits = prepared(3, [])
    for name in ("apply_penalties", "apply_bad_words", "last_tokens"):
        monkeypatch.setattr(history, name, None)
    monkeypatch.setattr(history.Paths, "whole", property(lambda self: pytest.fail("asked for")))
    # A bad word of one token is bad anywhere.
    v.requests[0].params = {"temperature": 0.7, "_bad_words_token_ids": [[7], [9]]}
    tree.sampler.add_request(v.slots[0], SamplingParams(**v.requests[0].params))
    staged(tree.sampler)
    # Somebody's own processor is given paths.
    tree.sampler.logits_processors.pop()
    assert not mismatches(v, logits, processed(tree, v, logits))


def test_custom_processors_say_what_they_need(caplog):
    sampler = new_sampler(SLOTS, processors=[Banned, BannedOnChains])
    with caplog.at_level(logging.WARNING):
        state = on_trees(sampler).model_state
    (said,) = [m for m in caplog.messages if "supports_trees" in m]
    assert "Logits processor BannedOnChains does not say" in said
    caps, budgets = state.request_params.candidate_caps, state.request_params.node_budgets
    for slot, extra_args in enumerate([{"ban_on_chain": 2}, {"ban": 1}]):
        params = SamplingParams(extra_args=extra_args)
        state.request_params.add_request(slot, params, 4)
        sampler.add_request(slot, params)
    # One that it leaves alone has a tree.
    assert caps[:2].tolist() == [1, 0]
    assert budgets[:2].tolist() == [DEPTH, NODES - 1]
    assert sampler.needs_logits_processing[:2].all()
