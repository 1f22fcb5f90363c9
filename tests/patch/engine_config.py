# SPDX-License-Identifier: Apache-2.0
"""Runs cases in a patched vLLM and prints what came of them, as JSON.

    PYTHONPATH=OVERLAY:vllm_patch engine_config.py < cases.json

A case is {"call": NAME, ...}; its result is {"value": ...} or {"error": text}. The overlay is an
importable vLLM (vllm_trees.overlay). Triton gets an empty "cpu" backend, as in vllm_cpu_runtime,
and no model is loaded.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import re
import sys
from unittest import mock

import triton.backends


class Backend:
    compiler = None

    class driver:
        @staticmethod
        def is_active():
            return False


triton.backends.backends["cpu"] = Backend

from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

# vLLM looks at a model class in a process of its own, to keep CUDA out of this one
registry._run_in_subprocess = lambda function: function()


def engine_config(args, env=(), fakes=()):
    """EngineArgs(**args).create_engine_config(), under environment variables and faked facts."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, dict(env)))
        for name, value in dict(fakes).items():
            if isinstance(value, str):  # "?x" is a function that returns x
                value = functools.partial(lambda x, *_: x, json.loads(value[1:]))
            stack.enter_context(mock.patch(name, value))
        return EngineArgs(**args).create_engine_config()


def summary(config):
    spec = config.speculative_config
    return {
        "method": spec.method,
        "tree_budget": getattr(spec, "tree_budget", None),
        "tree_horizon": getattr(spec, "tree_horizon", None),
        "verify_mode": getattr(spec, "verify_mode", None),
        "tree_scores": getattr(spec, "tree_scores", None),
        "tree_spine": getattr(spec, "tree_spine", None),
        "num_speculative_tokens": spec.num_speculative_tokens,
        "lookahead": config.num_lookahead_tokens,
        "draft_slots": spec.max_num_new_slots_for_drafting,
        "query_len": config.uniform_decode_query_len,
        "hash": spec.compute_hash(),
        "ssm_dtype": config.cache_config.mamba_ssm_cache_dtype,
        "v2": config.use_v2_model_runner,
        "mamba_cache_mode": config.cache_config.mamba_cache_mode,
    }


def call_config(case):
    return summary(engine_config(case["args"], case.get("env", ()), case.get("fakes", ())))


def call_command_line(case):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(case["argv"]))
    return summary(args.create_engine_config())


def call_copy(case):
    """load_dflash_model rebuilds the config of a speculator, whose token count is the horizon."""
    from vllm.config import replace

    config = engine_config(case["args"])
    spec = config.speculative_config = copy.copy(config.speculative_config)
    spec.num_speculative_tokens = spec.tree_horizon
    return summary(replace(config, cache_config=replace(config.cache_config)))


def call_state_shapes(case):
    from vllm.model_executor.models import ModelRegistry

    config = engine_config(case["args"])
    cls, _ = ModelRegistry.resolve_model_cls(
        config.model_config.architecture, model_config=config.model_config
    )
    return cls.get_mamba_state_shape_from_config(config)


def call_state_slots(case):
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    config = engine_config(case["args"])
    config.cache_config.mamba_block_size = 64
    layer = mock.Mock(spec=MambaBase, mamba_type="gdn_attention", is_kv_cache_tp_replicated=False)
    layer.get_state_shape.return_value = ((3, 8),)
    layer.get_state_dtype.return_value = ()
    return MambaBase.get_kv_cache_spec(layer, config).num_speculative_blocks


def capture_sizes(config, **chosen):
    """What vLLM chooses on a GPU, or makes of the user's choice. On the CPU it removes them."""
    from vllm.config import CUDAGraphMode

    compilation = config.compilation_config
    compilation.cudagraph_capture_sizes = chosen.get("sizes")
    compilation.max_cudagraph_capture_size = chosen.get("max_size")
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config._set_cudagraph_sizes()
    return compilation.cudagraph_capture_sizes


def call_capture_sizes(case):
    return capture_sizes(engine_config(case["args"]))


