"""From a command line to checked configurations, by Hydra, before anything heavy is imported.

`plan` composes what Hydra will compose and collects all mistakes. Hydra then composes again and runs the job.
`to_run_config` turns that into the same dataclasses.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from omegaconf import DictConfig, OmegaConf

from gpt2_fp8.compose import jobs
from gpt2_fp8.compose.commandline import CommandLine, read
from gpt2_fp8.compose.composition import conf_dir, open_catalog
from gpt2_fp8.compose.jobs import TO_RUN, PlannedJob, Purpose
from gpt2_fp8.config import own_words, parsing, run_length
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.shown import quote
from gpt2_fp8.runtime import programs, ranks, registry

__all__ = ["PlannedJobs", "Purpose", "conf_dir", "help_text", "load_config", "look_only", "of_job", "plan",
           "plan_run", "preflight", "read", "to_run_config"]  # fmt: skip

log = logging.getLogger(__name__)
# What only `python -m gpt2_fp8.run` reads: a Trainer of one's own has arguments for it.
_READ_BY_RUN = re.compile(
    r"(run_name|hydra|ckpt_path|callbacks|logger|trainer\.(strategy|val_check_interval|log_every_n_steps|deterministic"
    r"|fast_dev_run|profiler|max_time|max_restarts))\b"
)


class PlannedJobs(NamedTuple):
    """A command line that was checked: its jobs, whether they are a sweep's, and its words as Hydra takes them."""

    jobs: list[PlannedJob]
    multirun: bool
    words: list[str]


def plan(line: CommandLine, purpose: Purpose = TO_RUN) -> PlannedJobs:
    """Check every job of a command line. Raises UserError with every problem, each once."""
    problems = list(line.problems)
    with open_catalog(line.config_name) as catalog:
        request = jobs.Request(line, catalog, problems)
        planned = request.plan(problems, purpose)
        words = [*line.flags, *(catalog.as_hydra_takes(override) for override in line.overrides)]
    if problems:
        raise UserError(problems)
    return PlannedJobs(planned, request.multirun, words)


def plan_run(line: CommandLine, lasting: str | None, rendezvous: Callable[[], Any]) -> PlannedJobs:
    """Check the command line of one process of a run. Raises UserError with everything that is wrong with it.

    `lasting`: the name for a run whose batch job SLURM may start again. `rendezvous` imports torch and returns
    `runtime.rendezvous`. It is called for processes that a launcher has started, when their command line is checked,
    but for the folder: an earlier generation of processes may have made it.
    """
    place, purpose = ranks.current(), Purpose(begins=True, name=lasting)
    if place.launcher is None:
        return _name(plan(line, purpose), line, lasting)
    found = plan(line, purpose._replace(restarted=True))
    if not place.rank:
        _say(f"{programs.VERSION}: loading torch, to meet the other ranks")
    met = rendezvous().join(place)
    if not met.again and not ranks.turns_before():
        found = plan(line, purpose._replace(restarted=False))
    found = _name(found, line, lasting)
    if len(found.jobs) == 1:
        folder = met.folder(found.jobs[0].folder)
        if place.rank or not own_words.keys(found.words) & {"run_name", "hydra.run.dir"}:
            found.words.append(f"hydra.run.dir={quote(folder)}")
        if place.rank:  # rank 0 writes the log and the settings
            found.words.extend([f"hydra.job.name=rank_{place.rank}", "hydra.output_subdir=null"])
    return found


def _name(found: PlannedJobs, line: CommandLine, lasting: str | None) -> PlannedJobs:
    """Add the lasting name to the words, if the jobs took it."""
    given = any(override.key_or_group == "run_name" for override in line.overrides)
    if lasting is not None and not given and any(config.run_name == lasting for config, _ in found.jobs):
        if ranks.is_first_rank():
            _say(f"SLURM may start this job again: run_name={lasting}, which lasts as long as it")
        found.words.append(f"run_name={lasting}")
    return found


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def preflight(argv: list[str], purpose: Purpose = TO_RUN) -> list[RunConfig]:
    """Return the configuration of each job of a command line. Raises UserError with every problem."""
    return [job.config for job in plan(read(argv), purpose).jobs]


