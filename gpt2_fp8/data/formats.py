"""The kinds of text file that are read here: how each is cut into units, and read. `read_file` reads a hub's too.

.txt      one document; a file of more than `RANGE_BYTES` is cut at newlines into documents of about that size
.jsonl    one document a line, under the text column's key; units are ranges of about `RANGE_BYTES`
.json     the same, or one array or object; a unit is the whole file
.csv      one document a row, as of .tsv; a unit is the whole file
.parquet  one document a row; a unit is a row group
.arrow    one document a row, of a stream (as `datasets` saves it) or a file; units are batches of about `RANGE_BYTES`

Of a compressed file a unit is the whole, since no read can start in the middle of it.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.config.text_files import kind_of
from gpt2_fp8.data.units import DocumentCounts, Unit

RANGE_BYTES = 8 << 20
HEAD_LINES = 100
MAX_CELL = 2**31 - 1  # bytes of a document in a .csv; the library stops at 131,072
ARROW_MAGIC = b"ARROW1"


@dataclass(frozen=True)
class TextFile:
    """A file of text, on this machine or on a hub."""

    name: str
    version: str  # changes when the text does
    open: Callable[[], Any] = field(compare=False)  # for bytes

    @staticmethod
    def local(path: str | Path) -> TextFile:
        """Return a file of this machine. Raises OSError."""
        stat = Path(path).stat()
        return TextFile(str(path), f"{stat.st_size} {stat.st_mtime_ns}", lambda: open(path, "rb"))

    def no_column(self, column: str, own: list[str]) -> UserError:
        """Return the error of a file without text under `column`. `own`: its columns, of text if it has any."""
        fix = f"set data.text_column to one of its own: {printable(', '.join(sorted(own)))[:300] or 'it has none'}"
        return UserError.of(f"{printable(self.name)} has no text column {column!r}", fix)


def cut_units(path: Path) -> list[Unit]:
    """Cut the whole file into units."""
    (kind, compression), size = kind_of(path) or ("", ""), path.stat().st_size
    about = TextFile.local(path).version
    if kind == "txt" and compression:  # without a `stop` it is read to its end
        return [Unit(f"{path.name} {size}", str(path), version=about)]
    if kind == "parquet":
        cuts = list(range(read_footer(TextFile.local(path)).num_row_groups + 1))
    elif kind == "arrow":
        cuts = _cut_batches(path)
    elif compression or kind not in ("txt", "jsonl"):
        cuts = [0, size]
    else:
        with path.open("rb") as file:
            cuts = [len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0]
            for at in range(RANGE_BYTES, size - RANGE_BYTES // 2, RANGE_BYTES):
                if at > cuts[-1]:  # otherwise the first line from `at` on starts at that cut
                    cuts.append(cut_after_newline(file, at, hard=kind == "txt"))
            cuts = sorted({*cuts, size})
    # " marks": once, byte order marks were part of such text, and caches have it
    about += " marks" if (kind, compression) == ("jsonl", "zst") else ""
    return [Unit(f"{path.name} {size} [{a}:{b}]", str(path), a, b, about) for a, b in pairwise(cuts)]


def cut_held_out(path: Path, fraction: float) -> tuple[list[Unit], list[Unit]]:
    """Return the units to train on and those to validate with, which have `fraction` of the file."""
    whole = cut_units(path)
    kind, compression = kind_of(path) or ("", "")
    if kind != "txt":
        train, val = ([replace(u, side=side, val_fraction=fraction) for u in whole] for side in ("train", "val"))
        return train, val
    if compression:  # a held-out tail is told by its place in the text
        with open_text(TextFile.local(path)) as text:
            content = text.read()
        whole, size = [replace(whole[0], stop=len(content))], len(content)
    else:
        content, size = None, path.stat().st_size
    with path.open("rb") if content is None else io.BytesIO(content) as file:
        cut = cut_after_newline(file, int(size * (1 - fraction)), hard=True)
    return _clip(whole, 0, cut), _clip(whole, cut, size)


def _clip(whole: list[Unit], start: int, stop: int) -> list[Unit]:
    """Return the units of a .txt, clipped to a range of bytes."""
    clipped = (replace(u, start=max(u.start, start), stop=min(u.stop, stop)) for u in whole)
    return [replace(u, name=f"{u.name} [{u.start}:{u.stop}]") for u in clipped if u.start < u.stop]


def cut_after_newline(file: BinaryIO, at: int, *, hard: bool) -> int:
    """Return the first start of a line from byte `at` on; the file's size if there is none.

    With `hard`, and no start of a line within 1 MiB, it is `at` itself, moved on to the start of a UTF-8 character.
    """
    if at <= 0:
        return 0
    file.seek(at - 1)  # a newline there makes `at` itself the start of a line
    window = first = file.readline(1 << 20)
    while window and not window.endswith(b"\n") and not hard:
        window = file.readline(1 << 20)
    if window.endswith(b"\n") or not hard:
        return file.tell()
    return at + next((i for i, byte in enumerate(first[1:5]) if byte & 0xC0 != 0x80), 0)


def read_unit(unit: Unit, column: str, counts: DocumentCounts) -> Iterator[object]:
    """Return the documents of a unit: bytes, str, or what a file has in their place.

    Raises UserError if the file is damaged or has no text under `column`; OSError, which may pass, if it is not read.
    """
    with content_errors(unit.path):
        file, (kind, compression) = TextFile.local(unit.path), kind_of(unit.path) or ("", "")
        if compression and kind == "txt":
            with open_text(file) as text:
                yield from _cut_text(text.read()[unit.start : unit.stop or None])
            return
        if compression or kind not in ("txt", "jsonl"):
            yield from read_file(file, range(unit.start, unit.stop), column, counts)
            return
        with file.open() as text:
            text.seek(unit.start)
            if kind == "txt":
                yield text.read(unit.stop - unit.start)
            else:
                lines = iter(lambda: text.readline(max(0, unit.stop - text.tell())), b"")
                yield from read_json(lines, column, counts, file)


def read_file(
    file: TextFile, groups: range, column: str, counts: DocumentCounts, most: int | None = None
) -> Iterator[object]:
    """Return the documents of row groups or batches, or of `most` (None: all) lines or rows of any other file."""
    import pyarrow.parquet as pq

    kind, _ = kind_of(file.name) or ("", "")
    if kind == "arrow":
        with _open_batches(file) as (schema, batches):
            check_schema(schema, file, column)
            for batch in itertools.islice(batches, groups.start, groups.stop):
                yield from as_documents(batch.column(column))
        return
    if kind == "parquet":
        check_column(file, column)
        with (
            file.open() as raw,
            pq.ParquetFile(raw, metadata=read_footer(file), page_checksum_verification=True) as opened,
        ):
            for batch in opened.iter_batches(256, list(groups), [column], use_threads=False):
                yield from as_documents(batch.column(0))
        return
    with open_text(file) as text:
        first_line = text.peek(1).removeprefix(BOM_UTF8).split(b"\n", 1)[0].strip()
        if kind == "json" and (first_line[:1] == b"[" or first_line == b"{"):
            content = json.load(text)
            values = content if isinstance(content, list) else [content]
            rows: Iterable[Any] = (value if isinstance(value, dict) else None for value in values)
        elif kind in ("csv", "tsv"):
            csv.field_size_limit(MAX_CELL)
            lines = io.TextIOWrapper(text, "utf-8-sig", errors="surrogateescape", newline="")
            table = csv.DictReader(lines, delimiter="\t" if kind == "tsv" else ",")
            if column not in (table.fieldnames or ()):
                raise file.no_column(column, list(table.fieldnames or ()))
            rows = itertools.islice(table, most)
        else:
            rows = itertools.islice(text, most)
        yield from read_json(rows, column, counts, file)


@contextmanager
def open_text(file: TextFile) -> Iterator[io.BufferedReader]:
    """Open a file for its text's bytes, decompressed."""
    import pyarrow as pa

    _, compression = kind_of(file.name) or ("", "")
    codec = {"gz": "gzip", "zst": "zstd"}.get(compression, compression)  # of many frames, too
    with file.open() as raw, io.BufferedReader(pa.CompressedInputStream(raw, codec) if codec else raw, 1 << 20) as text:
        yield text


