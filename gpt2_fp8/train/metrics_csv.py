"""`metrics.csv` and `fp8.csv`: a run appends rows, a resumed run continues them, reports read them. Stdlib only."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpt2_fp8.checkpoint import durable

log = logging.getLogger(__name__)


class Rows(NamedTuple):
    """What can be read of a file."""

    rows: list[dict[str, float]]  # by column; an empty cell is missing
    damage: str | None  # why no more can be read; None: that is all


def read(path: Path, wanted: Collection[str]) -> Rows:
    """Return the steps and the columns `wanted` of the rows that have any of them, up to the first damage."""
    rows, damage = list[dict[str, float]](), None
    try:
        for row in _read_rows(path):
            found = {name: float(cell) for name, cell in row.items() if cell and name in wanted}
            if found:
                rows.append({"step": int(row["step"]), **found})
    except (OSError, ValueError) as error:
        damage = str(error)
    return Rows(rows, damage)


class CSVLog:
    """A CSV file of rows by step, whose columns grow from `columns`. Nothing is touched before the first row.

    After a resume from a checkpoint of `resume_step`, rows of later steps are dropped, and values that the file has at
    this step are not written again: a validation may be repeated after a kill. None: a new file is begun.
    """

    def __init__(self, path: Path, columns: Sequence[str], resume_step: int | None):
        self.path, self._columns, self._resume_step = path, list(columns), resume_step
        self._known: set[str] | None = None  # columns with a value at `resume_step`; None before the first row

    def append(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Append rows, each with a `step`, all or none of them. Raises OSError."""
        if self._known is None:
            self._known = self._begin()
        new = []
        for row in rows:
            known = self._known if row["step"] == self._resume_step else ()
            if len(rest := {name: value for name, value in row.items() if name not in known}) > 1:
                new.append(rest)
        missing = sorted({name for row in new for name in row} - set(self._columns))
        if missing or not self.path.is_file():  # somebody may have moved it
            self._rewrite([*self._columns, *missing], list(_read_rows(self.path)))
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns).writerows(new)
        durable.append(self.path, text.getvalue().encode())

    def _begin(self) -> set[str]:
        """Drop the rows of later steps, and return the columns that are known at `resume_step`."""
        kept: list[dict[str, str]] = []
        if self._resume_step is not None:
            try:
                kept = [row for row in _read_rows(self.path) if int(row["step"]) <= self._resume_step]
            except ValueError as error:
                aside = durable.put_aside(self.path).name
                log.warning("%s is damaged (%s): it is put aside as %s", self.path, error, aside)
        self._rewrite(list(dict.fromkeys([*(kept[0] if kept else ()), *self._columns])), kept)
        at_resume = [row for row in kept if int(row["step"]) == self._resume_step]
        return {name for row in at_resume for name, cell in row.items() if cell} - {"step"}

    def _rewrite(self, columns: list[str], rows: Sequence[Mapping[str, object]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        durable.write_text(self.path, text.getvalue())
        self._columns = columns


def _read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a file, if it is there, without a last line that a kill tore. Raises ValueError at another."""
    if not path.exists():
        return
    text = path.read_bytes().decode(errors="replace")
    lines = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    try:
        if lines.fieldnames and lines.fieldnames[0] != "step":
            raise ValueError("it is not a run's")
        for row in lines:
            if None in row or None in row.values() or not row["step"].isdigit():
                raise ValueError(f"line {lines.line_num} is not a row of a run's")
            yield row
    except csv.Error as error:
        raise ValueError(str(error)) from None
