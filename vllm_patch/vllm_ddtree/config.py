# SPDX-License-Identifier: Apache-2.0
"""Turns method "ddtree" into vLLM's "dflash" plus a tree budget, and refuses what cannot work.

The patch calls, in this order: `begin` and `finish` while a SpeculativeConfig is made, `verify`
once the target's VllmConfig knows its model. The model state calls `verify_state_block` when the
KV cache is laid out; the rest runs before a model loads. Refusals are ValueErrors of one sentence that says what to change.

Afterwards `spec.method` is "dflash", `spec.num_speculative_tokens` is the node budget B (so that
vLLM's scheduler reserves B + 1 rows per request) and `spec.tree_horizon` is the depth K.
"""

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from vllm_ddtree import compat

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SpeculativeConfig, VllmConfig

# DDT_MAX_NODE_BUDGET and DDT_MAX_DEPTH of ddtree.h
MAX_TREE_BUDGET = 255
MAX_TREE_HORIZON = 32
DEFAULT_TREE_BUDGET = 31

# Drafters, and for those that score pairs of candidates how their config names K.
DRAFTER_ARCHITECTURES = {
    "DFlashDraftModel": None,
    "DFlash2DraftModel": "selector_top_k",
    "LiLiCorrDraftModel": "lilicorr_candidate_topk",
}
HYBRID_TARGETS = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3NextForCausalLM",
)
DENSE_TARGETS = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
ATTENTION_HEAD_DIMS = (64, 128, 256)
MAX_QUERIES_PER_KV_HEAD = 16
GDN_HEAD_DIM = 128
GDN_CONV_WIDTH = 4

# Rows of trees in flight. Past about 256 rows a forward pass takes longer with every row, and
# each row costs 21 KB of stash a layer at 27B dimensions, so more requests get smaller trees.
MAX_VERIFY_ROWS = 512
SMALLER_BUDGETS = (127, 63, 31, 15, 7)


def is_tree(spec: "SpeculativeConfig | None") -> bool:
    return spec is not None and spec.tree_budget is not None


def begin(spec: "SpeculativeConfig") -> None:
    """Rewrite a user's "ddtree" config before vLLM reads the method.

    Until `finish`, `spec.tree_horizon` holds the user's num_speculative_tokens or None.
    """
    compat.check_vllm()
    if spec.method != "ddtree":
        settings = ("tree_budget", "verify_mode", "tree_scores", "tree_spine")
        what = next(name for name in settings if getattr(spec, name) is not None)
        _refuse(f"{what} needs the speculative method 'ddtree'", "set method to 'ddtree'")
    if spec.tree_budget is None:
        spec.tree_budget = DEFAULT_TREE_BUDGET
    if not 1 <= spec.tree_budget <= MAX_TREE_BUDGET:
        _refuse(
            f"tree_budget is {spec.tree_budget}",
            f"set it to 1..{MAX_TREE_BUDGET} nodes (default {DEFAULT_TREE_BUDGET})",
        )
    if spec.model is None:
        _refuse("ddtree needs a drafter", "set --speculative-model to a DFlash drafter")
    for field, only, advice in (
        ("rejection_sample_method", "standard", "trees are always verified losslessly"),
        ("draft_sample_method", "greedy", "the tree itself holds the alternatives"),
        ("use_local_argmax_reduction", False, "the tree needs the drafter's full logits"),
        ("use_heterogeneous_vocab", False, "target and drafter must share a vocabulary"),
        ("enable_adaptive_verification", False, "set a smaller tree_budget instead"),
        ("num_speculative_tokens_per_batch_size", None, "the tree budget is fixed"),
        ("max_model_len", None, "the drafter must cover the target's context"),
        ("prompt_lookup_max", None, "n-gram drafts cannot be mixed with trees"),
        ("prompt_lookup_min", None, "n-gram drafts cannot be mixed with trees"),
    ):
        if (value := getattr(spec, field)) != only:
            _refuse(f"ddtree does not support {field}={value!r}", f"remove it: {advice}")
    _refuse_quantised_cache(spec.kv_cache_dtype, "the drafter's kv_cache_dtype")

    spec.method = "dflash"
    spec.tree_horizon = spec.num_speculative_tokens
    spec.num_speculative_tokens = spec.tree_budget


