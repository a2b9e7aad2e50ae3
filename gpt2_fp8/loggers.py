"""The logs in a run's folder: `metrics.csv` and `tensorboard/`, in which every step stands once, resumed or not."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.config.schema import LoggerConfig

log = logging.getLogger(__name__)


def build_loggers(config: LoggerConfig, folder: Path, resume_step: int | None) -> list[Logger]:
    """The loggers that `config` asks for, writing into `folder`.

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
    def _losing_rows(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error, ValueError) else error  # Lightning takes any for a bad value
            if not isinstance(cause, OSError):
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


class MetricsFile(_Lossy, CSVLogger):
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

    @property
    @rank_zero_experiment
    def experiment(self) -> _Writer:
        """The writer; it touches the file when it is made, on rank zero alone."""
        if not isinstance(self._experiment, _Writer):
            self._experiment = _Writer(self.log_dir, self._resume_step)
        return self._experiment

    def log_hyperparams(self, params: Any = None) -> None:
        """Nothing to do."""

    @rank_zero_only
    def save(self) -> None:
        """Write what is left; every row calls it. Rows that the disk does not take are written with later ones."""
        with self._losing_rows("metrics.csv"):
            self.flush()

    @rank_zero_only
    def flush(self) -> None:
        """Write what is left: before a checkpoint, which must not be taken without it. Raises OSError."""
        super().save()


class _Writer(ExperimentWriter):
    def __init__(self, log_dir: str, resume_step: int | None) -> None:
        super().__init__(log_dir)
        self.metrics_keys = ["step"]
        self._resume_step = resume_step
        self._there: set[str] = set()  # the columns that have a value at `resume_step`
        rows = [] if resume_step is None else _rows_up_to(self.metrics_file_path, resume_step)
        if rows:
            self._replace(rows, list(rows[0]))
            last = [row for row in rows if int(row["step"]) == resume_step]
            self._there = {key for row in last for key, value in row.items() if value} - {"step"}
        else:
            Path(self.metrics_file_path).unlink(missing_ok=True)

    def log_metrics(self, metrics_dict: dict[str, Any], step: int | None = None) -> None:
        """Record a row. A validation that is done once more, since a kill came between it and the note of it, has its
        row already."""
        if step == self._resume_step:
            metrics_dict = {key: value for key, value in metrics_dict.items() if key not in self._there}
        if metrics_dict:
            super().log_metrics(metrics_dict, step)

    def save(self) -> None:
        """Append the recorded rows. A new column has the file rewritten, whole or not at all."""
        if not self.metrics:
            return
        columns = set().union(*self.metrics) - set(self.metrics_keys)
        path = Path(self.metrics_file_path)
        if columns or not path.exists():
            self._replace(_rows(path), [*self.metrics_keys, *sorted(columns)])
        size = path.stat().st_size
        try:
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.metrics_keys).writerows(self.metrics)
        except OSError:
            os.truncate(path, size)  # of a full disk: all rows are written again
            raise
        self.metrics = []

    def _replace(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        temporary = f"{self.metrics_file_path}.tmp"
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.metrics_file_path)
        self.metrics_keys = columns

    def _check_log_dir_exists(self) -> None:
        """Lightning 2.6 deletes an existing file here."""


def _rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows: a line that a killed process left without its end may hold half a number."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        lines = [line for line in file if line.endswith("\n")]
    rows = list(csv.DictReader(lines))
    return [row for row in rows if None not in row and None not in row.values()]


def _rows_up_to(path: str, step: int) -> list[dict[str, Any]]:
    rows = _rows(Path(path))
    return [row for row in rows if row.get("step", "").isdecimal() and int(row["step"]) <= step]
