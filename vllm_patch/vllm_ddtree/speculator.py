# SPDX-License-Identifier: Apache-2.0
"""DFlash's drafters, asked for a tree instead of a chain: per-position distributions, or
the scores of all pairs of neighbouring candidates that a DFlash2 or LiLiCorr drafter
gives, become a best-first tree inside the draft step."""

import copy
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator

from vllm_ddtree import graphs, registration
from vllm_ddtree.config import drafter_graph_batches, max_tree_rows
from vllm_ddtree.trees import TreeBatch


class DDTreeSpeculator(DFlashSpeculator):
    """`num_speculative_tokens` is the tree budget everywhere in vLLM; only the
    drafter sees its own horizon."""

    _speculator_name = "DDTree"

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        registration.register(device)
        speculative_config = vllm_config.speculative_config
        self.tree_budget: int = speculative_config.tree_budget
        self._is_coupled = speculative_config.verify_mode == "coupled"
        self._is_conditional = speculative_config.tree_scores == "conditional"
        self._max_tree_rows = max_tree_rows(vllm_config)
        draft_config = copy.copy(vllm_config)
        # Not dataclasses.replace: it would validate and convert once more.
        draft_config.speculative_config = copy.copy(speculative_config)
        draft_config.speculative_config.num_speculative_tokens = (
            speculative_config.tree_horizon
        )
        # Its own depth, whatever the number of nodes.
        draft_config.speculative_config.num_speculative_tokens_per_batch_size = None
        super().__init__(draft_config, device)
        self._trees: TreeBatch | None = None
        # Nodes that this round's trees may have, set before the draft step's graph runs.
        self._round_budget = torch.full(
            (1,), self.tree_budget, dtype=torch.int32, device=device
        )
        # Cap of the slots that get trees: -1, none, in dummy runs, whose slots are others'.
        self._last_slot = torch.full(
            (1,), self.max_num_reqs - 1, dtype=torch.int64, device=device
        )
        self._round = self.tree_budget, False
        self._drafts = torch.zeros(
            self.max_num_reqs, self.tree_budget, dtype=torch.int64, device=device
        )
        self._spine_depths: torch.Tensor | None = None
        if speculative_config.tree_spine:
            depth = self.num_speculative_steps
            self._spine_depths = torch.full(
                (self.max_num_reqs,), depth, dtype=torch.int32, device=device
            )

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        return min(num_reqs * (self.tree_budget + 1), self._max_tree_rows)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        graphs.capture_batches(
            self.query_cudagraph_manager, drafter_graph_batches(self.vllm_config)
        )

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        hidden_states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        horizon = self.num_speculative_steps
        num_sample = num_reqs * horizon
        scores = self._tree_scores(
            hidden_states[self.sample_indices[:num_sample]].view(num_reqs, horizon, -1)
        )
        if self._trees is None:
            # Memory profiling runs before there is a model state.
            return
        params = self.model_state.request_params
        # The request's slot, -1 for padding of a graph, which writes no tree.
        sampled = self.sample_idx_mapping[:num_sample:horizon]
        tree_index = torch.minimum(sampled, self._last_slot)
        slots = tree_index.clamp(min=0)
        # The first query row of a request is its anchor, the tree's root.
        num_query = num_reqs * self.num_query_per_req
        anchors = slice(0, num_query, self.num_query_per_req)
        root_positions = self.input_buffers.positions[anchors].contiguous()
        temperatures = seeds = None
        if self._is_coupled:
            # vLLM keeps both for the drafter by slot, at fixed addresses.
            temperatures, seeds = self.temperature[slots], self.seeds[slots]
        spines = None if self._spine_depths is None else self._spine_depths[:num_reqs]
        trees, shape = self._trees, self._trees.shape
        torch.ops.ddtree.tree_build(
            scores.get("logits"),
            self.input_buffers.input_ids[anchors].contiguous(),
            root_positions,
            torch.minimum(params.node_budgets[slots], self._round_budget),
            params.candidate_caps[slots],
            params.stop_tokens[slots],
            (params.min_stop_positions[slots] - root_positions).to(torch.int32),
            trees.storage,
            shape.num_reqs,
            shape.max_nodes,
            shape.max_depth,
            tree_index,
            temperatures,
            seeds,
            scores.get("candidate_tokens"),
            scores.get("candidate_scores"),
            scores.get("transition_scores"),
            spines,
        )
        # Idle rows need a token that exists; nothing ever enters them.
        self._drafts[:num_reqs] = trees.tokens[slots, 1:].clamp(min=0)

    def _tree_scores(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """What `tree_build` scores nodes by. hidden_states: [num_reqs, horizon, H]."""
        logits = self.compute_draft_logits(hidden_states.flatten(0, 1), 0)
        return {"logits": logits.view(*hidden_states.shape[:2], -1)}

    def set_attn(self, model_state: Any, *args: Any, **kwargs: Any) -> None:
        super().set_attn(model_state, *args, **kwargs)
        self._trees = model_state.slot_trees

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As DFlash's, but returns the nodes, int64 [num_reqs, tree_budget]."""
        if not dummy_run:
            # The drafter takes a request's first rows as its accepted tokens.
            self.model_state.accepted_first(
                input_batch.positions, aux_hidden_states or [last_hidden_states]
            )
        budget = kwargs.get("num_speculative_tokens")
        self._set_round(self.tree_budget if budget is None else budget, dummy_run)
        super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            *args,
            dummy_run=dummy_run,
            **kwargs,
        )
        if not dummy_run and budget == 0:
            # vLLM wants no drafts next, and 0.33 does not run the drafter then.
            self.model_state.slot_trees.num_nodes.index_fill_(
                0, input_batch.idx_mapping, 1
            )
        return self._drafts[: input_batch.num_reqs]

    def _set_round(self, budget: int, is_dummy: bool) -> None:
        """What the draft step's graph reads; hardly ever other than in the last round."""
        if self._round != (budget, is_dummy):
            self._round_budget.fill_(budget)
            self._last_slot.fill_(-1 if is_dummy else self.max_num_reqs - 1)
            self._round = budget, is_dummy


