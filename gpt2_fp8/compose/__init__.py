"""From a command line to checked configurations, by Hydra, before anything heavy is imported.

`preflight` composes what Hydra will compose and collects all mistakes. Hydra then composes again and runs the job.
`to_run_config` turns that into the same dataclasses.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from gpt2_fp8.compose import commandline, composition, jobs, processes
from gpt2_fp8.compose.commandline import CommandLine, for_hydra, is_help, quoted
from gpt2_fp8.compose.composition import Catalog, open_catalog
from gpt2_fp8.compose.jobs import TO_RUN, Planned, Purpose
from gpt2_fp8.config import parsing, paths, rank_share, run_length
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks

__all__ = ["Planned", "Purpose", "conf_dir", "configs_of", "hydras_line", "is_help", "look_only", "of_job", "planned",
           "preflight", "quoted", "to_run_config"]  # fmt: skip

log = logging.getLogger(__name__)


def conf_dir() -> Path:
    """Return the folder of this program's YAML files: in an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "conf"
    return inside if (inside / "config.yaml").is_file() else package.parent / "conf"


def preflight(argv: list[str], purpose: Purpose = TO_RUN) -> list[RunConfig]:
    """Return the configurations that a command line (without the program's name) asks for.

    There is one, or with `-m` one for each job. Raises UserError with every problem of every job, each once.
    """
    return [job.config for job in planned(argv, purpose)]


def planned(argv: list[str], purpose: Purpose = TO_RUN) -> list[Planned]:
    """Return the same, each with the folder that it will write into. Raises UserError."""
    line, problems = commandline.read(argv)
    with open_catalog(conf_dir(), line.config_name) as catalog:
        found = jobs.planned(line, catalog, problems, purpose)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return found


def look_only(argv: list[str]) -> list[str]:
    """Check a command line for which `is_help` holds, and return it as Hydra takes it. Raises UserError."""
    line, problems = commandline.read(argv)
    shown, found = commandline.shown(argv)
    problems += found
    completes = {"-sc", "--shell-completion"} & set(argv)  # whose words are Hydra's
    if completes or not (line.words or shown or problems or line.config_dir):
        return argv
    with open_catalog(conf_dir(), line.config_name) as catalog:
        if shown:
            jobs.planned(line, catalog, problems, Purpose(shown=True))
        request = jobs.Request(line, catalog, [] if shown else problems)
        words = [catalog.as_hydra_takes(word) for word in request.words]
    if problems:
        raise UserError(dict.fromkeys(problems))
    return for_hydra(argv, words)


def hydras_line(argv: list[str]) -> list[str]:
    """Return a checked command line as Hydra takes it: its flags first, and values that it would refuse forced."""
    line, _ = commandline.read(argv)
    with open_catalog(conf_dir(), line.config_name) as catalog:
        overrides, _ = commandline.overrides_of(line.words)
        composition.search(line, overrides, catalog)
        return for_hydra(argv, [catalog.as_hydra_takes(word) for word in overrides])


def of_job(argv: list[str], words: list[str], folder: str) -> list[str]:
    """Return the command line of a sweep's job alone: the sweep's flags, the job's words, and its folder."""
    shared = [flag for flag in for_hydra(argv, []) if flag != "--multirun"]
    return [*shared, *words, f"hydra.run.dir={quoted(folder)}"]


def configs_of(line: CommandLine, catalog: Catalog, problems: list[Problem]) -> list[RunConfig]:
    """Return the configurations that a command line asks for, and add what is wrong with it to `problems`."""
    return [job.config for job in jobs.planned(line, catalog, problems)]


def to_run_config(
    cfg: DictConfig, folder: Path | None = None, typed: Container[str] = (), own: Path | None = None
) -> RunConfig:
    """Build the configuration of a job that Hydra composed, which `preflight` has checked.

    Its relative paths begin in `folder`, or in the current folder if that is None. A warm-up and a micro-batch that are
    not among the keys `typed` are fitted to the run, and the log says so. `own` is the run's folder if a launcher has
    started it again: it continues from there. Raises UserError with every problem.
    """
    config, found = parsing.build(RunConfig, OmegaConf.to_container(cfg, resolve=True))
    if config is None:
        raise UserError(dict.fromkeys(finding.problem for finding in found))
    config = config if folder is None else paths.absolute(config, folder)
    before, config = config, run_length.fitted(config, typed)
    config = processes.fitted(config, ranks.current(), typed)
    if ranks.is_first_rank():
        for line in (*run_length.said(before.optim, config), *rank_share.said(before, config)):
            log.info(line)
    return config if own is None else processes.continued(config, own)
