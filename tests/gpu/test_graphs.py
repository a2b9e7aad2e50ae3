"""CUDA graphs of a micro-batch against the same computed launch by launch."""

import pytest
import torch

from gpt2_fp8.engine import cuda_graphs
from gpt2_fp8.engine.engine import Engine
from gpt2_fp8.measure.worker import Training
from gpt2_fp8.model.gpt2 import initialise
from gpt2_fp8.precision import state
from gpt2_fp8.precision.plugin import build_plugin
from gpt2_fp8.precision.resolve import resolve
from tests.gpu.common import (
    VOCAB,
    assert_same_gradients,
    composed,
    determinism,
    error,
    evaluating,
    grads,
    hopper,
    tokens,
)

pytestmark = [pytest.mark.fp8, hopper]

SEQUENCES, POSITIONS = 12, 128


@pytest.fixture(autouse=True)
def _deterministic():
    """What is compared here bit for bit are the same kernels in the same order; see `assert_same_gradients`."""
    with determinism():
        yield


def batch(seed, sequences=SEQUENCES):
    return tokens(sequences, seed, POSITIONS)


def prepared(graphed, *overrides):
    """An engine whose scales are found, and its plugin."""
    config = composed(f"cuda_graphs={str(graphed).lower()}", *overrides)
    plan = resolve(config, "cuda")
    assert (plan.backend, plan.graphs) == ("fused", graphed)
    with torch.device("cuda"):
        engine = Engine(config, plan, VOCAB)
    initialise(engine.model, seed=1)
    plugin = build_plugin(config, plan)
    engine.calibrate(batch(0), plugin.forward_context)
    return engine, plugin


def step(engine, plugin, ids):
    """Loss and gradients of an optimizer step without its update."""
    backward = (lambda _: pytest.fail("replayed, not called")) if engine.plan.graphs else torch.Tensor.backward
    loss = engine.gradients(ids, plugin.forward_context, backward)
    return loss.item(), grads(engine.model)


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize(("sequences", "micro_batch_size"), [(12, 12), (12, 4), (96, 48)])
def test_gradients_and_scales_are_those_without_graphs(sequences, micro_batch_size):
    """One micro-batch, three, and two of so many tokens that the embedding's backward sorts them."""
    runs = []
    for graphed in (True, False):
        words = f"micro_batch_size={micro_batch_size}", f"global_batch_size={sequences}"
        engine, plugin = prepared(graphed, *words)
        steps = []
        for seed in range(3):
            steps.append(step(engine, plugin, batch(seed, sequences)))
            engine.model.zero_grad(set_to_none=True)
        runs.append((steps, state.capture(engine.model)))
    for (loss, ours), (expected_loss, expected) in zip(runs[0][0], runs[1][0], strict=True):
        assert loss == expected_loss
        assert_same_gradients(ours, expected)
    assert_same_state(runs[0][1], runs[1][1])


@pytest.mark.parametrize(
    "overrides",
    [["precision.keep_bf16=[first,head]"], ["activation_checkpointing=mlp", "model.bias=false"]],
    ids=" ".join,
)
def test_other_parts_can_be_recorded_too(overrides):
    runs = [step(*prepared(graphed, *overrides), batch(0)) for graphed in (True, False)]
    (loss, ours), (expected_loss, expected) = runs
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert error(ours, expected) < 1e-3


@pytest.mark.parametrize("micro_batch_size", [12, 4])
def test_training_goes_as_without_graphs(micro_batch_size):
    """Four whole steps. An embedding that differs in its last bit is cast to another FP8 number now and then, and so
    the steps after the first are close and not equal."""
    losses, weights = [], []
    for graphed in (True, False):
        config = composed(f"cuda_graphs={str(graphed).lower()}", f"micro_batch_size={micro_batch_size}")
        training = Training(config, resolve(config, "cuda"), VOCAB)
        start = {name: p.detach().clone() for name, p in training.engine.model.named_parameters()}
        results = [training.step(batch(seed)) for seed in range(4)]
        losses.append([result.loss.item() for result in results])
        assert not any(result.skipped.item() for result in results)
        weights.append({name: p.detach().clone() for name, p in training.engine.model.named_parameters()})
    assert losses[0][0] == losses[1][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][3] < losses[0][0]
    moved = {name: start[name] + weights[0][name] - weights[1][name] for name in start}
    assert error(moved, start) < 0.05 * error(weights[1], start), "of the way that the weights went"


