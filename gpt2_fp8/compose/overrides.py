"""Overrides that are refused whatever they would compose to. What Hydra itself refuses, `composer.py` finds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import util
from importlib.machinery import PathFinder
from typing import Any

from hydra.core.override_parser.types import Override, Sweep, ValueType

from gpt2_fp8.compose import sweeps
from gpt2_fp8.compose.catalog import Catalog
from gpt2_fp8.compose.commandline import MAY_BE_NULL, SEVERAL
from gpt2_fp8.compose.settings_folder import defaults_list
from gpt2_fp8.config import hints, hydra_policy, typed
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import key_paths, show, value_kinds
from gpt2_fp8.config.schema import RunConfig

_CHOSEN_BY_GROUP = {
    "precision.name": "precision", "recipe.name": "recipe", "data.kind": "data", "optimizer.name": "optimizer",
}  # fmt: skip
_CHOSEN_SOURCE = re.compile(r"(data\.sources\.\w+)\.kind")
_PLACES = {"data": re.compile(r"data\.sources\.\w+")}  # where a group may be chosen for, beside its own place
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
SINGLE = "and this is a single run"  # the end of a cause, for who cannot sweep
_BASIC_SWEEPER = "the sweeper goes through lists: optim.lr=1e-4,3e-4 or trainer.max_steps=range(100,500,100)"


def is_hydras(override: Override) -> bool:
    """Return whether an override is of Hydra's own settings; `hydra` alone stands for all of them."""
    return override.is_hydra_override() or override.key_or_group == "hydra"


def refuse(override: Override, catalog: Catalog, multirun: bool, own_sweeper: bool) -> list[Problem]:
    """Return what is wrong with an override, whatever it composes to.

    `multirun`: a sweep is asked for. `own_sweeper`: it is not Hydra's basic one.
    """
    if is_hydras(override):
        return _hydra_problems(override, catalog)
    group = catalog.is_group(override)
    if found := _sweep_problems(override, group, multirun, own_sweeper):
        return found
    return _group_problems(override, catalog) if group else _value_problems(override)


def _hydra_problems(override: Override, catalog: Catalog) -> list[Problem]:
    key, value = override.key_or_group, override.value()
    if override.is_sweep_override():
        return [Problem(f"{override.input_line}: Hydra's own settings are not swept over", f"give {key} one value")]
    if key == "hydra.searchpath" and (override.is_delete() or str(override.input_line)[:1] == "+"):
        return [Problem(f"{override.input_line}: Hydra would not look there", "hydra.searchpath=[FOLDER], as it is")]
    if override.is_delete():
        return [Problem(f"{override.input_line}: every setting of Hydra's has a value", "leave it out")]
    if refused := hydra_policy.refuse_override(key, value):
        return [refused]
    if "/" in key and value not in (options := catalog.get_group_options(key)):
        return [hydra_policy.missing_plugin(key, show(value), options)]
    if "/" in key and (lacking := hydra_policy.lacks(key, show(value), options)):
        return [lacking]
    return []


def _sweep_problems(override: Override, group: bool, multirun: bool, own_sweeper: bool) -> list[Problem]:
    if not override.is_sweep_override():
        return []
    key, line = override.key_or_group, str(override.input_line)
    value = line.partition("=")[2]
    if not multirun:
        cause = f"{line} is several values, {SINGLE}"
        if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP and not group:
            return [Problem(cause, "; ".join(["-m runs each", *_as_one(key, value)]))]
        return [Problem(cause, "choose one, or put -m in front to run each")]
    if override.is_interval_sweep() and not own_sweeper:
        return [Problem(f"{line}: an interval has no end of values", _BASIC_SWEEPER)]
    if not 0 <= (values := sweeps.length(override)) <= sweeps.MOST:
        return [sweeps.too_many(f"{line} is", values)]
    if override.is_discrete_sweep() and not list(override.sweep_iterator()):
        return [Problem(f"{line} matches nothing", "name what to run; --help lists the choices")]
    return []


def _as_one(key: str, value: str) -> Iterator[str]:
    """Yield how several values are given as the one value that the key may have."""
    kinds = value_kinds(RunConfig, key) if key in key_paths(RunConfig) else {list, str}
    if list in kinds:
        yield f"as one list {typed.word(key, f'[{value}]')}"
    if str in kinds:
        yield f"as one text {typed.word(key, value)}"


