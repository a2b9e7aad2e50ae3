"""Faults 01 to 05, 19 to 24, 26 and 28: kills, full disks, resumes, retention, two runs in a folder, late writes."""

import errno
import json
import logging
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Writer
from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.train.launch import lock_run
from gpt2_fp8.train.module import GPT2Module
from tests import forkserver
from tests.callbacks import tiny_run
from tests.checkpoint.test_writer import at, state
from tests.runs import SMALL, assert_same_checkpoint, checkpoint, metrics, record_steps, summary, train

HERE = Path(__file__).resolve().parent


def begun(folder, **options):
    writer = Writer(folder, **{"keep": 2, "asynchronous": False} | options)
    last = pointers.resolve("last", folder)
    writer.begin(last and pointers.step_of(last.name), None)
    return writer


# ---- 01 to 03: kills -------------------------------------------------------------------------------------------------


def kill(folder, kills, what):
    command = [sys.executable, HERE / "killing.py", folder, str(kills), "1", what]
    path = {"PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | path, timeout=3000)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_01_killed_in_a_save_the_last_one_loads(tmp_path):
    found = kill(tmp_path / "c", 6, "writer")
    assert found["killed"] == 6
    assert found["midst"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["writer", "run"])
def test_01_a_hundred_kills_of_each_kind_lose_nothing(tmp_path, what):
    """Of the writer alone, and of runs that end as one in peace does."""
    found = kill(tmp_path / "c", 100, what)
    assert found["killed"] == 100
    assert found["midst"] >= 20


class Killed(BaseException):
    """Ends a save at once, without any of the tidying that an error has."""


@pytest.mark.parametrize("before", [("pointers", "write"), ("files", "remove")], ids=["the pointer", "the deletion"])
def test_03_killed_between_rename_and_pointer_there_is_an_old_or_a_new_one(tmp_path, monkeypatch, before):
    writer = begun(tmp_path, keep=1)
    writer.save(state(1), at(1))

    def stop(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr({"pointers": pointers, "files": files}[before[0]], before[1], stop)
        with pytest.raises(Killed):
            writer.save(state(2), at(2))
    assert list(pointers.steps(tmp_path)) == [1, 2]  # at no moment less than one
    expected = 1 if before[0] == "pointers" else 2
    assert files.read(pointers.resolve("last", tmp_path))["global_step"] == expected
    writer = begun(tmp_path, keep=1)  # the run again, which comes to step 2 once more
    writer.save(state(2), at(2))
    assert list(pointers.steps(tmp_path)) == [2]
    assert files.read(pointers.resolve("last", tmp_path))["state_dict"]["w"][0] == 2


# ---- 04, 05: disks that are full -------------------------------------------------------------------------------------


def test_04_an_end_that_finds_no_room_is_an_error_and_the_old_one_stays(tmp_path, monkeypatch):
    tiny_run.fail_for(monkeypatch, range(3, 7))
    with pytest.raises(RunError, match=r"the end of the run \(step 6\) could not be saved"):
        tiny_run.run(tmp_path, max_steps=6, val=100)
    assert files.read(pointers.resolve("last", tmp_path / "checkpoints"))["global_step"] == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's writer
def test_04_a_disk_that_is_full_for_a_while_costs_rows_and_checkpoints_and_not_the_run(tmp_path, caplog):
    """Of a whole run: what its logs do not take either is a warning."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    original = GPT2Module.training_step

    def training_step(self, batch, batch_idx):
        if self.global_step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "run/metrics.csv").stat().st_size, limits[1]))
        elif self.global_step == 9:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        original(self, batch, batch_idx)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GPT2Module, "training_step", training_step)
            train(tmp_path / "run", "callbacks.async_checkpoints=false")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert summary(tmp_path / "run")["steps"] == 12
    assert list(metrics(tmp_path / "run")["train_loss"]) == list(range(1, 13)), "those of the full disk come later"
    said = [r.getMessage() for r in caplog.records if "training goes on" in r.getMessage()]
    assert sorted(line.partition(" ")[0] for line in said) == ["TensorBoard's", "metrics.csv", "step"], said
    assert list(pointers.steps(tmp_path / "run/checkpoints")) == [10, 12]


def test_05_an_fsync_that_fails_is_a_save_that_failed(tmp_path, monkeypatch, caplog):
    writer, fsync, count = begun(tmp_path, keep=1), os.fsync, [0]
    writer.save(state(1), at(1))
    stages = 0
    while True:  # the first, the second, ... fsync of a save, until there are no more
        stages += 1

        def fail(descriptor, stages=stages):
            count[0] += 1
            if count[0] == stages:
                raise OSError(errno.EIO, "an error of input or output")
            fsync(descriptor)

        count[0] = 0
        monkeypatch.setattr(os, "fsync", fail)
        writer.save(state(2), at(2))
        if count[0] < stages:
            break
        last = files.read(pointers.resolve("last", tmp_path))["global_step"]
        # Only the very last one, of the folder in which the pointer was renamed, comes when 2 is in place.
        assert last == 1 or (last == 2 and pointers.read(tmp_path, "last").step == 2)
        assert 1 in pointers.steps(tmp_path)
        assert not list(tmp_path.glob(".*"))
    assert stages > 5
    assert writer.outcome.saved_step == 2
    assert f"step 2 could not be saved, training goes on: [Errno {errno.EIO}]" in caplog.text


# ---- 18 to 22: resuming ----------------------------------------------------------------------------------------------

SHORT = [*SMALL, "trainer.max_steps=6", "trainer.val_check_interval=3", "callbacks.checkpoint_every_n_steps=2",
         "micro_batch_size=2", "model.dropout=0.1"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run in peace: its folder and its steps, each with the hash of its tokens and its loss."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        steps = record_steps(patch)
        train(folder, base=SHORT)
    return folder, list(steps)


def test_19_resumed_at_the_last_step_it_is_already_complete(monkeypatch, caplog, whole):
    steps, before = record_steps(monkeypatch), summary(whole[0])
    with caplog.at_level(logging.INFO, "gpt2_fp8"):
        train(whole[0], "ckpt_path=last", base=SHORT)
    assert steps == []
    assert "already complete: step 6 of 6 is saved" in caplog.text
    after = summary(whole[0])
    assert (after["exit_code"], after["steps"], after["last_val_loss"]) == (0, 6, before["last_val_loss"])


class BrokenError(RuntimeError):
    """A fault inside a step."""


def test_21_the_batch_that_was_in_flight_is_trained_on_again(tmp_path, monkeypatch, whole):
    """The state of a boundary that was saved is what is left, and what was being written is finished."""

    backward, passes = GPT2Module.manual_backward, []

    def broken(self, loss, *args, **kwargs):
        passes.append(self.trainer.global_step)
        if passes.count(4) == 3:  # of four micro-batches
            raise BrokenError
        backward(self, loss, *args, **kwargs)

    steps = record_steps(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(GPT2Module, "manual_backward", broken)
        with pytest.raises(BrokenError):
            train(tmp_path / "run", base=SHORT)
    assert pointers.resolve("last", tmp_path / "run" / "checkpoints") == checkpoint(tmp_path / "run", 4)
    assert summary(tmp_path / "run")["checkpoint"]["last"] == str(checkpoint(tmp_path / "run", 4))
    train(tmp_path / "run", "ckpt_path=last", base=SHORT)
    assert steps == whole[1]
    assert_same_checkpoint(checkpoint(tmp_path / "run", 6), checkpoint(whole[0], 6))


# ---- 24: the best ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_24_no_loss_that_is_not_finite_becomes_the_best(tmp_path, bad):
    _, _, tiers = tiny_run.run(tmp_path, val_losses={4: bad, 8: 2.0, 12: bad})
    assert tiers.tracker.best == pointers.read(tmp_path / "checkpoints", "best") == Pointer("step-00000008", 8, 2.0)
    assert pointers.read(tmp_path / "checkpoints", "last") == Pointer("step-00000012", 12, None)


# ---- 26: folders -----------------------------------------------------------------------------------------------------

HOLD = "import sys; from pathlib import Path; from gpt2_fp8.train.launch import lock_run\n"
HOLD += "with lock_run(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_26_a_second_run_in_a_folder_is_refused_until_the_first_is_dead(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(UserError) as refused, lock_run(tmp_path):
            pass
        assert refused.value.exit_code == 2
        (problem,) = refused.value.problems
        assert f"process {first.pid} on {os.uname().nodename}, since 20" in problem.cause
        assert "run_name" in problem.remedy
    finally:
        first.kill()
        first.communicate()
    assert (tmp_path / disk.LOCK).exists()  # it had no time to take its file away
    with lock_run(tmp_path):
        assert f"process {os.getpid()} " in (tmp_path / disk.LOCK).read_text()


# ---- 28: leaving while something is being written --------------------------------------------------------------------


LEAVE = """
import os, sys, threading, torch
from pathlib import Path
from gpt2_fp8 import compose
from gpt2_fp8.checkpoint import durable
from gpt2_fp8.train.launch import lock_run
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Writer
folder, how = Path(sys.argv[1]), sys.argv[2]
writer = Writer(folder, keep=1)
writer.begin(None, None)
def save(step):
    writer.save({"state_dict": {"w": torch.ones(8)}, "global_step": step}, Pointer(f"step-{step:08d}", step, None))
save(1)
writer.wait()
reached, gate, fsync = threading.Event(), threading.Event(), durable.fsync
def slow(path):
    reached.set()
    gate.wait(60)
    fsync(path)
durable.fsync = slow
save(2)
reached.wait(60)
if how == "os._exit":  # what a second signal does
    os._exit(130)
gate.set()
if how == "close":  # what every end of a run does
    writer.close()
"""


@pytest.mark.parametrize(("how", "code", "steps"), [("close", 0, {2}), ("neither", 0, {1, 2}), ("os._exit", 130, {1})])
def test_28_however_a_process_leaves_the_last_one_is_whole(tmp_path, how, code, steps):
    forkserver.python("-c", LEAVE, str(tmp_path), how, cwd=tmp_path, code=code)
    step = pointers.read(tmp_path, "last").step
    assert step in steps
    assert files.read(pointers.resolve("last", tmp_path))["global_step"] == step
    begun(tmp_path)
    assert not list(tmp_path.glob(".*"))
