"""How many jobs a sweep has, and the words of each."""

from __future__ import annotations

import math

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gpt2_fp8.compat import hydra_private
from gpt2_fp8.compose.override_parser import parsed
from gpt2_fp8.config.errors import Problem, UserError

MOST = 1000  # jobs; this program and Hydra compose each of them before the first begins
ANNOUNCED = 50  # more jobs than these are announced before they are checked


def length(override: Override) -> float:
    """Return how many values an override goes through, without making them."""
    sweep = override.value()
    if isinstance(sweep, RangeSweep):
        start, stop, step = (float(number or 0) for number in (sweep.start, sweep.stop, sweep.step))
        if step == 0 or not math.isfinite(start) or not math.isfinite(stop):
            return math.inf
        return max(0, math.ceil((stop - start) / step))
    if isinstance(sweep, ChoiceSweep):
        return len(sweep.list)
    if override.is_discrete_sweep():
        return sum(1 for _ in override.sweep_iterator())  # glob(...): the choices that it matches
    return 1


def is_basic(sweeper: DictConfig) -> bool:
    """Return whether a sweeper is Hydra's own: it runs all combinations, which are known before."""
    return str(sweeper.get("_target_", "")).endswith("BasicSweeper")


def too_many(what: str, jobs: float) -> Problem:
    """Return the problem of a sweep that would take hours to check."""
    number = f"{jobs:,.0f}" if math.isfinite(jobs) else "endlessly many"
    return Problem(f"{what} {number} jobs, and a sweep has at most {MOST:,}", "sweep over fewer values, or in parts")


def expand(overrides: list[Override], sweeper: DictConfig) -> list[list[Override]]:
    """Return the words of each job of a sweep: all combinations, as Hydra's basic sweeper forms them.

    Another sweeper chooses combinations while it runs. For that one, each value is checked once, with the first of the
    others. Raises UserError if there are too many jobs.
    """
    last = {override.get_key_element(): override for override in overrides}
    same = [override for override in last.values() if not override.is_sweep_override()]
    swept = [_start(override) for override in last.values() if override.is_sweep_override()]
    if is_basic(sweeper):
        if (jobs := math.prod(map(length, swept))) > MOST:
            several = [str(word.key_or_group) for word in swept if length(word) > 1]
            raise UserError([too_many(" x ".join(several) + " are", jobs)])
        return [[*same, *map(parsed, job)] for job in hydra_private.job_words(swept)]
    values = [[parsed(word) for (word,) in hydra_private.job_words([override])] for override in swept]
    first = [each[0] for each in values]
    others = [[*first[:i], other, *first[i + 1 :]] for i, each in enumerate(values) for other in each[1:]]
    return [[*same, *job] for job in [first, *others]]


def _start(override: Override) -> Override:
    """Return the override; for an interval, which has no end of values, its start."""
    sweep = override.value()
    if not isinstance(sweep, IntervalSweep):
        return override
    return parsed(f"{override.get_key_element()}={sweep.start}")


def number(cfg: DictConfig, place: int, whole: DictConfig) -> None:
    """Give a job's configuration its number and what `now` has said, as Hydra's launcher does."""
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.job.num, cfg.hydra.job.id = place, str(place)
    OmegaConf.copy_cache(from_config=whole, to_config=cfg)
