"""A run's loggers: TensorBoard, `metrics.csv`, `fp8.csv`, each with every step once also after a resume; services.

TensorBoard sorts tags by name, makes a group of what comes before the first slash, and opens the first two groups. So
the names are chosen to begin with the loss: loss, optim, optim_steps, perplexity, precision_fp8,
precision_fp8_layers, ranking, speed, system, tensors_*.
"""

from __future__ import annotations

import errno
import logging
import math
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from gpt2_fp8.callbacks.histograms import TensorStats
from gpt2_fp8.config import own_words
from gpt2_fp8.config.keys import show, value_of
from gpt2_fp8.config.schema import LoggerConfig, PlainPrecisionConfig, RunConfig
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.runtime import registry
from gpt2_fp8.train.metrics_csv import CSVLog
from gpt2_fp8.train.services import MLflow, Remote, Wandb

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

FP8_COLUMNS = ["step", "layer", "tensor", "format", "amax", "scale", "headroom", "saturated", "flushed", "age", "jump"]
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LABELS = ("optim.lr", "seed")  # of every run
_NO_LABELS = ("run_name", "ckpt_path", "notes", "hydra", "tags", "logger", "callbacks")
_RESULTS = ("loss/val", "loss/train", "speed/tokens_per_second")  # of the table of runs
_TAGS = {
    "train_loss": "loss/train",
    "val_loss": "loss/val",
    "penalty": "loss/train_penalty",
    **{name: f"optim/{name}" for name in ("lr", "grad_norm", "clip_ratio")},
    **{name: f"optim_steps/{name}" for name in ("skipped_steps", "bf16_reruns", "tokens")},
    **{name: f"speed/{name}" for name in ("tokens_per_second", "step_time", "data_wait", "mfu_bf16")},
    **{name: f"system/{name}" for name in ("memory_gb", "gpu_power_watts", "gpu_utilization")},
}
_PREFIXES = {
    "fp8/": "precision_fp8/",
    "val_loss/": "loss/val/",  # of a source of a mixture, or of data.validation
    "ranking/": "ranking/",
    "tokens/": "optim_steps/tokens_of_",
    "epochs/": "optim_steps/epochs_of_",
}
_ONE_CHART = {"loss": {"training and validation": ["Multiline", ["^loss/train$", "^loss/val$"]]}}  # of custom scalars
_HISTOGRAMS = {"gradient": "tensors_gradients", "weight": "tensors_weights"}
_LARGEST_EXPONENT = 50.0  # of a perplexity that is shown: e^50


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
    loggers = build_files(config.logger, folder, resume_step)
    for service, options in ((Wandb, config.logger.wandb), (MLflow, config.logger.mlflow)):
        if options is not None:
            loggers.append(service(config, folder, in_sweep, resumed=resume_step is not None))
    return loggers + [registry.make("logger.extra", name, Logger, config, folder) for name in config.logger.extra]


class _Lossy:
    """A log that loses a row if the disk does not take it. The first time logs a warning."""

    _warned = False

    @contextmanager
    def _losing_rows(self, what: str, unless: Container[int | None] = ()) -> Iterator[None]:
        """Log a warning if `what` cannot be written. Raises OSError for the error numbers `unless`."""
        try:
            yield
        except OSError as error:
            if error.errno in unless:
                raise
            if not self._warned:
                log.warning("%s is not written, training goes on: %s", what, error)
            self._warned = True


class MetricsFile(_Lossy, Logger):
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
        own = {name: value for name, value in metrics.items() if is_known(name)}
        if own:
            row = {name: value.item() if isinstance(value, Tensor) else value for name, value in own.items()}
            self._rows.append({**row, "step": step or 0})
            self.save()

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the run's folder holds its configuration."""

    @rank_zero_only
    def save(self) -> None:
        """Write what is left."""
        self._write()

    @rank_zero_only
    def flush(self) -> None:
        """Write what is left, before a checkpoint. While the disk is full, the checkpoint is not taken either.

        Raises OSError for a full disk. Any other fault of the log only costs a warning.
        """
        self._write(unless=_FULL)

    def _write(self, unless: Container[int | None] = ()) -> None:
        with self._losing_rows("metrics.csv", unless):
            if self._rows:
                self._file.append(self._rows)
                self._rows = []


class FP8File(_Lossy):
    """Writes `folder/fp8.csv`: the health of each FP8 tensor at a step, a row each."""

    def __init__(self, folder: Path, resume_step: int | None):
        self._file = CSVLog(folder / "fp8.csv", FP8_COLUMNS, resume_step)

    def write(self, step: int, healths: Iterable[Health]) -> None:
        """Append the rows of one step. If the disk does not take them, they are lost."""
        with self._losing_rows("fp8.csv"):
            self._file.append([
                {"step": step, "layer": health.tensor.layer, "tensor": health.tensor.kind,
                 "format": health.tensor.format, **{name: getattr(health, name) for name in FP8_COLUMNS[4:]}}
                for health in healths
            ])  # fmt: skip


