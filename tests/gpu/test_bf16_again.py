"""What a step leaves in FP8's state: nothing where it was run again in bf16, whose gradients are bf16's; little where a
magnitude was absurd; and what a resumed run takes of it where its steps are shared otherwise."""

import pytest
import torch

from gpt2_fp8.engine.engine import Engine
from gpt2_fp8.model.gpt2 import initialise
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
def test_78_scales_and_histories_are_those_of_before_the_step(overrides):
    """Also where it has left magnitudes that are finite and absurd."""
    engine, plugin = prepared(*overrides)
    step(engine, plugin, 1)
    before = state.capture(engine.model)
    step(engine, plugin, 2)
    for _, layer in state.scaling_states(engine.model):
        layer.amax_history.fill_(1e30)
    engine.undo_scales()
    again(engine, plugin, 2)
    after = state.capture(engine.model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    loss, ours = step(engine, plugin, 3)
    clean, its_plugin = prepared(*overrides)
    step(clean, its_plugin, 1)
    expected_loss, expected = step(clean, its_plugin, 3)
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    assert error(ours, expected) < 0.01


@pytest.mark.parametrize("overrides", ROADS, ids=" ".join)
def test_79_an_absurd_magnitude_of_one_step_leaves_the_next_its_gradients(overrides):
    found = []
    for spoiled in (True, False):
        engine, plugin = prepared(*overrides)
        step(engine, plugin, 1)
        step(engine, plugin, 2)
        jumped = engine.absurd_magnitudes()
        assert jumped is None or jumped.item() == 0, "a healthy step has none"
        states = [layer for _, layer in state.scaling_states(engine.model)]
        if spoiled and states:
            used = [(layer.amax_history > 0).sum(0) > 1 for layer in states]  # Transformer Engine has idle ones, too
            for layer, those in zip(states, used, strict=True):
                layer.amax_history[0 if not hasattr(layer, "recipe") else -1, those] = 1e30
            assert engine.absurd_magnitudes().item() == sum(those.sum().item() for those in used) > 8
            engine.limit_magnitudes()
            assert engine.absurd_magnitudes().item() == 0
        found.append(step(engine, plugin, 3))
    (loss, ours), (expected_loss, expected) = found
    assert loss == pytest.approx(expected_loss, rel=0.02)
    assert error(ours, expected) < 0.5, "coarse for a step, and not gone: with scales of 1e30 it is 1"


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


@pytest.mark.parametrize("overrides", [ROADS[0], *ROADS[2:]], ids=" ".join)
def test_81_a_resume_whose_ranks_have_a_smaller_share_finds_scales_that_hold_its_gradients(overrides):
    """Gradients of the mean over an eighth of the sequences are eight times as large."""
    many, its_plugin = prepared(*overrides, "global_batch_size=96")
    many.calibrate(tokens(96, 0, 128), its_plugin.forward_context)
    its_plugin.convert_module(many.model)
    its_plugin.scales_found = True
    saved = its_plugin.state_dict()
    assert saved["sequences"] == 96
    found = []
    for resumed in (True, False):
        engine, plugin = prepared(*overrides)
        if resumed:
            plugin.convert_module(engine.model)
            plugin.load_state_dict(dict(saved))
            assert plugin.restore_scales()
        found.append([step(engine, plugin, seed) for seed in (1, 2)])
    for (loss, ours), (expected_loss, expected) in zip(*found, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-2)
        assert error(ours, expected) < 0.1, "saturated gradients would be half of what they are"
