"""A run's loggers: `metrics.csv` and TensorBoard in its folder, each step once also after a resume, and services."""

from __future__ import annotations

import csv
import errno
import io
import itertools
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.compat.lightning_logging import CSVLoggerOf, KeepingWriter
from gpt2_fp8.config.schema import LoggerConfig, RunConfig
from gpt2_fp8.train.event_files import EventFile, Lossy
from gpt2_fp8.train.metrics_csv import is_column, renew
from gpt2_fp8.train.remote import Remote
from gpt2_fp8.train.services import Identity, MLflow, Wandb

log = logging.getLogger(__name__)

MOST_ROWS = 10_000  # kept in memory while the file cannot be written
_FULL = {errno.ENOSPC, errno.EDQUOT}


def build_loggers(config: LoggerConfig, folder: Path, resume_step: int | None) -> list[Logger]:
    """Build the loggers of the run's own folder that `config` asks for.

    `resume_step` is the optimizer step of the checkpoint that the run continues from; what was logged for later steps
    is dropped. None starts new logs. Steps count from 1: pass `step=trainer.global_step` after the update.
    """
    loggers: list[Logger] = []
    if config.tensorboard:
        # Readers drop everything of earlier event files at or after `purge_step`.
        loggers.append(EventFile(folder, purge_step=0 if resume_step is None else resume_step + 1))
    if config.csv:
        loggers.append(MetricsFile(folder, resume_step))
    return loggers


def build_services(config: RunConfig, folder: Path, identity: Identity, resumed: bool) -> list[Logger]:
    """Build the loggers of services that `config` asks for. Nothing is sent before the first row.

    `resumed`: the run continues from a checkpoint of its own folder, and so does its run at each service.
    """
    services: list[Logger] = []
    if config.logger.wandb is not None:
        services.append(Remote(Wandb(config.logger.wandb, config, folder, identity, resumed)))
    if config.logger.mlflow is not None:
        services.append(Remote(MLflow(config.logger.mlflow, config, folder, identity, resumed)))
    return services


class MetricsFile(Lossy, CSVLoggerOf):
    """A CSVLogger that writes `folder/metrics.csv`, and continues an existing file, which Lightning's would delete.

    Hyper-parameters are not written: the run's folder holds its configuration.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        super().__init__(folder, name=None, version="", flush_logs_every_n_steps=1)
        self._resume_step = resume_step

    @property
    def log_dir(self) -> str:
        """Return the run's folder itself."""
        return self.save_dir

    def make_writer(self) -> KeepingWriter:
        """Return the writer. It touches the file when it is made."""
        return _Writer(self.log_dir, self._resume_step)

    def log_hyperparams(self, params: Any = None) -> None:
        """Do nothing: the run's folder holds its configuration."""

    @rank_zero_only
    def save(self) -> None:
        """Write what is left; every row calls it. Rows that the disk does not take are written with later ones."""
        with self.losing_rows("metrics.csv"):
            super().save()

    @rank_zero_only
    def flush(self) -> None:
        """Write what is left, before a checkpoint. While the disk is full, the checkpoint is not taken either.

        Raises OSError for a full disk. Any other fault of the log only costs a warning.
        """
        with self.losing_rows("metrics.csv", unless=_FULL):
            super().save()


class _Writer(KeepingWriter):
    def __init__(self, log_dir: str, resume_step: int | None) -> None:
        super().__init__(log_dir)
        self.metrics_keys = ["step"]
        self._resume_step = resume_step
        self._left_out: set[str] = set()  # columns of plugins, each logged once
        self._there: set[str] = set()  # the columns that have a value at `resume_step`
        self._path = Path(self.metrics_file_path)
        self._begun = False
        with suppress(OSError):  # `save` tries again, and logs the error
            self._begin()

    def _begin(self) -> None:
        """Keep the rows up to the step that the run continues from, or start a new file. Raises OSError."""
        kept = None if self._resume_step is None else renew(self._path, last=self._resume_step)
        if kept and kept.rows:
            self.metrics_keys, self._there = kept.columns, kept.at_last
        else:
            self._path.unlink(missing_ok=True)
        self._begun = True

    def log_metrics(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        """Record a row, without the columns of plugins and without values that the file has for the resumed step.

        A continued log knows its columns. A kill may come between a validation's row and its note; the validation is
        then done again, and its row is there already.
        """
        if step == self._resume_step:
            metrics_dict = {key: value for key, value in metrics_dict.items() if key not in self._there}
        if others := set(itertools.filterfalse(is_column, metrics_dict)) - self._left_out:
            log.warning("metrics.csv has no column %s; other loggers have it", ", ".join(sorted(others)))
            self._left_out |= others
        metrics_dict = {key: value for key, value in metrics_dict.items() if is_column(key)}
        if metrics_dict:
            super().log_metrics(metrics_dict, step)

    def save(self) -> None:
        """Append the recorded rows, the newest `MOST_ROWS` of them. Raises OSError.

        For a new column the file is written again, whole or not at all.
        """
        if not self.metrics:
            return
        del self.metrics[:-MOST_ROWS]
        if not self._begun:
            self._begin()
        columns = set().union(*self.metrics) - set(self.metrics_keys)
        if columns or not self._path.is_file():
            self.metrics_keys = renew(self._path, [*self.metrics_keys, *sorted(columns)]).columns
        text = io.StringIO(newline="")
        csv.DictWriter(text, self.metrics_keys).writerows(self.metrics)
        durable.append(self._path, text.getvalue().encode())
        self.metrics = []