def finish(spec: "SpeculativeConfig") -> None:
    """Check the drafter and settle the depth, as soon as the drafter's config is loaded."""
    hf_config = spec.draft_model_config.hf_config
    architectures = list(getattr(hf_config, "architectures", None) or [])
    if len(architectures) != 1 or architectures[0] not in DRAFTER_ARCHITECTURES:
        _refuse(
            f"the drafter {spec.model} is a {', '.join(architectures) or 'model without a name'}",
            f"use a DFlash drafter ({', '.join(DRAFTER_ARCHITECTURES)})",
        )
    _choose_scores(spec, hf_config, architectures[0])
    tensor_parallel = spec.target_parallel_config.tensor_parallel_size
    if spec.draft_tensor_parallel_size not in (None, tensor_parallel):
        _refuse(
            f"draft_tensor_parallel_size is {spec.draft_tensor_parallel_size}",
            f"remove it: the drafter runs on the target's {tensor_parallel} ranks",
        )

    draft_config = getattr(hf_config, "dflash_config", None) or {}
    block_size = draft_config.get("block_size", getattr(hf_config, "block_size", None))
    if not isinstance(block_size, int) or block_size < 2:
        _refuse(
            f"the drafter's config.json has block_size {block_size}",
            "set it to the block the drafter was trained with, at least 2",
        )
    deepest = min(block_size - 1, MAX_TREE_HORIZON)
    horizon = spec.tree_horizon or deepest
    if horizon > deepest:
        limit = "the drafter's block_size - 1" if deepest < MAX_TREE_HORIZON else "the maximum"
        _refuse(
            f"num_speculative_tokens (the tree's depth) is {horizon}",
            f"set it to at most {deepest}, {limit}",
        )
    assert spec.tree_budget is not None
    spec.tree_horizon = min(horizon, spec.tree_budget)


def _choose_scores(spec: "SpeculativeConfig", hf_config: Any, architecture: str) -> None:
    """Settle whether nodes are scored by their parents, which a plain drafter cannot say."""
    top_k_key = DRAFTER_ARCHITECTURES[architecture]
    if top_k_key is None:
        if spec.tree_scores == "conditional":
            _refuse(
                f"tree_scores is conditional, and a {architecture} does not score pairs of candidates",
                "remove it or use a DFlash2 or LiLiCorr drafter",
            )
        spec.tree_scores = "marginal"
        return
    spec.tree_scores = spec.tree_scores or "conditional"
    draft_config = getattr(hf_config, "dflash_config", None) or {}
    if not isinstance(top_k := draft_config.get(top_k_key), int) or top_k < 1:
        _refuse(
            f"the drafter's config.json has {top_k_key} {top_k} in dflash_config",
            "set it to the number of candidates that the drafter was trained with",
        )
    vocab = getattr(hf_config, "vocab_size", None)
    own = getattr(hf_config, "draft_vocab_size", None)
    if own not in (None, vocab):
        # vLLM's classes do not map the ids of their candidates
        _refuse(
            f"the drafter chooses candidates from {own} of {vocab} tokens",
            "use a drafter with the target's whole vocabulary",
        )


