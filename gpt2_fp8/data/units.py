"""The unit, the piece of a corpus that is read and tokenised in one go, and what a source of units offers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, Protocol, runtime_checkable


@dataclass(frozen=True)
class Unit:
    """A parquet row group, a range of bytes of a text file, a whole compressed file, or a module.

    Together with the tokenizer its fields say which tokens come out: they are what the cache is keyed by.
    """

    name: str  # the same on every machine: goes into the fingerprint that a resumed run is held to
    path: str
    start: int = 0  # bytes, or the row group, or the shard
    stop: int = 0
    version: str = ""  # changes when the text does: size and time of a file; a commit
    side: Literal["all", "train", "val"] = "all"  # where a split is by document: which ones are this unit's
    val_fraction: float = 0.0  # of the documents, when `side` is not "all"

    def digest(self, *more: str) -> str:
        """A sha256 over every field and `more`."""
        return hashlib.sha256(json.dumps([asdict(self), *more], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Corpus:
    """What a source found: its units in a fixed order, and what to tell about it."""

    train: list[Unit]
    val: list[Unit]
    about: dict[str, str | int] = field(default_factory=dict)

    def identity(self) -> str:
        """A sha256 over the names of the training units, in order: two runs with the same one read the same text."""
        return hashlib.sha256("\n".join(f"{u.name} {u.side} {u.val_fraction}" for u in self.train).encode()).hexdigest()


@dataclass
class DocumentCounts:
    """What became of the documents. `read` are in the tokens; `empty`, `not_text` and `broken` are not."""

    read: int = 0
    empty: int = 0  # nothing but white space
    not_text: int = 0  # null, a number, or no such key
    broken: int = 0  # a line that is not a JSON object
    invalid_utf8: int = 0  # read, with the bytes in question replaced by U+FFFD
    long: int = 0  # read, in pieces (`documents.cut`)

    def __add__(self, other: DocumentCounts) -> DocumentCounts:
        return DocumentCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


@runtime_checkable
class Source(Protocol):
    """Where documents come from. Picklable: every worker gets one copy."""

    waits: tuple[float, ...]  # seconds before each further attempt at a unit that could not be read

    def corpus(self) -> Corpus:
        """Find the units. Raises UserError with everything that is wrong, DataSourceLost when nothing answers."""
        ...

    def read(self, unit: Unit, counts: DocumentCounts) -> Iterator[object]:
        """The unit's documents in order, as bytes or str (anything else is counted as not text).

        Holds no state between calls, so that a failed unit can be read again from its start.
        """
        ...

    def is_current(self, unit: Unit) -> bool:
        """Whether the text is still of the version that the unit names: or else no cache may keep it under that."""
        ...
