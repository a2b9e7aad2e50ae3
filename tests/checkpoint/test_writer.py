"""The writer's order of things, in the step and in a thread; and the run's lock."""

import errno
import fcntl
import logging
import os
import socket
import threading

import pytest
import torch

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Outcome, Writer
from gpt2_fp8.config import disk
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train.launch import lock_run

BOTH = pytest.mark.parametrize("asynchronous", [True, False], ids=["in a thread", "in the step"])


def state(step, size=8):
    return {"state_dict": {"w": torch.full((size,), float(step))}, "optimizer_states": [], "global_step": step}


def at(step, val_loss=None):
    return Pointer(pointers.folder_name(step), step, val_loss)


@pytest.fixture
def writer(tmp_path):
    made = Writer(tmp_path / "c", keep=2)
    made.begin(None, None)
    yield made
    made.close()


def trace(monkeypatch, folder):
    """The writer's calls that change the disk, in order."""
    calls = []

    def wrap(module, name, text):
        original = getattr(module, name)

        def traced(*args):
            original(*args)
            calls.append(f"{name} {text(*args)}")

        monkeypatch.setattr(module, name, traced)

    wrap(files, "write", lambda path, _: path.name[-1])
    wrap(files, "remove", lambda path: path.name[-1])
    wrap(pointers, "write", lambda _, kind, pointer: f"{kind}={pointer.step}")
    return calls


@BOTH
def test_written_then_pointed_at_then_superseded_deleted(tmp_path, monkeypatch, asynchronous):
    writer = Writer(tmp_path, keep=1, asynchronous=asynchronous)
    writer.begin(None, None)
    writer.save(state(1), at(1))
    writer.wait()
    calls = trace(monkeypatch, tmp_path)
    writer.save(state(2), at(2))
    writer.note(at(2, 5.0), better=True)
    writer.save(state(3), at(3))
    writer.close()
    assert calls == [
        "write 2", "write last=2", "remove 1", "write best=2", "write last=2", "write 3", "write last=3",
    ]  # fmt: skip
    assert list(pointers.steps(tmp_path)) == [2, 3]
    assert writer.outcome == Outcome(3, None, at(2, 5.0))


def test_training_goes_on_while_the_disk_writes_and_may_change_everything(writer, monkeypatch):
    write, gate = files.write, threading.Event()

    def slow(path, checkpoint):
        assert threading.current_thread() is not threading.main_thread()
        assert gate.wait(30)
        write(path, checkpoint)

    monkeypatch.setattr(files, "write", slow)
    live = state(1)
    writer.save(live, at(1))
    live["state_dict"]["w"].fill_(99.0)
    live["optimizer_states"].append("more")
    assert pointers.resolve("last", writer.folder) is None  # nothing points at what is not durable yet
    gate.set()
    writer.wait()
    kept = files.read(pointers.resolve("last", writer.folder))
    assert (kept["state_dict"]["w"].tolist(), kept["optimizer_states"]) == ([1.0] * 8, [])


def test_a_second_save_waits_for_the_first_and_says_so_once(writer, monkeypatch, caplog):
    write, wait, gate, together = files.write, writer.wait, threading.Semaphore(0), []

    def slow(path, checkpoint):
        together.append(path)
        assert gate.acquire(timeout=30)
        write(path, checkpoint)
        assert together == [path]
        together.clear()

    def waited():
        """The disk is done with a checkpoint no sooner than somebody waits for it."""
        if writer._jobs:
            gate.release()
        wait()

    monkeypatch.setattr(files, "write", slow)
    monkeypatch.setattr(writer, "wait", waited)
    with caplog.at_level(logging.WARNING, "gpt2_fp8"):
        for step in (1, 2, 3):
            writer.save(state(step), at(step))
            assert writer.outcome.saved_step == (step - 1 or None)
    writer.close()
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("step 2 waits for the checkpoint before it")


@BOTH
def test_a_full_disk_costs_checkpoints_alone(tmp_path, monkeypatch, caplog, asynchronous):
    writer = Writer(tmp_path, keep=1, asynchronous=asynchronous)
    writer.begin(None, None)
    writer.save(state(1), at(1))
    writer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        for step in (2, 3):
            writer.save(state(step), at(step))
            writer.note(at(step, 0.1), better=True)
            writer.wait()
            assert writer.outcome == Outcome(1, step, None)
    said = [record.message for record in caplog.records if "could not" in record.message]
    assert said == ["step 2 could not be saved, training goes on: [Errno 28] No space left"]
    assert pointers.read(tmp_path, "best") is None
    writer.save(state(13), at(13))
    writer.close()
    assert writer.outcome == Outcome(13, None, None)
    assert list(pointers.steps(tmp_path)) == [13]
    assert writer.written == {1, 13}


def test_a_deletion_that_fails_is_no_failed_checkpoint(writer, monkeypatch, caplog):
    def refuse(path):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "remove", refuse)
    for step in (1, 2, 3):
        writer.save(state(step), at(step))
    writer.wait()
    assert writer.outcome.saved_step == 3
    assert "step-00000001 is superseded and could not be deleted" in caplog.text


def test_a_fault_of_our_own_is_raised_and_the_thread_lives_on(writer):
    writer.save(state(1) | {"odd": {1}}, at(1))
    with pytest.raises(TypeError, match="odd is a builtins"):
        writer.wait()
    writer.save(state(2), at(2))
    writer.close()
    writer.save(state(3), at(3))  # a thread of its own
    writer.wait()
    assert writer.outcome.saved_step == 3
    writer.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoints")]


def test_after_a_step_back_the_best_that_is_written_anew_is_the_best_no_more(tmp_path, caplog):
    writer = Writer(tmp_path, keep=2, asynchronous=False)
    writer.begin(None, None)
    writer.save(state(4), at(4))
    writer.save(state(8), at(8, 2.5))
    writer.note(at(8, 2.5), better=True)
    writer.close()
    assert pointers.read(tmp_path, "best").step == 8
    again = Writer(tmp_path, keep=2, asynchronous=False)
    again.begin(4, None)
    again.save(state(8), at(8))
    again.close()
    assert pointers.read(tmp_path, "best") is None
    assert again.outcome.best is None
    assert "step 8, the best so far, is reached once more and written again" in caplog.text


# ---- before a run begins in a folder ---------------------------------------------------------------------------------


def test_the_lock_file_says_who_and_goes_with_the_holder(tmp_path):
    folder = tmp_path / "run"
    with lock_run(folder):
        said = (folder / disk.LOCK).read_text().strip()
        assert said.startswith(f"process {os.getpid()} on {socket.gethostname()}, since 20")
        with pytest.raises(UserError) as refused, lock_run(folder):
            pass
        assert said in str(refused.value)
        with lock_run(tmp_path / "other"):
            pass
        (folder / disk.LOCK).write_text("\x1b[2J")
        with pytest.raises(UserError, match="another run is at work") as refused, lock_run(folder):
            pass
        assert "\x1b" not in str(refused.value)
    assert list(folder.iterdir()) == []
    with lock_run(folder):
        pass


def test_where_there_are_no_locks_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def unsupported(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with lock_run(tmp_path), lock_run(tmp_path):
        pass
    assert "nothing keeps a second run out of it" in caplog.text
