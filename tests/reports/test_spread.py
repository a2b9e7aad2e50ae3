"""Student's t against published quantiles, and differences against values worked out by hand."""

import math

import pytest

from gpt2_fp8.reports import comparison


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [
        (0.95, 1, 6.313752), (0.95, 2, 2.919986), (0.95, 5, 2.015048), (0.975, 10, 2.228139), (0.95, 30, 1.697261),
        (0.95, 1e5, 1.644869), (0.05, 5, -2.015048),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(probability, freedom, quantile):
    assert comparison.student(probability, freedom) == pytest.approx(quantile, abs=2e-6)


def test_welch_by_hand():
    """Variances 1 and 4 of 3 values each: error sqrt(5/3), freedom (5/3)^2 / ((1/3)^2 / 2 + (4/3)^2 / 2) = 50/17."""
    found = comparison.welch([11, 12, 13], [8, 10, 12])
    assert (found.value, found.error) == (2, pytest.approx(math.sqrt(5 / 3)))
    reach = comparison.student(0.975, 50 / 17) * math.sqrt(5 / 3)
    assert (found.low, found.high) == pytest.approx((2 - reach, 2 + reach))


def test_pairs_leave_out_what_the_seeds_share():
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3); unpaired the seeds' own spread hides it."""
    found = comparison.paired_difference([11, 22, 33], [10, 20, 30])
    assert (found.value, found.error) == (2, pytest.approx(1 / math.sqrt(3)))
    assert found.low == pytest.approx(2 - 4.302653 / math.sqrt(3))
    assert comparison.welch([11, 22, 33], [10, 20, 30]).error > 8


def test_a_single_run_has_no_spread():
    assert comparison.welch([3.0], [1.0, 2.0]) == comparison.Difference(1.5)
    assert comparison.paired_difference([3.0], [1.0]).error is None


def test_equal_values_have_no_uncertainty():
    assert comparison.welch([2.0, 2.0], [1.0, 1.0]).high == 1.0
