# SPDX-License-Identifier: Apache-2.0
"""Other projects' kernels, to be timed beside ours in the same run.

None of their code is in this repository: `fetch.py` takes it from the published wheels into a folder that git
ignores. Each module has `available()`, which says why a peer cannot run here, or None, and thin classes whose
instances hold inputs and outputs and launch the peer's kernels when called.
"""

import importlib.metadata
import os
import pathlib
import sys


def folder() -> pathlib.Path:
    """Where `fetch.py` put the peers: DDTREE_PEERS, or .gpu/peers at the root of the repository."""
    return pathlib.Path(
        os.environ.get("DDTREE_PEERS") or pathlib.Path(__file__).parents[4] / ".gpu" / "peers"
    )


def torch_name(what: str) -> str:
    """The exact name of an operation of the installed torch, as a peer."""
    return f"torch-{importlib.metadata.version('torch').split('+')[0]} {what}"


def add_wheel(prefix: str) -> None:
    """Makes the package unpacked in `folder() / prefix` importable."""
    path = str(folder() / prefix)
    if path not in sys.path:
        sys.path.append(path)
