"""How many jobs a sweep has, which job goes into which folder, and the words of each."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from pathlib import Path

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from gpt2_fp8.compose.commandline import parsed_once
from gpt2_fp8.config.errors import Finding, Problem, UserError

MOST = 1000  # jobs; each is composed and checked before the first begins, by us and by Hydra
_WORTH_A_WORD = 50


def length(override: Override) -> float:
    """How many values an override goes through, told without making them."""
    sweep = override.value()
    if isinstance(sweep, RangeSweep):
        start, stop, step = (float(number or 0) for number in (sweep.start, sweep.stop, sweep.step))
        if step == 0 or not math.isfinite(start) or not math.isfinite(stop):
            return math.inf
        return max(0, math.ceil((stop - start) / step))
    if isinstance(sweep, ChoiceSweep):
        return len(sweep.list)
    return 1  # and a glob's of what is there


def too_many(what: str, jobs: float) -> Problem:
    """The problem of a sweep that would only be checked for hours."""
    number = f"{jobs:,.0f}" if math.isfinite(jobs) else "endlessly many"
    return Problem(f"{what} {number} jobs, and a sweep has at most {MOST:,}", "sweep over fewer values, or in parts")


def expand(overrides: list[Override]) -> list[list[Override]]:
    """The overrides of each job of a sweep: all combinations, as Hydra's basic sweeper forms them.

    Raises UserError where there are too many.
    """
    choices: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if override.is_discrete_sweep():
            values = list(override.sweep_string_iterator())
        elif isinstance(sweep := override.value(), IntervalSweep):  # another sweeper's: its start stands for it
            values = [str(sweep.start)]
        else:
            values = [override.get_value_element_as_str()]
        choices[key] = [f"{key}={value}" for value in values]
    if (jobs := math.prod(map(len, choices.values()))) > MOST:
        raise UserError([too_many(" x ".join(k for k, v in choices.items() if len(v) > 1) + " are", jobs)])
    return [[parsed_once(word) for word in words] for words in itertools.product(*choices.values())]


def say(jobs: int) -> str | None:
    """What is said before so many jobs are checked."""
    return f"checking {jobs:,} jobs, before the first of them begins" if jobs > _WORTH_A_WORD else None


def shared_folders(folders: Iterable[tuple[int, str]]) -> list[Finding]:
    """Jobs that would write into one folder, or one into another's: each numbered, with its folder."""
    taken: dict[str, int] = {}
    places = [(number, os.path.realpath(folder)) for number, folder in folders]
    for number, place in sorted(places, key=lambda entry: (entry[1].count(os.sep), entry[0])):
        above = next((str(p) for p in (Path(place), *Path(place).parents) if str(p) in taken), None)
        if above is not None:
            same = "write into one folder" if above == place else "write into a folder of the other's"
            cause = f"hydra.sweep.subdir: jobs {taken[above]} and {number} would {same}, {os.path.relpath(place)}"
            remedy = "leave hydra.sweep.subdir out, or put ${hydra:job.num} into it"
            return [Finding(("hydra.sweep.subdir",), Problem(cause, remedy))]
        taken[place] = number
    return []
