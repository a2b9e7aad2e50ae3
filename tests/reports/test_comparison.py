"""Conditions, gaps and times to the same loss, on runs whose losses are known."""

import numpy as np
import pytest
from matplotlib.image import imread

from gpt2_fp8.reports import compare_conditions, compare_plot, compare_text, conditions, find_runs, sections, verdict
from gpt2_fp8.reports.checklist import FAILS, HOLDS, UNKNOWN
from tests.reports.made import TOKENS, rows, run, settings
from tests.reports.sweeps import answers, compared, line, notes, sweep


def names(folder):
    return [condition.name for condition in conditions.of(find_runs.below([folder], lambda *_: None).runs)]


def test_runs_that_differ_in_the_seed_alone_are_one_condition(tmp_path):
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid")
    found = compared(tmp_path)
    assert [(r.condition.name, len(r.condition.runs)) for r in found.results] == [("bf16", 3), ("fp8_hybrid", 3)]
    assert found.results[0].condition.seeds == ["1", "2", "3"]


def test_a_condition_is_named_by_as_few_keys_as_tell_it_from_others(tmp_path):
    """Precisions with different backends are told apart by the precision alone; two rates need the rate."""
    sweep(tmp_path, "bf16", changed={"precision__backend": "reference"})
    sweep(tmp_path, "fp8_hybrid", changed={"recipe__name": "delayed"})
    assert names(tmp_path) == ["bf16", "fp8_hybrid"]
    sweep(tmp_path, "fp8_hybrid", above=1.0, changed={"recipe__name": "current", "optim__lr": 0.5})
    assert names(tmp_path) == ["bf16", "fp8_hybrid recipe=delayed", "fp8_hybrid recipe=current"]


def test_what_is_only_logged_or_named_makes_no_condition(tmp_path):
    sweep(tmp_path, seeds=[1], changed={"trainer__log_every_n_steps": 10, "run_name": "x"})
    sweep(tmp_path, seeds=[2], above=0.5)
    assert names(tmp_path) == ["bf16"]


def test_the_gap_and_its_spread(tmp_path):
    """FP8 is 0.1 above bf16 in every seed, so pairs have no error; the seeds have a variance of 0.0001 each."""
    sweep(tmp_path, "fp8_hybrid", above=0.1)
    sweep(tmp_path, "bf16")
    found = compared(tmp_path)
    assert found.base.name == "bf16"
    gap = found.results[1].validation
    assert gap.difference.value == pytest.approx(0.1)
    assert gap.relative == pytest.approx(0.1 / 5)
    assert gap.difference.error == pytest.approx((2 * 0.0001 / 3) ** 0.5)
    assert gap.difference.freedom == pytest.approx(4)
    assert gap.difference.above == pytest.approx(0.1 + 2.131847 * gap.difference.error, rel=1e-6)
    assert (gap.paired.value, gap.paired.error) == (pytest.approx(0.1), pytest.approx(0, abs=1e-9))
    train = found.results[1].train
    assert train.loss.mean == pytest.approx(10.1 - 98 / 20)  # the mean of steps 96 to 100
    assert train.base.mean == pytest.approx(10 - 98 / 20)


def test_time_to_the_same_loss(tmp_path):
    """FP8 is 0.5 below, which is 10 steps earlier, at half the time a step; another is above, so bf16 is earlier."""
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", above=-0.5, seconds=0.25)
    sweep(tmp_path, "fp8_e4m3", above=0.5)
    base, worse, better = sorted(compared(tmp_path).results, key=lambda r: r.condition.name)
    assert (base.to_train, base.to_validation) == ([], None)
    end = better.to_train[-1]
    assert (end.share, end.loss) == (1.0, pytest.approx(10 - 98 / 20)), "the base's, which is the higher"
    assert (end.tokens, end.base_tokens) == (pytest.approx(90 * TOKENS), 100 * TOKENS)
    assert (end.seconds, end.base_seconds) == (pytest.approx(89 * 0.25), pytest.approx(99 * 0.5))
    end = worse.to_train[-1]
    assert (end.loss, end.tokens) == (pytest.approx(10.5 - 98 / 20), 100 * TOKENS)
    assert (end.base_tokens, end.base_seconds) == (pytest.approx(90 * TOKENS), pytest.approx(89 * 0.5))
    half = better.to_train[0]
    assert (half.share, half.loss) == (0.5, pytest.approx(10 - 48 / 20))
    assert (half.tokens, half.base_tokens) == (pytest.approx(40 * TOKENS), 50 * TOKENS)
    assert (worse.to_validation.loss, worse.to_validation.tokens) == (5.5, 100 * TOKENS)


