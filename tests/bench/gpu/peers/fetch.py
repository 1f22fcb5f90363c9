# SPDX-License-Identifier: Apache-2.0
"""Takes the peers' files out of their published wheels.

    python fetch.py FOLDER [--build CUDA_HOME]

downloads about 1 GB, leaves FOLDER with 220 MB and packs them into FOLDER.tar.xz (25 MB), for a machine without a
network: CPython 3.12, x86-64, torch 2.11, an sm_90 GPU. --build also compiles FlashInfer's kernels (five minutes on
one core; needs torch and nvcc, no GPU); without it FlashInfer compiles them on first use. Needs the cuobjdump that
Triton brings.
"""

import argparse
import os
import pathlib
import shlex
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile

VLLM, FLASHINFER, TVM_FFI, SGLANG = "0.33.0", "0.7.4", "0.1.11", "0.4.4"
VLLM_FILES = (
    "vllm/v1/attention/ops/triton_attention_helpers.py",
    "vllm/v1/attention/ops/triton_unified_attention.py",
    "vllm/model_executor/layers/mamba/ops/causal_conv1d.py",
    "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
    "vllm/v1/worker/gpu/sample/gumbel.py",
)
VLLM_LIBRARY, VLLM_KERNEL = "vllm/_C_stable_libtorch.abi3.so", b"gdn_decode_post_conv_mtp_kernel"
VLLM_CUBIN = "fused_gdn_decode.sm_90a.cubin"
FLASH_LIBRARY = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"
# Of FlashAttention 3: the kernels for bf16 and head dim 256, those that merge splits and those that make schedules.
FLASH_KERNELS = (
    b"ELi256ENS_10bfloat16_tE",
    b"19FlashAttnFwdCombine",
    b"prepare_varlen_num_blocks_kernel",
)
SGLANG_FILES = ("sgl_kernel/sm90/common_ops.abi3.so",)

# Run with FlashInfer importable: writes the build files of the two modules, prints their folders and the files of the
# package that all this read.
GENERATE = """
import os, sys
read, root = set(), sys.argv[1] + os.sep
sys.addaudithook(lambda event, args: event == "open" and read.add(str(args[0])))
import torch, flashinfer.prefill
from flashinfer.jit.attention.modules import _gen_batch_prefill_independent_paged_module as independent
from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module as primary
from flashinfer.jit.quantization import gen_quantization_module
bf16 = torch.bfloat16
kind = ("fa2", bf16, bf16, bf16, torch.int32, 256, 256, 0, False, False, False)
independent(*kind)  # never built, but FlashInfer generates it too
for spec in (primary(*kind), gen_quantization_module()):
    spec.write_ninja()
    print("module", spec.ninja_path.parent)
read.update(getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
for path in sorted(path for path in read if path.startswith(root) and not path.endswith(".pyc")):
    print("file", path.removeprefix(root))
"""


