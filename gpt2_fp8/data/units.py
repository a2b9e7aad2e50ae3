"""The unit, which is the piece of a corpus that is read and tokenised at once, and the interface of a source."""

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

    def is_current(self, unit: Unit) -> bool:
        """Return whether the text still has the unit's version; if not, no cache may keep it."""
        ...


@runtime_checkable
class IdSource(Protocol):
    """Where token ids come from that somebody else's tokenizer has made. Picklable, as a `Source` is."""

    waits: tuple[float, ...]

    def corpus(self) -> Corpus:
        """Find the units, as `Source.corpus` does."""
        ...

    def read_ids(self, unit: Unit, vocab_size: int) -> npt.NDArray[np.unsignedinteger]:
        """Return the unit's ids, [n], in the dtype of the vocabulary. Raises UserError for an id outside of it."""
        ...

    def count(self, unit: Unit) -> int:
        """Return how many ids the unit has, without reading them."""
        ...
