"""Checks before Hydra only shows something: `--help`, `--hydra-help`, `--cfg`, `--info`, completion.

Hydra composes whatever a settings folder holds, and for `--help` configures logging from it. So folders, choices and
keys are checked as for a run, and before `--cfg` values too. Paths are not: it may be for another machine.
"""

from __future__ import annotations

import argparse
import os

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from gpt2_fp8.compose import commandline
from gpt2_fp8.compose.catalog import Catalog
from gpt2_fp8.compose.commandline import CommandLine
from gpt2_fp8.compose.composer import Composer, above
from gpt2_fp8.compose.job import Job
from gpt2_fp8.compose.request import request_of
from gpt2_fp8.config import checks, parsing, run_length
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.keys import key_paths
from gpt2_fp8.config.schema import RunConfig

_SHOW = ("--run", "--multirun", "--cfg", "--info", "--shell-completion")  # Hydra takes only one of them


def check(argv: list[str], line: CommandLine, catalog: Catalog, problems: list[Problem]) -> list[str]:
    """Return the command line that Hydra may be given. What is wrong with it is added to `problems`."""
    args = commandline.flags(argv)
    if args.shell_completion:
        problems += _completion(line, catalog)
        return argv
    problems += _contradictions(args)
    try:
        request = request_of(line, catalog, problems)
        if not problems:
            composer = Composer(request, catalog)
            problems += _composition(composer, [*request.hydra, *request.task], args)
    except UserError as error:
        problems += error.problems
    return commandline.shown_by_hydra(args)


def _contradictions(args: argparse.Namespace) -> list[Problem]:
    given = [flag for flag in _SHOW if getattr(args, flag.lstrip("-").replace("-", "_"))]
    if len(given) > 1:
        return [Problem(f"{' and '.join(given)} cannot be had together", f"leave out all but one: {given[-1]}")]
    return commandline.without_effect(args)


def _composition(composer: Composer, words: list[Override], args: argparse.Namespace) -> list[Problem]:
    """Check that there is something to show: keys that exist, and for `--resolve` what they refer to."""
    job = Job(composer, words)
    cfg, plain = job.composed()
    known = key_paths(RunConfig)
    config, found = parsing.build(RunConfig, plain)
    unseen = () if args.resolve else composer.unresolved
    problems = [finding.problem for finding in composer.found if not set(finding.keys) & set(unseen)]
    absent = job.absent([])  # Hydra would refuse to show these
    problems += [f.problem for f in job.absent(found)]
    told = {part for finding in absent for part in above(finding.keys[0])}
    shown = args.cfg in ("job", "all")
    problems += [f.problem for f in job.causes(found) if shown or set(f.keys) & told or not set(f.keys) & set(known)]
    if shown and config is not None and not problems:
        config = run_length.fitted(config, job.typed)
        problems += [finding.problem for finding in checks.check_but_paths(config)]
    if args.package and args.package != "_global_" and OmegaConf.select(cfg, args.package) is None:
        problems.append(Problem(f"--package {args.package}: there is none in this configuration", "--package trainer"))
    return problems


def _completion(line: CommandLine, catalog: Catalog) -> list[Problem]:
    """Check the folders of a line that is still being typed. The shell has it in a variable, and Hydra composes it."""
    typed_so_far = os.environ.get("COMP_LINE", "").split()
    folders = [word.partition("=")[2].strip("[]'\"") for word in typed_so_far if word.startswith("hydra.searchpath=")]
    several = [folder.strip("'\" ") for folders_ in folders for folder in folders_.split(",")]
    return catalog.add_folders([folder for folder in [line.config_dir, *several] if folder])
