"""Losses, intervals, times to equal loss and verdicts, on runs whose losses are known."""

import json

import pytest

from gpt2_fp8.reports import comparison, runs
from tests.reports.made import TOKENS, rows, run, settings

SPREAD = {1: -0.01, 2: 0.0, 3: 0.01}  # of the seeds' losses


def line(above=0.0):
    return lambda step: 10 + above - step / 20


def sweep(folder, precision="bf16", above=0.0, seeds=(1, 2, 3), seconds=0.5, steps=100, changed=None, **made):
    """Runs of a condition: the loss of a step is 10 + above - step / 20, and a little more or less by seed."""
    for seed in seeds:
        logged = rows(line(above + SPREAD[seed]), steps, seconds=seconds, validations={steps: 5 + above + SPREAD[seed]})
        run(folder / f"{precision}-{above}-{seed}", logged, settings(precision, seed, **(changed or {})), **made)


def compared(folder):
    each = runs.conditions(runs.read([folder])[0])
    found = comparison.compare(each, runs.base_of(each))
    return found, json.loads(json.dumps(comparison.figures(found, []), allow_nan=False))


def losses(told, condition, kind="validation"):
    return next(row for row in told["losses"] if (row["condition"], row["loss"]) == (condition, kind))


def verdict(told):
    (row,) = told["verdict"]
    return row["answer"], row["why"]


def test_the_difference_and_its_interval(tmp_path):
    """FP8 is 0.1 above bf16 in every seed, so pairs have no error; the seeds have a variance of 0.0001 each."""
    sweep(tmp_path, "fp8_hybrid", above=0.1)
    sweep(tmp_path, "bf16")
    _, told = compared(tmp_path)
    row = losses(told, "fp8_hybrid")
    error = (2 * 0.0001 / 3) ** 0.5
    assert (row["above_base"], row["relative"], row["deviation"]) == pytest.approx((0.1, 0.1 / 5, 0.01))
    assert row["relative_low"] == pytest.approx((0.1 - 2.776445 * error) / 5, rel=1e-6)  # four degrees of freedom
    assert row["relative_high"] == pytest.approx((0.1 + 2.776445 * error) / 5, rel=1e-6)
    assert (row["paired"], row["paired_error"]) == (pytest.approx(0.1), pytest.approx(0, abs=1e-9))
    assert losses(told, "bf16", "training")["mean"] == pytest.approx(10 - 98 / 20)  # the mean of steps 96 to 100
    assert verdict(told)[0] == comparison.GOOD


@pytest.mark.parametrize(
    ("above", "answer"), [(0.5, comparison.WORSE), (0.25, comparison.UNDECIDED), (-0.4, comparison.UNDECIDED)]
)
def test_a_verdict_is_by_the_interval(above, answer, tmp_path):
    """The limit is 5 % of 5: a quarter above is on both sides of it, and so much below is no equal either."""
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", above=above)
    assert verdict(compared(tmp_path)[1])[0] == answer


def test_time_to_equal_loss(tmp_path):
    """FP8 is 0.5 below, which is 10 steps earlier, at half the time a step."""
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", above=-0.5, seconds=0.25)
    _, told = compared(tmp_path)
    (row,) = told["equal_loss"]
    assert (row["loss"], row["level"]) == ("training", pytest.approx(10 - 98 / 20)), "the base's, which is the higher"
    assert (row["tokens"], row["base_tokens"]) == pytest.approx((90 * TOKENS, 100 * TOKENS))
    assert (row["seconds"], row["base_seconds"]) == pytest.approx((89 * 0.25, 99 * 0.5))
    assert (row["tokens_ratio"], row["seconds_ratio"]) == pytest.approx((0.9, 89 * 0.25 / (99 * 0.5)))
    assert (row["tokens_error"], row["seconds_error"]) == pytest.approx((0, 0), abs=1e-9), "equal in every pair"
    by = {row["condition"]: row for row in told["throughput"]}
    assert (by["fp8_hybrid"]["tokens_per_second"], by["fp8_hybrid"]["times_base"]) == (400, 2.0)
    assert by["fp8_hybrid"]["memory_of_base"] == 1.0


def test_energy_and_cost_to_equal_loss_are_of_one_gpu(tmp_path):
    """As above, at 300 W in every third row of FP8's log, and no power in bf16's."""
    sweep(tmp_path, "bf16")
    for seed in (1, 2, 3):
        logged = rows(line(SPREAD[seed] - 0.5), seconds=0.25, validations={100: 4.5 + SPREAD[seed]})
        for row in logged[::3]:
            row["gpu_power_watts"] = 300 + 10 * SPREAD[seed]
        run(tmp_path / f"fp8-{seed}", logged, settings("fp8_hybrid", seed))
    each = runs.conditions(runs.read([tmp_path])[0])
    found = comparison.compare(each, runs.base_of(each), price=7.2)
    (row,) = comparison.equal_loss(next(side for side in found.sides if side is not found.base), found)
    assert row["kilojoules"] == pytest.approx(0.3 * 89 * 0.25)
    assert "base_kilojoules" not in row
    assert (row["cost"], row["base_cost"]) == pytest.approx((0.002 * 89 * 0.25, 0.002 * 99 * 0.5))


