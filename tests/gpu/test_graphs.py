"""CUDA graphs of a micro-batch against the same computed launch by launch."""

import pytest
import torch

from gpt2_fp8.engine import cuda_graphs
from gpt2_fp8.fp8 import state
from tests.gpu.common import assert_same_tensors, error, evaluating, grads, hopper, prepared, tokens

# What is compared bit for bit are the same kernels in the same order.
pytestmark = [pytest.mark.fp8, hopper, pytest.mark.usefixtures("deterministic")]


def batch(seed, sequences=12):
    return tokens(sequences, seed, 128)


def built(graphed, *overrides):
    engine = prepared(f"cuda_graphs={str(graphed).lower()}", *overrides)
    assert (engine.plan.backend.name, engine.plan.backend.graphs) == ("fused", graphed)
    if graphed:
        engine._backward = lambda _: pytest.fail("replayed, not called")
    return engine


def step(engine, ids):
    return engine.of_step(ids, engine.micro_batch_size).item(), grads(engine.model)


def assert_same_steps(ours, expected):
    """Losses and gradients of steps, and the state that they leave, bit for bit."""
    for (loss, gradients), (expected_loss, expected_gradients) in zip(ours[0], expected[0], strict=True):
        assert loss == expected_loss
        assert_same_tensors(gradients, expected_gradients)
    assert_same_tensors(ours[1], expected[1])


@pytest.mark.parametrize(("sequences", "micro_batch_size"), [(12, 12), (12, 4), (96, 48)])
def test_gradients_and_scales_are_those_without_graphs(sequences, micro_batch_size):
    """One micro-batch, three, and two of so many tokens that the embedding's backward sorts them."""
    runs = []
    for graphed in (True, False):
        words = f"micro_batch_size={micro_batch_size}", f"global_batch_size={sequences}"
        engine = built(graphed, *words)
        steps = []
        for seed in range(3):
            steps.append(step(engine, batch(seed, sequences)))
            engine.model.zero_grad(set_to_none=True)
        runs.append((steps, state.capture(engine.model)))
    assert_same_steps(*runs)


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision.keep_bf16=[first,head]"], ["activation_checkpointing=mlp", "model.bias=false"],
        ["activation_checkpointing=full", "precision.keep_bf16=[first]"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_other_parts_can_be_recorded_too(overrides):
    runs = [step(built(graphed, *overrides), batch(0)) for graphed in (True, False)]
    (loss, ours), (expected_loss, expected) = runs
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert error(ours, expected) < 1e-3


@pytest.mark.parametrize("cycles", [0, 200_000_000])
def test_recording_leaves_no_trace(monkeypatch, cycles):
    """However late the device gets to the copies of the scales (a tenth of a second), they come before the passes that
    change them."""
    engine = built(True)
    restored = state.restored
    monkeypatch.setattr(cuda_graphs.state, "restored", lambda model: torch.cuda._sleep(cycles) or restored(model))
    recorder = cuda_graphs.GraphedGradients(engine.model, engine.loss, engine.plan.backend.forward_context)
    before = state.capture(engine.model)
    recorder._record(batch(0)[:4], 1 / 3)
    assert_same_tensors(before, state.capture(engine.model))
    assert all(p.grad is None for p in engine.model.parameters())
    assert all(gradient is not None for gradient in recorder._gradients)


def test_evaluation_between_steps_disturbs_nothing():
    """Neither the recorded memory nor the scales; and what an evaluation gave is not written over by a replay."""
    runs = []
    for evaluated in (True, False):
        engine = built(True)
        steps = [step(engine, batch(0))]
        if evaluated:
            with evaluating(engine.model, engine.plan.backend):
                loss, logits = engine.loss(batch(9)[:8]), engine.model(batch(9)[:2, :-1].long())
            kept = loss.clone(), logits.clone()
        steps += [step(engine, batch(seed)) for seed in (1, 2)]
        if evaluated:
            assert torch.equal(loss, kept[0])
            assert torch.equal(logits, kept[1])
        runs.append((steps, state.capture(engine.model)))
    assert_same_steps(*runs)


def test_an_evaluation_after_a_replay_sees_the_new_weights():
    """Its weights are cast anew, into the memory that the graphs read."""
    losses = []
    for graphed in (True, False):
        engine = built(graphed)
        step(engine, batch(0))
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(1.5)
        with evaluating(engine.model, engine.plan.backend):
            losses.append(engine.loss(batch(9)).item())
        losses.append(step(engine, batch(1))[0])
    assert losses[:2] == losses[2:]


def test_gradients_lie_where_they_were_recorded():
    """An optimizer that sets them to None does not lose them, and a step's are not added to those of the one before."""
    engine = built(True)
    step(engine, batch(0))
    with state.restored(engine.model):
        loss, expected = step(engine, batch(1))
    places = {name: p.grad.data_ptr() for name, p in engine.model.named_parameters()}
    engine.model.zero_grad(set_to_none=True)
    again, ours = step(engine, batch(1))
    assert again == loss
    assert_same_tensors(ours, expected)
    assert places == {name: p.grad.data_ptr() for name, p in engine.model.named_parameters()}


def test_two_recorded_models_do_not_share_their_memory():
    one, other = built(True), built(True, "model.n_layer=1")
    _, expected = step(one, batch(0))
    step(other, batch(1))
    assert_same_tensors(grads(one.model), expected)
