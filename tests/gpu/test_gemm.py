"""FP8 products against float64 products of the same FP8 numbers."""

import pytest
import torch

from gpt2_fp8.kernels import gemm
from gpt2_fp8.kernels.gemm import PAIRS
from tests.gpu.kernels import E4M3, E5M2

pytestmark = pytest.mark.fp8

SHAPES = [(64, 48, 32), (1024, 768, 768), (16, 50304, 768), (4096, 2304, 768), (2304, 768, 4096)]  # M, N, K


def operands(m, n, k, pair=(E4M3, E4M3), dtype=torch.bfloat16, seed=0):
    """a, b, out and the two scales; out is NaN, so that what is not written, or is read, shows."""
    generator = torch.Generator("cuda").manual_seed(seed)
    a, b = (torch.randn(rows, k, device="cuda", generator=generator) for rows in (m, n))
    scales = [torch.tensor([value], device="cuda") for value in (0.3, 0.07)]
    out = torch.full((m, n), float("nan"), device="cuda", dtype=dtype)
    return [(a * 4).to(pair[0]), (b * 2).to(pair[1]), out, *scales]


def exact(a, b, out, a_scale_inv, b_scale_inv, bias=None, add=None):
    product = a.to(torch.float64) @ b.to(torch.float64).T * a_scale_inv.double() * b_scale_inv.double()
    product = product if bias is None else product + bias.double()
    return product if add is None else product + add.double()


def assert_near(got, expected, fast=False):
    """Within the product's own error, relative to the norm, and half a unit in the last place of bf16.

    Between two promotions to float32 the tensor cores keep some 14 bits of a sum (2^-13 is 1.2e-4); with fast
    accumulation nothing is promoted, and the error grows with K.
    """
    assert torch.isfinite(got).all()
    tolerance = (1e-2 if fast else 1e-3) + (2.0**-9 if got.dtype == torch.bfloat16 else 0.0)
    assert ((got.double() - expected).norm() / expected.norm()).item() < tolerance
    # A wrong row, column or corner would drown in the norm of the whole.
    worst = (got.double() - expected).abs().max() / expected.abs().max()
    assert worst.item() < 4 * tolerance


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(shape, pair, dtype, fast):
    given = operands(*shape, pair, dtype)
    assert gemm.matmul(*given, fast_accumulate=fast) is given[2]
    assert_near(given[2], exact(*given), fast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bias_and_matrix_are_added(shape, pair, dtype):
    """Also in place, again and again."""
    given = operands(*shape, pair, dtype)
    m, n, _ = shape
    out, size = given[2], exact(*given).std().item()  # as large as the product, so that a missing or doubled one shows
    bias = (torch.randn(n, device="cuda") * size).bfloat16()
    add = (torch.randn(m, n, device="cuda") * size).to(dtype)
    before = add.clone()
    for extra in ({"bias": bias}, {"add": add}, {"bias": bias, "add": add}):
        out.fill_(float("nan"))
        assert_near(gemm.matmul(*given, **extra), exact(*given, **extra))
    assert torch.equal(add, before)
    for _ in range(3):
        expected = exact(*given, add=out)
        gemm.matmul(*given, add=out)
        assert_near(out, expected)


def test_addresses_at_multiples_of_16_bytes_alone():
    m, n, k = 64, 48, 32
    given = operands(m, n, k)
    bias = torch.randn(n + 8, device="cuda").bfloat16()[8:]
    out = torch.empty(m * n + 8, device="cuda", dtype=torch.bfloat16)[8:].view(m, n)
    given[2] = out
    assert_near(gemm.matmul(*given, bias=bias), exact(*given, bias=bias))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", [(4096, 4800, 1600), (8192, 3072, 768), (3072, 768, 16384), (2048, 50304, 1280)])
def test_the_algorithm_chosen_by_time_gives_the_bits_of_the_first(shape, accumulate, monkeypatch):
    m, n, k = shape
    assert m * n * k >= gemm.WORTH_MULTIPLICATIONS
    results = []
    for worth in (float("inf"), 0):
        monkeypatch.setattr(gemm, "WORTH_MULTIPLICATIONS", worth)
        monkeypatch.setattr(gemm, "_plans", {})
        given = operands(*shape, (E5M2, E4M3), torch.float32 if accumulate else torch.bfloat16)
        given[2].fill_(1.0)
        results.append(gemm.matmul(*given, add=given[2] if accumulate else None))
    assert torch.equal(*results)


def test_an_algorithm_that_refuses_or_rounds_otherwise_is_passed_over():
    out, slow = torch.empty(1024, device="cuda"), torch.ones(2**26, device="cuda")
    asked = []

    def launch(algorithm, to):
        asked.append(algorithm)
        if algorithm == "refuses":
            return 1
        if algorithm in ("first", "same"):
            slow.mul_(1.0)
        if algorithm == "first":
            slow.mul_(1.0)
        to.fill_(2.0 if algorithm == "other" else 3.0)
        return 0

    spare = torch.empty_like(out)
    assert gemm.find_fastest(["first", "refuses", "other", "same"], launch, out, spare) == "same"
    assert gemm.find_fastest(["first", "refuses", "other"], launch, out, spare) == "first"
    assert set(asked) == {"first", "refuses", "other", "same"}


def test_without_memory_to_choose_the_first_is_taken(monkeypatch):
    def full(like):
        raise torch.OutOfMemoryError

    given = operands(8192, 3072, 768)
    expected = gemm.matmul(*given).clone()
    monkeypatch.setattr(gemm, "_plans", {})
    monkeypatch.setattr(gemm, "_draw_operand", full)
    given[2].fill_(float("nan"))
    assert torch.equal(gemm.matmul(*given), expected)
