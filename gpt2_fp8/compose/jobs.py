"""The checked configuration of each job that a command line asks for."""

from __future__ import annotations

import copy
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from gpt2_fp8.compose import composition, sweeps
from gpt2_fp8.compose.commandline import CommandLine, parse, parse_override
from gpt2_fp8.compose.composition import Catalog
from gpt2_fp8.config import checks, disk, parsing, run_length
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import key_paths, problem, show, value_of
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks
from gpt2_fp8.runtime.ranks import Ranks

_WIDE = ("model", "optim", "experiment", "debug")  # choices that set keys of other groups too


class Purpose(NamedTuple):
    """What a configuration is wanted for, where that is not a run that begins here."""

    restarted: bool | None = None  # whether its folder may hold what it has saved before; None: its launcher knows
    begins: bool = False  # the run, or the sweep, begins here, so that the programs that it calls must be here
    name: str | None = None  # for a run, or a sweep, whose own name would be the time
    shown: bool = False  # it is only shown: its paths may be another machine's


TO_RUN = Purpose()


class PlannedJob(NamedTuple):
    """A job that may run: its configuration, and the folder that it will write into."""

    config: RunConfig
    folder: str | None


class Request:
    """The overrides of a command line that are not refused by themselves, and the keys and groups that were."""

    def __init__(self, line: CommandLine, catalog: Catalog, problems: list[Problem]):
        values = [word.value() for word in line.overrides if word.key_or_group == "hydra.searchpath"]
        named = [folder for value in values for folder in (value if isinstance(value, list) else [value])]
        problems += catalog.add_folders([str(folder) for folder in (line.config_dir, *named) if folder])
        problems += catalog.check_name()
        self.catalog = catalog
        modes = [str(word.value()).upper() for word in line.overrides if word.key_or_group == "hydra.mode"]
        self.multirun = line.multirun or any(mode.endswith("MULTIRUN") for mode in modes)
        self.words: list[Override] = []
        self.refused = {key for problem in line.problems for key in problem.keys}
        self._take(line.overrides, problems)

    def _take(self, overrides: Iterable[Override], problems: list[Problem]) -> None:
        """Add the overrides with which nothing is wrong, and to `problems` what is wrong with the others."""
        for override in overrides:
            override.config_loader = self.catalog  # type: ignore[assignment]
            found = list(composition.check_override(override, self.catalog, self.multirun))
            if not found and override.key_or_group != "hydra.searchpath":
                self.words.append(override)
            elif found and self.catalog.is_group(override):
                self.refused.add(override.key_or_group)
            problems += found

    def compose(self, words: Iterable[Override]) -> DictConfig:
        """Compose words of the request, or of a job of it. Raises UserError."""
        return self.catalog.compose([self.catalog.as_hydra_takes(word) for word in words])

    def plan(self, problems: list[Problem], purpose: Purpose = TO_RUN) -> list[PlannedJob]:
        """Return the jobs, and add what is wrong with them to `problems`."""
        try:
            whole = self._whole()
            self.multirun = self.multirun or str(whole.hydra.mode).endswith("MULTIRUN")
            given = any(word.key_or_group == "run_name" for word in self.words)
            sent = sweeps.is_slurm(whole)  # at each turn again, into another folder
            if purpose.name and not given and not sent and _is_named_by_time(whole, self.multirun):
                self.words.append(parse_override(f"run_name={purpose.name}"))
                whole = self._whole()
            jobs = self._jobs(whole, problems)
        except UserError as error:  # what all jobs have in common does not compose
            problems += error.problems
            return []
        above = _folder(whole, "hydra.sweep.dir")  # first, so that `now` says the same for all jobs
        checked = [_Job(self, words, number, whole, purpose) for number, words in jobs]
        planned = [PlannedJob(config, job.folder) for job in checked if (config := job.check(problems)) is not None]
        problems += _check_folders(above, [job for job in checked if job.folder]) if self.multirun else ()
        problems += sweeps.check_slurm(whole, [job.config for job in planned], self.multirun, purpose.begins)
        return planned

    def _jobs(self, whole: DictConfig, problems: list[Problem]) -> list[tuple[int | None, list[Override]]]:
        """Return each job's number and words; a single run has no number."""
        if not self.multirun:
            return [(None, self.words)]
        if (started := ranks.current()).several:
            cause = f"-m in each of {started.world_size:,} processes of {started.launcher}: each would run the sweep"
            problems.append(Problem(cause, "start the sweep once, without that launcher"))
            return []
        # the sweep of a file, as if it were typed in front of the other words
        params = whole.hydra.sweeper.get("params") or {}
        typed, self.words = self.words, []
        overrides, found = parse([f"{key}={value}" for key, value in params.items()])
        problems += found
        self._take(overrides, problems)
        self.words += typed
        own = [word for word in self.words if word.is_hydra_override() or word.key_or_group.startswith("hydra/")]
        task = [word for word in self.words if word not in own]
        return [(number, [*own, *words]) for number, words in enumerate(sweeps.expand(task, whole.hydra.sweeper))]

    def _whole(self) -> DictConfig:
        """Compose what holds for all jobs: the words without those that are swept over."""
        swept = {word.key_or_group for word in self.words if word.is_sweep_override()}
        if "optim" in swept:  # a model of the user's own may have no file of that name in `optim`
            swept.add("model")
        return self.compose(word for word in self.words if word.key_or_group not in swept)


