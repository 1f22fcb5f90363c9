# SPDX-License-Identifier: Apache-2.0
"""The training text: the sources of the running Python's standard library, and of other folders.

Every machine with Python has it. A file belongs to one split, chosen by a hash of its path, so that a file that is held out
stays held out whatever the Python version.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Third-party code, test suites (huge and repetitive) and generated tables.
SKIPPED_DIRS = {
    "__pycache__", "dist-packages", "encodings", "idle_test", "lib2to3", "pydoc_data", "site-packages", "test", "tests",
}  # fmt: skip
SPLITS = (("heldout", 5), ("draft", 12), ("train", 100))  # upper bounds of the hash, in percent


def split_of(name: str) -> str:
    """The split of a file: `heldout` (evaluation only), `draft` (prompts that the target never saw), `train`."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100
    return next(split for split, bound in SPLITS if bucket < bound)


def load(split: str, *more: Path) -> dict[str, str]:
    """Path relative to the library (POSIX) -> text, in path order, then the same of the folders `more`, whose paths begin with the
    folder's name. Files that are not UTF-8 are left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return {name: text for root in (library, *more) for name, text in _sources(root, Path() if root is library else Path(root.name), split)}


def _sources(root: Path, prefix: Path, split: str) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root)
        if SKIPPED_DIRS & set(name.parts[:-1]) or name.name.startswith("_sysconfigdata"):
            continue
        name = (prefix / name).as_posix()
        if split_of(name) != split:
            continue
        try:
            text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield name, text
