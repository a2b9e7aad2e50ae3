"""The keys of a configuration by their dotted names: which there are, what each may be, and how its value is told."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from typing import cast

from gpt2_fp8.config.annotations import bare, hints_of, members_of, tag_field, tags_of
from gpt2_fp8.config.errors import Finding, Problem


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