@dataclass
class _Job:
    """One job of a sweep, or the only one (`number`: None)."""

    request: Request
    words: Sequence[Override]
    number: int | None
    whole: DictConfig
    purpose: Purpose
    folder: str | None = None
    above: str | None = None  # the sweep's folder, by this job's words

    def __post_init__(self) -> None:
        self.typed = {word.key_or_group for word in self.words}

    def check(self, problems: list[Problem]) -> RunConfig | None:
        """Compose and check it. Returns None after adding what is wrong with it to `problems`."""
        try:
            config, found = self._check()
        except UserError as error:
            config, found = None, error.problems
        problems += found
        return None if found else config

    def _check(self) -> tuple[RunConfig | None, list[Problem]]:
        cfg, config, found = self._build(self.words)
        wrong = {key for problem in found for key in problem.keys}
        if config is None:  # check the other keys against each other, with these as in the files
            cfg, config, _ = self._build([word for word in self.words if word.key_or_group not in wrong])
        if config is None:
            return None, found
        place = ranks.current()
        config = run_length.fit_schedule(run_length.fit_length(config, self.typed), self.typed)
        across = list(check_processes(config, place, self.typed, self.number is None))
        config = fit_processes(config, place, self.typed)
        across += [*checks.check(config, but_paths=self.purpose.shown), *checks.check_typed(config, self.typed)]
        if not (self.purpose.shown or any("run_name" in problem.keys for problem in across)):
            across += self._check_place(cfg, config)
        across = [problem for problem in across if not wrong & set(problem.keys)]
        return config, [problem for problem in (*found, *across) if not self._may_follow(problem)]

    def _build(self, words: Sequence[Override]) -> tuple[DictConfig, RunConfig | None, list[Problem]]:
        cfg = self.request.compose(words)
        if self.number is not None:  # as Hydra's launcher does, with what `now` has said for all jobs
            cfg = copy.deepcopy(cfg)
            with read_write(cfg.hydra), open_dict(cfg.hydra):
                cfg.hydra.job.num, cfg.hydra.job.id = self.number, str(self.number)
            OmegaConf.copy_cache(from_config=self.whole, to_config=cfg)
        if "${hydra:" in str(cfg):
            HydraConfig.instance().set_config(cfg)
        config, found = parsing.build(RunConfig, composition.to_plain(cfg))
        if any(self.typed & set(problem.keys) for problem in found):  # then it is said of the key that was typed
            plain = OmegaConf.to_container(cfg, resolve=False)
            follow = [key for p in found for key in p.keys if str(value_of(plain, key)).startswith("${")]
            found = [p for p in found if self.typed & set(p.keys) or not set(follow) & set(p.keys)]
        return cfg, config, found

    def _check_place(self, cfg: DictConfig, config: RunConfig) -> Iterator[Problem]:
        """Find what is wrong with the place of the job: its folder, and whether it can run beside others."""
        sweep = self.number is not None
        with composition.refusing_unresolved():
            self.above = str(OmegaConf.select(cfg, "hydra.sweep.dir" if sweep else "hydra.run.dir"))
            below = str(OmegaConf.select(cfg, "hydra.sweep.subdir")) if sweep else ""
        self.folder = str(Path(self.above, below)) if self.above and sweep else self.above
        if cfg.hydra.job.chdir:
            yield Problem("hydra.job.chdir=true: relative paths begin in the folder where a command is typed")
        resumes = config.ckpt_path in ("last", "best")
        if resumes and "run_name" not in self.typed and _is_named_by_time(cfg, sweep):
            cause = f"ckpt_path={config.ckpt_path}: of which run? A run without a name starts in a new, empty folder"
            yield Problem(cause, "add the run_name=NAME of the run to continue", ("ckpt_path", "run_name"))
        again = self.purpose.restarted
        if sweeps.is_slurm(cfg):  # its jobs begin afresh
            again = False
        elif again is None:
            again = ranks.current().restarts + ranks.turns_before() > 0
        if wrong := disk.check_folder(self.folder, "hydra.sweep.dir" if sweep else "hydra.run.dir"):
            yield from wrong
        elif config.ckpt_path is None and not again:
            yield from disk.check_untaken(Path(self.folder))
        if sweep and sweeps.is_joblib(cfg.hydra):
            yield from sweeps.check_joblib(config)

    def _may_follow(self, problem: Problem) -> bool:
        """Return whether a problem may only follow from a word that was refused, which would set its keys."""
        doubted = [key for key in problem.keys if self.request.refused & {*_WIDE, key.partition(".")[0], key}]
        return any(key not in self.typed or key_paths(RunConfig).get(key) for key in doubted)


