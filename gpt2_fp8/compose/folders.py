"""The folder that a job writes into: whether it is free, and whether the jobs of a sweep have one each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt2_fp8.config import disk, own_words, run_length
from gpt2_fp8.config.errors import Finding, Problem, UserError
from gpt2_fp8.config.keys import key_paths, show, value_of
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import ranks

# What decides a training.
_DECIDES = ("seed", "data.seed", "data.name", "global_batch_size", "document_mask")
_DECIDES_BELOW = ("model.", "precision.", "recipe.", "optim.", "optimizer.", "penalty.")
_MAY_CHANGE = ("ckpt_path=", "run_name=", "trainer.max_")  # words of a sweep that is continued, or made longer


def is_named_by_time(cfg: DictConfig, in_sweep: bool) -> bool:
    """Return whether the folder of a run, or of a sweep, is by its name, and the name by the time."""
    folders: Any = OmegaConf.to_container(cfg.hydra.sweep if in_sweep else cfg.hydra.run, resolve=False)
    name: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, "run_name"), resolve=False)
    return "${run_name}" in str(folders["dir"]) and "${now:" in str(name["run_name"])


def of_job(cfg: DictConfig, number: int | None) -> tuple[str, str]:
    """Return the folder of a job, and of one of a sweep the one above it, else the same. Raises UserError."""
    try:
        if number is None:
            folder = str(OmegaConf.select(cfg, "hydra.run.dir"))
            return folder, folder
        above = str(OmegaConf.select(cfg, "hydra.sweep.dir"))
        return str(Path(above, str(OmegaConf.select(cfg, "hydra.sweep.subdir")))) if above else above, above
    except OmegaConfBaseException as error:
        raise UserError.of(f"{error.full_key}: {str(error).splitlines()[0]}", "correct the ${...}") from None


def of_sweep(whole: DictConfig) -> str | None:
    """Return a sweep's folder, which Hydra resolves before there is a job; None if only a job has what it is made of.

    `whole`: what the sweep's words come to without its values.
    """
    try:
        return str(OmegaConf.select(whole, "hydra.sweep.dir"))
    except OmegaConfBaseException:
        return None


def check(folder: str, config: RunConfig, in_sweep: bool, named: bool, restarted: bool | None) -> Iterator[Finding]:
    """Find what is wrong with the folder of a job.

    `named`: its name is not only the time. `restarted`: it may hold what the run has saved before; None: its launcher
    knows.
    """
    wrong = disk.check_folder(folder, "hydra.sweep.dir" if in_sweep else "hydra.run.dir")
    yield from wrong
    resumes = config.ckpt_path in ("last", "best")
    if resumes and not named:
        cause = f"ckpt_path={config.ckpt_path}: of which run? A run without a name starts in a new, empty folder"
        yield Finding(("ckpt_path", "run_name"), Problem(cause, "add the run_name=NAME of the run to continue"))
    if restarted is None:
        restarted = ranks.current().restarts + ranks.turns_before() > 0
    if not wrong and config.ckpt_path is None and not restarted:
        yield from disk.check_untaken(Path(folder))
    if not wrong and resumes:
        yield from _check_complete(Path(folder), config)


def _check_complete(folder: Path, config: RunConfig) -> Iterator[Finding]:
    """Find what a complete run is continued with that no step would be trained with."""
    found: Any = None
    with suppress(OSError, ValueError):
        found = disk.read_json(folder / "summary.json")
    if not isinstance(found, dict) or found.get("status") != "completed" or config.trainer.fast_dev_run:
        return
    was, limits = found.get("config"), run_length.limits(config)
    if not isinstance(was, dict) or min(limits.values(), default=0) != found.get("steps"):
        return
    keys = [key for key in key_paths(RunConfig) if key in _DECIDES or key.startswith(_DECIDES_BELOW)]
    now = asdict(config)
    changed = [key for key in keys if _has(was, key) and _has(now, key) and value_of(was, key) != value_of(now, key)]
    if changed:
        cause = f"{changed[0]} was {show(value_of(was, changed[0]))}, and the run in {folder} is complete"
        yield Finding(tuple(changed), Problem(f"{cause}: nothing would be trained with another", "a larger limit"))


def _has(node: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def check_jobs(
    own: str | None, jobs: Sequence[tuple[str, str, Sequence[Override]]], continued: bool
) -> Iterator[Problem]:
    """Find jobs that would write outside of `own`, the sweep's folder, or into a folder of another job.

    jobs: of each its folder, the folder above it and its words. `continued`: whether the sweep goes on.
    """
    place = None if own is None else os.path.realpath(own)
    stray = next((above for _, above, _ in jobs if os.path.realpath(above) != place), None)
    if stray is not None:
        cause = f"a sweep has one folder, for all jobs and their table, and a job would be in {show(stray)}"
        yield Problem(f"hydra.sweep.dir: {cause}", "what tells jobs apart can be in hydra.sweep.subdir")
    taken: set[str] = set()
    for real in sorted(os.path.realpath(folder) for folder, _, _ in jobs):  # a folder comes after the one that it is in
        if real in taken or taken & set(map(str, Path(real).parents)):
            cause = f"hydra.sweep.subdir: two jobs would write into {os.path.relpath(real)}"
            yield Problem(cause, "put ${hydra:job.num} into it")
            return
        taken.add(real)
    if continued and own is not None:
        yield from _check_order(Path(own), [[str(word.input_line) for word in words] for _, _, words in jobs])


def _check_order(folder: Path, jobs: list[list[str]]) -> Iterator[Problem]:
    """Find jobs that would go on with what another job has begun: the values stand in another order."""
    with suppress(OSError, ValueError):
        begun = list(map(_telling, own_words.jobs_of_plan(disk.read_json(folder / own_words.PLAN))))
        for number, (was, now) in enumerate(zip(begun, map(_telling, jobs), strict=False)):
            if was != now and now in begun:
                yield Problem(f"ckpt_path: job {number} was {' '.join(sorted(was))}, and would go on as another",
                              "type the sweep's values in the order in which it began")  # fmt: skip
                return


def _telling(words: Sequence[str]) -> set[str]:
    """Return the words that tell a job from another one."""
    plain = [word.lstrip("+") for word in words]
    return {word for word in plain if not word.startswith(("hydra", *_MAY_CHANGE))}
