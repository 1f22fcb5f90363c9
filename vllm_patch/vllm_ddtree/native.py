# SPDX-License-Identifier: Apache-2.0
"""Loads libddtree and calls its C ABI. `ddtree.h` is the only description of
the ABI: cffi parses it, nothing is mirrored by hand."""

import os
import re
import threading
from functools import cache
from pathlib import Path
from typing import Any

import cffi
import torch

_PACKAGE = Path(__file__).resolve().parent
# An installed package carries both files; a checkout has them at its root.
_CHECKOUT = _PACKAGE.parent.parent
_LIBRARY_CANDIDATES = (
    _PACKAGE / "lib" / "libddtree.so",
    _CHECKOUT / "target" / "release" / "libddtree.so",
)
_HEADER_CANDIDATES = (
    _PACKAGE / "lib" / "ddtree.h",
    _CHECKOUT / "include" / "ddtree.h",
)

_DTYPE_NAMES = {
    torch.float32: "DDT_DTYPE_F32",
    torch.float16: "DDT_DTYPE_F16",
    torch.bfloat16: "DDT_DTYPE_BF16",
    torch.int32: "DDT_DTYPE_I32",
    torch.int64: "DDT_DTYPE_I64",
    torch.uint8: "DDT_DTYPE_U8",
}


# They need no workspace, and have no query for its size.
_WITHOUT_WORKSPACE = ("tree_mask", "tree_gather")


def _cuda_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class LibraryError(RuntimeError):
    """libddtree refused a call; the text is the library's own message."""


