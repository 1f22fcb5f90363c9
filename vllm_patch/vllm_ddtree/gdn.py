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
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention as cpu_gdn
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor

from vllm_ddtree.config import is_tree
from vllm_ddtree.step import VerifyStep, active_step


@dataclass
class TreeGDNMetadata(GDNAttentionMetadata):
    """`step` rows lead; `rest` is stock metadata of the requests behind them."""

    step: VerifyStep | None = None
    rest: GDNAttentionMetadata | None = None
    # int32 [step.num_reqs]
    state_slots: torch.Tensor | None = None
    # The group's block table of the verify requests, int32 [num_reqs, blocks]
    block_table: torch.Tensor | None = None


class TreeGDNMetadataBuilder(GDNAttentionMetadataBuilder):
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
        if m.num_reqs > step.num_reqs:
            rest = super().build(
                common_prefix_len, _behind(m, step), fast_build=fast_build
            )
        block_table = m.block_table_tensor[: step.num_reqs]
        slots = mamba_get_block_table_tensor(
            block_table,
            m.seq_lens[: step.num_reqs],
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
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
            state_slots=slots[:, 0].contiguous(),
            block_table=block_table,
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
        scheduler = vllm_config.scheduler_config
        budget = vllm_config.speculative_config.tree_budget
        rows = min(
            scheduler.max_num_seqs * (budget + 1), scheduler.max_num_batched_tokens
        )
        heads = self.num_v_heads // self.tp_size
        # Raw rows of the trees in flight, about 21 KB per row at 27B dimensions.
        # Allocated here so that vLLM's memory profiling counts it.
        self.stash_qkv = torch.zeros(
            rows,
            self.conv_dim // self.tp_size,
            dtype=vllm_config.model_config.dtype,
            device=self.A_log.device,
        )
        self.stash_gates = torch.zeros(
            rows, 2, heads, dtype=torch.float32, device=self.A_log.device
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        return TreeGDNBackend if self.uses_trees else super().get_attn_backend()

    def tree_conv_weight(self) -> torch.Tensor:
        """[C, 4], unpacked."""
        return cpu_gdn._unpacked_conv_weight(self)

    def tree_conv_state(self) -> torch.Tensor:
        """[slots, C, 3], newest last."""
        state = self.kv_cache[0]
        return state if is_conv_state_dim_first() else state.transpose(1, 2)

    def tree_ssm_state(self) -> torch.Tensor:
        """[slots, Hv, v, k]. vLLM's CPU ops keep it K-major."""
        slots, heads, dim_v, dim_k = self.kv_cache[1].shape
        return self.kv_cache[1].view(slots, heads, dim_k, dim_v).transpose(2, 3)

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
        rows, shape = step.num_rows, step.trees.shape
        conv_state, ssm_state = self.tree_conv_state(), self.tree_ssm_state()
        for req in step.fresh_reqs:
            # A one-token prompt padded with draft rows: its slot is recycled.
            slot = int(metadata.state_slots[req])
            conv_state[slot].zero_()
            ssm_state[slot].zero_()
        torch.ops.ddtree.gdn_verify(
            mixed_qkv[:rows],
            a[:rows],
            b[:rows],
            self.A_log,
            self.dt_bias,
            self.tree_conv_weight(),
            self.conv1d.bias,
            conv_state,
            ssm_state,
            self.stash_qkv,
            self.stash_gates,
            metadata.state_slots,
            step.query_start,
            step.trees.storage,
            shape.num_reqs,
            shape.max_nodes,
            shape.max_depth,
            out[:rows],
        )


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
        cpu_gdn._cpu_gdn_attention_nonspec(
            layer, metadata, mixed_qkv, b, a, core_attn_out
        )
        return
    layer._verify(mixed_qkv, b, a, core_attn_out, metadata)
    if metadata.rest is not None:
        rest = slice(step.num_rows, metadata.num_actual_tokens)
        cpu_gdn._cpu_gdn_attention_nonspec(
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
