"""TensorBoard's files: a run is three of TensorBoard's, of which `train` and `val` share their charts.

TensorBoard sorts tags by name, makes a group of what comes before the first slash, and opens the first two groups. So
the names are chosen to begin with the loss: loss, optim, optim_steps, precision_fp8, precision_fp8_layers, speed,
system, tensors_*.
"""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.callbacks.histograms import TensorStats
from gpt2_fp8.engine.fp8_health import Health

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

RUNS = ("train", "val")
_RESULTS = (("loss", "val"), ("loss", "train"), ("speed/tokens_per_second", "train"))  # of the table of runs: tag, run
_TAGS = {
    "train_loss": ("train", "loss"),
    "val_loss": ("val", "loss"),
    "penalty": ("train", "loss/penalty"),
    **{name: ("train", f"optim/{name}") for name in ("lr", "grad_norm", "clip_ratio")},
    **{name: ("train", f"optim_steps/{name}") for name in ("skipped_steps", "bf16_reruns", "tokens")},
    **{name: ("train", f"speed/{name}") for name in ("tokens_per_second", "step_time", "data_wait", "mfu_bf16")},
    **{name: ("train", f"system/{name}") for name in ("memory_gb", "gpu_power_watts", "gpu_utilization")},
}
_PREFIXES = {
    "fp8/": ("train", "precision_fp8/"),
    "val_loss/": ("val", "loss/"),  # of a source of a mixture
    "tokens/": ("train", "optim_steps/tokens_of_"),
    "epochs/": ("train", "optim_steps/epochs_of_"),
}
_HISTOGRAMS = {"gradient": "tensors_gradients", "weight": "tensors_weights"}
_LARGEST_EXPONENT = 50.0  # of a perplexity that is shown: e^50
_LOG = "TensorBoard's log"


def is_known(name: str) -> bool:
    """Return whether a run itself logs a metric of this name; others are those of plugins."""
    return name in _TAGS or name.startswith(tuple(_PREFIXES))


def place_metric(name: str) -> tuple[str, str]:
    """Return the run and the tag of a metric. One that is not this project's keeps its name."""
    if name in _TAGS:
        return _TAGS[name]
    for prefix, (run, tag) in _PREFIXES.items():
        if name.startswith(prefix):
            return run, tag + name.removeprefix(prefix)
    return ("val" if name.startswith("val_") else "train"), name


def place_metrics(metrics: Mapping[str, float]) -> Iterator[tuple[str, str, float]]:
    """Yield run, tag and value of each metric, and the perplexity of each loss: e to the loss in nats."""
    for name, value in metrics.items():
        run, tag = place_metric(name)
        yield run, tag, value
        if tag == "loss" and name in _TAGS and float(value) < _LARGEST_EXPONENT:
            yield run, "loss/perplexity", math.exp(float(value))


class Lossy:
    """A log that loses a row if the disk does not take it. The first time logs a warning."""

    _warned = False

    @contextmanager
    def losing_rows(self, what: str, unless: Container[int | None] = ()) -> Iterator[None]:
        """Log a warning if `what` cannot be written. Raises OSError for the error numbers `unless`."""
        try:
            yield
        except OSError as error:
            if error.errno in unless:
                raise
            if not self._warned:
                log.warning("%s is not written, training goes on: %s", what, error)
            self._warned = True


class EventFile(Lossy, TensorBoardLogger):
    """A TensorBoardLogger that sorts metrics into groups, and writes every row into the file at once.

    A killed run continues from a checkpoint, and the rows before it must be in the file then. `folder/tensorboard`
    holds texts and hyper-parameters, `train` and `val` in it the curves, of which readers drop everything of earlier
    files at or after `purge_step`. If the disk does not take a row, TensorBoard's writer does not recover.
    """

    def __init__(self, folder: Path, purge_step: int):
        super().__init__(folder, name="tensorboard", version="", default_hp_metric=False, purge_step=purge_step)
        self._purge_step = purge_step
        self._parts: dict[str, SummaryWriter] = {}

    def _writers(self) -> dict[str, SummaryWriter]:
        """Return the writers of the curves. They are made together, so that a resume drops what is late in each."""
        if not self._parts:
            from torch.utils.tensorboard import SummaryWriter

            for name in RUNS:
                self._parts[name] = SummaryWriter(str(Path(self.log_dir, name)), purge_step=self._purge_step)
        return self._parts

    @contextmanager
    def _writing(self) -> Iterator[dict[str, SummaryWriter]]:
        """Give the writers of the curves, and flush all files at the end."""
        with self.losing_rows(_LOG):
            yield self._writers()
            for writer in (self.experiment, *self._parts.values()):
                writer.flush()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row."""
        with self._writing() as writers:
            for run, tag, value in place_metrics(metrics):
                writers[run].add_scalar(tag, value, step)

    @rank_zero_only
    def log_histograms(self, tensors: Iterable[TensorStats], step: int) -> None:
        """Write the histogram of each tensor, and of gradients the norm."""
        with self._writing() as writers:
            for tensor in tensors:
                writers["train"].add_histogram_raw(
                    f"{_HISTOGRAMS[tensor.kind]}/{tensor.name}", -tensor.amax, tensor.amax, sum(tensor.counts),
                    tensor.sum, tensor.squares, tensor.edges[1:], tensor.counts, step,
                )  # fmt: skip
                if tensor.kind == "gradient":
                    writers["train"].add_scalar(f"tensors_norm/{tensor.name}", tensor.norm, step)

    @rank_zero_only
    def log_fp8_tensors(self, healths: Iterable[Health], step: int) -> None:
        """Write the scale and the amax of each FP8 tensor, a curve each."""
        with self._writing() as writers:
            for health in healths:
                for figure, value in (("scale", health.scale), ("amax", health.amax)):
                    tag = f"precision_fp8_layers/{figure}_{health.tensor.kind}/{health.tensor.layer}"
                    writers["train"].add_scalar(tag, value, step)

    @rank_zero_only
    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a text, shown character by character."""
        with self._writing():
            self.experiment.add_text(tag, code_block(text), step)

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, metrics: Any = None, step: int | None = None) -> None:
        """Write a row of the table of runs. Its results are the last points of the curves that matter."""
        from tensorboard.plugins.hparams import summary_v2  # the public module wants TensorFlow

        self.hparams.update(params or {})
        values = dict(self.hparams)
        columns = [summary_v2.HParam(name) for name in values]
        results = [summary_v2.Metric(tag, group=run, display_name=f"{run}: {tag}") for tag, run in _RESULTS]
        trial = "/".join(Path(self.save_dir).absolute().parts[-2:])  # more would not fit its column
        with self._writing():
            self.experiment.file_writer.add_summary(summary_v2.hparams_config_pb(columns, results))
            self.experiment.file_writer.add_summary(summary_v2.hparams_pb(values, trial_id=trial))

    @rank_zero_only
    def save(self) -> None:
        """Do what Lightning asks for now and then; nothing is left to write."""
        with self.losing_rows(_LOG):
            super().save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the files."""
        with self.losing_rows(_LOG):
            super().finalize(status)
            for writer in self._parts.values():
                writer.close()


def code_block(text: str) -> str:
    """Return Markdown that shows `text` as it is: no underscore becomes italics, and no space is lost."""
    return textwrap.indent(text, "    ", lambda line: True)
