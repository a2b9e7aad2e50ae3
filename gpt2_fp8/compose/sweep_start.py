"""Notes where a sweep writes and which jobs it will have, when Hydra begins it.

Hydra tells a callback that a sweep begins. It does not tell one that a sweep has ended if a job has failed or a signal
came. So the program writes the table itself, from what is noted here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from gpt2_fp8.compat import hydra_private
from gpt2_fp8.compose import parallel, sweeps
from gpt2_fp8.compose.commandline import parsed, unforced
from gpt2_fp8.config import sweep_plan
from gpt2_fp8.config.shown import line

_begun: list[Path] = []  # the folder of each sweep of this process that has not been taken


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
            sweep_plan.write(folder, words)
        except OSError as error:
            print(line(f"warning: {folder} cannot be written: {error}"), file=sys.stderr)
        if parallel.is_chosen(config.hydra):
            parallel.begin(config, folder, words)


def _words(config: DictConfig) -> list[list[str]] | None:
    """Return the words of each job, as the basic sweeper will form them; None for another sweeper, which chooses."""
    if not sweeps.is_basic(config.hydra.sweeper):
        return None
    words = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    typed: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)  # ${...} is each job's own
    overrides = [parsed(word) for word in [*words, *typed]]
    if any(isinstance(override.value(), Glob) for override in overrides):  # only Hydra knows what it matches
        return None
    return list(map(unforced, hydra_private.job_words(overrides)))
