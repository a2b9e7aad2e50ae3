"""The four kinds of text file: .txt, .jsonl, .jsonl.zst and .parquet. How each is cut into units, and read.

.txt      a document each; a file of more than `RANGE` bytes is cut at newlines into documents of about that size
.jsonl    a document a line, under the text column's key; units are ranges of about `RANGE` bytes
.jsonl.zst  the same; a unit is the whole file, since it cannot be entered in the middle
.parquet  a document a row; a unit is a row group
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from gpt2_fp8.config.errors import Problem
from gpt2_fp8.data.documents import DocumentCounts
from gpt2_fp8.data.units import Unit

RANGE = 8 << 20  # bytes
ENDINGS = (".txt", ".jsonl", ".jsonl.zst", ".parquet")


def ending(path: str | Path) -> str | None:
    """Which of `ENDINGS` the name has."""
    return next((e for e in ENDINGS if str(path).lower().endswith(e)), None)


def problems(path: Path, column: str) -> list[Problem]:
    """What the user has to mend about a file before it can be read; empty when nothing."""
    kind = ending(path)
    if kind is None:
        return [Problem(f"unknown kind of file: {path}", f"give files that end in {', '.join(ENDINGS)}")]
    try:
        names = _text_columns(path) if kind == ".parquet" else _first_keys(path) if "jsonl" in kind else {column}
    except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
        return [Problem(f"cannot read {path}: {error}", "repair the file or leave it out")]
    if names is None or column in names:  # None: not one JSON object; its lines are skipped and counted
        return []
    have = ", ".join(sorted(names)) or "none"
    return [Problem(f"{path} has no text column {column!r}", f"set data.text_column to one of its own: {have}")]


def units(path: Path) -> list[Unit]:
    """The whole file, in units."""
    stat = path.stat()
    kind, size = ending(path), stat.st_size
    if kind == ".parquet":
        import pyarrow.parquet as pq

        cuts = list(range(pq.read_metadata(path).num_row_groups + 1))
    elif kind == ".jsonl.zst":
        cuts = [0, size]
    else:
        with path.open("rb") as file:
            inner = (cut_after_newline(file, at, hard=kind == ".txt") for at in range(RANGE, size - RANGE // 2, RANGE))
            cuts = sorted({0, *inner, size})
    version = f"{size} {stat.st_mtime_ns}"
    return [Unit(f"{path.name} {size} [{a}:{b}]", str(path), a, b, version) for a, b in pairwise(cuts)]


def held_out(path: Path, fraction: float) -> tuple[list[Unit], list[Unit]]:
    """The units to train on and those to validate with, where `fraction` of the file is for the latter."""
    whole = units(path)
    if ending(path) != ".txt":
        sides = ([replace(u, side=side, val_fraction=fraction) for u in whole] for side in ("train", "val"))
        return next(sides), next(sides)
    size = path.stat().st_size
    with path.open("rb") as file:
        cut = cut_after_newline(file, int(size * (1 - fraction)), hard=True)
    return _between(whole, 0, cut), _between(whole, cut, size)


def _between(whole: list[Unit], start: int, stop: int) -> list[Unit]:
    """The units of a .txt, clipped to a range of bytes."""
    clipped = (replace(u, start=max(u.start, start), stop=min(u.stop, stop)) for u in whole)
    return [replace(u, name=f"{u.name} [{u.start}:{u.stop}]") for u in clipped if u.start < u.stop]


def cut_after_newline(file: BinaryIO, at: int, *, hard: bool) -> int:
    """The first start of a line from byte `at` on; the file's size where there is none.

    With `hard`, `at` itself (moved on to where a UTF-8 character starts) where no line starts within 1 MiB.
    """
    if at <= 0:
        return 0
    file.seek(at - 1)  # where a newline makes `at` itself the start of a line
    window = file.read(1 << 20) if hard else file.readline()
    newline = window.find(b"\n")
    if newline >= 0:
        return at + newline
    if not hard:
        return at - 1 + len(window)
    return at + next((i for i, byte in enumerate(window[1:5]) if byte & 0xC0 != 0x80), 0)


def read(unit: Unit, column: str, counts: DocumentCounts) -> Iterator[object]:
    """The documents of a unit: bytes, str, or whatever else stands in their place."""
    kind = ending(unit.path)
    if kind == ".parquet":
        import pyarrow.parquet as pq

        file = pq.ParquetFile(unit.path)
        groups = list(range(unit.start, unit.stop))
        for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[column]):
            yield from as_documents(batch.column(0))
    elif kind == ".txt":
        with open(unit.path, "rb") as text:
            text.seek(unit.start)
            yield text.read(unit.stop - unit.start)
    else:
        yield from json_documents(_lines(unit), column, counts)


def as_documents(column: Any) -> list[bytes | None]:
    """The values of an Arrow column of text. As bytes: Arrow checks no UTF-8 until it makes a str, and then raises."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.large_binary()).to_pylist()


def json_documents(lines: Iterable[bytes], column: str, counts: DocumentCounts) -> Iterator[object]:
    """The text of each line; lines that are no JSON object are counted as broken, blank ones passed over."""
    for line in lines:
        if not line.strip():
            continue
        try:
            # surrogateescape: bytes that are no UTF-8 reach `documents.clean`, which repairs and counts them
            row = json.loads(line.decode(errors="surrogateescape"))
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            yield row.get(column)
        else:
            counts.broken += 1


def _lines(unit: Unit) -> Iterator[bytes]:
    if ending(unit.path) == ".jsonl":
        with open(unit.path, "rb") as file:
            file.seek(unit.start)
            left = unit.stop - unit.start
            while left > 0 and (line := file.readline(left)):
                left -= len(line)
                yield line
        return
    import pyarrow as pa

    with pa.OSFile(unit.path) as raw, pa.CompressedInputStream(raw, "zstd") as stream:  # reads files of many frames too
        yield from io.BufferedReader(stream, 1 << 20)


def _text_columns(path: Path) -> set[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    t = pa.types
    text = (t.is_string, t.is_large_string, t.is_string_view, t.is_binary, t.is_large_binary, t.is_binary_view)
    types = {f.name: f.type.value_type if t.is_dictionary(f.type) else f.type for f in pq.read_schema(path)}
    return {name for name, kind in types.items() if any(is_text(kind) for is_text in text)}


def _first_keys(path: Path) -> set[str] | None:
    """The keys of the first JSON object among the first hundred lines; None where there is none."""
    lines = _lines(Unit(path.name, str(path), 0, path.stat().st_size))
    for _, line in zip(range(100), lines, strict=False):
        try:
            row = json.loads(line.decode(errors="surrogateescape"))
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            return set(row)
    return None
