"""Judges each settled step, and ends a run that diverges, or has it go back: `engine/divergence.py` decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gpt2_fp8.config.schema import CallbacksConfig
from gpt2_fp8.engine.divergence import DivergencePolicy
from gpt2_fp8.engine.step import StepResult

log = logging.getLogger(__name__)


class DivergenceGuard(Callback):
    """Raises what `DivergencePolicy.judge` raises: RollBack for the run to catch, or Diverged.

    One object serves a whole run, in the `fit`s before and after a rollback. It comes after the callbacks that log and
    before those that save, so nothing of a rolled-back step is saved.

    Args:
        config: the limits.
        save: called with the trainer on every rank at the end of the first step after a rollback, so that a killed run
            resumes after the rollback, not before it. Returns whether the save succeeded.
    """

    def __init__(self, config: CallbacksConfig, save: Callable[[Trainer], bool]):
        limits = config.nonfinite_limit, config.divergence_sigma, config.divergence_steps
        self.policy = DivergencePolicy(*limits, say=self._say)
        self._save = save
        self._says = True
        self._save_next = False

    def start_again(self) -> None:
        """Reset the policy between two `fit`s, after a rollback."""
        self.policy.start_again()
        self._save_next = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the rank that logs: all ranks decide alike, so one of them is enough."""
        self._says = trainer.is_global_zero

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Subscribe to each settled step: first of all, since a row of the log may need its explanation."""
        pl_module.step.on_settled.insert(0, partial(self._judge, trainer))

    def _judge(self, trainer: Trainer, result: StepResult) -> None:
        """Judge a settled step by the values that the host has read."""
        self.policy.judge(trainer.global_step, result.read(), result.first)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Save the first step after a rollback, once it is judged."""
        if self._save_next:
            self._save_next = not self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's state."""
        return self.policy.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the policy's state."""
        self.policy.load_state_dict(state_dict)

    def _say(self, line: str) -> None:
        if self._says:
            log.warning("%s", line)