def test_recording_leaves_no_trace():
    engine, plugin = prepared(True)
    recorder = cuda_graphs.GraphedGradients(engine.model, engine.loss, plugin.forward_context)
    before = state.capture(engine.model)
    recorder._record(batch(0)[:4], 1 / 3)
    assert_same_state(before, state.capture(engine.model))
    assert all(p.grad is None for p in engine.model.parameters())
    assert all(gradient is not None for gradient in recorder._gradients)


def test_recording_waits_for_what_it_keeps(monkeypatch):
    """The copies of the scales come before the passes that change them, however late the device gets to them."""
    engine, plugin = prepared(True)
    original = state.restored

    def late(model):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        return original(model)

    monkeypatch.setattr(cuda_graphs.state, "restored", late)
    recorder = cuda_graphs.GraphedGradients(engine.model, engine.loss, plugin.forward_context)
    before = state.capture(engine.model)
    recorder._record(batch(0)[:4], 1 / 3)
    assert_same_state(before, state.capture(engine.model))


def test_evaluation_between_steps_disturbs_nothing():
    """Neither the recorded memory nor the scales; and what an evaluation gave is not written over by a replay."""
    runs = []
    for evaluated in (True, False):
        engine, plugin = prepared(True)
        steps = [step(engine, plugin, batch(0))]
        if evaluated:
            with evaluating(engine.model, plugin):
                loss, logits = engine.loss(batch(9)[:8]), engine.model(batch(9)[:2, :-1].long())
            kept = loss.clone(), logits.clone()
        steps += [step(engine, plugin, batch(seed)) for seed in (1, 2)]
        if evaluated:
            assert torch.equal(loss, kept[0])
            assert torch.equal(logits, kept[1])
        runs.append((steps, state.capture(engine.model)))
    for (loss, ours), (expected_loss, expected) in zip(runs[0][0], runs[1][0], strict=True):
        assert loss == expected_loss
        assert_same_gradients(ours, expected)
    assert_same_state(runs[0][1], runs[1][1])


def test_an_evaluation_after_a_replay_sees_the_new_weights():
    """Its weights are cast anew, into the memory that the graphs read."""
    losses = []
    for graphed in (True, False):
        engine, plugin = prepared(graphed)
        step(engine, plugin, batch(0))
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.mul_(1.5)
        with evaluating(engine.model, plugin):
            losses.append(engine.loss(batch(9)).item())
        losses.append(step(engine, plugin, batch(1))[0])
    assert losses[:2] == losses[2:]


def test_gradients_lie_where_they_were_recorded():
    """An optimizer that sets them to None does not lose them, and a step's are not added to those of the one before."""
    engine, plugin = prepared(True)
    step(engine, plugin, batch(0))
    with state.restored(engine.model):
        loss, expected = step(engine, plugin, batch(1))
    places = {name: p.grad.data_ptr() for name, p in engine.model.named_parameters()}
    engine.model.zero_grad(set_to_none=True)
    again, ours = step(engine, plugin, batch(1))
    assert again == loss
    assert_same_gradients(ours, expected)
    assert places == {name: p.grad.data_ptr() for name, p in engine.model.named_parameters()}


def test_two_recorded_models_do_not_share_their_memory():
    (one, plugin), (other, second) = prepared(True), prepared(True, "model.n_layer=1")
    _, expected = step(one, plugin, batch(0))
    step(other, second, batch(1))
    assert_same_gradients(grads(one.model), expected)
