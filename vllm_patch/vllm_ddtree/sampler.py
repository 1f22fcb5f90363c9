# SPDX-License-Identifier: Apache-2.0
"""Verification by matching: sample the target at every node with the noise of
non-speculative decoding, keyed by seed and position, and follow the child that
carries the sampled token. Lossless at every temperature; no ratio test."""

from typing import TYPE_CHECKING

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

if TYPE_CHECKING:
    from vllm_ddtree.model_state import TreeStateMixin


class TreeRejectionSampler:
    """Called by the model runner in place of vLLM's rejection sampler."""

    # Read by vLLM's warm-up of its kernels.
    enable_adaptive_verification = False

    def __init__(self, sampler: Sampler, model_state: "TreeStateMixin") -> None:
        self.sampler = sampler
        self.model_state = model_state

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        sampler = self.sampler
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        logprobs_dims = sampler.get_logprobs_dims(
            input_batch.idx_mapping_np, include_token_ids=False
        )
        rows = input_batch.logits_indices
        node_tokens, processed = sampler.sample(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            input_batch.positions[rows],
            input_batch.input_ids[rows],
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
            return_logprobs=logprobs_dims is not None,
        )
        num_accepted, accepted_nodes, sampled = self.model_state.accept(
            node_tokens, input_batch, invalid_drafts
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_accepted + 1,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        logprobs_tensors = None
        if logprobs_dims is not None:
            raw = sampler.logprobs_mode in ("raw_logits", "raw_logprobs")
            logprobs_tensors = self._logprobs(
                logits if raw else processed,
                input_batch,
                accepted_nodes,
                sampled,
                logprobs_dims[0],
            )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs_tensors,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _logprobs(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        accepted_nodes: torch.Tensor,
        sampled: torch.Tensor,
        num_logprobs: int,
    ) -> LogprobsTensors:
        """Scores of the sampled tokens, one row per possible output token: token
        j of a request was sampled at the row of its j-th path node."""
        path = torch.nn.functional.pad(accepted_nodes.clamp(min=0), (1, 0))
        path_rows = input_batch.cu_num_logits[:-1, None] + path
        num_reqs, width = sampled.shape
        return compute_topk_scores(
            logits[path_rows.flatten()],
            num_logprobs,
            sampled.clamp(min=0).flatten(),
            list(range(0, num_reqs * width + 1, width)),
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )
