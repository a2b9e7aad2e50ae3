"""A checkpoint is a folder: safetensors for the numbers, JSON for everything else, and a manifest that ties them.

    model.safetensors      the module's parameters under their own names: readable with safetensors alone
    optimizer.safetensors  the optimizers' tensors
    state.safetensors      any other tensors (random number generators, FP8 scales); absent when there are none
    state.json             everything that is not a tensor, and where each tensor belongs (`tree`)
    manifest.json          the format and its version, the step, what wrote it, the files' sizes and digests

It is written under another name beside its place, made durable, and renamed: who finds it, finds all of it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from gpt2_fp8.checkpoint import bounded, durable, tree
from gpt2_fp8.checkpoint.errors import CheckpointError
from gpt2_fp8.checkpoint.load import read, read_weights
from gpt2_fp8.checkpoint.manifest import MANIFEST, MODEL, SKELETON, describe, is_checkpoint, place, read_manifest

__all__ = ["CheckpointError", "is_checkpoint", "read", "read_manifest", "read_weights", "remove", "sweep", "write"]


class _Name(str):
    """A tensor's name, told apart from the strings of a state dict."""


def write(path: Path | str, checkpoint: dict[str, Any]) -> None:
    """Write a Lightning checkpoint dictionary as the folder `path`, durably; an older folder there is replaced.

    A crash leaves the old folder, the new one, or (between two renames) the old one as `.NAME.old`, which `sweep` puts
    back. Raises OSError when the disk will not take it, TypeError for a value that cannot be kept, ValueError for more
    values beside the tensors than `bounded` reads.
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
    """Delete a checkpoint so that no half of it can be taken for a whole. Raises OSError.

    A folder without a manifest is not ours to delete: it is left alone.
    """
    path = Path(path)
    if (path / MANIFEST).is_file() and not path.is_symlink():
        temporary = _temporary(path)
        shutil.rmtree(temporary, ignore_errors=True)
        os.rename(path, temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Clear what a killed writer left in `folder`; a checkpoint that it had moved aside goes back to its place.

    One whose place holds something that cannot be read stays aside, where `find` sees it. Links are not followed: a
    link goes, what it leads to stays.
    """
    for left in [*folder.glob(".*.tmp"), *folder.glob(".*.old")]:
        home = left.with_name(left.stem.removeprefix("."))
        if left.is_symlink() or not left.is_dir():
            left.unlink(missing_ok=True)
        elif left.suffix == ".old" and is_checkpoint(left) and not is_checkpoint(home):
            if not os.path.lexists(home):
                os.rename(left, home)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _fill(folder: Path, checkpoint: dict[str, Any]) -> None:
    # The weights come first, so that a tensor which is also held elsewhere is found in model.safetensors.
    first = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
    skeleton, tensors = tree.flatten(first | {key: value for key, value in checkpoint.items() if key not in first})
    parts: dict[str, dict[str, Tensor]] = {MODEL: {}}
    for name, tensor in tensors.items():
        file, key = place(name)
        parts.setdefault(file, {})[key] = tensor
    for file, part in parts.items():
        ties = _ties(skeleton["state_dict"]) if file == MODEL else {}
        try:
            save_file(part, folder / file, metadata={"format": "pt", **ties})
        except SafetensorError as error:  # its own class, also for a full disk
            raise OSError(f"{folder / file}: {error}") from error
        os.chmod(folder / file, folder.stat().st_mode & 0o666)  # safetensors 0.8 lets its owner alone read it
        durable.fsync(folder / file)
    durable.write_json(folder / SKELETON, skeleton)
    bounded.check((folder / SKELETON).read_bytes())  # or else nobody could read it
    precision = (checkpoint.get("precision") or {}).get("ran")
    manifest = describe(folder, (*parts, SKELETON), checkpoint.get("global_step", 0), precision)
    durable.write_json(folder / MANIFEST, manifest)


def _ties(state_dict: Any) -> dict[str, str]:
    """{a tied name: the name its tensor is stored under}; what `safetensors.torch.save_model` notes as well."""
    names = {key: name for key, name in tree.unflatten(state_dict, _Name).items() if isinstance(name, _Name)}
    return {key: stored for key, name in names.items() if (stored := place(name)[1]) != key}


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
