"""The checked configuration of each job that a command line asks for."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from gpt2_fp8.compose import composition, folders, parallel, processes, slurm_sweep, sweeps
from gpt2_fp8.compose.commandline import CommandLine, overrides_of, parsed
from gpt2_fp8.compose.composition import Catalog
from gpt2_fp8.config import checks, parsing, run_length
from gpt2_fp8.config.errors import Finding, Problem, UserError
from gpt2_fp8.config.keys import key_paths, value_of
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks

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
        overrides, found = overrides_of(line.words)
        found += composition.search(line, overrides, catalog)
        self.multirun, self.catalog = line.multirun or any(map(_is_multirun, overrides)), catalog
        self.words: list[Override] = []
        self.refused: set[str] = set()
        self.take(overrides, found)
        problems += found

    def take(self, overrides: Iterable[Override], problems: list[Problem]) -> None:
        """Add the overrides with which nothing is wrong, and to `problems` what is wrong with the others."""
        for override in overrides:
            override.config_loader = self.catalog  # type: ignore[assignment]
            found = list(composition.refuse(override, self.catalog, self.multirun))
            if not found and override.key_or_group != "hydra.searchpath":
                self.words.append(override)
            elif found and self.catalog.is_group(override):
                self.refused.add(override.key_or_group)
            problems += found

    def compose(self, words: Sequence[Override]) -> DictConfig:
        """Compose words of the request, or of a job of it. Raises UserError."""
        return self.catalog.compose([self.catalog.as_hydra_takes(word) for word in words])


def planned(line: CommandLine, catalog: Catalog, problems: list[Problem], purpose: Purpose = TO_RUN) -> list[Planned]:
    """Return the jobs of a command line, and add what is wrong with it to `problems`."""
    try:
        return _planned(Request(line, catalog, problems), problems, purpose)
    except UserError as error:  # what all jobs have in common does not compose
        problems += error.problems
        return []


def _planned(request: Request, problems: list[Problem], purpose: Purpose) -> list[Planned]:
    whole = _whole(request)
    request.multirun = request.multirun or str(whole.hydra.mode).endswith("MULTIRUN")
    if purpose.name is not None and _is_named_by_time(whole, request):
        request.words.append(parsed(f"run_name={purpose.name}"))
        whole = _whole(request)
    jobs: list[tuple[int | None, list[Override]]] = [(None, request.words)]
    if request.multirun:
        if inside := list(parallel.inside_ranks()):
            problems += inside
            return []
        own = [word for word in request.words if word.is_hydra_override() or word.key_or_group.startswith("hydra/")]
        _take_params(whole, request, problems)
        task = [word for word in request.words if word not in own]
        jobs = [(n, [*own, *words]) for n, words in enumerate(sweeps.expand(task, whole.hydra.sweeper))]
        if len(jobs) > sweeps.ANNOUNCED:
            print(f"checking {len(jobs):,} jobs, before the first of them begins", file=sys.stderr, flush=True)
    above = folders.of_sweep(whole) if request.multirun else None  # first, so that `now` says the same for all jobs
    checked = [_Job(request, words, number, whole, purpose).check(problems) for number, words in jobs]
    if request.multirun:
        places = [(job.folder, str(job.above), job.words) for job in checked if job.folder]
        again = any(job.config is not None and job.config.ckpt_path in ("last", "best") for job in checked)
        problems += folders.of_jobs(above, places, again)
    configs = [job.config for job in checked if job.config is not None]
    problems += slurm_sweep.check(whole, configs, request.multirun)
    problems += slurm_sweep.lacking(whole, request.multirun) if purpose.begins else ()
    return [Planned(job.config, job.folder) for job in checked if job.config is not None]


def _whole(request: Request) -> DictConfig:
    """Compose what holds for all jobs: the words without those that are swept over."""
    swept = {word.key_or_group for word in request.words if word.is_sweep_override()}
    words = [word for word in request.words if word.key_or_group not in swept]
    if "optim" in swept:  # a model of the user's own may have no file of that name in `optim`
        words = [word for word in words if word.key_or_group != "model"]
    return request.compose(words)


def _is_named_by_time(whole: DictConfig, request: Request) -> bool:
    """Return whether what is written has a folder by its name, and a name by the time, which no word sets."""
    given = any(word.key_or_group == "run_name" for word in request.words)
    sent = slurm_sweep.is_chosen(whole)  # each turn would send the jobs again
    return not given and not sent and folders.is_named_by_time(whole, request.multirun)


def _take_params(whole: DictConfig, request: Request, problems: list[Problem]) -> None:
    """Take the sweep of a file (`hydra.sweeper.params`) as if it were typed in front of the other words."""
    params = whole.hydra.sweeper.get("params") or {}
    typed, request.words = request.words, []
    overrides, found = overrides_of([f"{key}={value}" for key, value in params.items()])
    problems += found
    request.take(overrides, problems)
    request.words += typed


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
        config = config if self.purpose.drawn else run_length.fitted(config, self.typed)
        across = list(processes.check(config, ranks.current(), self.typed, self.number is None))
        config = processes.fitted(config, ranks.current(), self.typed)
        across += checks.check_but_paths(config) if self.purpose.shown else checks.check(config)
        if self.purpose.drawn:
            allowed = list(run_length.misfits(config))
            across = [finding for finding in across if finding not in allowed]
        if not self.purpose.shown:
            across += self._around(cfg, config, {key for finding in across for key in finding.keys})
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
        restarted = False if slurm_sweep.is_chosen(cfg) else self.purpose.restarted  # its jobs begin afresh
        place = folders.Place(cfg, config, self.number, self.typed, restarted)
        found = list(place.check())
        self.folder, self.above = place.folder, place.above
        if self.number is not None and parallel.is_chosen(cfg.hydra):
            found += parallel.check_job(config)
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
