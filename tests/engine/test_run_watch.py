"""A run's red flags in any precision, on made series: seen where they are planted, and nowhere else."""

import math
import random
import re

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.engine.red_flags import QUARTER, RECENT, WAITS, RunWatch, plateau, spike_limit

WARM_UP = 15


def curve(rows, seed=0, noise=0.004, floor=3.3):
    """The loss of a healthy run: fast at first, then ever more slowly, with the noise of batches."""
    draw = random.Random(seed)
    return [floor + 7.5 * (1 + i) ** -0.55 * (1 + draw.gauss(0, noise)) + draw.gauss(0, noise) for i in range(rows)]


def watched(losses, waits=()):
    said = []
    watch = RunWatch(WARM_UP, 4, said.append)
    for i, loss in enumerate(losses):
        row = {"train_loss": loss} | ({"data_wait": waits[i]} if i < len(waits) else {})
        watch.see(i + 1, row)
    return said


@pytest.mark.parametrize("rows", [60, 240, 2000])
@pytest.mark.parametrize("noise", [0.001, 0.004, 0.03])
def test_a_healthy_run_raises_none(rows, noise):
    assert [said for seed in range(5) for said in watched(curve(rows, seed, noise))] == []


def test_a_spike_is_said_once_with_its_size():
    losses = curve(200)
    losses[120] += 0.5
    (said,) = watched(losses)
    found = re.fullmatch(r"step 121: the loss has risen to ([\d.]+), from about ([\d.]+); .*", said)
    assert float(found[1]) == pytest.approx(losses[120], abs=0.001)
    assert float(found[2]) == pytest.approx(losses[119], abs=0.1)


def test_a_loss_that_stays_high_is_said_once_in_a_while():
    losses = curve(200)
    said = watched([*losses, *(loss + 2 for loss in curve(100)[50:])])
    assert len([line for line in said if "has risen" in line]) == 1


def test_a_plateau_is_said_and_a_slow_fall_is_not():
    flat = [*curve(60), *(3.9 + random.Random(i).gauss(0, 0.005) for i in range(140))]
    said = [line for line in watched(flat) if "has not fallen" in line]
    assert len(said) >= 1
    assert plateau(curve(2000)) is None
    assert plateau([3.0] * (4 * QUARTER - 1)) is None, "too early to say"
    assert plateau([3.0] * 4 * QUARTER) == (3.0, 3.0)


def test_the_warm_up_and_what_is_not_finite_are_not_judged():
    assert watched([5.0] * (WARM_UP - 1) + [50.0]) == []
    assert watched([math.nan] * 50) == []
    assert spike_limit([3.0] * (RECENT - 1)) is None


def test_waiting_for_data_names_its_key():
    assert watched(curve(40), [0.04] * 40) == []
    assert watched(curve(40), [0.04, 0.3, 0.3, 0.3, 0.3] * 8) == [], "now and then is no reason"
    (said,) = watched(curve(40), [0.0] * 10 + [0.12] * WAITS)
    assert said == "step 15: 12% of the time is spent waiting for data; data.num_workers=8 (now 4)"
    compose.preflight([said.split("; ")[1].split()[0]])
