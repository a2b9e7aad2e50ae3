"""The tokenizers: GPT-2's byte-pair encoding and plain bytes, as `tiktoken.Encoding`s, or a file of the user's.

Files are a `tokenizer.json`, read by the library `tokenizers`, and Llama 3's ranks, by tiktoken. A special token
(`<|endoftext|>`) that is spelled inside a document is encoded as plain text: a document cannot end itself.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config import tokenizer_file
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.shown import printable
from gpt2_fp8.config.tokenizer_file import Described

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
# GPT-2's vocabulary: {name in tiktoken's cache, the sha1 of the address: address}
_BASE = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_FILES = {hashlib.sha1(url.encode()).hexdigest(): url for url in (f"{_BASE}/vocab.bpe", f"{_BASE}/encoder.json")}
NETWORK_TIMEOUT_SECONDS = 4.0  # until the vocabulary counts as out of reach; tiktoken itself waits without an end
_INCOMPLETE = "\ufffd"  # what decoding puts in the place of bytes that are no character
# As published with Llama 3: how text is cut before tokens are merged, and the names of the special tokens.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMED = {
    0: "<|begin_of_text|>", 1: tokenizer_file.END_OF_TEXT, 4: "<|finetune_right_pad_id|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>", 10: "<|python_tag|>",
}  # fmt: skip
_CONTEXT = 1 << 10  # characters on either side of a piece that are encoded with it

Pieces = Callable[[str, int], Iterator[list[int]]]


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer from a file. `sha256` is of the kind, the file's content and the separator.

    `pieces` yields the ids of a text, encoded so many characters at a time, as if in one go; None: a text can be cut
    before blanks.
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


Tokenizer: TypeAlias = "tiktoken.Encoding | FileTokenizer"
Tokens = npt.NDArray[np.unsignedinteger]  # uint16 or uint32, as `dtype_of` says


def dtype_of(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the dtype of the ids 0 to `vocab_size` - 1: uint16 if all fit, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def narrow_ids(ids: npt.NDArray[np.integer], vocab_size: int, unit: str) -> Tokens:
    """Return `ids` in the dtype of their vocabulary. Raises UserError for an id of `unit` that is not in it."""
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        odd = int(ids.min() if ids.min() < 0 else ids.max())
        raise UserError.of(
            f"{printable(unit)}: its tokens have the id {odd} of a vocabulary of {vocab_size:,}",
            "the tokenizer's files do not fit each other, or are damaged",
        )
    return ids.astype(dtype_of(vocab_size), copy=False)


@cache
def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `name`: `gpt2`, `bytes`, or the path of a file or folder. Raises UserError without it."""
    if name == "bytes":
        return _bytes_encoding()
    return _gpt2_encoding() if name == "gpt2" else load_file(name)


def encode(encoding: Tokenizer, text: str, unit: str = "the text") -> Tokens:
    """Return the ids of `text`, which is valid unicode, as `narrow_ids` does: [n]."""
    if encoding.name == "bytes":  # the ids that `encoding` would give, as fast as a copy
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(dtype_of(encoding.n_vocab))
    return narrow_ids(encoding.encode_to_numpy(text, disallowed_special=()), encoding.n_vocab, unit)


def text_bytes(encoding: Tokenizer, ids: list[int]) -> int:
    """Return how many bytes the text of `ids` has, in UTF-8; three for a character that a file's tokenizer cuts."""
    import tiktoken

    if isinstance(encoding, tiktoken.Encoding):
        return len(encoding.decode_bytes(ids))
    return len(encoding.decode(ids).encode())


def fingerprint(encoding: Tokenizer) -> str:
    """Return a sha256 over the name, every token with its id, and the special tokens; of a file, over its content."""
    if isinstance(encoding, FileTokenizer):
        return encoding.sha256
    digest = hashlib.sha256(encoding.name.encode())
    for token in encoding.token_byte_values():  # sorted by bytes
        digest.update(b"%d:%d:" % (encoding.encode_single_token(token), len(token)) + token)
    for special in sorted(encoding.special_tokens_set):
        digest.update(b"%d=" % encoding.encode_single_token(special) + special.encode())
    return digest.hexdigest()


