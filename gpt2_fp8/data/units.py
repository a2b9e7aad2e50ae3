"""Token ids, the unit (the piece of a corpus that is read and tokenised at once), and the interface of a source."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import printable

LOCAL_WAITS = (0.5, 2.0)  # seconds before each further attempt: for a passing error of a disk or a network mount

Tokens = npt.NDArray[np.unsignedinteger]  # uint16 or uint32, as `dtype_of` says


def dtype_of(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the dtype of the ids 0 to `vocab_size` - 1: uint16 if all fit, else uint32.

    A batch has them as int32, so no vocabulary has more than 2^31. Raises ValueError for a larger one.
    """
    if not 0 < vocab_size <= 1 << 31:
        raise ValueError(f"no vocabulary has {vocab_size:,} ids")
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def narrow_ids(ids: npt.NDArray[np.integer], vocab_size: int, unit: str) -> Tokens:
    """Return `ids` in the dtype of their vocabulary. Raises UserError for an id of `unit` that is not in it.

    The check comes first: a cast would turn an id that is too large into another one, and a valid one. A GPU would read
    and write past the end of a table for such an id.
    """
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        odd = int(ids.min() if ids.min() < 0 else ids.max())
        raise UserError.of(
            f"{printable(unit)}: its tokens have the id {odd} of a vocabulary of {vocab_size:,}",
            "the tokenizer's files do not fit each other, or are damaged",
        )
    return ids.astype(dtype_of(vocab_size), copy=False)


def little_endian(tokens: Tokens) -> Tokens:
    """Return `tokens` in the byte order of files and digests, on any machine."""
    return tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)


class TextFile(NamedTuple):
    """A file of text, on this machine or on a hub."""

    name: str
    version: str  # changes when the text does
    size: int
    open: Callable[[], Any]  # for bytes

    @staticmethod
    def local(path: str | Path) -> TextFile:
        """Return a file of this machine. Raises OSError."""
        stat = Path(path).stat()
        return TextFile(str(path), f"{stat.st_size} {stat.st_mtime_ns}", stat.st_size, lambda: open(path, "rb"))

    def no_column(self, column: str, own: list[str]) -> UserError:
        """Return the error of a file without text under `column`. `own`: its columns, of text if it has any."""
        fix = f"set data.text_column to one of its own: {printable(', '.join(sorted(own)))[:300] or 'it has none'}"
        return UserError.of(f"{printable(self.name)} has no text column {column!r}", fix)


@dataclass(frozen=True)
class Unit:
    """A parquet row group, a range of bytes of a file, a whole compressed file, or a module.

    Its fields and the tokenizer determine the tokens, so both make up the cache's key.
    """

    name: str  # the same on every machine: it goes into the fingerprint that a resumed run must match
    path: str
    start: int = 0  # bytes, or the row group, or the shard
    stop: int = 0
    version: str = ""  # changes when the text does: size and time of a file; a commit
    side: Literal["all", "train", "val"] = "all"  # which documents are this unit's, if a split is by document
    val_fraction: float = 0.0  # of the documents, when `side` is not "all"
    source: str = ""  # its name in a mixture; it changes neither the text nor the cache's key

    def digest(self, *more: str) -> str:
        """Return a sha256 over every field but `source`, and `more`."""
        about = {key: value for key, value in asdict(self).items() if key != "source"}
        return hashlib.sha256(json.dumps([about, *more], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """What a source found: its units in a fixed order, and some facts about them for the log and the summary."""

    train: list[Unit]
    val: list[Unit]
    about: dict[str, str | int] = field(default_factory=dict)

    def identity(self) -> str:
        """Return a sha256 over the names of the training units, in order. Two runs with equal ones read equal text."""
        return hashlib.sha256("\n".join(f"{u.name} {u.side} {u.val_fraction}" for u in self.train).encode()).hexdigest()


@dataclass
class DocumentCounts:
    """What became of the documents. Those `read` are in the tokens; those `empty`, `not_text` and `broken` are not."""

    read: int = 0
    empty: int = 0  # nothing but white space
    not_text: int = 0  # null, a number, or no such key
    broken: int = 0  # a line that is not a JSON object
    invalid_utf8: int = 0  # read, with the bytes in question replaced by U+FFFD
    long: int = 0  # read, in pieces (`documents.cut`)

    def __add__(self, other: DocumentCounts) -> DocumentCounts:
        return DocumentCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, int]:
        """Return the counts for JSON."""
        return asdict(self)


@runtime_checkable
class Source(Protocol):
    """Where documents come from. Picklable: every worker gets a copy."""

    waits: tuple[float, ...]  # seconds before each further attempt to read a unit

    def corpus(self) -> Corpus:
        """Find the units. Raises UserError with everything that is wrong, DataSourceLost if nothing answers."""
        ...

    def read(self, unit: Unit, counts: DocumentCounts) -> Iterator[object]:
        """Return the unit's documents in order, as bytes or str (anything else is counted as not text).

        It keeps no state between calls, so a failed unit can be read again from its start.
        """
        ...
