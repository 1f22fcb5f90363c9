# SPDX-License-Identifier: Apache-2.0
"""What each CUDA kernel needs on each architecture, from the build's ptxas logs.

Fails on a spill, on a kernel that lacks an architecture, and on more shared memory per block than sm_120 has.
A kernel's dynamic shared memory is the constant DDT_CUDA_..._SHARED_BYTES of cuda/params with the longest name
that is a prefix of the kernel's: DDT_CUDA_COMMIT_REPLAY_SHARED_BYTES is for ddt_commit_replay_bf16."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# what build.rs compiles each file for, and the suffix of files for one architecture
ARCHS = ("sm_80", "sm_90a", "sm_100", "sm_120")
ONLY_SM90 = "_sm90"
# 100 KB per multiprocessor, of which the system keeps 1 KB per block
SM120_SHARED_BYTES = 99 * 1024
SM90_SHARED_BYTES = 227 * 1024

_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STATIC = re.compile(r"(\d+) bytes smem")


def logs() -> list[Path]:
    """The logs of the most recent build."""
    folders = {path.parent for path in (ROOT / "target/release/build").glob("ddtree-*/out/*.ptxas")}
    if not folders:
        sys.exit("ci/archs.py: no ptxas logs in target/release/build; run `cargo build --release` with the cuda feature")
    newest = max(folders, key=lambda folder: (folder / "fatbins.rs").stat().st_mtime)
    sources = {path.stem for path in (ROOT / "cuda").glob("*.cu")}
    return sorted(path for path in newest.glob("*.ptxas") if path.stem in sources)


def dynamic_bytes() -> dict[str, int]:
    """Kernel name prefix -> bytes."""
    text = (ROOT / "rust/cuda/params.rs").read_text()
    found = re.findall(r"pub const DDT_CUDA_(\w+)_SHARED_BYTES: \w+ = (\d+);", text)
    return {f"ddt_{name.lower()}": int(value) for name, value in found}


def main() -> None:
    dynamic = dynamic_bytes()
    problems: list[str] = []
    rows: list[tuple[str, str, int, int, int, int]] = []
    for log in logs():
        seen: dict[str, set[str]] = {}
        kernel = arch = ""
        spills = 0
        for line in log.read_text().splitlines():
            if entry := _ENTRY.search(line):
                kernel, arch = entry.groups()
                seen.setdefault(kernel, set()).add(arch)
            elif spill := _SPILLS.search(line):
                spills = int(spill[2]) + int(spill[3])
            elif used := _USED.search(line):
                static = _STATIC.search(line)
                prefixes = [name for name in dynamic if kernel == name or kernel.startswith(name + "_")]
                extra = dynamic[max(prefixes, key=len)] if prefixes else 0
                rows.append((kernel, arch, int(used[1]), spills, int(static[1]) if static else 0, extra))
        want = {"sm_90a"} if log.stem.endswith(ONLY_SM90) else set(ARCHS)
        for name, archs in seen.items():
            if missing := want - archs:
                problems.append(f"{name}: not built for {', '.join(sorted(missing))}")
        if not seen:
            problems.append(f"{log.stem}: no kernels")
    print(f"{'kernel':44} {'arch':7} {'registers':>9} {'spills':>6} {'static':>7} {'dynamic':>8} shared bytes")
    for kernel, arch, registers, spills, static, extra in sorted(rows):
        print(f"{kernel:44} {arch:7} {registers:9} {spills:6} {static:7} {extra:8}")
        if spills:
            problems.append(f"{kernel} spills {spills} bytes on {arch}")
        limit = SM120_SHARED_BYTES if arch == "sm_120" else SM90_SHARED_BYTES
        if static + extra > limit:
            problems.append(f"{kernel} needs {static + extra} bytes of shared memory on {arch}, which has {limit}")
    kernels = {row[0] for row in rows}
    print(f"{len(kernels)} kernels, {len(rows)} binaries, {len(problems)} problems")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
