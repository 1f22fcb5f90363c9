# SPDX-License-Identifier: Apache-2.0
"""vllm_patch/tool.py on small trees that hold the released files and nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_trees import PATCH, sha256, touched

SPEC = "vllm/config/speculative.py"


def snapshot(root: Path) -> dict[str, tuple[str, int, int]]:
    """Content, mode and modification time of every file."""
    return {
        str(path.relative_to(root)): (sha256(path), path.stat().st_mode, path.stat().st_mtime_ns)
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def run(tool, capsys, command, tree):
    code = tool.main([command, "--target", str(tree)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_apply_check_status_revert(tool, capsys, tree, version):
    before = snapshot(tree)
    assert run(tool, capsys, "status", tree) == (0, f"{tree}/vllm: pristine; series {version}\n")
    assert run(tool, capsys, "check", tree) == (
        0,
        f"{tree}/vllm: pristine; series {version} applies\n",
    )
    assert snapshot(tree) == before

    code, text = run(tool, capsys, "apply", tree)
    assert code == 0 and f"to vLLM {version}" in text
    changed = {p for p, value in snapshot(tree).items() if before.get(p) != value}
    assert {p for p in changed if "/.ddtree/" not in p} == set(touched(version))
    assert '"ddtree"' in (tree / SPEC).read_text()
    code, text = run(tool, capsys, "status", tree)
    assert (code, text) == (0, f"{tree}/vllm: patched; series {version}\n")
    code, text = run(tool, capsys, "check", tree)
    assert code == 0 and "patched and intact" in text

    code, text = run(tool, capsys, "revert", tree)
    assert (code, text) == (0, f"reverted to vLLM {version}\n")
    assert snapshot(tree) == before


def test_runs_as_a_script_without_anything_installed(tree):
    command = [sys.executable, "-I", "-S", str(PATCH / "tool.py"), "apply", "--target", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install ./vllm_patch" in done.stdout


def test_target_may_be_the_package_itself(tool, capsys, tree):
    assert run(tool, capsys, "status", tree / "vllm")[1].startswith(f"{tree}/vllm: pristine")


def test_default_target_is_found_but_not_imported(tree, version):
    (tree / "vllm" / "__init__.py").write_text("raise SystemExit('imported')\n")
    done = subprocess.run(
        [sys.executable, str(PATCH / "tool.py"), "status"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tree)},
    )
    assert (done.stdout, done.stderr) == (f"{tree}/vllm: pristine; series {version}\n", "")


def test_a_checkout_without_version_is_recognised_by_its_files(tool, capsys, tree, version):
    (tree / "vllm" / "_version.py").unlink()
    assert run(tool, capsys, "apply", tree)[0] == 0
    assert run(tool, capsys, "status", tree)[1].endswith(f"patched; series {version}\n")
    assert run(tool, capsys, "revert", tree)[0] == 0


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_patches_apply_with_git(tree, version, pristine, tool):
    folder = PATCH / "patches" / version
    for name in (folder / "series").read_text().split():
        subprocess.run(["git", "apply", "--unsafe-paths", f"{folder / name}"], cwd=tree, check=True)
    for path, data in tool.load_series(version).patched(pristine).items():
        assert (tree / path).read_bytes() == data, path


def test_refuses_an_unknown_version(tool, capsys, tree):
    (tree / "vllm" / "_version.py").write_text("__version__ = version = '0.31.0'\n")
    before = snapshot(tree)
    code, text = run(tool, capsys, "apply", tree)
    assert code == 1 and "vLLM 0.31.0 is not supported; supported: 0.32.0, 0.33.0" in text
    assert snapshot(tree) == before


def test_a_local_version_part_does_not_matter(tool, capsys, tree, version):
    (tree / "vllm" / "_version.py").write_text(f"__version__ = version = '{version}+cu129'\n")
    assert run(tool, capsys, "check", tree)[0] == 0


def test_refuses_a_patched_tree(tool, capsys, tree):
    run(tool, capsys, "apply", tree)
    before = snapshot(tree)
    code, text = run(tool, capsys, "apply", tree)
    assert code == 1 and "already patched; revert first" in text
    assert snapshot(tree) == before


def test_a_changed_series_is_noticed(tool, capsys, monkeypatch, tmp_path, tree, version):
    before = snapshot(tree)
    run(tool, capsys, "apply", tree)
    shutil.copytree(PATCH / "patches", tmp_path / "patches")
    patch = tmp_path / "patches" / version / "select_tree_speculator.patch"
    patch.write_text("Another header\n" + patch.read_text())
    monkeypatch.setattr(tool, "PATCHES", tmp_path / "patches")
    assert ": outdated; " in run(tool, capsys, "status", tree)[1]
    for command in ("apply", "check"):
        code, text = run(tool, capsys, command, tree)
        assert code == 1 and "another version of the series; run revert" in text
    assert run(tool, capsys, "revert", tree)[0] == 0
    assert snapshot(tree) == before
    assert run(tool, capsys, "apply", tree)[0] == 0


@pytest.mark.parametrize("command", ["apply", "check", "revert"])
def test_refuses_a_foreign_change(tool, capsys, tree, command):
    (tree / SPEC).write_text((tree / SPEC).read_text() + "\n# local\n")
    before = snapshot(tree)
    code, text = run(tool, capsys, command, tree)
    assert code == 1 and SPEC in text and "reinstall" in text
    assert snapshot(tree) == before


def test_refuses_a_missing_file(tool, capsys, tree):
    (tree / SPEC).unlink()
    code, text = run(tool, capsys, "apply", tree)
    assert code == 1 and SPEC in text


@pytest.mark.parametrize("command", ["apply", "check", "revert"])
def test_refuses_a_change_after_apply(tool, capsys, tree, command):
    run(tool, capsys, "apply", tree)
    (tree / SPEC).write_text((tree / SPEC).read_text() + "\n# local\n")
    before = snapshot(tree)
    code, text = run(tool, capsys, command, tree)
    assert code == 1 and f"changed since apply: {SPEC}" in text
    assert snapshot(tree) == before


def test_refuses_to_revert_a_pristine_tree(tool, capsys, tree):
    code, text = run(tool, capsys, "revert", tree)
    assert code == 1 and "nothing to revert" in text


def test_refuses_a_folder_without_vllm(tool, capsys, tmp_path):
    code, text = run(tool, capsys, "apply", tmp_path)
    assert code == 1 and "no vllm package" in text


class Stop(BaseException):
    """Ends the tool as a kill would: no handler of ordinary errors sees it."""


def stop_after(monkeypatch, tool, renames):
    """Let `renames` files be replaced, then stop."""
    real, count = os.replace, 0

    def replace(source, target):
        nonlocal count
        if str(target).endswith(".py"):
            if count == renames:
                raise Stop
            count += 1
        real(source, target)

    monkeypatch.setattr(tool.os, "replace", replace)


@pytest.mark.parametrize("renames", [0, 1, 5])
def test_a_failed_apply_rolls_back(tool, capsys, monkeypatch, tree, renames):
    before = snapshot(tree)
    # the rollback needs renames too, so only the first attempt may fail
    real, count = os.replace, 0

    def replace(source, target):
        nonlocal count
        if str(target).endswith(".py"):
            count += 1
            if count == renames + 1:
                raise OSError("disk full")
        real(source, target)

    monkeypatch.setattr(tool.os, "replace", replace)
    code, text = run(tool, capsys, "apply", tree)
    assert code == 1 and "disk full" in text
    assert snapshot(tree) == before


@pytest.mark.parametrize("renames", [0, 1, 5])
def test_an_interrupted_apply_can_be_reverted(tool, capsys, monkeypatch, tree, renames):
    before = snapshot(tree)
    with monkeypatch.context() as patch:
        stop_after(patch, tool, renames)
        # a killed process rolls nothing back
        patch.setattr(tool, "restore", lambda *_: None)
        patch.setattr(tool.shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(tool.Path, "unlink", lambda *_, **__: None)
        with pytest.raises(Stop):
            run(tool, capsys, "apply", tree)
    assert any(path.name.endswith(tool.TMP_SUFFIX) for path in tree.rglob("*"))

    assert ": interrupted; " in run(tool, capsys, "status", tree)[1]
    for command in ("apply", "check"):
        code, text = run(tool, capsys, command, tree)
        assert code == 1 and "run revert" in text
    assert run(tool, capsys, "revert", tree)[0] == 0
    assert snapshot(tree) == before


@pytest.mark.parametrize("renames", [0, 1, 5])
def test_an_interrupted_revert_can_be_repeated(tool, capsys, monkeypatch, tree, renames):
    before = snapshot(tree)
    run(tool, capsys, "apply", tree)
    with monkeypatch.context() as patch:
        stop_after(patch, tool, renames)
        with pytest.raises(Stop):
            run(tool, capsys, "revert", tree)
    assert ": interrupted; " in run(tool, capsys, "status", tree)[1]
    assert run(tool, capsys, "revert", tree)[0] == 0
    assert snapshot(tree) == before


def test_a_kill_before_the_journal_leaves_a_pristine_tree(tool, capsys, monkeypatch, tree):
    with monkeypatch.context() as patch:
        patch.setattr(tool, "write_journal", lambda *_: (_ for _ in ()).throw(Stop))
        patch.setattr(tool.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Stop):
            run(tool, capsys, "apply", tree)
    assert (tree / "vllm" / ".ddtree").exists()
    assert ": pristine; " in run(tool, capsys, "status", tree)[1]
    assert run(tool, capsys, "apply", tree)[0] == 0


def test_reinstalling_vllm_over_a_patched_tree_is_noticed(tool, capsys, tree, pristine):
    run(tool, capsys, "apply", tree)
    for path, data in pristine.items():
        (tree / path).write_bytes(data)
    assert ": pristine; " in run(tool, capsys, "status", tree)[1]
    assert run(tool, capsys, "apply", tree)[0] == 0


def test_hard_links_keep_their_content(tool, capsys, tree, tmp_path, pristine):
    """Package managers link installed files to a shared cache; the cache must not change."""
    os.link(tree / SPEC, tmp_path / "cache.py")
    run(tool, capsys, "apply", tree)
    assert (tmp_path / "cache.py").read_bytes() == pristine[SPEC]


def test_bytecode_of_replaced_files_goes(tool, capsys, tree):
    cached = tree / "vllm" / "config" / "__pycache__"
    cached.mkdir()
    for name in ("speculative.cpython-311.pyc", "speculative.cpython-311.opt-1.pyc"):
        (cached / name).touch()
    (cached / "cache.cpython-311.pyc").touch()
    run(tool, capsys, "apply", tree)
    assert [path.name for path in cached.iterdir()] == ["cache.cpython-311.pyc"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace(b'\n     "custom_class",', b'\n     "other_class",'),
            "does not match",
        ),
        (lambda text: re.sub(rb"@@ -(\d+),", rb"@@ -9\1,", text, count=1), "does not match"),
        (lambda text: re.sub(rb",(\d+) @@", rb",99 @@", text, count=1), "broken hunk"),
        (lambda text: text.replace(b"\n+++ b/vllm/config/speculative.py", b"\n+++ b/x.py"), "want"),
        (lambda text: text.split(b"--- a/")[0], "no file in patch"),
    ],
)
def test_the_patch_parser_is_strict(tool, version, pristine, change, message):
    name = "add_tree_fields_to_speculative_config.patch"
    text = (PATCH / "patches" / version / name).read_bytes()
    changed = change(text)
    assert changed != text
    with pytest.raises(tool.ToolError, match=message):
        for patch in tool.parse_patch(changed):
            tool.apply_hunks(pristine[patch.path], patch)
