"""Lightning's `log`, the last step's metrics, `flush`, what `validate` returns and `fit` sets on callbacks.

Holds for `lightning>=2.6.6,<2.7`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch


def log_from_host(module: pl.LightningModule, metrics: Mapping[str, float], logger: bool) -> None:
    """Have a module log metrics, for callbacks and progress bars, as tensors on the CPU.

    `log` puts a float on the module's device. After each batch Lightning reads what a progress bar may show, until
    there is a newer value: the host would wait for the GPU in every step. `logger`: also for the loggers.
    """
    for name, value in metrics.items():
        module.log(name, torch.tensor(value), prog_bar=True, logger=logger)


def log_last_step(trainer: pl.Trainer) -> None:
    """Send the metrics of the step that has just ended to the loggers.

    Lightning does so after `on_train_batch_end`. An exception in that hook skips it, and a resumed run will not do it.
    """
    connector = trainer._logger_connector
    connector.on_batch_end()
    connector.update_train_step_metrics()


def flush(trainer: pl.Trainer) -> None:
    """Have every logger put on the disk what it holds. One that cannot do only this saves. Raises OSError."""
    for logger in trainer.loggers:
        getattr(logger, "flush", logger.save)()


def return_only(trainer: pl.Trainer, name: str) -> None:
    """Have `Trainer.validate` return the metric `name` without handing it to the loggers.

    It returns what it logs, and logs it with an epoch, at a step that may be one less than the steps done.
    """
    connector = trainer._logger_connector
    log = type(connector).log_eval_end_metrics

    def log_others(metrics: dict[str, Any]) -> None:
        log(connector, {key: value for key, value in metrics.items() if key != name})

    connector.log_eval_end_metrics = log_others  # type: ignore[method-assign]


def detach_logging(trainer: pl.Trainer) -> None:
    """Remove the module's `log` and `log_dict` from the callbacks.

    `fit` sets them there as attributes. Callbacks that outlive the module would keep it, and its weights, in memory.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        for method in ("log", "log_dict"):
            vars(callback).pop(method, None)
