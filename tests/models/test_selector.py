# SPDX-License-Identifier: Apache-2.0
"""The DFlash2 selector: what it learns from, and that it learns."""

import json
from pathlib import Path

import dflash2
import nano
import pytest
import torch
import train_selector
from tokenizers import Tokenizer

HERE = Path(__file__).parent
HORIZON, TOP_K = 7, 8


@pytest.fixture(scope="module")
def blocks() -> train_selector.Blocks:
    torch.manual_seed(0)
    target, drafter = nano.load(nano.Target, HERE / "target"), nano.load(nano.Drafter, HERE / "drafter")
    tokenizer = Tokenizer.from_file(str(HERE / "target/tokenizer.json"))
    texts = [p["text"] for p in json.loads((HERE / "prompts.json").read_text())]
    prompts = [ids for text in texts if len(ids := tokenizer.encode(text).ids) >= 32][:16]
    texts = train_selector.own_texts(target, torch.tensor([ids[:32] for ids in prompts]), 80, drafter.layer_ids)
    return train_selector.draft_blocks(target, drafter, texts, 32, 16, HORIZON, TOP_K)


def test_blocks_line_up_with_what_the_target_wants(blocks):
    """One place off and next to nothing would be accepted."""
    assert blocks.wanted.shape == (16 * 16, HORIZON) and blocks.candidates.shape[-1] == TOP_K
    assert train_selector.accepted(None, blocks) > 2
    shifted = blocks._replace(wanted=blocks.wanted.roll(1, 1))
    assert train_selector.accepted(None, shifted) < 1
    # from the first token on that the target did not choose nothing is wanted
    ended = (blocks.wanted < 0).int()
    assert (ended.cummax(1).values == ended).all() and 0 < ended.float().mean() < 0.5


def test_a_walk_takes_the_best_child_of_each_node(blocks):
    torch.manual_seed(1)
    selector = dflash2.Selector(1024, blocks.hidden.shape[-1], 16).requires_grad_(False)
    path = dflash2.walk(selector, blocks.hidden, blocks.anchors, blocks.candidates, blocks.logits)
    assert torch.equal(path, blocks.candidates[..., 0])  # nothing is learned, so the likeliest tokens
    torch.nn.init.normal_(selector.successor_codebook)
    path = dflash2.walk(selector, blocks.hidden, blocks.anchors, blocks.candidates, blocks.logits)
    for m in range(8):
        parent = int(blocks.anchors[m])
        for step in range(HORIZON):
            gate = selector.hidden_projection.weight @ blocks.hidden[m, step]
            pairs = selector.successor_codebook[blocks.candidates[m, step]] @ (
                gate * selector.predecessor_codebook[parent]
            )
            parent = int(blocks.candidates[m, step, (blocks.logits[m, step] + pairs).argmax()])
            assert parent == path[m, step]


def test_it_learns(blocks):
    torch.manual_seed(2)
    selector = dflash2.Selector(1024, blocks.hidden.shape[-1], 16)
    optimizer = torch.optim.AdamW(selector.parameters(), lr=1e-2)
    first = train_selector.loss_of(selector, blocks)
    for _ in range(30):
        optimizer.zero_grad()
        loss = train_selector.loss_of(selector, blocks)
        loss.backward()
        optimizer.step()
    assert loss < 0.8 * first
