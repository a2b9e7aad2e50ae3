"""Conditions, gaps and times to the same loss, on runs whose losses are known."""

import pytest

from gpt2_fp8.reports import conditions, find_runs, verdict
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
    """FP8 is 0.5 below, which is 10 steps earlier, at half the time a step; another is above, and never there."""
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", above=-0.5, seconds=0.25)
    sweep(tmp_path, "fp8_e4m3", above=0.5)
    base, worse, better = sorted(compared(tmp_path).results, key=lambda r: r.condition.name)
    assert (base.to_train.tokens, base.to_train.seconds) == (100 * TOKENS, pytest.approx(99 * 0.5))
    assert better.to_train.loss == pytest.approx(10 - 98 / 20)
    assert better.to_train.tokens == pytest.approx(90 * TOKENS)
    assert better.to_train.seconds == pytest.approx(89 * 0.25)
    assert better.to_train.runs == 3
    assert (worse.to_train.tokens, worse.to_train.seconds, worse.to_train.runs) == (None, None, 0)


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
    assert found.results[1].at_tokens[2].difference.value == pytest.approx(0, abs=0.3)
    assert found.results[1].at_tokens[1].loss.mean == pytest.approx(10 - 25.5 / 20)  # the interval of steps 21 to 30
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
    assert (text.train, text.validation, text.to_train) == (None, None, None)
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
