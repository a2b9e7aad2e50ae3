"""From a sorted request to the checked configuration of each job."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from gpt2_fp8.compose import sweeps
from gpt2_fp8.compose.catalog import Catalog
from gpt2_fp8.compose.commandline import CommandLine
from gpt2_fp8.compose.overrides import Request, is_group, sort
from gpt2_fp8.config import checks, hydra_policy, parsing, paths, run_folder
from gpt2_fp8.config.errors import Finding, Problem, UserError
from gpt2_fp8.config.parsing import show
from gpt2_fp8.config.schema import RunConfig

# Set by whatever starts one process a GPU itself (torchrun, SLURM), so that Lightning does not start more.
_LAUNCHED_OUTSIDE = ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS")


def configs(request: Request, catalog: Catalog, problems: list[Problem]) -> list[RunConfig]:
    """One configuration a job. The problems of all jobs are added to `problems`; a job that has any is left out.

    Raises UserError where the choices do not compose.
    """
    settings = catalog.compose(request.hydra).cfg.hydra
    task = [request.task]
    numbers: list[int | None] = [None]
    if request.multirun or str(settings.mode).endswith("MULTIRUN"):
        task = sweeps.expand([*_params(settings, catalog, problems), *request.task])
        numbers = list(range(len(task)))
        if word := sweeps.say(len(task)):
            print(word, file=sys.stderr, flush=True)
    done, folders = [], []
    for number, overrides in zip(numbers, task, strict=True):
        job = Job(request, catalog, overrides, number)
        config, found = job.check()
        problems += found
        done += [config] if config and not found else []
        folders += [(number, job.folder)] if number is not None and job.folder is not None else []
    problems += [finding.problem for finding in sweeps.shared_folders(folders)]
    return done


def _params(settings: DictConfig, catalog: Catalog, problems: list[Problem]) -> list[Override]:
    """What `hydra.sweeper.params` sweeps over, checked as if it stood on the command line. Raises UserError."""
    params = settings.sweeper.get("params") or {}
    words = [f"{key}={value}" for key, value in params.items()]
    request = sort(CommandLine(words, multirun=True), catalog, problems)
    if request.hydra:
        raise UserError.of(f"{request.hydra[0]}: Hydra's own settings are not swept over", "give it by itself")
    return request.task


class Job:
    """One job: its choices composed, its values set, and all checked that its mistakes leave standing."""

    def __init__(self, request: Request, catalog: Catalog, overrides: list[Override], number: int | None):
        self.request, self.catalog, self.number = request, catalog, number
        groups = [str(o.input_line) for o in overrides if is_group(o, catalog)]
        self.base, self.plain_base = catalog.compose([*request.hydra, *groups])
        self.values = [o for o in overrides if not is_group(o, catalog)]
        own = {key: value for key, value in self.plain_base.items() if key != "hydra"}
        self.reads_hydra = "${hydra:" in f"{own} {overrides}"
        self.found: list[Finding] = []
        self.dropped: set[str] = set()
        self.unresolved: list[str] = []
        self.folder: str | None = None  # where it will write

    def absent(self, found: list[Finding]) -> list[Finding]:
        """Values without a + for keys that the choices lack: Hydra refuses them, though the key be one of ours.

        Without what `found` says of such a key already.
        """
        told = {key for finding in found for key in finding.keys}
        values = [o for o in self.values if not (o.is_add() or o.is_force_add() or told & set(above(o.key_or_group)))]
        lacking = [o for o in values if not _lookup(self.plain_base, o.key_or_group)[0]]
        return [Finding((o.key_or_group,), _lacking(o)) for o in lacking]

    def composed(self) -> tuple[DictConfig, dict[str, Any]]:
        """The configuration with the values that could be set, and the same as plain values; see `found`.

        Raises UserError where these would have no end.
        """
        cfg = self._copy()
        self.values = [o for o in self.values if self._set(cfg, o)]
        self.catalog.check_references(cast("dict[str, Any]", OmegaConf.to_container(cfg, resolve=False)))
        return cfg, self._plain(cfg)

    def check(self) -> tuple[RunConfig | None, list[Problem]]:
        """The configuration, where there is one, and everything wrong with it but what follows from other mistakes."""
        cfg, plain = self.composed()
        config, found = parsing.build(RunConfig, plain)
        self.found += [*found, *self.absent(found)]
        if config is None:  # look across the other keys all the same, with these as they were
            self.dropped |= {key for finding in found for key in finding.keys}
            cfg = self._copy()
            for override in self.values:
                if override.key_or_group not in self.dropped:
                    self._set(cfg, override)
            config, _ = parsing.build(RunConfig, self._plain(cfg))
        if config is not None:
            across = checks.check(config)
            across += self._surroundings(cfg, config, {key for finding in across for key in finding.keys})
            self.found += [f for f in across if not any(map(self._doubts, f.keys))]
        wrong = {key for finding in self.found for key in finding.keys}
        said = [f for f in self.found if not any(self._follows(key) in wrong for key in f.keys)]
        return config, [finding.problem for finding in said]

    def _copy(self) -> DictConfig:
        cfg = copy.deepcopy(self.base)
        if self.number is not None:
            with open_dict(cfg.hydra):
                cfg.hydra.job.num, cfg.hydra.job.id = self.number, str(self.number)
        return cfg

    def _set(self, cfg: DictConfig, override: Override) -> bool:
        """Set one value, known or not: `typed` speaks of unknown keys. False if it makes no sense to."""
        key, line = override.key_or_group, str(override.input_line)
        there, _ = _lookup(self.plain_base, key)
        if not there and self.request.doubts(key) and key in parsing.key_paths(RunConfig):
            return False  # it may belong to the choice that was refused
        parent = key
        while not _lookup(self.plain_base, parent)[0]:
            parent = parent.rpartition(".")[0]
        if not there and not isinstance(_lookup(self.plain_base, parent)[1], (dict, list)):
            return self._report(key, f"there is no key {key}: {parent} is a single value", f"{parent}=VALUE")
        if there and override.is_add():
            return self._report(key, f"{line}: {key} has a value already", f"{line.lstrip('+')}, without the +")
        try:
            OmegaConf.update(cfg, key, override.value(), merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, IndexError, AssertionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            return self._report(key, f"{line} cannot be set: {reason}", f"set the whole of {parent or key}")
        return True

    def _plain(self, cfg: DictConfig) -> dict[str, Any]:
        """The job's own part, with every `${...}` resolved; what does not resolve goes back to what it was."""
        for _ in range(len(self.values) + 1):
            if self.reads_hydra:  # slow, and rare
                HydraConfig.instance().set_config(cfg)
            try:
                plain = OmegaConf.to_container(OmegaConf.masked_copy(cfg, _own_keys(cfg)), resolve=True)
            except OmegaConfBaseException as error:
                key, reason = str(error.full_key), str(error).splitlines()[0]
                self.unresolved.append(key)
                self._report(key, f"{key}: {reason}", "correct the ${...}, or write \\${ for the signs themselves")
                if not any(o.key_or_group == key for o in self.values):
                    break
                OmegaConf.update(cfg, key, _lookup(self.plain_base, key)[1], force_add=True)
                self.values = [o for o in self.values if o.key_or_group != key]
            else:
                assert isinstance(plain, dict)
                return {str(name): value for name, value in plain.items()}
        raise UserError(finding.problem for finding in self.found)

    def _folder(self, cfg: DictConfig, setting: str) -> str:
        """Where Hydra will put the job. Raises OmegaConfBaseException."""
        if self.number is not None and self.request.said is not None:
            OmegaConf.set_cache(cfg, self.request.said)  # what `now` said in `hydra.sweep.dir` holds for all jobs
        folder = str(OmegaConf.select(cfg, setting))
        if self.number is None or not folder:
            return folder
        self.request.said = self.request.said or copy.deepcopy(OmegaConf.get_cache(cfg))
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(cfg)  # for ${hydra:job.num}
        try:
            return str(Path(folder, str(OmegaConf.select(cfg, "hydra.sweep.subdir"))))
        finally:
            HydraConfig.instance().cfg = before

    def _doubts(self, key: str) -> bool:
        """Whether the value that a check saw may not be the one that was meant."""
        given = any(o.key_or_group == key for o in self.values)
        return key in self.dropped or (self.request.doubts(key) and not given)

    def _follows(self, key: str) -> str | None:
        """The key that another takes its value from (`data.seed: ${seed}`), where it was left to."""
        reference = re.fullmatch(r"\$\{([\w.]+)\}", str(_lookup(self.plain_base, key)[1]))
        return reference[1] if reference and not any(o.key_or_group == key for o in self.values) else None

    def _report(self, key: str, cause: str, remedy: str) -> bool:
        self.found.append(Finding((key,), Problem(cause, remedy)))
        self.dropped.add(key)
        return False

    def _surroundings(self, cfg: DictConfig, config: RunConfig, bad: set[str]) -> Iterator[Finding]:
        """What only Hydra knows: the run's folder, and that there are several jobs. `bad`: keys known to be wrong."""
        yield from hydra_policy.check_values(lambda key: _hydra_value(cfg, key))
        setting = "hydra.run.dir" if self.number is None else "hydra.sweep.dir"
        by_name = "${run_name}" in str(_lookup(self.plain_base, setting)[1])
        if not (by_name and "run_name" in bad):
            try:
                self.folder = self._folder(cfg, setting)
            except OmegaConfBaseException as error:
                yield Finding((setting,), Problem(f"{setting}: {str(error).splitlines()[0]}", "correct the ${...}"))
            else:
                key = "run_name" if by_name else setting
                wrong = paths.check_folder(self.folder, setting, key)
                yield from wrong
                own = Path(self.folder)
                problems = [] if wrong else run_folder.check(own, *_file_names(cfg))
                if self.number is not None:
                    problems += run_folder.check_sweep(Path(str(OmegaConf.select(cfg, setting))))
                yield from (Finding((key,), problem) for problem in problems)
                if config.ckpt_path is None and not wrong:
                    yield from paths.check_untaken(own)
        named = any(o.key_or_group == "run_name" for o in self.values)
        if config.ckpt_path in ("last", "best") and by_name and not named and "${now:" in self.plain_base["run_name"]:
            cause = f"ckpt_path={config.ckpt_path}: of which run? A run without a name starts in a new, empty folder"
            yield Finding(("ckpt_path", "run_name"), Problem(cause, "add the run_name=NAME of the run to continue"))
        if self.number is not None and _starts_processes(cfg, config):
            values = f"trainer.devices={show(config.trainer.devices)}, trainer.num_nodes={config.trainer.num_nodes}"
            cause = f"{values} in a sweep: each process would start the whole sweep again"
            remedy = "sweep with trainer=gpu, a GPU a job; or start the runs one by one, without -m"
            yield Finding(("trainer.devices", "trainer.num_nodes"), Problem(cause, remedy))


