# SPDX-License-Identifier: Apache-2.0
"""Gated delta net layers with one state slot per request at any tree budget:
verify rows read the state and write none, the commit after the walk replays what
was accepted. Prefills and plain decodes stay with vLLM's own code."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
    QwenGatedDeltaNetAttention,
)
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from vllm_ddtree.config import is_tree, max_tree_rows
from vllm_ddtree.ops import GdnVerifyPlan
from vllm_ddtree.step import VerifyStep, active_step


@dataclass
class TreeGDNMetadata(GDNAttentionMetadata):
    """`step` rows lead; `rest` is stock metadata of the requests behind them."""

    step: VerifyStep | None = None
    rest: GDNAttentionMetadata | None = None
    # int32 [step.num_reqs], more in a padded graph
    state_slots: torch.Tensor | None = None
    # The group's block table of the verify requests, int32 [num_reqs, blocks]
    block_table: torch.Tensor | None = None


class TreeGDNMetadataBuilder(GDNAttentionMetadataBuilder):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # At a fixed address for CUDA graphs and for the commit.
        self.tree_state_slots = torch.zeros(
            self.vllm_config.scheduler_config.max_num_seqs,
            dtype=torch.int32,
            device=self.device,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> GDNAttentionMetadata:
        if not is_tree(self.vllm_config.speculative_config):
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self.build(0, common_attn_metadata)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        num_accepted_tokens: torch.Tensor | None = None,
        num_decode_draft_tokens_cpu: torch.Tensor | None = None,
        fast_build: bool = False,
    ) -> GDNAttentionMetadata:
        m = common_attn_metadata
        if not is_tree(self.vllm_config.speculative_config):
            return super().build(
                common_prefix_len,
                m,
                num_accepted_tokens,
                num_decode_draft_tokens_cpu,
                fast_build,
            )
        # Without draft counts the stock builder makes no multi-slot metadata.
        step = active_step()
        if step is None:
            return super().build(common_prefix_len, m, fast_build=fast_build)
        rest = None
        if step.has_rest:
            rest = super().build(
                common_prefix_len, _behind(m, step), fast_build=fast_build
            )
        # A padded graph has more requests than the step; their slot is vLLM's null
        # block, and their trees are empty.
        num_reqs = m.num_reqs if rest is None else step.num_reqs
        block_table = m.block_table_tensor[:num_reqs]
        slots = mamba_get_block_table_tensor(
            block_table,
            m.seq_lens[:num_reqs],
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        state_slots = self.tree_state_slots[:num_reqs]
        state_slots.copy_(slots[:, 0])
        return TreeGDNMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=step.num_reqs,
            num_spec_decode_tokens=step.num_rows,
            num_actual_tokens=m.num_actual_tokens,
            step=step,
            rest=rest,
            state_slots=state_slots,
            block_table=block_table[: step.num_reqs],
        )


def _behind(m: CommonAttentionMetadata, step: VerifyStep) -> CommonAttentionMetadata:
    """The batch without its leading verify requests and their rows."""
    n, rows = step.num_reqs, step.num_rows
    query_start_loc_cpu = m.query_start_loc_cpu[n : m.num_reqs + 1] - rows

    def tail(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[n:]

    return m.replace(
        query_start_loc=m.query_start_loc[n : m.num_reqs + 1] - rows,
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=m.seq_lens[n:],
        num_reqs=m.num_reqs - n,
        num_actual_tokens=m.num_actual_tokens - rows,
        max_query_len=int(query_start_loc_cpu.diff().max()),
        block_table_tensor=m.block_table_tensor[n:],
        slot_mapping=m.slot_mapping[rows:],
        positions=None if m.positions is None else m.positions[rows:],
        is_prefilling=tail(m.is_prefilling),
        seq_lens_cpu_upper_bound=tail(m.seq_lens_cpu_upper_bound),
        req_idx=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


class TreeGDNBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[GDNAttentionMetadataBuilder]:
        return TreeGDNMetadataBuilder


class TreeGatedDeltaNet(QwenGatedDeltaNetAttention):
    """Registered in place of vLLM's Qwen GDN layer. In an engine without trees
    in the same process it is that layer."""

    def __init__(
        self, config: Any, vllm_config: VllmConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        self.uses_trees = is_tree(vllm_config.speculative_config)
        if not self.uses_trees:
            return
        # One slot and the plain conv window, whatever the budget.
        self.num_spec = 0
        # vLLM's fused kernel for drafts needs a state per draft.
        self.enable_fused_gdn_spec_decode = False
        # Raw rows of the trees in flight, about 21 KB per row at 27B dimensions.
        # Allocated here so that vLLM's memory profiling counts it.
        self._stash_dtype = vllm_config.model_config.dtype
        # Every graph of trees fits: it keeps the address.
        self.stash_rows = max_tree_rows(vllm_config)
        self._stash = self._new_stash(self.stash_rows)
        self._wide_stash: tuple[torch.Tensor, torch.Tensor] | None = None
        self._planned_for: list[tuple[int, int]] = []

    def _new_stash(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Not that of a parameter: some loaders make those without storage.
        device, dtype = current_platform.current_device(), self._stash_dtype
        heads = self.num_v_heads // self.tp_size
        return (
            torch.zeros(rows, self.conv_dim // self.tp_size, dtype=dtype, device=device),
            torch.zeros(rows, 2, heads, dtype=torch.float32, device=device),
        )

    def stash(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the raw inputs of `rows` rows are kept until the commit: [T', C] and
        gates f32 [T', 2, Hv], T' >= rows."""
        if rows <= self.stash_rows:
            self._wide_stash = None
            return self._stash
        # Requests that kept the budgets of a smaller batch. Never captured.
        if self._wide_stash is None or rows > self._wide_stash[0].shape[0]:
            self._wide_stash = self._new_stash(rows)
        return self._wide_stash

    def get_attn_backend(self) -> type[AttentionBackend]:
        return TreeGDNBackend if self.uses_trees else super().get_attn_backend()

    def tree_conv_weight(self) -> torch.Tensor:
        """[C, 4], as loaded."""
        if current_platform.is_cpu():
            # The CPU ops pack theirs in place.
            return _cpu_gdn()._unpacked_conv_weight(self)
        return self.conv1d.weight.view(self.conv1d.weight.shape[0], -1)

    def tree_conv_state(self) -> torch.Tensor:
        """[slots, C, 3], newest last."""
        state = self.kv_cache[0]
        return state if is_conv_state_dim_first() else state.transpose(1, 2)

    def tree_ssm_state(self) -> torch.Tensor:
        """[slots, Hv, v, k]. vLLM's CPU ops keep it K-major."""
        state = self.kv_cache[1]
        if not current_platform.is_cpu():
            return state
        slots, heads, dim_v, dim_k = state.shape
        return state.view(slots, heads, dim_k, dim_v).transpose(2, 3)

    def forget(self, slots: torch.Tensor) -> None:
        """Zero the states of `slots`, int64: a request without one takes them over."""
        self.tree_conv_state().index_fill_(0, slots, 0)
        self.tree_ssm_state().index_fill_(0, slots, 0)

    def forward_cpu(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.uses_trees:
            return super().forward_cpu(hidden_states)
        mixed_qkvz, _ = self.in_proj_qkvz(hidden_states)
        ba, _ = self.in_proj_ba(hidden_states)
        if self.gqa_interleaved_layout:
            query, key, value, z, b, a = self.fix_query_key_value_ordering(
                mixed_qkvz, ba
            )
            mixed_qkv = torch.cat([x.flatten(1) for x in (query, key, value)], dim=-1)
        else:
            z_size = self.value_dim // self.tp_size
            mixed_qkv, z = mixed_qkvz.split(
                [mixed_qkvz.shape[-1] - z_size, z_size], dim=-1
            )
            z = z.reshape(z.shape[0], -1, self.head_v_dim)
            b, a = ba.chunk(2, dim=-1)
        core_attn_out = mixed_qkv.new_zeros(
            (mixed_qkv.shape[0], self.num_v_heads // self.tp_size, self.head_v_dim)
        )
        torch.ops.ddtree.gdn_layer(mixed_qkv, b, a, core_attn_out, self.prefix)
        return self._output_projection(core_attn_out, z)

    def _verify(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        out: torch.Tensor,
        metadata: TreeGDNMetadata,
    ) -> None:
        step = metadata.step
        rows = step.num_rows
        self._verify_plan(rows).run(
            mixed_qkv[:rows],
            a[:rows],
            b[:rows],
            metadata.state_slots[: step.num_reqs],
            step.query_start,
            step.trees,
            out[:rows],
        )

    def _verify_plan(self, rows: int) -> GdnVerifyPlan:
        stash = self.stash(rows)
        tensors = [(x.data_ptr(), len(x)) for x in (*self.kv_cache, *stash)]
        if self._planned_for != tensors:
            self._planned_for = tensors
            self._plan = GdnVerifyPlan(
                self.A_log,
                self.dt_bias,
                self.tree_conv_weight(),
                self.conv1d.bias,
                self.tree_conv_state(),
                self.tree_ssm_state(),
                *stash,
            )
        return self._plan

    def _forward_core(
        self,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """What vLLM's CUDA op calls: verify rows here, the others by vLLM."""
        context = get_forward_context()
        by_layer = context.attn_metadata
        metadata = by_layer.get(self.prefix) if isinstance(by_layer, dict) else None
        step = getattr(metadata, "step", None)
        if step is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        self._verify(mixed_qkv, b, a, core_attn_out, metadata)
        if metadata.rest is None:
            return
        rest = slice(step.num_rows, metadata.num_actual_tokens)
        by_layer[self.prefix] = metadata.rest
        try:
            super()._forward_core(
                mixed_qkv[rest], b[rest], a[rest], core_attn_out[rest]
            )
        finally:
            by_layer[self.prefix] = metadata


def _cpu_gdn() -> Any:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    return gdn_attention


@torch.library.custom_op("ddtree::gdn_layer", mutates_args=("core_attn_out",))
def gdn_layer(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: str,
) -> None:
    """Conv and recurrence of one layer for whatever the batch holds.

    mixed_qkv [T, C]; b, a [T, Hv]; core_attn_out [T, Hv, 128]."""
    context = get_forward_context()
    if context.attn_metadata is None:
        return
    layer = context.no_compile_layers[layer_name]
    metadata = context.attn_metadata[layer_name]
    if metadata.num_actual_tokens == 0:
        return
    step = getattr(metadata, "step", None)
    if step is None:
        _cpu_gdn()._cpu_gdn_attention_nonspec(
            layer, metadata, mixed_qkv, b, a, core_attn_out
        )
        return
    layer._verify(mixed_qkv, b, a, core_attn_out, metadata)
    if metadata.rest is not None:
        rest = slice(step.num_rows, metadata.num_actual_tokens)
        _cpu_gdn()._cpu_gdn_attention_nonspec(
            layer,
            metadata.rest,
            mixed_qkv[rest],
            b[rest],
            a[rest],
            core_attn_out[rest],
        )


@gdn_layer.register_fake
def _(mixed_qkv, b, a, core_attn_out, layer_name) -> None:
    """Only mutates core_attn_out."""


def find_gdn_layers(forward_context: dict[str, Any]) -> list[TreeGatedDeltaNet]:
    return [
        layer
        for layer in forward_context.values()
        if isinstance(layer, TreeGatedDeltaNet) and layer.uses_trees
    ]
