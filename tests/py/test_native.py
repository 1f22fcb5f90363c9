# SPDX-License-Identifier: Apache-2.0
"""The library as Python sees it: found, described by its own header, errors in its own words."""

import subprocess
import sys

import pytest
import torch
from vllm_ddtree import native


def load(code: str, **env: str) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_library_and_header_agree():
    lib = native.library()
    assert lib.lib.ddt_abi_version() == lib.lib.DDT_ABI_VERSION
    # cffi lays structs out by itself; the library refuses sizes that it does not know
    params = lib.params("ddt_tree_build_params")
    assert params.struct_size == lib.ffi.sizeof("ddt_tree_build_params")


def test_missing_library_says_what_to_do():
    result = load(
        "from vllm_ddtree.native import library; library()",
        DDTREE_LIBRARY="/nonexistent/libddtree.so",
    )
    assert result.returncode != 0
    assert "/nonexistent/libddtree.so" in result.stderr


def test_not_a_library_is_an_error(tmp_path):
    path = tmp_path / "libddtree.so"
    path.write_bytes(b"not an ELF file")
    result = load(
        "from vllm_ddtree.native import library; library()", DDTREE_LIBRARY=str(path)
    )
    assert "LibraryError: cannot load" in result.stderr


def test_errors_carry_the_librarys_text():
    lib = native.library()
    params = lib.params("ddt_tree_accept_params")
    with pytest.raises(native.LibraryError, match="DDT_STATUS|DDT_|NULL|null"):
        lib.check(lib.lib.ddt_tree_accept(lib.context(torch.device("cpu")), params, lib.ffi.NULL))


def test_pointers_want_the_right_dtype_and_contiguity():
    lib = native.library()
    with pytest.raises(ValueError, match="int32"):
        lib.pointer(torch.zeros(4, dtype=torch.int64), "int32_t", torch.int32)
    with pytest.raises(ValueError, match="strides"):
        lib.pointer(torch.zeros(4, 4, dtype=torch.int32)[:, 0], "int32_t", torch.int32)
    assert lib.pointer(None, "int32_t", torch.int32) == lib.ffi.NULL


def test_tensors_keep_their_strides():
    lib = native.library()
    out = lib.ffi.new("ddt_tensor *")
    lib.fill_tensor(out[0], torch.zeros(2, 3, 4).transpose(0, 2))
    assert (out.ndim, list(out.shape)[:3], list(out.strides)[:3]) == (3, [4, 3, 2], [1, 4, 12])
    with pytest.raises(ValueError, match="no dtype"):
        lib.fill_tensor(out[0], torch.zeros(1, dtype=torch.complex64))