class DDTreeDFlash2Speculator(DDTreeSpeculator, DFlash2Speculator):
    """Nodes know their parents: vLLM's selector scores every candidate below every
    candidate of the depth before, and the tree is searched in these scores."""

    _speculator_name = "DDTree DFlash2"

    def _tree_scores(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        tokens, unary = self.model.compute_candidates(hidden_states.flatten(0, 1))
        lattice = (*hidden_states.shape[:2], self.top_k)
        tokens, unary = tokens.view(lattice), unary.view(lattice)
        scores = {"candidate_tokens": tokens.int()}
        if self._is_conditional:
            # These hold the unary scores, or replace them.
            pairs = self._score_candidates(tokens, unary, hidden_states)
            scores["transition_scores"] = pairs.float()
        else:
            scores["candidate_scores"] = unary.float()
        return scores


class DDTreeLiLiCorrSpeculator(DDTreeDFlash2Speculator, LiLiCorrSpeculator):
    """The same for LiLiCorr, whose correlator takes the selector's place."""

    _speculator_name = "DDTree LiLiCorr"


_SPECULATORS = {
    "DFlashDraftModel": DDTreeSpeculator,
    "DFlash2DraftModel": DDTreeDFlash2Speculator,
    "LiLiCorrDraftModel": DDTreeLiLiCorrSpeculator,
}


def init_tree_speculator(
    vllm_config: VllmConfig, device: torch.device
) -> DDTreeSpeculator:
    """The speculator of the drafter, which `config.finish` has checked."""
    (architecture,) = vllm_config.speculative_config.draft_model_config.architectures
    return _SPECULATORS[architecture](vllm_config, device)
