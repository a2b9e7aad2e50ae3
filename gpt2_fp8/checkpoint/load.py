"""Reading a checkpoint's folder. Everything in it may be a stranger's: nothing is unpickled, imported or called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpt2_fp8.checkpoint import tree
from gpt2_fp8.checkpoint.errors import unreadable
from gpt2_fp8.checkpoint.manifest import MANIFEST, SKELETON, place, read_json
from gpt2_fp8.checkpoint.upgrade import upgraded
from gpt2_fp8.checkpoint.verify import verified

# What safetensors' headers call the dtypes of `tree.DTYPES`.
_CODES = {
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (64, 32, 16)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (64, 32, 16, 8)},
    **{f"U{bits}": getattr(torch, f"uint{bits}") for bits in (64, 32, 16, 8)},
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_LARGEST_HEADER = 16 * 2**20  # bytes; 100 for each tensor are usual, and reading takes 16 times as many


def read(path: Path | str, map_location: Any = None, only: Collection[str] | None = None) -> dict[str, Any]:
    """The dictionary that `files.write` was given, its tensors on `map_location` (a device or its name; else the CPU).

    `only`: the keys to read; those that the checkpoint has not are left out. Every file is verified before any tensor
    is made. Raises CheckpointError.
    """
    return _assemble(Path(path), _device(map_location), only)


def read_weights(path: Path | str, map_location: Any = None) -> dict[str, Tensor]:
    """The module's state dict alone, tied names included. Raises CheckpointError."""
    weights = _assemble(Path(path), _device(map_location), only=["state_dict"])["state_dict"]
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}


def look_at_weights(path: Path | str, look: Callable[[Tensor], Any]) -> dict[str, Any]:
    """What `look` says of each tensor of the module's state dict, which are in memory one at a time. Raises as
    `read`."""
    weights: dict[str, Any] = _assemble(Path(path), "cpu", only=["state_dict"], look=look)["state_dict"]
    return weights


def read_structure(path: Path | str) -> dict[str, Any]:
    """The dictionary of `read` with tensors of no numbers (on the device `meta`, of their shapes and dtypes). Raises as
    `read`."""
    return _assemble(Path(path), "meta")


def read_plain(path: Path | str, key: str) -> Any:
    """What a checkpoint's state has under `key`, with None for tensors; {} where it has nothing. For a checkpoint that
    has been read before: nothing is verified. Raises CheckpointError."""
    return tree.unflatten(upgraded(read_json(Path(path), SKELETON)).get(key, {}), lambda name: None)


def _assemble(
    path: Path, device: str, only: Collection[str] | None = None, look: Callable[[Tensor], Any] | None = None
) -> dict[str, Any]:
    """The checkpoint, or what it holds under the names `only`; with what `look` says in the place of each tensor."""
    manifest = verified(path)
    skeleton = read_json(path, SKELETON)
    try:
        skeleton = upgraded(skeleton)
        if skeleton.get("global_step", 0) != manifest["global_step"]:
            raise ValueError(f"{SKELETON} is of another step than {MANIFEST}")
        with _tensors(path, manifest["files"].keys(), device) as load:
            read = load if look is None else lambda name: look(load(name))
            value = tree.unflatten({key: skeleton[key] for key in _names(skeleton, only)}, read)
        if not isinstance(value["state_dict"], dict):
            raise ValueError(f"{SKELETON} holds no weights")
        return value
    except (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise unreadable(path, f"its files do not fit together ({error})") from error


def _names(skeleton: dict[str, Any], only: Collection[str] | None) -> list[str]:
    """Return the keys to read, in the order of the skeleton."""
    return [key for key in skeleton if only is None or key in only]


@contextmanager
def _tensors(path: Path, files: Collection[str], device: str) -> Iterator[Callable[[str], Tensor]]:
    """A function from a tensor's path to the tensor, each read on demand out of its memory-mapped file.

    `files` are those that were verified: no other is opened.
    """
    with ExitStack() as stack:
        opened: dict[str, Any] = {}
        reader = "cpu" if device == "meta" else device

        def load(name: str) -> Tensor:
            file, key = place(name)
            if file not in opened:
                if file not in files:
                    raise ValueError(f"{name!r} would be in {file}, which the manifest does not list")
                _check_header(path / file)
                opened[file] = stack.enter_context(safe_open(path / file, framework="pt", device=reader))
            if device == "meta":
                part = opened[file].get_slice(key)
                return torch.empty(part.get_shape(), dtype=_dtype(name, part.get_dtype()), device=device)
            tensor = opened[file].get_tensor(key)
            if tensor.dtype not in tree.DTYPES:
                raise ValueError(f"{name!r} is of {tensor.dtype}, which no checkpoint holds")
            # On the CPU it is a view of the map: owning a copy frees the file, whatever happens to it later.
            return tensor.clone() if device == "cpu" else tensor

        yield load


def _dtype(name: str, code: str) -> torch.dtype:
    """A tensor's dtype by the name that safetensors has for it. Raises ValueError for one that is not ours."""
    if code not in _CODES:
        raise ValueError(f"{name!r} is of {code}, which no checkpoint holds")
    return _CODES[code]


def _check_header(path: Path) -> None:
    """Raise ValueError for a header that would take much memory; the library sees to all else in it."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > _LARGEST_HEADER:
        raise ValueError(f"{path.name} is no safetensors file of ours: its header would have {size:,} bytes")


def _device(map_location: Any) -> str:
    """The device as safetensors wants it. Lightning may pass a function or a dict for pickles: then the CPU."""
    return str(map_location) if isinstance(map_location, (str, torch.device)) else "cpu"
