import math
from dataclasses import replace

import pytest

from gpt2_fp8.engine.optim import build_optimizer, build_schedule, learning_rate_factor
from tests.common import OPTIM, build

LINEAR = replace(OPTIM, schedule="linear", warmup_steps=10)
STABLE = replace(OPTIM, schedule="warmup_stable_decay", warmup_steps=10, decay_steps=20)
CONSTANT = replace(OPTIM, schedule="constant", warmup_steps=10, min_lr_ratio=1.0)


def factors(config, max_steps=110, steps=120):
    return [learning_rate_factor(step, config, max_steps) for step in range(steps)]


def test_the_cosine_is_the_very_number_that_it_always_was():
    """Runs that were begun before there were other schedules go on with the same rates."""
    for step, factor in enumerate(factors(OPTIM, 20, 24)):
        progress = min(1.0, (step - 5) / 15)
        assert factor == ((step + 1) / 6 if step < 5 else 0.1 + (1 - 0.1) * 0.5 * (1 + math.cos(math.pi * progress)))


@pytest.mark.parametrize("config", [LINEAR, STABLE, CONSTANT], ids=lambda config: config.schedule)
def test_every_shape_warms_up_alike(config):
    assert factors(config)[:11] == factors(replace(OPTIM, warmup_steps=10))[:11]


def test_linear_falls_by_the_same_amount_every_step():
    rates = factors(LINEAR)
    assert [rates[i] - rates[i + 1] for i in range(10, 110)] == pytest.approx([0.9 / 100] * 100)
    assert rates[110:] == pytest.approx([0.1] * 10)
    assert learning_rate_factor(110, replace(LINEAR, min_lr_ratio=0.0), 110) == 0


def test_warmup_stable_decay_falls_in_its_last_steps_alone():
    rates = factors(STABLE)
    assert rates[10:91] == [1] * 81
    assert [rates[i] - rates[i + 1] for i in range(90, 110)] == pytest.approx([0.9 / 20] * 20)
    assert rates[110:] == pytest.approx([0.1] * 10)
    assert factors(replace(STABLE, decay_steps=100)) == factors(LINEAR), "a decay of all steps is the linear schedule"


def test_no_warmup_and_all_warmup():
    assert learning_rate_factor(0, replace(OPTIM, warmup_steps=0), 100) == 1
    for config in (replace(OPTIM, warmup_steps=10), LINEAR, CONSTANT):
        assert all(math.isfinite(learning_rate_factor(step, config, 10)) for step in range(12))


@pytest.mark.parametrize("config", [OPTIM, LINEAR, STABLE, CONSTANT], ids=lambda config: config.schedule)
def test_scheduler_follows_the_formula(config):
    optimizer = build_optimizer(build(), config)
    schedule = build_schedule(optimizer, config, max_steps=40)
    for step in range(40):
        assert optimizer.param_groups[0]["lr"] == OPTIM.lr * learning_rate_factor(step, config, 40)
        optimizer.step()
        schedule.step()
