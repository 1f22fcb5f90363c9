# SPDX-License-Identifier: Apache-2.0
"""Structured output on trees. The scheduler's side of vLLM keeps one grammar state per
request and gets draft tokens as a list; here it gets the tree as well, and every node's
row of the bitmask is the grammar's state after the node's own ancestors.

What the grammar forbids has no probability at its parent, so no walk enters it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.utils import strip_speculative_padding
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_ddtree import compat

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_ddtree.trees import TreeBatch

# Backends whose grammars take tokens and give them back in any number, and so can follow a
# tree. vLLM itself refuses lm-format-enforcer with any speculation.
TREE_BACKENDS = ("xgrammar", "guidance", "outlines")

# A node is one number to the scheduler, which only counts them: its depth above its
# token. Nodes come in depth-first preorder, so depths say whose child each of them is.
DEPTH_SHIFT = 32
TOKEN_MASK = (1 << DEPTH_SHIFT) - 1
# Depth 0, the root's, which is not a draft.
IDLE = 0


def needs_chain(params: "StructuredOutputsParams | None") -> bool:
    """Whether a request's grammar can only be advanced along one path."""
    return (
        params is not None
        and not params.all_constraints_none()
        and params._backend not in TREE_BACKENDS
    )


class TreeDraftTokens(DraftTokensHandler):
    """Copies drafts to the scheduler as nodes; to a batch without grammars it adds nothing."""

    def __init__(self, device: torch.device, trees: "TreeBatch") -> None:
        super().__init__(device)
        self._trees = trees
        self._nodes = torch.arange(1, trees.shape.max_nodes, device=device)

    def set_draft_tokens(self, input_batch: "InputBatch", draft_tokens: torch.Tensor) -> None:
        if input_batch.has_structured_output_reqs:
            trees, slots = self._trees, input_batch.idx_mapping
            nodes = self._nodes[: draft_tokens.shape[1]]
            depths = trees.depths[slots, 1 : len(nodes) + 1].to(torch.int64)
            packed = (depths << DEPTH_SHIFT) | draft_tokens
            is_node = nodes < trees.num_nodes[slots, None]
            draft_tokens = packed.masked_fill_(~is_node, IDLE)
        super().set_draft_tokens(input_batch, draft_tokens)


class TreeStructuredOutputManager(StructuredOutputManager):
    """Takes drafts from TreeDraftTokens, or vLLM's placeholders (-1) where there are none."""

    def validate_tokens(self, request: "Request", spec_tokens: list[int]) -> list[int]:
        """All nodes: they are in the forward pass by now, or a smaller batch would find no
        CUDA graph."""
        if not request.use_structured_output:
            return spec_tokens
        return strip_speculative_padding(spec_tokens)

    def grammar_bitmask(
        self,
        requests: dict[str, "Request"],
        structured_output_request_ids: list[str],
        scheduled_spec_decode_tokens: dict[str, list[int]],
    ) -> Any:
        drafts = [scheduled_spec_decode_tokens.get(r) for r in structured_output_request_ids]
        if not any(drafts):
            return super().grammar_bitmask(
                requests, structured_output_request_ids, scheduled_spec_decode_tokens
            )
        stride = self.vllm_config.num_speculative_tokens + 1
        if self._grammar_bitmask is None:
            assert self.backend is not None
            self._grammar_bitmask = self.backend.allocate_token_bitmask(
                self.vllm_config.scheduler_config.max_num_seqs * stride
            )
        end = 0
        for req_id, nodes in zip(structured_output_request_ids, drafts, strict=True):
            first, nodes = end, nodes or ()
            fill_rows(self, requests[req_id], nodes, first)
            # The worker takes rows without gaps in 0.32, and a fixed number of each request's in 0.33.
            end += len(nodes) + 1 if compat.is_0_32() else stride
        return self._grammar_bitmask[:end].numpy()


class _Node(NamedTuple):
    row: int
    # Tokens that the grammar has taken, up to and with this node's.
    taken: int
    # Whether reasoning is over, so that the grammar decides what may follow.
    constrained: bool
    # Forbidden, or below a node that is.
    refused: bool


class _ReasoningGate:
    """What vLLM's test for the end of reasoning reads of a request, with a path of nodes
    behind its tokens. It sees one more token at a time, as without speculation."""

    def __init__(self, manager: StructuredOutputManager, request: "Request") -> None:
        self._manager = manager
        self.structured_output_request = request.structured_output_request
        self.prompt_token_ids = request.prompt_token_ids
        self.all_token_ids = request.all_token_ids.copy()
        self._committed = len(self.all_token_ids)

    def enter(self, depth: int, token: int) -> tuple[bool, bool]:
        """Whether the grammar takes the token, and whether it decides what follows."""
        del self.all_token_ids[self._committed + depth - 1 :]
        self.all_token_ids.append(token)
        grammar_start, constraint_start = self._manager._get_constraint_bounds(
            self, [token], spec_tokens_committed=True
        )
        return grammar_start == 0, constraint_start <= 1


def fill_rows(
    manager: StructuredOutputManager, request: "Request", nodes: Sequence[int], first_row: int
) -> None:
    """Fill the request's rows of the manager's bitmask, the root's and one per node, and leave
    the grammar as it was.

    Rows that no walk reaches repeat the row of their last allowed ancestor, or, of idle nodes
    and placeholders, allow everything; vLLM does the same in a chain."""
    bitmask = manager._grammar_bitmask
    rows = bitmask.numpy().view(np.uint32)
    grammar = request.structured_output_request.grammar
    # 0.33 also masks what would end reasoning and the grammar cannot start with.
    may_mask_ends = not compat.is_0_32()
    gate: _ReasoningGate | None = None
    masked_ends: tuple[int, ...] = ()

    def fill(row: int, constrained: bool) -> None:
        entry = (grammar, row, constrained)
        if may_mask_ends:
            entry += (() if constrained else masked_ends,)
        manager._fill_bitmasks((entry,))

    _, constraint_start = manager._get_constraint_bounds(request, ())
    constrained = constraint_start == 0
    if may_mask_ends and not constrained:
        masked_ends = manager._masked_reasoning_ends(request)
    fill(first_row, constrained)
    path, taken = [_Node(first_row, 0, constrained, False)], 0
    for row, node in enumerate(nodes, first_row + 1):
        depth, token = node >> DEPTH_SHIFT, node & TOKEN_MASK
        if depth < 1:
            bitmask[row : first_row + len(nodes) + 1].fill_(-1)
            break
        del path[depth:]
        parent = path[-1]
        grammar_rolls = taken - parent.taken
        if grammar_rolls:
            grammar.rollback(grammar_rolls)
            taken = parent.taken
        takes, constrained = parent.constrained, parent.constrained
        refused = parent.refused or not (rows[parent.row, token >> 5] >> (token & 31)) & 1
        if not refused:
            if not constrained:
                gate = gate or _ReasoningGate(manager, request)
                takes, constrained = gate.enter(depth, token)
            # Behind its end a grammar allows everything, and takes nothing.
            if takes and not grammar.is_terminated():
                refused = not grammar.accept_tokens(request.request_id, [token])
                taken += not refused
        if refused:
            rows[row] = rows[parent.row]
        else:
            fill(row, constrained)
        path.append(_Node(row, taken, constrained, refused))
    if taken:
        grammar.rollback(taken)
