# SPDX-License-Identifier: Apache-2.0
"""Programs find, link and load an installed libddtree through pkg-config and CMake."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import CC, EXAMPLES, ROOT, run

VERSION = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic")


def pkg_config(prefix: Path, *options: str) -> list[str]:
    if shutil.which("pkg-config") is None:
        pytest.skip("no pkg-config")
    env = {"PKG_CONFIG_PATH": str(prefix / "lib" / "pkgconfig")}
    return run("pkg-config", *options, "ddtree", env=env).split()


def build(prefix: Path, out: Path, *options: str) -> str:
    """Compiles the C example against the prefix and runs it: what it printed."""
    flags = pkg_config(prefix, "--cflags", "--libs", *options)
    # the example's own; a static library must name it
    flags += [] if "--static" in options else ["-lm"]
    run(CC, *STRICT, EXAMPLES / "round.c", "-o", out, *flags, f"-Wl,-rpath,{prefix}/lib")
    return run(out)


def needed(program: Path) -> str:
    return run("readelf", "-d", program)


def test_what_is_installed(prefix):
    files = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if not path.is_dir()}
    assert files == {
        "include/ddtree.h",
        "lib/libddtree.a",
        "lib/libddtree.so",
        "lib/libddtree.so.1",
        f"lib/libddtree.so.{VERSION}",
        "lib/pkgconfig/ddtree.pc",
        "lib/cmake/ddtree/ddtree-config.cmake",
        "lib/cmake/ddtree/ddtree-config-version.cmake",
    }
    # the soname is the ABI, which is what makes the loader refuse another one
    header = (prefix / "include" / "ddtree.h").read_text()
    abi = re.search(r"^#define DDT_ABI_VERSION (\d+)", header, re.M)[1]
    assert f"soname: [libddtree.so.{abi}]" in needed(prefix / "lib" / "libddtree.so")


def test_shared_through_pkg_config(prefix, tmp_path):
    assert pkg_config(prefix, "--modversion") == [VERSION]
    text = build(prefix, tmp_path / "round")
    assert text.startswith(f"ddtree/{VERSION} abi/1 git/") and "the same texts" in text
    assert "[libddtree.so.1]" in needed(tmp_path / "round")


def test_static_through_pkg_config(prefix, tmp_path):
    # a linker prefers a shared library, so a prefix that has none
    static = tmp_path / "static"
    shutil.copytree(prefix, static, symlinks=True)
    for path in static.glob("lib/libddtree.so*"):
        path.unlink()
    assert "the same texts" in build(static, tmp_path / "round", "--static")
    assert "libddtree" not in needed(tmp_path / "round")


def test_a_prefix_may_move(prefix, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(prefix, moved, symlinks=True)
    assert str(prefix) not in " ".join(pkg_config(moved, "--cflags", "--libs"))
    assert "the same texts" in build(moved, tmp_path / "round")


def cmake() -> str:
    """The system's, or that of the wheel, whose start script may not be on PATH."""
    found = shutil.which("cmake")
    if found is None and importlib.util.find_spec("cmake") is not None:
        import cmake as package

        found = str(Path(package.CMAKE_BIN_DIR) / "cmake")
    return found or pytest.skip("no cmake")


CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.16)
project(consumer C)
find_package(ddtree {version} CONFIG REQUIRED)
foreach(kind ddtree static)
  add_executable(with_${{kind}} {source})
  target_link_libraries(with_${{kind}} PRIVATE ddtree::${{kind}} m)
endforeach()
"""


def test_cmake(prefix, tmp_path):
    program = cmake()
    lists = tmp_path / "CMakeLists.txt"
    lists.write_text(CMAKE_LISTS.format(version=VERSION, source=EXAMPLES / "round.c"))
    configure = (program, "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run(*configure)
    run(program, "--build", tmp_path / "build")
    for kind in ("ddtree", "static"):
        assert "the same texts" in run(tmp_path / "build" / f"with_{kind}")
    assert "[libddtree.so.1]" in needed(tmp_path / "build" / "with_ddtree")
    assert "libddtree" not in needed(tmp_path / "build" / "with_static")

    lists.write_text(CMAKE_LISTS.format(version="99.0", source=EXAMPLES / "round.c"))
    refused = subprocess.run(
        [str(part) for part in configure], capture_output=True, text=True, check=False
    )
    assert refused.returncode != 0 and f"version: {VERSION}" in refused.stderr


def test_install_wants_a_prefix():
    for arguments in ([], ["--prefix"]):
        result = subprocess.run(
            [ROOT / "ci" / "run.sh", "install", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 1 and "--prefix DIR" in result.stderr
