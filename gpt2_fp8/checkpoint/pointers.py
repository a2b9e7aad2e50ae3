"""`last.json` and `best.json`, which name two of a run's checkpoints, and the `validation.json` of a checkpoint."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.config import disk

Kind = Literal["last", "best"]
VALIDATION = "validation.json"  # in a checkpoint's folder: the validation of its step is done, with this result
_NAME = re.compile(r"step-([0-9]{8,15})|\.step-([0-9]{8,15})\.old")


def folder_name(step: int) -> str:
    """Return `step-00000100` for step 100."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of `step-00000004`, and of `.step-00000004.old`, which a killed writer has moved aside."""
    match = _NAME.fullmatch(name)
    return int(match[1] or match[2]) if match else None


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
    """Return the pointer of that kind.

    Raises:
        FileNotFoundError: there is none.
        OSError, ValueError: its file is damaged.
    """
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
