# SPDX-License-Identifier: Apache-2.0
"""The library as `ci/run.sh install` gives it to a program that is not part of this checkout."""

import os
import subprocess
from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
def prefix(tmp_path_factory) -> Path:
    """An installed libddtree, in a folder whose name needs no quoting by pkg-config."""
    folder = tmp_path_factory.mktemp("prefix")
    run(ROOT / "ci" / "run.sh", "install", "--prefix", folder, *CARGO_OPTIONS)
    return folder
