# SPDX-License-Identifier: Apache-2.0
"""Trains a DFlash2 selector for a trained pair: a head that scores each candidate token below each of its parents.

    python3 tests/models/train_selector.py --out DIR                        # the nano pair; 40 s on an H200
    python3 tests/models/train_selector.py --out DIR --texts 64 --steps 40  # CPU: checks the program

writes DIR/dflash2, which vLLM loads as `DFlash2DraftModel`, and DIR/selector.json. The drafter's layers stay as they
are, so what they say of the target's own texts is computed once and the head learns from that: for every drafted
position the K likeliest tokens, their logits and the row's hidden state. Its loss is the cross-entropy of the target's
choice among the candidates below the target's token before, in rows where it is one of them and every earlier one was;
early rows weigh more. Texts continue prompts from the `train` and `draft` files. Now and then the loss is taken on
texts of other `draft` files, and the weights that did best there are kept: a head of few texts learns them by heart.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import corpus
import dflash2
import nano
import torch
import torch.nn.functional as F
import train
from tokenizers import Tokenizer
from torch import Tensor

HERE = Path(__file__).parent
# Of the prompts; how soon a row's weight falls off: a draft is worth nothing after its first miss.
SHORTEST, FADE = 8, 5.0
CHECK_SHARE = 0.25


class Blocks(NamedTuple):
    """What the drafter says of drafted blocks, and what the target wants: anchors i64 [M], wanted i64 [M, L], hidden
    [M, L, H], candidates i64 and logits [M, L, K]."""

    anchors: Tensor
    wanted: Tensor
    hidden: Tensor
    candidates: Tensor
    logits: Tensor


def own_texts(target: nano.Target, prompts: Tensor, length: int, layer_ids: list[int]) -> train.Texts:
    """Prompts [B, P] continued greedily to `length` tokens, but for a sampled one now and then, so that loops end."""
    sampled = torch.rand(len(prompts), length, device=prompts.device) < 1 / 32
    return train.generate(target, prompts, length - 1, sampled, layer_ids)


@torch.no_grad()
def draft_blocks(
    target: nano.Target, drafter: nano.Drafter, texts: train.Texts, first: int, count: int, horizon: int, top_k: int
) -> Blocks:
    """`count` blocks at the same random places, from `first` on, of the texts."""
    tokens, taps = texts.tokens, texts.taps.float()
    choices = target.logits(texts.hidden.float()).argmax(-1)
    places = torch.arange(tokens.shape[1] - horizon - first, device=tokens.device)
    anchors = first + places[torch.randperm(len(places), device=tokens.device)[:count]]
    hidden = dflash2.hidden_states(drafter, target, tokens[:, anchors], anchors, taps, horizon)
    logits, candidates = target.logits(hidden).topk(top_k, -1)
    ahead = anchors[:, None] + torch.arange(horizon, device=tokens.device)
    # What is wanted follows the target's own choices; -1 from the first token on that was none.
    wanted, follows = tokens[:, ahead + 1], tokens[:, ahead + 1] == choices[:, ahead]
    wanted = torch.where(follows.cumprod(-1).bool(), wanted, -1)
    parts = (tokens[:, anchors], wanted, hidden, candidates, logits)
    return Blocks(*(part.flatten(0, 1) for part in parts))


def loss_of(selector: dflash2.Selector, blocks: Blocks) -> Tensor:
    parents = torch.cat([blocks.anchors[:, None], blocks.wanted[:, :-1].clamp(min=0)], 1)
    scores = selector(blocks.hidden, parents[..., None], blocks.candidates, blocks.logits)[..., 0, :]
    is_wanted = blocks.candidates == blocks.wanted[..., None]
    reached = is_wanted.any(-1).cumprod(-1)
    horizon = blocks.wanted.shape[1]
    weights = reached * torch.exp(-torch.arange(horizon, device=scores.device) / FADE)
    losses = F.cross_entropy(scores.flatten(0, 1), is_wanted.int().argmax(-1).flatten(), reduction="none")
    return (losses.view_as(weights) * weights).sum() / weights.sum()


@torch.no_grad()
def accepted(selector: dflash2.Selector | None, blocks: Blocks) -> float:
    """Mean drafted tokens that the target takes, of the chain that the selector, or the logits alone, choose."""
    if selector is None:
        path = blocks.candidates[..., 0]
    else:
        path = dflash2.walk(selector, blocks.hidden, blocks.anchors, blocks.candidates, blocks.logits)
    return (path == blocks.wanted).int().cumprod(-1).sum(-1).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=HERE, help="folder with target/ and drafter/")
    parser.add_argument("--block-size", type=int, default=8, help="anchor and drafted tokens")
    parser.add_argument("--top-k", type=int, default=16, help="candidates of each position")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--texts", type=int, default=8192)
    parser.add_argument("--length", type=int, default=192, help="tokens of a text")
    parser.add_argument("--blocks", type=int, default=32, help="drafted blocks of a text")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=1024, help="blocks of a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.1f} s] {text}", flush=True)

    target = nano.load(nano.Target, args.models / "target").to(device)
    drafter = nano.load(nano.Drafter, args.models / "drafter").to(device)
    tokenizer = Tokenizer.from_file(str(args.models / "target/tokenizer.json"))
    files = list(corpus.load("draft").values())
    cut = int(len(files) * (1 - CHECK_SHARE))
    known = [*corpus.load("train").values(), *files[:cut]]
    horizon = args.block_size - 1

    def make(files: list[str], count: int) -> Blocks:
        stream = train.encode(tokenizer, files, device)
        parts, made = [], 0
        while made < count:
            size = min(1024 if device == "cuda" else 256, count - made)
            prompt = int(torch.randint(SHORTEST, args.length // 3, ()))
            texts = own_texts(target, train.windows(stream, size, prompt), args.length, drafter.layer_ids)
            for part in zip(*(x.split(64) for x in texts), strict=True):
                blocks = draft_blocks(target, drafter, train.Texts(*part), prompt, args.blocks, horizon, args.top_k)
                parts.append(blocks)
            made += size
            say(f"{made} of {count} texts")
        return Blocks(*(torch.cat(x) for x in zip(*parts, strict=True)))

    taught, check = make(known, args.texts), make(files[cut:], max(64, args.texts // 8))
    selector = dflash2.Selector(target.config.vocab_size, target.config.hidden_size, args.rank).to(device)
    optimizer = torch.optim.AdamW(selector.parameters(), lr=args.rate, betas=(0.9, 0.99), weight_decay=0.1)
    chain, best, kept = accepted(None, check), math.inf, {}
    say(f"{len(taught.anchors)} blocks; chain of the likeliest tokens on unseen texts: {chain:.3f} accepted")
    for step in range(args.steps + 1):
        if step % max(1, args.steps // 40) == 0:
            with torch.no_grad():
                unseen = loss_of(selector, check).item()
            say(f"step {step}, unseen loss {unseen:.4f}, walk {accepted(selector, check):.3f} accepted")
            if unseen < best:
                best, kept = unseen, {name: x.clone() for name, x in selector.state_dict().items()}
        optimizer.param_groups[0]["lr"] = args.rate * (0.5 + 0.5 * math.cos(math.pi * step / args.steps))
        rows = torch.randint(0, len(taught.anchors), (args.batch,), device=device)
        loss = loss_of(selector, Blocks(*(part[rows] for part in taught)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # what the checkpoint holds
    selector.load_state_dict({name: x.bfloat16().float() for name, x in kept.items()})
    dflash2.save(drafter, selector, args.top_k, args.block_size, args.out / "dflash2")
    with torch.no_grad():
        unseen = loss_of(selector, check).item()
    record = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "arguments": {name: str(x) if isinstance(x, Path) else x for name, x in vars(args).items() if name != "out"},
        "blocks": len(taught.anchors),
        "unseen_loss": unseen,
        "unseen_accepted_by_logits": chain,
        "unseen_accepted_by_selector": accepted(selector, check),
        "seconds": round(time.monotonic() - begin, 1),
    }
    (args.out / "selector.json").write_text(json.dumps(record, indent=1) + "\n")
    say(f"done: walk {record['unseen_accepted_by_selector']:.3f}, chain {chain:.3f} accepted, in {args.out}")


if __name__ == "__main__":
    main()
