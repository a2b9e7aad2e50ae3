"""The rows of `metrics.csv` and `fp8.csv`: copied or read. A file that is damaged is put aside whole. Stdlib only."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpt2_fp8.checkpoint import durable

log = logging.getLogger(__name__)

# What a run logs. A header with any other name is not this project's, and the meaning of its numbers is unknown.
COLUMNS = {
    *(
        "step",
        "train_loss",
        "penalty",
        "val_loss",
        "lr",
        "grad_norm",
        "clip_ratio",
        "skipped_steps",
        "bf16_reruns",
        "tokens",
    ),
    *("tokens_per_second", "step_time", "data_wait", "mfu_bf16", "memory_gb", "gpu_power_watts", "gpu_utilization"),
    *(f"fp8/{figure}_{kind}" for figure in ("amax", "scale", "headroom", "saturated", "flushed")
      for kind in ("input", "weight", "gradient")),
    *("fp8/scale_jump", "fp8/scale_age"),
}  # fmt: skip
_OF_A_SOURCE = re.compile(r"(val_loss|tokens|epochs)/[A-Za-z][A-Za-z0-9_]{0,39}")  # of a mixture


def is_column(name: str) -> bool:
    """Return whether a run logs a metric of this name."""
    return name in COLUMNS or _OF_A_SOURCE.fullmatch(name) is not None


class Table(NamedTuple):
    """What a file may hold: the names of its columns, and which of them hold words. The others hold numbers."""

    is_column: Callable[[str], bool]
    words: frozenset[str] = frozenset()


METRICS = Table(is_column)


class Renewed(NamedTuple):
    """What a file holds now."""

    columns: list[str]
    rows: int
    at_last: set[str]  # the columns, except the step, with a value at the step `last`


class Rows(NamedTuple):
    """What can be read of a file."""

    rows: list[dict[str, float]]  # by column; an empty cell is missing
    damage: str | None  # why no more can be read; None: that is all


def read(path: Path, wanted: Collection[str]) -> Rows:
    """Return the rows of the `metrics.csv` at `path`: their steps, and the columns `wanted`. Raises nothing.

    Rows without any of the columns are left out, and so is a last line without its end.
    """
    rows: list[dict[str, float]] = []
    try:
        lines = _lines(path, METRICS)
        columns = next(lines, [])
        for cells in lines:
            named = zip(columns[1:], cells[1:], strict=True)
            if row := {name: float(cell) for name, cell in named if cell and name in wanted}:
                rows.append({"step": int(cells[0]), **row})
    except (OSError, ValueError) as error:
        return Rows(rows, str(error))
    return Rows(rows, None)


def renew(path: Path, wanted: Sequence[str] = (), last: int | None = None, table: Table = METRICS) -> Renewed:
    """Write `path` again, whole or not at all, with its rows up to the step `last` (None: all).

    The columns `wanted` are added to its own. Without any row or wanted column, the file stays as it is. A last line
    without its end, which a killed process left, is dropped. A file that is damaged otherwise is renamed and kept, and
    a new one begun; the log says so. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        renewed = _copy(path, temporary, wanted, last, table)
    except ValueError as error:
        log.warning("%s is damaged (%s): it is put aside as %s", path, error, durable.put_aside(path).name)
        renewed = _copy(path, temporary, wanted, last, table)
    if renewed.rows or wanted:
        os.replace(temporary, path)
    else:
        temporary.unlink()
    return renewed


def _copy(path: Path, to: Path, wanted: Sequence[str], last: int | None, table: Table) -> Renewed:
    lines, count, at_last = _lines(path, table), 0, set()
    own = next(lines, [])
    columns = [*own, *(name for name in wanted if name not in own)]
    more = [""] * (len(columns) - len(own))
    with open(to, "w", encoding="utf-8", newline="") as file:
        file.write(",".join(columns) + "\r\n")
        for cells in lines:
            step = int(cells[0])
            if last is None or step <= last:
                file.write(",".join([*cells, *more]) + "\r\n")
                count += 1
            if step == last:
                at_last |= {name for name, cell in zip(own, cells, strict=True) if cell} - {"step"}
    return Renewed(columns, count, at_last)


def _lines(path: Path, table: Table) -> Iterator[list[str]]:
    """Yield the cells of a file's lines, the columns' names first; nothing if it is not there.

    Raises ValueError at a line that is no row.
    """
    columns: list[str] = []
    with suppress(FileNotFoundError), open(path, encoding="utf-8", newline="") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return  # torn by a kill
            cells = line.rstrip("\r\n").split(",")
            if number == 1 and (cells[0] != "step" or not all(map(table.is_column, cells))):
                raise ValueError("its first line does not name a run's columns")
            if number > 1 and not _is_row(columns, cells, table):
                raise ValueError(f"line {number} is not a row of its columns")
            columns = columns or cells
            yield cells


def _is_row(columns: list[str], cells: list[str], table: Table) -> bool:
    if len(cells) != len(columns) or not cells[0].isdigit():
        return False
    try:
        return all(
            not cell or name in table.words or float(cell) is not None
            for name, cell in zip(columns, cells, strict=True)
        )
    except ValueError:
        return False
