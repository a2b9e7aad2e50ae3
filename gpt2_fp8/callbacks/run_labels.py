"""What a run was told, for its loggers: hyper-parameters, tags, notes, and the configuration as a text."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl


class RunLabels(pl.Callback):
    """Gives the loggers what tells the run apart, at every start. Lightning's loggers take it only on rank 0.

    Args:
        labels: hyper-parameters with tags and notes.
        config: the configuration as YAML, for loggers that show texts.
    """

    def __init__(self, labels: Mapping[str, object], config: str):
        self.labels, self.config = dict(labels), config

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log them. A service's logger has sent the whole configuration itself."""
        for logger in trainer.loggers:
            if getattr(logger, "knows_config", False):
                continue
            logger.log_hyperparams(dict(self.labels))
            if log_text := getattr(logger, "log_text", None):  # loggers.EventFile
                log_text("configuration", self.config, trainer.global_step)
