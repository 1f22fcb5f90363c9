# SPDX-License-Identifier: Apache-2.0
"""Per-request tree limits, kept on the device by request slot."""

import torch
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_ddtree import grammar

logger = init_logger(__name__)

# A request's own limits: `extra_args` (`vllm_xargs` in the OpenAI API).
BUDGET_ARG = "ddtree_budget"
SHAPE_ARG = "ddtree_shape"
MAX_STOP_TOKENS = 16


class RequestParams:
    """node_budgets, candidate_caps int32 [slots]; stop_tokens int32 [slots,
    MAX_STOP_TOKENS], -1 padded; min_stop_positions int64 [slots]: a stop token
    at a smaller position cannot be sampled yet (min_tokens)."""

    def __init__(
        self,
        max_num_reqs: int,
        tree_budget: int,
        horizon: int,
        device: torch.device,
    ) -> None:
        self.tree_budget = tree_budget
        self.horizon = horizon
        self.node_budgets = torch.full(
            (max_num_reqs,), tree_budget, dtype=torch.int32, device=device
        )
        self.candidate_caps = torch.zeros(
            max_num_reqs, dtype=torch.int32, device=device
        )
        self.stop_tokens = torch.full(
            (max_num_reqs, MAX_STOP_TOKENS), -1, dtype=torch.int32, device=device
        )
        self.min_stop_positions = torch.zeros(
            max_num_reqs, dtype=torch.int64, device=device
        )

    def add_request(
        self,
        slot: int,
        params: SamplingParams | None,
        prompt_len: int,
        warn: bool = True,
    ) -> None:
        budget, chain, stops, min_stop_position = self.tree_budget, False, [], 0
        if params is not None:
            budget = self._requested_budget(params)
            cannot_fork = grammar.needs_chain(params.structured_outputs)
            if cannot_fork and warn:
                logger.warning_once(
                    "Grammars of the %s backend cannot follow a tree: such requests are "
                    "verified as an exact chain; xgrammar's can.",
                    params.structured_outputs._backend,
                )
            chain = cannot_fork or self._wants_chain(params)
            # What ends the request: ignore_eos ignores the end of text alone.
            stops = {*(params.stop_token_ids or ()), params.eos_token_id} - {None}
            stops = sorted(stops)[:MAX_STOP_TOKENS]
            # Output token i (from 0) has position prompt_len + i; stop tokens
            # are masked while fewer than min_tokens tokens precede them.
            min_stop_position = prompt_len + params.min_tokens
        self.node_budgets[slot].fill_(min(budget, self.horizon) if chain else budget)
        self.candidate_caps[slot].fill_(1 if chain else 0)
        row = stops + [-1] * (MAX_STOP_TOKENS - len(stops))
        async_tensor_h2d(row, out=self.stop_tokens[slot])
        self.min_stop_positions[slot].fill_(min_stop_position)

    def force_chain(self, slot: int) -> None:
        """After `add_request`: what the request needs is known for chains alone."""
        self.node_budgets[slot].clamp_(max=self.horizon)
        self.candidate_caps[slot].fill_(1)

    def _wants_chain(self, params: SamplingParams) -> bool:
        shape = (params.extra_args or {}).get(SHAPE_ARG, "tree")
        if shape not in ("tree", "chain"):
            logger.warning("%s=%r is not tree or chain: using tree.", SHAPE_ARG, shape)
        return shape == "chain"

    def _requested_budget(self, params: SamplingParams) -> int:
        requested = (params.extra_args or {}).get(BUDGET_ARG)
        if requested is None:
            return self.tree_budget
        try:
            # Whatever a client can put into JSON, 1e400 and true included.
            budget = int(str(requested))
        except ValueError:
            budget = -1
        if not 0 <= budget <= self.tree_budget:
            logger.warning(
                "%s=%r is not a budget between 0 and the server's %d: using %d.",
                BUDGET_ARG,
                requested,
                self.tree_budget,
                self.tree_budget,
            )
            return self.tree_budget
        return budget
