# SPDX-License-Identifier: Apache-2.0
"""A batch of draft trees in one int32 buffer, in the data model of ddtree.h."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_ddtree.native import Library, library

_PER_REQUEST = ("num_nodes", "flags")
_PER_NODE = (
    "tokens",
    "parents",
    "depths",
    "first_child",
    "next_sibling",
    "subtree_end",
    "pop_ranks",
)


@dataclass(frozen=True)
class TreeShape:
    """Capacity of a batch: requests R, nodes per tree N (root counted), depth D."""

    num_reqs: int
    max_nodes: int
    max_depth: int

    @property
    def words(self) -> int:
        """Ancestor words per node, W = ceil(N / 32)."""
        return (self.max_nodes + 31) // 32

    def field_sizes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every field in int32 words; `positions` is int64."""
        r, n = self.num_reqs, self.max_nodes
        return {
            # First, so that 64-bit alignment needs no padding.
            "positions": (r, n, 2),
            **{name: (r,) for name in _PER_REQUEST},
            **{name: (r, n) for name in _PER_NODE},
            "ancestor_bits": (r, n, self.words),
            "ancestors": (r, n, self.max_depth + 1),
        }


class TreeBatch:
    """Topology of R trees at fixed addresses. Fields are views of `storage`:
    num_nodes, flags [R]; tokens, parents, depths, first_child, next_sibling,
    subtree_end, pop_ranks [R, N]; positions int64 [R, N];
    ancestor_bits [R, N, W]; ancestors [R, N, D + 1]. All but positions int32."""

    def __init__(self, shape: TreeShape, storage: torch.Tensor) -> None:
        self.shape = shape
        self.storage = storage
        self._tree: Any = None
        offset = 0
        for name, size in shape.field_sizes().items():
            count = 1
            for extent in size:
                count *= extent
            view = storage[offset : offset + count].view(size)
            if name == "positions":
                view = view.view(torch.int64).squeeze(-1)
            setattr(self, name, view)
            offset += count

    num_nodes: torch.Tensor
    flags: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    first_child: torch.Tensor
    next_sibling: torch.Tensor
    subtree_end: torch.Tensor
    pop_ranks: torch.Tensor
    positions: torch.Tensor
    ancestor_bits: torch.Tensor
    ancestors: torch.Tensor

    @classmethod
    def zeros(cls, shape: TreeShape, device: torch.device) -> "TreeBatch":
        """Padding requests only: every num_nodes is 0."""
        words = 0
        for size in shape.field_sizes().values():
            count = 1
            for extent in size:
                count *= extent
            words += count
        return cls(shape, torch.zeros(words, dtype=torch.int32, device=device))

    def fields(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.shape.field_sizes()]

    def described(self, num_reqs: int | None = None) -> Any:
        """The ddt_tree of the first `num_reqs` requests, until the next call. It lives
        as long as this batch."""
        if self._tree is None:
            self._tree = describe(library(), self)
        self._tree.num_reqs = self.shape.num_reqs if num_reqs is None else num_reqs
        return self._tree


def describe(lib: Library, batch: TreeBatch, num_reqs: int | None = None) -> Any:
    """A ddt_tree of the first `num_reqs` of a batch's R requests."""
    shape = batch.shape
    tree = lib.params("ddt_tree")
    tree.num_reqs = shape.num_reqs if num_reqs is None else num_reqs
    tree.max_nodes = shape.max_nodes
    tree.max_depth = shape.max_depth
    for name in shape.field_sizes():
        field = getattr(batch, name)
        c_type = {"positions": "int64_t", "flags": "uint32_t"}.get(
            name, "uint32_t" if name == "ancestor_bits" else "int32_t"
        )
        setattr(tree, name, lib.ffi.cast(f"{c_type} *", field.data_ptr()))
    return tree
