"""The checked configuration of each job that a request makes."""

from __future__ import annotations

import sys
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from gpt2_fp8.compose import parallel, slurm_sweep, surroundings, sweep_again, sweep_folders, sweeps
from gpt2_fp8.compose.catalog import Catalog
from gpt2_fp8.compose.composer import Composer, lookup
from gpt2_fp8.compose.job import Job, Purpose
from gpt2_fp8.compose.override_parser import parse, parsed
from gpt2_fp8.compose.request import Request, take
from gpt2_fp8.config import slurm_launcher
from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.schema import RunConfig


def configs(
    request: Request, catalog: Catalog, problems: list[Problem], purpose: Purpose
) -> list[tuple[RunConfig, str | None]]:
    """Return the configuration and the folder of each job without problems, and add all problems to `problems`.

    Raises UserError if the choices do not compose.
    """
    composer = Composer(request, catalog)
    whole, plain = _whole(composer, request)
    multirun = request.multirun or str(whole.hydra.mode).endswith("MULTIRUN")
    if purpose.name is not None and _is_named_by_time(plain, request, multirun):
        request.task.append(parsed(f"run_name={purpose.name}"))
        whole, _ = _whole(composer, request)
    jobs: list[tuple[int | None, list[Override]]] = [(None, request.task)]
    if multirun:
        if inside := list(parallel.inside_ranks()):
            problems += inside
            return []
        params = _params(whole.hydra, request, catalog, problems)
        jobs = list(enumerate(sweeps.expand([*params, *request.task], whole.hydra.sweeper)))
        if len(jobs) > sweeps.ANNOUNCED:
            print(f"checking {len(jobs):,} jobs, before the first of them begins", file=sys.stderr, flush=True)
    own = sweep_folders.resolved(whole) if multirun else None
    done, places, again = [], [], []
    for number, words in jobs:
        job = Job(composer, [*request.hydra, *words], number, whole, purpose)
        config, found = job.check()
        problems += found
        done += [(config, job.folder)] if config and not found else []
        if job.place is not None:
            places.append(job.place)
            again += [(job.place, words)] if config and config.ckpt_path in ("last", "best") else []
    listed = sweeps.is_basic(whole.hydra.sweeper)
    apart = [*sweep_folders.check(own, places, listed), *(sweep_again.check(again) if listed else ())]
    problems += [finding.problem for finding in [*composer.found, *apart]]
    problems += slurm_sweep.check(whole, [config for config, _ in done], multirun)
    problems += slurm_sweep.lacking(whole, multirun) if purpose.begins else ()
    return [] if composer.found else done


def _whole(composer: Composer, request: Request) -> tuple[DictConfig, dict[str, Any]]:
    """Compose what holds for all jobs: the words without those that are swept over. The second is as plain values."""
    swept = {word.key_or_group for word in request.task if word.is_sweep_override()}
    words = [word for word in request.task if word.key_or_group not in swept]
    if "optim" in swept:  # a model of the user's own may have no file of that name in `optim`
        words = [word for word in words if word.key_or_group != "model"]
    composed = composer.compose([*request.hydra, *words])[0]
    return composed.cfg, composed.plain


def _is_named_by_time(plain: dict[str, Any], request: Request, multirun: bool) -> bool:
    """Return whether what is written has a folder by its name, and a name by the time, which no word sets."""
    given = any(word.key_or_group == "run_name" for word in request.task)
    sent = slurm_launcher.is_chosen(lookup(plain, "hydra.launcher._target_")[1])  # each turn would send the jobs again
    return not given and not sent and surroundings.is_named_by_time(plain, multirun)


def _params(settings: DictConfig, request: Request, catalog: Catalog, problems: list[Problem]) -> list[Override]:
    """Return the overrides of `hydra.sweeper.params`, checked as if they were typed. Raises UserError."""
    params = settings.sweeper.get("params") or {}
    words, found = parse([f"{key}={value}" for key, value in params.items()], catalog)
    problems += found
    for word in words:
        if word.is_hydra_override() or word.key_or_group.partition(".")[0] == "plugins":
            cause = f"{word.input_line}: Hydra's own settings and plugins are not swept over"
            raise UserError.of(cause, "give it by itself")
    taken = Request(multirun=True, own_sweeper=request.own_sweeper)
    take(words, taken, catalog, problems)
    request.refused_groups |= taken.refused_groups
    return taken.task
