"""The defaults list of a file of settings: which choices it names, and which of these are refused.

A file may choose from this program's groups by plain names, and from Hydra's own groups whatever is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import yaml  # type: ignore[import-untyped]

from gpt2_fp8.compose.settings_folder.contents import CODE, Refusal, at
from gpt2_fp8.config import hydra_policy
from gpt2_fp8.config.shown import line

Options = Callable[[str], list[str]]  # from one of Hydra's groups to its choices

_MOST = 10_000  # texts of an entry
_PLACE = re.compile(r"@_(global|here|group)_$|(?<=^data)@(data\.)?sources\.[A-Za-z]\w*$")
_PLUGIN = re.compile(rf"override /?({'|'.join(hydra_policy.GROUPS)})")


def refused(documents: list[yaml.Node], options: Options) -> Refusal | None:
    """Return the first entry that is refused and why, or None. `options` lists the installed plug-ins of Hydra."""
    return next((refusal for root in documents for refusal in _refusals(root, options)), None)


def groups_of(documents: list[yaml.Node]) -> set[str]:
    """Return the first folder of every path that the defaults lists name."""
    texts = [text for root in documents for entry in _entries(root) for text, _ in _texts(entry)]
    return {_path(text).partition("@")[0].partition("/")[0] for text in texts}


def plain_path(path: str) -> bool:
    """Return whether a choice stays in its group's folder and is not hidden: `mine`, `mine/one`, `${model}`."""
    return all(re.fullmatch(r"(\w[\w.+-]*|\$\{\w+\})+( \w[\w.+-]*)*", part) for part in path.split("/"))


def _refusals(root: yaml.Node, options: Options) -> Iterator[Refusal]:
    pairs = [pair for entry in _entries(root) if isinstance(entry, yaml.MappingNode) for pair in entry.value]
    for key, value in pairs:
        if group := _PLUGIN.fullmatch(str(key.value)):
            there, name = options(group[1]), str(value.value)
            if not isinstance(value, yaml.ScalarNode) or name not in there:
                cause, remedy = hydra_policy.missing_plugin(group[1], name, there)
                yield Refusal(f"a default of hydra's {at(key, 'defaults')}", f"and {line(cause, 200)}", remedy)
    keys = {id(key) for key, _ in pairs}
    for text, node in (found for entry in _entries(root) for found in _texts(entry)):
        where, path = at(node, "defaults"), _path(text)
        if id(node) in keys and _PLUGIN.fullmatch(text):
            continue
        if "hydra" in text:
            yield Refusal(f"a default of hydra's {where}", CODE)
        elif not plain_path(_PLACE.sub("", path)):
            yield Refusal(f"the default {line(text, 80)} {where}", "which is no choice of a group's")
        elif "$" in path.partition("/")[0] and ("/" in path or id(node) in keys):
            yield Refusal(f"the default {line(text, 80)} {where}", "whose group is to be named")


def _entries(root: yaml.Node) -> Iterator[yaml.Node]:
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode) and key.value == "defaults" and isinstance(value, yaml.SequenceNode):
            yield from value.value


def _texts(entry: yaml.Node) -> Iterator[tuple[str, yaml.Node]]:
    """Yield every text in an entry, with its node: of a pair, the group and the choice or each choice of a list."""
    members = [entry] if isinstance(entry, yaml.ScalarNode) else entry.value
    if isinstance(entry, yaml.MappingNode):
        members = [node for pair in entry.value for node in pair]
    for member in members[:_MOST]:
        if isinstance(member, yaml.SequenceNode):
            yield from ((str(node.value), node) for node in member.value if isinstance(node, yaml.ScalarNode))
        elif isinstance(member, yaml.ScalarNode) and member.tag != "tag:yaml.org,2002:null":
            yield str(member.value), member


def _path(text: str) -> str:
    """Return the path in an entry's text: `model` of `override /model`."""
    return text.split(" ")[-1].removeprefix("/")
