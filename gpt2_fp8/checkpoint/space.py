"""Whether a run's checkpoints have room, and a folder that can be written. It is checked before anything is loaded."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.config import output_folder
from gpt2_fp8.config.errors import UserError

FILES = 32  # of logs, settings, and checkpoints of six files
_ELSEWHERE = "another folder: hydra.run.dir=FOLDER"


def checkpoint_bytes(parameters: int, state: int) -> int:
    """Return the size of one checkpoint: parameters in float32, `state` bytes of the optimizer, 1 MB for the rest."""
    return 4 * parameters + state + 10**6


def at_once(keep: int, permanent: int = 0, best: bool = True, between: bool = True) -> int:
    """Return how many checkpoints a run has at the same time, at most.

    These are the newest `keep`, the `best` if there is validation, the `permanent` ones, and the one that is being
    written before any is deleted. A run that saves nothing `between` its start and its end has the last one alone.
    """
    if not (between or best or permanent):
        return 1
    return max(1, keep) + best + permanent + 1


def require(folder: Path, bytes_needed: int, fewer: Mapping[str, int]) -> None:
    """Raise UserError if the filesystem of `folder` has less room than checkpoints of `bytes_needed` together take.

    Checkpoints that are already there count towards it, since they are kept or deleted like new ones. But one more must
    fit before anything is deleted. A quota is not seen. The folder need not exist.

    fewer: settings under which the run has fewer, and what these take together. The remedy names the first that fits.
    """
    held = [_size(path) for path in pointers.steps(folder).values()]
    free = shutil.disk_usage(_existing(folder)).free

    def missing(needed: int) -> int:
        return max(needed - sum(held), max(held, default=0))

    if free < missing(bytes_needed):
        there = f" besides the {_gigabytes(sum(held))} GB that are there" if held else ""
        fits = next((words for words, needed in fewer.items() if missing(needed) <= free), None)
        raise UserError.of(
            f"{folder}: the checkpoints of this run need {_gigabytes(missing(bytes_needed))} GB{there}, and "
            f"{_gigabytes(free)} GB are free",
            f"fewer of them: {fits}; or {_ELSEWHERE}" if fits else _ELSEWHERE,
        )


def require_inodes(folder: Path) -> None:
    """Raise UserError if the filesystem of `folder` has too few inodes for the files that a run makes."""
    found = os.statvfs(_existing(folder))
    if found.f_files and found.f_favail < FILES:  # both are 0 if there is no such limit
        raise UserError.of(
            f"{folder}: its filesystem has {found.f_favail} inodes free, and a run makes some {FILES} files",
            f"delete files there that are not needed, or give {_ELSEWHERE}",
        )


def require_large_files(parameters: int, state: int) -> None:
    """Raise UserError if a limit on the size of files (ulimit -f) would prevent every checkpoint.

    The parameters in float32 are one file, and the `state` bytes of the optimizer another.
    """
    limit, largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0], max(4 * parameters, state)
    if limit != resource.RLIM_INFINITY and limit < largest:
        raise UserError.of(
            f"a file of each checkpoint needs {_gigabytes(largest)} GB, and `ulimit -f` allows {_gigabytes(limit)} GB",
            "type `ulimit -f unlimited` before the command",
        )


def require_writable(folder: Path) -> None:
    """Raise UserError if `folder` cannot be made or written. Leaves nothing there."""
    existing = _existing(folder)
    if reason := output_folder.unwritable(existing):
        raise UserError.of(f"{folder}: {existing} cannot be written: {reason}", f"another folder: {_ELSEWHERE}")


def _existing(folder: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists. A file and a dangling link count as existing."""
    return next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))


def _size(path: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file(follow_symlinks=False))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}"
