# SPDX-License-Identifier: Apache-2.0
"""The model runner's per-model hooks for trees: topology and positions before
the forward pass, the accepting walk after it, and the commit of what was
accepted (KV rows, GDN states) before the drafter runs again."""

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_ddtree import trace
from vllm_ddtree.attention import TreeKVLayer, find_kv_layers
from vllm_ddtree.config import budget_tiers, verify_state_block
from vllm_ddtree.gdn import TreeGatedDeltaNet, find_gdn_layers
from vllm_ddtree.ops import CommitPlan, tree_gather
from vllm_ddtree.request_params import RequestParams
from vllm_ddtree.sampler import TreeRejectionSampler
from vllm_ddtree.step import VerifyStep, building
from vllm_ddtree.trees import TreeBatch, TreeShape

# Steps without a CUDA graph have their tensors anywhere.
MAX_MOVE_PLANS = 256


class TreeStateMixin(ModelState):
    """Placed in front of the ModelState that the model would have used."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        speculative_config = vllm_config.speculative_config
        self.tree_budget: int = speculative_config.tree_budget
        self.horizon: int = speculative_config.tree_horizon
        shape = TreeShape(self.max_num_reqs, self.tree_budget + 1, self.horizon)
        # By request slot, written by the drafter; and in the order of the batch, by the
        # rows that a request has: kernels take the shape of their trees.
        self.slot_trees = TreeBatch.zeros(shape, self.device)
        self._batch_trees: dict[int, TreeBatch] = {}
        self._tree_rows = sorted(
            {nodes + 1 for _, _, nodes in budget_tiers(vllm_config)}
            | {shape.max_nodes}
        )
        self.request_params = RequestParams(
            self.max_num_reqs,
            self.tree_budget,
            self.horizon,
            self.device,
        )
        self.step: VerifyStep | None = None
        # Outcome of the walk, in the order of the batch.
        self._num_accepted = torch.zeros(
            shape.num_reqs, dtype=torch.int32, device=self.device
        )
        self._accepted_nodes = torch.zeros(
            shape.num_reqs, shape.max_depth, dtype=torch.int32, device=self.device
        )
        self._kv_layers: list[TreeKVLayer] = []
        self._gdn_layers: list[TreeGatedDeltaNet] = []
        self._commit_plan: CommitPlan | None = None
        self._planned_for: tuple[int, ...] = ()
        # Moves of the drafter's inputs, by where these are.
        self._move_plans: dict[tuple[Any, ...], CommitPlan] = {}
        self._own_rows = torch.arange(self.max_num_tokens, device=self.device)
        self._snapshot_slots: dict[int, torch.Tensor] = {}
        self._has_snapshots = False
        self._align = (
            isinstance(self, MambaHybridModelState)
            and self.cache_config.mamba_cache_mode == "align"
        )

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        # Slots are reused, and rows can be scheduled before the first draft:
        # until then the tree is its root. `fill_` does not wait for the GPU, where
        # assigning a number to an element would.
        root = (req_index, 0)
        trees = self.slot_trees
        trees.num_nodes[req_index].fill_(1)
        trees.parents[root].fill_(-1)
        trees.depths[root].zero_()
        trees.first_child[root].fill_(-1)
        trees.ancestor_bits[root].zero_()
        trees.ancestor_bits[root][0].fill_(1)
        trees.ancestors[root].fill_(-1)
        trees.ancestors[root][0].zero_()
        self.request_params.add_request(
            req_index,
            new_req_data.sampling_params,
            new_req_data.prompt_len,
            # vLLM's warm-up would spend what is said once.
            warn=not new_req_data.req_id.startswith("_warmup_"),
        )

    def _trees_of(self, rows_per_req: int) -> TreeBatch:
        """Where the trees of steps with so many rows of each request are gathered."""
        fitting = (rows for rows in self._tree_rows if rows >= rows_per_req)
        rows = next(fitting, self._tree_rows[-1])
        if rows not in self._batch_trees:
            shape = dataclasses.replace(self.slot_trees.shape, max_nodes=rows)
            self._batch_trees[rows] = TreeBatch.zeros(shape, self.device)
        return self._batch_trees[rows]

    def preprocess_state(
        self,
        input_batch: InputBatch,
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        super().preprocess_state(
            input_batch, block_tables, kv_cache_config, num_computed_tokens
        )
        self.step = self._start_step(input_batch, num_computed_tokens)

    def _start_step(
        self, input_batch: InputBatch, num_computed_tokens: torch.Tensor
    ) -> VerifyStep | None:
        num_drafts = input_batch.num_draft_tokens_per_req
        if num_drafts is None or not num_drafts.any():
            return None
        num_reqs = int(np.count_nonzero(num_drafts))
        rows_per_req = num_drafts[:num_reqs] + 1
        if not (
            num_drafts[:num_reqs].all()
            and (input_batch.num_scheduled_tokens[:num_reqs] == rows_per_req).all()
        ):
            raise RuntimeError(
                "vllm_ddtree: requests with draft rows must lead the batch and "
                "have one row per draft and one for the root"
            )
        idx_mapping = input_batch.idx_mapping[:num_reqs]
        fresh = input_batch.num_computed_tokens_np[:num_reqs] == 0
        return VerifyStep(
            trees=self._trees_of(int(rows_per_req.max())),
            num_reqs=num_reqs,
            num_rows=int(input_batch.query_start_loc_np[num_reqs]),
            req_ids=input_batch.req_ids[:num_reqs],
            query_start=input_batch.query_start_loc[: num_reqs + 1],
            idx_mapping=idx_mapping,
            num_computed=(
                num_computed_tokens[idx_mapping].to(torch.int64)
                if self._align and self._may_cross_blocks(input_batch, num_reqs)
                else None
            ),
            fresh_reqs=np.nonzero(fresh)[0].tolist(),
            has_rest=input_batch.num_reqs > num_reqs,
        )

    def _may_cross_blocks(self, input_batch: InputBatch, num_reqs: int) -> bool:
        """Whether a path may cross a boundary of state blocks, as far as the host knows."""
        block = self.cache_config.mamba_block_size
        # The host counts drafts of a step still in flight as accepted.
        most = input_batch.num_computed_tokens_np[:num_reqs]
        least = most - 2 * (self.tree_budget + 1)
        end = most + input_batch.num_scheduled_tokens[:num_reqs]
        return bool((end // block * block > least).any())

    def _capture_step(self, input_batch: InputBatch) -> VerifyStep | None:
        """The step of a dummy batch that a FULL CUDA graph is captured with: at
        replay its tensors hold a real one's. None for a graph of plain decodes."""
        num_reqs, num_rows = input_batch.num_reqs, input_batch.num_tokens
        if num_rows <= num_reqs:
            return None
        trees = self._trees_of(num_rows // num_reqs)
        trees.num_nodes.zero_()
        return VerifyStep(
            trees=trees,
            num_reqs=num_reqs,
            num_rows=num_rows,
            req_ids=input_batch.req_ids,
            query_start=input_batch.query_start_loc[: num_reqs + 1],
            idx_mapping=input_batch.idx_mapping,
            num_computed=None,
            fresh_reqs=[],
            has_rest=False,
        )

    def prepare_inputs(self, input_batch: InputBatch, req_states: Any) -> Any:
        inputs = super().prepare_inputs(input_batch, req_states)
        if self.step is not None:
            # Slot mappings and attention metadata are computed from linear positions by
            # now. With mrope all three axes of a generated token advance together.
            self._gather_trees(self.step, input_batch, inputs.get("positions"))
        return inputs

    def _gather_trees(
        self,
        step: VerifyStep,
        input_batch: InputBatch,
        mrope_positions: torch.Tensor | None,
    ) -> None:
        """Bring the step's trees and their rows' positions to where the model reads."""
        tree_gather(
            self.slot_trees,
            step.trees,
            step.idx_mapping,
            step.query_start,
            input_batch.positions,
            mrope_positions,
        )

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        *args: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        # A dummy batch comes without preprocess_state: it must not see the
        # trees of the batch before it.
        step = self.step
        if for_capture:
            step = self._capture_step(input_batch)
            self.step = None
        elif step is not None and input_batch.req_ids[: step.num_reqs] != step.req_ids:
            step = self.step = None
        with building(step):
            attn_metadata = super().prepare_attn(
                input_batch,
                cudagraph_mode,
                block_tables,
                slot_mappings,
                *args,
                for_capture=for_capture,
                **kwargs,
            )
        if self.step is None:
            return attn_metadata
        step.attn_metadata = attn_metadata
        # The drafter overwrites them, but only after the commit.
        step.slot_mappings = slot_mappings
        if step.fresh_reqs:
            # A one-token prompt padded with draft rows: its slots are recycled.
            fresh = async_tensor_h2d(
                step.fresh_reqs, device=self.device, dtype=torch.int64
            )
            for layer in self._gdn_layers:
                slots = attn_metadata[layer.prefix].state_slots
                layer.forget(slots[fresh].to(torch.int64))
        return attn_metadata

    def custom_sampler(self, sampler: Any) -> tuple[Any, Any]:
        return sampler, TreeRejectionSampler(sampler, self)

    def accept(
        self,
        node_tokens: torch.Tensor,
        input_batch: InputBatch,
        invalid_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Walk every request of the batch.

        node_tokens int64 [num_logits], in logits order; invalid_rows bool
        [num_logits] marks nodes that must not be entered. Returns num_accepted
        int32 [R], accepted_nodes int32 [R, D], sampled tokens int64 [R, D + 1],
        the last two -1 padded. Requests without drafts accept nothing."""
        step = self.step
        assert step is not None
        trees = step.trees
        num_reqs = input_batch.num_reqs
        shape = trees.shape
        if step.has_rest:
            trees.num_nodes[step.num_reqs : num_reqs].fill_(1)
            trees.first_child[step.num_reqs : num_reqs, 0].fill_(-1)
        if invalid_rows is not None:
            nodes = step.nodes()
            trees.tokens[nodes] = torch.where(
                invalid_rows[: step.num_rows], -1, trees.tokens[nodes]
            )
        num_accepted = self._num_accepted[:num_reqs]
        accepted_nodes = self._accepted_nodes[:num_reqs]
        output_tokens = node_tokens.new_empty((num_reqs, shape.max_depth + 1))
        torch.ops.ddtree.tree_accept(
            node_tokens,
            input_batch.cu_num_logits,
            trees.storage,
            shape.max_nodes,
            shape.max_depth,
            shape.num_reqs,
            num_accepted,
            accepted_nodes,
            output_tokens,
        )
        step.num_accepted = num_accepted[: step.num_reqs]
        step.accepted_nodes = accepted_nodes[: step.num_reqs]
        trace.record(step, output_tokens)
        return num_accepted, accepted_nodes, output_tokens

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor | int,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        step = self.step
        if step is not None and step.num_accepted is not None:
            self._commit(step)
        if isinstance(self, MambaHybridModelState):
            # One state slot holds the state of everything accepted: to vLLM's
            # bookkeeping that is one token per step. Only align mode looks at it.
            num_sampled = 1
            if not self._align:
                return
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)

    def _commit(self, step: VerifyStep) -> None:
        if self._align:
            self._place_snapshots(step)
        if any(step.num_rows > layer.stash_rows for layer in self._gdn_layers[:1]):
            # A step too large for the captured stash; its addresses are its own.
            self._plan_commit(step).run(step.num_reqs)
            return
        tensors = step.query_start, step.slot_mappings, step.trees.storage
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if self._commit_plan is None or self._planned_for != addresses:
            self._commit_plan, self._planned_for = self._plan_commit(step), addresses
        self._commit_plan.run(step.num_reqs)

    def _plan_commit(self, step: VerifyStep) -> CommitPlan:
        gdn = [
            (
                layer.tree_conv_weight(),
                layer.tree_conv_state(),
                layer.tree_ssm_state(),
                *layer.stash(step.num_rows),
                step.attn_metadata[layer.prefix].state_slots,
                self._snapshot_slots.get(self._groups[layer.prefix]),
            )
            for layer in self._gdn_layers
        ]
        kv = [
            (*layer.caches(), step.slot_mappings[self._groups[layer.name]])
            for layer in self._kv_layers
        ]
        return CommitPlan(
            step.trees,
            gdn,
            kv,
            step.query_start,
            self._num_accepted,
            self._accepted_nodes,
            self._snapshot_tokens if self._align else None,
        )

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        if self._align:
            _, mamba_spec = self._get_mamba_group_info(kv_cache_config)
            verify_state_block(self.tree_budget, mamba_spec.block_size)
        groups = kv_cache_config.kv_cache_groups
        self._groups = {
            name: group for group, spec in enumerate(groups) for name in spec.layer_names
        }
        context = self.vllm_config.compilation_config.static_forward_context
        self._kv_layers = find_kv_layers(context)
        self._gdn_layers = find_gdn_layers(context)
        # The commit finds these where they are: what a round needs is written here.
        self._commit_plan = None
        if self._align:
            self._snapshot_tokens = torch.ones(
                self.max_num_reqs, dtype=torch.int32, device=self.device
            )
            self._snapshot_slots = {
                self._groups[layer.prefix]: torch.full_like(self._snapshot_tokens, -1)
                for layer in self._gdn_layers
            }

    def _place_snapshots(self, step: VerifyStep) -> None:
        """Say where this round's commit leaves the states of crossed boundaries."""
        if step.num_computed is None:
            if self._has_snapshots:
                for slots in self._snapshot_slots.values():
                    slots.fill_(-1)
                self._has_snapshots = False
            return
        self._has_snapshots = True
        tables = {
            self._groups[layer.prefix]: step.attn_metadata[layer.prefix].block_table
            for layer in self._gdn_layers
        }
        tokens, slots = boundary_snapshots(
            step, self.cache_config.mamba_block_size, list(tables.values())
        )
        self._snapshot_tokens[: step.num_reqs] = tokens
        for group, slot in zip(tables, slots, strict=True):
            self._snapshot_slots[group][: step.num_reqs] = slot

    def accepted_first(
        self, positions: torch.Tensor, hidden_states: list[torch.Tensor]
    ) -> None:
        """Move what accepted rows have, int64 [T] and [T, hidden] each, to the first rows
        of their request, where the drafter expects a chain."""
        step = self.step
        if step is None or step.accepted_nodes is None:
            return
        tensors = [positions.view(torch.int32).view(-1, 2), *hidden_states]
        key = (
            step.query_start.data_ptr(),
            step.trees.storage.data_ptr(),
            *((x.data_ptr(), len(x)) for x in tensors),
        )
        plan = self._move_plans.get(key)
        if plan is None:
            if len(self._move_plans) == MAX_MOVE_PLANS:
                self._move_plans.clear()
            # To the commit each tensor is a cache with a token per row, of which one half
            # is its key and the other its value.
            halves = [x[:, None, None].chunk(2, dim=-1) for x in tensors]
            plan = self._move_plans[key] = CommitPlan(
                step.trees,
                [],
                [(key_half, value_half, self._own_rows) for key_half, value_half in halves],
                step.query_start,
                self._num_accepted,
                self._accepted_nodes,
                None,
            )
        plan.run(step.num_reqs)


def boundary_snapshots(
    step: VerifyStep, block: int, tables: list[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Prefix caching ("align" mode) keeps the state at each boundary of `block`
    tokens. Where the accepted path crosses one, commit writes the state there too.
    Returns the rows replayed before that, [num_reqs], and for each group's block
    table [num_reqs, blocks] the slot of the boundary's block, -1 for none."""
    start = step.num_computed
    end = start + step.num_accepted + 1
    rows = step.query_start.diff()
    boundary = end // block * block
    running_column = (start + rows - 1) // block
    column = boundary // block - 1
    crosses = (boundary > start) & (column < running_column)
    slots = []
    for table in tables:
        slot = table.gather(1, column.clamp(min=0)[:, None])[:, 0]
        # Block 0 is vLLM's null block.
        slots.append(torch.where(crosses & (slot > 0), slot, -1))
    return torch.where(crosses, boundary - start, 1), slots


@cache
def wrap_model_state(cls: type[ModelState]) -> type[ModelState]:
    """The ModelState class to use in place of `cls` when trees are on."""
    return type(f"Tree{cls.__name__}", (TreeStateMixin, cls), {})
