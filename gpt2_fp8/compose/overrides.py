"""The overrides of a command line, sorted by what they change, without those that cannot be composed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.types import Override, Sweep, ValueType

from gpt2_fp8.compose import contents, sweeps
from gpt2_fp8.compose.catalog import Catalog
from gpt2_fp8.compose.commandline import CommandLine, parse
from gpt2_fp8.config import hints, hydra_policy
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.parsing import show

_MAY_BE_NULL = ("experiment", "debug")
# A wrong choice here leaves keys of other groups unknown too: `optim` follows `model`, an experiment sets anything.
_WIDE = (*_MAY_BE_NULL, "model", "optim")
_CHOSEN_BY_GROUP = {"precision.name": "precision", "recipe.name": "recipe", "data.kind": "data"}
_BASIC_SWEEPER = "the sweeper goes through lists: optim.lr=1e-4,3e-4 or trainer.max_steps=range(100,500,100)"


@dataclass
class Request:
    """What can be composed, and what a refused choice leaves in doubt."""

    multirun: bool
    hydra: list[str] = field(default_factory=list)
    task: list[Override] = field(default_factory=list)
    refused_groups: set[str] = field(default_factory=set)
    said: dict[str, Any] | None = None  # by resolvers such as `now`, of which Hydra keeps the first answer for a sweep

    def doubts(self, key: str) -> bool:
        """Whether a key might have another value, or exist, if a refused choice had been right."""
        return bool(self.refused_groups & set(_WIDE)) or key.partition(".")[0] in self.refused_groups


def sort(line: CommandLine, catalog: Catalog, problems: list[Problem]) -> Request:
    """The request that a command line makes. What is wrong with it is added to `problems`, and left out."""
    overrides, found = parse(line.words, catalog)
    problems += found
    problems += _several_paths(overrides)
    problems += catalog.add_folders(_folders(line, overrides))
    if line.config_dir:
        catalog.take_names_from(line.config_dir)
    problems += catalog.check_name()
    request = Request(line.multirun or any(map(_is_multirun, overrides)))
    own_sweeper = any(o.key_or_group == "hydra/sweeper" for o in overrides)
    for override in overrides:
        if override.is_hydra_override() or override.key_or_group == "hydra":  # or all of them
            found = _hydra_problems(override, catalog)
            if not found and override.key_or_group != "hydra.searchpath":
                request.hydra.append(str(override.input_line))
        else:
            found = _sweep_problems(override, is_group(override, catalog), request.multirun, own_sweeper)
            if is_group(override, catalog):
                found = found or _group_problems(override, catalog)
                request.refused_groups |= {override.key_or_group} if found else set()
            else:
                found = found or _value_problems(override)
            request.task += [] if found else [override]
            if is_group(override, catalog) and catalog.refused_folder:
                found = []  # the choice may well be there, in a folder that was refused
        problems += found
    problems += _optim_of_model(request, catalog)
    return request


def is_group(override: Override, catalog: Catalog) -> bool:
    """Whether an override chooses from a group, rather than setting a value."""
    key = override.key_or_group
    return "/" in key or override.package is not None or key in catalog.groups


def _folders(line: CommandLine, overrides: list[Override]) -> list[str]:
    values = [o.value() for o in overrides if o.key_or_group == "hydra.searchpath"]
    lists: list[Any] = [value if isinstance(value, list) else [value] for value in values]
    named = [folder for several in lists for folder in several if isinstance(folder, str)]
    return [folder for folder in [line.config_dir, *named] if folder]


def _several_paths(overrides: list[Override]) -> list[Problem]:
    several = [str(o.input_line) for o in overrides if o.key_or_group == "hydra.searchpath"]
    if len(several) < 2:
        return []
    return [Problem(f"{' '.join(several)}: Hydra looks at the first alone", "hydra.searchpath=[ONE,ANOTHER]")]


def _is_multirun(override: Override) -> bool:
    return override.key_or_group == "hydra.mode" and str(override.value()).upper().endswith("MULTIRUN")


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
        cause, remedy = hints.unknown_choice(key, show(value), options)
        return [Problem(cause, f"{remedy}; others come with plugins, such as pip install hydra-submitit-launcher")]
    return []


def _sweep_problems(override: Override, group: bool, multirun: bool, own_sweeper: bool) -> list[Problem]:
    if not override.is_sweep_override():
        return []
    key, line = override.key_or_group, str(override.input_line)
    value = line.partition("=")[2]
    if not multirun:
        cause = f"{line} is several values, and this is a single run"
        if override.value_type == ValueType.SIMPLE_CHOICE_SWEEP and not group:
            return [Problem(cause, f"-m runs each; as one list '{key}=[{value}]'; as one text '{key}=\"{value}\"'")]
        return [Problem(cause, "choose one, or put -m in front to run each")]
    if override.is_interval_sweep() and not own_sweeper:
        return [Problem(f"{line}: an interval has no end of values", _BASIC_SWEEPER)]
    if not 0 <= (values := sweeps.length(override)) <= sweeps.MOST:
        return [sweeps.too_many(f"{line} is", values)]
    if override.is_discrete_sweep() and not list(override.sweep_iterator()):
        return [Problem(f"{line} matches nothing", "name what to run; --help lists the choices")]
    return []


def _group_problems(override: Override, catalog: Catalog) -> list[Problem]:
    group, line = override.key_or_group, str(override.input_line)
    groups = catalog.groups
    if group not in groups:
        return [Problem(*hints.unknown_choice_of_group(group, groups))]
    if override.package is not None:
        return [Problem(f"{line}: a group has one place here", f"{group}=CHOICE, without @{override.package}")]
    if override.is_delete():
        if group in _MAY_BE_NULL:
            return []
        none = "none" in catalog.get_group_options(group)
        return [Problem(f"{line}: a run has one choice of {group}", f"{group}=none" if none else f"leave {line} out")]
    values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    problems = [problem for value in values for problem in _choice_problems(group, value, catalog)]
    has_default = group in catalog.defaults
    if not problems and has_default and (override.is_add() or override.is_force_add()):
        return [Problem(f"{line}: {group} has its place already", f"{line.lstrip('+')}, without the +")]
    if not problems and not has_default and not override.is_add():
        return [Problem(f"{line}: {group} is no group of this program's own", f"+{line}, to add it")]
    return problems


def _choice_problems(group: str, value: Any, catalog: Catalog) -> list[Problem]:
    if isinstance(value, list):  # experiment=[one,two]: one upon the other
        return [problem for item in value for problem in _choice_problems(group, item, catalog)]
    if isinstance(value, dict):
        return [Problem(f"{group} takes a choice, not keys", f"give keys one by one: {group}.KEY=VALUE")]
    folder, _, name = str(value).rpartition("/")
    if folder and not contents.plain_path(folder.replace("/.", "/")):
        return [
            Problem(f"{group}={show(value)}: leads out of the group's folder", f"{group}=NAME, or {group}=FOLDER/NAME")
        ]
    options = catalog.get_group_options(f"{group}/{folder}" if folder else group)
    if (value is None and group in _MAY_BE_NULL) or (value is not None and name in options):
        return []
    listed = [f"{folder}/{option}" for option in options] if folder and options else catalog.get_group_options(group)
    return [Problem(*hints.unknown_choice(group, show(value), listed))]


def _value_problems(override: Override) -> list[Problem]:
    key, value, line = override.key_or_group, override.value(), str(override.input_line)
    if override.is_delete():
        return [Problem(f"{line}: every key has a value", f"leave it out, or set it: {key}=null where null is allowed")]
    if group := _CHOSEN_BY_GROUP.get(key):
        choice = value if not isinstance(value, Sweep) else line.partition("=")[2]
        return [Problem(f"{line}: this is chosen with the whole group", f"{group}={show(choice)}")]
    if hydra_policy.names_code(key, value):
        return [Problem(f"{line}: nothing here is built from a _target_", "choose from the groups; --help lists them")]
    return []


def _optim_of_model(request: Request, catalog: Catalog) -> list[Problem]:
    """`optim` follows `model`; a model of the user's own may have no namesake there."""
    chosen = {o.key_or_group: o for o in request.task}
    if "model" not in chosen or {"optim", "experiment"} & set(chosen):
        return []
    override, have = chosen["model"], catalog.get_group_options("optim")
    models = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
    without = [model for model in models if isinstance(model, str) and model not in have]
    request.task = [o for o in request.task if not without or o is not override]
    request.refused_groups |= {"model"} if without else set()
    return [
        Problem(
            f"model={model}: no optim/{model}.yaml, where optim follows model", f"add optim=, one of {', '.join(have)}"
        )
        for model in without
    ]
