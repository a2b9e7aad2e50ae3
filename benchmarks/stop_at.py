"""A callback that ends a run after the step in its tag `stop_at`. The learning rate's schedule is the whole run's."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.runtime import registry


@registry.callback("stop_at")
class StopAt(pl.Callback):
    """Ends `fit` after step `tags.stop_at`. The run then validates and saves as at any end."""

    def __init__(self, config: RunConfig):
        self.step = int(config.tags["stop_at"])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Stop if this was the step."""
        if trainer.global_step >= self.step:
            trainer.should_stop = True
