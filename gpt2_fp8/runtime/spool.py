"""Temporary folders that a killed process does not leave for ever: the next one clears them. Standard library only.

Each is locked (`flock`) by the process that made it for as long as that lives; what is not locked is nobody's.
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
    """A temporary folder of this process. Raises OSError where none can be made.

    Attributes: `path`, where it is. As a context it removes itself at the end.
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
        """Delete the folder with all in it. Raises nothing, once or twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self._lock)
        self._lock = -1


def clear() -> None:
    """Remove this user's spools that no living process has locked. Raises nothing."""
    try:
        found = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    except OSError:  # no temporary folder can be used: whoever needs one says so
        return
    for path in found:
        with suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Raises OSError where it is locked, a link, or on a filesystem that has no locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _locked(path: str) -> int:
    """The folder opened and locked. Raises FileNotFoundError where it is gone before it is locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    with suppress(OSError):  # one that clears holds it for a moment; or this filesystem has no locks, and nobody clears
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    if os.fstat(descriptor).st_nlink == 0 or not os.path.isdir(path):
        os.close(descriptor)
        raise FileNotFoundError(path)
    return descriptor