def _cut_text(content: bytes) -> Iterator[bytes]:
    """Cut a text at newlines into documents of about `RANGE_BYTES`."""
    start, text = 0, io.BytesIO(content)
    while start < len(content):
        stop = min(cut_after_newline(text, start + RANGE_BYTES, hard=True), len(content))
        yield content[start:stop].removeprefix(b"" if start else BOM_UTF8)
        start = stop


@contextmanager
def _open_batches(file: TextFile) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Open a local Arrow file; gives its schema and its record batches, whose text is read when it is asked for."""
    import pyarrow as pa

    with pa.memory_map(file.name) as raw:
        if raw.read(len(ARROW_MAGIC)) == ARROW_MAGIC:
            opened = pa.ipc.open_file(raw)
            yield opened.schema, (opened.get_batch(i) for i in range(opened.num_record_batches))
        else:
            raw.seek(0)
            stream = pa.ipc.open_stream(raw)
            yield stream.schema, iter(stream)


def _cut_batches(path: Path) -> list[int]:
    """Return the number of the first batch of each unit of an Arrow file, and of the one after the last."""
    cuts, size, number = [0], 0, 0
    with _open_batches(TextFile.local(path)) as (_, batches):
        for number, batch in enumerate(batches, 1):
            size += batch.get_total_buffer_size()
            if size >= RANGE_BYTES:
                cuts.append(number)
                size = 0
    return sorted({*cuts, number})


def check_column(file: TextFile, column: str) -> None:
    """Raise UserError if a table, or the first hundred lines of another file, have no text under `column`."""
    kind, _ = kind_of(file.name) or ("", "")
    if kind == "parquet":
        check_schema(read_footer(file).schema.to_arrow_schema(), file, column)
    elif kind == "txt":
        with open_text(file) as text:
            text.peek(1)  # raises if it is not compressed as its name says
    else:  # as far as the first text
        any(isinstance(found, str) for found in read_file(file, range(0), column, DocumentCounts(), HEAD_LINES))


@contextmanager
def content_errors(name: str) -> Iterator[None]:
    """Enter a context in which what is wrong with a file's content becomes a UserError, and nothing else does."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, MemoryError, csv.Error) as error:  # Arrow raises the others
        raise unreadable(name, error) from error
    except OSError as error:
        if type(error) is not OSError or error.errno is not None:  # the system's, or a network's
            raise
        raise unreadable(name, error) from error


