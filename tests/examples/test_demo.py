# SPDX-License-Identifier: Apache-2.0
"""The demo names what stopped a server."""

import importlib.util

from commands import ROOT

LOG = """\
(APIServer pid=7) WARNING 12-01 01:19:23 [system_utils.py:1] Found ulimit of 1024. This can cause errors like `OSError: [Errno 24] Too many open files`.
    raise ValueError("ValueError: no line of a traceback")
(EngineCore pid=8) ERROR 12-01 01:19:24 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=8) ERROR 12-01 01:19:24 [core.py:1100] torch.OutOfMemoryError: CUDA out of memory
[rank0]: AssertionError: a consequence
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.
""".splitlines()


def test_first_error():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "ci" / "demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    assert demo.first_error(LOG) == "torch.OutOfMemoryError: CUDA out of memory"
    assert demo.first_error(LOG[4:]) == "AssertionError: a consequence"
    assert demo.first_error(LOG[5:]).startswith("RuntimeError: Engine core")
    assert demo.first_error(LOG[:3]) is None
