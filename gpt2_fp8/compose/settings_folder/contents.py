"""What a file of a user's settings folder may hold: a list of what is allowed, everything else is refused.

A file selects choices and sets values of this program's keys: plain texts, numbers, truth values, lists and groups of
these, and `${...}` of a few harmless kinds. In Hydra's own node it sets what names no code: folders, what a sweep goes
through, log levels, and installed plug-ins by name. Code and the environment are named on the command line alone:
`plugins`, `_target_` and its kin, factories (`()`), objects (`ext://`), `oc.env` and resolvers that could make one up.

The file is read as YAML's nodes, before anything is built from them: an alias costs nothing until it is written out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import yaml  # type: ignore[import-untyped]

from gpt2_fp8.config import hydra_policy
from gpt2_fp8.config.shown import line

LARGEST = 1 << 16  # bytes of a file; ours have a tenth of that, and YAML takes a second for them
_MOST = 10_000  # values in it, once its aliases are written out
_DEEPEST = 20  # groups within groups
_LONGEST_NUMBER = 100  # characters
_PLAIN = tuple(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "timestamp"))
_KEY = re.compile(r"[A-Za-z0-9][\w-]{0,99}")  # and so neither _target_ nor ()
_HEADER = re.compile(r"\s*#\s*@\s*(\S+)(.*)")  # Hydra's own \s: more than blanks and tabs
_PACKAGE = re.compile(r"_global_|_group_|(?!hydra\b)[A-Za-z]\w*(\.[A-Za-z]\w*)*")
_ALLOWED = re.compile(
    r"\$\{(\.*(?!hydra\b)[A-Za-z_]\w*(\.\w+|\[\w+\])*"
    r"|now:[^${}]*"
    r"|oc\.select:\s*\.*(?!hydra\b)[A-Za-z_]\w*(\.\w+|\[\w+\])*(,[^${}]*)?"
    r"|hydra:(job\.(num|id|name|override_dirname)|runtime\.(cwd|output_dir|choices\.\w+)))\}"
)
_LOGGINGS = ("class", "filters", "handlers")  # what Python's logging makes handlers of, by their names
_OBJECT = re.compile(r"\s*(ext|cfg)://")
_PLUGIN = re.compile(rf"override /?({'|'.join(hydra_policy.GROUPS)})")


class Refusal(NamedTuple):
    """What is refused in a file, and why."""

    what: str  # follows "the file holds"
    why: str
    remedy: str | None = None  # None: what helps with all of its kind


CODE = "which could make Hydra run other code"
_ONLY = "which only the command line may"
FOR_THE_COMMAND_LINE = (CODE, _ONLY)


Options = Callable[[str], list[str]]  # from one of Hydra's groups to its choices


def refused(text: str, documents: list[yaml.Node], options: Options) -> Refusal | None:
    """The first thing in a file that is not on the list, or None. `options`: which plug-ins of Hydra's there are."""
    return next(_refusals(text, documents, options), None)


def groups_of(documents: list[yaml.Node]) -> set[str]:
    """The first folder of every path in a file's defaults list."""
    entries = [text for root in documents if isinstance(root, yaml.MappingNode) for text, _ in _default_texts(root)]
    paths = [text.split(" ")[-1].removeprefix("/").partition("@")[0] for text in entries]
    return {path.partition("/")[0] for path in paths}


def line_of(documents: list[yaml.Node], key: str) -> int | None:
    """The line on which a file, in which nothing is refused, sets a key: by the whole of it, or by its last parts."""
    left = [(root, "") for root in documents]
    while left:
        node, path = left.pop()
        if path and f".{key}".endswith(f".{path}"):
            return int(node.start_mark.line) + 1
        if isinstance(node, yaml.MappingNode):
            left += _members(node, path)
    return None


def _refusals(text: str, documents: list[yaml.Node], options: Options) -> Iterator[Refusal]:
    yield from _header(text)
    if len(documents) > 1:
        yield Refusal("a second document", "and Hydra reads one")
    for root in documents:
        yield from _values(root)
        if isinstance(root, yaml.MappingNode):
            yield from _defaults(root, options)


def _header(text: str) -> Iterator[Refusal]:
    """Where the file's keys go (`# @package optim`). Hydra looks at the first lines; here it is all of them."""
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
    """Every value, and every key, aliases written out."""
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
        # For the others see `_defaults` and `_hydra_node`.
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
        where = _at(key, f"{path}.{name}" if path else name)
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
    """Hydra's own settings: those of `hydra_policy` alone, each once."""
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
    value, where = str(node.value), _at(node, path)
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


def _defaults(root: yaml.MappingNode, options: Options) -> Iterator[Refusal]:
    """The defaults list: choices of this program's groups by plain names, and of Hydra's where they are installed."""
    pairs = [pair for entry in _entries(root) for pair in _pairs(entry)]
    for key, value in pairs:
        if group := _PLUGIN.fullmatch(str(key.value)):
            there, name = options(group[1]), str(value.value)
            if not isinstance(value, yaml.ScalarNode) or name not in there:
                told = hydra_policy.missing_plugin(group[1], name, there)
                yield Refusal(
                    f"a default of hydra's {_at(key, 'defaults')}", f"and {line(told.cause, 200)}", told.remedy
                )
    keys = {id(key) for key, _ in pairs}
    for text, node in _default_texts(root):
        where = _at(node, "defaults")
        path = text.split(" ")[-1].removeprefix("/")
        if id(node) in keys and _PLUGIN.fullmatch(text):
            continue
        if "hydra" in text:
            yield Refusal(f"a default of hydra's {where}", CODE)
        elif not plain_path(re.sub(r"@_(global|here|group)_$", "", path)):
            yield Refusal(f"the default {line(text, 80)} {where}", "which is no choice of a group's")
        elif "$" in path.partition("/")[0] and ("/" in path or id(node) in keys):
            yield Refusal(f"the default {line(text, 80)} {where}", "whose group is to be named")


def _entries(root: yaml.MappingNode) -> Iterator[yaml.Node]:
    for key, value in root.value:
        if isinstance(key, yaml.ScalarNode) and key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            yield from value.value


def _pairs(entry: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
    return list(entry.value) if isinstance(entry, yaml.MappingNode) else []


def _default_texts(root: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
    return (found for entry in _entries(root) for found in _texts(entry))


def _texts(node: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
    """Every text in an entry of the defaults list."""
    if isinstance(node, yaml.ScalarNode):
        if node.tag != "tag:yaml.org,2002:null":
            yield str(node.value), node
    else:
        members = [n for pair in node.value for n in pair] if isinstance(node, yaml.MappingNode) else node.value
        for member in members[:_MOST]:
            if isinstance(member, yaml.ScalarNode):
                yield from _texts(member)
            elif isinstance(member, yaml.SequenceNode):
                yield from ((str(n.value), n) for n in member.value if isinstance(n, yaml.ScalarNode))


def plain_path(path: str) -> bool:
    """Whether a choice stays in its group's folder, and is not hidden: `mine`, `mine/one`, `${model}`, `_self_`."""
    return all(re.fullmatch(r"(\w[\w.+-]*|\$\{\w+\})+( \w[\w.+-]*)*", part) for part in path.split("/"))


def _tag(node: yaml.Node, path: str) -> Refusal:
    return Refusal(f"the tag {line(str(node.tag), 80)} {_at(node, path)}", CODE)


def _at(node: yaml.Node, path: str) -> str:
    return f"({f'{line(path, 80)}, ' if path else ''}line {node.start_mark.line + 1})"
