"""The four kinds of text file: .txt, .jsonl, .jsonl.zst and .parquet. How each is cut into units, and read.

.txt      a document each; a file of more than `RANGE` bytes is cut at newlines into documents of about that size
.jsonl    a document a line, under the text column's key; units are ranges of about `RANGE` bytes
.jsonl.zst  the same; a unit is the whole file, since it cannot be entered in the middle
.parquet  a document a row; a unit is a row group

Files come from strangers: what a small one unfolds to is bounded, and so is the memory that a line takes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from gpt2_fp8.config.errors import Problem, UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data import bounds
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
        if kind == ".parquet":
            _check_declared(path, column)
    except UserError as error:
        return error.problems
    except (OSError, ValueError) as error:  # Arrow's errors are ValueErrors
        return [Problem(f"cannot read {path}: {printable(str(error))}", "repair the file or leave it out")]
    if names is None or column in names:  # None: not one JSON object; its lines are skipped and counted
        return []
    have = printable(", ".join(sorted(names)))[:300] or "none"
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
            cuts = [0]
            for at in range(RANGE, size - RANGE // 2, RANGE):
                if at > cuts[-1]:  # or else that cut is where the first line from here on starts
                    cuts.append(cut_after_newline(file, at, hard=kind == ".txt"))
            cuts = sorted({*cuts, size})
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
    window = first = file.readline(1 << 20)
    while window and not window.endswith(b"\n") and not hard:
        window = file.readline(1 << 20)
    if window.endswith(b"\n") or not hard:
        return file.tell()
    return at + next((i for i, byte in enumerate(first[1:5]) if byte & 0xC0 != 0x80), 0)


def read(unit: Unit, column: str, counts: DocumentCounts) -> Iterator[object]:
    """The documents of a unit: bytes, str, or whatever else stands in their place."""
    kind = ending(unit.path)
    if kind == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(unit.path) as file:
            left = max(
                bounds.allowed(_chunk(file.metadata, group, column)[0]) for group in range(unit.start, unit.stop)
            )
            groups = list(range(unit.start, unit.stop))
            # Few rows at once: where a long value is repeated, the file has it once, and a batch as often as it occurs.
            for batch in file.iter_batches(batch_size=16, row_groups=groups, columns=[column]):
                for document in as_documents(batch.column(0)):
                    left -= bounds.ROW + len(document or b"")
                    if left < 0:
                        raise bounds.unfolds(unit.path)
                    yield document
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


def json_documents(lines: Iterable[bytes | None], column: str, counts: DocumentCounts) -> Iterator[object]:
    """The text of each line. Those that are no JSON object, or too long, are counted as broken; blank ones are not."""
    for line in lines:
        if line is not None and not line.strip():
            continue
        row = _row(line)
        del line  # it may be as large as the document
        if row is None:
            counts.broken += 1
        else:
            yield row.get(column)


def _row(line: bytes | None) -> dict[str, object] | None:
    try:
        # surrogateescape: bytes that are no UTF-8 reach `documents.clean`, which repairs and counts them
        row = None if line is None else json.loads(line.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _lines(unit: Unit) -> Iterator[bytes | None]:
    """The lines of a unit; None in place of one of more than `bounds.LINE` bytes. Raises UserError for too many."""
    if ending(unit.path) == ".jsonl":
        with open(unit.path, "rb") as file:
            file.seek(unit.start)
            yield from (line for line, _ in bounds.lines(file, unit.stop - unit.start))
        return
    import pyarrow as pa

    with pa.OSFile(unit.path) as raw, pa.CompressedInputStream(raw, "zstd") as stream:  # reads files of many frames too
        left = bounds.allowed(raw.size())
        for line, length in bounds.lines(io.BufferedReader(stream, 1 << 20), left):
            left -= bounds.ROW + length
            if left < 0:
                raise bounds.unfolds(unit.path)
            yield line


def _chunk(metadata: Any, group: int, column: str) -> tuple[int, int]:
    """The bytes that a column of a row group takes in its file, and unpacked, as the file has it."""
    row_group = metadata.row_group(group)
    chunks = [row_group.column(i) for i in range(row_group.num_columns)]
    own = [chunk for chunk in chunks if chunk.path_in_schema == column]
    return sum(c.total_compressed_size for c in own), sum(c.total_uncompressed_size for c in own)


def _check_declared(path: Path, column: str) -> None:
    """Raises UserError where a .parquet announces more than `read` would give, before anything is made ready for it."""
    import pyarrow.parquet as pq

    metadata, size = pq.read_metadata(path), path.stat().st_size
    for group in range(metadata.num_row_groups):
        stored, unpacked = _chunk(metadata, group, column)
        rows, most = metadata.row_group(group).num_rows, bounds.allowed(stored)
        if not (0 <= stored <= size and 0 <= unpacked <= most and 0 <= rows * bounds.ROW <= most):
            raise bounds.unfolds(path)


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
    rows = (_row(line) for _, line in zip(range(100), lines, strict=False))
    return next((set(row) for row in rows if row is not None), None)
