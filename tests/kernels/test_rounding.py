"""What rounding to FP8 takes from sums, against numbers that are rounded."""

import pytest
import torch

from gpt2_fp8.kernels.rounding import mean_of_rounded


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_it_is_what_is_left_of_numbers_with_evenly_spread_logarithms(dtype):
    x = 2.0 ** torch.linspace(-4, 4, 800_001, dtype=torch.float64)[:-1]
    found = (x.float().to(dtype).double() / x).mean().item()
    assert mean_of_rounded(dtype) == pytest.approx(found, abs=1e-6)
    assert 0.99 < found < 0.9995


def test_the_sum_of_a_softmax_is_kept():
    """A softmax over 50,257 ids, rounded to E5M2 and divided by the mean: its sum is 1 again to 0.05 %."""
    logits = torch.randn(64, 50257, generator=torch.Generator().manual_seed(0)) * 1.5
    p = logits.softmax(1)
    rounded = (p * 2.0**15).to(torch.float8_e5m2).float() / 2.0**15
    plain, kept = rounded.sum(1).mean().item(), (rounded / mean_of_rounded(torch.float8_e5m2)).sum(1).mean().item()
    assert plain < 0.998
    assert kept == pytest.approx(1, abs=5e-4)