def verify(vllm_config: "VllmConfig") -> None:
    """Refuse what trees cannot do on this target, platform or parallel layout."""
    cfg = vllm_config
    spec = cfg.speculative_config
    parallel, cache = cfg.parallel_config, cfg.cache_config
    assert spec is not None and spec.tree_budget is not None and spec.tree_horizon is not None
    for wrong, what, change in (
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism",
            "set --pipeline-parallel-size 1 (tensor parallelism works)",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            "decode context parallelism",
            "set --decode-context-parallel-size 1",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallelism",
            "set --prefill-context-parallel-size 1",
        ),
        (
            parallel.use_ubatching,
            "dual batch overlap",
            "remove --enable-dbo and --ubatch-size",
        ),
        (
            parallel.enable_batch_sharded_sampling,
            "batch-sharded sampling",
            "remove --enable-batch-sharded-sampling",
        ),
        (
            cfg.kv_transfer_config is not None,
            "KV connectors",
            "remove --kv-transfer-config",
        ),
        (
            cache.kv_offloading_size is not None,
            "KV cache offloading",
            "remove --kv-offloading-size",
        ),
        (
            cfg.watermark_config is not None,
            "watermarking",
            "remove --watermark-config",
        ),
        (
            cfg.diffusion_config is not None,
            "diffusion decoding",
            "remove --diffusion-config",
        ),
        (
            cfg.aux_output_config.enabled,
            "returning routed experts",
            "remove --enable-return-routed-experts",
        ),
        (
            cache.use_replayssm,
            "ReplaySSM",
            "remove --use-replayssm",
        ),
    ):
        if wrong:
            _refuse(f"ddtree does not support {what}", change)
    other_noise = cfg.model_config.use_fp64_gumbel
    if spec.verify_mode is None:
        spec.verify_mode = "match" if other_noise else "coupled"
    if spec.verify_mode == "coupled" and other_noise:
        _refuse(
            "verify_mode coupled anticipates float32 noise, not that of --use-fp64-gumbel",
            "remove --use-fp64-gumbel or set --speculative-verify-mode match",
        )
    _refuse_quantised_cache(cache.cache_dtype, "--kv-cache-dtype")
    _verify_runner(cfg)
    _verify_target(cfg)
    _verify_batch(cfg)
    _verify_data_parallel(cfg)
    tiers = budget_tiers(cfg)
    if len(tiers) > 1:
        # vLLM's own schedule of draft tokens by the number of requests in a step
        spec.num_speculative_tokens_per_batch_size = tiers
    _log().info(describe_tiers(tiers))


def describe_tiers(tiers: list[tuple[int, int, int]]) -> str:
    """The start-up line: which loads get which budgets."""
    (_, most, budget), *smaller = tiers
    parts = [f"up to {most} requests in a step get trees of {budget} nodes each"]
    parts += [f"up to {last} of {nodes}" for _, last, nodes in smaller if nodes]
    parts += [f"{first} and more none" for first, _, nodes in smaller if not nodes]
    return (
        f"ddtree: {', '.join(parts)}, and logits are sampled in chunks of at most 1 GiB in float32."
    )


def _verify_data_parallel(cfg: "VllmConfig") -> None:
    # ranks with different budgets would wait for each other
    tiers = budget_tiers(cfg)
    if cfg.parallel_config.data_parallel_size > 1 and len(tiers) > 1:
        (_, last, nodes), most = tiers[0], cfg.scheduler_config.max_num_seqs
        smaller = MAX_VERIFY_ROWS // most - 1
        _refuse(
            f"under data parallelism every step has trees of {nodes} nodes, and {most} requests with "
            "them are more than a step holds",
            f"set --max-num-seqs to at most {last}"
            + (f" or --speculative-tree-budget to at most {smaller}" if smaller > 0 else ""),
        )


def _verify_runner(cfg: "VllmConfig") -> None:
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if not current_platform.is_cpu():
        if not current_platform.is_cuda():
            _refuse(
                f"ddtree serves on NVIDIA GPUs and on the CPU, not on {current_platform.device_name}",
                "use a CUDA or CPU build of vLLM",
            )
        if compat.is_0_32():
            _refuse("ddtree on a GPU needs vLLM 0.33.0", "upgrade vLLM")
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        _refuse("ddtree needs Model Runner V2", "unset VLLM_USE_V2_MODEL_RUNNER")
    if not HAS_TRITON:
        _refuse("ddtree needs Model Runner V2, which needs Triton", "install triton")
    if not cfg.use_v2_model_runner:
        features = ", ".join(cfg._get_v2_model_runner_unsupported_features())
        _refuse("ddtree needs Model Runner V2", f"remove what it does not support: {features}")


