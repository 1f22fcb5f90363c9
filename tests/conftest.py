# SPDX-License-Identifier: Apache-2.0
"""Where vLLM's CPU build is installed (ci/run.sh setup), every test runs it through Model Runner V2."""

import importlib.util

if importlib.util.find_spec("vllm_cpu_runtime") is not None:
    import vllm_cpu_runtime

    vllm_cpu_runtime.boot()
