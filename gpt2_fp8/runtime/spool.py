"""Temporary folders that the next process removes if their own was killed. Standard library only.

Each folder is locked (`flock`) by the process that made it, as long as that lives. An unlocked folder has no owner.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "gpt2_fp8-spool-"


class Spool:
    """A temporary folder of this process. Raises OSError if none can be made.

    As a context it removes itself at the end.

    Attributes:
        path: the folder.
    """

    def __init__(self) -> None:
        clear()
        self.path, self._lock = "", -1
        while self._lock < 0:
            self.path = tempfile.mkdtemp(prefix=PREFIX)
            with suppress(FileNotFoundError):  # another process cleared it before it was locked
                self._lock = _locked(self.path)

    def __enter__(self) -> Path:
        return Path(self.path)

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Delete the folder and everything in it. It may be called twice. Raises nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def clear() -> None:
    """Remove this user's spools that no living process has locked. Raises nothing."""
    try:
        found = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    except OSError:  # no temporary folder can be used: the code that needs one reports it
        return
    for path in found:
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Remove a folder. Raises OSError if it is locked or a link, or if its filesystem has no locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _locked(path: str) -> int:
    """Open and lock the folder; return its descriptor. Raises FileNotFoundError if it is removed before that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    # Another process that clears may hold the lock for a moment. Or this filesystem has no locks, and nobody clears.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    if os.fstat(descriptor).st_nlink == 0 or not os.path.isdir(path):
        os.close(descriptor)
        raise FileNotFoundError(path)
    return descriptor
