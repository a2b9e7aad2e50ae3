"""What can be chosen, and its composition by Hydra: our `conf` and the folders that a user adds (`-cd FOLDER`).

Hydra imports and calls what a `_target_` under its own `hydra` node names, whatever file put it there. So the files of
a folder are read before Hydra reads them (`settings_folder`). Since YAML has many ways to spell a thing, the composed
node is also compared with the one that our files alone compose to. Nor do files read environment variables, where
secrets are.
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
from gpt2_fp8.compose.commandline import parsed_once
from gpt2_fp8.compose.settings_folder import files, references
from gpt2_fp8.config import hints, hydra_policy
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.parsing import show
from gpt2_fp8.config.shown import printable

# What differs between any two compositions says nothing about a file's content.
_OWN_TO_A_RUN = {("runtime",), ("overrides",), ("searchpath",)}
_OWN_TO_A_JOB = {("job", key) for key in ("config_name", "override_dirname", "id", "num")}
_ONLY_TYPED = "leave it out of the file; give it on the command line"
_REMEMBERED = 64  # compositions; a large sweep has a thousand jobs
BENCH = "bench"  # bench.yaml: the settings of that program, and no run


class Composed(NamedTuple):
    """A configuration, and the same as plain containers with its `${...}` as they are written."""

    cfg: DictConfig
    plain: dict[str, Any]


class RefusedError(Exception):
    """Hydra does not compose these words; `__cause__` is what it said."""


class Catalog:
    """The choices there are, and their composition. Has the one method that Hydra's override parser asks for."""

    def __init__(self, loader: ConfigLoader, config_name: str):
        self._loader = loader
        self._composed = lru_cache(_REMEMBERED)(self._compose)
        self._chosen = lru_cache(_REMEMBERED)(_compose)
        self._options: dict[tuple[str, ...], list[str]] = {}
        self._ours: dict[tuple[str, ...], dict[tuple[str, ...], Any]] = {}
        self.config_name = config_name
        self.folders: list[str] = []
        self.variables: set[str] = set()  # of the environment, that the command line names
        self.refused_folder = False  # if so, choices may be missing that the user knows to be there
        self.groups = [group for group in self.get_group_options("", ObjectType.GROUP) if group != "hydra"]

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG) -> list[str]:
        """The options of a group (`experiment`, or `experiment/mine` for a folder in it)."""
        ours = group_name.startswith("hydra/")  # what launches the jobs does not come from a user's folder
        search = [] if ours else self._search()
        key = (group_name, str(results_filter), *search)
        if key not in self._options:
            self._options[key] = self._loader.get_group_options(group_name, results_filter, overrides=search)
        return self._options[key]

    def check_name(self) -> list[Problem]:
        """Whether the primary configuration (`-cn NAME`) exists: ours, or one in the folder of `-cd`."""
        there = self._loader.get_group_options("", ObjectType.CONFIG)  # of hydra.searchpath comes no primary one
        names = [name for name in there if not name.startswith("_") and name != BENCH]
        if self.config_name in names:
            return []
        problem = Problem(*hints.unknown_choice("--config-name", self.config_name, names))
        self.config_name = "config"
        return [problem]

    def add_folders(self, folders: list[str], named: set[str] | None = None) -> list[Problem]:
        """Make the choices of a user's folders available, where nothing in them is refused.

        `named`: groups besides ours that the command line chooses from.
        """
        problems = []
        own = files.Own({*self.groups, *(named or ())}, self.get_group_options)
        for folder in folders:
            path = Path(folder.removeprefix("file://")).absolute()  # ~ is for the shell: Hydra takes it as it is
            if "://" in folder.removeprefix("file://"):
                what = "a Python package" if folder.startswith("pkg://") else "no folder"
                problems.append(Problem(f"{folder} is {what}, and its files cannot be checked", "-cd FOLDER"))
            elif not path.is_dir():
                problems.append(Problem(f"there is no folder {path} to read settings from", "correct -cd FOLDER"))
            elif found := files.problems(path, own):
                problems += found
            else:
                self.folders.append(f"file://{path}")
        self.refused_folder = bool(problems)
        there = self.get_group_options("", ObjectType.GROUP) if self.folders else []
        others = [group for group in there if group not in (*self.groups, "hydra")]
        self.groups += [group for group in others if self.get_group_options(group)]  # a checkout has other folders too
        return problems

    def take_names_from(self, folder: str) -> None:
        """Find primary configurations in the folder of `-cd` too, last of all, as Hydra does; none in a refused one."""
        path = Path(folder).absolute()
        if f"file://{path}" in self.folders:
            hydra_private.search_in(self._loader, path)

    def compose(self, words: list[str]) -> Composed:
        """The whole configuration, Hydra's own node included; the same one for the same words, a few words later.

        Raises RefusedError where Hydra does not take the words, and UserError where a file does what only the command
        line may, or where its `${...}` come to more than can be resolved.
        """
        return self._composed(*words)

    def is_group(self, override: Override) -> bool:
        """Whether an override chooses from a group, rather than setting a value."""
        key = override.key_or_group
        return not key.startswith("hydra/") and ("/" in key or override.package is not None or key in self.groups)

    def _compose(self, *words: str) -> Composed:
        """Compose the choices, which most jobs of a sweep have in common, and set the values in a copy of that."""
        parsed = list(map(parsed_once, words))
        values = list(filter(self._sets_value, parsed))
        choices = list(itertools.filterfalse(self._sets_value, parsed))
        chosen = self._chosen(self.config_name, *(str(word.input_line) for word in choices), *self._search())
        try:
            cfg = hydra_private.with_values(chosen, choices, values)
            composed = Composed(cfg, cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=False)))
        except Exception as error:  # OmegaConf answers some values with an AttributeError
            raise RefusedError from error
        self._check_references(composed.plain)
        if self.folders:
            self._refuse_changes(list(words), composed)
        return composed

    def _sets_value(self, override: Override) -> bool:
        """Whether an override changes nothing of which files Hydra reads, nor of Hydra's own settings."""
        folders = self.get_group_options("", ObjectType.GROUP)  # for Hydra a group is any folder
        chooses = self.is_group(override) or override.key_or_group in folders
        return not (chooses or override.is_hydra_override() or override.is_sweep_override())

    def environment(self, name: str, *default: Any) -> Any:
        """`${oc.env:NAME}`, wherever it stands. Raises ValueError where it is a file of the user's that reads it."""
        if self.folders and name not in self.variables:
            raise ValueError(f"{show(name)} of the environment is read, which only the command line may")
        return oc.env(name, *default)

    def _search(self) -> list[str]:
        quoted = [QuotedString(folder, Quote.single).with_quotes() for folder in self.folders]
        return [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []

    def _check_references(self, plain: dict[str, Any]) -> None:
        hydra = plain["hydra"]
        words = {"overrides": {}, "job": {**hydra["job"], "override_dirname": ""}}  # they repeat what other keys are
        if found := references.refused({**plain, "hydra": hydra | words}):
            groups, paths = set(self.groups), [Path(folder.removeprefix("file://")) for folder in self.folders]
            named = [place for path in paths if (place := files.place_of(path, groups, found.key))]
            where = f"{printable(named[0])} holds {found.key}" if named else found.key
            raise UserError.of(f"{where}: {found.reason}", "write the values out, or refer to fewer")

    def _refuse_changes(self, words: list[str], composed: Composed) -> None:
        """Raises UserError where a file of the user's sets what only the command line may."""
        folders = ", ".join(folder.removeprefix("file://") for folder in self.folders)
        if composed.plain.get("plugins") and not any(word.lstrip("+").startswith("plugins=") for word in words):
            raise UserError.of(f"a file in {folders} sets plugins", _ONLY_TYPED)
        theirs = _settings(composed.plain)
        choices = composed.plain["hydra"]["runtime"]["choices"]
        plugins = [f"{group}={choices[group]}" for group in hydra_policy.GROUPS if choices.get(group) is not None]
        typed = [word for word in words if word.lstrip("+").startswith("hydra.")]
        own = (*plugins, *(word for word in typed if "hydra.sweeper.params" not in word))
        if own not in self._ours:
            ours = OmegaConf.to_container(_compose("config", *own), resolve=False)
            self._ours[own] = _settings(cast("dict[str, Any]", ours))
        ours = self._ours[own]
        changed = [
            ".".join(map(str, path))
            for path, value in theirs.items()
            if (path not in ours or value != ours[path]) and not hydra_policy.may_stand_in_a_file(path)
        ]
        if changed and self.config_name != "config":
            raise UserError.of(
                f"--config-name={self.config_name} has other settings of Hydra's than this program, hydra.{changed[0]}",
                f"begin {self.config_name}.yaml with `defaults: [config, _self_]`, and leave hydra.{changed[0]} out",
            )
        if changed:
            raise UserError.of(
                f"a file in {folders} sets hydra.{changed[0]}",
                _ONLY_TYPED,
            )


@contextmanager
def open_catalog(folder: Path, config_name: str) -> Iterator[Catalog]:
    """The catalog of a folder of settings. Hydra's global state is as before when it closes."""
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
    except Exception as error:  # YAML answers some files with an error of its own
        raise RefusedError from error


def _settings(plain: dict[str, Any]) -> dict[tuple[str, ...], Any]:
    """Hydra's own settings by their paths, without what is a run's or a job's own."""
    leaves = _leaves(plain["hydra"], ())
    return {path: value for path, value in leaves if path[:1] not in _OWN_TO_A_RUN and path not in _OWN_TO_A_JOB}


def _leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, node