def _declarations(header: str) -> str:
    """The part of a C header that cffi's parser understands."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"#ifdef __cplusplus.*?#endif[^\n]*", "", text, flags=re.S)
    kept = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            constant = re.match(
                r"\s*#define\s+(DDT_\w+)\s+\(?(-?\d+|0x[0-9a-fA-F]+)[uU]?\)?\s*$", line
            )
            if constant:
                kept.append(f"#define {constant[1]} {constant[2]}")
        else:
            kept.append(line)
    return re.sub(r"\bDDT_(NODISCARD|MUST_USE)\b", "", "\n".join(kept))


def _first_existing(candidates: tuple[Path, ...], what: str) -> Path:
    for path in candidates:
        if path.is_file():
            return path
    looked = ", ".join(str(path) for path in candidates)
    raise LibraryError(
        f"{what} not found (looked at {looked}): run `cargo build --release` in a "
        "checkout of ddtree and set DDTREE_LIBRARY to its target/release/libddtree.so"
    )


class Library:
    """One loaded libddtree with a context per device, made on first use."""

    def __init__(self) -> None:
        override = os.environ.get("DDTREE_LIBRARY")
        path = (
            Path(override).absolute()
            if override
            else _first_existing(_LIBRARY_CANDIDATES, "libddtree.so")
        )
        if not path.is_file():
            raise LibraryError(f"DDTREE_LIBRARY is {path}: there is no such file")
        header = _first_existing(
            (
                path.parent / "ddtree.h",
                # PREFIX/lib and target/release of a checkout
                *(folder / "include" / "ddtree.h" for folder in path.parents[1:3]),
                *_HEADER_CANDIDATES,
            ),
            "ddtree.h",
        )
        self.ffi = cffi.FFI()
        self.ffi.cdef(_declarations(header.read_text()))
        try:
            self.lib = self.ffi.dlopen(str(path))
        except OSError as error:
            raise LibraryError(f"cannot load {path}: {error}") from error
        built, wanted = self.lib.ddt_abi_version(), self.lib.DDT_ABI_VERSION
        if built != wanted:
            raise LibraryError(
                f"{path} has ABI {built}, {header} describes ABI {wanted}: "
                "rebuild the library or reinstall vllm_ddtree"
            )
        self.dtypes = {
            dtype: getattr(self.lib, name) for dtype, name in _DTYPE_NAMES.items()
        }
        self._contexts: dict[tuple[str, int], Any] = {}
        # Fail at load rather than in the first round.
        self.context(torch.device("cpu"))

    def new_context(self, device: torch.device, portable_kernels: bool = False) -> Any:
        """A context of its own; portable_kernels: DDT_CONTEXT_PORTABLE_KERNELS."""
        params = self.params("ddt_context_params")
        params.abi_version = self.lib.DDT_ABI_VERSION
        if device.type == "cuda":
            params.device = self.lib.DDT_DEVICE_CUDA
            params.device_index = _cuda_index(device)
        elif device.type == "cpu":
            params.device = self.lib.DDT_DEVICE_CPU
        else:
            raise ValueError(f"libddtree runs on cpu and cuda, not on {device}")
        if portable_kernels:
            params.flags = self.lib.DDT_CONTEXT_PORTABLE_KERNELS
        out = self.ffi.new("ddt_context **")
        self.check(self.lib.ddt_context_create(params, out))
        return self.ffi.gc(out[0], self.lib.ddt_context_free)

    def context(self, device: torch.device) -> Any:
        """The process-wide context of a device. The first call for a GPU loads
        the kernels and must not happen while a stream is captured."""
        key = (device.type, _cuda_index(device) if device.type == "cuda" else 0)
        if key not in self._contexts:
            self._contexts[key] = self.new_context(device)
        return self._contexts[key]

    def stream(self, device: torch.device) -> Any:
        """PyTorch's current stream of a device, NULL on the CPU."""
        if device.type != "cuda":
            return self.ffi.NULL
        return self.ffi.cast("void *", torch.cuda.current_stream(device).cuda_stream)

    def call(self, op: str, params: Any, device: torch.device) -> None:
        """Run operation `op` on the device's current stream, with workspace from
        PyTorch's allocator, which keeps it until the stream has passed the call."""
        context = self.context(device)
        if device.type == "cuda" and op not in _WITHOUT_WORKSPACE:
            size = self.ffi.new("size_t *")
            query = getattr(self.lib, f"ddt_{op}_workspace_size")
            self.check(query(context, params, size))
            if size[0]:
                workspace = torch.empty(size[0], dtype=torch.uint8, device=device)
                params.workspace = self.ffi.cast("void *", workspace.data_ptr())
                params.workspace_bytes = size[0]
        run = getattr(self.lib, f"ddt_{op}")
        self.check(run(context, params, self.stream(device)))

    def params(self, struct: str) -> Any:
        """A zeroed parameter struct with its size filled in."""
        value = self.ffi.new(f"{struct} *")
        value.struct_size = self.ffi.sizeof(struct)
        return value

    def check(self, status: int) -> None:
        if status != self.lib.DDT_OK:
            text = self.ffi.new("char[1024]")
            self.lib.ddt_last_error(text, 1024, self.ffi.NULL)
            name = self.ffi.string(self.lib.ddt_status_name(status)).decode()
            raise LibraryError(f"{name}: {self.ffi.string(text).decode()}")

    def pointer(
        self, tensor: torch.Tensor | None, c_type: str, dtype: torch.dtype
    ) -> Any:
        """The data pointer of a contiguous tensor, NULL for None."""
        if tensor is None:
            return self.ffi.NULL
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"want a contiguous {dtype} tensor, got {tensor.dtype} "
                f"with strides {tensor.stride()}"
            )
        return self.ffi.cast(f"{c_type} *", tensor.data_ptr())

    def fill_tensor(self, out: Any, tensor: torch.Tensor | None) -> None:
        """Describe `tensor` in the ddt_tensor `out`; None leaves it absent."""
        if tensor is None:
            return
        if tensor.dtype not in self.dtypes:
            raise ValueError(f"libddtree has no dtype for {tensor.dtype}")
        out.data = self.ffi.cast("void *", tensor.data_ptr())
        out.dtype = self.dtypes[tensor.dtype]
        out.ndim = tensor.dim()
        for i, (size, stride) in enumerate(
            zip(tensor.shape, tensor.stride(), strict=True)
        ):
            out.shape[i] = size
            out.strides[i] = stride


_LOCK = threading.Lock()


@cache
def _load() -> Library:
    return Library()


def library() -> Library:
    """The process-wide library, loaded on first use."""
    with _LOCK:
        return _load()
