# SPDX-License-Identifier: Apache-2.0
import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import vllm_trees


def load_tool():
    spec = importlib.util.spec_from_file_location("ddtree_tool", vllm_trees.PATCH / "tool.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tool():
    return load_tool()


@pytest.fixture(scope="session", params=vllm_trees.VERSIONS)
def version(request):
    return request.param


@pytest.fixture(scope="session")
def pristine(version):
    """path -> bytes of the released files that the series touches."""
    try:
        return vllm_trees.pristine_bytes(version)
    except vllm_trees.Unavailable as exc:
        pytest.skip(str(exc))


@pytest.fixture
def tree(tmp_path, version, pristine):
    """The root of a small, pristine vllm package."""
    return vllm_trees.make_tree(tmp_path / "site-packages", version, pristine)
