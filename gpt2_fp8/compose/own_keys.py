"""The keys of a program of its own, from words `key=value`: strictly, and with every problem at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from hydra.core.override_parser.types import Override

from gpt2_fp8.config import hints, parsing
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import meanings, show

T = TypeVar("T")


def values(own: list[Override], problems: list[Problem]) -> dict[str, Any]:
    """Return the values that words set. Adds to `problems` what is none."""
    found: dict[str, Any] = {}
    for word in own:
        line, key = str(word.input_line), word.key_or_group
        if word.is_delete():
            problems.append(Problem(f"{line}: a key of this program has a value", f"leave it out, or {key}=VALUE"))
        elif word.is_sweep_override():
            first = line.partition("=")[2].partition(",")[0]
            problems.append(Problem(f"{line} is several values", f"give one: {key}={first}"))
        else:
            found[key] = word.value()
    return found


def settings(cls: type[T], given: Mapping[str, Any], problems: list[Problem]) -> T:
    """Build a program's settings from those that are given; each other key has the default of its field.

    A wrong key has its default too, after what is wrong with it was added to `problems`.
    """
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    known = {key: value for key, value in given.items() if key in names}
    problems += [Problem(*hints.unknown_key(key, names, names)) for key in given if key not in names]
    default = vars(cls())
    built, found = parsing.build(cls, default | known)
    problems += [finding.problem for finding in found]
    return built or _without(cls, default, known, found)


def listed(cls: type[Any]) -> str:
    """Return a program's keys for its `--help`, a line each: name, meaning, default."""
    about, default = meanings(cls), vars(cls())
    width = max(map(len, about))
    return "\n".join(f"  {key:<{width}}  {text} [{show(default[key])}]" for key, text in about.items())


def _without(cls: type[T], default: Mapping[str, Any], known: Mapping[str, Any], found: list[Finding]) -> T:
    wrong = {key for finding in found for key in finding.keys}
    built, _ = parsing.build(cls, dict(default) | {key: value for key, value in known.items() if key not in wrong})
    assert built is not None, "the defaults are right"
    return built
