"""One run in a folder: a lock that the kernel releases when its process dies."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2_fp8.config.errors import UserError

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger(__name__)

NAME = ".lock"  # in the run's folder
# For how long to retry: the last holder may have deleted the file after another process opened it, before it locked it.
_RETRY_SECONDS, _PAUSE_SECONDS = 0.2, 0.02
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class RunLock:
    """Holds the folder of a run as a context. A second run in it, in this process or another, is refused.

    The lock is filelock's `flock` on the file `.lock`, whose JSON says who holds it and since when. It ends with the
    process in any case, so the next run takes over a file that was left. Over NFS, Linux extends it to the other hosts.
    Programs that the process starts do not inherit it. Only rank 0's process takes it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / NAME
        self._lock: BaseFileLock | None = None  # held; None also if this filesystem has no locks
        self._file: os.stat_result | None = None  # the file that this run wrote

    def __enter__(self) -> RunLock:
        """Take the lock. Raises UserError if another run holds it, or if nothing can be written there."""
        try:
            self._take()
        except OSError as error:
            self.__exit__()
            raise UserError.of(
                f"{self.path}: {error.strerror}, so that no run can be at work here",
                "remove it, or free space and make its folder writable; hydra.run.dir=FOLDER puts a run elsewhere",
            ) from None
        return self

    def _take(self) -> None:
        from filelock import FileLock, Timeout  # slow to import, and `--help` needs no lock

        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A marker file instead of a lock would outlive its process.
        lock = FileLock(
            self.path, _RETRY_SECONDS, poll_interval=_PAUSE_SECONDS, thread_local=False, fallback_to_soft=False
        )
        try:
            lock.acquire()
            self._lock = lock
        except Timeout:
            raise UserError.of(
                f"another run is at work in {self.path.parent}: {_holder(self.path)}",
                "wait for its end or stop it, or give this one another run_name",
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            log.warning("%s cannot be locked (%s): nothing keeps a second run out of it", self.path.parent, error)
        self._file = _write_holder(self.path)

    def __exit__(self, *_: object) -> None:
        """Delete the file while it is still locked, then release the lock. Raises nothing.

        How the run ended counts more. A file that stays, as in a folder that became read-only, locks nothing.
        """
        lock, self._lock = self._lock, None
        file, self._file = self._file, None
        try:
            if file is not None and os.path.samestat(file, os.stat(self.path)):
                self.path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s stays, which does no harm: %s", self.path, error.strerror)
        if lock is not None:
            with suppress(OSError):
                lock.release(force=True)


def _write_holder(path: Path) -> os.stat_result:
    """Write into the file who holds it, and return its `fstat`. Raises OSError."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}) + "\n"
    path.write_text(text, encoding="utf-8")
    return path.stat()


def _holder(path: Path) -> str:
    """Return who holds the lock according to the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return f"process {found['pid']} on {found['host']!a}, since {found['since']!a}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path} does not say which"
