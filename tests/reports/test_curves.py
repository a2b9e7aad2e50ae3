"""Curves whose losses, times and crossings are known."""

import math

import numpy as np
import pytest

from gpt2_fp8.reports import runs
from tests.reports.made import TOKENS, rows


def test_a_mean_is_that_of_its_tokens_whatever_the_interval():
    each, tens = runs.read_curve(rows(lambda step: step)), runs.read_curve(rows(lambda step: step, every=10))
    assert each.mean(10_000, 1_000) == pytest.approx(95.5)  # steps 91 to 100
    assert tens.mean(10_000, 1_000) == pytest.approx(95.5)
    assert each.mean(250, 100) == pytest.approx(2.5)  # half of step 2, half of step 3
    assert each.mean(300, 10_000) == pytest.approx(2.0)  # from the start
    assert tens.mean(np.array([500, 1_000]), 500) == pytest.approx([5.5, 5.5])
    assert (each.interval, tens.interval) == (TOKENS, 10 * TOKENS)


def test_time_leaves_the_first_step_out_and_is_counted_over_a_resume():
    found = runs.read_curve(rows(lambda step: 1.0, seconds=0.5))
    assert (found.seconds[0], found.seconds[-1]) == (0.0, pytest.approx(99 * 0.5))
    assert found.seconds_at(51 * TOKENS) == pytest.approx(25.0)
    again = runs.read_curve(rows(lambda step: 1.0, steps=50) + rows(lambda step: 1.0, start=50))
    assert again.seconds[-1] == pytest.approx(98 * 0.5)


def test_a_step_that_a_resumed_run_logged_again_counts_once():
    found = runs.read_curve(rows(lambda step: 1.0, steps=60) + rows(lambda step: 2.0, start=50))
    assert (len(found.losses), found.mean(6_000, 1_000)) == (100, pytest.approx(2.0))


def test_losses_that_are_not_finite_are_left_out():
    found = runs.read_curve(rows(lambda step: math.nan if step == 100 else 2.0, validations={50: math.inf, 100: 3.0}))
    assert found.mean(10_000, 200) == pytest.approx(2.0)
    assert math.isnan(found.mean(10_000, 100))
    assert found.validations.tolist() == [[10_000.0], [3.0]]


def test_where_a_loss_is_first_reached():
    at, losses = np.array([0.0, 10, 20, 30]), np.array([3.0, 1.0, 2.0, 0.0])
    assert (runs.first_below(at, losses, 1.5), runs.first_below(at, losses, 3.5)) == (pytest.approx(7.5), 0)
    assert math.isnan(runs.first_below(at, losses, -1.0))
