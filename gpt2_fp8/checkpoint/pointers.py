"""`last.json` and `best.json`: which of a run's checkpoints is which. And how a checkpoint's folder is named."""

from __future__ import annotations

import math
import re
import reprlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gpt2_fp8.checkpoint import bounded, durable

Kind = Literal["last", "best"]
_NAME = re.compile(r"step-(\d{8,15})")


@dataclass(frozen=True)
class Pointer:
    """A checkpoint of the folder that the pointer's file lies in. `val_loss` is None where nothing was validated."""

    checkpoint: str
    step: int
    val_loss: float | None


def folder_name(step: int) -> str:
    """`step-00000100` for step 100."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint folder's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def steps(folder: Path) -> dict[int, Path]:
    """Every checkpoint-like folder in `folder`, whole or not, by its step, oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    found = {step: entry for entry in entries if (step := step_of(entry.name)) is not None and entry.is_dir()}
    return dict(sorted(found.items()))


def follow(folder: Path, kind: Kind) -> Pointer:
    """The pointer of that kind. Raises FileNotFoundError where there is none; OSError or ValueError, each saying why,
    where its file holds anything else.

    Its name is a bare folder's, and no link is followed: a pointer cannot lead out of its folder.
    """
    value = bounded.read_json(folder / f"{kind}.json")
    if not isinstance(value, dict) or not {"checkpoint", "step", "val_loss"} <= value.keys():
        raise ValueError("it lacks what it should hold (checkpoint, step, val_loss)")
    name, step, val_loss = value["checkpoint"], value["step"], value["val_loss"]
    if not isinstance(name, str) or type(step) is not int or step_of(name) != step:
        raise ValueError(f"it names {reprlib.repr(name)}, which is not the folder of a step")
    finite = type(val_loss) in (int, float) and abs(val_loss) <= sys.float_info.max
    return Pointer(name, step, float(val_loss) if finite else None)


def read(folder: Path, kind: Kind) -> Pointer | None:
    """The pointer of that kind; None where there is none, or its file holds anything but one."""
    try:
        return follow(folder, kind)
    except (OSError, ValueError):
        return None


def write(folder: Path, kind: Kind, pointer: Pointer) -> None:
    """Move the pointer, atomically. To be called once the checkpoint is durable. Raises OSError."""
    value = asdict(pointer)
    if pointer.val_loss is not None and not math.isfinite(pointer.val_loss):
        value["val_loss"] = None
    durable.write_json(folder / f"{kind}.json", value)


def remove(folder: Path, kind: Kind) -> None:
    """Take the pointer away, durably, if it is there. Raises OSError."""
    (folder / f"{kind}.json").unlink(missing_ok=True)
    durable.fsync(folder)
