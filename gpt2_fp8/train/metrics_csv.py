"""The rows of `metrics.csv` and `fp8.csv`, which may be torn, damaged or replaced: copied or read. Stdlib only."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

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
LARGEST_BYTES = 4 << 30  # of a file that is read: a hundred times what a long run logs
LONGEST_LINE_BYTES = 1 << 16
SLOW_SECONDS = 3.0  # of reading, after which the log says so
_CELL = r"(?:-?(?:[0-9]{1,40}(?:\.[0-9]{1,40})?(?:e[-+]?[0-9]{1,3})?|inf)|nan)?"
_WORD = r"[A-Za-z0-9_.]{1,60}"
_CLOCK_LINES = 1 << 14  # lines between two looks at the clock


def is_column(name: str) -> bool:
    """Return whether a run logs a metric of this name."""
    return name in COLUMNS or _OF_A_SOURCE.fullmatch(name) is not None


class Table(NamedTuple):
    """What a file may hold: the names of its columns, and which of them hold words. The others hold numbers."""

    is_column: Callable[[str], bool]
    words: frozenset[str] = frozenset()

    def row(self, columns: Sequence[str]) -> re.Pattern[bytes]:
        """Return the pattern of a row, line end included. The first column is the step."""
        cells = (_WORD if name in self.words else _CELL for name in columns[1:])
        return re.compile(",".join(["[0-9]{1,15}", *cells]).encode() + rb"\r?\n")


METRICS = Table(is_column)


class Renewed(NamedTuple):
    """What a file holds now."""

    columns: list[str]
    rows: int
    at_last: set[str]  # the columns, except the step, with a value at the step `last`


class Rows(NamedTuple):
    """What can be read of a file."""

    rows: list[dict[str, float]]  # by column; an empty cell is missing
    damage: str | None  # what is wrong with the file; None: nothing


def read(path: Path, wanted: Collection[str], most: int = 1_000_000) -> Rows:
    """Return the rows of the `metrics.csv` at `path`: their steps, and the columns `wanted`. Raises nothing.

    A last line without its end is left out, and lines that are no rows; of these the damage is told. Rows without any
    of the columns are left out too. At most `most` rows are read.
    """
    source = _Source(path, METRICS)
    wanted_at = [(place, name) for place, name in enumerate(source.columns) if name in wanted]
    rows: list[dict[str, float]] = []
    for line in source.lines():
        cells = line.split(",")
        if row := {name: float(cells[place]) for place, name in wanted_at if cells[place]}:
            if len(rows) == most:
                return Rows(rows, f"it has more than {most:,} rows")
            rows.append({"step": int(cells[0]), **row})
    return Rows(rows, source.damage)


def renew(path: Path, wanted: Sequence[str] = (), last: int | None = None, table: Table = METRICS) -> Renewed:
    """Write `path` again, whole or not at all, with its complete rows up to the step `last` (None: all).

    The columns `wanted` are added to its own. Without any row or wanted column, the file stays as it is. A last line
    without its end, which a killed process left, is dropped: it may hold half a number.

    If more is damaged, or `path` is not a regular file, what was there is renamed and kept, and the log says so. Raises
    OSError if that fails, or if the new file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with durable.create(temporary) as file:
        source = _Source(path, table)
        added = [name for name in wanted if name not in source.columns]
        renewed = _copy(source, file, [*source.columns, *added], "," * len(added), last)
    if source.damage:
        aside = durable.put_aside(path)
        log.warning("%s is damaged (%s): it is put aside as %s, and what can be read of it goes on with %d rows",
                    path, source.damage, aside.name, renewed.rows)  # fmt: skip
    if renewed.rows or wanted:
        os.replace(temporary, path)
    else:
        temporary.unlink()
    return renewed


def _copy(source: _Source, file: IO[str], columns: list[str], more: str, last: int | None) -> Renewed:
    file.write(",".join(columns) + "\r\n")
    count, at_last = 0, set()
    for line in source.lines():
        cells = line.split(",")
        if last is None or int(cells[0]) <= last:
            file.write(line + more + "\r\n")
            count += 1
        if int(cells[0]) == last:
            at_last |= {name for name, cell in zip(source.columns, cells, strict=True) if cell} - {"step"}
    return Renewed(columns, count, at_last)


class _Source:
    """A file's columns (empty: it has none), its good lines, and after these, what is wrong with it."""

    def __init__(self, path: Path, table: Table) -> None:
        self.columns: list[str] = []
        self._table = table
        self.damage: str | None = None
        self._path = path
        self._file: IO[bytes] | None = None
        try:
            self._begin()
        except FileNotFoundError:
            pass
        except OSError as error:
            self.damage = error.strerror or str(error)

    def _begin(self) -> None:
        file = os.fdopen(durable.open_regular(self._path, os.O_RDONLY), "rb")
        if (size := os.fstat(file.fileno())[stat.ST_SIZE]) > LARGEST_BYTES:
            file.close()
            self.damage = f"it has {size:,} bytes"
            return
        self._file = file
        first = file.readline(LONGEST_LINE_BYTES)
        columns = first.decode("ascii", "replace").removesuffix("\n").removesuffix("\r").split(",")
        if (
            first.endswith(b"\n")
            and columns[0] == "step"
            and all(map(self._table.is_column, columns))
            and len(set(columns)) == len(columns)
        ):
            self.columns = columns
        elif first.endswith(b"\n") or len(first) == LONGEST_LINE_BYTES:
            self.damage = "its first line names no columns, or others than a run's"

    def lines(self) -> Iterator[str]:
        """Yield the lines that are rows, without their line ends."""
        if self._file is None:
            return
        with self._file as file:
            if self.columns:
                try:
                    yield from self._rows(file)
                except OSError as error:  # only from reading: an error of the caller is raised in the caller
                    self.damage = error.strerror or str(error)

    def _rows(self, file: IO[bytes]) -> Iterator[str]:
        row = self._table.row(self.columns)
        said, since = False, time.monotonic()
        bad, first_bad, number, whole = 0, 0, 1, True
        while line := file.readline(LONGEST_LINE_BYTES):
            began, whole = whole, line.endswith(b"\n")
            if not whole and len(line) < LONGEST_LINE_BYTES:
                break  # torn by a kill
            if not began:
                continue  # the rest of a line that is too long
            number += 1
            if row.fullmatch(line):
                yield line.decode().rstrip("\r\n")
            else:
                bad, first_bad = bad + 1, first_bad or number
            if number % _CLOCK_LINES == 0 and not said and time.monotonic() - since > SLOW_SECONDS:
                said = True
                log.info("%s is long: its rows are being read (%d so far)", self._path, number)
        self.damage = f"{bad} lines, the first of them line {first_bad}" if bad else None