def unreadable(path: str | Path, error: Exception) -> UserError:
    """Return the error for a file whose content does not fit its name."""
    reason = " ".join(printable(str(error)).split())[:300] or type(error).__name__
    return UserError.of(f"cannot read {printable(str(path))}: {reason}", "repair the file or leave it out")


def read_json(
    rows: Iterable[bytes | dict[str, object] | None], column: str, counts: DocumentCounts, file: TextFile
) -> Iterator[object]:
    """Return the value of `column` in each object, or line that has one. Raises UserError if none was text or null."""
    first: dict[str, object] | None = None
    fits = False
    for row in rows:
        if isinstance(row, bytes) and not row.strip():
            continue
        values = parse_line(row) if isinstance(row, bytes) else row
        if values is None:
            counts.broken += 1
            continue
        document = values.get(column)
        fits = fits or isinstance(document, str) or (document is None and column in values)
        if not fits and first is None:
            first = values
        yield document
    if first is not None and not fits:
        raise file.no_column(column, [key for key in first if isinstance(first[key], str)] or [*first])


def parse_line(line: bytes) -> dict[str, object] | None:
    """Return the JSON object in a line, or None if there is none."""
    # surrogateescape: bytes that are no UTF-8 reach `units.clean`, which repairs and counts them.
    text = line.removeprefix(BOM_UTF8).decode(errors="surrogateescape")  # joined files have marks at inner lines too
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


@lru_cache(maxsize=32)  # since each row group is read by itself
def read_footer(file: TextFile) -> Any:
    """Return a parquet file's footer."""
    import pyarrow.parquet as pq

    with file.open() as raw:
        return pq.read_metadata(raw)


def check_schema(schema: Any, file: TextFile, column: str) -> None:
    """Raise UserError if a file's Arrow schema has no such column of text. One of nulls alone may be."""
    import pyarrow.types as t

    types = {f.name: f.type.value_type if t.is_dictionary(f.type) else f.type for f in schema}
    kinds = (t.is_string, t.is_large_string, t.is_string_view, t.is_binary, t.is_large_binary, t.is_binary_view)
    text = [name for name, own in types.items() if any(is_kind(own) for is_kind in kinds)]
    if column not in text and not (column in types and t.is_null(types[column])):
        raise file.no_column(column, text or [f"{name} ({own})" for name, own in types.items()])


def as_documents(column: Any) -> list[bytes | None]:
    """Return the values of an Arrow column of text, as bytes: Arrow raises for a str that is no UTF-8."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    documents: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    return documents
