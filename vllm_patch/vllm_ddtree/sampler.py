# SPDX-License-Identifier: Apache-2.0
"""Verification by matching: sample the target at every node with the noise of
non-speculative decoding, keyed by seed and position, and follow the child that
carries the sampled token. Lossless at every temperature; no ratio test.

vLLM's processors and scores want float32 copies of the logits, so rows are
sampled in chunks of whole requests, as in vLLM's own rejection sampler."""

from typing import TYPE_CHECKING

import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    _iter_request_chunks,
    get_max_chunk_logits,
)

from vllm_ddtree.history import Paths, process_along_paths

if TYPE_CHECKING:
    from vllm_ddtree.model_state import TreeStateMixin


class TreeRejectionSampler:
    """Called by the model runner in place of vLLM's rejection sampler."""

    # Read by vLLM's warm-up of its kernels.
    enable_adaptive_verification = False

    def __init__(self, sampler: Sampler, model_state: "TreeStateMixin") -> None:
        self.sampler = sampler
        self.model_state = model_state
        self.current_paths = process_along_paths(sampler, model_state.request_params)

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        sampler = self.sampler
        step = self.model_state.step
        assert step is not None
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        logprobs_dims = sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        rows = input_batch.logits_indices
        positions, input_ids = input_batch.positions[rows], input_batch.input_ids[rows]
        paths = Paths(step, input_ids)
        seq_lens = input_batch.seq_lens_cpu_upper_bound.numpy()
        cu_num_logits = input_batch.cu_num_logits_np
        mode = sampler.logprobs_mode
        node_tokens: list[torch.Tensor] = []
        scores: list[LogprobsTensors] = []
        for first, end in _iter_request_chunks(
            cu_num_logits, get_max_chunk_logits(logits.shape[1])
        ):
            chunk = slice(int(cu_num_logits[first]), int(cu_num_logits[end]))
            with self.current_paths.being(paths.of(chunk)):
                tokens, processed = sampler.sample(
                    logits[chunk],
                    input_batch.expanded_idx_mapping[chunk],
                    input_batch.idx_mapping[first:end],
                    input_batch.idx_mapping_np[first:end],
                    positions[chunk],
                    input_ids[chunk],
                    input_batch.expanded_local_pos[chunk],
                    seq_lens[first:end],
                    return_logprobs=logprobs_dims is not None,
                )
            node_tokens.append(tokens)
            if logprobs_dims is not None:
                num_logprobs, num_token_ids = logprobs_dims
                scores.append(
                    compute_topk_scores(
                        processed if mode in PROCESSED_LOGPROBS_MODES else logits[chunk],
                        num_logprobs,
                        tokens,
                        logprob_token_ids_state=sampler.logprob_token_ids_state,
                        expanded_idx_mapping=input_batch.expanded_idx_mapping[chunk],
                        max_per_req_token_ids=num_token_ids,
                        logits_mode=mode in ("raw_logits", "processed_logits"),
                    )
                )
            # Or it would live on beside the next chunk's.
            del processed
        num_accepted, accepted_nodes, sampled = self.model_state.accept(
            torch.cat(node_tokens) if len(node_tokens) > 1 else node_tokens[0],
            input_batch,
            invalid_drafts,
        )
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_accepted + 1,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        logprobs_tensors = None
        if scores:
            logprobs_tensors = _along_paths(
                LogprobsTensors.cat(scores), input_batch, accepted_nodes
            )
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs_tensors,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


def _along_paths(
    scores: LogprobsTensors, input_batch: InputBatch, accepted_nodes: torch.Tensor
) -> LogprobsTensors:
    """From scores of all nodes to one row per possible output token: token j of a
    request was sampled at its j-th path node."""
    path = torch.nn.functional.pad(accepted_nodes.clamp(min=0), (1, 0))
    rows = (input_batch.cu_num_logits[:-1, None] + path).flatten()
    width = path.shape[1]
    return LogprobsTensors(
        scores.logprob_token_ids[rows],
        scores.logprobs[rows],
        scores.selected_token_ranks[rows],
        list(range(0, rows.shape[0] + 1, width)),
    )
