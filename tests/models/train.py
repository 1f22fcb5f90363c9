# SPDX-License-Identifier: Apache-2.0
"""Trains a hybrid target and its DFlash drafter on Python sources. See README.md in this folder.

    python3 tests/models/train.py --out DIR --minutes 9     # one GPU: the nano pair, on the standard library
    python3 tests/models/train.py --out DIR --size small --corpus DIR...    # a larger pair, also on the sources below these
    python3 tests/models/train.py --out DIR --smoke         # any CPU, a minute or two: checks the program, not the models
    python3 tests/models/train.py --out DIR --start DIR     # with the target (and first drafter) that an earlier run left in DIR

Everything runs against the clock, so it always ends in time, and what it has is written to DIR as it goes.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import NamedTuple

import corpus
import evaluate
import nano
import prompts
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

SPECIAL_TOKENS = ["<|endoftext|>", "<|pad|>", "<|mask|>"]
END, PAD, MASK = range(3)
BLOCK = 16
MAX_LENGTH = 4096



class Size(NamedTuple):
    """Dimensions of a pair; `tapped` are the target's layers that the drafter reads."""

    vocab: int
    hidden: int
    inner: int
    layers: tuple[str, ...]
    heads: int
    key_heads: int
    value_heads: int
    tapped: tuple[int, ...]


GDN, FULL = "linear_attention", "full_attention"
SIZES = {
    "nano": Size(1024, 160, 416, (GDN, GDN, GDN, FULL) * 2, 2, 1, 2, (1, 3, 5, 6)),
    "small": Size(4096, 384, 1024, (GDN, GDN, FULL) * 4, 4, 2, 4, (1, 4, 7, 9)),
}


def configs(size: Size) -> tuple[dict, dict]:
    """config.json of the target and of its drafter."""
    common = {
        "dtype": "bfloat16",
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_attention_heads": size.heads,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": END,
    }
    target = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": len(size.layers),
        "layer_types": list(size.layers),
        "linear_num_key_heads": size.key_heads,
        "linear_num_value_heads": size.value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "pad_token_id": PAD,
    }
    drafter = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 5,
        "layer_types": [FULL] * 5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "num_target_layers": len(size.layers),
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(size.tapped)},
    }
    return common | target, common | drafter


GPU = dict(
    sequences=128, length=512, pool_sequences=8192, pool_length=256, pool_bytes=40e9, real_sequences=512, blocks=16,
    draft_sequences=128, prompts=96, max_tokens=64, check_prompts=64,
)  # fmt: skip
SMOKE = dict(
    sequences=4, length=128, pool_sequences=8, pool_length=96, pool_bytes=2e8, real_sequences=4, blocks=4,
    draft_sequences=4, prompts=4, max_tokens=8, check_prompts=2,
)  # fmt: skip

# Shares of the time: both models on real text at most, the target's own texts at most, the drafter's end. The rest is for
# evaluation and files.
JOINT_SHARE, POOL_SHARE, END_SHARE = 0.36, 0.15, 0.95
# The first phase trains at a constant rate until the target no longer gets better on files it does not train on, or until this
# share of its time is left; then the rate falls to zero over that share.
COOLDOWN = 0.3
# The drafter's loss beside the target's own in the first phase.
DRAFT_WEIGHT = 0.5
# The first anchor in a text, and how soon a row's weight falls off: a draft is worth nothing after its first miss.
FIRST, FADE = 8, 5.0


class Run:
    """The clock, the progress lines and the record of one training run."""

    def __init__(self, minutes: float, out: Path):
        self.start, self.seconds, self.out = time.monotonic(), minutes * 60, out
        self.printed, self.record = 0.0, {}

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def due(self, seconds: float = 15) -> bool:
        if self.elapsed() - self.printed < seconds:
            return False
        self.printed = self.elapsed()
        return True

    def say(self, text: str) -> None:
        print(f"[{self.elapsed():6.1f} s] {text}", flush=True)

    def note(self, **values) -> None:
        self.record.update(values)
        (self.out / "train.json").write_text(json.dumps(self.record, indent=1) + "\n")


