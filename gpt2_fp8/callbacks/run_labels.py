"""The tags and the notes of a run, for its loggers."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl


class RunLabels(pl.Callback):
    """Gives every logger the run's tags and notes as hyper-parameters. TensorBoard shows them in a table of runs."""

    def __init__(self, tags: Mapping[str, object], notes: str | None):
        self.labels = {f"tags.{key}": value for key, value in tags.items()} | ({"notes": notes} if notes else {})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log them at every start. Lightning's loggers do so only on rank 0."""
        for logger in trainer.loggers:
            logger.log_hyperparams(dict(self.labels))
