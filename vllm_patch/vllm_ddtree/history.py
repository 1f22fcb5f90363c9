# SPDX-License-Identifier: Apache-2.0
"""Logits processing that depends on the tokens before a row, on trees.

vLLM's processors take the rows of a request for a chain: the tokens before a row are
what was committed (to the root, included) and the rows between the root's and it. On
a tree they are the row's ancestors. Arithmetic stays vLLM's: its kernels run with
other arguments, so that a row gets the bits that decoding without drafts gives it.

Nothing here waits for the device or looks at single nodes on the host, and without a
request that needs it nothing is launched."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState, apply_bad_words
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState, apply_penalties
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_ddtree.request_params import RequestParams
from vllm_ddtree.step import VerifyStep

logger = init_logger(__name__)

# What vLLM sets the logit of a forced token to.
FORCED_LOGIT = 1.0e9


class Paths:
    """The drafted tokens that lead to each row of a verification, the row's own
    included and the root's not: vLLM counts the root's as committed."""

    def __init__(self, step: VerifyStep, input_ids: torch.Tensor) -> None:
        """input_ids [num_logits], of all rows of the batch."""
        self._step = step
        self._input_ids = input_ids

    @cached_property
    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens int64 [num_logits, D], repeating the row's own behind its end; lengths
        int64 [num_logits]. Idle rows have any, of tokens that exist."""
        step, input_ids = self._step, self._input_ids
        requests, nodes = step.nodes()
        below_root = step.trees.ancestors[requests, nodes][:, 1:]
        on_path, nodes = below_root >= 0, nodes[:, None]
        first_rows = torch.arange(step.num_rows, device=input_ids.device)[:, None] - nodes
        rows = first_rows + torch.where(on_path, below_root, nodes)
        tokens = input_ids[rows.clamp(max=step.num_rows - 1)].to(torch.int64)
        lengths = on_path.sum(-1)
        # Requests without drafts have one row each.
        rest = len(input_ids) - step.num_rows
        if rest:
            tokens = torch.nn.functional.pad(tokens, (0, 0, 0, rest))
            lengths = torch.nn.functional.pad(lengths, (0, rest))
        return tokens, lengths

    def of(self, rows: slice) -> "RowPaths":
        return RowPaths(self, rows)


@dataclass(frozen=True)
class RowPaths:
    """Paths of the rows that are sampled together."""

    paths: Paths
    rows: slice

    @property
    def tokens(self) -> torch.Tensor:
        return self.paths.whole[0][self.rows]

    @property
    def lengths(self) -> torch.Tensor:
        return self.paths.whole[1][self.rows]


class CurrentPaths:
    """The paths of the rows that vLLM's sampler is about to process: None where they
    are no trees', and each row is the only one of its request."""

    paths: RowPaths | None = None

    @contextmanager
    def being(self, paths: RowPaths) -> Iterator[None]:
        self.paths = paths
        try:
            yield
        finally:
            self.paths = None


class TreeProcessor(LogitsProcessor):
    """In the place of one of vLLM's processors, which it calls."""

    def __init__(self, inner: Any, current: CurrentPaths) -> None:
        self.inner = inner
        self.current = current

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return self.inner.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        self.inner.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        paths = self.current.paths
        if paths is None or not self._is_needed(ctx.idx_mapping_np):
            return self.inner.apply(logits, ctx)
        return self._apply(logits, ctx, paths)

    @abstractmethod
    def _is_needed(self, slots: np.ndarray) -> bool:
        """Whether a request in these slots has what depends on the tokens before a row."""

    @abstractmethod
    def _apply(self, logits: torch.Tensor, ctx: LogitsContext, paths: RowPaths) -> torch.Tensor:
        """Processed logits [rows, V], in place or not: each row by its path."""


class TreePenalties(TreeProcessor):
    """Penalises all rows for what is committed, and the tokens on a row's path again
    from their own logits, for what is committed and what is on the path."""

    inner: PenaltiesState

    def _is_needed(self, slots: np.ndarray) -> bool:
        return bool(self.inner.use_penalty[slots].any())

    def _apply(self, logits: torch.Tensor, ctx: LogitsContext, paths: RowPaths) -> torch.Tensor:
        inner, slots = self.inner, ctx.expanded_idx_mapping
        tokens, lengths = paths.tokens, paths.lengths[:, None]
        path_logits = logits.gather(1, tokens)
        no_drafts = torch.zeros_like(ctx.expanded_local_pos)
        inner.apply(logits, replace(ctx, expanded_local_pos=no_drafts))

        on_path = torch.arange(tokens.shape[1], device=tokens.device) < lengths
        same = (tokens[:, :, None] == tokens[:, None, :]) & on_path[:, None, :]
        counts = inner.output_bin_counts[slots[:, None], tokens]
        counts = counts + same.sum(-1, dtype=torch.int32)
        # vLLM's kernel over "vocabularies" of a row's path, each row a request. All
        # tokens on a path are output tokens there: no need to know the prompt's.
        apply_penalties(
            path_logits,
            torch.arange(len(slots), dtype=slots.dtype, device=slots.device),
            ctx.input_ids,
            no_drafts,
            inner.repetition_penalty.gpu[slots],
            inner.frequency_penalty.gpu[slots],
            inner.presence_penalty.gpu[slots],
            no_drafts[:, None],
            counts,
        )
        # Roots have no path. Elsewhere its end is repeated: to write it twice is the same.
        path_logits = torch.where(lengths > 0, path_logits, logits.gather(1, tokens))
        return logits.scatter_(1, tokens, path_logits)


