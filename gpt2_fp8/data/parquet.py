"""Parquet files: bounded footers that are read once, the sizes that they declare, and the documents of a row group."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.units import TextFile

LINE_BYTES = 128 << 20  # a longer line is no document
# Text compresses to a tenth, and to a hundredth if it repeats itself.
FREE_BYTES = 64 << 20  # that a unit's text may have, however small its file
RATIO = 200  # bytes of text in addition, for each byte of the file
ROW_BYTES = 256  # that count for a row in addition to its own, since it takes as long


def lines(file: Any, size: int) -> Iterator[tuple[bytes | None, int]]:
    """Return the lines of the next `size` bytes, each with its length; None for a line of more than `LINE_BYTES`."""
    left = size
    while left > 0 and (line := file.readline(min(left, LINE_BYTES))):
        length = len(line)
        if length < LINE_BYTES or line.endswith(b"\n"):
            left -= length
            yield line, length
            continue
        while length < left and line and not line.endswith(b"\n"):
            line = file.readline(min(left - length, 1 << 20))
            length += len(line)
        left -= length
        yield None, length


def allowed(stored: int) -> int:
    """Return how many bytes of text a unit may have if it takes `stored` bytes in its file."""
    return FREE_BYTES + RATIO * stored


def unfolds(path: str | Path) -> UserError:
    """Return the error for a file whose text is larger than `allowed`."""
    return UserError.of(
        f"{path} is small, and unpacks to more than {RATIO} times its size",
        "leave it out; if it is what it should be, unpack it to .jsonl",
    )


FOOTER_BYTES = 256 << 20  # that is a million row groups, and seconds to read
ANNOUNCED_BYTES = 16 << 20  # reading a larger footer takes long enough to announce it
KEPT_BYTES = 64 << 20  # of footers, by their size in the files; a file of many row groups is nearly all footer
_TAIL_BYTES = 64 << 10  # read at once: most footers are no longer

log = logging.getLogger(__name__)

_footers: OrderedDict[tuple[str, str], Any] = OrderedDict()


def metadata(file: TextFile) -> Any:
    """Return the file's footer. Raises UserError if it is too large, and Arrow's errors (ValueError, OSError)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    key = (file.name, file.version)
    if key not in _footers:
        _footers[key] = pq.read_metadata(pa.BufferReader(_end(file)))
    _footers.move_to_end(key)
    while len(_footers) > 1 and sum(footer.serialized_size for footer in _footers.values()) > KEPT_BYTES:
        _footers.popitem(last=False)
    return _footers[key]


def _end(file: TextFile) -> bytes:
    """Return the file's last bytes, with all of the footer."""
    with file.open() as opened:
        opened.seek(max(file.size - _TAIL_BYTES, 0))
        tail: bytes = opened.read(_TAIL_BYTES)
        length = int.from_bytes(tail[-8:-4], "little") + 8 if tail.endswith(b"PAR1") else 0
        if length > FOOTER_BYTES:
            raise UserError.of(
                f"{file.name} has a footer of {length >> 20} MiB, and at most {FOOTER_BYTES >> 20} are read",
                "write it again in larger row groups, or in several files",
            )
        if length > ANNOUNCED_BYTES:
            log.info("data: reading the footer of %s, of %d MiB", file.name, length >> 20)
        if length > len(tail):
            opened.seek(max(file.size - length, 0))
            tail = opened.read(length)
    return tail


def check(file: TextFile, column: str) -> None:
    """Raise UserError if a footer has no such column of text, or declares sizes that exceed what `read` would return.

    It runs before any memory is allocated for the text.
    """
    check_column(file, column)
    footer = metadata(file)
    places = _places(footer, column)
    for group in range(footer.num_row_groups):
        about = footer.row_group(group)
        stored, unpacked = _chunk(about, places)
        rows, most = about.num_rows, allowed(stored)
        if not (0 <= stored <= file.size and 0 <= unpacked <= most and 0 <= rows * ROW_BYTES <= most):
            raise unfolds(file.name)


def check_column(file: TextFile, column: str) -> None:
    """Raise UserError if the file has no such column of text. One of nulls alone may be."""
    check_schema(metadata(file).schema.to_arrow_schema(), file, column)


def check_schema(schema: Any, file: TextFile, column: str) -> None:
    """Raise UserError if a file's Arrow schema has no such column of text. One of nulls alone may be."""
    import pyarrow as pa

    types = {f.name: f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in schema}
    t = pa.types
    kinds = (t.is_string, t.is_large_string, t.is_string_view, t.is_binary, t.is_large_binary, t.is_binary_view)
    text = [name for name, own in types.items() if any(is_kind(own) for is_kind in kinds)]
    if column not in text and not (column in types and t.is_null(types[column])):
        raise file.no_column(column, text or [f"{name} ({own})" for name, own in types.items()])


def read(file: TextFile, groups: range, column: str) -> Iterator[bytes | None]:
    """Read the documents of some row groups.

    Raises UserError if they unpack to more than is allowed, or if there is no such column of text.
    """
    import pyarrow.parquet as pq

    check_column(file, column)
    footer = metadata(file)
    places = _places(footer, column)
    left = max(allowed(_chunk(footer.row_group(group), places)[0]) for group in groups)
    with file.open() as raw, pq.ParquetFile(raw, metadata=footer, page_checksum_verification=True) as opened:
        # Few rows at once: a long value that is repeated is in the file once, but in a batch each time.
        for batch in opened.iter_batches(16, list(groups), [column], use_threads=False):
            for document in as_documents(batch.column(0)):
                left -= ROW_BYTES + len(document or b"")
                if left < 0:
                    raise unfolds(file.name)
                yield document


def as_documents(column: Any) -> list[bytes | None]:
    """Return the values of an Arrow column of text, as bytes.

    Arrow checks UTF-8 only when it makes a str, and then it raises.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.large_binary()).to_pylist()


def _places(footer: Any, column: str) -> list[int]:
    """Return which of a row group's chunks are the column's."""
    return [i for i in range(footer.num_columns) if footer.schema.column(i).path == column]


def _chunk(row_group: Any, places: list[int]) -> tuple[int, int]:
    """Return the bytes that a column of a row group takes in its file, and unpacked, as the footer declares them."""
    own = [row_group.column(i) for i in places]
    return sum(c.total_compressed_size for c in own), sum(c.total_uncompressed_size for c in own)
