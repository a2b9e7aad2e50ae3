"""A training step beside a validation and a checkpoint: its first scales, and the memory of its first update."""

import copy

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.backends.resolve import resolve
from gpt2_fp8.engine import training_step
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.precision import state
from tests.runs import SMALL

DELAYED = ["precision=fp8_hybrid", "precision.backend=emulated", "recipe=delayed"]


def built(*words):
    (config,) = compose.preflight([*SMALL, *words])
    step = TrainingStep(config, resolve(config, "cpu"), 257)
    step.initialise()
    step.prepare_optimizer()
    return step


def ids(sequences, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 257, (sequences, 33), dtype=torch.int32, generator=generator)


@pytest.mark.parametrize("sequences", [2, 1])
def test_a_validation_that_comes_first_finds_the_scales_of_training(sequences):
    """Its ids are no share of a step, and gradients are of the mean over such a share."""
    words = [*DELAYED, "global_batch_size=16", f"micro_batch_size={sequences}"]
    first, second = built(*words), built(*words)
    text = ids(16)
    first(text)
    first.settle()
    second.evaluate(text[:sequences])
    second(text)
    second.settle()
    found = [state.capture(step.model) for step in (first, second)]
    assert found[0].keys() == found[1].keys() != set()
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name


def test_a_resumed_runs_optimizer_state_is_not_held_twice(monkeypatch):
    """Also where the size that fitted is not known to fit, since another one is asked for."""
    allocated = []
    like = training_step.state_like
    monkeypatch.setattr(training_step, "state_like", lambda *of: allocated.append(1) or like(*of))
    before, after = (
        built("global_batch_size=8", "micro_batch_size=2"),
        built("global_batch_size=8", "micro_batch_size=4"),
    )
    before(ids(8))
    saved = copy.deepcopy(before.state_dict()), copy.deepcopy(before.optimizer.state_dict())
    assert len(allocated) == 1
    after.load_state_dict(saved[0])
    after.optimizer.load_state_dict(saved[1])
    after(ids(8, seed=1))
    assert len(allocated) == 1
