"""From a plain nested dictionary to dataclasses, strictly: every problem is collected, and nothing is guessed.

It knows bool, int, float, str, None, Literal, list, dict, dataclasses, and unions of these. The dataclasses of a union
are distinguished by their tag (`name` or `kind`), the one field that is a Literal in all of them. `Annotated` may give
a number's range, and any key's meaning.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from gpt2_fp8.config import hints
from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.keys import bare, hints_of, key_paths, members_of, range_of, show, tag_field, tags_of

T = TypeVar("T")

MISSING = "???"  # OmegaConf's mark of a value that something else must set
_BAD: Any = object()
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
_SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}


def build(cls: type[T], data: object, path: str = "") -> tuple[T | None, list[Finding]]:
    """Build an instance of `cls` from `data`; return None and everything that is wrong if that fails.

    `path` is the key at which `data` is.
    """
    builder = _Builder(tuple(key_paths(cast("type", cls))))
    value = builder.value(cls, data, path)
    assert (value is _BAD) == bool(builder.found), "a bad value is always explained"
    return (None if value is _BAD else cast("T", value)), builder.found


class _Builder:
    def __init__(self, all_paths: tuple[str, ...]):
        self.all_paths = all_paths
        self.found: list[Finding] = []

    def value(self, hint: Any, value: object, path: str) -> Any:
        members = members_of(hint)
        classes = [m for m in members if is_dataclass(m)]
        if value == MISSING:
            return self._bad(path, f"{path} has no value", f"give one: {path}={_example(members)}")
        if value is None and classes and NoneType in members:
            return None
        if classes:
            return self._instance(classes, value, path)
        keyed = next((m for m in members if get_origin(m) is dict), None)
        if keyed is not None and (len(members) == 1 or isinstance(value, dict)):
            return self._open(get_args(keyed)[1], value, path)
        for member in members:
            if (matched := _match(member, value)) is not _BAD:
                return self._in_range(member, matched, path)
        return self._refuse([bare(member) for member in members], value, path)

    def _in_range(self, member: Any, value: Any, path: str) -> Any:
        """Return a value of the right type if it, or each item of a list, is in range."""
        range_ = range_of(member)
        for item in value if isinstance(value, list) else [value]:
            if range_ and (refusal := range_.refusal(item)):
                return self._bad(path, f"{path}={show(value)}: {refusal.reason}", refusal.remedy.replace("{key}", path))
        return value

    def _instance(self, classes: list[Any], data: object, path: str) -> Any:
        if not isinstance(data, dict):
            return self._bad(
                path,
                f"{path or 'the configuration'}={show(data)}: not a group of keys",
                hints.UNCHOSEN.get(path, ""),
            )
        cls, tag = classes[0], None
        if len(classes) > 1:
            field = tag_field(classes)
            tag = data.get(field)
            choices = [t for c in classes for t in tags_of(c, field)]
            if tag not in choices:
                return self._bad(f"{path}.{field}", *hints.unknown_choice(f"{path}.{field}", show(tag), choices))
            cls = next(c for c in classes if tag in tags_of(c, field))
        known, before = hints_of(cls), len(self.found)
        for key in data:
            if key not in known:
                full = _join(path, str(key))
                owners = [t for c in classes if key in hints_of(c) for t in tags_of(c, tag_field(classes))]
                self._bad(full, *hints.unknown_key(full, list(known), self.all_paths, owners, tag))
        values = {}
        for field_ in fields(cls):
            full = _join(path, field_.name)
            if field_.name in data:
                values[field_.name] = self.value(known[field_.name], data[field_.name], full)
            else:
                self._bad(
                    full, f"{full} is missing", f"give it a value: +{full}={_example(members_of(known[field_.name]))}"
                )
        return cls(**values) if len(self.found) == before else _BAD

    def _open(self, hint: Any, data: object, path: str) -> Any:
        """Build a group whose keys are the user's own."""
        if not isinstance(data, dict):
            return self._bad(path, f"{path}={show(data)}: needs keys with values", f"{path}.KEY=VALUE")
        before = len(self.found)
        values = {str(key): self.value(hint, value, _join(path, str(key))) for key, value in data.items()}
        return values if len(self.found) == before else _BAD

    def _refuse(self, members: list[Any], value: object, path: str) -> Any:
        literals = [str(v) for m in members if get_origin(m) is Literal for v in get_args(m)]
        words = [*(_WORDS[m] for m in members if m in _WORDS), *literals]
        words += ["keys with values"] if any(get_origin(m) is dict for m in members) else []
        words.sort(key=lambda word: word == "null")  # last, as people say it
        if type(value) in (int, float) and float in members:
            return self._bad(path, f"{path}={show(value)}: not a finite number", f"{path}={_example(members)}")
        if lists := [m for m in members if get_origin(m) is list]:
            (item,) = get_args(lists[0])
            several = ", ".join(get_args(item)) if get_origin(item) is Literal else _SEVERAL[item]
            return self._bad(path, f"{path}={show(value)}: needs a list of {several}", f"{path}={_example(lists)}")
        meant = hints.near(str(value), literals, 1)
        remedy = f"{path}={meant[0]}" if meant else ""
        return self._bad(path, f"{path}={show(value)}: must be {hints.either(words)}", remedy)

    def _bad(self, path: str, cause: str, remedy: str = "") -> Any:
        self.found.append(Finding.of(path, cause, remedy))
        return _BAD


def _match(member: Any, value: object) -> Any:
    """Return `value` as one member of a union, or _BAD.

    A bool is no number, an int is a float too, and a whole number may be a name.
    """
    member = bare(member)
    if get_origin(member) is Literal:
        return next((v for v in get_args(member) if type(v) is type(value) and v == value), _BAD)
    if get_origin(member) is list:
        items = [_match(get_args(member)[0], v) for v in value] if isinstance(value, list) else [_BAD]
        return _BAD if any(item is _BAD for item in items) else items
    if member is float and type(value) in (int, float):
        try:
            number = float(cast("float", value))
        except OverflowError:  # an int that no float can hold
            return _BAD
        return number if math.isfinite(number) else _BAD
    if member is str and type(value) is int:  # run_name=42
        return str(value)
    return value if type(value) is member and member is not float else _BAD


def _example(members: list[Any]) -> str:
    first = bare(members[0])
    if get_origin(first) is Literal:
        return str(get_args(first)[0])
    if get_origin(first) is list:
        (item,) = get_args(first)
        if get_origin(item) is Literal:
            return f"'[{','.join(get_args(item)[:2])}]'"
        return {int: "'[1,2]'", float: "'[0.1,0.2]'"}.get(item, "'[one,two]'")
    return {bool: "true", int: "NUMBER", float: "NUMBER", str: "TEXT"}.get(first, "VALUE")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
