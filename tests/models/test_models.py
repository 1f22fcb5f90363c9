# SPDX-License-Identifier: Apache-2.0
"""The committed models: format, size, agreement with Transformers, and that the drafter is worth having."""

import json
from pathlib import Path

import corpus
import evaluate
import nano
import pytest
import torch
from tokenizers import Tokenizer

HERE = Path(__file__).parent
PROMPTS = json.loads((HERE / "prompts.json").read_text())


@pytest.fixture(scope="module")
def target() -> nano.Target:
    return nano.load(nano.Target, HERE / "target")


@pytest.fixture(scope="module")
def drafter() -> nano.Drafter:
    return nano.load(nano.Drafter, HERE / "drafter")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(HERE / "target/tokenizer.json"))
    return [tokenizer.encode(p["text"]).ids for p in PROMPTS]


def test_weights_stay_under_10_mb():
    assert sum(f.stat().st_size for f in HERE.rglob("*.safetensors")) < 10e6


def test_prompts_are_held_out_and_tokenize_as_recorded(prompts):
    assert len(PROMPTS) >= 96
    assert {corpus.split_of(p["file"]) for p in PROMPTS} == {"heldout"}
    assert [len(ids) for ids in prompts] == [p["num_tokens"] for p in PROMPTS]
    assert min(map(len, prompts)) == 8 and max(map(len, prompts)) == 160


def sequential_gated_delta(query, key, value, log_decay, beta, state):
    outputs = []
    for t in range(query.shape[2]):
        q, k, v = query[:, :, t], key[:, :, t], value[:, :, t]
        state = state * log_decay[:, :, t, None, None].exp()
        error = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[:, :, t, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k, error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q))
    return torch.stack(outputs, 2), state


@pytest.mark.parametrize("length", [1, 5, 64, 150])
def test_chunked_gated_delta_equals_the_recurrence(length):
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = (random(2, 3, length, 16) for _ in range(3))
    key = key / key.norm(dim=-1, keepdim=True)
    log_decay, beta = -random(2, 3, length).abs(), random(2, 3, length).sigmoid()
    state = random(2, 3, 16, 16)
    got = nano.gated_delta(query, key, value, log_decay, beta, state)
    want = sequential_gated_delta(query, key, value, log_decay, beta, state)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_target_agrees_with_transformers(target, prompts):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(HERE / "target", dtype=torch.float32).eval()
    tokens = torch.tensor([sum(prompts, [])[:300]])
    want = reference(tokens, output_hidden_states=True)
    hidden, taps = target(tokens, layer_ids=range(7))
    torch.testing.assert_close(target.logits(hidden), want.logits, rtol=0, atol=1e-3)
    torch.testing.assert_close(taps, torch.cat(want.hidden_states[1:8], -1), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_cached_decoding_equals_one_pass(target, prompts):
    tokens = torch.tensor([max(prompts, key=len)])
    cache = target.new_cache()
    parts = [target(tokens[:, :37], cache=cache)[0]]
    parts += [target(tokens[:, i : i + 1], cache=cache)[0] for i in range(37, tokens.shape[1])]
    torch.testing.assert_close(torch.cat(parts, 1), target(tokens)[0], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_drafter_sees_nothing_at_or_after_the_anchor(target, drafter, prompts):
    tokens = torch.tensor([max(prompts, key=len)])
    _, taps = target(tokens, drafter.layer_ids)
    anchors = torch.tensor([20, 90])
    want = drafter(target, tokens[:, anchors], anchors, taps, 15)
    later = taps.clone()
    later[:, 90:] = torch.randn_like(later[:, 90:])
    torch.testing.assert_close(drafter(target, tokens[:, anchors], anchors, later, 15), want)
    for i in range(2):  # blocks do not see each other
        alone = drafter(target, tokens[:, anchors[i : i + 1]], anchors[i : i + 1], taps, 15)
        torch.testing.assert_close(alone[:, 0], want[:, i], rtol=1e-3, atol=1e-3)


class AllOnes(torch.nn.Module):
    """A target whose next token is always 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, tokens, layer_ids=()):
        return tokens, None

    def logits(self, hidden):
        return torch.nn.functional.one_hot(torch.ones_like(hidden), 3)


class DraftsRowNumbers:
    """Drafts token b for prompt b."""

    layer_ids = ()

    def __call__(self, target, anchors, positions, taps, k):
        rows = torch.arange(len(anchors))[:, None, None].expand(-1, 1, k)
        return torch.nn.functional.one_hot(rows, 3)


def test_chain_rounds_when_the_longest_prompt_is_done_first():
    k, tokens = 5, 7
    rounds = evaluate.chain_rounds(AllOnes(), DraftsRowNumbers(), [[2], [2] * 16], k, tokens)
    assert rounds == [[1] * tokens, [k + 1] * 2]


def test_chain_accepts_at_least_two_tokens_a_round(target, drafter, prompts):
    rounds = evaluate.chain_rounds(target, drafter, prompts[::8], k=15, max_tokens=32)
    assert evaluate.tokens_per_round(rounds) >= 2
