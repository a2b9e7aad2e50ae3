"""Numbers as codes of 8 bits in blocks."""

import pytest
import torch

from gpt2_fp8.engine import blockwise
from gpt2_fp8.engine.blockwise import BLOCK, decode, encode, map_edges, map_values

CPU = torch.device("cpu")


@pytest.mark.parametrize("signed", [True, False])
def test_a_map_is_that_of_the_paper(signed):
    """256 values in rising order, decades of equal steps whose number doubles, 0 and 1 (Dettmers et al. 2022)."""
    values = map_values(signed, CPU)
    assert len(values) == 256
    assert bool((values.diff() > 0).all())
    assert 0.0 in values
    assert values[-1] == 1
    assert (values[0] == pytest.approx(-0.99297, abs=1e-5)) if signed else (values[0] == 0)
    last = values[values > 0.1]
    assert len(last) - 1 == (64 if signed else 128)
    assert last[:-1].diff().std() < 1e-6
    assert len(map_edges(signed, CPU)) == 255


@pytest.mark.parametrize("count", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_value_of_the_map_is_taken(count, signed):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 10.0 ** torch.linspace(-6, 2, count)
    x = x if signed else x.abs()
    codes, scales = encode(x, signed)
    assert codes.dtype == torch.uint8
    assert scales.shape == (blockwise.blocks(count),)
    got = decode(codes, scales, signed)
    for start in range(0, count, BLOCK):
        part = x[start : start + BLOCK]
        scale = part.abs().max()
        nearest = (map_values(signed, CPU)[None] * scale - part[:, None]).abs().min(1).values
        error = (got[start : start + BLOCK] - part).abs()
        least = torch.zeros(()) if signed else map_values(False, CPU)[1] * scale  # a positive number is not made 0
        assert bool((error <= torch.maximum(nearest, least) + 1e-7 * scale).all())
        if not signed:
            assert got[start : start + BLOCK].max() == scale, "a block's largest is exact"


def test_a_positive_number_never_becomes_0():
    x = torch.cat([torch.ones(1), torch.full((254,), 1e-12), torch.zeros(1)])
    codes, scales = encode(x, signed=False)
    assert bool((decode(codes, scales, signed=False)[:255] > 0).all())
    assert codes[255] == 0


def test_zeros_stay_zeros():
    for signed in (True, False):
        codes, scales = encode(torch.zeros(300), signed)
        assert torch.count_nonzero(decode(codes, scales, signed)) == 0


def test_a_block_decides_for_itself():
    x = torch.cat([torch.full((BLOCK,), 1e-8), torch.full((BLOCK,), 1e8)])
    codes, scales = encode(x, signed=True)
    torch.testing.assert_close(decode(codes, scales, signed=True), x, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("beta2", "most"), [(0.95, 0.15), (0.999, 0.18)])
def test_nearest_is_closer_than_stochastic_rounding(beta2, most):
    """Of AdamW's update, relative to float32's, over 400 noisy gradients. This is why codes are rounded to nearest."""
    errors = {}
    for stochastic in (False, True):
        generator = torch.Generator().manual_seed(1)
        scale = torch.randn(4096, generator=generator).exp()
        exact, kept = [(torch.zeros(4096), torch.zeros(4096)) for _ in range(2)]
        for _ in range(400):
            g = scale * (torch.randn(4096, generator=generator) + 0.1)
            exact, kept = ((m * 0.9 + g * 0.1, v * beta2 + g * g * (1 - beta2)) for m, v in (exact, kept))
            kept = tuple(
                decode(*(_stochastic(x, s, generator) if stochastic else encode(x, s)), s)
                for x, s in zip(kept, (True, False), strict=True)
            )
        update, wanted = (m / v.sqrt() for m, v in (kept, exact))
        errors[stochastic] = ((update - wanted).square().mean() / wanted.square().mean()).sqrt().item()
    assert errors[False] < most
    assert errors[False] < errors[True]


def _stochastic(x, signed, generator):
    table, (_, scales) = map_values(signed, CPU), encode(x, signed)
    part = x / scales.repeat_interleave(BLOCK)[: len(x)]
    low = (torch.searchsorted(table, part, right=True) - 1).clamp(0, 254)
    up = torch.rand(len(x), generator=generator) < (part - table[low]) / (table[low + 1] - table[low])
    codes = low + up
    return (codes if signed else torch.where(part > 0, codes.clamp_min(1), codes)).to(torch.uint8), scales
