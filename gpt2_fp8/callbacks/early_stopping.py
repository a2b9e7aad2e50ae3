"""Lightning's early stopping, for a run that is resumed exactly and says what ended it."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.checkpoint import pointers
from gpt2_fp8.config.run_length import PATIENCE

log = logging.getLogger(__name__)


class EarlyStop(EarlyStopping):
    """Ends a run once `val_loss` has not fallen for some validations. The same on all ranks.

    A loss that is not finite is no lower one, and `DivergenceGuard`'s to judge.

    Args:
        patience: the number of validations.
        min_delta: by how much a loss must be lower to count, nats a token.
    """

    def __init__(self, patience: int, min_delta: float) -> None:
        super().__init__("val_loss", min_delta, patience, check_finite=False, check_on_train_epoch_end=False)
        self._step = 0  # of the newest validation that was counted

    @property
    def reached(self) -> bool:
        """Return whether it has ended the run."""
        return self.wait_count >= self.patience

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count a validation that was made after the checkpoint was taken, and stop if nothing is left to do.

        Its note in the checkpoint's folder is all that a resume has of it. Lightning has restored this callback by now.
        """
        noted = pointers.read_note(Path(trainer.ckpt_path)) if trainer.ckpt_path else None
        if noted is not None and noted.step > self._step:
            loss = math.nan if noted.val_loss is None else noted.val_loss
            trainer.callback_metrics[self.monitor] = torch.tensor(loss)
            self._count(trainer, pl_module, noted.step)
        elif self.reached:
            trainer.should_stop = True
            self._say(self._step)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count a validation, and stop if it was one too many. Collective.

        One that a signal has left after it was counted is made again by a resume, and counts once.
        """
        if trainer.global_step > self._step:
            self._count(trainer, pl_module, trainer.global_step)

    def _count(self, trainer: pl.Trainer, pl_module: pl.LightningModule, step: int) -> None:
        super().on_validation_end(trainer, pl_module)
        self._step = step
        if self.reached:
            self._say(step)

    @rank_zero_only
    def _say(self, step: int) -> None:
        below = float(self.best_score) + self.min_delta  # Lightning has turned its sign
        log.info("step %d is the last: %d validations in a row had no loss below %.4f (%s)",
                 step, self.wait_count, below, PATIENCE)  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return Lightning's state, and the step of the newest validation in it."""
        return super().state_dict() | {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it. The patience is the configuration's, which may be another one now."""
        super().load_state_dict(state_dict | {"patience": self.patience})
        self._step = state_dict["step"]