class EventFile(_Lossy, TensorBoardLogger):
    """A TensorBoardLogger that sorts metrics into groups, and writes every row into the file at once.

    A killed run continues from a checkpoint, and the rows before it must be in the file then. Readers drop everything
    of earlier files at or after `purge_step`. If the disk does not take a row, TensorBoard's writer does not recover.
    """

    def __init__(self, folder: Path, purge_step: int):
        super().__init__(folder, name="tensorboard", version="", default_hp_metric=False, purge_step=purge_step)

    @contextmanager
    def _open_writer(self) -> Iterator[SummaryWriter]:
        """Give the writer, and flush its file at the end."""
        with self._losing_rows("TensorBoard's log"):
            yield self.experiment
            self.experiment.flush()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row."""
        with self._open_writer() as writer:
            for tag, value in tag_metrics(metrics):
                writer.add_scalar(tag, value, step)

    @rank_zero_only
    def log_histograms(self, tensors: Iterable[TensorStats], step: int) -> None:
        """Write the histogram of each tensor, and of gradients the norm."""
        with self._open_writer() as writer:
            for tensor in tensors:
                writer.add_histogram_raw(
                    f"{_HISTOGRAMS[tensor.kind]}/{tensor.name}", -tensor.amax, tensor.amax, sum(tensor.counts),
                    tensor.sum, tensor.squares, tensor.edges[1:], tensor.counts, step,
                )  # fmt: skip
                if tensor.kind == "gradient":
                    writer.add_scalar(f"tensors_norm/{tensor.name}", tensor.norm, step)

    @rank_zero_only
    def log_fp8_tensors(self, healths: Iterable[Health], step: int) -> None:
        """Write the scale and the amax of each FP8 tensor, a curve each."""
        with self._open_writer() as writer:
            for health in healths:
                for figure, value in (("scale", health.scale), ("amax", health.amax)):
                    tag = f"precision_fp8_layers/{figure}_{health.tensor.kind}/{health.tensor.layer}"
                    writer.add_scalar(tag, value, step)

    @rank_zero_only
    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a text, shown character by character."""
        with self._open_writer() as writer:
            writer.add_text(tag, code_block(text), step)

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, metrics: Any = None, step: int | None = None) -> None:
        """Write a row of the table of runs, and a chart of both losses.

        Its results are the last points of the curves that matter. TensorBoard shows first the columns that differ.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2, summary_v2

        self.hparams.update(params or {})
        values, folder = dict(self.hparams), Path(self.save_dir).absolute()
        differing = {*_LABELS, *own_words.varied_keys(folder.parent)}
        experiment = api_pb2.Experiment(
            hparam_infos=[api_pb2.HParamInfo(name=name, differs=name in differing) for name in values],
            metric_infos=[summary_v2.Metric(tag).as_proto() for tag in _RESULTS],
        )
        content = plugin_data_pb2.HParamsPluginData(experiment=experiment)
        columns = Summary.Value(
            tag=metadata.EXPERIMENT_TAG, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR
        )
        trial = "/".join(part for part in folder.parts[-2:] if part != "outputs")  # more would not fit its column
        with self._open_writer() as writer:
            for summary in (Summary(value=[columns]), summary_v2.hparams_pb(values, trial_id=trial)):
                self.experiment.file_writer.add_summary(summary)
            writer.add_custom_scalars(_ONE_CHART)

    @rank_zero_only
    def save(self) -> None:
        """Do what Lightning asks for now and then; nothing is left to write."""
        with self._losing_rows("TensorBoard's log"):
            super().save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the file."""
        with self._losing_rows("TensorBoard's log"):
            super().finalize(status)


def is_known(name: str) -> bool:
    """Return whether a run itself logs a metric of this name; others are those of plugins."""
    return name in _TAGS or name.startswith(tuple(_PREFIXES))


def tag_metrics(metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield TensorBoard's tag and the value of each metric, and the perplexity of each loss: e to the loss in nats.

    A metric that is not this project's keeps its name.
    """
    for name, value in metrics.items():
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        tag = _PREFIXES[prefix] + name.removeprefix(prefix) if prefix else _TAGS.get(name, name)
        yield tag, value
        if name in ("train_loss", "val_loss") and float(value) < _LARGEST_EXPONENT:
            yield f"perplexity/{tag.removeprefix('loss/')}", math.exp(float(value))


def code_block(text: str) -> str:
    """Return Markdown that shows `text` as it is: no underscore becomes italics, and no space is lost."""
    return textwrap.indent(text, "    ", lambda line: True)


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
