# SPDX-License-Identifier: Apache-2.0
"""The library as `ci/run.sh install` gives it to a program that is not part of this checkout."""

from pathlib import Path

import pytest
from commands import CARGO_OPTIONS, ROOT, run


@pytest.fixture(scope="session")
def prefix(tmp_path_factory) -> Path:
    """An installed libddtree, in a folder whose name needs no quoting by pkg-config."""
    folder = tmp_path_factory.mktemp("prefix")
    run(ROOT / "ci" / "run.sh", "install", "--prefix", folder, *CARGO_OPTIONS)
    return folder