def _verify_target(cfg: "VllmConfig") -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = cfg.model_config
    for wrong, what, change in (
        (model.runner_type != "generate", "pooling models", "serve a generative model"),
        (model.return_sampling_mask, "sampling masks", "remove --return-sampling-mask"),
        (model.enable_trace_replay, "trace replay", "remove --enable-trace-replay"),
        (model.enable_prompt_embeds, "prompt embeddings", "remove --enable-prompt-embeds"),
    ):
        if wrong:
            _refuse(f"ddtree does not support {what}", change)

    hybrid = model.architecture in HYBRID_TARGETS
    if not hybrid and model.architecture not in DENSE_TARGETS:
        _refuse(
            f"ddtree does not support the target {model.architecture}",
            "use one of " + ", ".join(HYBRID_TARGETS + DENSE_TARGETS),
        )
    layer_types = getattr(model.hf_text_config, "layer_types", None) or ()
    local = {kind for kind in layer_types if kind not in ("full_attention", "linear_attention")}
    if local or (not layer_types and model.get_sliding_window() is not None):
        _refuse(
            "ddtree does not support sliding-window or chunked attention"
            + (f" ({', '.join(sorted(local))})" if local else ""),
            "use a target whose attention layers are all full attention",
        )

    head_dims = ATTENTION_HEAD_DIMS + ((32,) if current_platform.is_cpu() else ())
    if model.get_head_size() not in head_dims:
        _refuse(
            f"the target's attention head dim is {model.get_head_size()}",
            f"use a target with head dim {', '.join(map(str, sorted(head_dims)))}",
        )
    queries = model.get_num_attention_heads(cfg.parallel_config)
    kv_heads = model.get_num_kv_heads(cfg.parallel_config)
    if queries > MAX_QUERIES_PER_KV_HEAD * kv_heads:
        _refuse(
            f"the target has {queries} query heads for {kv_heads} KV heads per rank",
            f"use a target with at most {MAX_QUERIES_PER_KV_HEAD} query heads per KV head",
        )
    backends = (None, AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.CPU_ATTN)
    if cfg.attention_config.backend not in backends:
        _refuse(
            f"ddtree does not support --attention-backend {cfg.attention_config.backend.name}",
            "remove it or use FLASH_ATTN",
        )
    if current_platform.is_cuda():
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

        if get_flash_attn_version() is None:
            _refuse("ddtree needs FlashAttention", "install a vLLM that was built with it")
        # vLLM prefers others on some cards
        cfg.attention_config.backend = AttentionBackendEnum.FLASH_ATTN
    if hybrid:
        _verify_gdn(cfg, model)
        if current_platform.is_cuda():
            _verify_gdn_prefill(cfg)


def _verify_gdn(cfg: "VllmConfig", model: "ModelConfig") -> None:
    text: Any = model.hf_text_config
    for name, want in (
        ("linear_key_head_dim", GDN_HEAD_DIM),
        ("linear_value_head_dim", GDN_HEAD_DIM),
        ("linear_conv_kernel_dim", GDN_CONV_WIDTH),
    ):
        if (got := getattr(text, name, None)) != want:
            _refuse(f"the target's {name} is {got}", f"use a target with {want}")
    if text.linear_num_value_heads % text.linear_num_key_heads:
        _refuse(
            f"the target has {text.linear_num_value_heads} GDN value heads for "
            f"{text.linear_num_key_heads} key heads",
            "use a target whose value heads are a multiple of its key heads",
        )
    cache = cfg.cache_config
    if cache.mamba_ssm_cache_dtype == "auto":
        # the accepted path is replayed in f32 and written once; keep what it computes
        cache.mamba_ssm_cache_dtype = "float32"
    if cache.mamba_ssm_cache_dtype != "float32":
        _refuse(
            f"ddtree keeps GDN states in float32, not {cache.mamba_ssm_cache_dtype}",
            "set --mamba-ssm-cache-dtype float32",
        )
    if cache.mamba_cache_dtype not in ("auto", "float32", _dtype_name(model.dtype)):
        _refuse(
            f"ddtree keeps convolution states in the model's dtype or float32, not {cache.mamba_cache_dtype}",
            "set --mamba-cache-dtype auto",
        )


