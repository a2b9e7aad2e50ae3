"""Tokenizers from files: a `tokenizer.json`, by the library `tokenizers`, and Llama 3's ranks, by tiktoken.

Both encode a special token that is spelled inside a document as plain text, and add none by themselves.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config import tokenizer_file
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.tokenizer_file import Described

# As published with Llama 3: how text is cut before tokens are merged, and the names of the special tokens.
LLAMA3_PATTERN = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_LLAMA3_NAMED = {
    0: "<|begin_of_text|>", 1: tokenizer_file.END_OF_TEXT, 4: "<|finetune_right_pad_id|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>",
}  # fmt: skip


_CONTEXT = 1 << 10  # characters on either side of a piece that are encoded with it
Pieces = Callable[[str, int], Iterator[list[int]]]


class Tokenizer(Protocol):
    """What this project uses of a tokenizer. A `tiktoken.Encoding` has it."""

    @property
    def name(self) -> str:
        """What it is."""

    @property
    def n_vocab(self) -> int:
        """One more than its largest id."""

    @property
    def eot_token(self) -> int:
        """The id that ends a document."""

    def encode_to_numpy(self, text: str, *, disallowed_special: Sequence[str]) -> npt.NDArray[np.integer]:
        """Return the ids of `text`, [n]. Nothing is disallowed where `disallowed_special` is empty."""

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the same ids as a list."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of ids; what is no UTF-8 is replaced."""


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer from a file. `sha256` is of the kind, the file's content and the separator.

    `pieces` yields the ids of a text, encoded so many characters at a time, as if in one go; None: parts of a text that
    is cut before blanks have the ids of the whole.
    """

    name: str
    n_vocab: int
    eot_token: int
    sha256: str
    encode_ordinary: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    pieces: Pieces | None = None

    def encode_to_numpy(self, text: str, *, disallowed_special: Sequence[str] = ()) -> npt.NDArray[np.integer]:
        """Return the ids of `text`, uint32 [n]. Any special token in it is plain text."""
        return np.array(self.encode_ordinary(text), dtype=np.uint32)


def load(name: str) -> FileTokenizer:
    """Load the tokenizer that the path `name` means. Raises UserError for a file or a library that cannot be used."""
    path = tokenizer_file.find(name)
    content = tokenizer_file.read(path)
    found = tokenizer_file.describe(path, content)
    digest = hashlib.sha256(f"{found.kind}:{found.separator}:".encode() + content).hexdigest()
    if found.ranks is not None:
        return FileTokenizer(found.kind, found.ids, found.separator, digest, *_llama3(found))
    return FileTokenizer(found.kind, found.ids, found.separator, digest, *_json(found, content))


def llama3_special_tokens(ranks: int) -> dict[str, int]:
    """Return the ids of Llama 3's special tokens, which come after its `ranks`."""
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(tokenizer_file.SPECIAL))
    return {_LLAMA3_NAMED.get(i) or next(reserved): ranks + i for i in range(tokenizer_file.SPECIAL)}


def _llama3(found: Described) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    import tiktoken

    assert found.ranks is not None
    encoding = tiktoken.Encoding(
        name="llama3",
        pat_str=LLAMA3_PATTERN,
        mergeable_ranks=found.ranks,
        special_tokens=llama3_special_tokens(len(found.ranks)),
    )
    return encoding.encode_ordinary, encoding.decode


def _json(
    found: Described, content: bytes
) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str], Pieces | None]:
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError as error:
        cause = f"data.tokenizer={found.path}: the library tokenizers, which reads it, cannot be imported: {error}"
        raise UserError.of(cause, tokenizer_file.INSTALL) from error
    try:
        loaded = Loaded.from_buffer(content)
    except Exception as error:  # the library raises plain Exceptions
        raise tokenizer_file.refused(found.path, f"the library tokenizers does not read it: {error}") from None
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        return list(loaded.encode(text, add_special_tokens=False).ids)

    def pieces(text: str, characters: int) -> Iterator[list[int]]:
        return _pieces(loaded, text, characters)

    try:
        whole = encode("x\nx x") == [*encode("x"), *encode("\nx"), *encode(" x")]  # not so if a text's begin is marked
    except Exception:  # a closed vocabulary
        whole = True
    return encode, lambda ids: str(loaded.decode(ids, skip_special_tokens=False)), None if whole else pieces


def _pieces(loaded: Any, text: str, characters: int) -> Iterator[list[int]]:
    """Yield the ids of a text that is cut between tokens, each piece encoded between its neighbours' characters."""
    start = before = 0
    while True:
        stop = start + characters
        made = loaded.encode(text[start - before : stop + _CONTEXT], add_special_tokens=False)
        begins = [start - before + begin for begin, _ in made.offsets]
        low, high = bisect_left(begins, start), bisect_left(begins, stop)
        if before and begins[low : low + 1] != [start]:  # no token begins there beside this context
            before = 0
            continue
        if stop + _CONTEXT >= len(text):
            yield made.ids[low:]
            return
        yield made.ids[low:high]
        start = begins[high] if high < len(begins) else stop + _CONTEXT
        before = min(_CONTEXT, start)
