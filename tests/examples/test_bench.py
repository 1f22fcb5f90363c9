# SPDX-License-Identifier: Apache-2.0
"""The benchmark of calls on a CPU still runs, knows every function and compares the same trees; no time is asserted."""

import json
import re
import sys

import pytest
from commands import ROOT, run

pytest.importorskip("numpy")


def test_cost_of_calls(prefix, tmp_path):
    # run.py needs no vLLM, which the environment's Python would set up
    env = {"DDTREE_CPU_RUNTIME": "", "DDTREE_COMMIT": "unknown"}
    program = ROOT / "tests" / "bench" / "cpu" / "run.py"
    library = prefix / "lib" / "libddtree.so"
    run(sys.executable, program, "--quick", "--library", library, "--out", tmp_path, env=env)
    lines = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    header = (prefix / "include" / "ddtree.h").read_text()
    declared = set(re.findall(r"^(?:\w[\w ]*[ *])?(ddt_\w+)\(", header, re.M))
    assert {line["op"] for line in lines} == declared - {"ddt_context_free"} | {"nothing"}
    assert len((tmp_path / "tree_build.jsonl").read_text().splitlines()) == 4
    assert "`ddt_commit`" in (tmp_path / "cost.md").read_text()
