# SPDX-License-Identifier: Apache-2.0
"""The fast interpreter writes, bit for bit, what Triton's writes."""

import os

import compare
import pytest
import torch
import triton
import triton.language as tl

FULL = os.environ.get("DDTREE_TEST_FULL") == "1"


@pytest.fixture
def launches():
    with compare.every_launch() as launches:
        yield launches


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint32]
FLOATS = [torch.float32, torch.float64]


def numbers(dtype, size):
    if dtype == torch.bool:
        return torch.rand(size) < 0.5
    if dtype.is_floating_point:
        return (torch.randn(size) * 10).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, (size,), dtype=torch.int64).to(dtype)


@triton.jit
def _arithmetic_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + N + i, x - y)
    tl.store(out_ptr + 2 * N + i, x * y)
    tl.store(out_ptr + 3 * N + i, tl.maximum(x, y))
    tl.store(out_ptr + 4 * N + i, tl.minimum(x, 3))
    tl.store(out_ptr + 5 * N + i, tl.where(x < y, x, 7))
    tl.store(out_ptr + 6 * N + i, (x >= 2) & (y != x))
    tl.store(out_ptr + 7 * N + i, 2 - x)


@pytest.mark.parametrize("out", [torch.int64, torch.float32, torch.uint8])
@pytest.mark.parametrize("y", [*INTEGERS, *FLOATS])
@pytest.mark.parametrize("x", [*INTEGERS, *FLOATS])
def test_arithmetic_between_types(launches, x, y, out):
    outputs = torch.zeros(8 * 64, dtype=out)
    _arithmetic_kernel[(1,)](numbers(x, 64), numbers(y, 64), outputs, N=64)
    assert launches and outputs.any()