def _group_problems(override: Override, catalog: Catalog) -> list[Problem]:
    """Find what is wrong with an override of a group. Whether the choice exists, Hydra says."""
    group, line = override.key_or_group, str(override.input_line)
    if group not in catalog.groups:
        return [Problem(*hints.unknown_choice_of_group(group, catalog.groups))]
    if override.package is not None and not (group in _PLACES and _PLACES[group].fullmatch(override.package)):
        if group in _PLACES:
            remedy = f"{group}=CHOICE; or for a source of data=mixture +data@data.sources.NAME=CHOICE"
            return [Problem(f"{line}: there is no such place for a choice of {group}", remedy)]
        return [Problem(f"{line}: a group has one place here", f"{group}=CHOICE, without @{override.package}")]
    if override.is_delete():
        return (
            [] if group in MAY_BE_NULL else [Problem(f"{line}: a run has one choice of {group}", f"leave {line} out")]
        )
    values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    if group not in SEVERAL and (lists := [value for value in values if isinstance(value, list)]):
        return [_one_choice(group, lists[0], catalog)]
    each = [item for value in values for item in (value if isinstance(value, list) else [value])]
    return [problem for value in each for problem in _choice_problems(group, value, catalog)]


def _one_choice(group: str, several: list[Any], catalog: Catalog) -> Problem:
    """Refuse a list of choices. Hydra would merge their files, and the last one that has a key would win."""
    options = catalog.get_group_options(group)
    there = [show(choice) for choice in several if choice in options]
    cause = f"{group}=[{','.join(map(show, several))}]: a run has one choice of {group}"
    if not there:
        return Problem(cause, f"leave it out, or choose one of {', '.join(options)}")
    sweep = f"; or -m {group}={','.join(there)} runs each" if len(there) > 1 else ""
    return Problem(cause, f"{group}={there[0]}{sweep}")


def _choice_problems(group: str, value: Any, catalog: Catalog) -> list[Problem]:
    if isinstance(value, dict):
        return [Problem(f"{group} takes a choice, not keys", f"give keys one by one: {group}.KEY=VALUE")]
    folder = str(value).rpartition("/")[0]
    if folder and not defaults_list.plain_path(folder.replace("/.", "/")):
        if group == "data":  # a file of text, most likely
            return [Problem(*hints.unknown_choice(group, str(value), catalog.get_group_options(group)))]
        return [
            Problem(f"{group}={show(value)}: leads out of the group's folder", f"{group}=NAME, or {group}=FOLDER/NAME")
        ]
    options = catalog.get_group_options(group)
    if (
        value is None
        or isinstance(value, int | float)
        or value in ("", ".", "..")
        or str(value).endswith((".yaml", ".yml"))
    ):
        return [Problem(*hints.unknown_choice(group, show(value), options))]
    return []


def _value_problems(override: Override) -> list[Problem]:
    key, value, line = override.key_or_group, override.value(), str(override.input_line)
    if override.is_delete():
        return [Problem(f"{line}: every key has a value", f"leave it out, or set it: {key}=null where null is allowed")]
    if source := _CHOSEN_SOURCE.fullmatch(key):
        choice = hints.KINDS.get(show(value), (show(value),))[0]
        return [Problem(f"{line}: this is chosen with the whole source", f"+data@{source[1]}={choice}")]
    if group := _CHOSEN_BY_GROUP.get(key):
        choice = show(value) if not isinstance(value, Sweep) else line.partition("=")[2]
        choice = hints.KINDS.get(choice, (choice,))[0] if group == "data" else choice
        return [Problem(f"{line}: this is chosen with the whole group", f"{group}={choice}")]
    if hydra_policy.names_code(key, value):
        return [Problem(f"{line}: nothing here is built from a _target_", "choose from the groups; --help lists them")]
    if key.partition(".")[0] == "plugins":
        return _plugin_problems(override)
    return []


def _plugin_problems(override: Override) -> list[Problem]:
    """Check that the user's modules exist. They are not imported here, since they import torch."""
    value, line = override.value(), str(override.input_line)
    names = value if isinstance(value, list) else []
    if override.key_or_group != "plugins" or isinstance(value, Sweep) or not isinstance(value, list):
        return [Problem(f"{line}: needs a list of Python modules", "'plugins=[my_module]'")]
    unfit = [name for name in names if not _MODULE.fullmatch(str(name)) or str(name).endswith(".py")]
    if unfit:
        return [Problem(f"{line}: {show(unfit[0])} is no name of a module", "'plugins=[my_module]', without .py")]
    missing = [name for name in names if not _is_there(name.partition(".")[0])]
    where = "looked here, and where Python looks"
    return [
        Problem(f"plugins: there is no module {name} ({where})", "correct the name, or set PYTHONPATH")
        for name in missing
    ]


def _is_there(module: str) -> bool:
    return util.find_spec(module) is not None or PathFinder.find_spec(module, [""]) is not None
