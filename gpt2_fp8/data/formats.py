"""The kinds of text file that are read here: how each is cut into units, and read. `read_file` reads a hub's too.

.txt      one document; a file of more than `RANGE_BYTES` is cut at newlines into documents of about that size
.jsonl    one document a line, under the text column's key; units are ranges of about `RANGE_BYTES`
.jsonl.zst  the same; a unit is the whole file, since no read can start in the middle of it
.parquet  one document a row; a unit is a row group

Files may come from strangers. So the size that a small file unpacks to is bounded, and so is the memory for a line.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data import parquet
from gpt2_fp8.data.units import DocumentCounts, TextFile, Unit

RANGE_BYTES = 8 << 20
HEAD_LINES = 100
SEARCHED_LINES = 8  # times the longest line that is read: the end of a longer line is searched for in that many bytes
ENDINGS = (".txt", ".jsonl", ".jsonl.zst", ".parquet")


def ending(path: str | Path) -> str | None:
    """Return which of `ENDINGS` the name has; None for another one."""
    return next((e for e in ENDINGS if str(path).lower().endswith(e)), None)


def units(path: Path) -> list[Unit]:
    """Cut the whole file into units."""
    kind, size = ending(path), path.stat().st_size
    if kind == ".parquet":
        cuts = list(range(parquet.metadata(TextFile.local(path)).num_row_groups + 1))
    elif kind == ".jsonl.zst":
        cuts = [0, size]
    else:
        with path.open("rb") as file:
            cuts = [len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0]
            for at in range(RANGE_BYTES, size - RANGE_BYTES // 2, RANGE_BYTES):
                if at > cuts[-1]:  # otherwise the first line from `at` on starts at that cut
                    cuts.append(cut_after_newline(file, at, hard=kind == ".txt"))
            cuts = sorted({*cuts, size})
    about = TextFile.local(path).version + (
        " marks" if kind == ".jsonl.zst" else ""
    )  # once, marks were not part of such text
    return [Unit(f"{path.name} {size} [{a}:{b}]", str(path), a, b, about) for a, b in pairwise(cuts)]


def held_out(path: Path, fraction: float) -> tuple[list[Unit], list[Unit]]:
    """Return the units to train on and those to validate with. `fraction` of the file is for the latter."""
    whole = units(path)
    if ending(path) != ".txt":
        sides = ([replace(u, side=side, val_fraction=fraction) for u in whole] for side in ("train", "val"))
        return next(sides), next(sides)
    size = path.stat().st_size
    with path.open("rb") as file:
        cut = cut_after_newline(file, int(size * (1 - fraction)), hard=True)
    return _between(whole, 0, cut), _between(whole, cut, size)


def _between(whole: list[Unit], start: int, stop: int) -> list[Unit]:
    """Return the units of a .txt, clipped to a range of bytes."""
    clipped = (replace(u, start=max(u.start, start), stop=min(u.stop, stop)) for u in whole)
    return [replace(u, name=f"{u.name} [{u.start}:{u.stop}]") for u in clipped if u.start < u.stop]


def cut_after_newline(file: BinaryIO, at: int, *, hard: bool) -> int:
    """Return the first start of a line from byte `at` on; the file's size if there is none.

    With `hard`, and no start of a line within 1 MiB, it is `at` itself, moved on to the start of a UTF-8 character.
    Raises UserError for a hole (a MiB of NUL bytes), and for a line that does not end.
    """
    if at <= 0:
        return 0
    file.seek(at - 1)  # a newline there makes `at` itself the start of a line
    window = first = file.readline(1 << 20)
    if len(first) == 1 << 20 and not first.strip(b"\0"):
        remedy = "it was not written to its end, or has a hole: make it again"
        raise _no_lines(file, at, "only NUL bytes in the MiB", remedy)
    while window and not window.endswith(b"\n") and not hard:
        if file.tell() - at > (most := SEARCHED_LINES * parquet.LINE_BYTES):
            raise _no_lines(file, at, f"no line's end in the {most >> 20} MiB", "JSON lines end in newlines: repair it")
        window = file.readline(1 << 20)
    if window.endswith(b"\n") or not hard:
        return file.tell()
    return at + next((i for i, byte in enumerate(first[1:5]) if byte & 0xC0 != 0x80), 0)


def _no_lines(file: BinaryIO, at: int, what: str, remedy: str) -> UserError:
    return UserError.of(f"{file.name} has {what} from byte {at:,} on", f"{remedy}, or leave it out")


def read(unit: Unit, column: str, counts: DocumentCounts) -> Iterator[object]:
    """Return the documents of a unit: bytes, str, or what a file has in their place.

    Raises UserError if the file is damaged or has no text under `column`. Raises OSError if the system cannot read it,
    which may pass.
    """
    with content_errors(unit.path):
        file = TextFile.local(unit.path)
        if ending(unit.path) == ".txt":
            with file.open() as text:
                text.seek(unit.start)
                yield text.read(unit.stop - unit.start)
        elif ending(unit.path) == ".jsonl":
            yield from json_documents(objects(lines(unit)), column, counts, file)
        else:
            yield from read_file(file, range(unit.start, unit.stop), column, counts)


def read_file(
    file: TextFile, groups: range, column: str, counts: DocumentCounts, most: int | None = None
) -> Iterator[object]:
    """Return the documents of some row groups of a parquet file, or of any other file `most` (None: all) of its lines.

    Raises UserError if it has no text under `column`.
    """
    kind, compression = kind_of(file.name) or ("", "")
    if kind == "parquet":
        yield from parquet.read(file, groups, column)
        return
    with file.open() as raw, _unpacked(raw, compression) as text:
        found = _bounded(text, file, most)
        if kind == "json" and text.peek(1)[:1] == b"[":
            listed: Any = _parsed(b"".join(line or b"" for line in _bounded(text, file)).decode())
            own = (values if isinstance(values, dict) else None for values in listed)
            yield from json_documents(own, column, counts, file)
        else:
            yield from json_documents(objects(found), column, counts, file)


def check_column(file: TextFile, column: str) -> None:
    """Raise UserError if a parquet file, or the first hundred lines of another one, have no text under `column`."""
    if (kind_of(file.name) or ("",))[0] == "parquet":
        parquet.check(file, column)
    else:  # as far as the first text
        any(isinstance(found, str) for found in read_file(file, range(0), column, DocumentCounts(), HEAD_LINES))


def kind_of(name: str) -> tuple[str, str] | None:
    """Return the kind and the compression ("": none) of a file that `read_file` reads; None for others."""
    found = re.search(r"\.(parquet|jsonl|json|ndjson)(?:\.(gz|zst|bz2|lz4))?$", name, re.IGNORECASE)
    return found and (found[1].lower(), (found[2] or "").lower())


@contextmanager
def content_errors(name: str) -> Iterator[None]:
    """Enter a context in which what is wrong with a file's content becomes a UserError, and nothing else does."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, MemoryError) as error:  # Arrow raises these types
        raise unreadable(name, error) from error
    except OSError as error:
        if type(error) is not OSError or error.errno is not None:  # the system's, or a network's
            raise
        raise unreadable(name, error) from error


