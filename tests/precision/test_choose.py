"""What is chosen, for figures made up to bring out each reason."""

import math
from dataclasses import replace

import pytest

from gpt2_fp8.precision.choose import GRADIENT_TOLERANCE, LEAST_GAIN, Figures, choose

STEPS = 15
LOSSES = [10.8 - 0.2 * step for step in range(STEPS)]
NORMS = [3.0 - 0.1 * step for step in range(STEPS)]


def figures(recipe, rate, fastest=None, losses=LOSSES, norms=NORMS, problem=None):
    return Figures(
        precision="fp8_hybrid" if recipe else "bf16",
        recipe=recipe,
        problem=problem,
        layers="te" if recipe else "reference",
        tokens_per_second=rate,
        fastest=fastest or rate,
        peak_memory_gb=12.5,
        losses=losses,
        grad_norms=norms,
    )


def failed(recipe, problem="out of memory"):
    return Figures(precision="fp8_hybrid" if recipe else "bf16", recipe=recipe, problem=problem)


def changed(values, step, value):
    return [value if at == step else v for at, v in enumerate(values, start=1)]


BF16 = figures(None, 507_000)
BLOCK = figures("block", 560_000)
CURRENT = figures("current", 640_000)
DELAYED = figures("delayed", 703_000)


def outs(choice):
    return {verdict.recipe or "bf16": verdict.out for verdict in choice.candidates}


def test_the_fastest_safe_one_is_chosen():
    choice = choose(BF16, [BLOCK, CURRENT, DELAYED], 0.02)
    assert (choice.precision, choice.recipe) == ("fp8_hybrid", "delayed")
    assert choice.reason == "703,000 tokens/s against 507,000 in bf16"
    assert set(outs(choice).values()) == {None}
    first = choice.candidates[0]
    assert (first.precision, first.tokens_per_second, first.peak_memory_gb, first.layers) == (
        "bf16", 507_000, 12.5, "reference",
    )  # fmt: skip
    assert first.loss == pytest.approx(sum(LOSSES[-5:]) / 5)


def test_fp8_that_is_slower_costs_nothing():
    choice = choose(BF16, [figures("current", 390_000), figures("delayed", 480_000)], 0.02)
    assert (choice.precision, choice.recipe) == ("bf16", None)
    assert choice.reason == "507,000 tokens/s against 480,000 in fp8_hybrid, recipe delayed"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("step", [1, 7, STEPS])
@pytest.mark.parametrize("what", ["losses", "norms"])
def test_what_is_not_finite_is_not_chosen(what, step, value):
    broken = figures("delayed", 703_000, **{what: changed(LOSSES if what == "losses" else NORMS, step, value)})
    choice = choose(BF16, [CURRENT, broken], 0.02)
    assert choice.recipe == "current"
    name = "loss" if what == "losses" else "gradient norm"
    assert f"recipe delayed is out: its {name} is not finite in step {step}" in choice.reason


def test_gradients_that_vanish_are_not_safe():
    """What delayed scaling without calibration does in its first step."""
    choice = choose(BF16, [figures("delayed", 703_000, norms=changed(NORMS, 1, 0.0))], 0.02)
    assert choice.precision == "bf16"
    assert "gradients are 0 in step 1" in outs(choice)["delayed"]


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_a_loss_away_from_bf16s_is_not_safe(factor):
    losses = [*LOSSES[:-5], *(factor * loss for loss in LOSSES[-5:])]
    off = figures("delayed", 703_000, losses=losses)
    choice = choose(BF16, [off], 0.02)
    assert choice.precision == "bf16"
    assert "its losses end 3.0% from bf16's, and 2.0% is allowed" in choice.reason
    assert choose(BF16, [off], 0.04).recipe == "delayed"


def test_gradient_norms_away_from_bf16s_are_not_safe():
    half = figures("delayed", 703_000, norms=[norm / 2 for norm in NORMS])
    assert "gradient norms are 0.50 times bf16's" in outs(choose(BF16, [half], 0.02))["delayed"]
    near = figures("delayed", 703_000, norms=[norm * (1 + GRADIENT_TOLERANCE * 0.9) for norm in NORMS])
    assert choose(BF16, [near], 0.02).recipe == "delayed"
    once = figures("delayed", 703_000, norms=changed(NORMS, 3, 100.0))
    assert choose(BF16, [once], 0.02).recipe == "delayed", "one step says little"


def test_where_all_of_fp8_fails_it_is_bf16_and_each_reason_is_said():
    choice = choose(BF16, [failed("current"), failed("delayed", "failed: CUDA error")], 0.02)
    assert choice.precision == "bf16"
    for words in (
        "507,000 tokens/s, and no FP8 to compare it with",
        "recipe current is out: out of memory",
        "recipe delayed is out: failed: CUDA error",
    ):
        assert words in choice.reason


def test_a_tie_goes_to_the_more_precise():
    choice = choose(BF16, [figures("delayed", 507_000 * (1 + LEAST_GAIN / 2))], 0.02)
    assert choice.precision == "bf16"
    assert "not clearly faster" in choice.reason
    assert choose(BF16, [figures("delayed", 507_000 * (1 + 2 * LEAST_GAIN))], 0.02).recipe == "delayed"
    assert choose(BF16, [figures("current", 700_000), DELAYED], 0.02).recipe == "current"


def test_noise_is_a_tie_but_noise_has_its_limits():
    close = figures("delayed", 530_000)
    assert choose(BF16, [close], 0.02).recipe == "delayed"
    assert choose(replace(BF16, fastest=535_000), [close], 0.02).precision == "bf16"
    assert choose(replace(BF16, fastest=900_000), [DELAYED], 0.02).recipe == "delayed"


def test_where_bf16_does_not_fit_fp8_that_does_is_taken():
    choice = choose(failed(None), [failed("block"), CURRENT], 0.02)
    assert choice.recipe == "current"
    assert "bf16 does not run here (out of memory)" in choice.reason
    broken = figures("current", 640_000, losses=changed(LOSSES, 2, math.nan))
    assert choose(failed(None), [broken], 0.02).precision == "bf16"


@pytest.mark.parametrize(
    "bf16",
    [failed(None, "timed out: took longer than 300 seconds"), figures(None, 1e9, losses=changed(LOSSES, 1, math.nan))],
    ids=["no figures", "not finite"],
)
def test_without_anything_to_compare_with_it_is_bf16(bf16):
    choice = choose(bf16, [CURRENT, DELAYED], 0.02)
    assert choice.precision == "bf16"
    assert "nothing of bf16's to compare" in choice.reason
    assert outs(choice)["bf16"] in choice.reason


def test_nothing_at_all_is_bf16():
    assert choose(failed(None), [], 0.02).precision == "bf16"
    assert choose(BF16, [], 0.02).reason == "507,000 tokens/s, and no FP8 to compare it with"
