"""`fp8.csv` in a run's folder: the health of each FP8 tensor at a step, a row each. Every step is there once."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from gpt2_fp8.checkpoint import durable
from gpt2_fp8.engine.fp8_health import Health
from gpt2_fp8.train.loggers import Lossy
from gpt2_fp8.train.metrics_csv import Table, renew

WORDS = ("layer", "tensor", "format")
COLUMNS = ("step", *WORDS, "amax", "scale", "headroom", "saturated", "flushed", "age", "jump")
TABLE = Table(frozenset(COLUMNS).__contains__, frozenset(WORDS))


class FP8File(Lossy):
    """Writes `folder/fp8.csv`. It continues an existing file, as `loggers.MetricsFile` does, and is as lossy.

    Args:
        resume_step: the step of the checkpoint that the run continues from; rows of later steps are dropped. None: a
            file that is there is replaced.
    """

    def __init__(self, folder: Path, resume_step: int | None):
        self._path, self._resume_step, self._begun = folder / "fp8.csv", resume_step, False

    def write(self, step: int, healths: Iterable[Health]) -> None:
        """Append the rows of one step. If the disk does not take them, a warning is logged, and they are lost."""
        with self.losing_rows("fp8.csv"):
            if not self._begun:
                self._begin()
            elif not self._path.is_file():  # somebody has moved it
                renew(self._path, COLUMNS, table=TABLE)
            text = io.StringIO(newline="")
            csv.writer(text).writerows(_row(step, health) for health in healths)
            durable.append(self._path, text.getvalue().encode())

    def _begin(self) -> None:
        """Keep the rows up to the step that the run continues from, or start a new file. Raises OSError."""
        last = 0 if self._resume_step is None else self._resume_step
        if self._resume_step is None:
            self._path.unlink(missing_ok=True)
        columns = renew(self._path, COLUMNS, last, TABLE).columns
        if columns != list(COLUMNS):  # of another version
            durable.put_aside(self._path)
            renew(self._path, COLUMNS, last, TABLE)
        self._begun = True


def _row(step: int, health: Health) -> list[object]:
    tensor = health.tensor
    figures = health.amax, health.scale, health.headroom, health.saturated, health.flushed, health.age, health.jump
    return [step, tensor.layer, tensor.kind, tensor.format, *("" if value is None else value for value in figures)]