def unreadable(path: str | Path, error: Exception) -> UserError:
    """Return the error for a file whose content does not fit its name."""
    reason = " ".join(printable(str(error)).split())[:300] or type(error).__name__
    return UserError.of(f"cannot read {printable(str(path))}: {reason}", "repair the file or leave it out")


def json_documents(
    rows: Iterable[dict[str, object] | None], column: str, counts: DocumentCounts, file: TextFile
) -> Iterator[object]:
    """Return the value of `column` in each object. None, for what is no object, counts as broken.

    Raises UserError at the end if there are objects, and the value of none was text or null.
    """
    first: dict[str, object] | None = None
    fits = False
    for values in rows:
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


def objects(found: Iterable[bytes | None]) -> Iterator[dict[str, object] | None]:
    """Return the JSON object in each line that is not blank; None for a line that is too long or has none."""
    for line in found:
        if line is None or line.strip():
            values = row(line)
            del line  # it may be as large as the document
            yield values


def row(line: bytes | None) -> dict[str, object] | None:
    """Return the JSON object in a line, or None if there is none."""
    if line is None:
        return None
    # surrogateescape: bytes that are no UTF-8 reach `documents.clean`, which repairs and counts them.
    text = line.removeprefix(BOM_UTF8).decode(errors="surrogateescape")  # joined files have marks at inner lines too
    try:
        values = _parsed(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _parsed(text: str) -> object:
    """Return JSON's value of a text. Raises ValueError or RecursionError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer with more digits than Python accepts
        return json.loads(text, parse_int=float)


def lines(unit: Unit) -> Iterator[bytes | None]:
    """Return the lines of a range of a file, with None for one of more than `limits.LINE_BYTES`."""
    with open(unit.path, "rb") as file:
        file.seek(unit.start)
        yield from (line for line, _ in parquet.lines(file, unit.stop - unit.start))


def _bounded(text: Any, file: TextFile, most: int | None = None) -> Iterator[bytes | None]:
    """Return the lines of a file, as `lines` does, or `most` of them. Raises UserError for too many."""
    left = parquet.allowed(file.size)
    for line, length in itertools.islice(parquet.lines(text, parquet.LINE_BYTES if most else left), most):
        left -= parquet.ROW_BYTES + length
        if left < 0:
            raise parquet.unfolds(file.name)
        yield line


def _unpacked(raw: Any, compression: str) -> io.BufferedReader:
    import pyarrow as pa

    codec = {"gz": "gzip", "zst": "zstd"}.get(compression, compression)
    return io.BufferedReader(pa.CompressedInputStream(raw, codec) if codec else raw, 1 << 20)  # of many frames, too
