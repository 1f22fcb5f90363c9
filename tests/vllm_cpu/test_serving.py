# SPDX-License-Identifier: Apache-2.0
"""A whole vLLM engine with each kernel launch done by both interpreters and compared."""

import os
from pathlib import Path

import compare
import pytest

MODELS = Path(__file__).resolve().parents[1] / "models"


@pytest.fixture(scope="module")
def engine():
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    engine = LLM(
        model=os.environ.get("MODEL", str(MODELS / "target")),
        speculative_config={
            "method": "dflash",
            "model": os.environ.get("DRAFTER", str(MODELS / "drafter")),
            "num_speculative_tokens": 5,
        },
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        seed=0,
    )
    yield engine
    engine.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0},
        {
            "temperature": 0.8,
            "seed": 3,
            "top_k": 20,
            "repetition_penalty": 1.2,
            "logprobs": 2,
            "min_tokens": 4,
        },
    ],
    ids=["greedy", "sampled"],
)
def test_every_launch_of_a_request(engine, parameters):
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    executor = engine.llm_engine.engine_core.engine_core.model_executor
    assert isinstance(executor.driver_worker.worker.model_runner, GPUModelRunner)
    prompts = ["def read(self, size", "import os\nfor"]
    with compare.every_launch() as launches:
        outputs = engine.generate(
            prompts, SamplingParams(max_tokens=8, **parameters), use_tqdm=False
        )
    assert all(output.outputs[0].token_ids for output in outputs)
    used = {
        "_prepare_dflash_inputs_kernel",
        "_rejection_kernel",
        "_compute_slot_mappings_kernel",
        "_post_update_kernel",
    }
    assert used <= launches.keys(), launches
