"""A run cut in pieces equals the run in one piece: weights, moments, generators, losses and logs, bit for bit."""

import random
import signal

import numpy as np
import pytest
import torch

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.config.errors import Stopped
from tests.callbacks.tiny_run import At, kill, rows, run

STATE = ("state_dict", "optimizer_states", "lr_schedulers", "rng", "global_step")


class Crash(BaseException):
    """What a kill -9 looks like from inside: nothing is saved, no handler runs."""


def crash():
    raise Crash


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def end_of(folder, step=12):
    checkpoint = files.read(folder / "checkpoints" / pointers.folder_name(step))
    return {key: checkpoint[key] for key in STATE}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    module, _, _ = run(folder)
    assert module.validated == [4, 8, 12]
    return folder, module


def assert_same(folder, whole):
    reference = whole[0]
    assert equal(end_of(folder), end_of(reference))
    assert rows(folder) == rows(reference)
    for kind in ("last", "best"):
        assert pointers.read(folder / "checkpoints", kind) == pointers.read(reference / "checkpoints", kind)


def test_what_was_drawn_before_a_run_makes_no_difference(tmp_path, whole):
    """Or this module's tests would depend on those that ran in the process before."""
    for draw in (torch.rand, np.random.rand):
        draw(1)
    random.random()
    run(tmp_path)
    assert_same(tmp_path, whole)


LEGS = {"long-loader": {"length": 1000}, "loader-as-long-as-the-run": {"length": 12}}
LEGS |= {"written-in-the-step": {"asynchronous": False}}


@pytest.mark.parametrize("options", LEGS.values(), ids=LEGS)
def test_three_legs_stopped_by_signals(tmp_path, whole, options):
    with pytest.raises(Stopped) as stopped:
        run(tmp_path, callbacks=[At("on_train_batch_start", 2, kill(signal.SIGTERM))], **options)
    assert stopped.value.exit_code == 143
    assert pointers.read(tmp_path / "checkpoints", "last").step == 3  # not at the interval: the stop saved it
    with pytest.raises(Stopped):
        run(tmp_path, callbacks=[At("on_train_batch_start", 7, kill(signal.SIGINT))], **options)
    assert pointers.read(tmp_path / "checkpoints", "last").step == 8  # at a validation, which is still to be done
    module, _, _ = run(tmp_path, **options)
    assert module.validated == [8, 12]
    assert min(module.losses) == 9
    assert_same(tmp_path, whole)


CRASHES = [
    ("on_train_batch_end", 5, [8, 12]),  # between two checkpoints; the one of step 4 was validated afterwards
    ("on_validation_batch_end", 4, [4, 8, 12]),  # in the validation of a step that is saved already
    ("on_validation_end", 8, [8, 12]),
    ("on_train_batch_start", 8, [12]),  # after a validation: it is not repeated
    ("on_validation_end", 12, [12]),
]


@pytest.mark.parametrize(("hook", "step", "validated"), CRASHES)
def test_crash(tmp_path, whole, hook, step, validated):
    with pytest.raises(Crash):
        run(tmp_path, callbacks=[At(hook, step, crash)])
    if step == 12:  # the last step is saved: fit has nothing left to do, and the caller sees the validation missing
        module, trainer, tiers = run(tmp_path)
        assert module.losses == {}
        assert tiers.tracker.validated_step == 8
        trainer.validate(module, verbose=False)
        assert tiers.tracker.validated_step == 12
    else:
        module, _, _ = run(tmp_path)
        assert module.validated == validated
    assert equal(end_of(tmp_path), end_of(whole[0]))
    if hook != "on_validation_end":  # there Lightning has logged the validation, and the resumed run logs it again
        assert_same(tmp_path, whole)


def test_best_between_intervals_is_resumable(tmp_path, whole):
    with pytest.raises(Crash):
        run(tmp_path, every=0, callbacks=[At("on_train_batch_start", 6, crash)])
    assert list(pointers.steps(tmp_path / "checkpoints").values()) == [tmp_path / "checkpoints" / "step-00000004"]
    module, _, _ = run(tmp_path)
    assert module.validated == [8, 12]
    assert_same(tmp_path, whole)


def test_the_end_is_saved_before_its_validation(tmp_path, whole):
    with pytest.raises(Crash):
        run(tmp_path, max_steps=4, every=0, callbacks=[At("on_validation_batch_end", 4, crash)])
    module, _, _ = run(tmp_path)
    assert (min(module.losses), module.validated) == (5, [4, 8, 12])
    assert_same(tmp_path, whole)


def test_a_finished_run_returns_at_once_and_can_be_extended(tmp_path, whole):
    run(tmp_path, max_steps=8, length=8)
    module, trainer, tiers = run(tmp_path, max_steps=8, length=8)
    assert (module.losses, module.validated, trainer.global_step, tiers.tracker.validated_step) == ({}, [], 8, 8)
    module, _, _ = run(tmp_path, max_steps=12, length=12)
    assert min(module.losses) == 9
    assert module.validated == [12]
    assert_same(tmp_path, whole)


def test_a_best_in_an_abandoned_branch_stays(tmp_path, whole):
    run(tmp_path)
    run(tmp_path, ckpt_path=str(tmp_path / "checkpoints" / "step-00000010"))
    assert_same(tmp_path, whole)
