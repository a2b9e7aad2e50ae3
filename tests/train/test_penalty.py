"""Whole runs with penalties: stopped and resumed, logged apart from the loss, validated without, run again in bf16."""

import math

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.config.checks import vocabulary
from tests.runs import SMALL, metrics, summary, train, training_step

ALL = ["penalty.z_loss=1e-3", "penalty.logit_l2=0.01", "penalty.activation_l1=0.1"]


def test_the_log_has_the_loss_and_the_penalty_apart(tmp_path):
    """At a rate of next to nothing the weights stay, so losses are those of a run without."""
    still = ["precision=fp32", "optim.lr=1e-12"]
    train(tmp_path / "without", *still)
    without = metrics(tmp_path / "without")
    assert "penalty" not in without
    train(tmp_path / "with", *still, "penalty.z_loss=0.5")
    found = metrics(tmp_path / "with")
    assert found["train_loss"] == pytest.approx(without["train_loss"], rel=1e-6)
    assert found["val_loss"] == pytest.approx(without["val_loss"], rel=1e-6)
    # an untrained model's logits are small: the logarithm of its sum is that of its vocabulary
    vocab_size = vocabulary(compose.preflight([*SMALL])[0])
    assert found["penalty"][1] == pytest.approx(0.5 * math.log(vocab_size) ** 2, rel=0.02)
    train(tmp_path / "twice", *still, "penalty.z_loss=1.0", "micro_batch_size=2")
    assert metrics(tmp_path / "twice")["penalty"][1] == pytest.approx(2 * found["penalty"][1], rel=1e-5)
    assert summary(tmp_path / "with")["status"] == "completed"


def test_a_step_run_again_in_bf16_has_the_same_penalties():
    words = ["precision=fp8_hybrid", "precision.backend=emulated"]
    ids = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(0))
    step = training_step(*words, *ALL)
    backend = step.plan.backend
    with backend.bf16_context():
        loss = backend.bf16_loss(backend.bf16_model(step.model), ids, 1.0)
    assert loss.shape == (3,)
    other = training_step("precision=bf16", *ALL)
    with other.plan.backend.forward_context():
        expected = other.plan.backend.loss(other.model, ids, None, 1.0)
    assert torch.equal(loss, expected)


def test_a_penalty_that_is_not_finite_skips_the_update():
    step = training_step("precision=fp32", "penalty.logit_l2=1e38")
    with torch.no_grad():
        step.model.head.get_parameter("weight").mul_(1e4)
    before = step.model.head.get_parameter("weight").clone()
    step(torch.randint(0, 256, (8, 33), dtype=torch.int32))
    result = step.last
    verdict = result.read()
    assert math.isfinite(verdict.loss)
    assert not math.isfinite(verdict.penalty)
    assert verdict.skipped
    assert torch.equal(step.model.head.get_parameter("weight"), before)
