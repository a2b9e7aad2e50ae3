"""The folders of a sweep's jobs: one above all of them, which has the sweep's table, and one for each alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.keys import show

_NAMED, _NUMBERED = "${run_name}", "${run_name}_${hydra:job.num}"


class Place(NamedTuple):
    """Where a job of a sweep will write."""

    number: int
    folder: str
    above: str  # what `hydra.sweep.dir` comes to for this job
    run_name: str
    by_name: bool  # whether `hydra.sweep.dir` is made of `run_name`


def resolved(whole: DictConfig) -> str | None:
    """Return a sweep's folder, resolved first, as Hydra does, so that `now` says the same for all jobs.

    `whole`: what the sweep's words come to without its values. Returns None if that does not resolve: Hydra makes the
    folder before there is a job, and so before `${hydra:...}` is anything.
    """
    try:
        return str(OmegaConf.select(whole, "hydra.sweep.dir"))
    except OmegaConfBaseException:
        return None


def check(own: str | None, places: Sequence[Place], listed: bool) -> list[Finding]:
    """Find jobs that would write outside of `own`, the sweep's folder, or into a folder of another job.

    `listed`: whether `places` are all jobs of the sweep, and not examples of those that a sweeper chooses later.
    """
    return [*_strays(own, places, listed), *_shared(places)]


def _strays(own: str | None, places: Sequence[Place], listed: bool) -> list[Finding]:
    """Find a job whose `hydra.sweep.dir` is not the sweep's: no table and no comparison would find it."""
    stray = next((place for place in places if own is None or not _is_same(own, place.above)), None)
    if stray is None:
        return []
    reason = (
        "only a job has what it is made of" if own is None else f"job {stray.number} would be in {show(stray.above)}"
    )
    reason += "; a sweep has one folder, for all jobs and their table"
    if not stray.by_name:
        remedy = "hydra.sweep.dir=outputs/NAME; what tells the jobs apart can be in hydra.sweep.subdir"
        return [Finding.of("hydra.sweep.dir", f"hydra.sweep.dir: {reason}", remedy)]
    names = [place.run_name for place in places]
    plain = listed and len(set(names)) == len(names) and not any("/" in name for name in names)
    remedy = (
        "run_name=NAME, and the jobs are outputs/NAME/0, 1, ...; for folders by the jobs' names add "
        f"hydra.sweep.dir=outputs/NAME hydra.sweep.subdir='{_NAMED if plain else _NUMBERED}'"
    )
    return [Finding.of("run_name", f"run_name={show(stray.run_name)}: {reason}", remedy)]


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _shared(places: Sequence[Place]) -> list[Finding]:
    """Find jobs that would write into one folder, or into a folder of another job."""
    taken: dict[str, int] = {}
    real = [(place.number, os.path.realpath(place.folder)) for place in places]
    for number, place in sorted(real, key=lambda entry: (entry[1].count(os.sep), entry[0])):
        above = next((str(p) for p in (Path(place), *Path(place).parents) if str(p) in taken), None)
        if above is not None:
            same = "write into one folder" if above == place else "write into a folder of the other's"
            cause = f"hydra.sweep.subdir: jobs {taken[above]} and {number} would {same}, {os.path.relpath(place)}"
            remedy = "leave hydra.sweep.subdir out, or put ${hydra:job.num} into it"
            return [Finding(("hydra.sweep.subdir",), Problem(cause, remedy))]
        taken[place] = number
    return []
