"""Reading a checkpoint's folder, which may be a stranger's: nothing in it is unpickled, imported or called."""

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
_LARGEST_HEADER_BYTES = 16 * 2**20  # 100 for each tensor are usual; reading takes 16 times as much memory


def read(path: Path | str, map_location: Any = None, only: Collection[str] | None = None) -> dict[str, Any]:
    """Return the dictionary that `files.write` was given. Its tensors are on `map_location` (default: the CPU).

    `map_location` is a device or its name. `only`: the keys to read; keys that the checkpoint lacks are left out. Every
    file is verified before any tensor is made. Raises CheckpointError.
    """
    return _assemble(Path(path), _device(map_location), only)


def read_weights(path: Path | str) -> dict[str, Tensor]:
    """Return only the module's state dict, with its tied names, on the CPU. Raises CheckpointError."""
    weights = _assemble(Path(path), "cpu", only=["state_dict"])["state_dict"]
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}


def look_at_weights(path: Path | str, look: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Return what `look` returns for each tensor of the module's state dict, with one in memory at a time.

    Raises CheckpointError, as `read`.
    """
    weights: dict[str, Any] = _assemble(Path(path), "cpu", only=["state_dict"], look=look)["state_dict"]
    return weights


def read_structure(path: Path | str) -> dict[str, Any]:
    """Return the dictionary of `read` with tensors on the device `meta`: their shapes and dtypes without numbers.

    Raises CheckpointError, as `read`.
    """
    return _assemble(Path(path), "meta")


def read_plain(path: Path | str, key: str) -> Any:
    """Return what a checkpoint's state has under `key`, with None for tensors; {} if it has nothing.

    It is for a checkpoint that has been read before: nothing is verified. Raises CheckpointError.
    """
    return tree.unflatten(upgraded(read_json(Path(path), SKELETON)).get(key, {}), lambda name: None)


def _assemble(
    path: Path, device: str, only: Collection[str] | None = None, look: Callable[[Tensor], Any] | None = None
) -> dict[str, Any]:
    """Return the checkpoint, or its part under the names `only`. With `look`, its results replace the tensors."""
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
    """Return a function from a tensor's path to the tensor, which it reads from its memory-mapped file.

    `files` are those that were verified: no other one is opened.
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
            # On the CPU it is a view of the map. A copy does not depend on what later happens to the file.
            return tensor.clone() if device == "cpu" else tensor

        yield load


def _dtype(name: str, code: str) -> torch.dtype:
    """Return a tensor's dtype by its name in safetensors. Raises ValueError for a dtype that no checkpoint holds."""
    if code not in _CODES:
        raise ValueError(f"{name!r} is of {code}, which no checkpoint holds")
    return _CODES[code]


def _check_header(path: Path) -> None:
    """Raise ValueError for a header that would take much memory. The library checks the rest of it."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > _LARGEST_HEADER_BYTES:
        raise ValueError(f"{path.name} is no safetensors file of ours: its header would have {size:,} bytes")


def _device(map_location: Any) -> str:
    """Return the device as safetensors wants it. A function or a dict, which Lightning may pass, means the CPU."""
    return str(map_location) if isinstance(map_location, (str, torch.device)) else "cpu"
