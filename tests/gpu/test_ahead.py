"""Gradients ahead of a verdict: every bit is that of steps that are settled one by one. See tests/engine for more."""

import pytest
import torch

from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.resolve import resolve
from gpt2_fp8.measure import worker
from tests.ahead import jumped, not_finite, nothing, trained
from tests.gpu.common import VOCAB, composed, hopper, tokens
from tests.runs import assert_equal

pytestmark = [pytest.mark.fp8, hopper, pytest.mark.usefixtures("deterministic")]

STEPS = 6
ROADS = [
    ["precision.backend=fused", "cuda_graphs=false"],
    ["cuda_graphs=true"],
    ["precision=bf16", "compile=true", "compile_mode=reduce-overhead"],
]


def trained_on_tokens(overrides, wrong, ahead):
    """Train; returns the batches whose gradients were computed, and what training leaves."""
    config = composed(*overrides)
    step, batches = worker.build(config, resolve(config, "cuda"), VOCAB), [tokens(12, n, 128) for n in range(STEPS)]
    computed, seen = trained(step, batches, wrong, ahead)
    weights = {name: weight.clone() for name, weight in step.model.state_dict().items()}
    return computed, (seen, weights, step.optimizer.state_dict()["state"], state.capture(step.model))


@pytest.mark.parametrize(("wrong", "twice"), [(nothing, []), (not_finite, [3, 4]), (jumped, [4])])
@pytest.mark.parametrize("overrides", ROADS, ids=" ".join)
def test_they_change_no_bit(overrides, wrong, twice):
    fp8 = "precision=bf16" not in overrides
    computed, found = trained_on_tokens(overrides, wrong, ahead=True)
    in_turn, expected = trained_on_tokens(overrides, wrong, ahead=False)
    assert_equal(found, expected, "state")
    assert sorted(computed) == sorted(in_turn + (twice if fp8 else []))


@pytest.mark.parametrize("overrides", ROADS[:2], ids=" ".join)
def test_the_host_launches_a_step_while_the_gpu_computes_the_one_before(overrides):
    """Its verdict has not come when the next gradients are launched, and nothing has waited for it."""
    config = composed(*overrides)
    step, waited = worker.build(config, resolve(config, "cuda"), VOCAB), []
    batches = [tokens(12, n, 128) for n in range(7)]  # first: to copy one to the GPU waits for it
    for batch in batches[:3]:
        step(batch)
    of_step = step.attempts._gradients.of_step

    def launched(text, size):
        torch.cuda._sleep(200_000_000)  # cycles: a tenth of a second, in front of these gradients
        waited.append(step._unsettled.result.sent.arrival._event.query())
        return of_step(text, size)

    step.attempts._gradients.of_step = launched
    for batch in batches[3:]:
        step(batch)
    assert waited[1:] == [False, False, False]
