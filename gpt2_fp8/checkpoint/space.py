"""Whether a run's checkpoints have room on the disk. It is checked before anything is loaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.config.errors import UserError


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


def require(folder: Path, bytes_needed: int) -> None:
    """Raise UserError if the filesystem of `folder` has less room than checkpoints of `bytes_needed` together take.

    Checkpoints that are already there count towards it, since they are kept or deleted like new ones. But one more must
    fit before anything is deleted. A quota is not seen. The folder need not exist.
    """
    held = [_size(path) for path in pointers.steps(folder).values()]
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < (missing := max(bytes_needed - sum(held), max(held, default=0))):
        besides = f" besides the {sum(held) / 1e9:.3g} GB that are there" if held else ""
        raise UserError.of(
            f"{folder}: the run's checkpoints need {missing / 1e9:.3g} GB{besides}, and {free / 1e9:.3g} GB are free",
            "another folder: hydra.run.dir=FOLDER; or fewer of them: callbacks.keep_checkpoints=1",
        )


def _size(path: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(path) if entry.is_file())
