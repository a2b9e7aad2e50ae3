"""Parquet files: bounded footers that are read once, the sizes that they declare, and the documents of a row group."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import limits

FOOTER_BYTES = 256 << 20  # that is a million row groups, and seconds to read
ANNOUNCED_BYTES = 16 << 20  # reading a larger footer takes long enough to announce it
KEPT_BYTES = 64 << 20  # of footers, by their size in the files; a file of many row groups is nearly all footer

log = logging.getLogger(__name__)

_footers: OrderedDict[tuple[str, int, int], Any] = OrderedDict()


def metadata(path: str | Path) -> Any:
    """Return the file's footer. Raises UserError if it is too large, and Arrow's errors (ValueError, OSError)."""
    import pyarrow.parquet as pq

    stat = Path(path).stat()
    key = (str(path), stat.st_size, stat.st_mtime_ns)
    if key not in _footers:
        _check_footer(path, stat.st_size)
        _footers[key] = pq.read_metadata(path)
    _footers.move_to_end(key)
    while len(_footers) > 1 and sum(footer.serialized_size for footer in _footers.values()) > KEPT_BYTES:
        _footers.popitem(last=False)
    return _footers[key]


def _footer(path: str | Path, size: int) -> int:
    """Return the footer's bytes by the file's last bytes; 0 if they are not parquet's."""
    with open(path, "rb") as file:
        file.seek(max(size - 8, 0))
        end = file.read(8)
    return int.from_bytes(end[:4], "little") if end.endswith(b"PAR1") else 0


def _check_footer(path: str | Path, size: int) -> None:
    length = _footer(path, size)
    if length > FOOTER_BYTES:
        raise UserError.of(
            f"{path} has a footer of {length >> 20} MiB, and at most {FOOTER_BYTES >> 20} are read",
            "write it again in larger row groups, or in several files",
        )
    if length > ANNOUNCED_BYTES:
        log.info("data: reading the footer of %s, of %d MiB", path, length >> 20)


def column_types(path: str | Path) -> dict[str, Any]:
    """Return the Arrow types of the columns by their names; of a dictionary that of its values."""
    import pyarrow as pa

    schema = metadata(path).schema.to_arrow_schema()
    return {f.name: f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in schema}


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type is one of text."""
    import pyarrow as pa

    t = pa.types
    text = (t.is_string, t.is_large_string, t.is_string_view, t.is_binary, t.is_large_binary, t.is_binary_view)
    return any(is_kind(kind) for is_kind in text)


def check_declared(path: Path, column: str) -> None:
    """Check the sizes that a footer declares. Raises UserError if they exceed what `read` would return.

    It runs before any memory is allocated for the text.
    """
    footer, size = metadata(path), path.stat().st_size
    places = _places(footer, column)
    for group in range(footer.num_row_groups):
        about = footer.row_group(group)
        stored, unpacked = _chunk(about, places)
        rows, most = about.num_rows, limits.allowed(stored)
        if not (0 <= stored <= size and 0 <= unpacked <= most and 0 <= rows * limits.ROW_BYTES <= most):
            raise limits.unfolds(path)


def read(path: str, groups: range, column: str) -> Iterator[bytes | None]:
    """Read the documents of some row groups. Raises UserError if they unpack to more than is allowed."""
    import pyarrow.parquet as pq

    footer = metadata(path)
    places = _places(footer, column)
    left = max(limits.allowed(_chunk(footer.row_group(group), places)[0]) for group in groups)
    with pq.ParquetFile(path, metadata=footer, page_checksum_verification=True) as file:
        # Few rows at once: a long value that is repeated is in the file once, but in a batch each time.
        for batch in file.iter_batches(batch_size=16, row_groups=list(groups), columns=[column]):
            for document in as_documents(batch.column(0)):
                left -= limits.ROW_BYTES + len(document or b"")
                if left < 0:
                    raise limits.unfolds(path)
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
