"""Composition by Hydra, once for each job, from `conf` and the settings folders that a user adds (`-cd FOLDER`).

Choices are checked by name before Hydra sees them, and values are forced (`++key=value`) where a choice may lack the
key. So Hydra refuses hardly anything, and the schema reports every mistake at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt2_fp8.compat import hydra_private
from gpt2_fp8.compose.commandline import MAY_BE_NULL, SEVERAL
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import either, key_paths, near_names, show, unknown_choice
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import line

BENCH = "bench"  # bench.yaml has the benchmark's settings, and is no run
_REMEMBERED = 64  # compositions
_LATE = ("logger.wandb.", "logger.mlflow.", "tags.", "data.")  # keys that are there only after a choice or a word
_TAGS = ("precision.name", "recipe.name", "data.kind", "optimizer.name")  # chosen with their whole group
_SOURCE = re.compile(r"data\.sources\.\w+")  # where a choice of `data` may be placed too
# What Hydra itself instantiates: its plug-ins, and this program's own callback.
_TARGETS = re.compile(r"hydra_plugins\.|hydra\._internal\.core_plugins\.|gpt2_fp8\.compose\.sweeps\.SweepStart$")


def conf_dir() -> Path:
    """Return the folder of this program's YAML files: in an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if (inside / "config.yaml").is_file() else package.parent / "conf"


@contextmanager
def open_catalog(config_name: str = "config", folder: Path | None = None) -> Iterator[Catalog]:
    """Open the catalog of a folder of settings, `conf_dir` if it is None. Hydra's global state stays as it was."""
    running, initialized = HydraConfig.instance().cfg, GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder or conf_dir()), job_name="run", version_base="1.3"):
            yield Catalog(GlobalHydra.instance().config_loader(), config_name)
    finally:
        HydraConfig.instance().cfg = running
        GlobalHydra.instance().hydra = initialized


class Catalog:
    """The choices there are, and their composition. Hydra's parser asks `get_group_options` for what a glob matches."""

    def __init__(self, loader: ConfigLoader, config_name: str):
        self._loader, self.config_name = loader, config_name
        self._remembered = lru_cache(_REMEMBERED)(self._compose)
        self.ours = [group for group in self.get_group_options("", ObjectType.GROUP) if group != "hydra"]
        self.groups = self.ours

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        """List the options of a group (`experiment`, or `experiment/mine` for a folder in it)."""
        return hydra_private.group_options(self._loader, group_name, results_filter)

    def choices(self, group: str) -> list[str]:
        """List the choices of a group, in its folders too."""
        found = self.get_group_options(group)
        for below in self.get_group_options(group, ObjectType.GROUP):
            found += [f"{below}/{name}" for name in self.choices(f"{group}/{below}")]
        return found

    def is_group(self, override: Override) -> bool:
        """Return whether an override chooses from a group, rather than setting a value."""
        key = override.key_or_group
        return not key.startswith("hydra/") and ("/" in key or override.package is not None or key in self.groups)

    def add_folders(self, folders: list[str]) -> list[Problem]:
        """Make the choices of a user's folders available, and their primary configurations; return what is missing."""
        paths = [Path(folder.removeprefix("file://")).absolute() for folder in folders]
        for path in paths:
            if path.is_dir():
                hydra_private.search_in(self._loader, path)
        if paths:
            groups = self.get_group_options("", ObjectType.GROUP)
            self.groups = [group for group in groups if group != "hydra" and self.choices(group)]
        return [Problem(f"there is no folder {path} to read settings from") for path in paths if not path.is_dir()]

    def check_name(self) -> list[Problem]:
        """Check that the primary configuration (`-cn NAME`) exists: in `conf`, or in a folder of the user's."""
        names = [name for name in self.get_group_options("") if not name.startswith("_") and name != BENCH]
        if self.config_name in names:
            return []
        asked, self.config_name = self.config_name, "config"
        return [Problem(*unknown_choice("--config-name", asked, names))]

    def compose(self, words: list[str]) -> DictConfig:
        """Compose everything, with Hydra's own node. The same words soon after give the same object."""
        return self._remembered(*words)

    def _compose(self, *words: str) -> DictConfig:
        try:
            cfg = compose(self.config_name, list(words), return_hydra_config=True)
        except Exception as error:  # of Hydra, OmegaConf and YAML; OmegaConf raises AttributeError for some values
            if isinstance(error, MissingConfigException) and str(error.missing_cfg_file).startswith("optim/"):
                cause = f"optim follows model, and there is no {error.missing_cfg_file}.yaml"
                raise UserError.of(cause, f"optim={either(self.choices('optim'))}") from None
            told = " ".join(f"{error} {error.__cause__ or ''}".split())
            named = next((word for word in words if word.lstrip("+") in told), None)
            raise UserError.of(f"{named or 'the settings'} cannot be composed: {line(told, 500)}") from None
        for path, target in _targets(OmegaConf.to_container(cfg.hydra, resolve=False), "hydra"):
            if not _TARGETS.match(str(target)):
                raise UserError.of(f"{path}={target}: Hydra would call it", "only plug-ins of Hydra's are called")
        return cfg

    def as_hydra_takes(self, override: Override) -> str:
        """Return an override as it is composed: a value without a typed +, forced where a choice may lack the key."""
        key, word = override.key_or_group, str(override.input_line)
        if word.startswith("~") or override.is_hydra_override() or key.startswith("hydra/") or "@" in word:
            return word
        if self.is_group(override):
            return word.lstrip("+") if key in self.ours else word
        always = key_paths(RunConfig).get(key) == () and not key.startswith(_LATE)
        return word.lstrip("+") if always else f"++{word.lstrip('+')}"


