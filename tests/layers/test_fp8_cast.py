"""FP8 casts in plain torch: every edge of both formats against their definition, and the scales of every recipe."""

import math
from itertools import pairwise

import pytest
import torch

from gpt2_fp8.layers.fp8_cast import BLOCK, amax, cast, cast_saturating, scale_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# exponent bits, mantissa bits, bias, largest finite number (Micikevicius et al. 2022, table 1)
FORMATS = {E4M3: (4, 3, 7, 448.0), E5M2: (5, 2, 15, 57344.0)}
formats = pytest.mark.parametrize("dtype", FORMATS, ids=["E4M3", "E5M2"])


def numbers(dtype):
    """Every finite number of a format that is not negative, by the definition of its bits, in order."""
    exponents, mantissas, bias, largest = FORMATS[dtype]
    found = [m * 2.0 ** (1 - bias - mantissas) for m in range(2**mantissas)]
    found += [(1 + m / 2**mantissas) * 2.0 ** (e - bias) for e in range(1, 2**exponents) for m in range(2**mantissas)]
    return [number for number in found if number <= largest]


def nearest(value, of):
    """The nearest of a format's numbers `of`, of two the one with an even last bit; the largest beyond the largest."""
    number = min(range(len(of)), key=lambda i: (abs(of[i] - abs(value)), i % 2))
    return math.copysign(of[number], value)


@formats
def test_every_edge_is_rounded_to_nearest_even(dtype):
    """Each number, each midpoint between two, and their neighbours in float32; either sign."""
    of = numbers(dtype)
    assert of[-1] == FORMATS[dtype][3]
    exact = torch.tensor([*of, *((a + b) / 2 for a, b in pairwise(of))], dtype=torch.float32)
    inf = torch.tensor(torch.inf)
    given = torch.cat([exact, torch.nextafter(exact, inf), torch.nextafter(exact, -inf)])
    given = torch.cat([given, -given])
    assert cast_saturating(given, dtype).tolist() == [nearest(value, of) for value in given.double().tolist()]


@formats
def test_within_the_format_a_cast_is_torchs_own_bit_for_bit(dtype):
    given = torch.randn(10**5, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.linspace(-12, 1, 10**5)
    ours, theirs = cast_saturating(given, dtype).view(torch.uint8), given.to(dtype).view(torch.uint8)
    assert torch.equal(ours, theirs)
    assert len(ours.unique()) > 100


@formats
def test_what_is_too_large_saturates_nan_stays_and_zeros_keep_their_sign(dtype):
    largest = FORMATS[dtype][3]
    given = torch.tensor([largest * 1.01, 1e30, torch.inf, -largest * 2, -torch.inf, torch.nan])
    assert cast_saturating(given, dtype).tolist()[:5] == [largest] * 3 + [-largest] * 2
    assert cast_saturating(given, dtype)[5].isnan()
    assert cast_saturating(torch.tensor([0.0, -0.0]), dtype).view(torch.uint8).tolist() == [0, 0x80]


# Scales


@pytest.mark.parametrize(
    ("seen", "scale"),
    [
        (448.0, 1.0),
        (3.0, torch.tensor(448.0).div(3.0).item()),
        (0.0, 1.0),
        (torch.inf, 1.0),
        (torch.nan, 1.0),
        (1e-44, torch.finfo(torch.float32).max),
    ],
)
def test_current_scaling_is_the_largest_number_over_the_amax(seen, scale):
    """The last three as Transformer Engine has them (`recipe_common.cuh`)."""
    assert scale_of(torch.tensor(seen), E4M3).item() == scale


@formats
def test_current_scaling_takes_the_tensors_own_amax(dtype):
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(0)) * 1e-5
    made = cast(x, "current", dtype, 1, BLOCK)
    scale = FORMATS[dtype][3] / x.abs().max()
    assert torch.equal(made.values.float(), (x * scale).to(dtype).float())
    assert torch.equal(made.scale_inv, 1 / scale)
    assert made.values.float().abs().max() == FORMATS[dtype][3]


def test_delayed_scaling_takes_the_scale_that_it_is_given():
    x, scale = torch.tensor([[1.0, -3.0, 500.0]]), torch.tensor(2.0)
    made = cast(x, "delayed", E4M3, 1, BLOCK, scale)
    assert (made.values.tolist(), made.scale_inv.item()) == ([[2, -6, 448]], 0.5)
    assert amax(x).item() == 500


@formats
@pytest.mark.parametrize(("rows", "columns"), [(1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)])
@pytest.mark.parametrize("shape", [(256, 384), (200, 48), (130, 129)], ids=str)
def test_every_block_has_its_own_power_of_two(dtype, rows, columns, shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.logspace(-9, 3, shape[0])[:, None]
    x[0], largest = 0, FORMATS[dtype][3]
    made = cast(x, "block", dtype, rows, columns)
    assert made.scale_inv is None
    for i in range(0, shape[0], rows):
        for j in range(0, shape[1], columns):
            block = x[i : i + rows, j : j + columns]
            peak = block.abs().max().item()
            scale = 2.0 ** math.floor(math.log2(largest / peak)) if peak else 1.0
            expected = (block * scale).to(dtype).float() / scale
            assert torch.equal(made.values[i : i + rows, j : j + columns].float(), expected)
