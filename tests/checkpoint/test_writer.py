"""The writer's order of things, in the step and in a thread; room, and the run's lock."""

import errno
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
import threading

import pytest
import torch

from gpt2_fp8.checkpoint import durable, files, find, lock, pointers, space
from gpt2_fp8.checkpoint.lock import RunLock
from gpt2_fp8.checkpoint.pointers import Pointer
from gpt2_fp8.checkpoint.writer import Outcome, Writer
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.train.trainer import FolderCheckpointIO

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
    wrap(durable, "write_json", lambda path, _: path.name)
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
    calls = [call for call in calls if not call.startswith("write_json")]
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
    assert find.resolve("last", writer.folder) is None  # nothing points at what is not durable yet
    gate.set()
    writer.wait()
    kept = files.read(find.resolve("last", writer.folder))
    assert kept["state_dict"]["w"].tolist() == [1.0] * 8
    assert kept["optimizer_states"] == []


def test_a_second_save_waits_for_the_first_and_says_so_once(writer, monkeypatch, caplog):
    write, gates, busy, together = files.write, [threading.Event() for _ in range(3)], [0], []
    wait, waits = writer.wait, []

    def slow(path, checkpoint):
        busy[0] += 1
        together.append(busy[0])
        assert gates[len(together) - 1].wait(30)
        write(path, checkpoint)
        busy[0] -= 1

    def waited():
        """The disk is done with a checkpoint no sooner than somebody waits for it."""
        waits.append(len(waits))
        for gate in gates[: waits[-1]]:
            gate.set()
        wait()

    monkeypatch.setattr(files, "write", slow)
    monkeypatch.setattr(writer, "wait", waited)
    with caplog.at_level(logging.WARNING, "gpt2_fp8"):
        writer.save(state(1), at(1))
        for step in (2, 3):
            writer.save(state(step), at(step))
            assert writer.outcome.saved_step == step - 1
    writer.close()
    assert together == [1, 1, 1]
    assert [record.message for record in caplog.records] == [
        "step 2 waits for the checkpoint before it: the disk is slower than the interval"
    ]


@BOTH
def test_failures_are_said_once_and_every_fifth_time(tmp_path, monkeypatch, caplog, asynchronous):
    writer = Writer(tmp_path, keep=1, asynchronous=asynchronous)
    writer.begin(None, None)
    writer.save(state(1), at(1))
    writer.wait()
    write = files.write

    def full(path, checkpoint):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write", full)
    with caplog.at_level(logging.WARNING, "gpt2_fp8"):
        for step in range(2, 13):
            writer.save(state(step), at(step))
            writer.note(at(step, 0.1), better=True)
            writer.wait()
            assert writer.outcome == Outcome(1, step, None)
    said = [record.message for record in caplog.records]
    assert [message.split(",")[0] for message in said] == [
        "step 2 could not be saved", "step 6 could not be saved either", "step 11 could not be saved either",
    ]  # fmt: skip
    assert "the newest checkpoint is of step 1: [Errno 28]" in said[1]
    assert pointers.read(tmp_path, "best") is None
    monkeypatch.setattr(files, "write", write)
    writer.save(state(13), at(13))
    writer.close()
    assert writer.outcome == Outcome(13, None, None)
    assert list(pointers.steps(tmp_path)) == [13]


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


def test_lightnings_door_writes_or_hands_over(tmp_path):
    handed, door = [], FolderCheckpointIO()
    door.save_checkpoint(state(1), tmp_path / "one")
    door.save_checkpoint(state(1), tmp_path / "two", lambda path, checkpoint: handed.append((path, checkpoint)))
    assert door.load_checkpoint(tmp_path / "one")["global_step"] == 1
    assert [path for path, _ in handed] == [tmp_path / "two"]
    assert not (tmp_path / "two").exists()
    with pytest.raises(TypeError, match="not callable"):
        door.save_checkpoint(state(1), tmp_path / "three", {"compression": 9})


# ---- room ------------------------------------------------------------------------------------------------------------


class Disk:
    def __init__(self, free):
        self.free = free


