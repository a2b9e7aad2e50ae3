"""A run's loggers: TensorBoard, `metrics.csv`, `fp8.csv`, each with every step once also after a resume; services."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from gpt2_fp8.config.keys import show, value_of
from gpt2_fp8.config.schema import LoggerConfig, PlainPrecisionConfig, RunConfig
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.runtime import registry
from gpt2_fp8.train import tensorboard
from gpt2_fp8.train.metrics_csv import CSVLog
from gpt2_fp8.train.services import MLflow, Remote, Wandb
from gpt2_fp8.train.tensorboard import EventFile, Lossy

FP8_COLUMNS = ["step", "layer", "tensor", "format", "amax", "scale", "headroom", "saturated", "flushed", "age", "jump"]
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LABELS = ("optim.lr", "seed")  # of every run
_NO_LABELS = ("run_name", "ckpt_path", "notes", "hydra", "tags", "logger", "callbacks")


def build_files(config: LoggerConfig, folder: Path, resume_step: int | None) -> list[Logger]:
    """Build the loggers of the run's own folder that `config` asks for.

    What was logged for steps after `resume_step`, that of the checkpoint, is dropped. None starts new logs.
    """
    loggers: list[Logger] = []
    if config.tensorboard:
        # Readers drop everything of earlier event files at or after `purge_step`.
        loggers.append(EventFile(folder, purge_step=0 if resume_step is None else resume_step + 1))
    if config.csv:
        loggers.append(MetricsFile(folder, resume_step))
    return loggers


def build_loggers(config: RunConfig, folder: Path, resume_step: int | None, in_sweep: bool) -> list[Logger]:
    """Build a run's loggers: its own files, services, of which none is told anything before the first row, plugins'."""
    resumed = resume_step is not None
    loggers = build_files(config.logger, folder, resume_step)
    loggers += [Wandb(config, folder, in_sweep, resumed)] if config.logger.wandb is not None else []
    loggers += [MLflow(config, folder, in_sweep, resumed)] if config.logger.mlflow is not None else []
    return loggers + [registry.make("logger.extra", name, Logger, config, folder) for name in config.logger.extra]


class MetricsFile(Lossy, Logger):
    """Writes `folder/metrics.csv`: a run's own metrics, without those of plugins."""

    name, version = "metrics.csv", ""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        super().__init__()
        self._file = CSVLog(folder / "metrics.csv", ["step"], resume_step)
        self._rows: list[dict[str, float]] = []

    @property
    def save_dir(self) -> str:
        """Return the run's folder."""
        return str(self._file.path.parent)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append a row. Rows that the disk does not take are written with later ones."""
        own = {name: value for name, value in metrics.items() if tensorboard.is_known(name)}
        if own:
            row = {name: value.item() if isinstance(value, Tensor) else value for name, value in own.items()}
            self._rows.append({**row, "step": step or 0})
            self.save()

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run's folder holds its configuration."""

    @rank_zero_only
    def save(self) -> None:
        """Write what is left."""
        with self.losing_rows("metrics.csv"):
            self._write()

    @rank_zero_only
    def flush(self) -> None:
        """Write what is left, before a checkpoint. While the disk is full, the checkpoint is not taken either.

        Raises OSError for a full disk. Any other fault of the log only costs a warning.
        """
        with self.losing_rows("metrics.csv", unless=_FULL):
            self._write()

    def _write(self) -> None:
        if self._rows:
            self._file.append(self._rows)
            self._rows = []


class FP8File(Lossy):
    """Writes `folder/fp8.csv`: the health of each FP8 tensor at a step, a row each."""

    def __init__(self, folder: Path, resume_step: int | None):
        self._file = CSVLog(folder / "fp8.csv", FP8_COLUMNS, resume_step)

    def write(self, step: int, healths: Iterable[Health]) -> None:
        """Append the rows of one step. If the disk does not take them, they are lost."""
        with self.losing_rows("fp8.csv"):
            self._file.append([
                {"step": step, "layer": health.tensor.layer, "tensor": health.tensor.kind,
                 "format": health.tensor.format, **{name: getattr(health, name) for name in FP8_COLUMNS[4:]}}
                for health in healths
            ])  # fmt: skip


class RunLabels(pl.Callback):
    """Gives the loggers what tells the run apart, at every start, and its configuration to those that show texts."""

    def __init__(self, config: RunConfig, words: Sequence[str]):
        self.labels = run_labels(config, words)
        self.config = str(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log them. A service's logger sends the whole configuration itself."""
        for logger in trainer.loggers:
            if not isinstance(logger, Remote):
                logger.log_hyperparams(dict(self.labels))
            if isinstance(logger, EventFile):
                logger.log_text("configuration", self.config, trainer.global_step)


def run_labels(config: RunConfig, words: Sequence[str]) -> dict[str, bool | int | float | str]:
    """Return what was typed for this run or job, beside what every run has, by keys; all of them would be too many."""
    found: dict[str, bool | int | float | str] = {
        "model": config.model.name,
        "precision": config.precision.name,
        "recipe": "none" if isinstance(config.precision, PlainPrecisionConfig) else config.recipe.name,
        "optimizer": config.optimizer.name,
    }
    typed = [word.lstrip("+~").partition("=")[0] for word in words]
    for key in (*_LABELS, *typed):
        if not key.startswith(_NO_LABELS):
            value = value_of(config, key)
            if isinstance(value, (bool, int, float, str)):
                found[key] = value
            elif isinstance(value, (list, type(None))):
                found[key] = show(value)
    found |= {f"tags.{key}": value for key, value in config.tags.items()}
    return found | ({"notes": config.notes} if config.notes else {})
