# SPDX-License-Identifier: Apache-2.0
"""The wheel of vllm_ddtree brings the library along, and says which glibc it needs."""

import os
import re
import subprocess
import sys
import zipfile

import pytest
from commands import ROOT, run

pytest.importorskip("wheel", reason="the packaging tools are not installed")

LOAD = """
import torch
from vllm_ddtree import native
lib = native.library()
lib.context(torch.device("cpu"))
print(native.__file__, lib.ffi.string(lib.lib.ddt_build_info()).decode(), sep="\\n")
"""


def make(out, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, ROOT / "ci" / "wheel.py", "--out", out, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_wheel(prefix, tmp_path):
    library = prefix / "lib" / "libddtree.so"
    made = make(tmp_path, library)
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    symbols = run("readelf", "--version-info", library)
    floor = max(tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols))
    assert f"-py3-none-manylinux_{floor[0]}_{floor[1]}_" in wheel.name

    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()
        archive.extractall(tmp_path / "site")
    # nothing of the checkout on the path, and no variable that names a library
    env = {key: value for key, value in os.environ.items() if not key.startswith("DDTREE_")}
    env["PYTHONPATH"] = str(tmp_path / "site")
    result = subprocess.run(
        [sys.executable, "-c", LOAD], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    where, info = result.stdout.splitlines()
    assert where.startswith(str(tmp_path)) and info.startswith("ddtree/")


def test_a_newer_glibc_is_refused(prefix, tmp_path):
    made = make(tmp_path, "--most-glibc", "2.17", prefix / "lib" / "libddtree.so")
    assert made.returncode != 0 and "needs glibc 2." in made.stderr
    assert not list(tmp_path.glob("*.whl"))
