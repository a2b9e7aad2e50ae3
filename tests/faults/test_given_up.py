"""A signal in the midst of a step, of one process. The step is given up, and nothing shows that it began."""

import os
import signal

import pytest
import torch

from gpt2_fp8.config.errors import Stopped
from gpt2_fp8.engine.gradients import Gradients
from tests.faults.pretended import NanLoss, Pretended, going_wrong
from tests.runs import assert_same_checkpoint, checkpoint, metrics, record_steps, summary, train

WORDS = ["model.dropout=0.1", "micro_batch_size=2", "callbacks.checkpoint_every_n_steps=0"]
END = 12
ASIDE = {"tokens_per_second", "step_time", "data_wait", "memory_gb"}


def nth(number, original, seen, training=True):
    """`original`, which gets the process a signal at its `number`th call."""

    def called(*arguments, **options):
        if torch.is_grad_enabled() == training:
            seen.append(1)
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    return called


def steps_of(folder, *words):
    with pytest.MonkeyPatch.context() as patch:
        steps = record_steps(patch)
        train(folder, *WORDS, *words)
    return steps


def values(folder):
    return {name: column for name, column in metrics(folder).items() if name not in ASIDE}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, steps_of(folder)


def stopped_at(folder, patch, *words):
    """Run until the signal that `patch` sends; the steps that were finished, and how many passes came after it."""
    steps = record_steps(patch)
    with pytest.raises(Stopped) as stopped:
        train(folder, *WORDS, *words)
    assert stopped.value.exit_code == 143
    assert summary(folder)["status"] == "stopped"
    return steps


# Four micro-batches a step: the 1st of the first step, the last of the third.
@pytest.mark.parametrize(("forward", "finished"), [(1, 0), (12, 2)])
def test_a_step_is_given_up_within_a_micro_batch(tmp_path, whole, forward, finished):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "loss", nth(forward, Gradients.loss, seen))
        steps = stopped_at(tmp_path / "run", patch)
    assert len(seen) == forward, "not one more forward"
    assert len(steps) == summary(tmp_path / "run")["steps"] == finished
    assert checkpoint(tmp_path / "run", finished).is_dir() == bool(finished)
    steps += steps_of(tmp_path / "run", "ckpt_path=last")
    same(tmp_path / "run", steps, whole)


def same(folder, steps, whole):
    assert steps == whole[1]
    assert values(folder) == values(whole[0])
    assert_same_checkpoint(checkpoint(folder, END), checkpoint(whole[0], END))


def test_in_a_validation(tmp_path, whole):
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "loss", nth(3, Gradients.loss, seen, training=False))
        steps = stopped_at(tmp_path / "run", patch)
    assert (len(seen), len(steps)) == (3, 5)
    same(tmp_path / "run", steps + steps_of(tmp_path / "run", "ckpt_path=last"), whole)


def test_in_a_step_that_is_run_again_in_bf16(tmp_path):
    """It is counted, and its update was not made: the one before it is what is saved."""
    words = ["precision=fp8_hybrid"]
    with going_wrong(NanLoss(7, precision="fp8")):
        whole = tmp_path / "whole", steps_of(tmp_path / "whole", *words)
    with going_wrong(NanLoss(7, precision="fp8")), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pretended, "bf16_loss", nth(2, Pretended.bf16_loss, seen := []))
        steps = stopped_at(tmp_path / "run", patch, *words)
    assert (len(seen), len(steps)) == (2, 7)  # of which the last one raised
    assert summary(tmp_path / "run")["steps"] == 6
    with going_wrong(NanLoss(7, precision="fp8")):
        steps = steps[:6] + steps_of(tmp_path / "run", *words, "ckpt_path=last")
    same(tmp_path / "run", steps, whole)