def _lacking(override: Override) -> Problem:
    return Problem(
        f"{override.input_line}: none of the files that were chosen has {override.key_or_group}",
        f"+{override.input_line}, to add it",
    )


def above(key: str) -> list[str]:
    """`a.b.c`, `a.b` and `a`."""
    parts = key.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _file_names(cfg: DictConfig) -> tuple[str | None, str | None]:
    """What Hydra writes into a run's folder: the log's name, and that of the folder of its settings."""
    job = OmegaConf.select(cfg, "hydra.job.name", throw_on_missing=False) or "run"
    settings = OmegaConf.select(cfg, "hydra.output_subdir")
    return f"{job}.log", None if settings is None else str(settings)


def _starts_processes(cfg: DictConfig, config: RunConfig) -> bool:
    """Whether Lightning would start this very command again for its other devices."""
    trainer = config.trainer
    one = trainer.devices == 1 or (trainer.devices == "auto" and trainer.accelerator == "cpu")
    basic = str(cfg.hydra.launcher.get("_target_", "")).endswith("BasicLauncher")
    return not (one and trainer.num_nodes == 1) and basic and not any(name in os.environ for name in _LAUNCHED_OUTSIDE)


def _hydra_value(cfg: DictConfig, key: str) -> Any:
    """A setting of Hydra's as a plain value, None where there is none or it does not resolve."""
    try:
        value = OmegaConf.select(cfg, key)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return None


def _own_keys(cfg: DictConfig) -> list[Any]:
    return [key for key in cfg if key != "hydra"]


def _lookup(node: Any, key: str) -> tuple[bool, Any]:
    """Whether a plain configuration has a key, and its value as it is written, `${...}` and all."""
    for part in filter(None, key.split(".")):
        if isinstance(node, dict) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return False, None
    return True, node
