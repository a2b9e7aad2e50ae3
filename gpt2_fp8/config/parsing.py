"""From a plain nested dictionary to dataclasses, strictly: every problem is collected, and nothing is guessed.

It knows bool, int, float, str, None, Literal, list, dict, dataclasses, and unions of these. The dataclasses of a union
are distinguished by their tag (`name` or `kind`), the one field that is a Literal in all of them.
"""

from __future__ import annotations

import math
from contextlib import suppress
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from gpt2_fp8.config import keys
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import Kind, Range, hints_of, key_paths, kind_of, show, tag_field, tags_of

T = TypeVar("T")

MISSING = "???"  # OmegaConf's mark of a value that something else must set
Texts = list[str]  # a single one need not be in brackets
_BAD: Any = object()
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
_SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}


def build(cls: type[T], data: object, path: str = "") -> tuple[T | None, list[Problem]]:
    """Build an instance of `cls` from `data`, which is at the key `path`; None if that fails, and all that is wrong."""
    builder = _Builder(cls)
    value = builder.value(cls, data, path)
    assert (value is _BAD) == bool(builder.found), "a bad value is always explained"
    return (None if value is _BAD else cast("T", value)), builder.found


def build_with_defaults(
    cls: type[T], data: dict[str, Any], default: dict[str, Any], problems: list[Problem], path: str = ""
) -> T:
    """Build an instance of a flat class; a wrong key has its default, after its problem was added to `problems`."""
    built, found = build(cls, default | data, path)
    problems += found
    wrong = {key.rpartition(".")[2] for problem in found for key in problem.keys}
    known = {key: value for key, value in data.items() if key in default and key not in wrong}
    built = built or build(cls, default | known, path)[0]
    assert built is not None, "the defaults are right"
    return built


class _Builder:
    def __init__(self, cls: type):
        self.cls = cls
        self.found: list[Problem] = []

    def value(self, hint: Any, value: object, path: str) -> Any:
        kind = kind_of(hint)
        if value == MISSING:
            return self._bad(path, f"{path} has no value")
        if kind.classes and not (value is None and len(kind.members) > len(kind.classes)):
            return self._instance(kind.classes, value, path)
        if kind.values is not None and (len(kind.members) == 1 or isinstance(value, dict)):
            return self._open(kind.values, value, path)
        for member, range_ in kind.members:
            if (matched := _match(member, value)) is not _BAD:
                return matched if range_ is None else self._in_range(range_, matched, path)
        return self._refuse(kind, value, path)

    def _in_range(self, range_: Range, value: Any, path: str) -> Any:
        for item in value if isinstance(value, list) else (value,):
            if reason := range_.why_not(item):
                return self._bad(path, f"{path}={show(value)}: {reason}")
        return value

    def _instance(self, classes: tuple[Any, ...], data: object, path: str) -> Any:
        if not isinstance(data, dict):
            return self._bad(path, f"{path or 'the configuration'}={show(data)}: not a group of keys")
        cls, tag, prefix, owners = classes[0], "", f"{path}." if path else "", {}
        if len(classes) > 1:
            tag = tag_field(classes)
            owners = {choice: c for c in classes for choice in tags_of(c, tag)}
            if data.get(tag) not in owners:
                return self._bad(prefix + tag, *keys.unknown_choice(prefix + tag, show(data.get(tag)), list(owners)))
            cls = owners[data[tag]]
        known, before, values = hints_of(cls), len(self.found), {}
        for key in data:
            if theirs := [choice for choice, c in owners.items() if key in hints_of(c) and key not in known]:
                cause = f"{prefix}{key} belongs to {prefix}{tag}={keys.either(theirs)}"
                self._bad(prefix + key, f"{cause}, and this is {data[tag]}")
            elif key not in known:
                self._bad(prefix + key, *keys.unknown_key(prefix + key, list(known), key_paths(self.cls)))
        for name in known:
            if name in data:
                values[name] = self.value(known[name], data[name], prefix + name)
            else:
                self._bad(prefix + name, f"{prefix}{name} is missing")
        return cls(**values) if len(self.found) == before else _BAD

    def _open(self, hint: Any, data: object, path: str) -> Any:
        if not isinstance(data, dict):
            return self._bad(path, f"{path}={show(data)}: needs keys with values")
        before = len(self.found)
        classes = kind_of(hint).classes
        defaults = vars(classes[0]()) if len(classes) == 1 else {}  # no file of `conf` has the user's own names
        full = {str(key): defaults | value if isinstance(value, dict) else value for key, value in data.items()}
        values = {key: self.value(hint, value, f"{path}.{key}") for key, value in full.items()}
        return values if len(self.found) == before else _BAD

    def _refuse(self, kind: Kind, value: object, path: str) -> Any:
        members = [member for member, _ in kind.members]
        literals = [str(v) for m in members if get_origin(m) is Literal for v in get_args(m)]
        words = [*(_WORDS[m] for m in members if m in _WORDS), *literals]
        words += ["keys with values"] if kind.values is not None else []
        words.sort(key=lambda word: word == "null")  # last, as people say it
        if type(value) in (int, float) and float in members:
            return self._bad(path, f"{path}={show(value)}: not a finite number")
        if lists := [m for m in members if get_origin(m) is list]:
            (item,) = get_args(lists[0])
            several = ", ".join(get_args(item)) if get_origin(item) is Literal else _SEVERAL[item]
            return self._bad(path, f"{path}={show(value)}: needs a list of {several}", f"{path}='[one,two]'")
        meant = keys.near_names(str(value), literals, 1, cutoff=0.7)
        remedy = f"{path}={meant[0]}" if meant else ""
        return self._bad(path, f"{path}={show(value)}: must be {keys.either(words)}", remedy)

    def _bad(self, path: str, cause: str, remedy: str = "") -> Any:
        self.found.append(Problem(cause, remedy, (path,)))
        return _BAD


def _match(member: Any, value: object) -> Any:
    """Return `value` as one member of a union, or _BAD. An int is a float and a name too; a bool is no number."""
    origin = get_origin(member)
    if origin is Literal:
        return value if any(type(choice) is type(value) and choice == value for choice in get_args(member)) else _BAD
    if origin is list and isinstance(value, list):
        items = [_match(get_args(member)[0], v) for v in value]
        return _BAD if any(item is _BAD for item in items) else items
    if member == Texts and type(value) is str:
        return [value]
    if member is float and type(value) in (int, float):
        with suppress(OverflowError):  # an int that no float can hold
            if math.isfinite(number := float(cast("float", value))):
                return number
        return _BAD
    if member is str and type(value) is int:  # run_name=42
        return str(value)
    return value if type(value) is member else _BAD
