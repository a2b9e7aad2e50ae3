"""What a composition holds after Hydra has read a settings folder: a second check, after that of the files.

Hydra imports and calls what a `_target_` in its own `hydra` node names, whatever file has put it there. YAML has many
ways to spell a key. So the composed node is compared with the one that this program's files alone compose to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpt2_fp8.compose.settings_folder import files, references
from gpt2_fp8.config import hydra_policy
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import printable

Settings = dict[tuple[str, ...], Any]

# What differs between any two compositions says nothing about a file's content.
_OWN_TO_A_RUN = {("runtime",), ("overrides",), ("searchpath",)}
_OWN_TO_A_JOB = {("job", key) for key in ("config_name", "override_dirname", "id", "num")}
_OURS_ALONE = ("help", "template")  # the text of --help: this program's own, wherever `config` was composed
_ONLY_TYPED = "leave it out of the file; give it on the command line"


def check_references(plain: dict[str, Any], groups: Iterable[str], folders: Sequence[Path]) -> None:
    """Raise UserError if a composition's `${...}` stand for more than can be resolved.

    `plain` has the `${...}` as they are written. The message names the file of `folders` that holds them.
    """
    hydra = plain["hydra"]
    repeated = {"overrides": {}, "job": {**hydra["job"], "override_dirname": ""}}  # the text of other keys
    if found := references.refused({**plain, "hydra": hydra | repeated}):
        places = [place for folder in folders if (place := files.place_of(folder, set(groups), found.key))]
        where = f"{printable(places[0])} holds {found.key}" if places else found.key
        raise UserError.of(f"{where}: {found.reason}", "write the values out, or refer to fewer")


def hydra_words(plain: dict[str, Any], words: Sequence[str]) -> list[str]:
    """List the words that compose the same `hydra` node from this program's files, if no other file changes it."""
    choices = plain["hydra"]["runtime"]["choices"]
    plugins = [f"{group}={choices[group]}" for group in hydra_policy.GROUPS if choices.get(group) is not None]
    typed = [word for word in words if word.lstrip("+").startswith("hydra.")]
    return [*plugins, *(word for word in typed if "hydra.sweeper.params" not in word)]


def hydra_settings(plain: dict[str, Any]) -> Settings:
    """Return Hydra's own settings by their paths, without what differs from run to run or from job to job."""
    leaves = _leaves(plain["hydra"], ())
    return {path: value for path, value in leaves if path[:1] not in _OWN_TO_A_RUN and path not in _OWN_TO_A_JOB}


def check_settings(
    plain: dict[str, Any], ours: Settings, words: Sequence[str], config_name: str, folders: Sequence[Path]
) -> None:
    """Raise UserError if a file sets what only the command line may: plugins, or a setting of Hydra's own.

    `ours`: Hydra's settings as this program's files and `words` give them.
    """
    where = ", ".join(map(str, folders))
    if plain.get("plugins") and not any(word.lstrip("+").startswith("plugins=") for word in words):
        raise UserError.of(f"a file in {where} sets plugins", _ONLY_TYPED)
    there = hydra_settings(plain)
    if there.get(_OURS_ALONE) != ours[_OURS_ALONE] and config_name != "config":
        raise UserError.of(
            f"--config-name={config_name}: {config_name}.yaml does not begin with this program's settings",
            f"begin {config_name}.yaml with `defaults: [config, _self_]`; `override model: NAME` between them chooses",
        )
    changed = [
        ".".join(map(str, path))
        for path, value in there.items()
        if (path not in ours or value != ours[path]) and not hydra_policy.may_stand_in_a_file(path)
    ]
    if changed:
        raise UserError.of(f"a file in {where} sets hydra.{changed[0]}", _ONLY_TYPED)


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, node
