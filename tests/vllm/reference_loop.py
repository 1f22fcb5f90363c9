# SPDX-License-Identifier: Apache-2.0
"""DDTree decoding in plain PyTorch, independent of vLLM and of libddtree.

The trees are the paper's (arXiv 2604.12989, Algorithm 1: a heap over rank
tuples, log-probabilities in float64). Greedy verification follows the target's
own text while it stays in the tree, so plain decoding is the verifier: given
the text, what a round accepts depends on the drafter alone."""

import heapq
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import nano  # noqa: E402


def tree_children(logits: torch.Tensor, budget: int) -> dict[tuple[int, ...], set[int]]:
    """The `budget` most probable token prefixes under independent positions.

    logits [depth, vocab]. Returns, for each prefix in the tree, the tokens that
    extend it within the tree."""
    top = logits.double().log_softmax(-1).topk(min(budget, logits.shape[-1]), dim=-1)
    scores, tokens = top.values.tolist(), top.indices.tolist()
    children: dict[tuple[int, ...], set[int]] = {}
    heap = [(-scores[0][0], (0,))]
    for _ in range(budget):
        if not heap:
            break
        cost, ranks = heapq.heappop(heap)
        prefix = tuple(tokens[d][r] for d, r in enumerate(ranks))
        children.setdefault(prefix[:-1], set()).add(prefix[-1])
        depth, rank = len(ranks), ranks[-1]
        if rank + 1 < len(scores[depth - 1]):
            sibling = cost + scores[depth - 1][rank] - scores[depth - 1][rank + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1)))
        if depth < len(scores):
            heapq.heappush(heap, (cost - scores[depth][0], (*ranks, 0)))
    return children


class ReferenceLoop:
    def __init__(self, target: Path, drafter: Path) -> None:
        self.target = nano.load(nano.Target, target)
        self.drafter = nano.load(nano.Drafter, drafter)

    @torch.no_grad()
    def _drafts(self, prompt: list[int], text: list[int], horizon: int) -> torch.Tensor:
        """The drafter's logits [len(text), horizon, vocab], anchored at each token
        of the text with everything before it as context."""
        tokens = torch.tensor([prompt + text])
        _, taps = self.target(tokens, self.drafter.layer_ids)
        positions = torch.arange(len(prompt), tokens.shape[1])
        return self.drafter(
            self.target, tokens[:, len(prompt) :], positions, taps, horizon
        )[0]

    def rounds(
        self, prompt: list[int], text: list[int], count: int, budget: int | None, horizon: int
    ) -> list[int]:
        """Tokens accepted in each round until `count` tokens exist; `text` is the
        target's greedy text, at least horizon + 1 tokens longer than `count`.
        budget None drafts the chain of the drafter's best tokens."""
        assert len(text) >= count + horizon + 1
        drafts = self._drafts(prompt, text, horizon)
        accepted = []
        done = 1
        while done < count:
            logits = drafts[done - 1]
            if budget is None:
                best = logits.argmax(-1).tolist()
                children = {tuple(best[:d]): {best[d]} for d in range(horizon)}
            else:
                children = tree_children(logits, budget)
            path: tuple[int, ...] = ()
            while text[done + len(path)] in children.get(path, ()):
                path = (*path, text[done + len(path)])
            accepted.append(len(path))
            done += len(path) + 1
        return accepted
