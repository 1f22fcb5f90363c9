# SPDX-License-Identifier: Apache-2.0
"""Tree speculative decoding for vLLM: all the logic that the patches in vllm_patch call.

Nothing is imported here: a patched vLLM loads a module of this package only when a tree is asked
for, and config code must not pull in Torch.
"""

__version__ = "0.1.0"
