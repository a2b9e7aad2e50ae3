"""Writes the table of every key in docs/settings.md from the schema: `python -m tests.settings_page`."""

from __future__ import annotations

import inspect
import io
import json
import tokenize
from dataclasses import asdict, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.keys import hints_of, kind_of
from gpt2_fp8.config.schema import RunConfig

PAGE = Path(__file__).resolve().parents[1] / "docs/settings.md"
CHOSEN = ("name", "kind")  # by GROUP=CHOICE
BEGIN, END = "<!-- every key, by python -m tests.settings_page -->\n", "<!-- the end of every key -->\n"


def table() -> str:
    (config,) = preflight(["run_name=NAME"])
    held, hints = asdict(config), hints_of(RunConfig)
    # the run's own keys first, then each group's, of all dataclasses that its choices can have
    classes = [
        ("", RunConfig),
        *((key.name, cls) for key in fields(RunConfig) for cls in kind_of(hints[key.name]).classes),
    ]
    groups: dict[str, dict[str, str]] = {}
    for group, cls in classes:
        said, rows = comments(cls), groups.setdefault(group, {})
        for key in fields(cls):
            hint = hints_of(cls)[key.name]
            if not kind_of(hint).classes and not (group and key.name in CHOSEN):
                row = f"| `{key.name}` | {kinds(hint)} | {value(held, group, key.name)} | {said.get(key.name, '')} |"
                rows.setdefault(key.name, row)
    parts = []
    for group, rows in groups.items():
        title = f"### `{group}.`" if group else "### Of a run"
        parts.append("\n".join([title, "", "| key | takes | default | meaning |", "|---|---|---|---|", *rows.values()]))
    return "\n\n".join(parts) + "\n"


def comments(cls: type) -> dict[str, str]:
    """What the comment on a key's line says, and those of lines above it alone."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        above: list[str] = []
        lines = inspect.getsource(base)
        tokens = list(tokenize.generate_tokens(io.StringIO(lines).readline))
        for number, line in enumerate(lines.splitlines(), 1):
            here = [t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT and t.start[0] == number]
            name = line.strip().partition(":")[0]
            if line.strip().startswith("#"):
                above += here
                continue
            if name.isidentifier() and name in hints_of(base):
                found[name] = " ".join([*above, *here]) or found.get(name, "")
            above = []
    return {name: text.replace("|", r"\|") for name, text in found.items()}


def kinds(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true, false", str: "text", NoneType: "null"}
    parts = []
    for member, _ in kind_of(hint).members:
        if get_origin(member) is Literal:
            parts += [f"`{choice}`" for choice in get_args(member) if choice is not None]
        elif get_origin(member) in (list, dict):
            parts.append("a list" if get_origin(member) is list else "keys of your own")
        else:
            parts.append(words[member])
    return ", ".join(dict.fromkeys(parts))


def value(held: dict[str, Any], group: str, key: str) -> str:
    """The value that a run without words has; nothing where its choices have no such key."""
    place = held.get(group) if group else held
    if not isinstance(place, dict) or key not in place or (group, key) == ("", "run_name"):
        return ""
    found = json.dumps(place[key]) if isinstance(place[key], (bool, NoneType)) else str(place[key])
    return f"`{found}`" if found else ""


def page() -> str:
    before, _, after = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + after.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