class TreeBadWords(TreeProcessor):
    """vLLM's kernel with each row as a request, whose output is the row's last tokens."""

    inner: BadWordsState

    def __init__(self, inner: BadWordsState, current: CurrentPaths) -> None:
        super().__init__(inner, current)
        max_num_reqs = inner.req_states.max_num_reqs
        self._num_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        # Of the longest word, without its last token.
        self._prefix_lens = np.zeros(max_num_reqs, dtype=np.int64)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        lengths = [len(word) for word in sampling_params.bad_words_token_ids or ()]
        self._num_tokens[req_idx] = sum(lengths)
        self._prefix_lens[req_idx] = max(lengths, default=1) - 1
        return self.inner.add_request(req_idx, sampling_params)

    def _is_needed(self, slots: np.ndarray) -> bool:
        return bool(self._prefix_lens[slots].any())

    def _apply(self, logits: torch.Tensor, ctx: LogitsContext, paths: RowPaths) -> torch.Tensor:
        inner, states, slots = self.inner, self.inner.req_states, ctx.expanded_idx_mapping
        requests = ctx.idx_mapping_np
        num_words = int(inner.num_bad_words.np[requests].max())
        num_tokens = int(self._num_tokens[requests].max())
        window = int(self._prefix_lens[requests].max())

        total_lens = states.total_len.gpu[slots]
        output_lens = total_lens - states.prompt_len.gpu[slots] + paths.lengths
        seen = last_tokens(states, slots, total_lens, paths, window).to(torch.int32)
        apply_bad_words(
            logits,
            torch.arange(len(slots), dtype=slots.dtype, device=slots.device),
            inner.bad_word_token_ids.gpu[:, :num_tokens][slots],
            inner.bad_word_offsets.gpu[:, : num_words + 1][slots],
            inner.num_bad_words.gpu[slots],
            seen,
            # What is left of the prompt in the window is not looked at.
            (window - output_lens.clamp(max=window)).to(torch.int32),
            torch.full_like(total_lens, window),
            ctx.input_ids,
            torch.zeros_like(ctx.expanded_local_pos),
            num_words,
        )
        return logits


class TreeThinkingBudget(TreeProcessor):
    """vLLM's `ThinkingBudgetState`: where a path is about to think for longer than the
    budget, forces the next token of the end marker. The markers among committed tokens
    are vLLM's to find; here the path is searched, and what of a marker is before it."""

    def _is_needed(self, slots: np.ndarray) -> bool:
        return self.inner.enabled and bool(self.inner.use_thinking_budget[slots].any())

    @cached_property
    def _forced_prefixes(self) -> torch.Tensor:
        """[E - 1, E - 1] for the E tokens of the forced marker: row i is its first i + 1,
        to the right, behind -2."""
        forced = self.inner.reasoning_end_token_ids
        longest = len(forced) - 1
        prefixes = forced.new_full((longest, longest), -2)
        for i in range(longest):
            prefixes[i, longest - 1 - i :] = forced[: i + 1]
        return prefixes

    def _apply(self, logits: torch.Tensor, ctx: LogitsContext, paths: RowPaths) -> torch.Tensor:
        inner, states, slots = self.inner, self.inner.req_states, ctx.expanded_idx_mapping
        # Over no rows: it finds the markers among committed tokens all the same.
        inner.apply(
            logits[:0],
            replace(
                ctx,
                expanded_idx_mapping=slots[:0],
                expanded_local_pos=ctx.expanded_local_pos[:0],
            ),
        )
        start, end, forced = (
            inner.reasoning_start_token_ids,
            inner.natural_reasoning_end_token_ids,
            inner.reasoning_end_token_ids,
        )
        tail = max(len(start), len(end), len(forced)) - 1
        total_lens, lengths = states.total_len.gpu[slots], paths.lengths
        # No path yet: what is committed, to the root.
        committed = last_tokens(states, slots, total_lens, None, tail)
        tokens = torch.cat([committed, paths.tokens], dim=1)
        # Token j of these has position first + j, and the row has `seen` of them.
        first, seen = total_lens - tail, tail + lengths

        def last_position(marker: torch.Tensor) -> torch.Tensor:
            found = (tokens.unfold(1, len(marker), 1) == marker).all(-1)
            columns = torch.arange(found.shape[1], device=tokens.device)
            found &= columns + len(marker) <= seen[:, None]
            return torch.where(found, first[:, None] + columns, -1).amax(-1)

        last_start = torch.maximum(inner.cached_last_start[slots], last_position(start))
        last_end = torch.maximum(inner.cached_last_end[slots], last_position(end))
        budgets = inner.thinking_token_budget.gpu[slots]
        num_thought = total_lens + lengths - (last_start + len(start))
        exhausted = (budgets >= 0) & (last_start > last_end) & (num_thought >= budgets)

        next_token = forced[:1].to(torch.int64).expand(len(slots))
        longest = len(forced) - 1
        if longest:
            prefixes = self._forced_prefixes
            columns = torch.arange(-longest, 0, device=tokens.device) + seen[:, None]
            ending = tokens.gather(1, columns)[:, None]
            is_begun = ((ending == prefixes) | (prefixes == -2)).all(-1)
            lengths_begun = torch.arange(1, longest + 1, device=tokens.device) * is_begun
            next_token = forced[lengths_begun.amax(-1)].to(torch.int64)
        next_token = next_token[:, None]
        forced_logits = logits.gather(1, next_token).masked_fill_(exhausted[:, None], FORCED_LOGIT)
        return logits.scatter_(1, next_token, forced_logits)


