# SPDX-License-Identifier: Apache-2.0
"""Where things are, which compilers to use, and how to run a command."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "include" / "examples"
CC = os.environ.get("CC", "gcc")
CXX = os.environ.get("CXX", "g++")
# the build of a developer may be without CUDA
CARGO_OPTIONS = os.environ.get("DDTREE_TEST_CARGO_OPTIONS", "").split()


def run(*command, env=None, **kwargs) -> str:
    """Standard output of a command that must succeed."""
    result = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout}{result.stderr}"
    return result.stdout
