# SPDX-License-Identifier: Apache-2.0
"""Trains the nano hybrid target and its DFlash drafter on the standard library's sources. See README.md in this folder.

    python3 tests/models/train.py --out DIR --minutes 9     # one GPU
    python3 tests/models/train.py --out DIR --smoke         # any CPU, under a minute: checks the program, not the models

Everything runs against the clock, so it always ends in time, and what it has is written to DIR as it goes.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

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

HIDDEN, VOCAB = 160, 1024
TARGET = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 416,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": PAD,
}
DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 416,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention"] * 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "block_size": BLOCK,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5, 6]},
    "bos_token_id": None,
    "eos_token_id": END,
}

GPU = dict(sequences=128, length=512, pool_sequences=2048, pool_length=320, blocks=16, draft_sequences=128, prompts=96, max_tokens=64)
SMOKE = dict(sequences=4, length=128, pool_sequences=8, pool_length=96, blocks=4, draft_sequences=4, prompts=4, max_tokens=8)

# Shares of the time: the target at most, the target's own texts, the drafter's end. The rest is for evaluation and files.
TARGET_SHARE, POOL_SHARE, END_SHARE = 0.42, 0.09, 0.93
# The target trains at a constant rate until it no longer gets better on files it does not train on, or until this share of its
# time is left; then the rate falls to zero over that share.
COOLDOWN = 0.3


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


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"too little text for {VOCAB} tokens")
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
        "model_max_length": TARGET["max_position_embeddings"],
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


def train_target(run: Run, size: dict, streams: dict[str, Tensor], device: str) -> nano.Target:
    target = nano.Target(TARGET).to(device)
    target.dropout = 0.1
    peak = 3e-3
    optimizer = optimizer_for(target, peak, 0.1)
    unseen = streams["draft"]
    unseen = unseen[: len(unseen) // size["length"] * size["length"]].view(-1, size["length"])[: 2 * size["sequences"]]

    def loss_of(tokens: Tensor) -> Tensor:
        with mixed_precision(device):
            logits = target.logits(target(tokens)[0][:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def unseen_loss() -> float:
        target.eval()
        loss = torch.stack([loss_of(part) for part in unseen.split(size["sequences"])]).mean().item()
        target.train()
        return loss

    begin, budget = run.elapsed(), run.seconds * TARGET_SHARE
    cooldown = budget * COOLDOWN
    cool = begin + budget - cooldown
    steps, best, worse = 0, math.inf, 0
    while (now := run.elapsed()) < cool + cooldown:
        rate = peak * min(1.0, (now - begin) / (0.03 * budget) + 0.01, (cool + cooldown - now) / cooldown)
        loss = loss_of(windows(streams["train"], size["sequences"], size["length"]))
        descend(optimizer, target, loss, rate)
        steps += 1
        if run.due(10):
            held = unseen_loss()
            seen = steps * size["sequences"] * size["length"]
            speed = seen / (run.elapsed() - begin)
            run.say(f"target: step {steps}, loss {loss.item():.3f}, unseen {held:.3f}, {speed / 1e3:.0f}k tokens/s, "
                    f"{seen / len(streams['train']):.1f} epochs")  # fmt: skip
            worse = worse + 1 if held > best - 0.002 else 0
            best = min(best, held)
            if worse == 2 and run.elapsed() < cool:
                cool = run.elapsed()
                run.say("target: no longer better, cooling down")
    last = unseen_loss()
    epochs = steps * size["sequences"] * size["length"] / len(streams["train"])
    run.note(target_steps=steps, target_epochs=epochs, target_unseen_loss=last, target_seconds=run.elapsed() - begin)
    run.say(f"target: {steps} steps, {epochs:.1f} epochs, unseen loss {last:.3f}")
    # From here on the target is what the checkpoint holds.
    target.load_state_dict({k: v.bfloat16().float() for k, v in target.state_dict().items()})
    return target.eval().requires_grad_(False)


@torch.no_grad()
def generate(target: nano.Target, prompt: Tensor, length: int, temperature: float) -> Tensor:
    """Continues prompts [B, P] to `length` tokens; temperature 0 is greedy."""
    cache, tokens, new = target.new_cache(), prompt, prompt
    while tokens.shape[1] < length:
        logits = target.logits(target(new, cache=cache)[0][:, -1]).float()
        if temperature:
            new = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            new = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return tokens


def write_pool(run: Run, target: nano.Target, size: dict, streams: dict[str, Tensor], device: str) -> list[tuple[Tensor, int, bool]]:
    """The target's own texts: (tokens [B, T], prompt length, greedy). Two of three batches are greedy; prompts come in turn from
    files that the target trained on and from files that it never saw."""
    pool, end = [], run.elapsed() + run.seconds * POOL_SHARE
    while not pool or run.elapsed() < end:
        turn = len(pool)
        length = random.randint(8, min(160, size["pool_length"] // 2))
        prompt = windows(streams["draft" if turn % 2 else "train"], size["pool_sequences"], length)
        temperature = 1.0 if turn % 3 == 2 else 0.0
        with mixed_precision(device):
            tokens = generate(target, prompt, size["pool_length"], temperature)
        pool.append((tokens, length, not temperature))
        if run.due():
            run.say(f"pool: {len(pool)} batches, {len(pool) * tokens.numel() / 1e6:.1f}M tokens")
    run.note(pool_tokens=len(pool) * pool[0][0].numel())
    return pool


def draft_batch(target, pool, size, streams, device) -> tuple[Tensor, Tensor, Tensor, Tensor, bool]:
    """Tokens [B, T], the drafter's context, anchor positions [N], the target's next-token probabilities [B, T, V]; greedy."""
    if random.random() < 0.15:  # real text, and long contexts
        length = 2 * size["length"]
        tokens, first, greedy = windows(streams["train"], max(1, size["draft_sequences"] // 4), length), 8, False
    else:
        tokens, first, greedy = random.choice(pool)
        tokens = tokens[torch.randint(0, len(tokens), (size["draft_sequences"],), device=device)]
    anchors = first + torch.randperm(tokens.shape[1] - BLOCK - first, device=device)[: size["blocks"]]
    with torch.no_grad(), mixed_precision(device):
        hidden, taps = target(tokens, DRAFTER["dflash_config"]["target_layer_ids"])
        probabilities = target.logits(hidden).float().softmax(-1)
    return tokens, taps, anchors, probabilities, greedy


def train_drafter(run: Run, target: nano.Target, pool: list, size: dict, streams: dict[str, Tensor], device: str) -> nano.Drafter:
    """Cross-entropy with the token that follows in greedy texts, with the target's whole distribution elsewhere. Early rows weigh
    more: a draft is worth nothing after its first miss."""
    drafter = nano.Drafter(DRAFTER).to(device)
    peak = 2e-3
    optimizer = optimizer_for(drafter, peak, 0.05)
    begin = run.elapsed()
    budget = max(run.seconds * END_SHARE - begin, 0.05 * run.seconds)
    steps, saved, accepted = 0, run.elapsed(), None
    while (fraction := (run.elapsed() - begin) / budget) < 1:
        # Shorter blocks now and then: a runtime may ask for fewer tokens.
        horizon = BLOCK - 1 if random.random() < 0.75 else random.randint(1, BLOCK - 2)
        ahead = torch.arange(1, horizon + 1, device=device)
        weights = torch.exp(-(ahead - 1) / 7.0)
        tokens, taps, anchors, probabilities, greedy = draft_batch(target, pool, size, streams, device)
        places = anchors[:, None] + ahead  # [N, horizon]
        wanted = tokens[:, places]
        with mixed_precision(device):
            logits = drafter(target, tokens[:, anchors], anchors, taps, horizon)
        logits = logits.float()
        labels = wanted.flatten() if greedy else probabilities[:, places - 1].flatten(0, 2)
        losses = F.cross_entropy(logits.flatten(0, 2), labels, reduction="none").view(wanted.shape)
        rate = peak * min(1.0, fraction / 0.02 + 0.01) * (0.5 + 0.5 * math.cos(math.pi * fraction))
        descend(optimizer, drafter, (losses * weights).sum(-1).mean() / weights.sum(), rate)
        steps += 1
        if greedy and horizon == BLOCK - 1:
            hits = (logits.argmax(-1) == wanted).float()
            accepted = hits.cumprod(-1).sum(-1).mean()
        if run.due():
            shown = "-" if accepted is None else f"{accepted.item():.2f}"
            run.say(f"drafter: step {steps}, loss {losses.mean().item():.3f}, accepted on greedy texts {shown}")
        if run.elapsed() - saved > 60:
            nano.save(drafter, run.out / "drafter")
            saved = run.elapsed()
    run.note(drafter_steps=steps)
    drafter.load_state_dict({k: v.bfloat16().float() for k, v in drafter.state_dict().items()})
    return drafter.eval().requires_grad_(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="wall-clock time of the whole run")
    parser.add_argument("--smoke", action="store_true", help="tiny batches and 0.7 minutes (unless --minutes is given)")
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

    texts = {split: corpus.load(split) for split in ("train", "draft", "heldout")}
    for split, files in texts.items():
        run.say(f"{split}: {len(files)} files, {sum(map(len, files.values())) / 1e6:.2f}M characters")
    tokenizer = train_tokenizer(list(texts["train"].values()))
    save_tokenizer(tokenizer, args.out / "target")
    streams = {split: encode(tokenizer, list(files.values()), device) for split, files in texts.items()}
    run.say(f"{len(streams['train']) / 1e6:.2f}M training tokens")
    run.note(torch=torch.__version__, device=device, minutes=args.minutes, train_tokens=len(streams["train"]))
    held_out = prompts.extract(tokenizer, texts["heldout"], size["prompts"])

    target = train_target(run, size, streams, device)
    nano.save(target, args.out / "target")
    for text in held_out[:3]:
        start = torch.tensor([tokenizer.encode(text["text"]).ids], device=device)
        run.say(f"greedy sample: {tokenizer.decode(generate(target, start, start.shape[1] + 32, 0.0)[0].tolist())!r}")
    pool = write_pool(run, target, size, streams, device)
    drafter = train_drafter(run, target, pool, size, streams, device)
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
