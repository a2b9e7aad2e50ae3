"""Gradients ahead of a verdict: every bit is that of steps that are settled one by one. See tests/engine for more."""

import math

import pytest
import torch

from gpt2_fp8.backends.resolve import resolve
from gpt2_fp8.measure import worker
from gpt2_fp8.precision import state
from tests.gpu.common import VOCAB, composed, determinism, hopper, tokens
from tests.runs import assert_equal

pytestmark = [pytest.mark.fp8, hopper]

STEPS = 6
ROADS = [
    ["precision.backend=fused", "cuda_graphs=false"],
    ["cuda_graphs=true"],
    ["precision=bf16", "compile=true", "compile_mode=reduce-overhead"],
]


@pytest.fixture(autouse=True)
def _deterministic():
    with determinism():
        yield


def nothing(step, number):
    pass


def not_finite(step, number):
    if number in (2, 3):
        step.model.tokens.weight.grad[0, 0] = math.nan


def jumped(step, number):
    if number == 3:
        for _, layer in state.scaling_states(step.model):
            layer.amax_history[0] = 1e30  # this step's own


def trained(overrides, wrong, ahead):
    """Train; without `ahead` each step is settled before the next one comes. Returns what it leaves."""
    config = composed(*overrides)
    step, batches = worker.built(config, resolve(config, "cuda"), VOCAB), [tokens(12, n, 128) for n in range(STEPS)]
    of_step, computed, seen = step._gradients.of_step, [], []

    def spoiled(text, size):
        loss = of_step(text, size)
        computed.append(next(i for i, batch in enumerate(batches) if batch is text))
        wrong(step, computed[-1])
        return loss

    step._gradients.of_step = spoiled
    step.on_settled.append(lambda result: seen.append(repr((result.read(), result.first, result.lr))))
    for batch in batches:
        step(batch)
        if not ahead:
            step.settle()
    step.settle()
    weights = {name: weight.clone() for name, weight in step.model.state_dict().items()}
    return computed, (seen, weights, step.optimizer.state_dict()["state"], state.capture(step.model))


@pytest.mark.parametrize(("wrong", "twice"), [(nothing, []), (not_finite, [3, 4]), (jumped, [4])])
@pytest.mark.parametrize("overrides", ROADS, ids=" ".join)
def test_they_change_no_bit(overrides, wrong, twice):
    fp8 = "precision=bf16" not in overrides
    computed, found = trained(overrides, wrong, ahead=True)
    in_turn, expected = trained(overrides, wrong, ahead=False)
    assert_equal(found, expected, "state")
    assert sorted(computed) == sorted(in_turn + (twice if fp8 else []))


@pytest.mark.parametrize("overrides", ROADS[:2], ids=" ".join)
def test_the_host_launches_a_step_while_the_gpu_computes_the_one_before(overrides):
    """Its verdict has not come when the next gradients are launched, and nothing has waited for it."""
    config = composed(*overrides)
    step, waited = worker.built(config, resolve(config, "cuda"), VOCAB), []
    batches = [tokens(12, n, 128) for n in range(7)]  # first: to copy one to the GPU waits for it
    for batch in batches[:3]:
        step(batch)
    of_step = step._gradients.of_step

    def launched(text, size):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second, in front of these gradients
        waited.append(step._unsettled.result.sent.arrival._event.query())
        return of_step(text, size)

    step._gradients.of_step = launched
    for batch in batches[3:]:
        step(batch)
    assert waited[1:] == [False, False, False]
