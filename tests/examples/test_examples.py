# SPDX-License-Identifier: Apache-2.0
"""Every program of include/examples does what it says, from an installed library."""

from conftest import CARGO_OPTIONS, ROOT, run


def test_rust():
    """Cargo has built it with the tests, if those ran before."""
    text = run("cargo", "run", "--release", "--locked", *CARGO_OPTIONS, "--example", "round", cwd=ROOT)
    assert "rounds without trees" in text
