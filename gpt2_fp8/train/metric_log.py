"""The LightningModule's own metrics: `val_loss`, and `train_loss` in a Trainer that has not our callbacks."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.trainer.states import TrainerFn

from gpt2_fp8.callbacks.throughput import Throughput
from gpt2_fp8.compat import lightning_logging
from gpt2_fp8.engine.training_step import TrainingStep


class MetricLog:
    """Logs a module's metrics under their steps, and settles a step early only if someone reads it.

    Args:
        module: in a Trainer that has begun.
    """

    def __init__(self, module: pl.LightningModule):
        self.module, self.trainer = module, module.trainer
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        self._has_train_loss = any(isinstance(callback, Throughput) for callback in callbacks)
        self._has_rates = any(isinstance(callback, LearningRateMonitor) for callback in callbacks)

    def step_ended(self, step: TrainingStep) -> None:
        """Log `train_loss`, unless Throughput does. Its readers, and those of the rate, need the step settled."""
        if self._has_rates or not self._has_train_loss:
            step.settle()
        if not self._has_train_loss:
            assert step.last is not None
            verdict = step.last.read()
            metrics = {"train_loss": verdict.loss}
            if verdict.penalty is not None:
                metrics["penalty"] = verdict.penalty
            self.log_row(metrics, self.trainer.log_every_n_steps)  # type: ignore[attr-defined]

    def log_row(self, metrics: Mapping[str, float], every_n_steps: int = 1) -> None:
        """Show metrics of a step to callbacks and the progress bar, and at intervals to the loggers, in one row.

        `every_n_steps`: 0 shows the loggers nothing, as Lightning's `log_every_n_steps=0` asks for.
        """
        fitting = self.trainer.state.fn == TrainerFn.FITTING
        for name in () if fitting else metrics:
            lightning_logging.return_only(self.trainer, name)
        lightning_logging.log_from_host(self.module, metrics, logger=not fitting)  # `Trainer.validate` returns these
        step = self.trainer.global_step
        for logger in self.trainer.loggers if every_n_steps and step % every_n_steps == 0 else ():
            # By ourselves: Lightning would count this step from 0.
            logger.log_metrics({name: float(value) for name, value in metrics.items()}, step=step)
