"""What can be chosen: the groups and options of our `conf` and of the folders that a user adds (`-cd FOLDER`).

Hydra imports and calls what a `_target_` under its own `hydra` node names (a callback, a launcher, a log handler),
whatever file put it there. So files that are not ours may say nothing about Hydra: refused by what they hold
(`contents.py`) and, since YAML has many ways to spell a thing, by comparing the composed node with the one that our
files alone compose to. Nor do they get at environment variables, where secrets are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl  # a search path that grows is nobody's interface
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from gpt2_fp8.compose import folders as settings_folders
from gpt2_fp8.compose import references
from gpt2_fp8.config import hints
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.parsing import show
from gpt2_fp8.config.shown import line, printable

# What differs between any two compositions says nothing about a file's content.
_OWN_TO_A_RUN = ("runtime", "overrides", "searchpath")
_OWN_TO_A_JOB = ("config_name", "override_dirname", "id", "num")
BENCH = "bench"  # bench.yaml: the settings of that program, and no run


class Composed(NamedTuple):
    """A configuration, and the same as plain containers with its `${...}` as they are written."""

    cfg: DictConfig
    plain: dict[str, Any]


class Catalog:
    """The choices there are, and their composition. Has the one method that Hydra's override parser asks for."""

    def __init__(self, loader: ConfigLoaderImpl, config_name: str):
        self._loader = loader
        self._composed: dict[tuple[str, ...], Composed] = {}
        self._options: dict[tuple[str, ...], list[str]] = {}
        self.config_name = config_name
        self.folders: list[str] = []
        self.variables: set[str] = set()  # of the environment, that the command line names
        self.refused_folder = False  # if so, choices may be missing that the user knows to be there

    @property
    def groups(self) -> list[str]:
        """The groups at the top, Hydra's own left out."""
        return [group for group in self.get_group_options("", ObjectType.GROUP) if group != "hydra"]

    @property
    def defaults(self) -> set[str]:
        """The groups that every run chooses from."""
        return set(self.compose([]).plain["hydra"]["runtime"]["choices"])

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

    def add_folders(self, folders: list[str]) -> list[Problem]:
        """Make the choices of a user's folders available, where nothing in them is refused."""
        problems = []
        for folder in folders:
            path = Path(folder.removeprefix("file://")).absolute()  # ~ is for the shell: Hydra takes it as it is
            if "://" in folder.removeprefix("file://"):
                what = "a Python package" if folder.startswith("pkg://") else "no folder"
                problems.append(Problem(f"{folder} is {what}, and its files cannot be checked", "-cd FOLDER"))
            elif not path.is_dir():
                problems.append(Problem(f"there is no folder {path} to read settings from", "correct -cd FOLDER"))
            elif found := settings_folders.problems(path):
                problems += found
            else:
                self.folders.append(f"file://{path}")
        self.refused_folder = bool(problems)
        return problems

    def take_names_from(self, folder: str) -> None:
        """Find primary configurations in the folder of `-cd` too, last of all, as Hydra does; none in a refused one."""
        path = f"file://{Path(folder).absolute()}"
        if path in self.folders:
            self._loader.config_search_path.prepend("command-line", path, "schema")
            self._loader.repository.initialize_sources(self._loader.config_search_path)

    def compose(self, overrides: list[str]) -> Composed:
        """The whole configuration, Hydra's own node included. The same objects for the same overrides: copy them.

        Raises UserError if it cannot be composed, or if a user's file changes Hydra's own settings.
        """
        key = tuple(overrides)
        if key not in self._composed:
            composed = _compose(self.config_name, [*overrides, *self._search()])
            self.check_references(composed.plain)
            if self.folders:
                ours = _compose("config", [o for o in overrides if o.lstrip("+").startswith(("hydra.", "hydra/"))])
                self._refuse_changes(_settings(ours), _settings(composed))
            self._composed[key] = composed
        return self._composed[key]

    def check_references(self, plain: dict[str, Any]) -> None:
        """Raises UserError where the `${...}` of a configuration come to more than can be resolved."""
        if found := references.refused(plain):
            named = [place for folder in self.folders if (place := settings_folders.place_of(_path(folder), found.key))]
            where = f"{printable(named[0])} holds {found.key}" if named else found.key
            raise UserError.of(f"{where}: {found.reason}", "write the values out, or refer to fewer")

    def environment(self, name: str, *default: Any) -> Any:
        """`${oc.env:NAME}`, wherever it stands. Raises ValueError where it is a file of the user's that reads it."""
        if self.folders and name not in self.variables:
            raise ValueError(f"{show(name)} of the environment is read, which only the command line may")
        return oc.env(name, *default)

    def _search(self) -> list[str]:
        quoted = [QuotedString(folder, Quote.single).with_quotes() for folder in self.folders]
        return [f"hydra.searchpath=[{','.join(quoted)}]"] if quoted else []

    def _refuse_changes(self, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        changed = [key for key in theirs if theirs[key] != ours.get(key)]
        if changed and self.config_name != "config":
            raise UserError.of(
                f"--config-name={self.config_name} has other settings of Hydra's than this program, hydra.{changed[0]}",
                f"begin {self.config_name}.yaml with `defaults: [config, _self_]`, and leave hydra: out of it",
            )
        if changed:
            raise UserError.of(
                f"a file in {', '.join(f.removeprefix('file://') for f in self.folders)} sets hydra.{changed[0]}",
                "leave Hydra's settings out of it; give them on the command line",
            )


@contextmanager
def open_catalog(folder: Path, config_name: str) -> Iterator[Catalog]:
    """The catalog of a folder of settings. Hydra's global state is as before when it closes."""
    running = HydraConfig.instance().cfg
    initialized = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), job_name="run", version_base="1.3"):
            catalog = Catalog(cast(ConfigLoaderImpl, GlobalHydra.instance().config_loader()), config_name)
            OmegaConf.register_new_resolver("oc.env", catalog.environment, replace=True)
            yield catalog
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        HydraConfig.instance().cfg = running
        GlobalHydra.instance().hydra = initialized


def _path(folder: str) -> Path:
    return Path(folder.removeprefix("file://"))


def _compose(config_name: str, overrides: list[str]) -> Composed:
    try:
        cfg = compose(config_name, overrides, return_hydra_config=True)
        return Composed(cfg, cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=False)))
    except Exception as error:  # OmegaConf answers some values with an AttributeError, YAML with its own
        cause = error.__cause__ if not str(error) and error.__cause__ else error
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        ours = [o for o in overrides if o.lstrip("+").startswith("hydra.") and "searchpath" not in o]
        remedy = "correct the file that it names, or the choice that leads there"
        if ours:
            remedy += f"; or leave out {' '.join(ours)}"
        said = line(" ".join(lines[:3]), 500)
        raise UserError.of(f"the configuration cannot be composed: {said}", remedy) from error


def _settings(composed: Composed) -> dict[str, Any]:
    """Hydra's own settings."""
    hydra = composed.plain["hydra"]
    job = {key: value for key, value in hydra["job"].items() if key not in _OWN_TO_A_JOB}
    return {key: value for key, value in hydra.items() if key not in _OWN_TO_A_RUN} | {"job": job}
