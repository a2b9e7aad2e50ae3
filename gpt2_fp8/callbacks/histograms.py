"""Histograms of weights and gradients, and each matrix' gradient norm, at an interval."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.engine import histograms
from gpt2_fp8.engine.out_of_memory import is_out_of_memory

log = logging.getLogger(__name__)


class Histograms(pl.Callback):
    """Gives the loggers that have `log_histograms` the distribution of every matrix and of its gradient, on rank 0.

    After the first step, every `every_n_steps` steps, and after the step `last_step`. Gradients are those of the whole
    step, before clipping; weights those after the update. In other steps nothing is done, and nothing waits.
    """

    def __init__(self, every_n_steps: int, last_step: int):
        self.every_n_steps, self.last_step = every_n_steps, last_step
        self._gradients: tuple[list[str], Tensor] | None = None
        self._failed = False

    def _due(self, step: int) -> bool:
        return step in (1, self.last_step) or step % self.every_n_steps == 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Count the gradients while they are there. They have been clipped in place by now."""
        if not trainer.is_global_zero or self._failed or not self._due(trainer.global_step + 1):
            return
        found = [(name, weight.grad) for name, weight in _matrices(pl_module) if weight.grad is not None]
        try:
            self._gradients = [name for name, _ in found], histograms.count([gradient for _, gradient in found])
        except Exception as error:
            self._give_up(error, trainer.global_step + 1)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Count the weights, read both, and log."""
        step = trainer.global_step
        if not self._due(step):
            return
        result = pl_module.step.last  # settles, on all ranks
        counted, self._gradients = self._gradients, None
        if counted is None or result is None:
            return
        found = []
        weights = list(_matrices(pl_module))
        try:
            if result.first is None and not result.read().skipped:  # else they are of an attempt that was given up
                found = histograms.read(*counted[:1], "gradient", counted[1], result.read().clip_ratio)
            of_weights = histograms.count([weight for _, weight in weights])
            found += histograms.read([name for name, _ in weights], "weight", of_weights)
        except Exception as error:
            self._give_up(error, step)
            return
        for logger in trainer.loggers:
            if write := getattr(logger, "log_histograms", None):  # loggers.EventFile, loggers.Remote
                write(found, step)

    def _give_up(self, error: Exception, step: int) -> None:
        """Go on without histograms: what only looks does not end a run. Raises what does, such as a signal's."""
        if isinstance(error, RunError):
            raise error
        self._failed, self._gradients = True, None
        reason = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
        log.warning("no histograms from step %d on (%s); training goes on", step, reason)


def _matrices(pl_module: Any) -> list[tuple[str, Any]]:
    return [(name, weight) for name, weight in pl_module.model.named_parameters() if weight.ndim >= 2]