def test_room_is_the_peak_less_what_is_there(tmp_path, monkeypatch):
    one = space.checkpoint_bytes(124_000_000, 8 * 124_000_000)
    assert one == 1_489_000_000
    assert space.at_once(keep=2) == 4
    assert space.at_once(keep=2, permanent=3) == 7
    assert space.at_once(keep=2, best=False) == 3
    assert space.at_once(keep=1, between=False) == 3, "the best, the last, and the one that is being written"
    assert space.at_once(keep=2, best=False, between=False) == 1
    folder = tmp_path / "not" / "there" / "yet"
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: Disk(4 * one if path == tmp_path else 0))
    space.require(folder, 4 * one)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: Disk(4 * one - 1))
    with pytest.raises(UserError, match=r"need 5\.96 GB"):
        space.require(folder, 4 * one)


def test_room_for_one_more_is_needed_however_many_are_there(tmp_path, monkeypatch):
    for step in (1, 2):
        files.write(tmp_path / pointers.folder_name(step), state(step, size=1000))
    size = max(space._size(path) for path in pointers.steps(tmp_path).values())
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: Disk(size))
    space.require(tmp_path, 3 * size)
    space.require(tmp_path, 0)
    with pytest.raises(UserError, match="GB that are there"):
        space.require(tmp_path, 3 * size + 1000)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda path: Disk(size - 1))
    with pytest.raises(UserError):
        space.require(tmp_path, 0)


# ---- the lock --------------------------------------------------------------------------------------------------------


def test_the_file_says_who_and_goes_with_the_holder(tmp_path):
    folder = tmp_path / "run"
    with RunLock(folder):
        said = json.loads((folder / lock.NAME).read_text())
        assert (said["pid"], said["host"]) == (os.getpid(), socket.gethostname())
        with pytest.raises(UserError) as refused, RunLock(folder):
            pass
        assert f"process {os.getpid()} on '{socket.gethostname()}', since '{said['since']}'" in str(refused.value)
        with RunLock(tmp_path / "other"):
            pass
        assert (folder / lock.NAME).exists()  # who was refused did not take it away
    assert list(folder.iterdir()) == []
    with RunLock(folder):
        pass


@pytest.mark.parametrize("text", ["", "[1]", '{"pid": "x"}', '{"pid": 1, "host": "\\u001b[2J", "since": 1}'])
def test_a_lock_file_that_says_nothing_is_still_a_lock(tmp_path, text):
    with RunLock(tmp_path):
        (tmp_path / lock.NAME).write_text(text)
        with pytest.raises(UserError, match="another run is at work") as refused, RunLock(tmp_path):
            pass
        assert "\x1b" not in str(refused.value)


def test_a_lock_on_a_deleted_file_is_not_one(tmp_path, monkeypatch):
    """The last holder leaves between another's open and flock: that one must look again."""
    flock, first = fcntl.flock, [True]

    def late(descriptor, operation):
        if first:
            first.clear()
            (tmp_path / lock.NAME).unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with RunLock(tmp_path):
        monkeypatch.undo()
        with pytest.raises(UserError), RunLock(tmp_path):
            pass


def test_where_there_are_no_locks_the_run_goes_on(tmp_path, monkeypatch, caplog):
    def unsupported(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with RunLock(tmp_path), RunLock(tmp_path):
        pass
    assert "nothing keeps a second run out of it" in caplog.text


@pytest.mark.whole
def test_programs_that_the_run_starts_do_not_hold_it(tmp_path):
    with RunLock(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with RunLock(tmp_path):
            assert child.poll() is None
    finally:
        child.communicate(b"\n", timeout=30)


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


def test_it_knows_what_it_has_written(tmp_path, monkeypatch):
    writer, write = Writer(tmp_path, keep=2, asynchronous=False), files.write
    writer.begin(None, None)
    writer.save(state(1), at(1))
    monkeypatch.setattr(files, "write", lambda *_: (_ for _ in ()).throw(OSError("full")))
    writer.save(state(2), at(2))
    monkeypatch.setattr(files, "write", write)
    writer.save(state(3), at(3))
    writer.close()
    assert writer.written == {1, 3}
