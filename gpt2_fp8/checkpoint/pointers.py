"""`last.json` and `best.json`, which name two of a run's checkpoints, and the `validation.json` of a checkpoint.

Each has a digest of itself and one of its checkpoint's manifest. Without them, a flipped bit or an exchanged folder
would silently select another checkpoint, or a best that nothing beats. Files of earlier versions have neither.
"""

from __future__ import annotations

import logging
import math
import reprlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.checkpoint.manifest import SEAL, seal_of, sealed
from gpt2_fp8.checkpoint.names import folder_name, step_of
from gpt2_fp8.config import bounded

__all__ = ["Kind", "Pointer", "folder_name", "follow", "note", "noted", "read", "remove", "step_of", "steps", "write"]

Kind = Literal["last", "best"]
VALIDATION = "validation.json"  # in a checkpoint's folder: the validation of its step is done, with this result
_OF = "manifest_sha256"  # of the checkpoint that is named

log = logging.getLogger(__name__)
_warned: set[Path] = set()  # files without a digest


@dataclass(frozen=True)
class Pointer:
    """A checkpoint of the folder that holds the pointer's file. `val_loss` is None if nothing was validated."""

    checkpoint: str
    step: int
    val_loss: float | None


def steps(folder: Path) -> dict[int, Path]:
    """Return every folder in `folder` that is named as a checkpoint, whole or not, by its step, oldest first."""
    entries = folder.iterdir() if folder.is_dir() else ()
    found = {step: entry for entry in entries if (step := step_of(entry.name)) is not None and entry.is_dir()}
    return dict(sorted(found.items()))


def follow(folder: Path, kind: Kind) -> Pointer:
    """Return the pointer of that kind. It names only a folder beside it, and no link is followed.

    Raises:
        FileNotFoundError: there is none.
        OSError, ValueError: its file holds anything else, was changed, or names a checkpoint that was changed.
    """
    path = folder / f"{kind}.json"
    value = bounded.read_json(path)
    if not isinstance(value, dict) or not {"checkpoint", "step", "val_loss"} <= value.keys():
        raise ValueError("it lacks what it should hold (checkpoint, step, val_loss)")
    name, step = value["checkpoint"], value["step"]
    if not isinstance(name, str) or type(step) is not int or step_of(name) != step:
        raise ValueError(f"it names {reprlib.repr(name)}, which is not the folder of a step")
    _check_digests(path, value, {"checkpoint", "step", "val_loss"}, folder / name)
    return Pointer(name, step, _loss(value["val_loss"]))


def read(folder: Path, kind: Kind) -> Pointer | None:
    """Return the pointer of that kind; None if there is none, or if its file holds anything else."""
    try:
        return follow(folder, kind)
    except (OSError, ValueError):
        return None


def write(folder: Path, kind: Kind, pointer: Pointer) -> None:
    """Move the pointer, atomically. Call it after the checkpoint is durable. Raises OSError."""
    _write(folder / f"{kind}.json", asdict(pointer), folder / pointer.checkpoint)


def remove(folder: Path, kind: Kind) -> None:
    """Delete the pointer, durably, if it is there. Raises OSError."""
    (folder / f"{kind}.json").unlink(missing_ok=True)
    durable.fsync(folder)


def note(folder: Path, pointer: Pointer) -> None:
    """Write the validation of a checkpoint into its folder. Raises OSError."""
    path = folder / pointer.checkpoint
    _write(path / VALIDATION, {"step": pointer.step, "val_loss": pointer.val_loss}, path)


def noted(path: Path) -> Pointer | None:
    """Return what `note` wrote into the checkpoint `path`; None if it wrote nothing.

    Raises OSError or ValueError if the file holds anything else, or was changed after it was written.
    """
    try:
        value = bounded.read_json(path / VALIDATION)
    except FileNotFoundError:
        return None
    if not isinstance(value, dict) or not {"step", "val_loss"} <= value.keys():
        raise ValueError("it lacks what it should hold (step, val_loss)")
    step = value["step"]
    if type(step) is not int or step_of(path.name) not in (step, None):
        raise ValueError(f"it is of step {reprlib.repr(step)}")
    _check_digests(path / VALIDATION, value, {"step", "val_loss"}, path)
    return Pointer(path.name, step, _loss(value["val_loss"]))


def _loss(value: Any) -> float | None:
    finite = type(value) in (int, float) and abs(value) <= sys.float_info.max
    return float(value) if finite else None


def _write(path: Path, value: dict[str, Any], checkpoint: Path) -> None:
    if value["val_loss"] is not None and not math.isfinite(value["val_loss"]):
        value["val_loss"] = None
    durable.write_json(path, sealed({**value, _OF: seal_of(checkpoint)}))


def _check_digests(path: Path, value: dict[str, Any], keys: set[str], checkpoint: Path) -> None:
    """Raise ValueError if one of the two digests does not fit. Log, once a file, that there is none."""
    if value.keys() == keys:
        if path not in _warned:
            _warned.add(path)
            log.warning("%s is of an earlier version, without digest: whether it changed cannot be checked", path.name)
        return
    if value.keys() != keys | {_OF, SEAL} or sealed(value)[SEAL] != value[SEAL]:
        raise ValueError("it was changed after it was written: its own SHA-256 does not fit")
    there = seal_of(checkpoint)
    if value[_OF] is not None and there not in (value[_OF], None):
        raise ValueError(f"it means another {checkpoint.name} than is there, by the SHA-256 of their manifests")
