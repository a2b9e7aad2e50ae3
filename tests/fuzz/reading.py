"""What is in a data file, as the formats' own libraries read it: the oracle of `texts`."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

EOT = 256
BOM = b"\xef\xbb\xbf"


def documents_of(name: str, content: bytes) -> list[list[list[int]]]:
    """The tokens of each document, unit by unit, as the formats' own libraries read them. Raises where they do."""
    if name.endswith(".txt"):
        return [[tokens_of(content)] if _clean(content) else []]
    if name.endswith(".parquet"):
        with pq.ParquetFile(io.BytesIO(content)) as file:
            groups = [file.read_row_group(i, ["text"]).column(0) for i in range(file.num_row_groups)]
        return [[tokens_of(d) for d in _plain(group) if d is not None and _clean(d)] for group in groups]
    if name.endswith(".zst"):
        content = b"".join(_frames(content))
    content = content.removeprefix(BOM)
    rows = [_row(line) for line in content.split(b"\n")]
    texts = [row.get("text") for row in rows if isinstance(row, dict)]
    return [[tokens_of(t) for t in texts if isinstance(t, str) and _clean(t)]]


def _plain(column: Any) -> list[bytes | None]:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return list(column.cast(pa.large_binary()).to_pylist())


def _frames(content: bytes) -> list[bytes]:
    parts, left = [], content
    while left:
        unpacker = zstandard.ZstdDecompressor().decompressobj()
        parts.append(unpacker.decompress(left))
        if not unpacker.eof:
            raise ValueError("the last frame is not whole")
        left = unpacker.unused_data
    return parts


def _row(line: bytes) -> Any:
    text = line.removeprefix(BOM)  # a file may have been put together of several that begin with a mark
    try:  # a number of more digits than Python reads is JSON all the same
        return json.loads(text.decode(errors="surrogateescape"), parse_int=len)
    except (ValueError, RecursionError):
        return None


def _clean(text: str | bytes) -> str:
    """The text as it is encoded; empty where there is nothing but white space."""
    whole = text if isinstance(text, str) else text.decode(errors="replace")
    whole = whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    while "\ufffd\ufffd" in whole:  # how many stand for a few bad bytes is no matter
        whole = whole.replace("\ufffd\ufffd", "\ufffd")
    return "" if whole.isspace() else whole


def tokens_of(text: str | bytes) -> list[int]:
    return [*_clean(text).encode(), EOT]


def collapsed(tokens: list[int]) -> list[int]:
    """With one U+FFFD for several in a row."""
    out: list[int] = []
    for token in tokens:
        out.append(token)
        if out[-6:] == [0xEF, 0xBF, 0xBD] * 2:
            del out[-3:]
    return out