def wheel(to: pathlib.Path, requirement: str, *options: str) -> zipfile.ZipFile:
    """Downloads one wheel for the GPU machine."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 24, 17)] + [
        "manylinux2014_x86_64"
    ]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(to),
    ]
    command += ["--python-version", "3.12", "--implementation", "cp", *options]
    subprocess.run(
        [*command, *(a for p in platforms for a in ("--platform", p)), requirement], check=True
    )
    stem = requirement.replace("-", "_").replace("==", "-")
    return zipfile.ZipFile(next(to.glob(f"{stem}-*.whl")))


def flashinfer(
    source: zipfile.ZipFile, target: pathlib.Path, tmp: pathlib.Path, cuda_home: str | None
) -> None:
    """FlashInfer's Python, as far as its attention imports it, and its kernels where it looks for compiled ones."""
    unpacked = tmp / "flashinfer"
    source.extractall(unpacked)
    if cuda_home is None:
        unpacked.rename(target)
        return
    tools = tmp / "tools"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", str(tools), "--no-deps", "ninja", "einops", "tabulate",
         "nvidia-ml-py", f"apache-tvm-ffi=={TVM_FFI}"], check=True,
    )  # fmt: skip
    environment = dict(
        os.environ, PYTHONPATH=f"{tools}:{unpacked}", CUDA_HOME=cuda_home, FLASHINFER_CUDA_ARCH_LIST="9.0a",
        FLASHINFER_WORKSPACE_BASE=str(tmp / "cache"),
    )  # fmt: skip
    output = subprocess.run(
        [sys.executable, "-P", "-c", GENERATE, str(unpacked)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for kind, path in (line.split(" ", 1) for line in output.splitlines()):
        if kind == "file":
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_bytes((unpacked / path).read_bytes())
            continue
        folder = pathlib.Path(path)
        # ninja stops at the link where CUDA has no libcuda stub; all that is missing is there at run time.
        subprocess.run([tools / "bin" / "ninja", "-k0"], cwd=folder, env=environment, check=False)
        library = target / "flashinfer" / "data" / "aot" / folder.name / f"{folder.name}.so"
        library.parent.mkdir(parents=True)
        objects = shlex.join(map(str, folder.glob("*.o")))
        runtime = next(pathlib.Path(cuda_home).glob("lib*/libcudart.so.1?"))
        subprocess.run(
            f"c++ -shared {objects} {runtime} -o {shlex.quote(str(library))}",
            shell=True,
            check=True,
        )


def blank(library: bytearray, keep: tuple[bytes, ...]) -> bytearray:
    """Overwrites with zeros the GPU code in a shared library that mentions none of the names. CUDA loads code when a
    kernel of it is first used, so the rest still works."""
    table, entry_bytes, count, names = struct.unpack_from("<Q10xHHH", library, 40)
    sections = [
        struct.unpack_from("<II16xQQ", library, table + i * entry_bytes) for i in range(count)
    ]
    name_table = sections[names][2]
    (start, size), *_ = (
        (offset, size)
        for name, _, offset, size in sections
        if library[name_table + name :].startswith(b".nv_fatbin\0")
    )
    place = start
    while place < start + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", library, place)
        if magic != 0xBA55ED50:  # padding
            place += 8
            continue
        end = place + header + length
        place += header
        if any(name in library[place:end] for name in keep):
            place = end
        while place < end:
            _, _, header, length = struct.unpack_from("<HHIQ", library, place)
            library[place + header : place + header + length] = bytes(length)
            place += header + length
    return library


def vllm(source: zipfile.ZipFile, target: pathlib.Path, tmp: pathlib.Path) -> None:
    """Triton kernels as they are, the machine code of one CUDA kernel out of the extension, and the library of
    FlashAttention 3 with the code of other kernels blanked: 165 MB, that pack into 5."""
    library = pathlib.Path(source.extract(FLASH_LIBRARY, target))
    library.write_bytes(blank(bytearray(library.read_bytes()), FLASH_KERNELS))
    for file in VLLM_FILES:
        source.extract(file, target)
    import triton

    cuobjdump = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    library = source.extract(VLLM_LIBRARY, tmp)
    code = tmp / "code"
    code.mkdir()
    subprocess.run(
        [cuobjdump, "-xelf", "sm_90a", library], cwd=code, check=True, capture_output=True
    )
    (cubin,) = (data for path in code.iterdir() if VLLM_KERNEL in (data := path.read_bytes()))
    (target / VLLM_CUBIN).write_bytes(cubin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--build", metavar="CUDA_HOME")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tmp = pathlib.Path(name)
        vllm(wheel(tmp, f"vllm=={VLLM}"), args.folder / f"vllm-{VLLM}", tmp)
        for file in SGLANG_FILES:
            wheel(tmp, f"sglang-kernel=={SGLANG}").extract(
                file, args.folder / f"sglang-kernel-{SGLANG}"
            )
        target = args.folder / f"flashinfer-{FLASHINFER}"
        flashinfer(wheel(tmp, f"flashinfer-python=={FLASHINFER}"), target, tmp, args.build)
        with wheel(tmp, f"apache-tvm-ffi=={TVM_FFI}") as ffi:
            ffi.extractall(
                target,
                [n for n in ffi.namelist() if not n.startswith(("tvm_ffi/include", "tvm_ffi/src"))],
            )
    with tarfile.open(f"{args.folder}.tar.xz", "w:xz", preset=3) as archive:
        archive.add(args.folder, ".")


if __name__ == "__main__":
    main()
