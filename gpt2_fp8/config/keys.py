"""The keys of a configuration by their dotted names: which there are, what each may be, and how its value is told."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.ranges import Range

hints_of = cache(partial(get_type_hints, include_extras=True))


def meanings(cls: type) -> dict[str, str]:
    """Return the meaning of each key of `cls` that says one."""
    texts = {name: [m for m in _notes(hint) if isinstance(m, str)] for name, hint in hints_of(cls).items()}
    return {name: found[0] for name, found in texts.items() if found}


@cache
def members_of(hint: Any) -> list[Any]:
    """List the members of a union, each with its range; of any other type, itself."""
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return list(get_args(inner)) if get_origin(inner) in (Union, UnionType) else [hint]


@cache
def bare(member: Any) -> Any:
    """Return a type without what `Annotated` says of it or of its items."""
    member = get_args(member)[0] if get_origin(member) is Annotated else member
    return list[bare(get_args(member)[0])] if get_origin(member) is list else member  # type: ignore[misc]


@cache
def range_of(member: Any) -> Range | None:
    """Find the range that a type declares of itself or, if it is a list, of its items."""
    if found := next((note for note in _notes(member) if isinstance(note, Range)), None):
        return found
    inner = get_args(member)[0] if get_origin(member) is Annotated else member
    return range_of(get_args(inner)[0]) if get_origin(inner) is list else None


def tag_field(classes: list[Any]) -> str:
    """Find the field whose Literal tells the classes of a union apart."""
    shared = [name for name in hints_of(classes[0]) if all(tags_of(c, name) for c in classes)]
    choices = {name: [tag for c in classes for tag in tags_of(c, name)] for name in shared}
    tagging = [name for name, found in choices.items() if len(set(found)) == len(found)]
    assert len(tagging) == 1, f"one field must tell {classes} apart"
    return tagging[0]


@cache
def tags_of(cls: Any, field: str) -> tuple[str, ...]:
    """List the choices that a class stands for."""
    hint = hints_of(cls).get(field)
    return get_args(hint) if get_origin(hint) is Literal else ()


@cache
def _notes(hint: Any) -> tuple[Any, ...]:
    """Return what `Annotated` says of a type."""
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


@cache
def key_paths(cls: type) -> dict[str, tuple[str, ...]]:
    """Return every key of `cls` and below, as a path, with the tags of the union's members that have it.

    A key outside of any union has no tags.
    """
    paths: dict[str, tuple[str, ...]] = {}
    for name, hint in hints_of(cls).items():
        members = [m for m in members_of(hint) if is_dataclass(m)]
        if not members:
            paths[name] = ()
        for member in members:
            tags = tags_of(cast("type", member), tag_field(members)) if len(members) > 1 else ()
            for below, own in key_paths(cast("type", member)).items():
                key = f"{name}.{below}"
                paths[key] = (*paths.get(key, ()), *(tags or own))
    return paths


def is_text(cls: type, key: str) -> bool:
    """Return whether a dotted key of `cls` is text or a list of texts, in a member of each union on its way."""
    name, _, below = key.partition(".")
    members = [bare(member) for member in members_of(hints_of(cls).get(name))]
    if below:
        return any(is_text(cast("type", member), below) for member in members if is_dataclass(member))
    return str in members or list[str] in members


def value_of(config: object, key: str) -> object:
    """Return the value of a dotted key; None if this configuration's classes do not have it."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return config


def finding(of: object, keys: str, reason: str, remedy: str = "", prefix: str = "") -> Finding:
    """Return a finding whose cause begins with the values of `keys`, words of `of` that `prefix` makes whole."""
    names = keys.split()
    values = ", ".join(f"{prefix}{name}={show(value_of(of, name))}" for name in names)
    return Finding(tuple(f"{prefix}{name}" for name in names), Problem(f"{values}: {reason}", remedy))


def show(value: object) -> str:
    """Return a value as it would be typed on the command line, cut to what fits a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(show, value))}]"
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to write out the longest
        return f"a number of {value.bit_length()} bits"
    text = str(value)
    if isinstance(value, str) and (not value or value != value.strip() or not value.isprintable()):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
