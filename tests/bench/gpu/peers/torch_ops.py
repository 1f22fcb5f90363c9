# SPDX-License-Identifier: Apache-2.0
"""What one would write in PyTorch."""

import torch

from . import torch_name

ARGMAX = torch_name("argmax")
TOPK = torch_name("topk(64) + logsumexp")


class Argmax:
    """The largest logit of each row."""

    def __init__(self, logits: torch.Tensor):
        self.logits = logits
        self.out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)

    def __call__(self) -> None:
        torch.argmax(self.logits, dim=-1, out=self.out)


class TopK:
    """The k most likely tokens of each row with their log-probabilities, as the published DDTree code computes them;
    its tree is then built by the CPU, which is not in here."""

    def __init__(self, logits: torch.Tensor, k: int):
        self.logits, self.k, self.out = logits, k, None

    def __call__(self) -> None:
        scores = self.logits.float()
        values, tokens = torch.topk(scores, self.k, dim=-1)
        self.out = values - torch.logsumexp(scores, dim=-1, keepdim=True), tokens


class NoisedTopK:
    """The same of logits / temperature + Gumbel noise. The noise is PyTorch's own, drawn for all tokens: keying it by
    seed, position and token, as ours is, would take more."""

    def __init__(self, logits: torch.Tensor, k: int, temperature: float):
        self.logits, self.k, self.temperature, self.out = logits, k, temperature, None

    def __call__(self) -> None:
        noise = torch.empty_like(self.logits, dtype=torch.float32).exponential_().log_()
        scores = self.logits.float() / self.temperature - noise
        values, tokens = torch.topk(scores, self.k, dim=-1)
        self.out = values - torch.logsumexp(scores, dim=-1, keepdim=True), tokens