class TextStream:
    """Gives the text of the ids after `prompt` as soon as it is certain: a token may end within a character.

    Only the newest ids are decoded: those since the last certain character, and the piece before them, since some
    tokenizers drop a blank in front of a first word.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        self._decode = tokenizer.decode
        self._ids = list(prompt)
        self._before, self._certain = 0, len(prompt)  # ids from the first on are decoded; up to the second: given

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete; "" while a character is incomplete."""
        self._ids.extend(ids)
        text = self._decode(self._ids[self._before :])
        if text.endswith(_INCOMPLETE):
            return ""
        return self._take(text)

    def end(self) -> str:
        """Return what is left at the end of a text, with a mark for a character that was not completed."""
        return self._take(self._decode(self._ids[self._before :]))

    def _take(self, text: str) -> str:
        given = self._decode(self._ids[self._before : self._certain])
        self._before, self._certain = self._certain, len(self._ids)
        return text[len(given) :]


def _bytes_encoding() -> tiktoken.Encoding:
    import tiktoken

    return tiktoken.Encoding(
        name="bytes",
        pat_str=r"[\s\S]{1,64}",  # any pattern will do, since nothing is merged
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={END_OF_TEXT: 256},
    )


def _gpt2_encoding() -> tiktoken.Encoding:
    import requests  # tiktoken's own client
    import tiktoken

    default = os.environ.get("DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    cache_dir = Path(os.environ.get("TIKTOKEN_CACHE_DIR", default))
    try:
        if not all((cache_dir / name).is_file() for name in GPT2_FILES):
            requests.head(next(iter(GPT2_FILES.values())), timeout=NETWORK_TIMEOUT_SECONDS).raise_for_status()
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: what came has another hash
        reason = str(error).split("(Caused by")[0].strip() or type(error).__name__
        files = ", ".join(f"{url} as {name}" for name, url in GPT2_FILES.items())
        raise UserError.of(
            f"the GPT-2 vocabulary is not on this machine and cannot be fetched: {reason[:200]}",
            f"data.tokenizer=bytes; or put {files} into a folder that TIKTOKEN_CACHE_DIR names",
        ) from error


# ---- files -----------------------------------------------------------------------------------------------------------


def load_file(name: str) -> FileTokenizer:
    """Load the tokenizer that the path `name` means. Raises UserError for a file or a library that cannot be used."""
    path = tokenizer_file.find(name)
    content = tokenizer_file.read(path)
    found = tokenizer_file.describe(path, content)
    digest = hashlib.sha256(f"{found.kind}:{found.separator}:".encode() + content).hexdigest()
    load = partial(FileTokenizer, found.kind, found.ids, found.separator, digest)
    if found.ranks is None:
        return load(*_read_json(found, content))
    import tiktoken

    special = llama3_special_tokens(len(found.ranks))
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=found.ranks, special_tokens=special)
    return load(encoding.encode_ordinary, encoding.decode)


def llama3_special_tokens(ranks: int) -> dict[str, int]:
    """Return the ids of Llama 3's special tokens, which come after its `ranks`."""
    reserved = (f"<|reserved_special_token_{i}|>" for i in range(tokenizer_file.SPECIAL))
    return {_LLAMA3_NAMED.get(i) or next(reserved): ranks + i for i in range(tokenizer_file.SPECIAL)}


def _read_json(
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
        raise tokenizer_file.tokenizer_error(found.path, f"the library tokenizers does not read it: {error}") from None
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = True

    def encode(text: str) -> list[int]:
        return list(loaded.encode(text, add_special_tokens=False).ids)

    def decode(ids: list[int]) -> str:
        return str(loaded.decode(ids, skip_special_tokens=False))

    try:
        whole = encode("x\nx x") == [*encode("x"), *encode("\nx"), *encode(" x")]  # not so if a text's begin is marked
    except Exception:  # a closed vocabulary
        whole = True
    return encode, decode, None if whole else partial(_cut_encoded, loaded)


def _cut_encoded(loaded: Any, text: str, characters: int) -> Iterator[list[int]]:
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
