"""What can be chosen, and its composition by Hydra: from `conf`, and from the folders that a user adds (`-cd FOLDER`).

The files of such a folder are checked before Hydra reads them, and what they compose to is checked again
(`settings_folder`). They do not read environment variables either, since these hold secrets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from gpt2_fp8.compat import hydra_private
from gpt2_fp8.compose.override_parser import parsed
from gpt2_fp8.compose.settings_folder import composition, files
from gpt2_fp8.config import hints
from gpt2_fp8.config.errors import Problem
from gpt2_fp8.config.keys import show

_REMEMBERED = 64  # compositions; a large sweep has a thousand jobs
BENCH = "bench"  # bench.yaml has the benchmark's settings, and is no run


class Composed(NamedTuple):
    """A configuration, and the same as plain containers with its `${...}` as they are written."""

    cfg: DictConfig
    plain: dict[str, Any]


class RefusedError(Exception):
    """Hydra does not compose these words; `__cause__` is what it said."""


class Catalog:
    """The choices there are, and their composition.

    Hydra's override parser calls `get_group_options`, to learn what `glob(...)` matches.
    """

    def __init__(self, loader: ConfigLoader, config_name: str):
        self._loader = loader
        self._composed = lru_cache(_REMEMBERED)(self._compose)
        self._chosen = lru_cache(_REMEMBERED)(_compose)
        self._ours = lru_cache(_REMEMBERED)(_hydra_settings)
        self._options: dict[tuple[str, ...], list[str]] = {}
        self.config_name = config_name
        self.folders: list[Path] = []
        self.variables: set[str] = set()  # variables of the environment that the command line names
        self.refused_folders: list[Path] = []  # choices that the user has in them are missing
        self.groups = [group for group in self.get_group_options("", ObjectType.GROUP) if group != "hydra"]

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        """List the options of a group (`experiment`, or `experiment/mine` for a folder in it)."""
        ours = group_name.startswith("hydra/")  # a user's folder brings no launcher and no sweeper
        search = [] if ours else self._search()
        key = (group_name, str(results_filter), *search)
        if key not in self._options:
            self._options[key] = (
                self._loader.get_group_options(group_name, results_filter, overrides=search)
                if search
                else hydra_private.group_options(self._loader, group_name, results_filter)
            )
        return self._options[key]

    def is_group(self, override: Override) -> bool:
        """Return whether an override chooses from a group, rather than setting a value."""
        key = override.key_or_group
        return not key.startswith("hydra/") and ("/" in key or override.package is not None or key in self.groups)

    def check_name(self) -> list[Problem]:
        """Check that the primary configuration (`-cn NAME`) exists: in `conf`, or in the folder of `-cd`."""
        there = hydra_private.group_options(self._loader, "", ObjectType.CONFIG)  # Hydra finds none by hydra.searchpath
        names = [name for name in there if not name.startswith("_") and name != BENCH]
        if self.config_name in names:
            return []
        refused = any((folder / f"{self.config_name}.yaml").is_file() for folder in self.refused_folders)
        problems = [] if refused else [Problem(*hints.unknown_choice("--config-name", self.config_name, names))]
        self.config_name = "config"
        return problems

    def add_folders(self, folders: list[str], named: set[str] | None = None) -> list[Problem]:
        """Make the choices of a user's folders available if nothing in them is refused; return what is wrong.

        `named`: groups besides those of `conf` that the command line chooses from.
        """
        problems = []
        groups = {*self.groups, *(named or ())}
        for folder in folders:
            path = Path(folder.removeprefix("file://")).absolute()  # ~ is not expanded: Hydra does not either
            if "://" in folder.removeprefix("file://"):
                what = "a Python package" if folder.startswith("pkg://") else "no folder"
                found = [Problem(f"{folder} is {what}, and its files cannot be checked", "-cd FOLDER")]
            elif not path.is_dir():
                found = [Problem(f"there is no folder {path} to read settings from", "correct -cd FOLDER")]
            else:
                found = files.problems(path, groups, self.get_group_options)
            problems += found
            (self.refused_folders if found else self.folders).append(path)
        there = self.get_group_options("", ObjectType.GROUP) if self.folders else []
        others = [group for group in there if group not in (*self.groups, "hydra")]
        self.groups += [group for group in others if self.get_group_options(group)]  # other folders are no groups
        return problems

    def take_names_from(self, folder: str) -> None:
        """Find primary configurations in the folder of `-cd` too, after all others, as Hydra does.

        A folder in which something is refused is not searched.
        """
        if (path := Path(folder).absolute()) in self.folders:
            hydra_private.search_in(self._loader, path)

    def compose(self, words: list[str]) -> Composed:
        """Compose the whole configuration, Hydra's own node included. The same words soon after give the same object.

        Raises RefusedError if Hydra does not take the words. Raises UserError if a file does what only the command
        line may, or if its `${...}` stand for more than can be resolved.
        """
        return self._composed(*words)

    def environment(self, name: str, *default: Any) -> Any:
        """Resolve `${oc.env:NAME}`, wherever it stands. Raises ValueError if a file of the user's reads it."""
        if self.folders and name not in self.variables:
            raise ValueError(f"{show(name)} of the environment is read, which only the command line may")
        return oc.env(name, *default)

    def _compose(self, *words: str) -> Composed:
        """Compose the choices, which most jobs of a sweep have in common, and set the values in a copy of that."""
        overrides = list(map(parsed, words))
        values = list(filter(self._sets_value, overrides))
        choices = list(itertools.filterfalse(self._sets_value, overrides))
        chosen = self._chosen(self.config_name, *(str(word.input_line) for word in choices), *self._search())
        try:
            cfg = hydra_private.with_values(chosen, choices, values)
            composed = Composed(cfg, _plain(cfg))
        except Exception as error:  # OmegaConf raises AttributeError for some values
            raise RefusedError from error
        composition.check_references(composed.plain, self.groups, self.folders)
        if self.folders:
            ours = self._ours(*composition.hydra_words(composed.plain, words))
            composition.check_settings(composed.plain, ours, words, self.config_name, self.folders)
        return composed

    def _sets_value(self, override: Override) -> bool:
        """Return whether an override leaves as they are both Hydra's own settings and the list of files to read."""
        folders = self.get_group_options("", ObjectType.GROUP)  # for Hydra, any folder is a group
        chooses = self.is_group(override) or override.key_or_group in folders
        return not (chooses or override.is_hydra_override() or override.is_sweep_override())

    def _search(self) -> list[str]:
        quoted = [QuotedString(f"file://{folder}", Quote.single).with_quotes() for folder in self.folders]
        return [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []


@contextmanager
def open_catalog(folder: Path, config_name: str) -> Iterator[Catalog]:
    """Open the catalog of a folder of settings. Hydra's global state is as before when it closes."""
    running = HydraConfig.instance().cfg
    initialized = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), job_name="run", version_base="1.3"):
            catalog = Catalog(GlobalHydra.instance().config_loader(), config_name)
            OmegaConf.register_new_resolver("oc.env", catalog.environment, replace=True)
            yield catalog
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        HydraConfig.instance().cfg = running
        GlobalHydra.instance().hydra = initialized


def _compose(config_name: str, *words: str) -> DictConfig:
    try:
        return compose(config_name, list(words), return_hydra_config=True)
    except Exception as error:  # YAML raises errors of its own
        raise RefusedError from error


def _hydra_settings(*words: str) -> composition.Settings:
    return composition.hydra_settings(_plain(_compose("config", *words)))


def _plain(cfg: DictConfig) -> dict[str, Any]:
    return cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=False))
