"""The shares of a tensor that saturate and that become 0, against the casts themselves."""

import math

import pytest
import torch

from gpt2_fp8.fp8 import sampled_pass
from gpt2_fp8.fp8.sampled_pass import figures
from gpt2_fp8.kernels.formats import LARGEST
from gpt2_fp8.layers.fp8_cast import cast, cast_saturating

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOTH = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def spread(rows=64, columns=96, seed=0):
    """Values over forty powers of two, of both signs, a few of them 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(
        torch.randint(-30, 10, (rows, columns), generator=generator).float()
    )
    x[::7, ::5] = 0
    return x


@BOTH
def test_a_given_scale_flushes_and_saturates_what_the_cast_does(dtype):
    x = spread()
    amax, scale, clipped, flushed = figures(x, dtype, "delayed", torch.tensor(16.0)).tolist()
    assert (amax, scale) == (x.abs().max().item(), 16.0)
    there = x != 0
    lost = (cast_saturating(x * 16, dtype).float() == 0) & there
    assert 0 < flushed < 1
    assert flushed == pytest.approx(lost.sum().item() / there.sum().item())
    step = LARGEST[dtype] / (14 if dtype == E4M3 else 7)  # between the two largest numbers
    beyond = (x.abs() * 16 > LARGEST[dtype] + step / 2).sum().item() / there.sum().item()
    assert clipped == pytest.approx(beyond)
    assert (clipped > 0) == (dtype == E4M3)


@BOTH
def test_the_border_of_0_is_the_casts(dtype):
    """Half of the smallest number is rounded to 0, the next float32 above it is not."""
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    border = torch.tensor([smallest / 2, math.nextafter(smallest / 2, 1) * (1 + 2**-20)])
    assert cast_saturating(border, dtype).float().tolist() == [0, smallest]
    assert figures(border.repeat(16)[:, None], dtype, "delayed", torch.tensor(1.0))[3] == 0.5


@BOTH
def test_current_takes_the_amax_to_the_largest_number(dtype):
    amax, scale, clipped, flushed = figures(spread(), dtype, "current").tolist()
    assert amax * scale == pytest.approx(LARGEST[dtype])
    assert clipped == 0
    lost = (cast(spread(), "current", dtype, 1, 1).values.float() == 0) & (spread() != 0)
    assert flushed == pytest.approx(lost.sum().item() / (spread() != 0).sum().item())


@BOTH
@pytest.mark.parametrize(("recipe", "width"), [("block", 128), ("mxfp8", 32), ("rowwise", 200)])
def test_blocks_have_scales_of_their_own(dtype, recipe, width):
    x = spread(16, 200)
    _, scale, clipped, flushed = figures(x, dtype, recipe).tolist()
    meant = cast(x, "block", dtype, 1, width).values.float()
    there = x != 0
    assert clipped == 0
    assert flushed == pytest.approx(((meant == 0) & there).sum().item() / there.sum().item(), abs=1e-7)
    assert math.log2(scale).is_integer()
    assert LARGEST[dtype] / 2 < scale * x.abs().max().item() <= LARGEST[dtype]


def test_a_large_tensor_is_sampled_over_all_its_channels(monkeypatch):
    monkeypatch.setattr(sampled_pass, "MOST", 1000)
    x = torch.zeros(600, 48)
    x[:, 7] = 2.0**-20  # a channel that is flushed
    x[:, 11] = 1.0
    _, _, _, flushed = figures(x, E4M3, "delayed", torch.tensor(1.0)).tolist()
    assert flushed == pytest.approx(0.5, abs=0.1)


def test_what_is_not_finite_shows_in_the_amax():
    x = spread()
    x[3, 3] = math.nan
    assert math.isnan(figures(x, E4M3, "delayed", torch.tensor(1.0))[0])
    assert figures(torch.zeros(4, 4), E4M3, "current").tolist() == [0, 1, 0, 0]
