"""What a checkpoint's folder says about itself, and whether it is all there."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from gpt2_fp8 import __version__
from gpt2_fp8.config.errors import Problem, UserError

FORMAT = "gpt2_fp8 checkpoint"
VERSION = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.safetensors"
SKELETON, MANIFEST = "state.json", "manifest.json"


class CheckpointError(UserError):
    """A folder that was named as a checkpoint cannot be read as one."""


def describe(folder: Path, names: Iterable[str], step: int) -> dict[str, Any]:
    """The manifest of a checkpoint of `step` whose files `names` lie in `folder`.

    Each file has an object of its own, so that later versions can say more about it than its size.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "global_step": step,
        "written_by": {
            "gpt2_fp8": __version__,
            "torch": metadata.version("torch"),
            "lightning": metadata.version("lightning"),
            "python": platform.python_version(),
        },
        "files": {name: {"size": (folder / name).stat().st_size} for name in names},
    }


def read_manifest(path: Path | str) -> dict[str, Any]:
    """The manifest, after seeing that its format is known and that every file it lists is there in full.

    Raises CheckpointError.
    """
    path = Path(path)
    if not path.is_dir():
        raise unreadable(path, "it is not a folder" if path.exists() else "there is no such folder")
    manifest = read_json(path, MANIFEST)
    try:
        known, version = manifest["format"] == FORMAT, int(manifest["version"])
        sizes = {str(name): int(entry["size"]) for name, entry in manifest["files"].items()}
        step = manifest["global_step"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unreadable(path, f"{MANIFEST} lacks what it should hold ({error!r})") from None
    if not known or type(step) is not int:
        raise unreadable(path, f"{MANIFEST} is not one of a gpt2_fp8 checkpoint")
    if version > VERSION:
        raise CheckpointError.of(
            f"{path} is of checkpoint format {version}; this gpt2_fp8 {__version__} reads up to {VERSION}",
            f"use gpt2_fp8 {manifest.get('written_by', {}).get('gpt2_fp8', 'of a newer version')} or later",
        )
    for name in {MODEL, SKELETON} - sizes.keys():
        raise unreadable(path, f"{MANIFEST} does not list {name}")
    for name, size in sizes.items():
        if name not in (MODEL, OPTIMIZER, STATE, SKELETON):
            raise unreadable(path, f"{MANIFEST} lists {name!r}, which is no part of a checkpoint")
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise unreadable(path, f"{name} is missing" if found is None else f"{name} has {found} bytes of {size}")
    return manifest


def is_checkpoint(path: Path | str) -> bool:
    """Whether `path` is a complete checkpoint of a format that this version reads."""
    try:
        read_manifest(path)
    except (CheckpointError, OSError):
        return False
    return True


def read_json(path: Path, name: str) -> Any:
    """The JSON file `name` of the checkpoint `path`. Raises CheckpointError."""
    try:
        return json.loads((path / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise unreadable(path, f"it has no {name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, f"{name} cannot be read ({error})") from None


def unreadable(path: Path, why: str) -> CheckpointError:
    """The error that says why the folder `path` is no readable checkpoint."""
    remedy = "give the folder of a whole checkpoint (RUN/checkpoints/step-NNNNNNNN), or ckpt_path=last"
    return CheckpointError([Problem(f"{path} cannot be read as a checkpoint: {why}", remedy)])
