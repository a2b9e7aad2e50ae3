"""A step that runs out of memory and begins again in smaller micro-batches: it leaves what one of that size leaves."""

import pytest
import torch

from gpt2_fp8.fp8 import state
from tests.gpu.common import error, hopper, prepared
from tests.gpu.test_bf16_again import step

pytestmark = pytest.mark.fp8

FUSED = ["precision.backend=fused", "cuda_graphs=false"]
TE = ["precision.backend=te"]
MLP, FULL = "activation_checkpointing=mlp", "activation_checkpointing=full"
ROADS = [
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


@pytest.mark.parametrize("overrides", ROADS, ids=" ".join)
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
            assert all(torch.equal(before[name], now) for name, now in state.capture(engine.model).items())
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


@pytest.mark.parametrize("overrides", ROADS[:3], ids=" ".join)
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
