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
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data import limits, parquet
from gpt2_fp8.data.units import DocumentCounts, Unit

RANGE = 8 << 20  # bytes
LINES = 8  # as long as the longest that is read: so far the end of a longer one is looked for
ENDINGS = (".txt", ".jsonl", ".jsonl.zst", ".parquet")


def ending(path: str | Path) -> str | None:
    """Which of `ENDINGS` the name has."""
    return next((e for e in ENDINGS if str(path).lower().endswith(e)), None)


def units(path: Path) -> list[Unit]:
    """The whole file, in units."""
    kind, size = ending(path), path.stat().st_size
    if kind == ".parquet":
        cuts = list(range(parquet.metadata(path).num_row_groups + 1))
    elif kind == ".jsonl.zst":
        cuts = [0, size]
    else:
        with path.open("rb") as file:
            cuts = [len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0]
            for at in range(RANGE, size - RANGE // 2, RANGE):
                if at > cuts[-1]:  # or else that cut is where the first line from here on starts
                    cuts.append(cut_after_newline(file, at, hard=kind == ".txt"))
            cuts = sorted({*cuts, size})
    about = version(path) + (" marks" if kind == ".jsonl.zst" else "")  # which were no part of the text once
    return [Unit(f"{path.name} {size} [{a}:{b}]", str(path), a, b, about) for a, b in pairwise(cuts)]


def version(path: Path) -> str:
    """What changes when somebody writes to the file."""
    stat = path.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"


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
    Raises UserError for a hole, and where a line is without an end.
    """
    if at <= 0:
        return 0
    file.seek(at - 1)  # where a newline makes `at` itself the start of a line
    window = first = file.readline(1 << 20)
    if len(first) == 1 << 20 and not first.strip(b"\0"):
        remedy = "it was not written to its end, or has a hole: make it anew"
        raise _no_lines(file, at, "only NUL bytes in the MiB", remedy)
    while window and not window.endswith(b"\n") and not hard:
        if file.tell() - at > (most := LINES * limits.LINE):
            raise _no_lines(file, at, f"no line's end in the {most >> 20} MiB", "JSON lines end in newlines: repair it")
        window = file.readline(1 << 20)
    if window.endswith(b"\n") or not hard:
        return file.tell()
    return at + next((i for i, byte in enumerate(first[1:5]) if byte & 0xC0 != 0x80), 0)


def _no_lines(file: BinaryIO, at: int, what: str, remedy: str) -> UserError:
    return UserError.of(f"{file.name} has {what} from byte {at:,} on", f"{remedy}, or leave it out")


def read(unit: Unit, column: str, counts: DocumentCounts) -> Iterator[object]:
    """The documents of a unit: bytes, str, or whatever else stands in their place.

    Raises UserError where the file is damaged; OSError where the system cannot read it, which may pass.
    """
    try:
        yield from _read(unit, column, counts)
    except (ValueError, TypeError, NotImplementedError, MemoryError) as error:  # Arrow's are of these types
        raise unreadable(unit.path, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise unreadable(unit.path, error) from error


def unreadable(path: str | Path, error: Exception) -> UserError:
    """What is said of a file that does not hold what its name says."""
    reason = " ".join(printable(str(error)).split())[:300] or type(error).__name__
    return UserError.of(f"cannot read {path}: {reason}", "repair the file or leave it out")


def _read(unit: Unit, column: str, counts: DocumentCounts) -> Iterator[object]:
    kind = ending(unit.path)
    if kind == ".parquet":
        yield from parquet.read(unit.path, range(unit.start, unit.stop), column)
    elif kind == ".txt":
        with open(unit.path, "rb") as text:
            text.seek(unit.start)
            yield text.read(unit.stop - unit.start)
    else:
        yield from json_documents(lines(unit), column, counts)


def json_documents(found: Iterable[bytes | None], column: str, counts: DocumentCounts) -> Iterator[object]:
    """The text of each line. Those that are no JSON object, or too long, are counted as broken; blank ones are not."""
    for line in found:
        if line is not None and not line.strip():
            continue
        values = row(line)
        del line  # it may be as large as the document
        if values is None:
            counts.broken += 1
        else:
            yield values.get(column)


def row(line: bytes | None) -> dict[str, object] | None:
    """The JSON object in a line, or None where there is none."""
    if line is None:
        return None
    # surrogateescape: bytes that are no UTF-8 reach `documents.clean`, which repairs and counts them
    text = line.removeprefix(BOM_UTF8).decode(errors="surrogateescape")  # files with marks may have been put together
    try:
        values = _parsed(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _parsed(text: str) -> object:
    """JSON's value of a text. Raises ValueError or RecursionError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer of more digits than Python takes
        return json.loads(text, parse_int=float)


def lines(unit: Unit) -> Iterator[bytes | None]:
    """The lines of a unit; None in place of one of more than `bounds.LINE` bytes. Raises UserError for too many."""
    if ending(unit.path) == ".jsonl":
        with open(unit.path, "rb") as file:
            file.seek(unit.start)
            yield from (line for line, _ in limits.lines(file, unit.stop - unit.start))
        return
    import pyarrow as pa

    with pa.OSFile(unit.path) as raw, pa.CompressedInputStream(raw, "zstd") as stream:  # reads files of many frames too
        left = limits.allowed(raw.size())
        for line, length in limits.lines(io.BufferedReader(stream, 1 << 20), left):
            left -= limits.ROW + length
            if left < 0:
                raise limits.unfolds(unit.path)
            yield line
