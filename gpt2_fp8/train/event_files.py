"""TensorBoard's files: a run is three of TensorBoard's, of which `train` and `val` share their charts."""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from gpt2_fp8.compat import tensorboard_hparams
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.engine.histograms import TensorStats
from gpt2_fp8.train import tensorboard_tags as tags

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


log = logging.getLogger(__name__)


class Lossy:
    """A logger that loses a row if the disk does not take it. The first of several in a row logs a warning."""

    _failing = False
    _recovers = True  # whether a row that is written means that later ones are

    @contextmanager
    def losing_rows(self, what: str, unless: Container[int | None] = ()) -> Iterator[None]:
        """Log a warning if `what` cannot be written. Raises OSError for the error numbers `unless`."""
        try:
            yield
        except (OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error, ValueError) else error  # Lightning turns it into a ValueError
            if not isinstance(cause, OSError) or cause.errno in unless:
                raise
            if not self._failing:
                log.warning("%s is not written, training goes on: %s", what, cause)
            self._failing = True
        else:
            self._failing = self._failing and not self._recovers


_WHAT = "TensorBoard's log"
_GROUPS = {"gradient": "tensors_gradients", "weight": "tensors_weights"}


class EventFile(Lossy, TensorBoardLogger):
    """A TensorBoardLogger that sorts metrics by `tensorboard_tags`, and writes every row into the file at once.

    TensorBoard itself does so every two minutes. A killed run continues from a checkpoint, and the rows before it must
    be in the file then. `folder/tensorboard` holds texts and hyper-parameters, `train` and `val` in it the curves.

    Args:
        folder: the run's.
        purge_step: readers drop everything of earlier files at or after this step, in all three.
    """

    _recovers = False  # one of its writers may go on where another does not

    def __init__(self, folder: Path, purge_step: int):
        super().__init__(folder, name="tensorboard", version="", default_hp_metric=False, purge_step=purge_step)
        self._purge_step = purge_step
        self._parts: dict[str, SummaryWriter] = {}

    def _writers(self) -> dict[str, SummaryWriter]:
        """Return the writers of the curves. They are made together, so that a resume drops what is late in each."""
        if not self._parts:
            from torch.utils.tensorboard import SummaryWriter

            for name in tags.RUNS:
                self._parts[name] = SummaryWriter(str(Path(self.log_dir, name)), purge_step=self._purge_step)
            self.experiment.add_custom_scalars(tags.custom_charts())
        return self._parts

    def _flush(self) -> None:
        for writer in (self.experiment, *self._writers().values()):
            writer.flush()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write a row. If the disk does not take it, a warning is logged, and this and all later rows are lost.

        TensorBoard's writer does not recover.
        """
        with self.losing_rows(_WHAT):
            for run, tag, value in tags.placed(metrics):
                self._writers()[run].add_scalar(tag, value, step)
            self._flush()

    @rank_zero_only
    def log_histograms(self, tensors: Iterable[TensorStats], step: int) -> None:
        """Write the histogram of each tensor, and of gradients the norm."""
        with self.losing_rows(_WHAT):
            writer = self._writers()["train"]
            for tensor in tensors:
                writer.add_histogram_raw(
                    f"{_GROUPS[tensor.kind]}/{tensor.name}", -tensor.amax, tensor.amax, sum(tensor.counts), tensor.sum,
                    tensor.squares, tensor.edges[1:], tensor.counts, step,
                )  # fmt: skip
                if tensor.kind == "gradient":
                    writer.add_scalar(f"tensors_norm/{tensor.name}", tensor.norm, step)
            self._flush()

    @rank_zero_only
    def log_fp8_tensors(self, healths: Iterable[Health], step: int) -> None:
        """Write the scale and the amax of each FP8 tensor, a curve each."""
        with self.losing_rows(_WHAT):
            writer = self._writers()["train"]
            for health in healths:
                for figure, value in (("scale", health.scale), ("amax", health.amax)):
                    writer.add_scalar(tags.of_layer(figure, health.tensor.kind, health.tensor.layer), value, step)
            self._flush()

    @rank_zero_only
    def log_text(self, tag: str, text: str, step: int) -> None:
        """Write a text, shown character by character. If the disk does not take it, a warning is logged."""
        with self.losing_rows(_WHAT):
            self.experiment.add_text(tag, code_block(text), step)
            self.experiment.flush()

    @rank_zero_only
    def log_hyperparams(self, params: Any = None, metrics: Any = None, step: int | None = None) -> None:
        """Write a row of the table of runs. Its results are the last points of the curves that matter."""
        self.hparams.update(params or {})
        with self.losing_rows(_WHAT):
            self._writers()
            trial = "/".join(Path(self.save_dir).absolute().parts[-2:])  # more would not fit its column
            tensorboard_hparams.write(self.experiment, dict(self.hparams), tags.HYPER_PARAMETERS, trial)
            self.experiment.flush()

    @rank_zero_only
    def save(self) -> None:
        """Do what Lightning asks for now and then; nothing is left to write."""
        with self.losing_rows(_WHAT):
            super().save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the files. If the disk does not take it, a warning is logged."""
        with self.losing_rows(_WHAT):
            super().finalize(status)
            for writer in self._parts.values():
                writer.close()


def code_block(text: str) -> str:
    """Return Markdown that shows `text` as it is: no underscore becomes italics, and no space is lost."""
    longest = max((len(run) for run in re.findall("~+", text)), default=0)
    fence = "~" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
