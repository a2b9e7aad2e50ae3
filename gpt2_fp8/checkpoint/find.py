"""From `ckpt_path=last|best|PATH` to a folder that holds what was written. Changes nothing on the disk."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.checkpoint.manifest import CheckpointError, verify
from gpt2_fp8.checkpoint.pointers import Pointer

log = logging.getLogger(__name__)


def resolve(ckpt_path: str, checkpoints_dir: Path) -> Path | None:
    """Return the checkpoint that `ckpt_path` means for the run whose checkpoints are in `checkpoints_dir`, verified.

    last: the one that `last.json` names. If that is damaged, it is the highest whole step before it, then the highest
    whole step after it. The latter belong to a branch that the run has left. Without a usable `last.json` it is the
    highest whole step. The log names each one that is skipped, with the reason. None: there is no checkpoint at all,
    and the run starts from the beginning.
    best: the one that `best.json` names. Anything else is a path.

    Raises:
        CheckpointError: no whole one is left, there is no best or it is damaged, or the path is not a checkpoint.
    """
    if ckpt_path == "last":
        return _find_last(checkpoints_dir)
    path = _read_best(checkpoints_dir) if ckpt_path == "best" else Path(ckpt_path).expanduser()
    verify(path)
    return path


def _find_last(folder: Path) -> Path | None:
    pointer, problem = _read_last(folder)
    candidates = _candidates(folder, pointer)
    if not candidates and not os.path.lexists(folder / "last.json"):
        return None
    reasons = [f"{folder / 'last.json'}: {problem}"] if problem else []
    for path in candidates:
        try:
            verify(path)
        except CheckpointError as error:
            reasons.append(error.problems[0].cause)
            continue
        for reason in reasons:
            log.warning("skipped: %s", reason)
        if reasons:
            log.warning("%s is the newest checkpoint that is whole", path)
        return path
    raise CheckpointError.of(
        f"{folder} has no whole checkpoint left: {'; '.join(reasons)}",
        "restore one from a copy, or start from the beginning under another run_name",
    )


def _read_best(folder: Path) -> Path:
    remedy = "use ckpt_path=last, or the path of a checkpoint"
    try:
        return folder / pointers.follow(folder, "best").checkpoint
    except FileNotFoundError:
        cause = f"{folder} has no best checkpoint: no validation of this run has given a finite loss yet"
        raise CheckpointError.of(cause, remedy) from None
    except (OSError, ValueError) as error:
        raise CheckpointError.of(f"{folder / 'best.json'} cannot be used: {error}", remedy) from None


def _read_last(folder: Path) -> tuple[Pointer | None, str | None]:
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
    found = {path: pointers.step_of(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    steps = {path: step for path, step in found.items() if step is not None}

    def rank(path: Path) -> tuple[bool, int, bool]:
        return pointer is None or steps[path] <= pointer.step, steps[path], path.suffix != ".old"

    return sorted(steps, key=rank, reverse=True)
