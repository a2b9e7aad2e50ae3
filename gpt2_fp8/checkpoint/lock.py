"""One run in a folder: a lock that the kernel takes away from a process that dies. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config.errors import UserError

log = logging.getLogger(__name__)

NAME = ".lock"  # in the run's folder
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class RunLock:
    """Holds the folder of a run as a context; a second run in it, in this process or another, is refused.

    The lock is `flock` on the file `.lock`, whose JSON says who holds it and since when. It ends with the process,
    however that ends, so that a file that was left is taken over; over NFS, Linux passes it on to the other hosts. It
    is not inherited by programs that the process starts. To be taken by one process of a run, the one of rank 0.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / NAME
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        """Take the lock. Raises UserError where another holds it, or nothing can be written there."""
        try:
            self._take()
        except OSError as error:
            raise UserError.of(
                f"{self.path}: {error.strerror}, so that no run can be at work here",
                "remove it, or free space and make its folder writable; hydra.run.dir=FOLDER puts a run elsewhere",
            ) from None
        return self

    def _take(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        while self._descriptor is None:
            descriptor = durable.open_regular(self.path, os.O_RDWR | os.O_CREAT)
            try:
                supported = self._lock(descriptor)
                # Its last holder may have deleted the file between the two calls above: then the lock locks nothing.
                if not supported or self._is_current(descriptor):
                    _write_holder(descriptor)
                    self._descriptor, descriptor = descriptor, -1
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        """Delete the file while it is still held, and let go. Raises nothing: how the run ended is what counts, and a
        file that stays, as in a folder that can no longer be written, locks nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            if self._is_current(descriptor):
                self.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s stays, which does no harm: %s", self.path, error.strerror)
        with suppress(OSError):
            os.close(descriptor)

    def _lock(self, descriptor: int) -> bool:
        """Whether the lock is held now; False where this filesystem has none."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError.of(
                f"another run is at work in {self.path.parent}: {_holder(self.path)}",
                "wait for its end or stop it, or give this one another run_name",
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            log.warning("%s cannot be locked (%s): nothing keeps a second run out of it", self.path.parent, error)
            return False
        return True

    def _is_current(self, descriptor: int) -> bool:
        """Whether the open file is still the one of that name."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False


def _write_holder(descriptor: int) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": now}) + "\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _holder(path: Path) -> str:
    """Who the file says holds the lock; whoever writes into it is not ours to trust."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return f"process {int(found['pid'])} on {found['host']!a}, since {found['since']!a}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"{path} does not say which"
