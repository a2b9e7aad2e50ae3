"""Reading a checkpoint's folder: nothing in it is unpickled, imported or called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpt2_fp8.checkpoint import tree
from gpt2_fp8.checkpoint.manifest import MANIFEST, SKELETON, place, read_json, unreadable, verify


def read(path: Path | str, map_location: Any = None, only: Collection[str] | None = None) -> dict[str, Any]:
    """Return the dictionary that `files.write` was given. Its tensors are on `map_location` (default: the CPU).

    `map_location` is a device or its name. `only`: the keys to read; keys that the checkpoint lacks are left out. Every
    file is verified before any tensor is made. Raises CheckpointError.
    """
    path = Path(path)
    verify(path)
    skeleton = _read_skeleton(path)
    kept = {key: value for key, value in skeleton.items() if only is None or key in only}
    # Lightning may pass a function or a dict, which means the CPU.
    device = str(map_location) if isinstance(map_location, (str, torch.device)) else "cpu"
    try:
        with _tensors(path, device) as load:
            value: dict[str, Any] = tree.unflatten(kept, load)
    except (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise unreadable(path, f"its files do not fit together ({error})") from error
    return value


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Return only the module's state dict, with its tied names, on the CPU. Raises CheckpointError."""
    return dict(read(path, only=["state_dict"])["state_dict"])


def read_plain(path: Path | str, key: str) -> Any:
    """Return what a checkpoint's state has under `key`, with None for tensors; {} if it has nothing.

    It is for a checkpoint that has been read before: nothing is verified. Raises CheckpointError.
    """
    return tree.unflatten(_read_skeleton(Path(path)).get(key, {}), lambda name: None)


def keys(path: Path | str) -> set[str]:
    """Return the keys of a checkpoint's state, without reading a tensor. Raises CheckpointError."""
    return set(_read_skeleton(Path(path)))


def _read_skeleton(path: Path) -> dict[str, Any]:
    skeleton: dict[str, Any] = read_json(path, SKELETON)
    return upgrade(skeleton) if read_json(path, MANIFEST)["version"] < 3 else skeleton


@contextmanager
def _tensors(path: Path, device: str) -> Iterator[Callable[[str], Tensor]]:
    """Return a function from a tensor's name to the tensor, which it reads from its memory-mapped file."""
    with ExitStack() as stack:
        opened: dict[str, Any] = {}

        def load(name: str) -> Tensor:
            file, key = place(name)
            if file not in opened:
                opened[file] = stack.enter_context(safe_open(path / file, framework="pt", device=device))
            tensor: Tensor = opened[file].get_tensor(key)
            # On the CPU it is a view of the map. A copy does not depend on what later happens to the file.
            return tensor.clone() if device == "cpu" else tensor

        yield load


_CALLBACKS = {"Tiers": "Checkpointing", "Fallback": "DivergenceGuard"}


def upgrade(skeleton: dict[str, Any]) -> dict[str, Any]:
    """Return a state's skeleton with the keys of the present format. One that has them already stays as it is.

    Format 3 put the state of a training step under one key, and renamed two callbacks:

        FP8Precision.scaling      training_step.scaling.settings
        FP8Precision.*            training_step.scaling.*
        micro_batch_size          training_step.micro_batch_size
        callbacks.Tiers           callbacks.Checkpointing
        callbacks.Fallback        callbacks.DivergenceGuard
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
