"""What a step leaves in FP8's state: nothing where it was run again in bf16, whose gradients are bf16's; little where a
magnitude was absurd; what a resumed run takes of it where its steps are shared otherwise; and what a smaller size
leaves where it begins again in smaller micro-batches, out of memory."""

import pytest
import torch

from gpt2_fp8.fp8 import state
from tests.gpu.common import assert_same_tensors, error, grads, hopper, prepared, step, tokens

pytestmark = pytest.mark.fp8

ROADS = [
    ["precision.backend=te"],
    ["precision.backend=te", "recipe=current"],
    pytest.param(["precision.backend=fused", "cuda_graphs=false"], marks=hopper),
    pytest.param(["cuda_graphs=true"], marks=hopper),
]


PARTS = 3  # micro-batches of a step


def batch(seed):
    return tokens(12, seed, 128)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("overrides", ROADS, ids=" ".join)
def test_its_gradients_are_those_of_a_bf16_run(overrides, many):
    """Those of many steps are compiled as such a run is, but for Transformer Engine's layers."""
    engine, expected = prepared(*overrides), prepared("precision=bf16", f"compile={str(many).lower()}")
    step(engine, 1)
    for seed in (1, 2):
        engine.model.zero_grad(set_to_none=True)
        loss = engine.of_step_in_bf16(batch(seed), engine.micro_batch_size, many=many).item()
        expected_loss, theirs = step(expected, seed)
        assert loss == pytest.approx(expected_loss, rel=1e-3)
        assert error(grads(engine.model), theirs) < 0.02
    assert (engine._compiled_bf16_loss is not None) == (many and "precision.backend=te" not in overrides)


@pytest.mark.parametrize("overrides", ROADS, ids=" ".join)
def test_78_scales_and_histories_are_those_of_before_the_step(overrides):
    """Also where it has left magnitudes that are finite and absurd."""
    engine = prepared(*overrides)
    step(engine, 1)
    before = state.capture(engine.model)
    undo = engine.scaling.remember()
    step(engine, 2)
    for layer in state.scaling_states(engine.model):
        layer.amax_history.fill_(1e30)
    undo()
    engine.model.zero_grad(set_to_none=True)
    engine.of_step_in_bf16(batch(2), engine.micro_batch_size)
    assert_same_tensors(state.capture(engine.model), before)
    loss, ours = step(engine, 3)
    clean = prepared(*overrides)
    step(clean, 1)
    expected_loss, expected = step(clean, 3)
    assert loss == pytest.approx(expected_loss, rel=1e-3)
    assert error(ours, expected) < 0.01


@pytest.mark.parametrize("overrides", ROADS, ids=" ".join)
def test_79_an_absurd_magnitude_of_one_step_leaves_the_next_its_gradients(overrides):
    found = []
    for spoiled in (True, False):
        engine = prepared(*overrides)
        step(engine, 1)
        step(engine, 2)
        jumped = engine.scaling.count_amax_outliers(PARTS)
        assert jumped is None or jumped.item() == 0, "a healthy step has none"
        states = list(state.scaling_states(engine.model))
        if spoiled and states:
            used = [(layer.amax_history > 0).sum(0) > 1 for layer in states]  # Transformer Engine has idle ones, too
            for layer, those in zip(states, used, strict=True):
                layer.amax_history[0 if not hasattr(layer, "recipe") else -1, those] = 1e30
            assert engine.scaling.count_amax_outliers(PARTS).item() == sum(those.sum().item() for those in used) > 8
            engine.scaling.limit(PARTS)
            assert engine.scaling.count_amax_outliers(PARTS).item() == 0
        found.append(step(engine, 3))
    (loss, ours), (expected_loss, expected) = found
    assert loss == pytest.approx(expected_loss, rel=0.02)
    assert error(ours, expected) < 0.5, "coarse for a step, and not gone: with scales of 1e30 it is 1"


@pytest.mark.parametrize("overrides", [ROADS[0], *ROADS[2:]], ids=" ".join)
def test_81_a_resume_whose_ranks_have_a_smaller_share_finds_scales_that_hold_its_gradients(overrides):
    """Gradients of the mean over an eighth of the sequences are eight times as large."""
    many = prepared(*overrides, "global_batch_size=96")
    many.calibrate(tokens(96, 0, 128), many.micro_batch_size)
    saved = many.scaling.state_dict()
    assert saved["sequences"] == 96
    found = []
    for resumed in (True, False):
        engine = prepared(*overrides)
        if resumed:
            engine.scaling.load_state_dict(dict(saved))
            assert engine.scaling.take()
        found.append([step(engine, seed) for seed in (1, 2)])
    for (loss, ours), (expected_loss, expected) in zip(*found, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-2)
        assert error(ours, expected) < 0.1, "saturated gradients would be half of what they are"


# Out of memory

FUSED = ["precision.backend=fused", "cuda_graphs=false"]
TE = ["precision.backend=te"]
MLP, FULL = "activation_checkpointing=mlp", "activation_checkpointing=full"
RECOMPUTED = [
    *(TE, [*TE, MLP], [*TE, FULL]),
    *(pytest.param(road, marks=hopper) for road in (FUSED, [*FUSED, MLP], [*FUSED, FULL])),
]


def run_out(engine, seed):
    """A step in whose second micro-batch there is no memory for the lowest block's backward."""
    forwards = []

    def no_memory(gradient):
        raise torch.OutOfMemoryError

    def hook(module, inputs, out):
        forwards.append(1)
        if len(forwards) == 2:
            out.register_hook(no_memory)

    handle = engine.model.blocks[0].register_forward_hook(hook)
    with pytest.raises(torch.OutOfMemoryError):
        step(engine, seed)
    handle.remove()


@pytest.mark.parametrize("overrides", RECOMPUTED, ids=" ".join)
def test_scales_histories_and_gradients_are_those_of_the_smaller_size(overrides):
    found = []
    for again in (True, False):
        engine = prepared(*overrides)
        step(engine, 1)
        if again:
            before, undo = state.capture(engine.model), engine.scaling.remember()
            run_out(engine, 2)
            engine.discard()
            undo()
            assert_same_tensors(state.capture(engine.model), before)
            assert all(parameter.grad is None for parameter in engine.model.parameters())
        engine.micro_batch_size = 2
        steps = [step(engine, seed) for seed in (2, 3)]  # scales left over would show in a later backward
        found.append((steps, state.capture(engine.model)))
    (steps, ours), (others, expected) = found
    for (loss, gradients), (expected_loss, expected_gradients) in zip(steps, others, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        assert error(gradients, expected_gradients) < 1e-2  # the GPU adds in no fixed order
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0.02, atol=0, msg=name)


@hopper
def test_a_gradient_that_waits_for_a_backward_that_failed_is_let_go():
    engine = prepared(*FUSED)
    run_out(engine, 1)
    lowest = engine.model.blocks[0]
    assert lowest.received is not None
    engine.discard()
    assert lowest.received is None


@pytest.mark.parametrize("overrides", RECOMPUTED[:3], ids=" ".join)
def test_bf16_layers_are_so_after_a_backward_that_failed_in_transformer_engines_region(overrides):
    """Where something is computed again in the backward, the region is set by hand."""
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    engine = prepared(*overrides)
    undo = engine.scaling.remember()
    run_out(engine, 1)
    FP8GlobalStateManager.quantization_state.fp8_enabled = True  # as an error in the midst of it leaves it
    engine.discard()
    undo()
    assert not FP8GlobalStateManager.is_fp8_enabled()
    assert not any(FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer)