def _targets(node: Any, path: str) -> list[tuple[str, Any]]:
    """List every `_target_` of a plain configuration, with its path."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    found = []
    for key, value in items:
        if key == "_target_":
            found.append((f"{path}.{key}", value))
        elif isinstance(value, (dict, list)):
            found += _targets(value, f"{path}.{key}")
    return found


def check_override(override: Override, catalog: Catalog, multirun: bool) -> Iterator[Problem]:
    """Find what is wrong with an override, whatever it composes to. `multirun`: a sweep is asked for."""
    key, word, values = override.key_or_group, str(override.input_line), [override.value()]
    if override.is_sweep_override() and not multirun:
        yield Problem(f"{word} is several values, and this is a single run", "-m runs each")
        return
    if override.is_sweep_override() and override.is_discrete_sweep():
        values = list(override.sweep_iterator())
        if not values:
            yield Problem(f"{word} matches nothing")
    if override.is_hydra_override() and "_target_" in word:
        yield Problem(f"{word}: what Hydra calls is not set by a word")
    elif key.startswith("hydra/"):
        options = catalog.get_group_options(key)
        wrong = [value for value in values if value not in options]
        yield from (Problem(*unknown_choice(key, show(value), options)) for value in wrong)
    elif catalog.is_group(override):
        yield from _check_group(override, values, catalog)
    elif override.is_delete() and not override.is_hydra_override():
        yield Problem(f"{word}: every key has a value", f"{key}=null, where null is allowed")
    elif key in _TAGS:
        yield Problem(f"{word}: this is chosen with the whole group", f"{key.partition('.')[0]}=CHOICE")


def _check_group(override: Override, values: list[Any], catalog: Catalog) -> Iterator[Problem]:
    group, word = override.key_or_group, str(override.input_line)
    if group not in catalog.groups:
        near = near_names(group, catalog.groups, 1) or catalog.groups
        yield Problem(f"there is no group {group}", f"did you mean {either(near)}?")
        return
    if override.package is not None and not (group == "data" and _SOURCE.fullmatch(override.package)):
        yield Problem(f"{word}: {group} has one place", f"{group}=CHOICE, without @{override.package}")
    if override.is_delete():
        if group not in MAY_BE_NULL:
            yield Problem(f"{word}: a run has one choice of {group}")
        return
    options = catalog.choices(group)
    for value in values:
        if isinstance(value, list) and group not in SEVERAL:
            yield Problem(f"{group}={show(value)}: a run has one choice of {group}", f"-m {group}=ONE,TWO runs each")
            continue
        for choice in value if isinstance(value, list) else [value]:
            if str(choice) not in options:
                yield Problem(*unknown_choice(group, show(choice), [o for o in options if not o.startswith("_")]))


@contextmanager
def refusing_unresolved() -> Iterator[None]:
    """Raise a UserError for a `${...}` that cannot be resolved."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise UserError.of(f"{error.full_key}: {str(error).splitlines()[0]}", "correct the ${...}") from None


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration without Hydra's own node, every `${...}` resolved. Raises UserError."""
    with refusing_unresolved():
        values = {str(key): cfg[key] for key in cfg if key != "hydra"}
        return {k: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for k, v in values.items()}
