"""The end of a run, of whatever kind: what it needs to know of the run is kept here from the start."""

from __future__ import annotations

import logging
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

from gpt2_fp8.callbacks.checkpointing import Checkpointing
from gpt2_fp8.callbacks.divergence import DivergenceGuard
from gpt2_fp8.callbacks.rank_watchdog import RankWatchdog
from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.compat.lightning_process import rank
from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.config.schema import PlainPrecisionConfig, RunConfig
from gpt2_fp8.precision.choose import Choice
from gpt2_fp8.train.build import Parts
from gpt2_fp8.train.outcome import fill
from gpt2_fp8.train.process import clean_up
from gpt2_fp8.train.summary import Precision, Summary

log = logging.getLogger(__name__)


class RunContext:
    """Ends a run in `folder`: its summary, its other ranks, what it leaves in this process.

    Attributes: `checkpointing`, `divergence` and `watchdog` are the callbacks that outlive a rollback; `parts` are
    those of the present `fit`, None where there are none (yet).
    """

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.folder = folder
        self.checkpointing = Checkpointing.from_config(folder / "checkpoints", config.callbacks)
        self.divergence = DivergenceGuard(config.callbacks, self.checkpointing.save)
        self.watchdog = RankWatchdog(self._farewell)
        self.parts: Parts | None = None
        precision = Precision(asked=config.precision.name)
        self._summary = Summary(precision=precision, recipe=_recipe(config), tags=config.tags, notes=config.notes)
        self._launcher: object = None

    def chosen(self, config: RunConfig, choice: Choice | None) -> None:
        """The settings are settled; `choice`: what `precision=auto` has come to, if it was asked for."""
        self._summary.recipe, self._summary.precision.choice = _recipe(config), asdict(choice) if choice else None

    def built(self, parts: Parts) -> Parts:
        """The parts of a `fit` that is about to begin."""
        self.parts = parts
        if self._launcher is None:  # the first one starts the other ranks
            self._launcher = parts.trainer.strategy.launcher
            self.watchdog.expect(self._launcher)
        return parts

    def rolled_back(self) -> None:
        """Note what the last `fit` was like, and let go of its parts: their memory is needed. The caller keeps none."""
        self._fill()
        self.parts = None
        clean_up()

    def close(self, error: BaseException | None) -> None:
        """End the run, by `error` or well. To be called once, whatever happened before."""
        if self.parts is not None:
            self.parts.data.say_documents()
            self.parts.data.teardown()  # Lightning leaves it out where `fit` raises
            with nullcontext() if error is None else suppress(Exception):  # a GPU that has failed answers nothing more
                self._fill()
        self._summary.finish(error)
        refused = isinstance(error, UserError) and pointers.steps(self.checkpointing.folder)
        if rank() == 0 and not refused:  # what a run has reached is not replaced by a line that was not accepted
            self._summary.take_over(self.folder)
            self._write()
        if error is not None:
            self.watchdog.take_over(self._launcher)  # where the run did not come so far
            self.watchdog.end_children()
        self.watchdog.close()
        clean_up()

    def _farewell(self, lost: RunError) -> None:
        """The summary of a run whose main thread hangs in a collective."""
        self._fill()
        self._summary.finish(lost)
        if rank() == 0:
            self._write()

    def _write(self) -> None:
        try:
            log.info("%s: %s", self._summary.status, self._summary.write(self.folder))
        except OSError as error:  # a full disk: the run's own end and exit code count
            log.error("%s; the summary cannot be written: %s", self._summary.status, error)

    def _fill(self) -> None:
        if (parts := self.parts) is not None:  # also read by a thread, in a farewell
            fill(self._summary, parts, self.divergence, self.checkpointing)


def _recipe(config: RunConfig) -> str | None:
    return None if isinstance(config.precision, PlainPrecisionConfig) else config.recipe.name
