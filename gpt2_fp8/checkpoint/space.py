"""Whether a run's checkpoints will find room, and a folder that can be written: asked before anything is loaded."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.config.errors import UserError

_ELSEWHERE = "another folder: hydra.run.dir=FOLDER"


def checkpoint_bytes(parameters: int) -> int:
    """The size of one checkpoint: each parameter and AdamW's two moments in float32, and 1 MB for all else."""
    return 12 * parameters + 10**6


def peak_bytes(parameters: int, keep: int, permanent: int = 0) -> int:
    """The most that a run's checkpoints take: the newest `keep`, the best, the `permanent` ones that stay for good, and
    the one that is being written while none of them is deleted yet."""
    return (max(1, keep) + 1 + permanent + 1) * checkpoint_bytes(parameters)


def require(folder: Path, bytes_needed: int) -> None:
    """Raise UserError where the filesystem of `folder` has less room than checkpoints of `bytes_needed` in all take.

    Checkpoints that lie there already count towards it, since they are kept or deleted like new ones; but one more has
    to fit before anything is deleted. A quota is not seen. The folder need not exist.
    """
    held = [_size(path) for path in pointers.steps(folder).values()]
    missing = max(bytes_needed - sum(held), max(held, default=0))
    free = shutil.disk_usage(_existing(folder)).free
    if free < missing:
        there = f" besides the {_gigabytes(sum(held))} GB that are there" if held else ""
        raise UserError.of(
            f"{folder}: the checkpoints of this run need {_gigabytes(missing)} GB{there}, and {_gigabytes(free)} GB "
            "are free",
            f"fewer of them: callbacks.keep_checkpoints=1 callbacks.keep_every_n_steps=0; or {_ELSEWHERE}",
        )


def require_writable(folder: Path) -> None:
    """Raise UserError where files cannot be written into `folder`, or it cannot be made. Leaves nothing behind."""
    existing = _existing(folder)
    if not existing.is_dir():
        raise UserError.of(f"{folder}: {existing} is a file, not a folder", f"remove it, or give {_ELSEWHERE}")
    try:
        with tempfile.TemporaryDirectory(prefix=".write-test-", dir=existing) as trial:  # os.access lies on networks
            (Path(trial) / "file").write_bytes(b"\0")
    except OSError as error:
        raise UserError.of(
            f"{folder}: {existing} cannot be written: {error.strerror}", f"make it writable, or give {_ELSEWHERE}"
        ) from None


def _existing(folder: Path) -> Path:
    """The folder itself, or the nearest of those above it that there is (a file and a dangling link count as there)."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))


def _size(path: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file(follow_symlinks=False))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}"
