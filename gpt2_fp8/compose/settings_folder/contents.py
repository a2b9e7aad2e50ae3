"""What a file of settings may hold: a list of what is allowed. Everything else is refused.

A file selects choices and sets values of this program's keys. A value is a text, a number, a truth value, a list or a
group of these, or one of a few harmless `${...}`. In Hydra's own node a file sets what names no code: folders, what a
sweep goes through, log levels, and installed plug-ins by name. Only the command line names code and the environment:
`plugins`, `_target_` and the like, factories (`()`), objects (`ext://`), `oc.env`, and resolvers that build these.

The file is read as YAML's nodes, before anything is built from them. So an alias costs nothing until it is written out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import yaml  # type: ignore[import-untyped]

from gpt2_fp8.config import hydra_policy
from gpt2_fp8.config.shown import line

LARGEST = 1 << 16  # bytes of a file; YAML takes a second to read them, and our files have a tenth of that
_MOST = 10_000  # values in it, once its aliases are written out
_DEEPEST = 20  # groups within groups
_LONGEST_NUMBER = 100  # characters
_PLAIN = tuple(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp"))
_KEY = re.compile(r"[A-Za-z0-9][\w-]{0,99}")  # excludes _target_ and ()
_HEADER = re.compile(r"\s*#\s*@\s*(\S+)(.*)")  # \s as in Hydra: it matches more than blanks and tabs
_PACKAGE = re.compile(r"_global_|_group_|(?!hydra\b)[A-Za-z]\w*(\.[A-Za-z]\w*)*")
_ALLOWED = re.compile(
    r"\$\{(\.*(?!hydra\b)[A-Za-z_]\w*(\.\w+|\[\w+\])*"
    r"|now:[^${}]*"
    r"|oc\.select:\s*\.*(?!hydra\b)[A-Za-z_]\w*(\.\w+|\[\w+\])*(,[^${}]*)?"
    r"|hydra:(job\.(num|id|name|override_dirname)|runtime\.(cwd|output_dir|choices\.\w+)))\}"
)
_LOGGINGS = ("class", "filters", "handlers")  # keys from which Python's logging builds objects
_OBJECT = re.compile(r"\s*(ext|cfg)://")
CODE = "which could make Hydra run other code"
_ONLY = "which only the command line may"
FOR_THE_COMMAND_LINE = (CODE, _ONLY)


class Refusal(NamedTuple):
    """What is refused in a file, and why."""

    what: str  # continues "the file holds"
    why: str
    remedy: str | None = None  # None: the remedy of all refusals with this `why`


def refused(text: str, documents: list[yaml.Node]) -> Refusal | None:
    """Return the first thing in a file that is not allowed, or None. Its defaults list is not looked at."""
    return next(_refusals(text, documents), None)


def line_of(documents: list[yaml.Node], key: str) -> int | None:
    """Find the line that sets a key, by its whole path or the last parts of it, in a file that is not refused."""
    left = [(root, "") for root in documents]
    while left:
        node, path = left.pop()
        if path and f".{key}".endswith(f".{path}"):
            return int(node.start_mark.line) + 1
        if isinstance(node, yaml.MappingNode):
            left += _members(node, path)
    return None


def _refusals(text: str, documents: list[yaml.Node]) -> Iterator[Refusal]:
    yield from _header(text)
    if len(documents) > 1:
        yield Refusal("a second document", "and Hydra reads one")
    for root in documents:
        yield from _values(root)


def _header(text: str) -> Iterator[Refusal]:
    """Check where the file's keys go (`# @package optim`). Hydra reads the first lines only, this reads all."""
    for comment in text.splitlines():
        header = _HEADER.match(comment)
        if header is None:
            continue
        name, value = header[1], header[2].strip()
        if name == "package" and value.partition(".")[0] in ("hydra", "_global_") and value != "_global_":
            yield Refusal(f"settings of Hydra's own (@package {line(value, 80)})", CODE)
        elif name == "package" and not _PACKAGE.fullmatch(value):
            yield Refusal(f"the header @package {line(value, 80)}", "which is no group of this program's")