# ---- the folders of jobs ---------------------------------------------------------------------------------------------


def _is_named_by_time(cfg: DictConfig, in_sweep: bool) -> bool:
    """Return whether the folder of a run, or of a sweep, is by its name, and the name by the time."""
    plain: Any = OmegaConf.to_container(cfg, resolve=False)
    folder = plain["hydra"]["sweep" if in_sweep else "run"]["dir"]
    return "${run_name}" in str(folder) and "${now:" in str(plain["run_name"])


def _folder(cfg: DictConfig, key: str) -> str | None:
    """Return a folder; None if what it is made of is not there, as in what holds for all jobs of a sweep."""
    try:
        return str(OmegaConf.select(cfg, key))
    except OmegaConfBaseException:
        return None


def _check_folders(own: str | None, jobs: Sequence[_Job]) -> Iterator[Problem]:
    """Find jobs that would write outside of `own`, the sweep's folder, or into a folder of another job."""
    place = None if own is None else os.path.realpath(own)
    stray = next((job.above for job in jobs if job.above and os.path.realpath(job.above) != place), None)
    if stray is not None:
        cause = f"a sweep has one folder, for all jobs and their table, and a job would be in {show(stray)}"
        yield Problem(f"hydra.sweep.dir: {cause}", "what tells jobs apart can be in hydra.sweep.subdir")
    taken: set[str] = set()
    for real in sorted(os.path.realpath(job.folder or "") for job in jobs):  # a folder after the one that it is in
        if real in taken or taken & set(map(str, Path(real).parents)):
            cause = f"hydra.sweep.subdir: two jobs would write into {os.path.relpath(real)}"
            yield Problem(cause, "put ${hydra:job.num} into it")
            return
        taken.add(real)


# ---- the number of processes of a job: a launcher's, where one has started them --------------------------------------


def fit_processes(config: RunConfig, place: Ranks, typed: Container[str]) -> RunConfig:
    """Return the configuration with the launcher's number of processes, and a micro-batch that fits its ranks."""
    if place.launcher:
        asked = config.trainer.strategy
        strategy = "ddp" if place.several and asked == "auto" else asked
        options = replace(config.trainer, devices=place.local_world_size, num_nodes=place.nodes, strategy=strategy)
        config = replace(config, trainer=options)
    return run_length.fit_micro_batch(config, run_length.known_ranks(config), typed)


def continue_from(config: RunConfig, folder: Path) -> RunConfig:
    """Continue, in a run that a launcher has started again, from what `folder` holds, if something is saved there."""
    saved = any(folder.glob("checkpoints/*/manifest.json"))
    return replace(config, ckpt_path="last", init_from=None) if saved else config


def check_processes(config: RunConfig, place: Ranks, typed: Container[str], alone: bool = True) -> Iterator[Problem]:
    """Find numbers of processes that the launcher has not started, and nodes of a run `alone` without a launcher."""
    options = config.trainer
    if place.launcher is None:
        if alone and options.num_nodes > 1:
            reason = "nothing has started processes on other nodes"
            yield problem(config, "trainer.num_nodes", reason, "torchrun or srun, on every node")
        return
    if options.max_restarts and place.launcher != ranks.OWN:
        yield problem(config, "trainer.max_restarts", f"{place.launcher} has started the ranks, and not this program")
    for key, started in (("devices", place.local_world_size), ("num_nodes", place.nodes)):
        if f"trainer.{key}" in typed and getattr(options, key) not in (started, "auto"):
            yield problem(config, f"trainer.{key}", f"{place.launcher} has started {started}, so leave it out")
