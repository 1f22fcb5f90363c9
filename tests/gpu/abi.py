# SPDX-License-Identifier: Apache-2.0
"""The C ABI for tests and benchmarks: contexts, trees and calls, on the CPU or a GPU."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm_ddtree.native import Library, library
from vllm_ddtree.trees import TreeBatch, TreeShape, describe

# A NaN in every float type, and no value that an integer output has by chance.
_POISON_BYTE = 0xFF


def lib() -> Library:
    return library()


@cache
def context(device: str | torch.device, portable: bool = False) -> Any:
    """A context; portable: only kernels that every architecture runs."""
    return lib().new_context(torch.device(device), portable)


def poisoned(shape: Any, dtype: torch.dtype, device: str | torch.device = "cuda") -> torch.Tensor:
    """A tensor whose every byte is 0xff."""
    out = torch.empty(shape, dtype=dtype, device=device)
    out.view(torch.uint8).fill_(_POISON_BYTE) if out.is_contiguous() else out.fill_(float("nan"))
    return out


def call(op: str, params: Any, device: str | torch.device, ctx: Any = None, check: bool = True) -> int:
    """Runs ddt_<op> on the device's current stream with a poisoned workspace; returns the status.

    The workspace lives until PyTorch's allocator sees no more use of it on that stream."""
    library_, device = lib(), torch.device(device)
    ctx = context(device.type) if ctx is None else ctx
    if device.type == "cuda" and op not in ("tree_mask", "tree_gather"):
        size = library_.ffi.new("size_t *")
        library_.check(getattr(library_.lib, f"ddt_{op}_workspace_size")(ctx, params, size))
        if size[0]:
            workspace = torch.full((size[0],), _POISON_BYTE, dtype=torch.uint8, device=device)
            params.workspace = library_.ffi.cast("void *", workspace.data_ptr())
            params.workspace_bytes = size[0]
    status = getattr(library_.lib, f"ddt_{op}")(ctx, params, library_.stream(device))
    if check:
        library_.check(status)
    return status


# ---- trees


def random_parents(rng: random.Random, num_nodes: int, max_depth: int, descend: float | None = None) -> list[int]:
    """Parents of any depth-first preorder tree: each node hangs from the path of the one before it.
    descend: probability of going deeper; 1 is a chain as long as max_depth allows."""
    parents, path = [-1], [0]
    descend = rng.uniform(0.2, 1.0) if descend is None else descend
    while len(parents) < num_nodes:
        deepest = min(len(path), max_depth)
        depth = deepest if rng.random() < descend else rng.randint(1, deepest)
        parents.append(path[depth - 1])
        path = [*path[:depth], len(parents) - 1]
    return parents


def tree_batch(
    parents: list[list[int]],
    max_nodes: int,
    max_depth: int,
    device: str | torch.device = "cuda",
    tokens: Callable[[int, int], int] = lambda request, node: node,
    root_position: Callable[[int], int] = lambda request: 10,
) -> TreeBatch:
    """Every field of ddt_tree, the obvious way. An empty list of parents is a padding request."""
    batch = TreeBatch.zeros(TreeShape(len(parents), max_nodes, max_depth), torch.device("cpu"))
    for name in ("tokens", "parents", "depths", "first_child", "next_sibling", "pop_ranks", "ancestors"):
        getattr(batch, name).fill_(-1)
    for r, tree in enumerate(parents):
        batch.num_nodes[r] = len(tree)
        children: dict[int, list[int]] = {}
        for i, parent in enumerate(tree):
            path = [i]
            while tree[path[-1]] >= 0:
                path.append(tree[path[-1]])
            path.reverse()
            batch.tokens[r, i] = tokens(r, i)
            batch.parents[r, i] = parent
            batch.depths[r, i] = len(path) - 1
            batch.pop_ranks[r, i] = i
            batch.positions[r, i] = root_position(r) + len(path) - 1
            batch.ancestors[r, i, : len(path)] = torch.tensor(path, dtype=torch.int32)
            for j in path:
                word = int(batch.ancestor_bits[r, i, j // 32]) & 0xFFFFFFFF | 1 << j % 32
                batch.ancestor_bits[r, i, j // 32] = word - (1 << 32) if word >> 31 else word
                batch.subtree_end[r, j] = i + 1
            children.setdefault(parent, []).append(i)
        for parent, nodes in children.items():
            if parent >= 0:
                batch.first_child[r, parent] = nodes[0]
            for node, sibling in zip(nodes, nodes[1:]):
                batch.next_sibling[r, node] = sibling
    return to_device(batch, device)


def to_device(batch: TreeBatch, device: str | torch.device) -> TreeBatch:
    return TreeBatch(batch.shape, batch.storage.to(device, copy=True))


def tree_struct(batch: TreeBatch, num_reqs: int | None = None) -> Any:
    """The ddt_tree of a batch; keep both alive until the stream has passed the call."""
    return describe(lib(), batch, num_reqs)


@dataclass(frozen=True)
class Rows:
    """Where the rows of each request are: query_start [R + 1]."""

    query_start: torch.Tensor
    total: int


def rows_of(counts: list[int], device: str | torch.device = "cuda") -> Rows:
    """counts: rows of each request, idle ones included."""
    start = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return Rows(start.to(device), int(start[-1]))


def i32_pointer(tensor: torch.Tensor | None) -> Any:
    return lib().pointer(tensor, "int32_t", torch.int32)


def i64_pointer(tensor: torch.Tensor | None) -> Any:
    return lib().pointer(tensor, "int64_t", torch.int64)


def f32_pointer(tensor: torch.Tensor | None) -> Any:
    return lib().pointer(tensor, "float", torch.float32)
