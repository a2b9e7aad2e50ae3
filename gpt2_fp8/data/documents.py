"""From raw documents to tokens: what is skipped, what is repaired, and the count of each.

A unit's tokens are its documents in their natural order. Each is followed by the end-of-text id, as in nanoGPT.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.data.tokenizer import FileTokenizer, Tokenizer, encode
from gpt2_fp8.data.units import DocumentCounts, Tokens, Unit, dtype_of, little_endian, narrow_ids

PIECE_CHARACTERS = 1 << 20  # characters encoded in one go: bounds the memory and the time that one document can take

# A unit may have this many broken lines, or this part of its lines. With more than both, the file is no text.
MAX_BROKEN = 100
MAX_BROKEN_PART = 0.1
# With more replaced characters than both, a unit's text is in another encoding.
MAX_REPLACED = 10
MAX_REPLACED_PART = 0.001


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

    def permuted(self, order: npt.NDArray[np.int64]) -> Tokens:
        """Return the tokens with the documents in `order` (int64 [documents])."""
        assert len(order) == len(self.ends)
        if len(order) < 2:
            return self.tokens
        starts = np.concatenate(([0], self.ends[:-1]))
        return np.concatenate([self.tokens[starts[i] : self.ends[i]] for i in order])


def tokenise(
    documents: Iterable[bytes | str | object], unit: Unit, encoding: Tokenizer, counts: DocumentCounts
) -> TokenisedUnit:
    """Encode the `documents` that are text and on the unit's side of a held-out split.

    Raises UserError if too many lines are broken, or if the encoding gives an id that it does not have.
    """
    end_of_text = np.array([encoding.eot_token], dtype=dtype_of(encoding.n_vocab))
    pieces: list[Tokens] = []
    whole: list[Tokens] = []  # of many pieces each: an array takes a hundred bytes in addition to its tokens
    ends = array("q")
    length = rows = characters = replaced = 0
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
        for piece in _encoded(text, encoding, unit.name):
            pieces.append(piece)
            length += len(piece)
        pieces.append(end_of_text)
        length += 1
        ends.append(length)
        if len(pieces) >= 4096:
            whole.append(np.concatenate(pieces))
            pieces.clear()
    if counts.broken > max(MAX_BROKEN, MAX_BROKEN_PART * (rows + counts.broken)):
        raise UserError.of(
            f"{printable(unit.name)}: {counts.broken} of {rows + counts.broken} lines are no JSON objects",
            "repair the file, or leave it out",
        )
    tokens = np.concatenate([*whole, *pieces]) if whole or pieces else end_of_text[:0]
    stops = np.array(ends, dtype=np.int64)
    much = replaced > max(MAX_REPLACED, MAX_REPLACED_PART * characters)
    return TokenisedUnit(tokens, stops, counts, checksum(tokens, stops), replaced / characters if much else 0.0)


def _encoded(text: str, encoding: Tokenizer, unit: str) -> Iterator[Tokens]:
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
    """Return the sha256 of a unit's tokens and ends, in the cache's byte order."""
    digest = hashlib.sha256(little_endian(tokens).data)
    digest.update(ends.astype("<i8", copy=False).data)
    return digest.hexdigest()


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