def _values(root: yaml.Node) -> Iterator[Refusal]:
    """Check every value and every key, with aliases written out."""
    left: list[tuple[yaml.Node, str, int]] = [(root, "", 0)]
    most = _MOST
    while left:
        node, path, depth = left.pop()
        if isinstance(node, yaml.ScalarNode):
            yield from _scalar(node, path)
            continue
        below = list(_members(node, path))
        most -= len(below)
        if most < 0 or depth > _DEEPEST:
            what = f"more than {_MOST:,} values" if most < 0 else f"more than {_DEEPEST} groups within groups"
            yield Refusal(what, "once its aliases are written out")
            return
        # The other keys are checked by `defaults_list` and `_hydra_node`.
        if isinstance(node, yaml.MappingNode) and not path.startswith(("defaults[", "hydra.")) and path != "hydra":
            yield from _keys(node, path)
        plain = "map" if isinstance(node, yaml.MappingNode) else "seq"
        if node.tag != f"tag:yaml.org,2002:{plain}":
            yield _tag(node, path)
        left += [(member, name, depth + 1) for member, name in reversed(below)]


def _members(node: yaml.Node, path: str) -> Iterator[tuple[yaml.Node, str]]:
    if isinstance(node, yaml.SequenceNode):
        yield from ((item, f"{path}[{number}]") for number, item in enumerate(node.value))
    else:
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            yield value, f"{path}.{name}" if path else name


def _keys(node: yaml.MappingNode, path: str) -> Iterator[Refusal]:
    seen: set[str] = set()
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else ""
        where = at(key, f"{path}.{name}" if path else name)
        if not path and name.partition(".")[0] == "hydra":
            yield from _hydra_node(value) if name == "hydra" else [_of_hydra(name)]
        elif not path and name.partition(".")[0] == "plugins":
            yield Refusal(f"plugins {where}, which import code", _ONLY)
        elif re.fullmatch(r"_\w+_", name):
            yield Refusal(f"a {line(name, 40)} {where}", CODE)
        elif "(" in name:
            yield Refusal(f"a factory {where}", CODE)
        elif logging := set(_LOGGINGS) & set(name.split(".")):
            yield Refusal(f"a {min(logging)} {where}", CODE)
        elif key.tag == "tag:yaml.org,2002:merge" and not path:
            yield Refusal(f"a merge {where}", "and at the top a file sets its keys by their names")
        elif key.tag == "tag:yaml.org,2002:merge":
            continue
        elif key.tag not in _PLAIN or not all(map(_KEY.fullmatch, name.split("."))):
            yield Refusal(f"a key that is no name {where}", "which no key of this program's is")
        elif name in seen:
            yield Refusal(f"{line(name, 80)} twice {where}", "and only one of them could count")
        seen.add(name)


def _hydra_node(node: yaml.Node) -> Iterator[Refusal]:
    """Check Hydra's own settings: only those of `hydra_policy`, each once."""
    left: list[tuple[yaml.Node, tuple[str, ...]]] = [(node, ())]
    seen: set[tuple[str, ...]] = set()
    while left:
        below, path = left.pop()
        plain = isinstance(below, yaml.MappingNode) and below.value and below.tag == "tag:yaml.org,2002:map"
        if len(path) > _DEEPEST or path in seen or not (plain or hydra_policy.may_stand_in_a_file(path)):
            yield _of_hydra(".".join(("hydra", *path[:1])))
            return
        seen |= {path} if path else set()
        if isinstance(below, yaml.MappingNode):
            left += [(value, (*path, str(key.value))) for key, value in reversed(below.value)]


def _of_hydra(sets: str) -> Refusal:
    return Refusal(f"a hydra: node, and sets {line(sets, 80)}", CODE)


def _scalar(node: yaml.ScalarNode, path: str) -> Iterator[Refusal]:
    value, where = str(node.value), at(node, path)
    if node.tag not in _PLAIN:
        yield _tag(node, path)
    elif _OBJECT.match(value):
        yield Refusal(f"{line(value, 80)} {where}", CODE)
    elif node.tag != _PLAIN[0] and len(value) > _LONGEST_NUMBER:
        yield Refusal(f"a number of {len(value):,} characters {where}", "which nothing here can be")
    elif "${" in (left := _ALLOWED.sub("", value)):
        if variable := re.search(r"oc\.env:\s*([^\s,}:]+)", left):
            yield Refusal(f"${{oc.env:}} {where}: {line(variable[1], 80)} of the environment is read", _ONLY)
        else:
            yield Refusal(f"{line(left[left.index('${') :], 80)} {where}", _ONLY)


def _tag(node: yaml.Node, path: str) -> Refusal:
    return Refusal(f"the tag {line(str(node.tag), 80)} {at(node, path)}", CODE)


def at(node: yaml.Node, path: str) -> str:
    """Say where a node is, as the message puts it: `(optim.lr, line 3)`."""
    return f"({f'{line(path, 80)}, ' if path else ''}line {node.start_mark.line + 1})"
