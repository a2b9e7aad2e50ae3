"""Before a run begins in a folder: no other run is in it, and its checkpoints have room on the disk."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import harmless

log = logging.getLogger(__name__)

NAME = ".lock"  # in the run's folder
_RETRY_SECONDS = 0.2  # the last holder may delete the file after another process opened it, before it locked it
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the folder of a run. Raises UserError if another run holds it, or if nothing can be written there.

    The lock is filelock's `flock` on the file `.lock`, which says who holds it and since when. The kernel releases it
    when the process dies. Over NFS, Linux extends it to the other hosts. Only rank 0's process takes it.
    """
    from filelock import FileLock, Timeout  # slow to import, and `--help` needs no lock

    path = folder / NAME
    lock = FileLock(path, _RETRY_SECONDS, poll_interval=0.02, thread_local=False, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        cause = f"another run is at work in {folder}: {_read_holder(path)}"
        raise UserError.of(cause, "give this one another run_name") from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise UserError.of(f"{path}: {error.strerror}", "hydra.run.dir=FOLDER puts a run elsewhere") from None
        log.warning("%s cannot be locked (%s): nothing keeps a second run out of it", folder, error)
    try:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with suppress(OSError):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {now}\n", encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # a file that stays locks nothing
            path.unlink(missing_ok=True)
        lock.release(force=True)


def _read_holder(path: Path) -> str:
    """Return who holds the lock according to the file."""
    try:
        return harmless(path.read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return f"{path} does not say which"


def checkpoint_bytes(parameters: int, state: int) -> int:
    """Return the size of one checkpoint: parameters in float32, `state` bytes of the optimizer, 1 MB for the rest."""
    return 4 * parameters + state + 10**6


def peak_count(keep: int, permanent: int = 0, best: bool = True, between: bool = True) -> int:
    """Return how many checkpoints a run has at the same time, at most.

    These are the newest `keep`, the `best` if there is validation, the `permanent` ones, and the one that is being
    written before any is deleted. A run that saves nothing `between` its start and its end has the last one alone.
    """
    if not (between or best or permanent):
        return 1
    return max(1, keep) + best + permanent + 1


def check_space(folder: Path, needed: int) -> None:
    """Raise UserError if the filesystem of `folder` has less room than checkpoints of `needed` bytes together take.

    Checkpoints that are already there count towards it, since they are kept or deleted like new ones. But one more must
    fit before anything is deleted. A quota is not seen. The folder need not exist.
    """
    held = [sum(entry.stat().st_size for entry in path.iterdir()) for path in pointers.steps(folder).values()]
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, missing = shutil.disk_usage(existing).free, max(needed - sum(held), max(held, default=0))
    if free < missing:
        raise UserError.of(
            f"{folder}: the run's checkpoints need {missing / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free",
            "another folder: hydra.run.dir=FOLDER; or fewer of them: callbacks.keep_checkpoints=1",
        )
