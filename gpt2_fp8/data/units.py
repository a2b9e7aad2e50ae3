"""The unit, the piece of a corpus that is read and tokenised at once: its documents, its tokens, and where it is from.

A unit's tokens are its documents in their natural order. Each is followed by the end-of-text id, as in nanoGPT.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data.tokenizer import FileTokenizer, Tokenizer, Tokens, dtype_of, encode, narrow_ids

PIECE_CHARACTERS = 1 << 20  # characters encoded in one go: bounds the memory and the time that one document can take

# A unit may have this many broken lines, or this part of its lines. With more than both, the file is no text.
MAX_BROKEN = 100
MAX_BROKEN_PART = 0.1
# With more replaced characters than both, a unit's text is in another encoding.
MAX_REPLACED = 10
MAX_REPLACED_PART = 0.001
LOCAL_WAITS = (0.5, 2.0)  # seconds before each further attempt: for a passing error of a disk or a network mount


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
    long: int = 0  # read, in pieces (`cut`)

    def __add__(self, other: DocumentCounts) -> DocumentCounts:
        return DocumentCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, int]:
        """Return the counts for JSON."""
        return asdict(self)

    def describe_odd(self) -> str:
        """Return what was skipped or mended, as "2 empty, 1 broken"; "" if nothing was."""
        return ", ".join(f"{count} {name}" for name, count in asdict(self).items() if count and name != "read")


@runtime_checkable
class Source(Protocol):
    """Where documents come from. Picklable: every worker gets a copy."""

    waits: tuple[float, ...]  # seconds before each further attempt to read a unit

    def corpus(self) -> Corpus:
        """Find the units. Raises UserError with everything that is wrong, DataSourceLost if nothing answers."""
        ...

    def read(self, unit: Unit, counts: DocumentCounts) -> Iterator[object]:
        """Return the unit's documents in order, as bytes or str (anything else is counted as not text), at any time."""
        ...


@dataclass(frozen=True)
class TokenisedUnit:
    """A unit's documents in natural order.

    `tokens`: uint16 or uint32 [n]. `ends`: int64 [documents], the index after each document's last token.
    """

    tokens: Tokens
    ends: npt.NDArray[np.int64]
    counts: DocumentCounts
    sha256: str  # `checksum` of tokens and ends
    replaced: float = 0.0  # which part of its characters is U+FFFD in place of bytes that are no UTF-8; 0 for a few

    def permute(self, order: npt.NDArray[np.int64]) -> Tokens:
        """Return the tokens with the documents in `order` (int64 [documents])."""
        assert len(order) == len(self.ends)
        if len(order) < 2:
            return self.tokens
        starts = np.concatenate(([0], self.ends[:-1]))
        return np.concatenate([self.tokens[starts[i] : self.ends[i]] for i in order])


def tokenise(
    documents: Iterable[bytes | str | object], unit: Unit, encoding: Tokenizer, counts: DocumentCounts
) -> TokenisedUnit:
    """Encode the documents that are text and on the unit's side of a split. Raises UserError if many are broken."""
    dtype = dtype_of(encoding.n_vocab)
    end_of_text = np.array([encoding.eot_token], dtype).tobytes()
    ids, ends = bytearray(), array("q")
    rows = characters = replaced = 0
    for document in documents:
        rows += 1
        invalid = counts.invalid_utf8
        text = clean(document, counts)
        if text is None or not on_side(text, unit):
            continue
        counts.read += 1
        characters += len(text)
        if counts.invalid_utf8 > invalid:
            was = document if isinstance(document, bytes) else str(document).encode(errors="replace")
            replaced += text.count("\ufffd") - was.count("\ufffd".encode())
        counts.long += len(text) > PIECE_CHARACTERS
        for piece in _encode_pieces(text, encoding, unit.name):
            ids += piece.tobytes()
        ids += end_of_text
        ends.append(len(ids) // dtype.itemsize)
    if counts.broken > max(MAX_BROKEN, MAX_BROKEN_PART * (rows + counts.broken)):
        raise UserError.of(
            f"{printable(unit.name)}: {counts.broken} of {rows + counts.broken} lines are no JSON objects",
            "repair the file, or leave it out",
        )
    tokens, stops = np.frombuffer(ids, dtype), np.array(ends, np.int64)
    much = replaced > max(MAX_REPLACED, MAX_REPLACED_PART * characters)
    return TokenisedUnit(tokens, stops, counts, checksum(tokens, stops), replaced / characters if much else 0.0)


def _encode_pieces(text: str, encoding: Tokenizer, unit: str) -> Iterator[Tokens]:
    """Yield the ids of a text, of `PIECE_CHARACTERS` characters at a time."""
    if len(text) > PIECE_CHARACTERS and isinstance(encoding, FileTokenizer) and encoding.pieces is not None:
        for ids in encoding.pieces(text, PIECE_CHARACTERS):
            yield narrow_ids(np.array(ids, dtype=np.uint32), encoding.n_vocab, unit)
    else:
        yield from (encode(encoding, piece, unit) for piece in cut(text))


def of_ids(ids: Tokens, end_of_text: int) -> TokenisedUnit:
    """Return ids that were read as they are, as a unit of one piece: a permutation of documents leaves them alone.

    Each end-of-text id counts as a document.
    """
    counts = DocumentCounts(read=int(np.count_nonzero(ids == end_of_text)))
    ends = np.array([len(ids)], dtype=np.int64)
    return TokenisedUnit(ids, ends, counts, checksum(ids, ends))


def checksum(tokens: Tokens, ends: npt.NDArray[np.int64]) -> str:
    """Return the sha256 of a unit's tokens and ends."""
    return hashlib.sha256(tokens.tobytes() + ends.tobytes()).hexdigest()


def clean(document: bytes | str | object, counts: DocumentCounts) -> str | None:
    """Return `document` as valid unicode, or None if there is nothing to train on. Either way it is counted."""
    if not isinstance(document, bytes | str):
        counts.not_text += 1
        return None
    if isinstance(document, bytes):
        try:
            text = document.decode()
        except UnicodeDecodeError:
            text = document.decode(errors="replace")
            counts.invalid_utf8 += 1
    else:
        text = document
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates: from bytes that were no UTF-8, or from a "\\ud800" in JSON
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            counts.invalid_utf8 += 1
    if not text or text.isspace():
        counts.empty += 1
        return None
    return text


def on_side(text: str, unit: Unit) -> bool:
    """Return whether the document belongs to the unit's split. Its content decides, so all copies are on one side."""
    if unit.side == "all":
        return True
    held_out = zlib.crc32(text.encode()) < unit.val_fraction * 2**32
    return held_out == (unit.side == "val")


def cut(text: str) -> Iterator[str]:
    """Cut `text` into pieces of at most `PIECE_CHARACTERS` characters, before a space or a newline if there is one.

    GPT-2's and Llama 3's own splitting also cuts before a single space, so such a cut does not change the tokens.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        most = start + PIECE_CHARACTERS
        stop = max(text.rfind(" ", start + 1, most), text.rfind("\n", start + 1, most))
        stop = stop if stop > start else most
        yield text[start:stop]
        start = stop
    yield text[start:]
