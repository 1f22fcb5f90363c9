# SPDX-License-Identifier: Apache-2.0
"""Two kernels of sglang-kernel 0.4.4, which is built for torch 2.11: the one that lays out EAGLE's tree and the one
that walks it."""

import functools

import torch

from . import folder, torch_name

VERSION = "0.4.4"
LIBRARY = "sgl_kernel/sm90/common_ops.abi3.so"
ACCEPT = f"sglang-kernel-{VERSION} verify_tree_greedy"
ARGMAX_ACCEPT = f"{torch_name('argmax')} + {ACCEPT}"
MASK = f"sglang-kernel-{VERSION} build_tree_kernel_efficient"


@functools.cache
def _ops():
    torch.ops.load_library(str(folder() / f"sglang-kernel-{VERSION}" / LIBRARY))
    return torch.ops.sgl_kernel


def available() -> str | None:
    """Why these kernels cannot run here, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return "only the library for sm_90 was taken"
    if not torch.__version__.startswith("2.11."):
        return f"built for torch 2.11, this is {torch.__version__}"
    try:
        _ops().verify_tree_greedy.default  # noqa: B018
    except Exception as error:  # whatever the peer's import runs into
        return f"sglang-kernel does not load: {error!r}"
    return None


class Accept:
    """The walk of each tree along the largest logits; `fields` as timing.tree_fields makes them, all trees full.

    With logits [R * N, V] a call starts with the argmax that the walk needs; with choices [R * N] i64 it is the walk.
    """

    def __init__(self, fields: dict[str, torch.Tensor], logits=None, choices=None):
        requests, nodes = fields["tokens"].shape
        device = fields["tokens"].device
        self.logits = logits
        self.choices = (
            choices
            if logits is None
            else torch.empty(requests * nodes, dtype=torch.int64, device=device)
        )
        self.candidates, self.first_child, self.next_sibling = (
            fields[name].long().contiguous() for name in ("tokens", "first_child", "next_sibling")
        )
        self.index = torch.arange(requests * nodes, device=device).view(requests, nodes)
        steps = fields["ancestors"].shape[2]
        self.tokens = torch.full((requests * nodes,), -1, dtype=torch.int32, device=device)
        self.accepted = torch.full((requests, steps), -1, dtype=torch.int32, device=device)
        self.num_accepted = torch.zeros(requests, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        if self.logits is not None:
            torch.argmax(self.logits, dim=-1, out=self.choices)
        _ops().verify_tree_greedy.default(
            self.tokens, self.accepted, self.num_accepted, self.candidates, self.index, self.first_child,
            self.next_sibling, self.choices.view_as(self.candidates),
        )  # fmt: skip


class Mask:
    """Links, positions and a boolean mask among the nodes, from the trees' parents in EAGLE's encoding.

    There a candidate is `slot * topk + rank` for the child of that rank of the node in that slot, slot 0 is the root,
    and parent_list has the candidate of the node in each slot. Links that the kernel leaves alone must be -1 before:
    the fills are part of a call.
    """

    def __init__(self, fields: dict[str, torch.Tensor]):
        requests, nodes = fields["parents"].shape
        device = fields["parents"].device
        parents = fields["parents"].tolist()
        self.topk = max(row.count(parent) for row in parents for parent in row if parent >= 0)
        selected = torch.zeros(requests, nodes - 1, dtype=torch.int64)
        slots = max(len(set(row) - {-1}) for row in parents)
        self.depth = -(-max(slots - 1, 1) // self.topk) + 1
        parent_list = torch.full(
            (requests, self.topk * (self.depth - 1) + 1), -1, dtype=torch.int64
        )
        for r, row in enumerate(parents):
            slot_of, children = {0: 0}, [0] * nodes
            for node, parent in enumerate(row[1:], 1):
                if parent not in slot_of:
                    slot_of[parent] = len(slot_of)
                    parent_list[r, slot_of[parent]] = selected[r, parent - 1]
                selected[r, node - 1] = slot_of[parent] * self.topk + children[parent]
                children[parent] += 1
        self.selected, self.parent_list = selected.to(device), parent_list.to(device)
        self.lengths = fields["positions"][:, 0].contiguous()
        self.mask = torch.empty(requests * nodes * nodes, dtype=torch.bool, device=device)
        self.positions = torch.empty(requests * nodes, dtype=torch.int64, device=device)
        self.links = torch.empty(3, requests, nodes, dtype=torch.int64, device=device)
        self.nodes = nodes

    def __call__(self) -> None:
        self.links.fill_(-1)
        self.mask.fill_(True)
        _ops().build_tree_kernel_efficient.default(
            self.parent_list, self.selected, self.lengths, self.mask, self.positions, *self.links, self.topk, self.depth,
            self.nodes, 1,
        )  # fmt: skip
