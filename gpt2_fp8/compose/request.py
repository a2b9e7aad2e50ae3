"""The request that a command line makes: Hydra's overrides, those of a run, and which choices were refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.types import Override

from gpt2_fp8.compose.catalog import Catalog
from gpt2_fp8.compose.commandline import MAY_BE_NULL, CommandLine
from gpt2_fp8.compose.override_parser import parse
from gpt2_fp8.compose.overrides import is_hydras, refuse
from gpt2_fp8.config.errors import Problem

# A wrong choice of these affects other groups too: `optim` follows `model`, and an experiment sets anything.
_WIDE = (*MAY_BE_NULL, "model", "optim")


@dataclass
class Request:
    """What is to be composed, and which choices were refused."""

    multirun: bool
    own_sweeper: bool = False  # not Hydra's basic sweeper
    hydra: list[Override] = field(default_factory=list)
    task: list[Override] = field(default_factory=list)
    refused_groups: set[str] = field(default_factory=set)

    def doubts(self, key: str) -> bool:
        """Return whether a refused choice might have set or created a key."""
        return bool(self.refused_groups & set(_WIDE)) or key.partition(".")[0] in self.refused_groups


def request_of(line: CommandLine, catalog: Catalog, problems: list[Problem]) -> Request:
    """Return the request that a command line makes. Problems are added to `problems`, and their words left out."""
    overrides, found = parse(line.words, catalog, multirun=line.multirun)
    problems += found
    problems += _several_paths(overrides)
    problems += catalog.add_folders(_folders(line, overrides), {o.key_or_group.partition("/")[0] for o in overrides})
    if line.config_dir:
        catalog.take_names_from(line.config_dir)
    problems += catalog.check_name()
    own_sweeper = any(o.key_or_group == "hydra/sweeper" and o.value() != "basic" for o in overrides)
    request = Request(line.multirun or any(map(_is_multirun, overrides)), own_sweeper)
    take(overrides, request, catalog, problems)
    return request


def take(overrides: list[Override], request: Request, catalog: Catalog, problems: list[Problem]) -> None:
    """Add overrides to a request. If one has problems, these are added to `problems` instead."""
    for override in overrides:
        found = refuse(override, catalog, request.multirun, request.own_sweeper)
        if found and catalog.is_group(override):
            request.refused_groups.add(override.key_or_group)
            found = [] if catalog.refused_folders else found  # the choice may be there, in a folder that was refused
        elif not found and override.key_or_group != "hydra.searchpath":
            (request.hydra if is_hydras(override) else request.task).append(override)
        problems += found


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