@pytest.mark.parametrize("above", [0.0005, -0.0005, 0.0])
def test_losses_that_are_nearly_equal_still_have_a_time(above, tmp_path):
    """A condition that is 0.01 % above, at three quarters of the time a step, needs less time for the same loss."""
    falling = {25: 7.0, 50: 6.0, 75: 5.5, 100: 5.0}
    for name, more, seconds in (("bf16", 0.0, 0.4), ("fp8_hybrid", above, 0.3)):
        validations = {step: loss + more for step, loss in falling.items()}
        logged = rows(line(more), every=10, seconds=seconds, validations=validations)
        run(tmp_path / name, logged, settings(name))
    result = compared(tmp_path).results[1]
    for reached in (*result.to_train, result.to_validation):
        assert reached.tokens / reached.base_tokens == pytest.approx(1, abs=0.005)
        assert reached.seconds / reached.base_seconds == pytest.approx(0.75, abs=0.005)
    shown = compare_text.text(sections.of(compared(tmp_path), [], []))
    assert "not reached" not in shown
    assert "25.0 % less time" in shown


def test_losses_between_two_logged_points_are_on_a_straight_line(tmp_path):
    """Equal losses logged every 10 of 40 steps: no stairs over tokens, and at equal time the faster one's own loss."""
    for name, seconds in (("bf16", 0.5), ("fp8_hybrid", 0.4)):
        run(tmp_path / name, rows(line(), steps=40, every=10, seconds=seconds), settings(name))
    found = compared(tmp_path)
    assert found.width == 10 * TOKENS, "an interval, which is more than 5 %"
    for result in found.results:
        points = compare_conditions.curve(result, found, by_time=False)
        assert points[0][0] == 10 * TOKENS, "none before the first that was logged"
        for at, spread in points:
            assert spread.mean == pytest.approx(10 - (at / TOKENS - 4.5) / 20)
    assert found.results[1].at_tokens[0] is None, "a tenth of the tokens is before that"
    for at, spread in compare_conditions.curve(found.results[1], found, by_time=True):
        assert spread.mean == pytest.approx(10 - (at / 0.4 + 1 - 4.5) / 20)
    assert compare_conditions.curve(found.results[1], found, by_time=True)[-1][0] == found.seconds
    assert found.results[1].at_seconds[-1].difference.value == pytest.approx(-7.8 / 20), "40 steps, and 32.2"


def test_equal_time_is_not_equal_tokens(tmp_path):
    """At twice the speed, FP8 has ended when bf16 is in the middle."""
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", seconds=0.25)
    found = compared(tmp_path)
    assert found.seconds == pytest.approx(99 * 0.25)
    at_tokens, at_seconds = found.results[1].at_tokens[-1], found.results[1].at_seconds[-1]
    assert at_tokens.difference.value == pytest.approx(0)
    assert at_seconds.difference.value == pytest.approx(-49.5 / 20)
    assert found.results[1].speed.tokens_per_second.mean == 400


def test_different_intervals_compare_the_same_tokens(tmp_path):
    run(tmp_path / "a", rows(line(), every=1), settings("bf16"))
    run(tmp_path / "b", rows(line(), every=10), settings("fp8_hybrid", trainer__log_every_n_steps=10))
    found = compared(tmp_path)
    assert [gap.difference.value for gap in found.results[1].at_tokens] == pytest.approx([0.0] * 5)
    assert found.results[1].at_tokens[1].loss.mean == pytest.approx(10 - 20.5 / 20)  # of steps 16 to 25
    assert "logged at different intervals" in notes(found)


