# SPDX-License-Identifier: Apache-2.0
"""What a patched vLLM makes of "ddtree" configurations, before any model is loaded.

All cases of a version run in one process of that vLLM (engine_config.py); a test looks at its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm_trees

HERE = Path(__file__).parent
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
HYBRID = DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 128,
}
DRAFTER = DENSE | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 1]},
}
DFLASH2 = DRAFTER | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": DRAFTER["dflash_config"] | {"selector_top_k": 16},
}
LILICORR = DRAFTER | {
    "architectures": ["LiLiCorrDraftModel"],
    "dflash_config": DRAFTER["dflash_config"] | {"lilicorr_candidate_topk": 16, "block_size": 8},
}
MODELS = {
    "hybrid": HYBRID,
    "dense": DENSE,
    "drafter": DRAFTER,
    "drafter_block_40": DRAFTER | {"block_size": 40},
    "drafter_without_block": {k: v for k, v in DRAFTER.items() if k != "block_size"},
    "dflash2": DFLASH2,
    "dflash2_of_half": DFLASH2 | {"draft_vocab_size": 256},
    "dflash2_without_k": DRAFTER | {"architectures": ["DFlash2DraftModel"]},
    "lilicorr": LILICORR,
    "beam": DFLASH2 | {"architectures": ["DFlash2BeamDraftModel"]},
    "dspark": DRAFTER | {"architectures": ["Qwen3DSparkModel"]},
    "xpress": DRAFTER | {"architectures": ["Qwen3XPressModel"]},
    "eagle3": DRAFTER | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    "small_gdn": HYBRID | {"linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "wide_conv": HYBRID | {"linear_conv_kernel_dim": 5},
    "odd_gdn_heads": HYBRID | {"linear_num_key_heads": 2, "linear_num_value_heads": 3},
    "head_dim_96": DENSE | {"head_dim": 96},
    "head_dim_32": DENSE | {"head_dim": 32},
    "many_queries": DENSE | {"num_attention_heads": 32, "num_key_value_heads": 1},
    "sliding": DENSE
    | {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 64,
        "use_sliding_window": True,
    },
    "mistral": DENSE
    | {"architectures": ["LlamaForCausalLM"], "model_type": "mistral", "sliding_window": 64},
    "gemma": DENSE | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
}


def ddtree(target="hybrid", drafter="drafter", engine=(), **speculative):
    """EngineArgs for a tree; `speculative` goes into speculative_config."""
    spec = {"method": "ddtree", "model": f"@{drafter}", **speculative}
    return {
        "model": f"@{target}",
        "speculative_config": {k: v for k, v in spec.items() if v is not None},
        "max_model_len": 512,
        "enforce_eager": True,
        **dict(engine),
    }


def engine(**args):
    return ddtree(engine=args)


# name -> (EngineArgs, what the message must say, environment, faked facts)
REFUSED = {
    "budget 0": (ddtree(tree_budget=0), "tree_budget is 0; set it to 1..255 nodes"),
    "budget negative": (ddtree(tree_budget=-4), "tree_budget is -4; set it to 1..255 nodes"),
    "budget 256": (ddtree(tree_budget=256), "tree_budget is 256; set it to 1..255 nodes"),
    "budget for a chain": (
        ddtree(method="dflash", tree_budget=8, num_speculative_tokens=7),
        "tree_budget needs the speculative method 'ddtree'; set method to 'ddtree'",
    ),
    "mode without method": (
        ddtree(method="dflash", verify_mode="coupled", num_speculative_tokens=7),
        "verify_mode needs the speculative method 'ddtree'; set method to 'ddtree'",
    ),
    "mode unknown": (ddtree(verify_mode="typical"), "Input should be 'match' or 'coupled'"),
    "mode of other noise": (
        ddtree(verify_mode="coupled", engine={"use_fp64_gumbel": True}),
        "anticipates float32 noise, not that of --use-fp64-gumbel; remove --use-fp64-gumbel or set",
    ),
    "no drafter": (
        ddtree() | {"speculative_config": {"method": "ddtree"}},
        "ddtree needs a drafter; set --speculative-model to a DFlash drafter",
    ),
    "horizon above block": (
        ddtree(num_speculative_tokens=16),
        "num_speculative_tokens (the tree's depth) is 16; set it to at most 15, "
        "the drafter's block_size - 1",
    ),
    "horizon above maximum": (
        ddtree(drafter="drafter_block_40", num_speculative_tokens=33),
        "is 33; set it to at most 32, the maximum",
    ),
    "no block size": (
        ddtree(drafter="drafter_without_block"),
        "the drafter's config.json has block_size None; set it to the block",
    ),
    # 0.32 itself does not know it
    "drafter dflash2 of the beam family": (ddtree(drafter="beam"), "DFlash2BeamDraftModel"),
    "drafter without candidates": (
        ddtree(drafter="dflash2_without_k"),
        "has selector_top_k None in dflash_config; set it to the number of candidates",
    ),
    "candidates of a part of the vocabulary": (
        ddtree(drafter="dflash2_of_half"),
        "chooses candidates from 256 of 512 tokens; use a drafter with the target's whole vocabulary",
    ),
    "conditional scores of a plain drafter": (
        ddtree(tree_scores="conditional"),
        "tree_scores is conditional, and a DFlashDraftModel does not score pairs of candidates; "
        "remove it or use a DFlash2 or LiLiCorr drafter",
    ),
    "scores unknown": (ddtree(tree_scores="joint"), "Input should be 'conditional' or 'marginal'"),
    "scores without method": (
        ddtree(method="dflash", tree_scores="marginal", num_speculative_tokens=7),
        "tree_scores needs the speculative method 'ddtree'; set method to 'ddtree'",
    ),
    "spine without method": (
        ddtree(method="dflash", tree_spine=False, num_speculative_tokens=7),
        "tree_spine needs the speculative method 'ddtree'; set method to 'ddtree'",
    ),
    "horizon above the head's block": (
        ddtree(drafter="lilicorr", num_speculative_tokens=8),
        "is 8; set it to at most 7, the drafter's block_size - 1",
    ),
    "drafter dspark": (ddtree(drafter="dspark"), "is a Qwen3DSparkModel; use a DFlash drafter"),
    "drafter xpress": (ddtree(drafter="xpress"), "Qwen3XPressModel"),
    "drafter eagle3": (ddtree(drafter="eagle3"), "is a LlamaForCausalLMEagle3; use a DFlash"),
    "drafter is a model": (ddtree(drafter="dense"), "is a Qwen3ForCausalLM; use a DFlash"),
    "block rejection": (
        ddtree(rejection_sample_method="block"),
        "ddtree does not support rejection_sample_method='block'; remove it",
    ),
    "probabilistic drafts": (
        ddtree(draft_sample_method="probabilistic"),
        "ddtree does not support draft_sample_method='probabilistic'; remove it",
    ),
    "local argmax": (
        ddtree(use_local_argmax_reduction=True),
        "ddtree does not support use_local_argmax_reduction=True; remove it",
    ),
    "heterogeneous vocabulary": (
        ddtree(use_heterogeneous_vocab=True),
        "ddtree does not support use_heterogeneous_vocab=True; remove it",
    ),
    "adaptive verification": (
        ddtree(enable_adaptive_verification=True),
        "ddtree does not support enable_adaptive_verification=True; remove it",
    ),
    "dynamic speculation": (
        ddtree(num_speculative_tokens_per_batch_size=[[1, 8, 4]]),
        "ddtree does not support num_speculative_tokens_per_batch_size=",
    ),
    "n-gram mix": (
        ddtree(prompt_lookup_max=4),
        "ddtree does not support prompt_lookup_max=4; remove it: n-gram drafts",
    ),
    "n-gram minimum": (
        ddtree(prompt_lookup_min=2),
        "ddtree does not support prompt_lookup_min=2; remove it: n-gram drafts",
    ),
    "short drafter": (
        ddtree(max_model_len=128),
        "ddtree does not support max_model_len=128; remove it",
    ),
    "quantised draft cache": (
        ddtree(kv_cache_dtype="fp8"),
        "ddtree does not support a quantised KV cache (the drafter's kv_cache_dtype fp8); "
        "set it to auto",
    ),
    "drafter on fewer ranks": (
        ddtree(draft_tensor_parallel_size=1, engine={"tensor_parallel_size": 2}),
        "draft_tensor_parallel_size is 1; remove it",
    ),
    "pipeline parallel": (
        engine(pipeline_parallel_size=2),
        "ddtree does not support pipeline parallelism; set --pipeline-parallel-size 1",
    ),
    "decode context parallel": (
        engine(tensor_parallel_size=2, decode_context_parallel_size=2),
        "decode context parallelism; set --decode-context-parallel-size 1",
    ),
    "prefill context parallel": (
        engine(prefill_context_parallel_size=2),
        "prefill context parallelism; set --prefill-context-parallel-size 1",
    ),
    "dual batch overlap": (
        engine(enable_dbo=True),
        "ddtree does not support dual batch overlap; remove --enable-dbo and --ubatch-size",
    ),
    "microbatches": (engine(ubatch_size=2), "ddtree does not support dual batch overlap"),
    "batch-sharded sampling": (
        engine(enable_batch_sharded_sampling=True),
        "batch-sharded sampling; remove --enable-batch-sharded-sampling",
    ),
    "KV connector": (
        engine(kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}),
        "ddtree does not support KV connectors; remove --kv-transfer-config",
    ),
    "KV offloading": (
        engine(kv_offloading_size=1.0),
        "ddtree does not support KV cache offloading; remove --kv-offloading-size",
    ),
    "data parallelism": (
        engine(data_parallel_size=2, max_num_seqs=64),
        "under data parallelism every step has trees of 31 nodes, and 64 requests with them are "
        "more than a step holds; set --max-num-seqs to at most 16 or --speculative-tree-budget to at most 7.",
    ),
    "data parallelism of many": (
        engine(data_parallel_size=2, max_num_seqs=512),
        "and 512 requests with them are more than a step holds; set --max-num-seqs to at most 16.",
    ),
    "watermarking": (
        engine(watermark_config={"key": "0" * 64}),
        "ddtree does not support watermarking; remove --watermark-config",
    ),
    "routed experts": (
        engine(enable_return_routed_experts=True),
        "returning routed experts; remove --enable-return-routed-experts",
    ),
    "ReplaySSM": (
        engine(use_replayssm=True),
        "ddtree does not support ReplaySSM; remove --use-replayssm",
    ),
    "quantised KV cache": (
        engine(kv_cache_dtype="fp8"),
        "ddtree does not support a quantised KV cache (--kv-cache-dtype fp8); set it to auto",
    ),
    "bf16 states": (
        engine(mamba_ssm_cache_dtype="bfloat16"),
        "ddtree keeps GDN states in float32, not bfloat16; set --mamba-ssm-cache-dtype float32",
    ),
    "convolution states": (
        engine(mamba_cache_dtype="float16"),
        "ddtree keeps convolution states in the model's dtype or float32, not float16; set "
        "--mamba-cache-dtype auto",
    ),
    "pooling": (
        ddtree(target="dense", engine={"runner": "pooling"}),
        "ddtree does not support pooling models; serve a generative model",
    ),
    "diffusion": (
        engine(diffusion_config={"canvas_length": 16}),
        "ddtree does not support diffusion decoding; remove --diffusion-config",
    ),
    "sampling mask": (
        engine(return_sampling_mask=True, logprobs_mode="processed_logprobs"),
        "ddtree does not support sampling masks; remove --return-sampling-mask",
    ),
    "trace replay": (
        engine(enable_trace_replay=True),
        "ddtree does not support trace replay; remove --enable-trace-replay",
    ),
    "prompt embeddings": (
        engine(enable_prompt_embeds=True),
        "ddtree does not support prompt embeddings; remove --enable-prompt-embeds",
    ),
    "attention backend": (
        engine(attention_backend="FLEX_ATTENTION"),
        "ddtree does not support --attention-backend FLEX_ATTENTION; remove it",
    ),
    "small batch": (
        ddtree(tree_budget=63, engine={"max_num_batched_tokens": 64, "max_num_seqs": 4}),
        "--max-num-batched-tokens 64 cannot hold one tree of 63 nodes; raise it to 80 or lower",
    ),
    "unknown target": (
        ddtree(target="gemma"),
        "ddtree does not support the target GemmaForCausalLM; use one of Qwen3_5ForCausalLM",
    ),
    "sliding window": (
        ddtree(target="sliding"),
        "sliding-window or chunked attention (sliding_attention); use a target whose",
    ),
    "sliding window everywhere": (
        ddtree(target="mistral"),
        "ddtree does not support sliding-window or chunked attention; use a target whose",
    ),
    "attention head dim": (
        ddtree(target="head_dim_96"),
        "the target's attention head dim is 96; use a target with head dim 32, 64, 128, 256",
    ),
    "query heads": (
        ddtree(target="many_queries"),
        "the target has 32 query heads for 1 KV heads per rank; use a target with at most 16",
    ),
    "GDN head dim": (
        ddtree(target="small_gdn"),
        "the target's linear_key_head_dim is 64; use a target with 128",
    ),
    "GDN conv width": (
        ddtree(target="wide_conv"),
        "the target's linear_conv_kernel_dim is 5; use a target with 4",
    ),
    "GDN heads": (
        ddtree(target="odd_gdn_heads"),
        "the target has 3 GDN value heads for 2 key heads; use a target whose value heads",
    ),
    "V1 runner": (
        ddtree(),
        "ddtree needs Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER",
        {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    "what V2 has not": (
        ddtree(),
        "ddtree needs Model Runner V2; remove what it does not support: this, that",
        {},
        {
            "vllm.config.vllm.VllmConfig._get_v2_model_runner_unsupported_features": (
                '?["this", "that"]'
            )
        },
    ),
    "no Triton": (
        ddtree(),
        "ddtree needs Model Runner V2, which needs Triton; install triton",
        {},
        {"vllm.triton_utils.HAS_TRITON": False},
    ),
    "other platform": (
        ddtree(),
        "ddtree serves on NVIDIA GPUs and on the CPU, not on",
        {},
        {"vllm.platforms.cpu.CpuPlatform.is_cpu": "?false"},
    ),
    "vLLM version": (
        ddtree(),
        "ddtree does not support vLLM 0.31.0; install one of 0.32.0, 0.33.0",
        {},
        {"vllm_ddtree.compat.vllm_version": '?"0.31.0"'},
    ),
}

ACCEPTED = {
    "default": (ddtree(), {"tree_budget": 31, "tree_horizon": 15, "num_speculative_tokens": 31}),
    "coupled by default": (ddtree(), {"verify_mode": "coupled"}),
    "match": (ddtree(verify_mode="match"), {"verify_mode": "match"}),
    "match with other noise": (ddtree(engine={"use_fp64_gumbel": True}), {"verify_mode": "match"}),
    "coupled": (ddtree(verify_mode="coupled"), {"verify_mode": "coupled", "tree_budget": 31}),
    "marginal": (ddtree(), {"tree_scores": "marginal", "tree_spine": None}),
    "marginal, said": (ddtree(tree_scores="marginal"), {"tree_scores": "marginal"}),
    "dflash2": (ddtree(drafter="dflash2"), {"tree_scores": "conditional", "tree_horizon": 15}),
    "dflash2, marginal": (
        ddtree(drafter="dflash2", tree_scores="marginal"),
        {"tree_scores": "marginal"},
    ),
    "dflash2, spine": (ddtree(drafter="dflash2", tree_spine=True), {"tree_spine": True}),
    "lilicorr": (ddtree(drafter="lilicorr"), {"tree_scores": "conditional", "tree_horizon": 7}),
    "budget 1": (ddtree(tree_budget=1), {"tree_budget": 1, "tree_horizon": 1}),
    "budget 255": (ddtree(tree_budget=255), {"tree_budget": 255, "tree_horizon": 15}),
    "horizon": (ddtree(num_speculative_tokens=4), {"tree_budget": 31, "tree_horizon": 4}),
    "horizon clipped": (
        ddtree(num_speculative_tokens=15, tree_budget=7),
        {"tree_budget": 7, "tree_horizon": 7},
    ),
    "deep drafter": (ddtree(drafter="drafter_block_40"), {"tree_horizon": 31}),
    "deepest": (ddtree(drafter="drafter_block_40", tree_budget=63), {"tree_horizon": 32}),
    "dense": (ddtree(target="dense"), {"mamba_cache_mode": "none"}),
    "dense small heads": (ddtree(target="head_dim_32"), {"method": "dflash"}),
    "f32 states": (ddtree(), {"ssm_dtype": "float32", "mamba_cache_mode": "align"}),
    "no prefix caching": (engine(enable_prefix_caching=False), {"mamba_cache_mode": "none"}),
    "data parallel": (engine(data_parallel_size=2, max_num_seqs=16), {"tree_budget": 31}),
    "bf16 cache": (engine(kv_cache_dtype="bfloat16"), {"method": "dflash"}),
}

# Of these vLLM refuses the first three with any speculation.
SAMPLING = [{"min_p": 0.1}, {"logit_bias": {"3": 1.5}}, {"beam_width": 2, "allowed_token_ids": [3]}]
SAMPLING += [{"top_p": 0.9, "top_k": 5}, {"allowed_token_ids": [3]}, {"logprob_token_ids": [3]}]
SAMPLING += [{"allowed_token_ids": [512]}]

PER_REQUEST = {"per_request_spec_decode_metrics": "detailed"}
CHAIN = ddtree(method="dflash", num_speculative_tokens=7)
STOCK = {
    "config": {"call": "config", "args": CHAIN},
    "dense": {"call": "config", "args": CHAIN | {"model": "@dense"}},
    "no speculation": {"call": "state_shapes", "args": CHAIN | {"speculative_config": None}},
    "capture": {"call": "capture_sizes", "args": CHAIN | {"enforce_eager": False}},
    "shapes": {"call": "state_shapes", "args": CHAIN},
    "slots": {"call": "state_slots", "args": CHAIN},
    "warm-up": {"call": "warmup", "args": CHAIN | {"max_num_seqs": 200}},
    "metrics": {
        "call": "metrics",
        "args": CHAIN | PER_REQUEST,
        "rounds": [[7, 0, 7], [7, 2, 1], [3, 0, 0]],
    },
    "sampling": {"call": "sampling", "args": CHAIN, "params": SAMPLING},
    "modules": {"call": "modules"},
}
# rounds of (nodes, of them invalid under a grammar, accepted): two whole trees, one cut short to
# 3 nodes, one cut by a grammar to 12
ROUNDS = [[31, 0, 15], [31, 0, 2], [3, 0, 1], [31, 19, 0]]
OTHERS = {
    "warm-up": {"call": "warmup", "args": engine(max_num_seqs=200, max_num_batched_tokens=8192)},
    "copy": {"call": "copy", "args": ddtree()},
    "sampling": {"call": "sampling", "args": ddtree(), "params": SAMPLING},
    "shapes": {"call": "state_shapes", "args": ddtree()},
    "slots": {"call": "state_slots", "args": ddtree()},
    "metrics": {
        "call": "metrics",
        "args": ddtree(engine=PER_REQUEST),
        "rounds": ROUNDS,
    },
    "command line": {
        "call": "command_line",
        "argv": [
            *("--model", "@hybrid", "--speculative-method", "ddtree"),
            *("--speculative-model", "@drafter", "--speculative-tree-budget", "12"),
            *("--max-model-len", "512"),
        ],
    },
    "command line, vLLM's names": {
        "call": "command_line",
        "argv": [
            *("--model", "@hybrid", "--spec-method", "ddtree", "--spec-model", "@drafter"),
            *("--spec-tree-budget", "12", "--spec-tokens", "5", "--max-model-len", "512"),
            *("--spec-verify-mode", "match"),
        ],
    },
    "command line, JSON": {
        "call": "command_line",
        "argv": [
            *("--model", "@hybrid", "--max-model-len", "512", "--speculative-config"),
            '{"method": "ddtree", "model": "@drafter", "tree_budget": 12}',
        ],
    },
    "command line, twice": {
        "call": "command_line",
        "argv": [
            *("--model", "@hybrid", "--max-model-len", "512", "--speculative-config"),
            '{"method": "ddtree", "model": "@drafter", "tree_budget": 12}',
            *("--speculative-tree-budget", "12"),
        ],
    },
}


GRAPHS = {
    f"{budget} nodes, {requests} requests": {
        "call": "graphs",
        "args": ddtree(
            tree_budget=budget,
            engine={
                "enforce_eager": False,
                "max_num_seqs": requests,
                "max_num_batched_tokens": 8192,
            },
        ),
    }
    for budget in (15, 31, 63, 100)
    for requests in (8, 256, 1024)
}
_GRAPHS = GRAPHS["31 nodes, 256 requests"]
OTHERS |= {f"graphs of {name}": case for name, case in GRAPHS.items()} | {
    "graphs of chosen sizes": _GRAPHS | {"chosen": {"sizes": [1, 8, 96, 1024]}},
    "graphs up to 64": _GRAPHS | {"chosen": {"max_size": 64}},
    "graphs without trees": _GRAPHS | {"chosen": {"sizes": [1, 2, 4]}},
    "graphs for mixed batches": _GRAPHS | {"mode": "PIECEWISE"},
    "no graphs": _GRAPHS | {"args": _GRAPHS["args"] | {"enforce_eager": True}, "mode": "NONE"},
}


# On a GPU, as far as the configuration asks: what is missing, and the sentence for it.
ON_CUDA = {
    "vllm.platforms.cpu.CpuPlatform.is_cpu": "?false",
    "vllm.platforms.cpu.CpuPlatform.is_cuda": "?true",
    "vllm.v1.attention.backends.fa_utils.get_flash_attn_version": "?3",
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn._resolve_gdn_prefill_backend": (
        '?["auto", "flashinfer"]'
    ),
    "vllm_ddtree.config._is_installed": "?true",
}
MISSING_ON_CUDA = {
    "FlashAttention": (
        {"vllm.v1.attention.backends.fa_utils.get_flash_attn_version": "?null"},
        "ddtree needs FlashAttention; install a vLLM that was built with it.",
    ),
    "FlashInfer": (
        {"vllm_ddtree.config._is_installed": "?false"},
        "needs FlashInfer, which is not installed; install flashinfer-python or set "
        "--gdn-prefill-backend triton.",
    ),
    "nothing": ({}, None),
}


def cases():
    # the stock cases come first: nothing of ours may be imported by then
    for name, case in STOCK.items():
        yield f"stock {name}", case
    yield from OTHERS.items()
    for name, (args, _, *rest) in REFUSED.items():
        env, fakes = (*rest, {}, {})[:2]
        yield f"refused {name}", {"call": "config", "args": args, "env": env, "fakes": fakes}
    for name, (args, _) in ACCEPTED.items():
        yield f"accepted {name}", {"call": "config", "args": args}
    for name, (fakes, _) in MISSING_ON_CUDA.items():
        call = {"call": "config", "args": ddtree(), "fakes": ON_CUDA | fakes}
        yield f"on a GPU without {name}", call


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with a config.json per model and no weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def run_cases(named, version, files, models, folder):
    """Case name -> result, in this version of vLLM with `files` in place of its own."""
    pytest.importorskip("torch", reason="vLLM's configuration needs torch")
    text = json.dumps(list(named.values()))
    for name in sorted(MODELS, key=len, reverse=True):
        text = text.replace(f"@{name}", str(models / name))
    overlay = vllm_trees.overlay(folder / "site-packages", version, files)
    # the tests' own runner settings would decide what the cases are to show
    own = ("DDTREE_CPU_RUNTIME", "VLLM_USE_V2_MODEL_RUNNER")
    done = subprocess.run(
        [sys.executable, HERE / "engine_config.py"],
        input=text,
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in own}
        | {
            "PYTHONPATH": f"{overlay}:{vllm_trees.PATCH}",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TRITON_INTERPRET": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(named, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="session")
def results(version, pristine, tool, models, tmp_path_factory):
    """All cases in a patched vLLM."""
    patched = tool.load_series(version).patched(pristine)
    return run_cases(dict(cases()), version, patched, models, tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="session")
def stock(version, pristine, models, tmp_path_factory):
    """The cases without a tree in vLLM as released."""
    return run_cases(STOCK, version, pristine, models, tmp_path_factory.mktemp("stock"))


@pytest.mark.parametrize("name", REFUSED)
def test_refused(results, name):
    result = results[f"refused {name}"]
    assert REFUSED[name][1] in result.get("error", f"accepted: {result}")


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(results, name):
    result = results[f"accepted {name}"]
    assert "value" in result, result
    value, want = result["value"], ACCEPTED[name][1]
    assert {key: value[key] for key in want} == want
    assert value["method"] == "dflash" and value["v2"]
    assert value["num_speculative_tokens"] == value["tree_budget"]
    assert value["query_len"] == value["tree_budget"] + 1
    assert value["lookahead"] == value["tree_horizon"] + 1


def test_hashes_tell_trees_apart(results):
    names = ("default", "budget 1", "budget 255", "horizon")
    hashes = {results[f"accepted {name}"]["value"]["hash"] for name in names}
    assert len(hashes | {results["stock config"]["value"]["hash"]}) == len(names) + 1


def test_draft_slots_are_the_horizon(results, version):
    """0.32 charges draft slots to the input budget; 0.33 does not."""
    want = {"0.32.0": 15, "0.33.0": 0}[version]
    assert results["accepted default"]["value"]["draft_slots"] == want


def test_a_tree_config_survives_vllms_copies(results):
    value = results["copy"]["value"]
    assert value == results["accepted default"]["value"] | {
        "num_speculative_tokens": 15,
        "query_len": 16,
    }


@pytest.mark.parametrize("name", ["command line", "command line, JSON"])
def test_command_line(results, name):
    value = results[name]["value"]
    assert (value["method"], value["tree_budget"], value["tree_horizon"]) == ("dflash", 12, 12)


def test_command_line_with_vllms_names(results):
    value = results["command line, vLLM's names"]["value"]
    assert (value["method"], value["tree_budget"], value["tree_horizon"]) == ("dflash", 12, 5)
    assert value["verify_mode"] == "match"


def test_command_line_twice(results):
    assert "mutually exclusive" in results["command line, twice"]["error"]


def test_one_recurrent_state_and_a_narrow_window(results):
    assert results["shapes"]["value"] == [[3, 512], [2, 128, 128]]
    assert results["slots"]["value"] == 0


def test_state_block_holds_a_tree():
    from vllm_ddtree import config

    config.verify_state_block(31, 32)
    with pytest.raises(ValueError, match="set --speculative-tree-budget to at most 30"):
        config.verify_state_block(31, 31)


def test_budgets_fall_with_the_number_of_requests():
    from vllm_ddtree import config

    def tiers(budget, requests):
        return config.budget_tiers(
            SimpleNamespace(
                speculative_config=SimpleNamespace(tree_budget=budget),
                scheduler_config=SimpleNamespace(max_num_seqs=requests),
            )
        )

    assert tiers(63, 8) == [(1, 8, 63)]
    assert tiers(63, 128) == [(1, 8, 63), (9, 16, 31), (17, 32, 15), (33, 64, 7), (65, 128, 0)]
    assert tiers(255, 3) == [(1, 2, 255), (3, 3, 127)]
    assert tiers(20, 30) == [(1, 24, 20), (25, 30, 15)]
    assert config.describe_tiers(tiers(63, 8)) == (
        "ddtree: up to 8 requests in a step get trees of 63 nodes each, and logits are sampled in "
        "chunks of at most 1 GiB in float32."
    )
    assert config.describe_tiers(tiers(31, 128)) == (
        "ddtree: up to 16 requests in a step get trees of 31 nodes each, up to 32 of 15, up to 64 "
        "of 7, 65 and more none, and logits are sampled in chunks of at most 1 GiB in float32."
    )


@pytest.mark.parametrize("name", MISSING_ON_CUDA)
def test_what_a_gpu_needs(results, version, name):
    result = results[f"on a GPU without {name}"]
    text = MISSING_ON_CUDA[name][1]
    if version == "0.32.0":
        text = "ddtree on a GPU needs vLLM 0.33.0; upgrade vLLM."
    assert text in result["error"] if text else result["value"]["method"] == "dflash", result


def test_warm_up_verifies_what_a_step_may_hold(results, version):
    """0.32's CPU worker does not call it."""
    assert results["warm-up"]["value"] == {"0.32.0": 200, "0.33.0": 16}[version]