def last_tokens(
    states: Any,
    slots: torch.Tensor,
    total_lens: torch.Tensor,
    paths: RowPaths | None,
    count: int,
) -> torch.Tensor:
    """[rows, count] last tokens of each row, committed or on its path, prompts included;
    -1 where there are none. total_lens [rows] committed tokens."""
    after_root = torch.arange(-count, 0, device=slots.device).expand(len(slots), -1)
    if paths is not None:
        after_root = after_root + paths.lengths[:, None]
    positions = total_lens[:, None] + after_root
    committed = states.all_token_ids.gpu[slots[:, None], positions.clamp(min=0)]
    committed = committed.masked_fill(positions < 0, -1)
    if paths is None or count == 0:
        return committed
    drafted = paths.tokens.gather(1, after_root.clamp(min=0))
    return torch.where(after_root >= 0, drafted, committed)


@dataclass(frozen=True)
class TreeLogitsContext(LogitsContext):
    """What a custom processor with `supports_trees = True` gets for rows of trees."""

    # int64 [num_logits_rows, D]: the drafted tokens that lead to a row, the row's own
    # last, and repeated behind it. They follow the committed tokens.
    path_tokens: torch.Tensor
    # int64 [num_logits_rows]: how many.
    path_lens: torch.Tensor


class CustomProcessor(TreeProcessor):
    """Somebody else's processor. It may read rows as a chain: unless its class says
    `supports_trees = True`, requests that it changes are chains."""

    def __init__(
        self, inner: LogitsProcessor, current: CurrentPaths, request_params: RequestParams
    ) -> None:
        super().__init__(inner, current)
        self.request_params = request_params
        self.supports_trees = bool(getattr(inner, "supports_trees", False))
        if not self.supports_trees:
            logger.warning_once(
                "Logits processor %s does not say that it supports trees: requests that it "
                "changes are verified as an exact chain; if it needs no other row than "
                "its own, or reads LogitsContext.path_tokens, set supports_trees = True "
                "in its class.",
                type(inner).__qualname__,
            )

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        is_needed = self.inner.add_request(req_idx, sampling_params)
        if is_needed and not self.supports_trees:
            self.request_params.force_chain(req_idx)
        return is_needed

    def _is_needed(self, slots: np.ndarray) -> bool:
        return self.supports_trees

    def _apply(self, logits: torch.Tensor, ctx: LogitsContext, paths: RowPaths) -> torch.Tensor:
        chain = {field.name: getattr(ctx, field.name) for field in fields(LogitsContext)}
        tree_ctx = TreeLogitsContext(**chain, path_tokens=paths.tokens, path_lens=paths.lengths)
        return self.inner.apply(logits, tree_ctx)


def process_along_paths(sampler: Sampler, request_params: RequestParams) -> CurrentPaths:
    """Make the sampler process each row by its path, whenever there is one."""
    current = CurrentPaths()

    def on_trees(processor: LogitsProcessor) -> LogitsProcessor:
        match processor:
            case LogitBiasState():
                # By position alone.
                return processor
            case PenaltiesState():
                return TreePenalties(processor, current)
            case BadWordsState():
                return TreeBadWords(processor, current)
        return CustomProcessor(processor, current, request_params)

    sampler.logits_processors = [on_trees(p) for p in sampler.logits_processors]
    sampler.thinking_budget_state = TreeThinkingBudget(sampler.thinking_budget_state, current)
    return current
