"""The end of a run whose gradients are no longer finite: it would go on skipping every update for ever."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from gpt2_fp8.config.errors import Diverged

PATIENCE = 10  # updates left out in a row; one or two bad steps pass by themselves


class Divergence(pl.Callback):
    """Raises `Diverged` (exit code 3) after `PATIENCE` steps in a row were skipped.

    Counted on the device, and read every `every_n_steps` steps, when the log waits for the device anyway. The skip is
    decided from the averaged gradient, so all ranks end alike.
    """

    def __init__(self, every_n_steps: int):
        self.every_n_steps = every_n_steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from nothing."""
        self._in_a_row = torch.zeros((), device=pl_module.device)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Count the step."""
        self._in_a_row = (self._in_a_row + 1) * pl_module.last_step.skipped
        due = trainer.global_step % self.every_n_steps == 0 or trainer.global_step >= trainer.max_steps
        if due and (skipped := int(self._in_a_row)) >= PATIENCE:
            raise Diverged(
                f"diverged: the gradients of the last {skipped} steps were not finite, so nothing was learned in them; "
                "a lower optim.lr, a longer optim.warmup_steps or precision=bf16 may help, "
                "from an earlier checkpoint of this run: ckpt_path=outputs/RUN/checkpoints/step-NNNNNNNN"
            )
