"""From `ckpt_path=last|best|PATH` to a folder that holds what was written. Changes nothing on the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.checkpoint.manifest import CheckpointError, verified
from gpt2_fp8.checkpoint.pointers import Pointer

Check = Callable[[Path], object]

log = logging.getLogger(__name__)


def resolve(ckpt_path: str, checkpoints_dir: Path, check: Check = verified) -> Path | None:
    """Return the checkpoint that `ckpt_path` means for the run whose checkpoints are in `checkpoints_dir`.

    It has passed `check`, which raises CheckpointError for a folder that cannot be used. Below, "whole" means that.

    last: the one that `last.json` names. If that is damaged, it is the highest whole step before it, then the highest
    whole step after it. The latter belong to a branch that the run has left. Without a usable `last.json` it is the
    highest whole step. The log names each one that is skipped, with the reason. None: there is no checkpoint at all,
    and the run starts from the beginning.
    best: the one that `best.json` names. Anything else is a path.

    Raises:
        CheckpointError: no whole one is left, there is no best or it is damaged, or the path is not a checkpoint.
    """
    if ckpt_path == "last":
        return _last(checkpoints_dir, check)
    if ckpt_path == "best":
        return _best(checkpoints_dir, check)
    path = Path(ckpt_path).expanduser()
    check(path)
    return path


def _last(folder: Path, check: Check) -> Path | None:
    pointer, problem = _pointer(folder)
    candidates = _candidates(folder, pointer)
    if not candidates and not os.path.lexists(folder / "last.json"):
        return None
    if problem:
        log.warning("%s is skipped: %s", folder / "last.json", problem)
    reasons = []
    for path in candidates:
        try:
            check(path)
        except CheckpointError as error:
            reasons.append(error.problems[0].cause)
            log.warning("skipped: %s", reasons[-1])
            continue
        if problem or reasons:
            log.warning("%s is the newest checkpoint that is whole", path)
        if pointer and _step(path) <= pointer.step:
            for later in (other.name for other in candidates if _step(other) > pointer.step):
                log.info("skipped: %s, of a branch left behind, as last.json names step %d", later, pointer.step)
        return path
    raise CheckpointError.of(
        f"{folder} has no whole checkpoint left: {'; '.join(reasons) or problem}",
        "restore one from a copy, or start from the beginning under another run_name",
    )


def _best(folder: Path, check: Check) -> Path:
    try:
        pointer = pointers.follow(folder, "best")
    except FileNotFoundError:
        raise CheckpointError.of(
            f"{folder} has no best checkpoint: no validation of this run has given a finite loss yet",
            "use ckpt_path=last, or the path of a checkpoint",
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError.of(
            f"{folder / 'best.json'} cannot be used: {error}", "use ckpt_path=last, or the path of a checkpoint"
        ) from None
    check(folder / pointer.checkpoint)
    return folder / pointer.checkpoint


def _pointer(folder: Path) -> tuple[Pointer | None, str | None]:
    """Return what `last.json` says, and why it is of no use, if it is not."""
    try:
        pointer = pointers.follow(folder, "last")
    except FileNotFoundError:
        return None, "there is no such file"
    except (OSError, ValueError) as error:
        return None, str(error)
    gone = not os.path.lexists(folder / pointer.checkpoint)
    return pointer, f"{pointer.checkpoint}, which it names, is gone" if gone else None


def _candidates(folder: Path, pointer: Pointer | None) -> list[Path]:
    """Return the folders named as checkpoints, the best choice first, with those that a killed writer moved aside."""
    found = [path for path in folder.iterdir() if _step(path) >= 0] if folder.is_dir() else []

    def rank(path: Path) -> tuple[bool, int, bool]:
        step = _step(path)
        return pointer is None or step <= pointer.step, step, path.suffix != ".old"

    return sorted(found, key=rank, reverse=True)


def _step(path: Path) -> int:
    """Return the step of `step-00000004` and of `.step-00000004.old`; -1 for any other name."""
    step = pointers.step_of(path.name)
    step = pointers.step_aside(path.name) if step is None else step
    return -1 if step is None else step
