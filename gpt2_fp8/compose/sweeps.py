"""The jobs of a sweep: how many, the words of each, and the note that Hydra begins it.

Hydra tells a callback that a sweep begins. It does not tell one that a sweep has ended if a job has failed or a signal
came. So the program writes the table itself, from what is noted here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gpt2_fp8.compat import hydra_private
from gpt2_fp8.compose import launchers
from gpt2_fp8.compose.commandline import parsed, unforced
from gpt2_fp8.config import own_words
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import line

_begun: list[Path] = []  # the folder of each sweep of this process that has not been taken


def _is_basic(sweeper: DictConfig) -> bool:
    """Return whether a sweeper is Hydra's own: it runs all combinations, which are known before."""
    return str(sweeper.get("_target_", "")).endswith("BasicSweeper")


def expand(overrides: list[Override], sweeper: DictConfig) -> list[list[Override]]:
    """Return the words of each job of a sweep: all combinations, as Hydra's basic sweeper forms them.

    Another sweeper chooses combinations while it runs: of that one, the first values are one job. Raises UserError.
    """
    last = {(override.key_or_group, override.package): override for override in overrides}
    same = [override for override in last.values() if not override.is_sweep_override()]
    swept = [override for override in last.values() if override.is_sweep_override()]
    if not _is_basic(sweeper):
        swept = [_start(override) for override in swept]
    try:
        words = hydra_private.job_words(swept)
    except HydraException as error:
        raise UserError.of(str(error).splitlines()[0]) from None
    jobs_ = [[*same, *map(parsed, job)] for job in words]
    return jobs_ if _is_basic(sweeper) else jobs_[:1]


def _start(override: Override) -> Override:
    """Return the override; for an interval, which has no end of values, its start."""
    sweep = override.value()
    return parsed(f"{override.get_key_element()}={sweep.start}") if isinstance(sweep, IntervalSweep) else override


def number(cfg: DictConfig, place: int, whole: DictConfig) -> None:
    """Give a job's configuration its number and what `now` has said, as Hydra's launcher does."""
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.job.num, cfg.hydra.job.id = place, str(place)
    OmegaConf.copy_cache(from_config=whole, to_config=cfg)


def take() -> Path | None:
    """Return the folder of the sweep that has begun in this process, once; None if there was none."""
    return _begun.pop() if _begun else None


def begun() -> Path | None:
    """Return the folder of the sweep that has begun in this process; None if there is none."""
    return _begun[-1] if _begun else None


class SweepStart(Callback):
    """What `hydra.callbacks` of `conf/config.yaml` names. It has no state, since launchers send it to their jobs."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Note the sweep's folder, and write its plan there."""
        folder = Path(str(config.hydra.sweep.dir)).absolute()  # absolute, as jobs may change the current folder
        _begun.append(folder)
        words = _words(config)
        try:
            own_words.write_plan(folder, words)
        except OSError as error:
            print(line(f"warning: {folder} cannot be written: {error}"), file=sys.stderr)
        if launchers.is_joblib(config.hydra):
            launchers.begin_joblib(config, folder, words)


def _words(config: DictConfig) -> list[list[str]] | None:
    """Return the words of each job, as the basic sweeper will form them; None for another sweeper, which chooses."""
    if not _is_basic(config.hydra.sweeper):
        return None
    words = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # ${...} is each job's own
    overrides = [parsed(word) for word in [*words, *typed]]
    if any(isinstance(override.value(), Glob) for override in overrides):  # only Hydra knows what it matches
        return None
    return list(map(unforced, hydra_private.job_words(overrides)))
