"""Tokenizers from files: a `tokenizer.json`, by the library `tokenizers`, and Llama 3's ranks, by tiktoken.

Both encode a special token that is spelled inside a document as plain text, and add none by themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """A tokenizer from a file. `sha256` is of the kind, the file's content and the separator."""

    name: str
    n_vocab: int
    eot_token: int
    sha256: str
    encode_ordinary: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]

    def encode_to_numpy(self, text: str, *, disallowed_special: Sequence[str] = ()) -> npt.NDArray[np.integer]:
        """Return the ids of `text`, uint32 [n]. Any special token in it is plain text."""
        return np.array(self.encode_ordinary(text), dtype=np.uint32)


def load(name: str) -> FileTokenizer:
    """Load the tokenizer that the path `name` means. Raises UserError for a file or a library that cannot be used."""
    path = tokenizer_file.find(name)
    content = tokenizer_file.read(path)
    found = tokenizer_file.describe(path, content)
    digest = hashlib.sha256(f"{found.kind}:{found.separator}:".encode() + content).hexdigest()
    encode, decode = _llama3(found) if found.ranks is not None else _json(found, content)
    return FileTokenizer(found.kind, found.ids, found.separator, digest, encode, decode)


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


def _json(found: Described, content: bytes) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
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
    return (
        lambda text: list(loaded.encode(text, add_special_tokens=False).ids),
        lambda ids: str(loaded.decode(ids, skip_special_tokens=False)),
    )
