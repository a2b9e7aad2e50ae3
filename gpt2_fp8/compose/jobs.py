"""The checked configuration of each job that a command line asks for."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from gpt2_fp8.compose import composition, folders, launchers, sweeps
from gpt2_fp8.compose.commandline import CommandLine, parse, parsed
from gpt2_fp8.compose.composition import Catalog
from gpt2_fp8.config import checks, parsing, run_length
from gpt2_fp8.config.errors import Finding, Problem, UserError
from gpt2_fp8.config.keys import key_paths, show, value_of
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks
from gpt2_fp8.runtime.ranks import Ranks

_WIDE = ("model", "optim", "experiment", "debug")  # choices that set keys of other groups too


class Purpose(NamedTuple):
    """What a configuration is wanted for, where that is not a run that begins here."""

    restarted: bool | None = None  # whether its folder may hold what it has saved before; None: its launcher knows
    drawn: bool = False  # its schedule is only drawn: a warm-up and a decay that do not fit stay as they are
    begins: bool = False  # the run, or the sweep, begins here, so that the programs that it calls must be here
    name: str | None = None  # for a run, or a sweep, whose own name would be the time
    shown: bool = False  # it is only shown: its paths may be another machine's


TO_RUN = Purpose()


class Planned(NamedTuple):
    """A job: its configuration, and the folder that it will write into."""

    config: RunConfig
    folder: str | None


class Request:
    """The overrides of a command line that are not refused by themselves, and the groups of which a choice was."""

    def __init__(self, line: CommandLine, catalog: Catalog, problems: list[Problem]):
        values = [word.value() for word in line.overrides if word.key_or_group == "hydra.searchpath"]
        named = [folder for value in values for folder in (value if isinstance(value, list) else [value])]
        problems += catalog.add_folders([str(folder) for folder in (line.config_dir, *named) if folder])
        problems += catalog.check_name()
        self.catalog = catalog
        self.multirun = line.multirun or any(map(_is_multirun, line.overrides))
        self.words: list[Override] = []
        self.refused: set[str] = set()
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

    def compose(self, words: Sequence[Override]) -> DictConfig:
        """Compose words of the request, or of a job of it. Raises UserError."""
        return self.catalog.compose([self.catalog.as_hydra_takes(word) for word in words])

    def plan(self, problems: list[Problem], purpose: Purpose = TO_RUN) -> list[Planned]:
        """Return the jobs, and add what is wrong with them to `problems`."""
        try:
            whole = self._whole()
            self.multirun = self.multirun or str(whole.hydra.mode).endswith("MULTIRUN")
            if purpose.name is not None and self._is_named_by_time(whole):
                self.words.append(parsed(f"run_name={purpose.name}"))
                whole = self._whole()
            checked = self._check_jobs(whole, problems, purpose)
        except UserError as error:  # what all jobs have in common does not compose
            problems += error.problems
            return []
        done = [Planned(job.config, job.folder) for job in checked if job.config is not None]
        problems += launchers.check_slurm(whole, [job.config for job in done], self.multirun)
        problems += launchers.check_programs(whole, self.multirun) if purpose.begins else ()
        return done

    def _check_jobs(self, whole: DictConfig, problems: list[Problem], purpose: Purpose) -> list[_Job]:
        if not self.multirun:
            return [_Job(self, self.words, None, whole, purpose).check(problems)]
        if inside := list(launchers.check_ranks()):
            problems += inside
            return []
        own = [word for word in self.words if word.is_hydra_override() or word.key_or_group.startswith("hydra/")]
        self._take_params(whole, problems)
        task = [word for word in self.words if word not in own]
        jobs = list(enumerate(sweeps.expand(task, whole.hydra.sweeper)))
        above = folders.of_sweep(whole)  # first, so that `now` says the same for all jobs
        checked = [_Job(self, [*own, *words], number, whole, purpose).check(problems) for number, words in jobs]
        places = [(job.folder, str(job.above), job.words) for job in checked if job.folder]
        again = any(job.config is not None and job.config.ckpt_path in ("last", "best") for job in checked)
        problems += folders.check_jobs(above, places, again)
        return checked

    def _whole(self) -> DictConfig:
        """Compose what holds for all jobs: the words without those that are swept over."""
        swept = {word.key_or_group for word in self.words if word.is_sweep_override()}
        if "optim" in swept:  # a model of the user's own may have no file of that name in `optim`
            swept.add("model")
        return self.compose([word for word in self.words if word.key_or_group not in swept])

    def _is_named_by_time(self, whole: DictConfig) -> bool:
        """Return whether what is written has a folder by its name, and a name by the time, which no word sets."""
        given = any(word.key_or_group == "run_name" for word in self.words)
        sent = launchers.is_slurm(whole)  # each turn would send the jobs again
        return not given and not sent and folders.is_named_by_time(whole, self.multirun)

    def _take_params(self, whole: DictConfig, problems: list[Problem]) -> None:
        """Take the sweep of a file (`hydra.sweeper.params`) as if it were typed in front of the other words."""
        params = whole.hydra.sweeper.get("params") or {}
        typed, self.words = self.words, []
        overrides, found = parse([f"{key}={value}" for key, value in params.items()])
        problems += found
        self._take(overrides, problems)
        self.words += typed


def _is_multirun(override: Override) -> bool:
    return override.key_or_group == "hydra.mode" and str(override.value()).upper().endswith("MULTIRUN")


class _Job:
    """One job of a sweep, or the only one (`number`: None)."""

    def __init__(
        self, request: Request, words: Sequence[Override], number: int | None, whole: DictConfig, purpose: Purpose
    ):
        self.request, self.words, self.number, self.whole, self.purpose = request, list(words), number, whole, purpose
        self.typed = {word.key_or_group for word in words}
        self.config: RunConfig | None = None
        self.folder: str | None = None
        self.above: str | None = None

    def check(self, problems: list[Problem]) -> _Job:
        """Compose it and check it; what is wrong is added to `problems`, and then `config` is None."""
        try:
            config, found = self._checked()
        except UserError as error:
            problems += error.problems
            return self
        problems += [finding.problem for finding in found]
        self.config = None if found else config
        return self

    def _checked(self) -> tuple[RunConfig | None, list[Finding]]:
        cfg, config, found = self._built(self.words)
        wrong = {key for finding in found for key in finding.keys}
        if config is None:  # check the other keys against each other, with these as in the files
            cfg, config, _ = self._built([word for word in self.words if word.key_or_group not in wrong])
        if config is None:
            return None, found
        config = config if self.purpose.drawn else run_length.fit_schedule(config, self.typed)
        across = list(check_processes(config, ranks.current(), self.typed, self.number is None))
        config = fit_processes(config, ranks.current(), self.typed)
        across += checks.check(config, but_paths=self.purpose.shown)
        if self.purpose.drawn:
            allowed = list(run_length.misfits(config))
            across = [finding for finding in across if finding not in allowed]
        if not self.purpose.shown:
            across += self._around(cfg, config, {key for finding in across for key in finding.keys})
        if not self.request.refused and not wrong:
            return config, across
        alone = key_paths(RunConfig)  # a key that some choices alone have may be the refused one's
        found = [f for f in found if not (alone.get(f.keys[0]) and self._may_be_refused(f.keys[0]))]
        return config, [*found, *(finding for finding in across if not self._follows(finding, wrong))]

    def _built(self, words: Sequence[Override]) -> tuple[DictConfig, RunConfig | None, list[Finding]]:
        cfg = self.request.compose(words)
        if self.number is not None:
            cfg = copy.deepcopy(cfg)
            sweeps.number(cfg, self.number, self.whole)
        if "${hydra:" in str(cfg):
            HydraConfig.instance().set_config(cfg)
        config, found = parsing.build(RunConfig, composition.resolved(cfg))
        typed = [finding for finding in found if self.typed & set(finding.keys)]
        follow = [finding for finding in found if typed and _value(cfg, finding.keys[0]).startswith("${")]
        return cfg, config, [finding for finding in found if finding in typed or finding not in follow]

    def _around(self, cfg: DictConfig, config: RunConfig, wrong: set[str]) -> list[Finding]:
        """Find what is wrong with the place of the job: its folder, and the other jobs."""
        if "run_name" in wrong:
            return []
        restarted = False if launchers.is_slurm(cfg) else self.purpose.restarted  # its jobs begin afresh
        try:
            self.folder, self.above = folders.of_job(cfg, self.number)
        except UserError as error:
            return [Finding(("hydra.run.dir",), problem) for problem in error.problems]
        named = "run_name" in self.typed or not folders.is_named_by_time(cfg, self.number is not None)
        found = list(folders.check(self.folder, config, self.number is not None, named, restarted))
        if self.number is not None and launchers.is_joblib(cfg.hydra):
            found += launchers.check_joblib(config)
        return found

    def _may_be_refused(self, key: str) -> bool:
        """Return whether a choice that was refused may have set a key."""
        return bool(self.request.refused & {*_WIDE, key.partition(".")[0]})

    def _follows(self, finding: Finding, wrong: set[str]) -> bool:
        """Return whether a finding may only follow from a wrong value, or from a choice that was refused."""
        doubted = (key not in self.typed and self._may_be_refused(key) for key in finding.keys)
        return bool(wrong & set(finding.keys)) or any(doubted)


def _value(cfg: DictConfig, key: str) -> str:
    """Return the value of a key as it is written."""
    return str(value_of(OmegaConf.to_container(cfg, resolve=False), key))


# ---- the number of processes of a job: a launcher's, where one has started them --------------------------------------


def fit_processes(config: RunConfig, place: Ranks, typed: Container[str]) -> RunConfig:
    """Return the configuration with the launcher's number of processes, and a micro-batch that fits its ranks."""
    if place.launcher:
        strategy = "ddp" if place.several else config.trainer.strategy
        options = replace(config.trainer, devices=place.local_world_size, num_nodes=place.nodes, strategy=strategy)
        config = replace(config, trainer=options)
    known = 1 if config.trainer.devices == "auto" else config.trainer.devices * config.trainer.num_nodes
    return run_length.fit_micro_batch(config, known, typed, alone=place.launcher is None)


def continue_from(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration of a run that a launcher has started again: it continues from what `folder` holds.

    If nothing is saved there yet, the run begins as it did.
    """
    saved = any(folder.glob("checkpoints/*/manifest.json"))
    return replace(config, ckpt_path="last", init_from=None) if saved else config


def check_processes(config: RunConfig, place: Ranks, typed: Container[str], alone: bool = True) -> Iterator[Finding]:
    """Find numbers of processes that the launcher has not started, and nodes without a launcher.

    `config` is as it was composed. A run that is not `alone` is a job of a sweep, whose launcher may start nodes.
    """
    options = config.trainer
    if place.launcher is None:
        if alone and options.num_nodes > 1:
            cause = f"trainer.num_nodes={options.num_nodes}, and nothing has started processes on other nodes"
            yield Finding.of("trainer.num_nodes", cause, "torchrun or srun, on every node")
        return
    for key, asked, started in (
        ("trainer.devices", options.devices, place.local_world_size),
        ("trainer.num_nodes", options.num_nodes, place.nodes),
    ):
        if key in typed and asked not in (started, "auto"):
            cause = f"{key}={show(asked)}, and {place.launcher} has started {started}"
            yield Finding.of(key, cause, f"leave {key} out: the number is the launcher's")