def train_tokenizer(texts: list[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"too little text for {vocab} tokens")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "mask_token": SPECIAL_TOKENS[MASK],
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        # A text model: a chat is the messages one after the other, to be continued.
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def encode(tokenizer: Tokenizer, texts: list[str], device) -> Tensor:
    """All texts in one i64 stream, each ended by the end token."""
    return torch.tensor([i for e in tokenizer.encode_batch(texts) for i in [*e.ids, END]], device=device)


def windows(stream: Tensor, count: int, length: int) -> Tensor:
    """`count` random windows [count, length]."""
    starts = torch.randint(0, len(stream) - length, (count, 1), device=stream.device)
    return stream[starts + torch.arange(length, device=stream.device)]


def optimizer_for(module: torch.nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    others = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def descend(optimizer, module, loss: Tensor, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for parameter in module.parameters():  # a batch that overflowed must not end the run
        parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
    optimizer.step()


def mixed_precision(device: str):
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def draft(drafter: nano.Drafter, target: nano.Target, tokens: Tensor, taps: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts blocks at random places of tokens [B, >= T], taps [B, T, ...]. Returns logits f32 [B, N, K, V], the drafted positions
    [N, K] and the rows' weights [K]. K is now and then shorter than the block allows: a runtime may ask for fewer tokens."""
    device = tokens.device
    horizon = BLOCK - 1 if random.random() < 0.75 else random.randint(1, BLOCK - 2)
    ahead = torch.arange(1, horizon + 1, device=device)
    anchors = FIRST + torch.randperm(taps.shape[1] - BLOCK - FIRST, device=device)[:blocks]
    with mixed_precision(device.type):
        logits = drafter(target, tokens[:, anchors], anchors, taps, horizon)
    return logits.float(), anchors[:, None] + ahead, torch.exp(-(ahead - 1) / FADE)


def train_together(
    run: Run, dimensions: Size, size: dict, streams: dict[str, Tensor], device: str
) -> tuple[nano.Target, nano.Drafter]:
    """Both models learn the real text, as a model and its multi-token prediction head do: the drafter's loss reaches the target
    too, whose layers then tell more about the tokens to come."""
    target_config, drafter_config = configs(dimensions)
    target, drafter = nano.Target(target_config).to(device), nano.Drafter(drafter_config).to(device)
    target.dropout = 0.15
    both = torch.nn.ModuleList([target, drafter])
    peak = 2e-3
    optimizer = optimizer_for(both, peak, 0.2)
    unseen = streams["check"]
    unseen = unseen[: len(unseen) // size["length"] * size["length"]].view(-1, size["length"])[: 2 * size["sequences"]]

    def target_loss(tokens: Tensor) -> tuple[Tensor, Tensor]:
        with mixed_precision(device):
            hidden, taps = target(tokens, drafter.layer_ids)
            logits = target.logits(hidden[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()), taps

    def draft_loss(tokens: Tensor, taps: Tensor) -> Tensor:
        logits, places, weights = draft(drafter, target, tokens, taps, size["blocks"])
        wanted = tokens[:, places]
        losses = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none").view(wanted.shape)
        return (losses * weights).sum(-1).mean() / weights.sum()

    @torch.no_grad()
    def unseen_losses() -> tuple[float, float]:
        target.eval()
        losses = []
        for part in unseen.split(size["sequences"]):
            loss, taps = target_loss(part)
            losses.append(torch.stack([loss, draft_loss(part, taps)]))
        target.train()
        return tuple(torch.stack(losses).mean(0).tolist())

    begin, budget = run.elapsed(), run.seconds * JOINT_SHARE
    cooldown = budget * COOLDOWN
    cool = begin + budget - cooldown
    steps, best, worse = 0, math.inf, 0
    while (now := run.elapsed()) < cool + cooldown:
        rate = peak * min(1.0, (now - begin) / (0.03 * budget) + 0.01, (cool + cooldown - now) / cooldown)
        tokens = windows(streams["train"], size["sequences"], size["length"])
        loss, taps = target_loss(tokens)
        descend(optimizer, both, loss + DRAFT_WEIGHT * draft_loss(tokens, taps), rate)
        steps += 1
        if run.due(10):
            held, drafted = unseen_losses()
            seen = steps * size["sequences"] * size["length"]
            speed = seen / (run.elapsed() - begin)
            run.say(f"target: step {steps}, loss {loss.item():.3f}, unseen {held:.3f}, drafter unseen {drafted:.3f}, "
                    f"{speed / 1e3:.0f}k tokens/s, {seen / len(streams['train']):.1f} epochs")  # fmt: skip
            worse = worse + 1 if held > best - 0.002 else 0
            best = min(best, held)
            if worse == 2 and run.elapsed() < cool:
                cool = run.elapsed()
                run.say("target: no longer better, cooling down")
    last = unseen_losses()[0]
    epochs = steps * size["sequences"] * size["length"] / len(streams["train"])
    run.note(target_steps=steps, target_epochs=epochs, target_unseen_loss=last, target_seconds=run.elapsed() - begin)
    run.say(f"target: {steps} steps, {epochs:.1f} epochs, unseen loss {last:.3f}")
    # From here on the target is what the checkpoint holds.
    round_weights(target)
    return target.eval().requires_grad_(False), drafter


def round_weights(module: torch.nn.Module) -> None:
    module.load_state_dict({name: x.bfloat16().float() for name, x in module.state_dict().items()})


class Texts(NamedTuple):
    """Texts and what the target made of them: tokens i64 [B, > T], taps [B, T, ...] and hidden states [B, T, H] in bf16."""

    tokens: Tensor
    taps: Tensor
    hidden: Tensor


@torch.no_grad()
def generate(target: nano.Target, prompt: Tensor, length: int, sampled: Tensor, layer_ids: list[int]) -> Texts:
    """Continues prompts [B, P] by `length` - P + 1 tokens: sampled where bool `sampled` [B, length + 1] says so, else greedy."""
    batch, start = prompt.shape
    tokens = prompt.new_zeros(batch, length + 1)
    tokens[:, :start] = prompt
    taps, hidden = (prompt.new_empty(batch, length, n * target.config.hidden_size, dtype=torch.bfloat16) for n in (len(layer_ids), 1))
    cache, done = target.new_cache(), 0
    for end in range(start, length + 1):
        part = slice(done, end)
        states, taps[:, part] = target(tokens[:, part], layer_ids, cache)
        hidden[:, part] = states
        logits = target.logits(states[:, -1]).float()
        drawn = torch.multinomial(logits.softmax(-1), 1)[:, 0]
        tokens[:, end] = torch.where(sampled[:, end], drawn, logits.argmax(-1))
        done = end
    return Texts(tokens, taps, hidden)


def write_pool(run: Run, target: nano.Target, layer_ids: list[int], size: dict, streams: dict[str, Tensor], device: str) -> list[Texts]:
    """The target's own texts, after one batch of long real ones. Prompts come from files that the target trained on and from files
    that it never saw. Two of three texts go on with up to 64 sampled tokens. The rest is greedy but for a sampled token now and
    then: what follows is new to the drafter, and loops end."""
    begin = run.elapsed()
    length, batch = size["pool_length"], size["pool_sequences"]
    tokens = windows(streams["train"], size["real_sequences"], 2 * size["length"] + 1)
    parts = []
    with torch.no_grad(), mixed_precision(device):
        for part in tokens[:, :-1].split(32):
            hidden, taps = target(part, layer_ids)
            parts.append((taps.bfloat16(), hidden.bfloat16()))
    pool = [Texts(tokens, *(torch.cat(x) for x in zip(*parts, strict=True)))]
    width = 2 * (len(layer_ids) + 1) * target.config.hidden_size
    count, took = 0, 0.0
    # A batch may turn out to be slower than the one before.
    while count == 0 or (count * width < size["pool_bytes"] and run.elapsed() + 1.2 * took < begin + run.seconds * POOL_SHARE):
        started = run.elapsed()
        start = random.randint(FIRST, length // 2)
        prompt = torch.cat([windows(streams[name], batch // 2, start) for name in ("train", "draft")])
        sampled = torch.rand(batch, length + 1, device=device) < 1 / 32
        rough = torch.randint(0, 65, (batch, 1), device=device) * (torch.rand(batch, 1, device=device) < 2 / 3)
        sampled |= torch.arange(length + 1, device=device) < start + rough
        with mixed_precision(device):
            pool.append(generate(target, prompt, length, sampled, layer_ids))
        count += batch * (length - start)
        run.say(f"pool: {len(pool) - 1} batches, {count / 1e6:.1f}M new tokens")
        took = run.elapsed() - started
    run.note(pool_tokens=count)
    return pool


def draft_own_texts(drafter: nano.Drafter, target: nano.Target, pool: list[Texts], size: dict) -> tuple[Tensor, Tensor]:
    """The loss on a batch of the pool, and the accepted tokens of each draft, [B, N].

    A row counts as long as the text before it is the target's own choice. The labels are half the target's choice, which decides
    what is accepted, half its whole distribution, which says more. Early rows weigh more."""
    texts = pool[0] if random.random() < 0.08 else random.choice(pool[1:])
    wide = texts.taps.shape[1] // size["pool_length"]
    rows = torch.randint(0, len(texts.tokens), (max(1, size["draft_sequences"] // max(1, wide)),), device=texts.tokens.device)
    tokens, taps, hidden = (x[rows] for x in texts)
    logits, places, weights = draft(drafter, target, tokens, taps.float(), size["blocks"])
    with torch.no_grad():
        wanted = target.logits(hidden[:, places - 1].float())
        choice = wanted.argmax(-1)
        follows = (tokens[:, places] == choice)[..., :-1].cumprod(-1)
        weights = weights * F.pad(follows, (1, 0), value=1)
        accepted = ((logits.argmax(-1) == choice) & (weights > 0)).int().cumprod(-1).sum(-1)
        wanted = wanted.softmax(-1)
    log_p = logits.log_softmax(-1)
    losses = -((log_p * wanted).sum(-1) + log_p.gather(-1, choice[..., None])[..., 0]) / 2
    return (losses * weights).sum() / weights.sum(), accepted


def train_drafter(
    run: Run, target: nano.Target, drafter: nano.Drafter, pool: list[Texts], size: dict, streams: dict[str, Tensor], device: str
) -> None:
    """Trains on the pool, and ends with the weights that did best on the `check` text."""
    peak = 1.5e-3
    optimizer = optimizer_for(drafter, peak, 0.05)
    begin = run.elapsed()
    budget = max(run.seconds * END_SHARE - begin, 0.05 * run.seconds)
    starts = torch.linspace(0, len(streams["check"]) - 65, size["check_prompts"]).long().tolist()
    check_prompts = [streams["check"][i : i + 16 + 48 * n // len(starts)].tolist() for n, i in enumerate(starts)]
    steps, checked, best, kept = 0, -math.inf, 0.0, None

    def check() -> None:
        nonlocal checked, best, kept
        with mixed_precision(device):
            rate = evaluate.tokens_per_round(evaluate.chain_rounds(target, drafter, check_prompts, BLOCK - 1, size["max_tokens"]))
        run.say(f"drafter: step {steps}, chain on the check prompts: {rate:.3f} tokens per round")
        if rate > best:
            best, kept = rate, {name: x.clone() for name, x in drafter.state_dict().items()}
            nano.save(drafter, run.out / "drafter")
        checked = run.elapsed()

    while (fraction := (run.elapsed() - begin) / budget) < 1:
        if run.elapsed() - checked > 40:
            check()
        rate = peak * min(1.0, fraction / 0.02 + 0.01) * (0.5 + 0.5 * math.cos(math.pi * fraction))
        loss, accepted = draft_own_texts(drafter, target, pool, size)
        descend(optimizer, drafter, loss, rate)
        steps += 1
        if run.due():
            run.say(f"drafter: step {steps}, loss {loss.item():.3f}, {accepted.float().mean().item():.2f} accepted of the pool's texts")
    check()
    run.note(drafter_steps=steps, check_tokens_per_round=best)
    drafter.load_state_dict(kept)
    round_weights(drafter)
    drafter.eval().requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="wall-clock time of the whole run")
    parser.add_argument("--size", choices=SIZES, default="nano", help="of the models")
    parser.add_argument("--corpus", type=Path, nargs="*", default=[], help="folders of more Python sources to train on")
    parser.add_argument("--smoke", action="store_true", help="tiny batches and 0.7 minutes (unless --minutes is given)")
    parser.add_argument("--start", type=Path, help="folder with the target and the drafter to start from, instead of the first phase")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.smoke and args.minutes == parser.get_default("minutes"):
        args.minutes = 0.7
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args.minutes, args.out)
    size = SMOKE if args.smoke else GPU
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    # cuDNN's attention plans anew for every length, and generation has a new one each step.
    torch.backends.cuda.enable_cudnn_sdp(False)
    run.say(f"torch {torch.__version__} on {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}")

    texts = {split: corpus.load(split, *args.corpus) for split in ("train", "draft", "heldout")}
    for split, files in texts.items():
        run.say(f"{split}: {len(files)} files, {sum(map(len, files.values())) / 1e6:.2f}M characters")
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "target/tokenizer.json"))
    else:
        tokenizer = train_tokenizer(list(texts["train"].values()), SIZES[args.size].vocab)
    save_tokenizer(tokenizer, args.out / "target")
    streams = {split: encode(tokenizer, list(files.values()), device) for split, files in texts.items()}
    cut = len(streams["draft"]) * 3 // 4
    streams["draft"], streams["check"] = streams["draft"][:cut], streams["draft"][cut:]
    run.say(f"{len(streams['train']) / 1e6:.2f}M training tokens")
    run.note(size=args.size, torch=torch.__version__, device=device, minutes=args.minutes, train_tokens=len(streams["train"]))
    held_out = prompts.extract(tokenizer, texts["heldout"], size["prompts"])

    if args.start:
        target = nano.load(nano.Target, args.start / "target").to(device)
        drafter = nano.load(nano.Drafter, args.start / "drafter").to(device).requires_grad_(True)
    else:
        target, drafter = train_together(run, SIZES[args.size], size, streams, device)
    nano.save(target, args.out / "target")
    nano.save(drafter, args.out / "drafter")
    for text in held_out[:3]:
        start = torch.tensor([tokenizer.encode(text["text"]).ids], device=device)
        end = start.shape[1] + 32
        sample = generate(target, start, end, torch.zeros(1, end + 1, dtype=torch.bool, device=device), drafter.layer_ids)
        run.say(f"greedy sample: {tokenizer.decode(sample.tokens[0].tolist())!r}")
    pool = write_pool(run, target, drafter.layer_ids, size, streams, device)
    train_drafter(run, target, drafter, pool, size, streams, device)
    nano.save(drafter, args.out / "drafter")

    ids = [tokenizer.encode(p["text"]).ids for p in held_out]
    for k in (15, 7, 3):
        with mixed_precision(device):
            rounds = evaluate.chain_rounds(target, drafter, ids, k, size["max_tokens"])
        rate = evaluate.tokens_per_round(rounds)
        run.note(**{f"tokens_per_round_k{k}": rate})
        run.say(f"held-out chain, k={k}: {rate:.3f} tokens per round in {sum(map(len, rounds))} rounds")
    files = [p for p in args.out.rglob("*") if p.is_file()]
    weights = sum(p.stat().st_size for p in files if p.suffix == ".safetensors")
    run.say(f"done: {len(files)} files, weights {weights / 1e6:.2f} MB, in {args.out}")


if __name__ == "__main__":
    main()
