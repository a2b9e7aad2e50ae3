"""A checkpoint is a folder: safetensors for the numbers, JSON for everything else, and a manifest that ties them.

    model.safetensors      the module's parameters under their own names: readable with safetensors alone
    optimizer.safetensors  the optimizers' tensors
    state.safetensors      any other tensors (random number generators, FP8 scales); absent when there are none
    state.json             everything that is not a tensor, and where each tensor belongs (`tree`)
    manifest.json          the format and its version, the step, what wrote it, the files and their sizes

It is written under another name beside its place, made durable, and renamed: who finds it, finds all of it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpt2_fp8.checkpoint import durable, tree
from gpt2_fp8.checkpoint.manifest import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    SKELETON,
    STATE,
    CheckpointError,
    describe,
    is_checkpoint,
    read_json,
    read_manifest,
    unreadable,
)

__all__ = ["CheckpointError", "is_checkpoint", "read", "read_manifest", "read_weights", "remove", "sweep", "write"]

_PLACES = {"state_dict.": MODEL, "optimizer_states.": OPTIMIZER, "": STATE}  # by how a tensor's path begins


class _Name(str):
    """A tensor's name, told apart from the strings of a state dict."""


def write(path: Path | str, checkpoint: dict[str, Any]) -> None:
    """Write a Lightning checkpoint dictionary as the folder `path`, durably; an older folder there is replaced.

    A crash leaves the old folder, the new one, or (between two renames) the old one as `.NAME.old`, which `sweep` puts
    back. Raises OSError when the disk will not take it, TypeError for a value that cannot be kept.
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


def read(path: Path | str, map_location: Any = None) -> dict[str, Any]:
    """The dictionary that `write` was given, its tensors on `map_location` (a device or its name; else the CPU).

    Raises CheckpointError.
    """
    return _assemble(Path(path), lambda skeleton: skeleton, _device(map_location))


def read_weights(path: Path | str, map_location: Any = None) -> dict[str, Tensor]:
    """The module's state dict alone, tied names included. Raises CheckpointError."""
    weights = _assemble(Path(path), lambda skeleton: skeleton["state_dict"], _device(map_location))
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}


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
    """Clear what a killed writer left in `folder`; a checkpoint that it had moved aside goes back to its place."""
    for left in [*folder.glob(".*.tmp"), *folder.glob(".*.old")]:
        place = left.with_name(left.stem.removeprefix("."))
        if left.suffix == ".old" and not place.exists() and is_checkpoint(left):
            os.rename(left, place)
        elif left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _fill(folder: Path, checkpoint: dict[str, Any]) -> None:
    # The weights come first, so that a tensor which is also held elsewhere is found in model.safetensors.
    first = {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
    skeleton, tensors = tree.flatten(first | {key: value for key, value in checkpoint.items() if key not in first})
    parts: dict[str, dict[str, Tensor]] = {MODEL: {}}
    for name, tensor in tensors.items():
        file, key = _place(name)
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
    manifest = describe(folder, (*parts, SKELETON), checkpoint.get("global_step", 0))
    durable.write_json(folder / MANIFEST, manifest)


def _ties(state_dict: Any) -> dict[str, str]:
    """{a tied name: the name its tensor is stored under}; what `safetensors.torch.save_model` notes as well."""
    names = {key: name for key, name in tree.unflatten(state_dict, _Name).items() if isinstance(name, _Name)}
    return {key: stored for key, name in names.items() if (stored := _place(name)[1]) != key}


def _place(name: str) -> tuple[str, str]:
    """(file, key inside it) of a tensor named by its path in the checkpoint."""
    prefix = next(prefix for prefix in _PLACES if name.startswith(prefix))
    return _PLACES[prefix], name.removeprefix(prefix)


def _assemble(path: Path, select: Callable[[Any], Any], device: str) -> Any:
    read_manifest(path)
    skeleton = read_json(path, SKELETON)
    try:
        with _tensors(path, device) as load:
            return tree.unflatten(select(skeleton), load)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise unreadable(path, f"its files do not fit together ({error})") from error


@contextmanager
def _tensors(path: Path, device: str) -> Iterator[Callable[[str], Tensor]]:
    """A function from a tensor's path to the tensor, each read on demand out of its memory-mapped file."""
    with ExitStack() as stack:
        opened: dict[str, Any] = {}

        def load(name: str) -> Tensor:
            file, key = _place(name)
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(path / file, framework="pt", device=device))
            tensor = opened[file].get_tensor(key)
            # On the CPU it is a view of the map: owning a copy frees the file, whatever happens to it later.
            return tensor.clone() if device == "cpu" else tensor

        yield load


def _device(map_location: Any) -> str:
    """The device as safetensors wants it. Lightning may pass a function or a dict for pickles: then the CPU."""
    return str(map_location) if isinstance(map_location, (str, torch.device)) else "cpu"


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")
