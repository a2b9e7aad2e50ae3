"""The progress bar: Lightning's own, refreshed when there is something new."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar


class ProgressBar(TQDMProgressBar):
    """One bar for the whole run in optimizer steps. It is refreshed with the log: showing a number reads the GPU."""

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """Name the bar after what it counts; Lightning would call the whole run "Epoch 0"."""
        super().on_train_epoch_start(trainer, *args)
        self.train_progress_bar.set_description("steps")

    def get_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return all metrics except the logger's version number, which means nothing here."""
        metrics = super().get_metrics(*args, **kwargs)
        metrics.pop("v_num", None)
        return metrics