def test_the_error_of_time_to_equal_loss_is_the_jackknifes(tmp_path):
    """Two pairs of seeds that need 90 and 80 of 100 steps: the means over one pair each have ratios 0.9 and 0.8."""
    for seed, above in ((1, -0.5), (2, -1.0)):
        run(tmp_path / f"b{seed}", rows(line()), settings("bf16", seed))
        run(tmp_path / f"f{seed}", rows(line(above)), settings("fp8_hybrid", seed))
    (row,) = compared(tmp_path)[1]["equal_loss"]
    assert row["tokens_ratio"] == pytest.approx(0.85)
    assert row["tokens_error"] == pytest.approx(0.05)  # half of the difference of two


@pytest.mark.parametrize("above", [0.0005, -0.0005, 0.0])
def test_validations_that_are_nearly_equal_have_a_time_to_equal_loss(above, tmp_path):
    falling = {25: 7.0, 50: 6.0, 75: 5.5, 100: 5.0}
    for name, more, seconds in (("bf16", 0.0, 0.4), ("fp8_hybrid", above, 0.3)):
        logged = rows(
            line(more), every=10, seconds=seconds, validations={step: v + more for step, v in falling.items()}
        )
        run(tmp_path / name, logged, settings(name))
    (row,) = compared(tmp_path)[1]["equal_loss"]
    assert row["loss"] == "validation"
    assert (row["tokens_ratio"], row["seconds_ratio"]) == pytest.approx((1, 0.75), abs=0.005)
    assert row["tokens_error"] is None


def test_different_intervals_compare_the_same_tokens(tmp_path):
    run(tmp_path / "a", rows(line(), every=1), settings("bf16"))
    run(tmp_path / "b", rows(line(), every=10), settings("fp8_hybrid", trainer__log_every_n_steps=10))
    found, told = compared(tmp_path)
    assert found.width == 10 * TOKENS, "the wider interval, which is more than 5 %"
    assert losses(told, "fp8_hybrid", "training")["above_base"] == pytest.approx(0)


def test_another_text_is_not_compared_and_another_rate_is_told(tmp_path):
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", above=1.0, changed={"data__name": "books"})
    sweep(tmp_path, "fp8_hybrid", above=2.0, changed={"optim__lr": 0.5})
    _, told = compared(tmp_path)
    assert [row["answer"] for row in told["verdict"]] == [comparison.UNDECIDED] * 2
    assert "data.name" in told["verdict"][1]["why"] + told["verdict"][0]["why"]
    assert any("differs from the base in optim.lr" in note for note in told["notes"])
    assert len(told["equal_loss"]) == 1
    sweep(tmp_path / "alone", "bf16", above=3.0)
    sweep(tmp_path / "alone", "fp8_hybrid", changed={"data__name": "books"})
    assert compared(tmp_path / "alone")[1]["result"].startswith("Only bf16 has a loss")


def test_a_run_that_diverged_is_in_the_verdict_and_not_in_the_losses(tmp_path):
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", seeds=(1, 2))
    run(tmp_path / "diverged", rows(line(), steps=10), settings("fp8_hybrid", 3), status="diverged")
    found, told = compared(tmp_path)
    assert found.tokens == 100 * TOKENS
    assert verdict(told) == (comparison.WORSE, "1 of 3 runs diverged")
    assert told["notes"] == ["fp8_hybrid: 1 of 3 runs are not in the losses (diverged)."]


def test_a_fall_back_is_no_verdict_on_fp8(tmp_path):
    sweep(tmp_path, "bf16")
    sweep(tmp_path, "fp8_hybrid", ran="fp32", reason="there is no CUDA GPU")
    _, told = compared(tmp_path)
    assert told["verdict"] == []
    assert "(95 % interval " in told["result"]
    assert "fp8_hybrid was asked for, and fp32 ran: there is no CUDA GPU" in told["notes"][0]


def test_one_seed_each_is_undecided(tmp_path):
    sweep(tmp_path, "bf16", seeds=[1])
    sweep(tmp_path, "fp8_hybrid", above=0.01, seeds=[1])
    _, told = compared(tmp_path)
    assert losses(told, "fp8_hybrid")["relative_low"] is None
    assert verdict(told)[0] == comparison.UNDECIDED
    assert "seed=1,2,3" in verdict(told)[1]
