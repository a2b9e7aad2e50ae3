"""A training step beside others: the first scales, the memory of the first update, gradients ahead of a verdict."""

import signal
from contextlib import nullcontext

import pytest
import torch

from gpt2_fp8.engine.step import StepResult
from gpt2_fp8.fp8 import state
from gpt2_fp8.runtime.signals import Interrupted
from tests.ahead import jumped, not_finite, nothing, trained
from tests.runs import assert_equal, training_step

DELAYED = ["precision=fp8_hybrid", "precision.backend=emulated", "recipe=delayed"]


def ids(sequences, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (sequences, 33), dtype=torch.int32, generator=generator)


@pytest.mark.parametrize("sequences", [2, 1])
def test_a_validation_that_comes_first_finds_the_scales_of_training(sequences):
    """Its ids are no share of a step, and gradients are of the mean over such a share."""
    words = [*DELAYED, "global_batch_size=16", f"micro_batch_size={sequences}"]
    first, second = training_step(*words), training_step(*words)
    text = ids(16)
    first(text)
    first.settle()
    second.evaluation.sums(text[:sequences])
    second(text)
    second.settle()
    found = [state.capture(step.model) for step in (first, second)]
    assert found[0].keys() == found[1].keys() != set()
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name


STEPS = 6


def drawn(step, number):
    """Random numbers that a forward draws: a step that is taken back must give them back."""
    step.model.tokens.weight.grad += 1e-6 * torch.rand(())
    not_finite(step, number)


def trained_on_bytes(words, wrong, ahead):
    torch.manual_seed(5)
    step = training_step(*words)
    return step, *trained(step, [ids(8, seed) for seed in range(STEPS)], wrong, ahead)


@pytest.mark.parametrize(
    ("words", "wrong", "twice"),
    [
        (DELAYED, nothing, []),
        (["precision=bf16"], not_finite, []),  # no second attempt: the next gradients are of the weights that stay
        (DELAYED, drawn, [3, 4]),
        (DELAYED, jumped, [4]),
        ([*DELAYED, "precision.bf16_last_steps=2"], not_finite, [3]),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) and value and isinstance(value[0], str) else None,
)
def test_gradients_ahead_of_a_verdict_change_no_bit(words, wrong, twice):
    """Those after a step that is run again, or whose amaxes are limited, are computed again."""
    words = [*words, "global_batch_size=8", "micro_batch_size=4", f"trainer.max_steps={STEPS}", "optim.warmup_steps=1"]
    one, computed, seen = trained_on_bytes(words, wrong, ahead=True)
    random = torch.rand(3)
    other, in_turn, expected = trained_on_bytes(words, wrong, ahead=False)
    assert torch.equal(random, torch.rand(3)), "the generator's state"
    assert seen == expected, "also where a loss is NaN"
    assert sorted(computed) == sorted(in_turn + twice)
    assert_equal(one.model.state_dict(), other.model.state_dict(), "state")
    assert_equal(one.optimizer.state_dict(), other.optimizer.state_dict(), "state")
    assert_equal(one.state_dict(), other.state_dict(), "state")


def test_they_come_before_the_verdict_is_waited_for(monkeypatch):
    step, order = training_step("global_batch_size=8", "micro_batch_size=4"), []
    read, make = StepResult.read, step.attempts.make
    monkeypatch.setattr(StepResult, "read", lambda self: order.append("verdict") or read(self))
    step.attempts.make = lambda *of, **how: order.append("gradients") or make(*of, **how)
    for seed in range(3):
        step(ids(8, seed))
    assert order == ["gradients", "gradients", "verdict", "gradients", "verdict"]


def refuse(result):
    raise RuntimeError("back")


@pytest.mark.parametrize("error", [Interrupted(signal.SIGTERM), RuntimeError("a hook"), None])
def test_what_ends_them_leaves_the_step_before_settled(error):
    """None: what settling raises, as a rollback. No gradient is left; scales and random numbers are as they were."""
    found = []
    for ahead in (True, False):
        torch.manual_seed(5)
        step, settled, passes = training_step(*DELAYED, "global_batch_size=8", "micro_batch_size=4"), [], []
        step.on_settled += [settled.append, *[refuse] * (error is None)]
        step(ids(8, 0))
        backward = step.attempts._gradients._backward

        def ended(loss, passes=passes, backward=backward):
            torch.rand(3)
            backward(loss)
            passes.append(loss)
            if len(passes) == 2:
                raise error

        if ahead and error is not None:
            step.attempts._gradients._backward = ended
        with pytest.raises(type(error or RuntimeError())) if ahead or error is None else nullcontext():
            step(ids(8, 1)) if ahead else step.settle()
        assert len(settled) == step.schedule.last_epoch == 1
        assert all(weight.grad is None for weight in step.model.parameters())
        found.append((step.model.state_dict(), step.state_dict(), {"random": torch.get_rng_state()}))
    for one, other in zip(*found, strict=True):
        assert_equal(one, other, "state")


def test_a_step_that_begins_again_is_one_of_the_smaller_size_to_the_bit():
    """Without room in its second part, after scales and histories have seen the first."""
    found = []
    for again in (True, False):
        step = training_step(*DELAYED, "global_batch_size=8", "micro_batch_size=4")
        step(ids(8, 0))
        step.settle()
        gradients = step.attempts._gradients
        loss, parts = gradients.loss, iter(range(100))

        def limited(text, *rest, loss=loss, parts=parts, again=again):
            if next(parts) == 1 and again:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return loss(text, *rest)

        gradients.loss = limited
        step.attempts.training.size = 4 if again else 2
        step(ids(8, 1))
        step.settle()
        assert step.attempts.training.size == 2
        states = step.model.state_dict(), step.optimizer.state_dict(), state.capture(step.model)
        found.append((*states, {"loss": step.last.read().loss}))
    for one, other in zip(*found, strict=True):
        assert_equal(one, other, "state")


@pytest.mark.parametrize(("words", "dtype"), [([], torch.float32), (["precision.reduce=bf16"], torch.bfloat16)])
def test_gradients_are_reduced_in_the_dtype_that_was_asked_for(words, dtype):
    """What ranks then exchange: tests/runtime/test_collectives.py."""
    assert training_step("precision=fp32", *words).exchange.dtype == dtype
