import math

import pytest

from gpt2_fp8.engine.optim import build_optimizer, build_schedule, learning_rate_factor
from tests.common import OPTIM, build


def test_only_matrices_decay():
    model = build()
    optimizer = build_optimizer(model, OPTIM)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, plain = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert all(name.endswith("weight") and "layer_norm" not in name for name in decayed)
    assert all("bias" in name or "layer_norm" in name for name in plain)
    assert sorted(decayed + plain) == sorted(names.values())
    assert decayed == sorted(decayed)


def test_schedule_shape():
    def factor(step):
        return learning_rate_factor(step, warmup_steps=10, max_steps=110, min_lr_ratio=0.1)

    assert factor(0) == pytest.approx(1 / 11)  # the first step already moves
    assert factor(9) == pytest.approx(10 / 11)
    assert factor(10) == 1
    assert factor(60) == pytest.approx(0.55)
    assert factor(110) == pytest.approx(0.1)
    assert factor(1000) == pytest.approx(0.1)
    assert all(factor(i) < factor(i + 1) for i in range(10))
    assert all(factor(i) > factor(i + 1) for i in range(10, 110))


def test_no_warmup_and_all_warmup():
    assert learning_rate_factor(0, 0, 100, 0.1) == 1
    assert all(math.isfinite(learning_rate_factor(step, 10, 10, 0.1)) for step in range(12))


def test_scheduler_follows_the_formula():
    optimizer = build_optimizer(build(), OPTIM)
    schedule = build_schedule(optimizer, OPTIM, max_steps=20)
    for step in range(20):
        assert optimizer.param_groups[0]["lr"] == OPTIM.lr * learning_rate_factor(step, 5, 20, 0.1)
        optimizer.step()
        schedule.step()
