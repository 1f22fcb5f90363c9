# SPDX-License-Identifier: Apache-2.0
"""vLLM source trees for the patch tests.

0.32.0 comes from the installed vLLM (patched or not), 0.33.0 from its wheel: run

    python tests/patch/vllm_trees.py [VERSION ...]

to download the wheels' Python files into the cache ahead of the tests. The cache is
DDTREE_TEST_CACHE, or .build/vllm in the checkout.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
PATCH = CHECKOUT / "vllm_patch"
CACHE = Path(os.environ.get("DDTREE_TEST_CACHE", CHECKOUT / ".build" / "vllm"))
VERSIONS = ("0.32.0", "0.33.0")

# of the released wheels for x86-64
WHEEL_SHA256 = {
    "0.32.0": "5e2ecdc5b0baf72921c288486417ca82778456a448e4fe60b62ee43c0dfc8611",
    "0.33.0": "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
}
PLATFORM = "manylinux_2_28_x86_64"


class Unavailable(Exception):
    """The tree cannot be had here; the text says why."""


def touched(version: str) -> dict[str, str]:
    """path -> SHA-256 of the pristine file, for every file that the series touches."""
    lines = (PATCH / "patches" / version / "base.sha256").read_text().splitlines()
    return {path: digest for digest, path in (line.split() for line in lines)}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def installed(version: str) -> Path | None:
    """The folder that holds the installed vllm package, if it is this version."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent.parent
    text = (root / "vllm" / "_version.py").read_text()
    return root if f"'{version}'" in text else None


def download(version: str) -> Path:
    """The wheel's Python files in the cache; downloads the wheel once. Raises Unavailable."""
    tree = CACHE / version
    if (tree / "complete").exists():
        return tree
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        requirement = Path(work, "requirement.txt")
        requirement.write_text(f"vllm=={version} --hash=sha256:{WHEEL_SHA256[version]}\n")
        command = ["download", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
        command += [f"--platform={PLATFORM}", "--require-hashes", f"--requirement={requirement}"]
        pip = subprocess.run(
            [*pip_command(), *command, f"--dest={work}", "--quiet", "--no-cache-dir"],
            capture_output=True,
            text=True,
        )
        wheels = list(Path(work).glob("*.whl"))
        if pip.returncode or not wheels:
            raise Unavailable(
                f"vllm {version} could not be downloaded: {pip.stderr.strip()[-300:]}"
            )
        unpacked = Path(work, "tree")
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [n for n in wheel.namelist() if n.endswith(".py") or ".dist-info/" in n]
            wheel.extractall(unpacked, names)
        (unpacked / "complete").touch()
        shutil.rmtree(tree, ignore_errors=True)
        unpacked.rename(tree)
    return tree


def pip_command() -> list[str]:
    """A pip that can download: this interpreter's, or any on PATH (a uv venv has none)."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    raise Unavailable("there is no pip to download vLLM's wheel with")


def whole_tree(version: str) -> Path:
    """A folder with every Python file of this vLLM; touched files may be patched in it."""
    return installed(version) or download(version)


def pristine_bytes(version: str) -> dict[str, bytes]:
    """The touched files as released; raises Unavailable when they cannot be had."""
    root = whole_tree(version)
    journal = root / "vllm" / ".ddtree" / "journal.json"
    saved = json.loads(journal.read_text())["files"] if journal.exists() else {}
    files = {}
    for path, digest in touched(version).items():
        candidates = [root / path]
        if path in saved:
            candidates.append(root / "vllm" / ".ddtree" / "originals" / path)
        for candidate in candidates:
            if sha256(candidate) == digest:
                files[path] = candidate.read_bytes()
        if path not in files:
            raise Unavailable(f"{root / path} is not the file of vLLM {version}")
    return files


def make_tree(root: Path, version: str, files: dict[str, bytes]) -> Path:
    """A small vllm package in `root`: the given files and a version, nothing to import."""
    package = root / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_version.py").write_text(f"__version__ = version = '{version}'\n")
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def overlay(root: Path, version: str, files: dict[str, bytes]) -> Path:
    """An importable vllm in `root`: links to this version's files, with `files` in their place.

    Its metadata say that it is a CPU build, so that vLLM chooses its CPU platform.
    """
    source = whole_tree(version)
    own_folders = {parent for path in files for parent in Path(path).parents}

    def link(folder: Path) -> None:
        (root / folder).mkdir(parents=True)
        for entry in (source / folder).iterdir():
            relative = folder / entry.name
            if relative in own_folders:
                link(relative)
            elif str(relative) in files:
                (root / relative).write_bytes(files[str(relative)])
            elif entry.name not in ("__pycache__", ".ddtree"):
                (root / relative).symlink_to(entry)

    link(Path("vllm"))
    metadata = root / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return root


if __name__ == "__main__":
    for name in sys.argv[1:] or [v for v in VERSIONS if not installed(v)]:
        print(name, download(name))