@triton.jit
def _integer_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    tl.store(out_ptr + i, x // y)
    tl.store(out_ptr + N + i, x % y)
    tl.store(out_ptr + 2 * N + i, x // 3)
    tl.store(out_ptr + 3 * N + i, (x & y) | (x ^ 5))
    tl.store(out_ptr + 4 * N + i, x >> 3)
    tl.store(out_ptr + 5 * N + i, x << 1)
    tl.store(out_ptr + 6 * N + i, x.to(tl.float32) / 7)
    tl.store(out_ptr + 7 * N + i, ~(x > y))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
def test_integers(launches, dtype):
    y = torch.randint(1, 100, (64,)) * torch.randint(1, 2**20, (64,))
    if dtype != torch.uint32:
        y *= torch.randint(0, 2, (64,)) * 2 - 1
    outputs = torch.zeros(8 * 64, dtype=torch.int64)
    _integer_kernel[(1,)](numbers(dtype, 64), y.to(dtype), outputs, N=64)
    assert launches and outputs.any()


@triton.jit
def _scalar_kernel(x_ptr, out_ptr, count, big, scale, N: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(x_ptr + row)
    absent = tl.load(x_ptr + row, mask=x > 0, other=-1)
    step = 4
    total = 0
    for i in range(0, count, step):
        total += x // 2 + i
    if x > 0 and count > 1:
        total = -total
    tl.store(out_ptr + row * N, total)
    tl.store(out_ptr + row * N + 1, absent)
    tl.store(out_ptr + row * N + 2, big + row)
    tl.store(out_ptr + row * N + 3, tl.cdiv(count, 3) * tl.num_programs(0))
    tl.store(out_ptr + row * N + 4, x * x, mask=x < 0)
    tl.store(out_ptr + row * N + 5, scale * row)


@pytest.mark.parametrize("out", [torch.int64, torch.float32])
@pytest.mark.parametrize("x", [torch.int32, torch.int64])
def test_scalars_and_control_flow(launches, x, out):
    values = torch.tensor([-7, 0, 3, 5], dtype=x)
    outputs = torch.zeros(4, 8, dtype=out)
    _scalar_kernel[(4,)](values, outputs, 9, 2**40, 0.25, N=8)
    assert outputs.any()


@triton.jit
def _reduction_kernel(x_ptr, out_ptr, index_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    value, index = tl.max(x, axis=0, return_indices=True)
    tl.store(out_ptr, value)
    tl.store(out_ptr + 1, tl.sum(x, axis=0))
    tl.store(out_ptr + 2, tl.min(x, axis=0))
    tl.store(out_ptr + 3, tl.max(x, axis=0))
    tl.store(out_ptr + 8 + tl.arange(0, N), tl.cumsum(x, axis=0))
    tl.store(index_ptr, index)
    tl.store(index_ptr + 1, tl.argmin(x, axis=0))
    tl.store(index_ptr + 2, tl.sum((x > 0).to(tl.int32), axis=0))


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_reductions(launches, dtype, nan):
    # sums stay in range: Triton's interpreter refuses an overflow
    x = numbers(dtype, 256) // (2**10 if dtype == torch.int32 else 1)
    x[7] = x.max()
    if nan and dtype.is_floating_point:
        x[100] = float("nan")
    outputs, indices = torch.zeros(512, dtype=dtype), torch.zeros(3, dtype=torch.int32)
    _reduction_kernel[(1,)](x, outputs, indices, N=256)
    assert outputs.any()


@triton.jit
def _float_kernel(x_ptr, bits_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < N - 5, other=float("-inf")).to(tl.float32)
    tl.store(out_ptr + i, tl.exp(x))
    tl.store(out_ptr + N + i, tl.log(tl.maximum(x, 0.0)))
    tl.store(out_ptr + 2 * N + i, tl.rand(tl.load(bits_ptr), i))
    tl.store(bits_ptr + 1 + i, x.to(tl.int32, bitcast=True))
    tl.store(bits_ptr + 1 + N + i, x.to(tl.float64).to(tl.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_floats_and_random_numbers(launches, dtype):
    x = torch.randn(64).to(dtype)
    bits, outputs = torch.randint(0, 2**31, (192,), dtype=torch.int32), torch.zeros(192)
    _float_kernel[(1,)](x, bits, outputs, N=64)
    assert outputs.any()


@triton.jit
def _memory_kernel(addresses_ptr, flags_ptr, counts_ptr, n, N: tl.constexpr):
    i = tl.arange(0, N)
    base = tl.load(addresses_ptr + tl.program_id(0)).to(tl.pointer_type(tl.int32))
    flags = tl.load(flags_ptr + i)
    tl.store(base + i, i + n, mask=flags)
    tl.store(flags_ptr + i, ~flags, mask=i % 2 == 0)
    tl.atomic_add(counts_ptr + i // 4, 1, mask=flags)
    tl.atomic_or(counts_ptr + N + i // 8, tl.full((N,), 1, tl.int32) << (i % 8), mask=flags)


def test_addresses_masks_and_atomics(launches):
    targets = torch.zeros(2, 64, dtype=torch.int32)
    addresses = torch.tensor([row.data_ptr() for row in targets], dtype=torch.uint64)
    counts = torch.zeros(128, dtype=torch.int32)
    _memory_kernel[(2,)](addresses, numbers(torch.bool, 64), counts, 5, N=64)
    assert targets.any() and counts[:64].any() and counts[64:].any()


def test_bf16_is_rounded_to_nearest_even():
    """As by hardware and PyTorch. Triton's interpreter truncates, so nothing else here stores f32 as bf16."""
    from vllm_cpu_runtime import fast_interpreter

    ties = (torch.arange(2**14, 2**14 + 64, dtype=torch.int32) * 2**16 + 2**15).view(torch.float32)
    x = torch.cat(
        [torch.randn(4096), ties, torch.tensor([float("inf"), -float("inf"), 0.0, 1e-40, 3.4e38])]
    )
    bits = fast_interpreter.Tensor(x.numpy()).to(tl.bfloat16).data
    assert torch.equal(
        torch.from_numpy(bits.view("int16")).view(torch.bfloat16), x.to(torch.bfloat16)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 1.7])
def test_sampled_tokens(launches, temperature, dtype):
    """Also the path that serving takes: seeds over the whole int64 range, positions past 2**31, two vocabulary blocks."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    rows, vocab, slots = (600 if FULL else 24), 1300, 8
    tokens = gumbel_sample(
        (3 * torch.randn(rows, vocab)).to(dtype),
        torch.randint(0, slots, (rows,)),
        torch.full((slots,), temperature),
        torch.randint(-(2**63), 2**63 - 1, (slots,)),
        torch.randint(0, 2**33, (rows,)),
        apply_temperature=True,
        is_drafting=bool(rows % 2),
    )
    assert launches["_gumbel_sample_kernel"] == 1 and len(set(tokens.tolist())) > 4


@pytest.mark.parametrize("block_verification", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rejection_sampling(launches, temperature, block_verification):
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    requests, steps, vocab = 3, 5, 600
    rows = requests * (steps + 1)
    logits = 2 * torch.randn(rows, vocab)
    # half of the drafts are the target's choice
    drafts = torch.where(
        torch.rand(rows) < 0.5, logits.argmax(-1).roll(1), torch.randint(0, vocab, (rows,))
    )
    sampled, count = rejection_sample(
        logits,
        None,
        drafts.int(),
        torch.arange(requests + 1, dtype=torch.int32) * (steps + 1),
        torch.arange(rows),
        torch.arange(requests),
        torch.arange(requests).repeat_interleave(steps + 1),
        torch.arange(steps + 1, dtype=torch.int32).repeat(requests),
        torch.full((requests,), temperature),
        torch.randint(-(2**63), 2**63 - 1, (requests,)),
        num_speculative_steps=steps,
        use_block_verification=block_verification,
    )
    assert count.min() >= 1 and launches["_rejection_kernel"] == 1


def test_penalties(launches):
    from vllm.v1.worker.gpu.sample.penalties import apply_penalties, bincount

    requests, vocab, length = 3, 500, 40
    tokens = torch.randint(0, vocab, (requests, length), dtype=torch.int32)
    prompt_mask = torch.zeros(requests, (vocab + 31) // 32, dtype=torch.int32)
    counts = torch.zeros(requests, vocab, dtype=torch.int32)
    lengths = torch.tensor([40, 25, 31], dtype=torch.int32)
    bincount(torch.arange(requests), tokens, lengths // 2, lengths, prompt_mask, counts, length)
    logits = torch.randn(requests * 4, vocab)
    apply_penalties(
        logits,
        torch.arange(requests).repeat_interleave(4),
        torch.randint(0, vocab, (requests * 4,), dtype=torch.int32),
        torch.arange(4, dtype=torch.int32).repeat(requests),
        torch.tensor([1.3, 1.0, 1.1]),
        torch.tensor([0.0, 0.5, 0.2]),
        torch.tensor([0.3, 0.0, 0.1]),
        prompt_mask,
        counts,
    )
    assert launches.keys() == {"_bincount_kernel", "_penalties_kernel"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_and_ranks(dtype):
    """Against PyTorch: here Triton's interpreter is wrong for bf16."""
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    logits = (2 * torch.randn(5, 1500)).to(dtype)
    sampled = torch.randint(0, 1500, (5,))
    scores = compute_topk_scores(logits, 3, sampled)
    exact = logits.double().log_softmax(-1)
    assert torch.equal(
        scores.selected_token_ranks.long(), (logits >= logits.gather(1, sampled[:, None])).sum(-1)
    )
    ids = scores.logprob_token_ids.long()
    assert torch.equal(ids[:, 0], sampled)
    assert torch.allclose(scores.logprobs.double(), exact.gather(1, ids), atol=1e-5)
