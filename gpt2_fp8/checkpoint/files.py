"""A checkpoint is a folder: safetensors for the numbers, JSON for everything else, and a manifest that ties them.

    model.safetensors      the module's parameters under their names: readable with safetensors only
    optimizer.safetensors  the tensors of the optimizer state
    average.safetensors    the average of the parameters, under the same names; absent without `optim.ema_decay`
    state.safetensors      all other tensors (random number generators, FP8 scales); absent if there are none
    state.json             everything that is not a tensor, and where each tensor belongs (`tree`)
    manifest.json          the format and its version, the step, what wrote it, the files' sizes and digests

It is written under a temporary name in the same folder, made durable, and renamed. So it is never seen in parts.
Nothing in it is unpickled, imported or called.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpt2_fp8.checkpoint import durable, tree
from gpt2_fp8.checkpoint.manifest import (
    AVERAGE,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    SKELETON,
    CheckpointError,
    describe,
    is_checkpoint,
    place,
    read_json,
    read_manifest,
    unreadable,
    verify,
)

__all__ = ["CheckpointError", "is_checkpoint", "read", "read_manifest", "read_weights", "remove", "sweep", "write"]

_CALLBACKS = {"Tiers": "Checkpointing", "Fallback": "DivergenceGuard"}


class _Name(str):
    """A tensor's name, distinguished from the strings of a state dict."""


class Stored:
    """A tensor of a checkpoint that is in its file still. It is read when it is needed, whole or some rows of it."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        with safe_open(path, framework="pt") as file:
            found = file.get_slice(key)
            self.shape, self.dtype = torch.Size(found.get_shape()), found.get_dtype()

    def is_floating_point(self) -> bool:
        """Return what a tensor returns."""
        return self.dtype in ("F64", "F32", "F16", "BF16")

    def read(self, rows: slice | None = None) -> Tensor:
        """Return the tensor, or some rows of it, on the CPU."""
        with safe_open(self._path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(self._key) if rows is None else file.get_slice(self._key)[rows]
            return tensor.clone()


def write(path: Path | str, checkpoint: dict[str, Any]) -> None:
    """Write a Lightning checkpoint dictionary as the folder `path`, durably; an older folder there is replaced.

    A crash leaves the old folder or the new one; between two renames the old one as `.NAME.old`, which `sweep` puts
    back. Raises OSError if the disk does not take it, TypeError if a value cannot be kept.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
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
        temporary = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        os.rename(path, temporary)
        shutil.rmtree(temporary, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Clear what a killed writer left in `folder`; a checkpoint that it had moved aside goes back to its place.

    If something unreadable is in that place, the checkpoint stays aside, where `pointers.resolve` sees it.
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


def read(
    path: Path | str, map_location: Any = None, only: Collection[str] | None = None, stored: bool = False
) -> dict[str, Any]:
    """Return the dictionary that `write` was given, its tensors on the device `map_location` (default: the CPU).

    `only`: the keys to read, as far as they are there. `stored`: weights, their average and the optimizer's tensors
    are `Stored`. Every file is verified before. Raises CheckpointError.
    """
    path = Path(path)
    verify(path)
    skeleton = _read_skeleton(path)
    kept = {key: value for key, value in skeleton.items() if only is None or key in only}
    # Lightning may pass a function or a dict, which means the CPU.
    device = str(map_location) if isinstance(map_location, (str, torch.device)) else "cpu"
    try:
        with _tensors(path, device, (MODEL, OPTIMIZER, AVERAGE) if stored else ()) as load:
            value: dict[str, Any] = tree.unflatten(kept, load)
    except (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable(path, f"its files do not fit together ({error})") from error
    return value


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Return only the module's state dict, with its tied names, on the CPU. Raises CheckpointError."""
    return dict(read(path, only=["state_dict"])["state_dict"])


def read_plain(path: Path | str, key: str) -> Any:
    """Return what a checkpoint's state has under `key`, with None for tensors; {} if it has nothing. Not verified."""
    return tree.unflatten(_read_skeleton(Path(path)).get(key, {}), lambda name: None)


def _read_skeleton(path: Path) -> dict[str, Any]:
    skeleton: dict[str, Any] = read_json(path, SKELETON)
    return upgrade(skeleton) if read_json(path, MANIFEST)["version"] < 3 else skeleton


@contextmanager
def _tensors(path: Path, device: str, stored: Collection[str] = ()) -> Iterator[Callable[[str], Any]]:
    """Return a function from a tensor's name to the tensor, which it reads from its memory-mapped file.

    Those of the files `stored` are left there.
    """
    with ExitStack() as stack:
        opened: dict[str, Any] = {}

        def load(name: str) -> Any:
            file, key = place(name)
            if file in stored:
                return Stored(path / file, key)
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(path / file, framework="pt", device=device))
            tensor: Tensor = opened[file].get_tensor(key)
            # On the CPU it is a view of the map. A copy does not depend on what later happens to the file.
            return tensor.clone() if device == "cpu" else tensor

        yield load


def upgrade(skeleton: dict[str, Any]) -> dict[str, Any]:
    """Return a state's skeleton with the keys of format 3. One that has them already stays as it is.

    It put the state of a training step under one key, and renamed two callbacks:

        FP8Precision.scaling      training_step.scaling.settings
        FP8Precision.*            training_step.scaling.*
        micro_batch_size          training_step.micro_batch_size
    """
    state, step = dict(skeleton), {}
    if "micro_batch_size" in state:
        step["micro_batch_size"] = state.pop("micro_batch_size")
    if "FP8Precision" in state:
        scaling = state.pop("FP8Precision")
        if isinstance(scaling, dict) and "scaling" in scaling:
            scaling = {"settings" if key == "scaling" else key: value for key, value in scaling.items()}
        step["scaling"] = scaling
    if step and "training_step" not in state:
        state["training_step"] = step
    if isinstance(callbacks := state.get("callbacks"), dict):
        state["callbacks"] = {_CALLBACKS.get(name, name): value for name, value in callbacks.items()}
    return state
