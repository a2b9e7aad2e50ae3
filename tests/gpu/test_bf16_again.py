"""A step of an FP8 run computed again in bf16: its gradients are bf16's, and FP8 goes on as if nothing had been."""

import pytest
import torch

from gpt2_fp8.engine import Engine
from gpt2_fp8.model import initialise
from gpt2_fp8.precision import state
from gpt2_fp8.precision.plugin import build_plugin
from gpt2_fp8.precision.resolve import resolve
from tests.gpu.common import VOCAB, composed, error, grads, hopper, tokens

pytestmark = pytest.mark.fp8

ROADS = [
    ["precision.layers=te"],
    ["precision.layers=te", "recipe=current"],
    pytest.param(["precision.layers=fused", "cuda_graphs=false"], marks=hopper),
    pytest.param(["cuda_graphs=true"], marks=hopper),
]


def batch(seed):
    return tokens(12, seed, 128)


def prepared(*overrides):
    """An engine, its scales found where it has any, and its plugin."""
    config = composed(*overrides)
    plan = resolve(config, "cuda")
    with torch.device("cuda"):
        engine = Engine(config, plan, VOCAB)
    initialise(engine.model, seed=1)
    plugin = build_plugin(config, plan)
    if plan.fp8:
        engine.calibrate(batch(0), plugin.forward_context)
    return engine, plugin


def step(engine, plugin, seed):
    """Loss and gradients of an optimizer step without its update."""
    engine.model.zero_grad(set_to_none=True)
    loss = engine.gradients(batch(seed), plugin.forward_context, torch.Tensor.backward)
    return loss.item(), grads(engine.model)


def again(engine, plugin, seed):
    engine.model.zero_grad(set_to_none=True)
    loss = engine.gradients_in_bf16(batch(seed), plugin.bf16_context, torch.Tensor.backward, engine.micro_batch_size)
    return loss.item(), grads(engine.model)


@pytest.mark.parametrize("overrides", ROADS, ids=" ".join)
def test_its_gradients_are_those_of_a_bf16_run(overrides):
    engine, plugin = prepared(*overrides)
    step(engine, plugin, 1)
    loss, ours = again(engine, plugin, 1)
    expected_loss, expected = step(*prepared("precision=bf16", "compile=false"), 1)
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    assert error(ours, expected) < 0.02


@pytest.mark.parametrize("overrides", ROADS, ids=" ".join)
def test_fp8_goes_on_as_if_nothing_had_been(overrides):
    runs = []
    for twice in (True, False):
        engine, plugin = prepared(*overrides)
        step(engine, plugin, 1)
        if twice:
            before = state.capture(engine.model)
            again(engine, plugin, 2)
            after = state.capture(engine.model)
            assert [name for name in before if not torch.equal(before[name], after[name])] == []
        runs.append(step(engine, plugin, 3))
    (loss, ours), (expected_loss, expected) = runs
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    assert error(ours, expected) < 0.01
