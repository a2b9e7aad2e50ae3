"""A checkpoint is a folder: safetensors for the numbers, JSON for everything else, and a manifest that ties them.

    model.safetensors      the module's parameters under their names: readable with safetensors only
    optimizer.safetensors  the tensors of the optimizer state
    state.safetensors      all other tensors (random number generators, FP8 scales); absent if there are none
    state.json             everything that is not a tensor, and where each tensor belongs (`tree`)
    manifest.json          the format and its version, the step, what wrote it, the files' sizes and digests

It is written under a temporary name in the same folder, made durable, and renamed. So it is never seen in parts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gpt2_fp8.checkpoint import durable, tree
from gpt2_fp8.checkpoint.load import read, read_weights
from gpt2_fp8.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    SKELETON,
    CheckpointError,
    describe,
    is_checkpoint,
    place,
    read_manifest,
)

__all__ = ["CheckpointError", "is_checkpoint", "read", "read_manifest", "read_weights", "remove", "sweep", "write"]


class _Name(str):
    """A tensor's name, distinguished from the strings of a state dict."""


def write(path: Path | str, checkpoint: dict[str, Any]) -> None:
    """Write a Lightning checkpoint dictionary as the folder `path`, durably; an older folder there is replaced.

    A crash leaves the old folder or the new one. Between two renames it leaves the old one as `.NAME.old`, which
    `sweep` puts back.

    Raises:
        OSError: the disk does not take it.
        TypeError: a value cannot be kept.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = _temporary(path), _old(path)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        _fill(temporary, checkpoint)
        durable.fsync(temporary)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(path, old)
        try:
            os.rename(temporary, path)
        except OSError:
            if old.exists():
                os.rename(old, path)
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    durable.fsync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove(path: Path | str) -> None:
    """Delete a checkpoint; a crash never leaves half of it under its name. Raises OSError.

    A folder without a manifest is not ours, and is not deleted.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        temporary = _temporary(path)
        shutil.rmtree(temporary, ignore_errors=True)
        os.rename(path, temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Clear what a killed writer left in `folder`; a checkpoint that it had moved aside goes back to its place.

    If something unreadable is in that place, the checkpoint stays aside, where `find` sees it.
    """
    for left in [*folder.glob(".*.tmp"), *folder.glob(".*.old")]:
        home = left.with_name(left.stem.removeprefix("."))
        if not left.is_dir():
            left.unlink(missing_ok=True)
        elif left.suffix == ".old" and is_checkpoint(left) and not is_checkpoint(home):
            if not os.path.lexists(home):
                os.rename(left, home)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _fill(folder: Path, checkpoint: dict[str, Any]) -> None:
    # The weights come first: a tensor that also belongs to another part is then stored in model.safetensors.
    first = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
    skeleton, tensors = tree.flatten(first | {key: value for key, value in checkpoint.items() if key not in first})
    parts: dict[str, dict[str, Tensor]] = {MODEL: {}}
    for name, tensor in tensors.items():
        file, key = place(name)
        parts.setdefault(file, {})[key] = tensor
    for file, part in parts.items():
        ties = _ties(skeleton["state_dict"]) if file == MODEL else {}
        save_tensors(folder / file, part, ties)
    durable.write_json(folder / SKELETON, skeleton)
    precision = (checkpoint.get("precision") or {}).get("ran")
    manifest = describe(folder, (*parts, SKELETON), checkpoint.get("global_step", 0), precision)
    durable.write_json(folder / MANIFEST, manifest)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write a file of safetensors, durably. Raises OSError."""
    try:
        save_file(tensors, path, metadata={"format": "pt", **metadata})
    except SafetensorError as error:  # safetensors raises this class also for a full disk
        raise OSError(f"{path}: {error}") from error
    os.chmod(path, path.parent.stat().st_mode & 0o666)  # safetensors 0.8 lets only its owner read it
    durable.fsync(path)


def _ties(state_dict: Any) -> dict[str, str]:
    """Return {a tied name: the name its tensor is stored under}, as `safetensors.torch.save_model` notes it."""
    names = {key: name for key, name in tree.unflatten(state_dict, _Name).items() if isinstance(name, _Name)}
    return {key: stored for key, name in names.items() if (stored := place(name)[1]) != key}


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