def test_a_longer_run_is_compared_where_the_others_end(tmp_path):
    sweep(tmp_path, "bf16", steps=200)
    sweep(tmp_path, "fp8_hybrid", steps=100)
    found = compared(tmp_path)
    assert found.tokens == 100 * TOKENS
    assert found.results[1].train.difference.value == pytest.approx(0)
    assert found.validated_at is None
    assert "10,000 to 20,000 tokens" in notes(found)
    assert "no validation at the same tokens" in notes(found)


def test_another_text_is_not_compared_and_another_rate_is_told(tmp_path):
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", above=1.0, changed={"data__name": "books"})
    sweep(tmp_path, "fp8_hybrid", above=2.0, changed={"optim__lr": 0.5})
    found = compared(tmp_path)
    text, rate = found.results[1:]
    assert (text.train, text.validation, text.to_train) == (None, None, [])
    assert "data.name" in text.not_comparable
    assert rate.validation.difference.value == pytest.approx(2.0)
    assert "differs from the base in optim.lr" in notes(found)
    for judged in verdict.judge(found):
        assert {entry.answer for entry in judged.lines if "bf16's" in entry.item} == {UNKNOWN}


def test_a_run_that_diverged_is_in_the_verdict_and_not_in_the_losses(tmp_path):
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", seeds=(1, 2))
    run(tmp_path / "diverged", rows(line(), steps=10), settings("fp8_hybrid", 3), status="diverged")
    found = compared(tmp_path)
    assert found.tokens == 100 * TOKENS
    assert len(found.results[1].validation.loss.values) == 2
    assert "1 of 3 runs are not in the losses (diverged)" in notes(found)
    assert answers(found)["No NaN losses or instability"] == (FAILS, "1 diverged")
    assert answers(found)["A test run in FP8 completes"][0] == FAILS


def test_a_fall_back_is_its_own_condition_and_no_verdict_on_fp8(tmp_path):
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", ran="fp32", reason="there is no CUDA GPU")
    found = compared(tmp_path)
    assert [r.condition.name for r in found.results] == ["bf16", "fp8_hybrid (ran fp32)"]
    assert verdict.judge(found) == []
    assert "fp8_hybrid was asked for, and fp32 ran (there is no CUDA GPU)" in verdict.why_none(found)
    assert "fp8_hybrid was asked for, and fp32 ran: there is no CUDA GPU" in notes(found)


def test_one_seed_each_is_said_and_not_judged(tmp_path):
    sweep(tmp_path, "bf16", seeds=[1])
    sweep(tmp_path, "fp8_hybrid", above=0.01, seeds=[1], seconds=0.25)
    found = compared(tmp_path)
    assert found.results[1].validation.difference.error is None
    assert answers(found)["Loss curves similar to bf16's"][0] == UNKNOWN
    assert "seed=1,2,3" in answers(found)["Loss curves similar to bf16's"][1]
    assert answers(found)["Throughput higher than bf16's"] == (HOLDS, "2.00 times: 400 and 200 tokens/s")
    assert "a single seed" in notes(found)


def test_seeds_alone_show_their_spread(tmp_path):
    sweep(tmp_path, "bf16")
    found = compared(tmp_path)
    assert found.results[0].validation.loss.deviation == pytest.approx(0.01)
    assert "compares nothing" in notes(found)


def test_curves_that_coincide_are_both_in_the_picture(tmp_path):
    """Four conditions of the same losses, and the colour of each in the first chart."""
    for name in ("bf16", "fp8_hybrid", "fp8_e4m3", "fp32"):
        sweep(tmp_path, name, seeds=[1])
    compare_plot.plot(compared(tmp_path), tmp_path / "p.png")
    pixels = imread(tmp_path / "p.png")[:, :, :3]
    chart = pixels[pixels.shape[0] // 8 : pixels.shape[0] // 3, : pixels.shape[1] // 2]
    for colour in ((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40)):
        assert (abs(chart - np.array(colour) / 255).max(axis=2) < 0.1).sum() > 30, colour
