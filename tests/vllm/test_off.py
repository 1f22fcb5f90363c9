# SPDX-License-Identifier: Apache-2.0
"""A patched vLLM that serves no trees imports none of our code."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
import conftest
from engine import Engine, prompts
from vllm.config import SpeculativeConfig

assert "tree_budget" in SpeculativeConfig.__dataclass_fields__, "vLLM is not patched"
for spec in (
    None,
    {"method": "dflash", "num_speculative_tokens": 15},
    # Last, so that it cannot have imported anything for the others.
    {"method": "ddtree", "tree_budget": 15},
):
    with Engine(spec) as engine:
        run = engine.generate(prompts(2), {"temperature": 0.0, "max_tokens": 6})
    assert all(len(output.token_ids) == 6 for output in run.outputs)
    ours = sorted(name for name in sys.modules if name.split(".")[0] == "vllm_ddtree")
    print("imported:", *ours, flush=True)
"""


def test_nothing_of_ours_is_imported():
    # A process of its own: this one may have served trees before.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(HERE)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    imported = [
        line.split()[1:] for line in done.stdout.splitlines() if line.startswith("imported:")
    ]
    none, dflash, ddtree = imported
    assert none == []
    assert dflash == []
    assert "vllm_ddtree.model_state" in ddtree
