# SPDX-License-Identifier: Apache-2.0
"""Makes a wheel of vllm_ddtree with a built libddtree and its header inside.

The wheel works with any Python 3; its platform is the newest glibc symbol that the library asks for."""

import argparse
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# PEP 600 has tags from 2.17, the oldest glibc for all architectures that are built
OLDEST = (2, 17)
# a wheel for one platform, though no Python extension is compiled
SETUP = """
from setuptools import Distribution, setup

class WithLibrary(Distribution):
    def has_ext_modules(self):
        return True

setup(distclass=WithLibrary)
"""


def glibc_floor(library: Path) -> tuple[int, int]:
    """The newest version of glibc that the library has a symbol of."""
    text = subprocess.run(
        ["readelf", "--version-info", library], check=True, capture_output=True, text=True
    ).stdout
    found = {(int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", text)}
    if not found:
        sys.exit(f"ci/wheel.py: {library} asks for no glibc: not a shared library for Linux")
    return max(found | {OLDEST})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("library", type=Path, help="libddtree.so")
    parser.add_argument("--out", type=Path, required=True, help="folder for the wheel")
    parser.add_argument("--most-glibc", help="fail if the library needs a newer one, e.g. 2.28")
    arguments = parser.parse_args()

    floor = glibc_floor(arguments.library)
    if arguments.most_glibc and floor > tuple(map(int, arguments.most_glibc.split("."))):
        sys.exit(f"ci/wheel.py: needs glibc {floor[0]}.{floor[1]}, want {arguments.most_glibc}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # a copy, since a library inside of the checkout's package would go before a new build
        source = Path(folder) / "source"
        shutil.copytree(
            ROOT / "vllm_patch", source, ignore=shutil.ignore_patterns("lib", "build", "*.egg-info")
        )
        inside = source / "vllm_ddtree" / "lib"
        inside.mkdir()
        (source / "setup.py").write_text(SETUP)
        shutil.copyfile(arguments.library, inside / "libddtree.so")
        shutil.copyfile(ROOT / "include" / "ddtree.h", inside / "ddtree.h")
        build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([sys.executable, *build, "--wheel-dir", folder, source], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        tag = f"manylinux_{floor[0]}_{floor[1]}_{platform.machine()}"
        tags = ["-m", "wheel", "tags", "--remove", "--python-tag", "py3", "--abi-tag", "none"]
        tags += ["--platform-tag", tag, wheel]
        subprocess.run([sys.executable, *tags], check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        print(shutil.copy(wheel, arguments.out))


if __name__ == "__main__":
    main()
