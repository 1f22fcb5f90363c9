# SPDX-License-Identifier: Apache-2.0
"""Trees by Python's heapq, in float64, with nothing of the library: plain Python, and NumPy for what is long."""

import heapq
import math

import numpy


def tree(best: list[list[int]], scores: list[list[float]], budget: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the `budget` most probable prefixes, from the best tokens of each depth and their
    log-probabilities."""
    tokens, parents = [0], [-1]
    heap = [(-scores[0][0], 0, 0, 0)]
    while heap and len(tokens) <= budget:
        cost, parent, depth, rank = heapq.heappop(heap)
        node, row = len(tokens), scores[depth]
        tokens.append(best[depth][rank])
        parents.append(parent)
        if rank + 1 < len(row):
            heapq.heappush(heap, (cost + row[rank] - row[rank + 1], parent, depth, rank + 1))
        if depth + 1 < len(scores):
            heapq.heappush(heap, (cost - scores[depth + 1][0], node, depth + 1, 0))
    return tokens, parents


def plain(rows: list[list[float]], budget: int) -> tuple[list[int], list[int]]:
    best, scores = [], []
    for row in rows[:budget]:
        largest = max(row)
        normaliser = largest + math.log(sum(math.exp(x - largest) for x in row))
        best.append(heapq.nlargest(budget, range(len(row)), key=row.__getitem__))
        scores.append([row[token] - normaliser for token in best[-1]])
    return tree(best, scores, budget)


def with_numpy(logits: numpy.ndarray, budget: int) -> tuple[list[int], list[int]]:
    """What a round in Python would do. `logits` [L, V] float32."""
    logits = logits[:budget]
    largest = logits.max(-1, keepdims=True)
    sums = numpy.exp(logits - largest).sum(-1, keepdims=True, dtype=numpy.float64)
    width = min(budget, logits.shape[1])
    best = numpy.argpartition(logits, -width)[:, -width:]
    values = numpy.take_along_axis(logits, best, -1).astype(numpy.float64)
    order = numpy.argsort(-values)
    scores = numpy.take_along_axis(values, order, -1) - largest - numpy.log(sums)
    return tree(numpy.take_along_axis(best, order, -1).tolist(), scores.tolist(), budget)