def help_text(line: CommandLine) -> str:
    """Return the text of `--help`, with the groups of the user's own folder."""
    template = yaml.safe_load((conf_dir() / "config.yaml").read_text())["hydra"]["help"]["template"]
    folders = [conf_dir(), *([Path(line.config_dir)] if line.config_dir else [])]
    choices = sorted({(file.parent.name, file.stem) for folder in folders for file in folder.glob("*/*.yaml")})
    groups = {group: ", ".join(name for of, name in choices if of == group) for group, _ in choices if group != "hydra"}
    return str(template).replace("$APP_CONFIG_GROUPS", "".join(f"{group}: {groups[group]}\n" for group in groups))


def look_only(line: CommandLine) -> list[str]:
    """Check a command line that asks Hydra to show something, and return it as Hydra takes it. Raises UserError."""
    if line.shows == "cfg":
        return plan(line, Purpose(shown=True)).words
    if line.problems:
        raise UserError(line.problems)
    return [*line.flags, *(str(override.input_line) for override in line.overrides)]


def of_job(argv: list[str], words: list[str], folder: str) -> list[str]:
    """Return the command line of a sweep's job alone: the sweep's flags, the job's words, and its folder."""
    shared = [flag for flag in read(argv).flags if flag != "--multirun"]
    return [*shared, *words, f"hydra.run.dir={quote(folder)}"]


def to_run_config(cfg: DictConfig, typed: Container[str] = (), own: Path | None = None) -> RunConfig:
    """Build the configuration of a job that Hydra composed, which `plan` has checked. Raises UserError.

    What of it is not `typed` is fitted to the run. `own`: its folder, if a launcher has started it again.
    """
    config, found = parsing.build(RunConfig, OmegaConf.to_container(cfg, resolve=True))
    if config is None:
        raise UserError(found)
    before = run_length.fit_length(config, typed)
    config = run_length.fit_schedule(before, typed)
    config = jobs.fit_processes(config, ranks.current(), typed)
    if ranks.is_first_rank():
        for text in run_length.describe_schedule(before.optim, config):
            log.info(text)
        for text in run_length.describe_micro_batch(before, config):
            log.info(text)
    return config if own is None else jobs.continue_from(config, own)


def load_config(*words: str) -> RunConfig:
    """Compose the configuration of a script or a notebook that brings its own Lightning Trainer.

    `words` are what `python -m gpt2_fp8.run` would be given, as `"model=gpt2"`; `"-cd", FOLDER` adds settings of your
    own. Raises UserError with every problem at once, also for keys that only the program reads, an `auto` that only
    the program decides, and last for a plugin that cannot be imported.
    """
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise UserError.of(f"{wrong[0]!r} is no override in text", 'load_config("model=tiny", "seed=1")')
    line = read(list(words))
    keys = {word.key_or_group: str(word.input_line) for word in line.overrides}
    problems = [_read_by_run(word) for key, word in keys.items() if _READ_BY_RUN.match(key)]
    if line.multirun or line.shows:
        raise UserError.of("-m: load_config gives one configuration, and takes no flag that shows something")
    try:
        config = plan(line).jobs[0].config
    except UserError as error:
        raise UserError([*problems, *error.problems]) from None
    if config.micro_batch_size == "auto":  # a choice of several keys (`debug=fdr`) may have set it
        problems.append(_read_by_run("micro_batch_size=auto"))
    names = ("max_epochs", "fast_dev_run", "profiler", "max_time", "max_restarts")
    values = {key: getattr(config.trainer, key) for key in names}
    problems += [_read_by_run(f"trainer.{key}={show(value)}") for key, value in values.items() if value]
    if problems:
        raise UserError(problems)
    registry.load(config.plugins, Path.cwd())
    return config


def _read_by_run(word: str) -> Problem:
    return Problem(f"{word}: only python -m gpt2_fp8.run reads it", "leave it out, and give it to your Trainer")
