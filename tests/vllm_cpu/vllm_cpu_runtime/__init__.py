# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's CPU build through Model Runner V2, for tests and the demo only.

vLLM's CPU build switches Triton off, and Model Runner V2 with it, unless Triton has a backend called "cpu".
`boot` registers an empty one, so that vLLM keeps its Triton kernels and Triton's interpreter runs them on CPU
tensors. It must run before `triton` or `vllm` is imported, in every process of the server: the `.pth` file that
`ci/run.sh setup` puts into the virtual environment calls it when DDTREE_CPU_RUNTIME is set.

DDTREE_CPU_RUNTIME
    fast         fast_interpreter.py, about thirty times faster
    interpreter  Triton's own interpreter
"""

import os
import sys

MODES = ("fast", "interpreter")
_booted = None


def boot(mode=None):
    """Prepare this process; idempotent. `mode` defaults to DDTREE_CPU_RUNTIME, and child processes inherit it.

    Exits the process when vLLM could not be made to use Model Runner V2: going on would run V1 without a word.
    """
    global _booted
    mode = mode or os.environ.get("DDTREE_CPU_RUNTIME") or "fast"
    if mode not in MODES:
        sys.exit(f"DDTREE_CPU_RUNTIME is {mode!r}: use one of {', '.join(MODES)}")
    if _booted == mode:
        return
    if _booted or "vllm" in sys.modules or "triton" in sys.modules:
        sys.exit("vllm_cpu_runtime.boot() must run once, before vllm and triton are imported")
    os.environ["DDTREE_CPU_RUNTIME"] = mode
    os.environ["TRITON_INTERPRET"] = "1"
    # models this small gain nothing from a second thread, and threads that wait for each other by spinning make a
    # round ten times slower whenever another process wants the core
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # and by default every engine would pin itself to the first core
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # with V2 demanded, vLLM refuses to start without Triton; by default it would fall back to V1
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")
    try:
        from . import interpreter, vllm_fixes

        vllm_fixes.install()
        interpreter.register_backend()
        interpreter.replace_top_k_top_p()
        if mode == "fast":
            interpreter.use_fast_interpreter()
    except ImportError as error:
        sys.exit(f"DDTREE_CPU_RUNTIME is set, but Triton's interpreter cannot be used: {error}")
    _booted = mode