def call_graphs(case):
    """Graphs of target and drafter as (rows per request, requests, rows), vLLM's beside ours; what
    every batch of a tier and every mixed batch finds; and what is said about them."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils
    from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager
    from vllm_ddtree import config as ddtree_config
    from vllm_ddtree import graphs

    config = engine_config(case["args"])
    capture_sizes(config, **case.get("chosen", {}))
    spec = config.speculative_config

    def manager(cls, mode, rows):
        with (
            mock.patch.object(cudagraph_utils, "get_pp_group"),
            mock.patch.object(type(current_platform), "get_global_graph_pool"),
        ):
            made = cls(config, torch.device("cpu"), mode, decode_query_len=rows)
        made._graphs_captured = True
        return made

    def graphs_of(manager):
        return {
            mode.name: [(d.uniform_token_count, d.num_reqs, d.num_tokens) for d in descs]
            for mode, descs in manager._capture_descs.items()
        }

    def found(manager, rows, requests):
        desc = manager.dispatch(requests, rows * requests, rows, 0)
        return desc.num_reqs if desc.cg_mode == CUDAGraphMode.FULL else None

    def mixed(manager):
        descs = [manager.dispatch(1, tokens, None, 0) for tokens in range(1, 1025)]
        return [(desc.cg_mode.name, desc.num_tokens) for desc in descs]

    mode = CUDAGraphMode[case.get("mode", "FULL_AND_PIECEWISE")]
    target = manager(cudagraph_utils.ModelCudaGraphManager, mode, spec.tree_budget + 1)
    stock = {"graphs": graphs_of(target), "mixed": mixed(target)}
    graphs.capture_trees(target)
    tiers = ddtree_config.budget_tiers(config)
    value = {
        "stock": stock,
        "graphs": graphs_of(target),
        "mixed": mixed(target),
        "tiers": tiers,
        "found": [
            [found(target, nodes + 1, n) for n in range(1, last + 1)] for _, last, nodes in tiers
        ],
        "max_tree_rows": ddtree_config.max_tree_rows(config),
        "advice": graphs.advise(target),
    }

    # the drafter's view of the config, as DDTreeSpeculator makes it
    config = copy.copy(config)
    config.speculative_config = copy.copy(spec)
    config.speculative_config.num_speculative_tokens = spec.tree_horizon
    config.speculative_config.num_speculative_tokens_per_batch_size = None
    rows = spec.tree_horizon + 1
    drafter = manager(DFlashCudaGraphManager, CUDAGraphMode.FULL_DECODE_ONLY, rows)
    graphs.capture_batches(drafter, ddtree_config.drafter_graph_batches(config))
    value["drafter"] = graphs_of(drafter)
    value["drafter_found"] = [found(drafter, rows, n) for n in range(1, 129)]
    return value


def call_warmup(case):
    """Requests that vLLM's kernel warm-up starts with; its first step is stopped."""
    from vllm.v1.worker.gpu import warmup

    config = engine_config(case["args"])
    spec = config.speculative_config
    runner = mock.MagicMock(
        vllm_config=config,
        speculative_config=spec,
        scheduler_config=config.scheduler_config,
        num_speculative_steps=spec.num_speculative_tokens,
        decode_query_len=spec.num_speculative_tokens + 1,
        is_pooling_model=False,
        is_encoder_decoder=False,
        block_tables=None,
    )
    runner.kv_cache_config.kv_cache_groups = []

    class FirstStep(Exception):
        pass

    def execute(scheduled):
        raise FirstStep(len(scheduled.scheduled_new_reqs))

    try:
        warmup._warmup_kernels(runner, execute, None)
    except FirstStep as step:
        return step.args[0]


def make_scheduler(config):
    """A real scheduler over one full-attention group; it schedules nothing here."""
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = 16
    attention = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=16,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["attention"], attention)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=32,
        log_stats=True,
    )


def call_metrics(case):
    """Statistics of one step with rounds (nodes, invalid, accepted), as logged and exported."""
    import prometheus_client
    from vllm import SamplingParams
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm

    config = engine_config(case["args"])
    scheduler = make_scheduler(config)
    stats = None
    for nodes, invalid, accepted in case["rounds"]:
        stats = scheduler.make_spec_decoding_stats(
            stats, nodes, accepted, {"r": invalid} if invalid else None, "r"
        )
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=4), None)
    scheduler.add_request(request)
    log = SpecDecodingLogging()
    log.observe(stats)
    lines = []
    log.log(lambda text, *values: lines.append(text % values))
    registry = prometheus_client.CollectorRegistry()

    class Counter(prometheus_client.Counter):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | {"registry": registry})

    with mock.patch.object(SpecDecodingProm, "_counter_cls", Counter):
        prom = SpecDecodingProm(config.speculative_config, ["engine"], {0: ["0"]})
    prom.observe(stats)
    samples = {
        sample.name
        + "".join(f"[{v}]" for k, v in sample.labels.items() if k == "position"): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    return {
        "stats": dataclasses.asdict(stats),
        "log": re.sub(r"[\d.]+ tokens/s", "- tokens/s", lines[0]),
        "samples": samples,
        "request_histogram": len(request.spec_decode_metrics.histogram),
    }


def call_sampling(case):
    """What the front end says of each set of sampling parameters; None where it takes them."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import BeamSearchParams

    config = engine_config(case["args"])

    def verify(params):
        if "beam_width" in params:
            beams = BeamSearchParams(max_tokens=4, **params)
            return beams.configure_logprobs(SamplingParams(), config)
        if "logit_bias" in params:  # JSON has no other keys
            params["logit_bias"] = {int(k): v for k, v in params["logit_bias"].items()}
        return SamplingParams(**params).verify(
            config.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            None,
        )

    said = []
    for params in case["params"]:
        try:
            said.append(verify(params))
        except (VLLMValidationError, ValueError, TypeError) as error:
            said.append(str(error))
    return said


def call_modules(case):
    """Which of our modules this process has imported."""
    return [name for name in sys.modules if name.split(".")[0] == "vllm_ddtree"]


def main():
    results = []
    for case in json.load(sys.stdin):
        try:
            results.append({"value": globals()["call_" + case["call"]](case)})
        except (Exception, SystemExit) as exc:
            results.append({"error": f"{type(exc).__name__}: {exc}"})
    json.dump(results, sys.__stdout__)


with contextlib.redirect_stdout(sys.stderr):
    main()