def test_what_the_front_end_refuses_of_chains_it_takes_of_trees(results, stock, version):
    chain, tree = (
        [text is None for text in case["sampling"]["value"]] for case in (stock, results)
    )
    assert chain == [False] * 3 + [True] * 3 + [False]
    # 0.32 has no allowlists of beams
    assert tree == [True, True, version == "0.33.0", True, True, True, False]
    assert "out-of-vocab" in results["sampling"]["value"][-1]


def pairs(graphs):
    return [(rows, requests) for rows, requests, _ in graphs]


@pytest.mark.parametrize("name", GRAPHS)
def test_every_batch_of_a_tier_has_a_graph(results, name):
    value = results[f"graphs of {name}"]["value"]
    full = pairs(value["graphs"]["FULL"])
    for (first, last, nodes), found in zip(value["tiers"], value["found"], strict=True):
        captured = sorted(n for rows, n in full if rows == nodes + 1)
        # 512 is vLLM's largest graph too, so some plain decodes have none
        assert first <= captured[0] and captured[-1] == min(last, 512 // (nodes + 1))
        for requests, got in enumerate(found[: captured[-1]], start=1):
            assert got == min(n for n in captured if n >= requests)
            if requests >= first:
                assert got == requests if requests <= 8 else got <= 1.25 * requests
        assert not nodes or len(found) == captured[-1]
    assert len(full) == len(set(full))
    assert {rows for rows, _ in full} == {nodes + 1 for _, _, nodes in value["tiers"]}
    # one stash has the rows of every graph of trees
    assert max(rows * n for rows, n in full if rows > 1) <= value["max_tree_rows"] <= 512
    assert value["advice"] is None


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_few(results, name):
    value = results[f"graphs of {name}"]["value"]
    graphs = value["graphs"]["FULL"]
    print(name, len(graphs), "graphs, of vLLM", len(value["stock"]["graphs"]["FULL"]))
    assert len(graphs) <= 36
    assert [rows for _, _, rows in graphs] == sorted((rows for _, _, rows in graphs), reverse=True)


@pytest.mark.parametrize("name", GRAPHS)
def test_mixed_batches_find_what_vllm_chose(results, name):
    value = results[f"graphs of {name}"]["value"]
    assert value["graphs"]["PIECEWISE"] == value["stock"]["graphs"]["PIECEWISE"]
    assert value["mixed"] == value["stock"]["mixed"]


@pytest.mark.parametrize("name", GRAPHS)
def test_the_drafter_has_graphs_for_the_targets_trees(results, name):
    value = results[f"graphs of {name}"]["value"]
    most = max(n for rows, n, _ in value["graphs"]["FULL"] if rows > 1)
    captured = [n for _, n, _ in value["drafter"]["FULL"]]
    assert max(captured) == most
    for requests, got in enumerate(value["drafter_found"], start=1):
        assert got == min((n for n in captured if n >= requests), default=None)
        assert got is None if requests > most else got <= 1.25 * requests


def test_chosen_graph_sizes_limit_the_graphs_of_trees(results):
    value = results["graphs of chosen sizes"]["value"]
    assert [rows for _, _, rows in value["graphs"]["PIECEWISE"]] == [1024, 96, 8, 1]
    # not beyond what the stash holds
    assert max(rows for length, _, rows in value["graphs"]["FULL"] if length > 1) == 512
    assert value["advice"] is None
    value = results["graphs up to 64"]["value"]
    assert pairs(value["graphs"]["FULL"]) == [(32, 2), (32, 1)]
    assert value["advice"] == (
        "ddtree: rounds of more than 64 rows are slow, since the largest CUDA graph ends there; "
        "set max_cudagraph_capture_size to 512."
    )
    value = results["graphs without trees"]["value"]
    assert not value["graphs"].get("FULL") and not value["drafter"].get("FULL")
    assert "rounds of more than 4 rows are slow" in value["advice"]


def test_slow_modes_say_what_to_change(results):
    slow = "ddtree: rounds are slow without FULL CUDA graphs (cudagraph_mode is "
    assert results["graphs for mixed batches"]["value"]["advice"] == (
        f"{slow}PIECEWISE); set cudagraph_mode to FULL_AND_PIECEWISE."
    )
    assert results["no graphs"]["value"]["advice"] == f"{slow}NONE); remove --enforce-eager."


def test_metrics_count_depth(results):
    value = results["metrics"]["value"]
    stats = value["stats"]
    assert stats["num_drafts"] == 4
    assert stats["num_accepted_tokens"] == 18
    # min(nodes, horizon 15) per round; a tree cut to 3 nodes drafts at most 3 levels
    assert stats["num_draft_tokens"] == 15 + 15 + 3 + 12
    assert stats["num_tree_nodes"] == 31 + 31 + 3 + 12
    assert stats["num_accepted_tokens_per_pos"] == [3, 2] + [1] * 13
    assert stats["num_draft_tokens_per_pos"] == [4, 4, 4] + [3] * 9 + [2] * 3
    assert "Mean acceptance length: 5.50" in value["log"]
    assert "Avg Draft acceptance rate: 40.0%" in value["log"]
    assert value["log"].count("0.250") == 13
    samples = value["samples"]
    assert samples["vllm:spec_decode_num_draft_tokens_total"] == 45
    assert samples["vllm:spec_decode_num_accepted_tokens_total"] == 18
    assert samples["vllm:spec_decode_num_tree_nodes_total"] == 77
    per_position = [v for k, v in samples.items() if "per_pos" in k]
    assert per_position == stats["num_accepted_tokens_per_pos"]
    assert value["request_histogram"] == 16


@pytest.mark.parametrize("name", STOCK)
def test_without_a_tree_nothing_changes(results, stock, name):
    assert "error" not in stock[name], stock[name]
    got, want = results[f"stock {name}"]["value"], stock[name]["value"]
    if name == "metrics":
        assert got["stats"].pop("num_tree_nodes") == 7 + 5 + 3
    assert got == want


def test_the_comparison_with_stock_can_fail(stock, results):
    assert stock["shapes"]["value"] == [[10, 512], [2, 128, 128]] != results["shapes"]["value"]
    assert stock["slots"]["value"] == 7
    assert stock["metrics"]["value"]["stats"]["num_accepted_tokens_per_pos"] == [2] + [1] * 6
