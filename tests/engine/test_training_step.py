"""A training step beside others: the first scales, the memory of the first update, gradients ahead of a verdict."""

import copy
import math
import signal

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.engine import training_step
from gpt2_fp8.engine.step import StepResult
from gpt2_fp8.engine.training_step import TrainingStep
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.resolve import resolve
from gpt2_fp8.runtime.signals import Interrupted
from tests.ahead import jumped, not_finite, nothing, trained
from tests.runs import SMALL, assert_equal

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
    second.evaluation.sums(text[:sequences])
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


# ---- gradients ahead of a verdict ------------------------------------------------------------------------------------

STEPS = 6


def drawn(step, number):
    """Random numbers that a forward draws: a step that is taken back must give them back."""
    step.model.tokens.weight.grad += 1e-6 * torch.rand(())
    not_finite(step, number)


def trained_on_bytes(words, wrong, ahead):
    torch.manual_seed(5)
    step = built(*words)
    return step, *trained(step, [ids(8, seed) for seed in range(STEPS)], wrong, ahead)


@pytest.mark.parametrize(
    ("words", "wrong", "twice"),
    [
        (DELAYED, nothing, []),
        (["precision=bf16"], nothing, []),
        (["precision=bf16"], not_finite, []),  # no second attempt: the next gradients are of the weights that stay
        (DELAYED, not_finite, [3, 4]),
        (DELAYED, drawn, [3, 4]),
        (DELAYED, jumped, [4]),
        ([*DELAYED, "precision.bf16_last_steps=2"], not_finite, [3]),
        ([*DELAYED, "recipe=current"], not_finite, [3, 4]),
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
    step, order = built("global_batch_size=8", "micro_batch_size=4"), []
    read, gradients = StepResult.read, step._batching.gradients
    monkeypatch.setattr(StepResult, "read", lambda self: order.append("verdict") or read(self))
    step._batching.gradients = lambda text: order.append("gradients") or gradients(text)
    for seed in range(3):
        step(ids(8, seed))
    assert order == ["gradients", "gradients", "verdict", "gradients", "verdict"]


def test_an_error_that_settling_raises_takes_them_back():
    """As a rollback's: what is saved then is the state after the step that was settled."""
    found = []
    for ahead in (True, False):
        torch.manual_seed(5)
        step = built(*DELAYED, "global_batch_size=8", "micro_batch_size=4")
        for seed in range(2):
            step(ids(8, seed))

        def refuse(result):
            raise RuntimeError("back")

        step.on_settled.append(refuse)
        with pytest.raises(RuntimeError, match="back"):
            step(ids(8, 2)) if ahead else step.settle()
        assert all(weight.grad is None for weight in step.model.parameters())
        found.append((step.model.state_dict(), step.state_dict(), {"random": torch.get_rng_state()}))
    for one, other in zip(*found, strict=True):
        assert_equal(one, other, "state")


@pytest.mark.parametrize("error", [Interrupted(signal.SIGTERM), RuntimeError("a hook")], ids=["signal", "error"])
def test_what_ends_them_leaves_the_step_before_settled(error):
    """As if that step had been settled first: no gradient is left, and scales and random numbers are as they were."""
    found = []
    for ahead in (True, False):
        torch.manual_seed(5)
        step, settled = built(*DELAYED, "global_batch_size=8", "micro_batch_size=4"), []
        step.on_settled.append(settled.append)
        step(ids(8, 0))
        if ahead:
            passes, backward = [], step._gradients._backward

            def ended(loss, passes=passes, backward=backward):
                torch.rand(3)
                backward(loss)
                passes.append(loss)
                if len(passes) == 2:
                    raise error

            step._gradients._backward = ended
            with pytest.raises(type(error)):
                step(ids(8, 1))
        else:
            step.settle()
        assert len(settled) == step.schedule.last_epoch == 1
        assert all(weight.grad is None for weight in step.model.parameters())
        found.append((step.model.state_dict(), step.state_dict(), {"random": torch.get_rng_state()}))
    for one, other in zip(*found, strict=True):
        assert_equal(one, other, "state")


def test_who_asks_while_a_step_is_settled_is_told_of_that_step_alone():
    found = []
    for ahead in (True, False):
        torch.manual_seed(5)
        step, asked = built(*DELAYED, "global_batch_size=8", "micro_batch_size=4"), []
        step.on_settled.append(lambda _, step=step, asked=asked: asked.append(copy.deepcopy(step.state_dict())))
        for seed in range(3):
            step(ids(8, seed))
            if not ahead:
                step.settle()
        step.settle()
        found.append((asked, step.model.state_dict()))
    assert_equal(*found, "state")


def test_what_is_asked_while_a_step_is_settled(monkeypatch):
    """Its result costs nothing. State has the next gradients computed again, and ranks would part where one asks."""
    step, asked = built("global_batch_size=8", "micro_batch_size=4"), []
    made, attempts = [], step.attempts._computed
    step.attempts._computed = lambda *of: made.append(of) or attempts(*of)
    step.on_settled.append(lambda result: asked.append(step.last is result))
    for seed in range(4):
        step(ids(8, seed))
    assert (len(made), asked) == (4, [True] * 3)

    def ask_of_ranks(result):
        with monkeypatch.context() as patch:
            patch.setattr(training_step.collectives, "is_distributed", lambda: True)
            with pytest.raises(RuntimeError, match="while a step is being settled"):
                step.state_dict()

    step.on_settled[:] = [ask_of_ranks]
    step(ids(8, 4))
    assert len(made) == 5
    step.on_settled[:] = [lambda result: step.state_dict()]
    step(ids(8, 5))
    assert len(made) == 7


def test_the_gap_before_a_step_is_that_before_its_first_attempt():
    gaps, made = [], built(*DELAYED, "global_batch_size=8", "micro_batch_size=4")
    begins = made.attempts.gaps.step_begins
    made.attempts.gaps.step_begins = lambda device: (gaps.append(begins(device)), gaps[-1])[1]
    made.on_settled.append(lambda result: made.state_dict())  # takes the next gradients back
    for seed in range(3):
        made(ids(8, seed))
    assert len(gaps) == 5
    assert made.last.gap is gaps[3]


def test_a_hook_is_answered_with_the_step_before_while_a_step_is_run_again():
    step = built(*DELAYED, "global_batch_size=8", "micro_batch_size=4")
    step.attempts.ahead = False  # as with any hook
    step(ids(8, 0))
    first, again, seen = step.last, step.attempts.again_in_bf16, []
    step.attempts.again_in_bf16 = lambda attempt: (seen.append(None), again(attempt))[1]
    backward = step._gradients._backward
    step._gradients._backward = lambda loss: (seen.append(step.last), backward(loss))
    of_step = step._gradients.of_step
    step._gradients.of_step = lambda *of: of_step(*of) * math.nan
    step(ids(8, 1))
    assert step.last.first is not None
    assert seen == [first, first, None, first, first]


def test_the_last_step_cannot_be_read_within_a_backward():
    step = built("global_batch_size=8", "micro_batch_size=4")
    step(ids(8, 0))
    backward = step._gradients._backward
    step._gradients._backward = lambda loss: step.last and backward(loss)
    with pytest.raises(RuntimeError, match="within a forward or backward: use on_train_batch_end"):
        step(ids(8, 1))
