"""A checkpoint on its way to the disk, in parts that count as moves: other ranks may wait for it for many minutes.

A slow disk and one that does not answer differ only by that (`runtime.activity`). Linux; elsewhere a file is one move.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpt2_fp8.runtime import activity

PART_BYTES = 64 << 20
_LOOK_SECONDS = 1.0
_WAIT_AND_WRITE = 7  # SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER, of linux/fs.h
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP)

_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


@contextmanager
def growing(folder: Path) -> Iterator[None]:
    """Count a move whenever the files of `folder`, which another library writes meanwhile, take more of the disk.

    A thread looks: a disk that does not answer must not hold up anything else.
    """
    over = threading.Event()
    threading.Thread(target=_look, args=(folder, over), name="checkpoint grows", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def flush(path: Path) -> None:
    """Ask the disk to keep a file's bytes, part by part. Raises OSError if it cannot; `durable.fsync` has to follow."""
    if _sync_file_range is None:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for start in range(0, os.fstat(descriptor).st_size, PART_BYTES):
            begin, size = ctypes.c_int64(start), ctypes.c_int64(PART_BYTES)
            if _sync_file_range(descriptor, begin, size, ctypes.c_uint(_WAIT_AND_WRITE)):
                number = ctypes.get_errno()
                if number in _NOT_HERE:
                    return
                raise OSError(number, os.strerror(number), str(path))
            activity.moved()
    finally:
        os.close(descriptor)


def _look(folder: Path, over: threading.Event) -> None:
    before = 0
    while not over.wait(_LOOK_SECONDS):
        taken = 0
        with suppress(OSError):  # a file that has got its name meanwhile
            taken = sum(entry.stat().st_blocks for entry in os.scandir(folder))
        if taken > before:
            activity.moved()
        before = taken
