"""A slow disk is told from one that does not answer: what it takes counts as moves of this process."""

import os
import queue
import threading
from types import SimpleNamespace

import pytest

from gpt2_fp8.checkpoint import disk_progress
from gpt2_fp8.runtime import activity


def moves_of(action):
    before = activity.moves()
    action()
    return activity.moves() - before


def test_each_part_that_the_disk_has_taken_is_a_move(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_progress, "PART_BYTES", 1 << 16)
    (tmp_path / "file").write_bytes(b"x" * (5 << 16))
    assert moves_of(lambda: disk_progress.flush(tmp_path / "file")) == 5


def test_a_disk_that_fails_is_an_error(tmp_path, monkeypatch):
    def fails(*_):
        disk_progress.ctypes.set_errno(5)
        return -1

    monkeypatch.setattr(disk_progress, "_sync_file_range", fails)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OSError, match="Input/output error") as caught:
        disk_progress.flush(tmp_path / "file")
    assert caught.value.errno == 5


def test_a_file_that_grows_is_moves_and_one_that_does_not_is_none(tmp_path, monkeypatch):
    """A file may have its whole length from the start, as those of safetensors do."""
    looks = Looks()
    monkeypatch.setattr(disk_progress, "threading", SimpleNamespace(Event=lambda: looks, Thread=threading.Thread))
    with (tmp_path / "file").open("wb") as file, disk_progress.growing(tmp_path):
        file.truncate(1 << 20)
        for part in range(4):
            os.pwrite(file.fileno(), b"x" * 65536, part * 65536)
            os.fsync(file.fileno())
            assert moves_of(looks.next) == 1
        assert moves_of(lambda: [looks.next() for _ in range(3)]) == 0


class Looks:
    """The event that ends the thread. Its wait, which comes before each look, ends when the test asks for one."""

    def __init__(self):
        self.asked, self.done, self.over, self.first = queue.Queue(), queue.Queue(), False, True

    def wait(self, seconds):
        if not self.first:
            self.done.put(None)
        self.first = False
        self.asked.get()
        return self.over

    def next(self):
        self.asked.put(None)
        self.done.get(timeout=30)

    def set(self):
        self.over = True
        self.asked.put(None)
