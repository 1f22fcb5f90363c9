# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of tree_attention against the portable ones and float64, and when they are used.

Which kernel ran cannot be asked. The two add up in different orders, so equal bits mean that one of them ran twice.
"""

import abi
import pytest
import torch
from test_tree_attention import BF16, F16, F32, check, expected, hostile, make_case, run_both


@pytest.fixture(autouse=True)
def hopper(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("no Hopper GPU")


def both(case):
    """Outputs of the kernels that a context picks, and of the portable ones."""
    return case.to("cuda").run(), case.to("cuda").run(abi.context("cuda", True))


def same_bits(case) -> bool:
    native, portable = both(case)
    bits = torch.int32 if native.dtype == F32 else torch.int16
    return torch.equal(native.view(bits), portable.view(bits))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("group", [1, 5, 6, 16])
def test_matches_references(rng, dtype, dim, group):
    requests = [(rng.randint(0, 400), rng.randint(1, 40)) for _ in range(5)]
    run_both(make_case(rng, requests, dim=dim, dtype=dtype, group=group, prefix=True), cpu=False)


@pytest.mark.parametrize("nodes", [1, 16, 64, 100, 256])
def test_long_contexts_are_split(rng, nodes):
    case = make_case(rng, [(rng.randint(9000, 10000), nodes)], kv_heads=4, block_size=784)
    run_both(case, cpu=False)
    assert not same_bits(case)


def test_mixed_lengths(rng):
    requests = [(rng.choice([0, 1, 63, 64, 65, 500, 5000]), rng.choice([0, 1, 7, 33])) for _ in range(40)]
    run_both(make_case(rng, [*requests, (5, 33)], block_size=48, prefix=True), cpu=False)


@pytest.mark.parametrize("dim", [128, 256])
def test_tile_edges(rng, dim):
    for context in (62, 63, 64, 127, 128):
        run_both(make_case(rng, [(context, nodes) for nodes in (1, 2, 63, 64, 65)], dim=dim, kv_heads=1), cpu=False)


@pytest.mark.parametrize("block_size", [16, 48, 64, 784, 1056])
def test_pages_of_whole_boxes_use_them(rng, block_size):
    assert not same_bits(make_case(rng, [(1700, 20)], block_size=block_size, interleaved=True))


def test_what_they_do_not_take_goes_to_the_portable_kernels(rng):
    assert same_bits(make_case(rng, [(700, 20)], block_size=8))
    assert same_bits(make_case(rng, [(700, 20)], dim=64))
    assert same_bits(make_case(rng, [(700, 20)], cache_dtype=F32))
    assert same_bits(make_case(rng, [(700, 20)], key_order=[0, 1, 3, 2]))
    assert same_bits(make_case(rng, [(700, 20)], pad=3))


@pytest.mark.parametrize(
    "options",
    [
        dict(key_order=[1, 0, 2, 3], value_order=[2, 0, 1, 3]),
        dict(pad=8),
        dict(kv_heads=1, block_size=512),
        dict(out_dtype=F32),
        dict(out_dtype=F16),
        dict(softcap=2.0),
    ],
)
def test_strides_and_outputs(rng, options):
    case = make_case(rng, [(300, 20), (31, 3)], **options)
    run_both(case, cpu=False)
    assert not same_bits(case)


@pytest.mark.parametrize("scale", [0.0, -0.2])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_scales(rng, scale, softcap):
    case = make_case(rng, [(200, 20)], softcap=softcap)
    case.scale = scale
    run_both(case, cpu=False)


def test_bits_repeat(rng):
    case = make_case(rng, [(5000, 64), (64, 64)], kv_heads=4)
    first = case.to("cuda").run()
    for _ in range(5):
        assert torch.equal(case.to("cuda").run().view(torch.int16), first.view(torch.int16))


@pytest.mark.sanitize
@pytest.mark.parametrize("what", ["blocks", "seq_lens", "query_start", "num_nodes", "prefix_rows", "ancestor_bits"])
def test_hostile_device_values_do_no_harm(rng, what):
    case = hostile(make_case(rng, [(30, 7), (5, 12), (100, 3), (64, 9)]), what)
    case.run()
    torch.cuda.synchronize()
    if what != "query_start":
        assert case.out[-2:].isnan().all()  # rows of no request


@pytest.mark.sanitize
def test_small_for_the_sanitizer(rng):
    case = make_case(rng, [(70, 5), (0, 3)], kv_heads=1, group=3, prefix=True)
    check(case.to("cuda").run(), expected(case), BF16)
