"""What form a value must have, as a table, and how a value differs from it. Plain Python, except for tensors' dtypes.

A form is one of these:

    a type
    a tuple of forms, any of which will do
    `Whole`, `Real`, `Line`, `Word`, `Numbers`, `Maybe`, `Some`, `Row` or `Exactly`
    [form]: a list of any length
    {key: form}: a dict with at least these keys, where the key ... stands for all others
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.config.shown import printable

Form = Any
_LARGEST = 2**53  # up to here every reader of JSON keeps ints exact


class Whole(NamedTuple):
    """An int from `least` to `most`."""

    least: int = 0
    most: int = _LARGEST

    def why_not(self, value: Any) -> str | None:
        """Return what `value` should be, or None if it is that."""
        if type(value) is int and self.least <= value <= self.most:
            return None
        return f"an int from {self.least} on" if self.most == _LARGEST else f"an int from {self.least} to {self.most}"


class Real(NamedTuple):
    """A finite number from `least` to `most`."""

    least: float
    most: float

    def why_not(self, value: Any) -> str | None:
        """Return what `value` should be, or None if it is that."""
        finite = type(value) is int or (type(value) is float and math.isfinite(value))
        return None if finite and self.least <= value <= self.most else f"a number from {self.least:g} to {self.most:g}"


class Line(NamedTuple):
    """Text of one printable line."""

    most: int = 1000  # characters

    def why_not(self, value: Any) -> str | None:
        """Return what `value` should be, or None if it is that."""
        if isinstance(value, str) and len(value) <= self.most and value.isprintable():
            return None
        return f"a line of at most {self.most} printable characters" if isinstance(value, str) else "str"


_KEY = Line(200)


class Word(NamedTuple):
    """One of a few words."""

    words: tuple[str, ...]

    def why_not(self, value: Any) -> str | None:
        """Return what `value` should be, or None if it is that."""
        return None if isinstance(value, str) and value in self.words else " or ".join(self.words)


class Numbers(NamedTuple):
    """A tensor of this dtype, and of this shape if one is given. Its numbers are not checked."""

    dtype: torch.dtype
    shape: tuple[int, ...] | None = None

    def why_not(self, value: Any) -> str | None:
        """Return what `value` should be, or None if it is that."""
        if isinstance(value, Tensor) and value.dtype == self.dtype and self.shape in (None, tuple(value.shape)):
            return None
        return f"a tensor of {self.dtype}" + (f" and of shape {self.shape}" if self.shape is not None else "")


class Maybe(NamedTuple):
    """A key that may be missing."""

    form: Form


class Some(NamedTuple):
    """A list of `least` to `most` entries."""

    form: Form
    least: int = 1
    most: int = _LARGEST


class Exactly(NamedTuple):
    """A dict with no other keys than these."""

    form: dict[Any, Form]


class Row(NamedTuple):
    """A tuple with an entry for each of these."""

    forms: tuple[Form, ...]


def problems(value: Any, form: Form, name: str = "") -> Iterator[str]:
    """Yield how `value`, which is called `name`, differs from `form`."""
    if isinstance(form, (dict, Exactly)):
        yield from _of_dict(value, form, name)
    elif isinstance(form, list):
        yield from _of_list(value, Some(form[0], 0), name)
    elif isinstance(form, Some):
        yield from _of_list(value, form, name)
    elif isinstance(form, Row):
        yield from _of_row(value, form, name)
    elif hasattr(form, "why_not"):
        if wanted := form.why_not(value):
            shown = str(value) if type(value) is float and isinstance(form, Real) else kind(value)
            yield f"{name} is {shown}, not {wanted}"
    elif isinstance(form, tuple):
        found = [list(problems(value, one, name)) for one in form]
        if all(found):
            yield found[-1][0]  # the last form is the fullest
    elif not isinstance(value, form) or (form is int and type(value) is bool):
        yield f"{name} is {kind(value)}, not {form.__name__}"


def _of_list(value: Any, form: Some, name: str) -> Iterator[str]:
    if not isinstance(value, list) or len(value) < form.least:
        yield f"{name} is {kind(value)}, not a list" + (" of one entry at least" if form.least else "")
    elif len(value) > form.most:
        yield f"{name} has {len(value):,} entries, of which there are {form.most:,} at most"
    else:
        for index, entry in enumerate(value):
            yield from problems(entry, form.form, f"{name}.{index}")


def _of_row(value: Any, form: Row, name: str) -> Iterator[str]:
    if not isinstance(value, tuple) or len(value) != len(form.forms):
        yield f"{name} is {kind(value)}, not a tuple of {len(form.forms)} entries"
        return
    for index, (entry, one) in enumerate(zip(value, form.forms, strict=True)):
        yield from problems(entry, one, f"{name}.{index}")


def _of_dict(value: Any, form: dict[Any, Form] | Exactly, name: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{name or 'the state'} is {kind(value)}, not a dict"
        return
    keys = form.form if isinstance(form, Exactly) else form
    for key, inner in keys.items():
        if key is ...:
            continue
        if key in value:
            yield from problems(value[key], inner.form if isinstance(inner, Maybe) else inner, _join(name, key))
        elif not isinstance(inner, Maybe):
            yield f"{_join(name, key)} is missing"
    for key in value.keys() - keys.keys():
        if _KEY.why_not(str(key)) or isinstance(form, Exactly):
            yield f"{_join(name, key)} is of no run"
        elif ... in keys:
            yield from problems(value[key], keys[...], _join(name, key))


def _join(name: str, key: Any) -> str:
    return f"{name}.{printable(str(key)[:80])}".lstrip(".")


def kind(value: Any) -> str:
    """Return a word or two for a value, which may be of any size."""
    if value is None or (type(value) in (bool, int) and abs(value) < 10**18):
        return str(value)
    if type(value) is int:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, (list, dict)) and not value:
        return f"an empty {type(value).__name__}"
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and of shape {tuple(value.shape)}"
    return f"of type {type(value).__name__}"