def _verify_gdn_prefill(cfg: "VllmConfig") -> None:
    """vLLM would find out in the first prompt."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    _, backend = qwen_gdn_linear_attn._resolve_gdn_prefill_backend(cfg)
    if backend == "flashinfer" and not _is_installed("flashinfer"):
        _refuse(
            "vLLM's prefill of GDN layers on this GPU needs FlashInfer, which is not installed",
            "install flashinfer-python or set --gdn-prefill-backend triton",
        )


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _verify_batch(cfg: "VllmConfig") -> None:
    spec = cfg.speculative_config
    assert spec is not None and spec.tree_budget is not None and spec.tree_horizon is not None
    # one whole tree with its root, and the slots vLLM 0.32 sets aside for the drafter
    rows = spec.tree_budget + 1 + spec.tree_horizon + 1
    tokens = cfg.scheduler_config.max_num_batched_tokens
    if tokens < rows:
        _refuse(
            f"--max-num-batched-tokens {tokens} cannot hold one tree of {spec.tree_budget} nodes",
            f"raise it to {rows} or lower --speculative-tree-budget",
        )


def verify_state_block(tree_budget: int, block_size: int) -> None:
    """Refuse trees that could cross two recurrent-state blocks in one round.

    The cache manager hands out at most one new state block per request and step. The final size
    is known where the KV cache is allocated, and not to vLLM's engine core before.
    """
    if tree_budget + 1 > block_size:
        _refuse(
            f"tree_budget {tree_budget} exceeds the state block of {block_size} tokens",
            f"set --speculative-tree-budget to at most {block_size - 1} or disable prefix caching",
        )


def budget_tiers(vllm_config: "VllmConfig") -> list[tuple[int, int, int]]:
    """(first, last, nodes): steps of first..last requests draft that many nodes for each, so that
    trees never have more than MAX_VERIFY_ROWS rows, roots included; 0 where no tree fits.

    vLLM itself runs no more requests at once than its drafter has rows for."""
    spec = vllm_config.speculative_config
    assert spec is not None and spec.tree_budget is not None
    most = vllm_config.scheduler_config.max_num_seqs
    tiers, first = [], 1
    for nodes in (spec.tree_budget, *(n for n in SMALLER_BUDGETS if n < spec.tree_budget)):
        last = min(MAX_VERIFY_ROWS // (nodes + 1), most)
        if last >= first:
            tiers.append((first, last, nodes))
            first = last + 1
    if first <= most:
        tiers.append((first, most, 0))
    return tiers


def max_trees(vllm_config: "VllmConfig") -> int:
    """Requests that a step may verify with the whole budget; vLLM's warm-up verifies no more."""
    return budget_tiers(vllm_config)[0][1]


def max_tree_rows(vllm_config: "VllmConfig") -> int:
    """Rows of trees that a step holds, except where requests keep the budget of a smaller batch."""
    tiers = budget_tiers(vllm_config)
    most = max(last * (nodes + 1) for _, last, nodes in tiers if nodes)
    return min(most, vllm_config.scheduler_config.max_num_batched_tokens)


def graph_batches(vllm_config: "VllmConfig") -> list[tuple[int, int]]:
    """(rows per request, requests) of the target's FULL CUDA graphs: the batches of each tier,
    plain decodes where it has no trees, within vLLM's largest graph."""
    largest = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    largest = min(largest, vllm_config.scheduler_config.max_num_batched_tokens)
    return [
        (nodes + 1, count)
        for first, last, nodes in budget_tiers(vllm_config)
        for count in _request_counts(first, min(last, largest // (nodes + 1)))
    ]


def drafter_graph_batches(vllm_config: "VllmConfig") -> list[tuple[int, int]]:
    """The same of the drafter's, for as many requests as get trees in a graph of the target."""
    spec = vllm_config.speculative_config
    assert spec is not None and spec.tree_horizon is not None
    rows = spec.tree_horizon + 1
    most = max((n for length, n in graph_batches(vllm_config) if length > 1), default=0)
    most = min(most, vllm_config.scheduler_config.max_num_batched_tokens // rows)
    return [(rows, count) for count in _request_counts(1, most)]


def _request_counts(first: int, last: int) -> list[int]:
    """Sizes for first..last requests. A padding request costs as much as a real one, so every
    count up to 8, then steps of at most a quarter."""
    counts, count = [], 1
    while count < last:
        if count >= first:
            counts.append(count)
        count += 1 << max(count.bit_length() - 3, 0)
    return [*counts, last] if first <= last else []


def _log() -> "logging.Logger":
    from vllm.logger import init_logger

    return init_logger("vllm.ddtree")


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_quantised_cache(dtype: str | None, what: str) -> None:
    if dtype not in (None, "auto", "bfloat16", "float16", "float32"):
        _refuse(f"ddtree does not support a quantised KV cache ({what} {dtype})", "set it to auto")


def _refuse(problem: str, change: str) -> None:
    raise ValueError(f"{problem}; {change}.")
