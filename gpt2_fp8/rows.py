"""The rows of a `metrics.csv`: read as far as they can be, and the file put aside where it is damaged."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
import stat
from pathlib import Path

from gpt2_fp8.checkpoint import durable

log = logging.getLogger(__name__)

Row = dict[str, str]

LARGEST = 4 << 30  # bytes of a file that is read: a hundred times what a long run logs
LONGEST = 1 << 16  # of a line
_STEP = re.compile(r"[0-9]{1,15}")


def rescued(path: Path) -> list[Row]:
    """The complete rows of `path`, none where there is no such file.

    A last line without its end, which a killed process left, is dropped: it may hold half a number. Where more is
    damaged, or something else stands in the place, what was there is put aside and stays, and the log says so. Raises
    OSError where it cannot be.
    """
    try:
        rows, damage = _read(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        rows, damage = [], error.strerror or str(error)
    if damage:
        aside = durable.put_aside(path)
        log.warning("%s is damaged (%s): it is put aside as %s, and what can be read of it goes on with %d rows",
                    path, damage, aside.name, len(rows))  # fmt: skip
    return rows


def up_to(path: Path, step: int) -> list[Row]:
    """Those of `rescued` that are of no later step."""
    return [row for row in rescued(path) if int(row["step"]) <= step]


def _read(path: Path) -> tuple[list[Row], str | None]:
    """The rows that can be read, and what is wrong with the others. Raises OSError for anything but a regular file."""
    with os.fdopen(durable.open_regular(path, os.O_RDONLY), "rb") as file:
        if (size := os.fstat(file.fileno())[stat.ST_SIZE]) > LARGEST:
            return [], f"it has {size:,} bytes"
        columns = _cells(first := file.readline(LONGEST))
        if columns is None or "step" not in columns or len(set(columns)) < len(columns):
            return [], None if not first.endswith(b"\n") and len(first) < LONGEST else "its first line names no columns"
        rows: list[Row] = []
        bad: list[int] = []
        number = 1
        while line := file.readline(LONGEST):
            number += 1
            if not line.endswith(b"\n") and len(line) < LONGEST:
                break  # torn by a kill
            if row := _row(columns, _cells(line)):
                rows.append(row)
            else:
                bad.append(number)
        return rows, f"{len(bad)} lines, the first of them line {bad[0]}" if bad else None


def _cells(line: bytes) -> list[str] | None:
    """The fields of a line; None where it is none of ours."""
    try:
        (cells,) = csv.reader(io.StringIO(line.decode("utf-8"), newline=""), strict=True)
    except (ValueError, csv.Error):  # UnicodeDecodeError, and no or many lines, are ValueErrors
        return None
    return cells


def _row(columns: list[str], cells: list[str] | None) -> Row | None:
    """A row, where the cells are one: a step, and a number or nothing in each of the other columns."""
    if cells is None or len(cells) != len(columns):
        return None
    row = dict(zip(columns, cells, strict=True))
    return row if _STEP.fullmatch(row["step"]) and all(map(_is_number, cells)) else None


def _is_number(cell: str) -> bool:
    try:
        float(cell or "0")
    except ValueError:
        return False
    return True
