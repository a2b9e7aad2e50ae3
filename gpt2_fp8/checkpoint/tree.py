"""Nested Python values <-> a skeleton for JSON and named tensors, with every type kept.

The skeleton is plain JSON: null, booleans, strings, numbers, lists and objects mean themselves. What JSON lacks is an
object with a single key that starts with "$":

    {"$tensor": name}    {"$tuple": [...]}    {"$dict": [[key, value], ...]}    {"$ordered": [[key, value], ...]}
    {"$int": "0x..."}    {"$float": "nan"}

A value of any other type is refused, with its path. So nothing is dropped or changed in silence.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# complex128 and complex32 have no name in the safetensors format.
_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
)
DTYPES = frozenset(getattr(torch, name) for name in _NAMES)
_JSON_INTS = range(-(2**63), 2**63)  # other programs read these; json.loads refuses more than 4300 digits


def flatten(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split `value` into (skeleton, tensors by name).

    `value` is made of dict (str or int keys), OrderedDict, list, tuple, None, bool, int, float, str and tensors, which
    are returned detached, contiguous, on the CPU and named by their path. One that occurs twice (tied weights) is there
    once. A `Parameter` counts as a plain tensor.

    Raises TypeError with the path of a value, a dict key or a dtype that cannot be kept exactly.
    """
    flattener = _Flattener()
    return flattener.encode(value, ()), flattener.tensors


def unflatten(skeleton: Any, load: Callable[[str], Any]) -> Any:
    """Return the value that `flatten` split; `load` gives the tensor of a name and is called once for each.

    Raises ValueError for a tag that `flatten` does not write.
    """
    loaded: dict[str, Any] = {}

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("$"):
            return {key: decode(entry) for key, entry in value.items()}
        content = value[tag]
        if tag == "$tensor":
            if content not in loaded:
                loaded[content] = load(content)
            return loaded[content]
        if tag == "$int":
            return int(content, 16)
        if tag == "$float":
            return float(content)
        if tag == "$tuple":
            return tuple(decode(content))
        if tag in ("$dict", "$ordered"):
            pairs = [(decode(key), decode(entry)) for key, entry in content]
            return dict(pairs) if tag == "$dict" else OrderedDict(pairs)
        raise ValueError(f"{tag} is not known here")

    return decode(skeleton)


def memory_key(tensor: Tensor) -> tuple:
    """Return a key for a tensor's memory and how it is read: equal keys are equal tensors."""
    bits = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), bits)


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._storages: set[int] = set()
        self._names: dict[tuple, str] = {}  # a tensor's memory and how it is read -> its name

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if value in _JSON_INTS else {"$int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if kind is list:
            return self._sequence(value, path)
        if kind is tuple:
            return {"$tuple": self._sequence(value, path)}
        if kind is OrderedDict:
            return {"$ordered": self._items(value, path)}
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(entry, (*path, key)) for key, entry in value.items()}
            return {"$dict": self._items(value, path)}
        if kind in (Tensor, torch.nn.Parameter):
            return {"$tensor": self._tensor(value, path)}
        raise TypeError(f"{_spell(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot keep")

    def _sequence(self, values: list | tuple, path: tuple[str, ...]) -> list:
        return [self.encode(value, (*path, str(index))) for index, value in enumerate(values)]

    def _items(self, value: dict, path: tuple[str, ...]) -> list:
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{_spell(path)} has a key of type {type(key).__qualname__}: {key!r}")
        return [[self.encode(key, path), self.encode(entry, (*path, str(key)))] for key, entry in value.items()]

    def _tensor(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError(
                f"{_spell(path)} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}, "
                "which a checkpoint cannot keep"
            )
        key = memory_key(tensor)
        if tensor.numel() and key in self._names:
            return self._names[key]
        name = ".".join(path)
        while name in self.tensors:  # {1: a, "1": b}, {"x.y": a, "x": {"y": b}}
            name += "~"
        self._names[key] = name
        kept = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        # Other views of the same memory (parts of a fused buffer) are copied: safetensors refuses shared memory.
        storage = kept.untyped_storage().data_ptr()
        self.tensors[name] = kept.clone() if storage in self._storages else kept
        self._storages.add(storage)
        return name


def _spell(path: tuple[str, ...]) -> str:
    return ".".join(path) or "the value"
