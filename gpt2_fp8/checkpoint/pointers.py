"""`last.json`, `best.json` and the `validation.json` of a checkpoint; from `ckpt_path=last|best|PATH` to a folder."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.checkpoint.manifest import CheckpointError, step_of, verify
from gpt2_fp8.config import disk

log = logging.getLogger(__name__)

Kind = Literal["last", "best"]
VALIDATION = "validation.json"  # in a checkpoint's folder: the validation of its step is done, with this result


def folder_name(step: int) -> str:
    """Return `step-00000100` for step 100."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Pointer:
    """A checkpoint of the folder that holds the pointer's file. `val_loss` is None if nothing was validated."""

    checkpoint: str
    step: int
    val_loss: float | None


def steps(folder: Path) -> dict[int, Path]:
    """Return every folder in `folder` that is named as a checkpoint, whole or not, by its step, oldest first."""
    entries = folder.glob("step-*") if folder.is_dir() else ()
    found = {step: entry for entry in entries if (step := step_of(entry.name)) is not None and entry.is_dir()}
    return dict(sorted(found.items()))


def follow(folder: Path, kind: Kind) -> Pointer:
    """Return the pointer of that kind. Raises FileNotFoundError without one, OSError or ValueError if damaged."""
    value = disk.read_json(folder / f"{kind}.json")
    try:
        pointer = Pointer(value["checkpoint"], value["step"], _finite(value["val_loss"]))
        fits = folder_name(pointer.step) == pointer.checkpoint
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise ValueError("it does not name the folder of a step (checkpoint, step, val_loss)")
    return pointer


def read(folder: Path, kind: Kind) -> Pointer | None:
    """Return the pointer of that kind; None if there is none, or if its file is damaged."""
    try:
        return follow(folder, kind)
    except (OSError, ValueError):
        return None


def write(folder: Path, kind: Kind, pointer: Pointer) -> None:
    """Move the pointer, atomically. Call it after the checkpoint is durable. Raises OSError."""
    durable.write_json(folder / f"{kind}.json", asdict(pointer) | {"val_loss": _finite(pointer.val_loss)})


def remove(folder: Path, kind: Kind) -> None:
    """Delete the pointer, durably, if it is there. Raises OSError."""
    (folder / f"{kind}.json").unlink(missing_ok=True)
    durable.fsync(folder)


def write_note(folder: Path, pointer: Pointer) -> None:
    """Write the validation of a checkpoint into its folder. Raises OSError."""
    value = {"step": pointer.step, "val_loss": _finite(pointer.val_loss)}
    durable.write_json(folder / pointer.checkpoint / VALIDATION, value)


def read_note(path: Path) -> Pointer | None:
    """Return what `write_note` wrote into the checkpoint `path`; None if there is nothing, or it is damaged."""
    try:
        value = disk.read_json(path / VALIDATION)
        return Pointer(path.name, value["step"], _finite(value["val_loss"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def resolve(ckpt_path: str, checkpoints_dir: Path) -> Path | None:
    """Return the checkpoint that `ckpt_path` means for the run whose checkpoints are in `checkpoints_dir`, verified.

    last: the one that `last.json` names. If that is damaged, it is the highest whole step before it, then the highest
    whole step after it, of a branch that the run has left. Without a usable `last.json` it is the highest whole step.
    The log says why others are skipped. None: there is no checkpoint at all.
    best: the one that `best.json` names. Anything else is a path.

    Raises CheckpointError if that is none, or no whole one is left.
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
        return folder / follow(folder, "best").checkpoint
    except FileNotFoundError:
        cause = f"{folder} has no best checkpoint: no validation of this run has given a finite loss yet"
        raise CheckpointError.of(cause, remedy) from None
    except (OSError, ValueError) as error:
        raise CheckpointError.of(f"{folder / 'best.json'} cannot be used: {error}", remedy) from None


def _read_last(folder: Path) -> tuple[Pointer | None, str | None]:
    """Return what `last.json` says, and why it is of no use, if it is not."""
    try:
        pointer = follow(folder, "last")
    except FileNotFoundError:
        return None, "there is no such file"
    except (OSError, ValueError) as error:
        return None, str(error)
    gone = not os.path.lexists(folder / pointer.checkpoint)
    return pointer, f"{pointer.checkpoint}, which it names, is gone" if gone else None


def _candidates(folder: Path, pointer: Pointer | None) -> list[Path]:
    """Return the folders named as checkpoints, the best choice first, with those that a killed writer moved aside."""
    found = {path: step_of(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    steps = {path: step for path, step in found.items() if step is not None}

    def rank(path: Path) -> tuple[bool, int, bool]:
        return pointer is None or steps[path] <= pointer.step, steps[path], path.suffix != ".old"

    return sorted(steps, key=rank, reverse=True)
