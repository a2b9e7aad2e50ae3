"""From a command line to checked configurations, by Hydra, before anything heavy is imported.

`preflight` composes what Hydra will compose. Hydra stops at the first mistake; `preflight` collects all of them, and
says what to type instead. Hydra then composes again and runs the job. `to_run_config` turns that into the same
dataclasses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from gpt2_fp8.compose import commandline, jobs, look, processes
from gpt2_fp8.compose.catalog import Catalog, open_catalog
from gpt2_fp8.compose.commandline import CommandLine, flags_first, is_help, of_job, quoted
from gpt2_fp8.compose.job import TO_RUN, Purpose
from gpt2_fp8.compose.request import request_of
from gpt2_fp8.config import checks, parsing, paths, rank_share, run_folder, run_length
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks

__all__ = [
    "Purpose",
    "conf_dir",
    "configs_of",
    "flags_first",
    "is_help",
    "look_only",
    "of_job",
    "planned",
    "preflight",
    "quoted",
    "to_run_config",
]

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
    return [config for config, _ in planned(argv, purpose)]


def planned(argv: list[str], purpose: Purpose = TO_RUN) -> list[tuple[RunConfig, str | None]]:
    """Return the same, each with the folder that it will write into. Raises UserError."""
    if unfit := [
        *run_folder.umask(),
        *(run_folder.current() or run_folder.temporary()),
    ]:  # no folder could be looked at
        raise UserError(unfit)
    line, problems = commandline.read(argv)
    with open_catalog(conf_dir(), line.config_name) as catalog:
        found = _jobs_of(line, catalog, problems, purpose)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return found


def look_only(argv: list[str]) -> list[str]:
    """Check a command line for which `is_help` holds, and return it as Hydra may be given it.

    Raises UserError with every problem. In this mode too, only the command line names code and the environment.
    """
    if unfit := run_folder.current():
        raise UserError(unfit)
    line, problems = commandline.read(argv)
    with open_catalog(conf_dir(), line.config_name) as catalog:
        argv = look.check(argv, line, catalog, problems)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return argv


def configs_of(line: CommandLine, catalog: Catalog, problems: list[Problem]) -> list[RunConfig]:
    """Return the configurations that a command line asks for.

    Problems are added to `problems`, and what they are about is left out.
    """
    return [config for config, _ in _jobs_of(line, catalog, problems, TO_RUN)]


def _jobs_of(
    line: CommandLine, catalog: Catalog, problems: list[Problem], purpose: Purpose
) -> list[tuple[RunConfig, str | None]]:
    catalog.variables |= {name for word in line.words for name in re.findall(r"oc\.env:\s*([^\s,}]+)", word)}
    try:
        request = request_of(line, catalog, problems)
        return jobs.configs(request, catalog, problems, purpose)
    except UserError as error:  # the choices do not compose, so there is nothing to check
        problems += error.problems
        return []


def to_run_config(
    cfg: DictConfig, folder: Path | None = None, typed: Container[str] = (), own: Path | None = None
) -> RunConfig:
    """Build the configuration of a job that Hydra composed.

    Its relative paths begin in `folder`, or in the current folder if that is None. A warm-up and a micro-batch that are
    not among the keys `typed` are fitted to the run, and the log says so. `own` is the run's folder if a launcher has
    started it again: it continues from there. Raises UserError with every problem.
    """
    data = OmegaConf.to_container(cfg, resolve=True)
    config, found = parsing.build(RunConfig, data)
    if config is not None:
        config = config if folder is None else paths.absolute(config, folder)
        before, config = config, run_length.fitted(config, typed)
        config = processes.fitted(config, ranks.current(), typed)
        if ranks.is_first_rank():
            for line in (*run_length.said(before.optim, config), *rank_share.said(before, config)):
                log.info(line)
        found = checks.check(config)
    if found:
        raise UserError(dict.fromkeys(finding.problem for finding in found))
    assert config is not None
    return config if own is None else processes.continued(config, own)
