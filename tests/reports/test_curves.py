"""Curves whose losses, times and crossings are known."""

import math

import pytest

from gpt2_fp8.reports import curves
from tests.reports.made import TOKENS, rows


def test_a_mean_is_that_of_its_tokens_whatever_the_interval():
    each, tens = curves.of(rows(lambda step: step)), curves.of(rows(lambda step: step, every=10))
    assert each.mean(10_000, 1_000) == pytest.approx(95.5)  # steps 91 to 100
    assert tens.mean(10_000, 1_000) == each.mean(10_000, 1_000)
    assert each.mean(250, 100) == pytest.approx(2.5)  # half of step 2, half of step 3
    assert each.mean(300, 10_000) == pytest.approx(2.0)  # from the start
    assert tens.mean(500, 500) == pytest.approx(5.5)


def test_time_leaves_the_first_step_out_and_is_counted_over_a_resume():
    found = curves.of(rows(lambda step: 1.0, seconds=0.5))
    assert (found.seconds[0], found.time) == (0.0, pytest.approx(99 * 0.5))
    assert found.seconds_at(51 * TOKENS) == pytest.approx(25.0)
    assert found.tokens_at(25.0) == pytest.approx(51 * TOKENS)
    assert found.tokens_at(50.0) is None
    again = curves.of(rows(lambda step: 1.0, steps=50) + rows(lambda step: 1.0, start=50))
    assert (again.resumes, found.resumes) == (1, 0)
    assert again.time == pytest.approx(98 * 0.5)


def test_a_step_that_a_resumed_run_logged_again_counts_once():
    found = curves.of(rows(lambda step: 1.0, steps=60) + rows(lambda step: 2.0, start=50))
    assert len(found.losses) == 100
    assert found.mean(6_000, 1_000) == 2.0


def test_losses_that_are_not_finite_are_left_out_and_counted():
    found = curves.of(rows(lambda step: math.nan if step == 100 else 2.0, validations={50: math.inf, 100: 3.0}))
    assert found.mean(10_000, 200) == 2.0
    assert found.mean(10_000, 100) is None
    assert found.not_finite == 2
    assert found.validations == [(10_000, 3.0)]


def test_forged_numbers_are_no_losses():
    found = curves.of(rows(lambda step: 1e300 if step > 90 else 2.0, validations={100: -1.0}, grad_norm=1e300))
    assert found.not_finite == 11
    assert (found.grad_norms, found.validations) == ([], [])


def test_where_a_loss_is_first_reached():
    assert curves.first_below([(0, 3.0), (10, 1.0), (20, 2.0), (30, 0.0)], 1.5) == 7.5


def test_validations_are_joined_by_lines():
    found = curves.of(rows(lambda step: 1.0, validations={50: 4.0, 100: 2.0}))
    assert found.validation(7_500) == 3.0
    assert found.validation(4_000) is None


def test_a_log_without_training_is_an_empty_curve():
    assert curves.of([{"step": 5, "val_loss": 2.0}]).losses == []
