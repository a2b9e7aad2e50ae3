"""What rounding to FP8 takes from sums, against numbers that are rounded; and the ids that stand for a vocabulary."""

import pytest
import torch

from gpt2_fp8.kernels.formats import mean_of_rounded
from tests.layers.standins import families


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_it_is_what_is_left_of_numbers_with_evenly_spread_logarithms(dtype):
    x = 2.0 ** torch.linspace(-4, 4, 800_001, dtype=torch.float64)[:-1]
    found = (x.float().to(dtype).double() / x).mean().item()
    assert mean_of_rounded(dtype) == pytest.approx(found, abs=1e-6)
    assert 0.99 < found < 0.9995


def test_the_sum_of_a_softmax_is_kept():
    """A softmax over 50,257 ids, rounded to E5M2 and divided by the mean: its sum is 1 again to 0.05 %."""
    p = (torch.randn(64, 50257, generator=torch.Generator().manual_seed(0)) * 1.5).softmax(1)
    rounded = (p * 2.0**15).to(torch.float8_e5m2).float() / 2.0**15
    assert rounded.sum(1).mean().item() < 0.998
    kept = (rounded / mean_of_rounded(torch.float8_e5m2)).sum(1).mean().item()
    assert kept == pytest.approx(1, abs=5e-4)


def test_the_most_frequent_targets_come_first_and_then_the_smallest_ids():
    with families():
        from gpt2_fp8.kernels.probabilities import choose_frequent

    def chosen(targets, columns):
        rows = torch.arange(columns, dtype=torch.int32)[:, None].view(torch.float8_e4m3fn)  # each says which it is
        found = choose_frequent(torch.tensor(targets), rows, columns - 1)
        assert found.counted == min(len(found.weight), columns - 1)
        return found.weight.view(torch.int32).flatten().tolist()

    assert chosen([5, 9, 5, -1, 2, 9, 5, -1, -1, -1], 12) == [5, 9, 2, 0, 1, 3, 4, 6, 7, 8, 10, 11]
    assert (chosen([50000], 50304), chosen([-1, -1], 3000)) == ([50000, *range(2047)], list(range(2048)))
