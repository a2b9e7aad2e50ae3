"""The logs in a run's folder: `metrics.csv` and `tensorboard/`, in which every step stands once, resumed or not."""

from __future__ import annotations

import csv
import errno
import io
import logging
import os
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.compat.lightning_logging import CSVLoggerOf, KeepingWriter
from gpt2_fp8.config.schema import LoggerConfig
from gpt2_fp8.train.metrics_csv import COLUMNS, renew

log = logging.getLogger(__name__)

MOST_ROWS = 10_000  # kept for a file that cannot be written
_FULL = {errno.ENOSPC, errno.EDQUOT}


def build_loggers(config: LoggerConfig, folder: Path, resume_step: int | None) -> list[Logger]:
    """The loggers that `config` asks for, writing into `folder`, without those of plugins.

    `resume_step` is the optimizer step of the checkpoint that the run continues from; what was logged for later steps
    is dropped. None starts the logs afresh. Steps count from 1: pass `step=trainer.global_step` after the update.
    """
    loggers: list[Logger] = []
    if config.tensorboard:
        # Readers drop everything at or after `purge_step` that an earlier event file says.
        purge_step = 0 if resume_step is None else resume_step + 1
        loggers.append(
            EventFile(folder, name="tensorboard", version="", default_hp_metric=False, purge_step=purge_step)
        )
    if config.csv:
        loggers.append(MetricsFile(folder, resume_step))
    return loggers


class _Lossy:
    """A logger whose row, where the disk does not take it, costs a warning: the first of several in a row says so."""

    _failing = False

    @contextmanager
    def _losing_rows(self, what: str, unless: Container[int | None] = ()) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error, ValueError) else error  # Lightning takes any for a bad value
            if not isinstance(cause, OSError) or cause.errno in unless:
                raise
            if not self._failing:
                log.warning("%s is not written, training goes on: %s", what, cause)
            self._failing = True
        else:
            self._failing = False


class EventFile(_Lossy, TensorBoardLogger):
    """A TensorBoardLogger whose every row is in the file when it returns: what is older than a checkpoint must be there
    when a killed run continues from that. By itself TensorBoard writes every two minutes."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row. A disk that does not take it costs a warning, and this and all later rows: TensorBoard's writer
        does not recover."""
        with self._losing_rows("TensorBoard's log"):
            super().log_metrics(metrics, step)
            self.experiment.flush()

    @rank_zero_only
    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a text, likewise."""
        with self._losing_rows("TensorBoard's log"):
            self.experiment.add_text(tag, text, step)
            self.experiment.flush()

    @rank_zero_only
    def save(self) -> None:
        """Lightning calls it now and then; nothing is left to write."""
        with self._losing_rows("TensorBoard's log"):
            super().save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the file, likewise."""
        with self._losing_rows("TensorBoard's log"):
            super().finalize(status)


class MetricsFile(_Lossy, CSVLoggerOf):
    """A CSVLogger that writes `folder/metrics.csv` and, where Lightning's deletes it, continues it.

    Hyper-parameters are not written: the run's folder holds its configuration.
    """

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        super().__init__(folder, name=None, version="", flush_logs_every_n_steps=1)
        self._resume_step = resume_step

    @property
    def log_dir(self) -> str:
        """The run's folder itself."""
        return self.save_dir

    def make_writer(self) -> KeepingWriter:
        """The writer; it touches the file when it is made."""
        return _Writer(self.log_dir, self._resume_step)

    def log_hyperparams(self, params: Any = None) -> None:
        """Nothing to do."""

    @rank_zero_only
    def save(self) -> None:
        """Write what is left; every row calls it. Rows that the disk does not take are written with later ones."""
        with self._losing_rows("metrics.csv"):
            super().save()

    @rank_zero_only
    def flush(self) -> None:
        """Write what is left: before a checkpoint, which is not taken without it while the disk is full. Raises
        OSError then; whatever else is wrong with the log is no reason to lose a checkpoint."""
        with self._losing_rows("metrics.csv", unless=_FULL):
            super().save()


class _Writer(KeepingWriter):
    def __init__(self, log_dir: str, resume_step: int | None) -> None:
        super().__init__(log_dir)
        self.metrics_keys = ["step"]
        self._resume_step = resume_step
        self._left_out: set[str] = set()  # columns of plugins, each told once
        self._there: set[str] = set()  # the columns that have a value at `resume_step`
        self._path = Path(self.metrics_file_path)
        self._begun = False
        with suppress(OSError):  # `save` tries again, and says so
            self._begin()

    def _begin(self) -> None:
        """Keep the rows up to the step that the run continues from, or start afresh. Raises OSError."""
        kept = None if self._resume_step is None else renew(self._path, last=self._resume_step)
        if kept and kept.rows:
            self.metrics_keys, self._there = kept.columns, kept.at_last
        elif self._path.is_dir() and not self._path.is_symlink():
            durable.put_aside(self._path)
        else:
            self._path.unlink(missing_ok=True)
        self._begun = True

    def log_metrics(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        """Record a row, without what a plugin's callback logs besides: a log that is continued knows its columns.

        A validation that is done once more, since a kill came between it and the note of it, has its row already.
        """
        if step == self._resume_step:
            metrics_dict = {key: value for key, value in metrics_dict.items() if key not in self._there}
        if others := metrics_dict.keys() - COLUMNS - self._left_out:
            log.warning("metrics.csv has no column %s; other loggers have it", ", ".join(sorted(others)))
            self._left_out |= others
        metrics_dict = {key: value for key, value in metrics_dict.items() if key in COLUMNS}
        if metrics_dict:
            super().log_metrics(metrics_dict, step)

    def save(self) -> None:
        """Append the recorded rows, the newest `MOST_ROWS` of them. Raises OSError.

        A new column has the file rewritten, whole or not at all.
        """
        if not self.metrics:
            return
        del self.metrics[:-MOST_ROWS]
        if not self._begun:
            self._begin()
        columns = set().union(*self.metrics) - set(self.metrics_keys)
        if columns or not self._path.is_file() or self._path.is_symlink():
            self.metrics_keys = renew(self._path, [*self.metrics_keys, *sorted(columns)]).columns
        text = io.StringIO(newline="")
        csv.DictWriter(text, self.metrics_keys).writerows(self.metrics)
        _append(self._path, text.getvalue().encode())
        self.metrics = []


def _append(path: Path, content: bytes) -> None:
    """Append to a regular file, all or nothing. Raises OSError."""
    descriptor = durable.open_regular(path, os.O_WRONLY | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        try:
            while content:
                content = content[os.write(descriptor, content) :]
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
