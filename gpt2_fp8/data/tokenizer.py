"""The two tokenizers: GPT-2's byte-pair encoding, and plain bytes. Both are `tiktoken.Encoding`s.

Text that spells a special token (`<|endoftext|>`) inside a document is encoded as plain text: a document cannot end
itself.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config.errors import UserError

if TYPE_CHECKING:
    import tiktoken

TokenizerName = Literal["gpt2", "bytes"]
Tokens = npt.NDArray[np.uint16]  # every id of both vocabularies fits: 50,257 and 257

END_OF_TEXT = "<|endoftext|>"
NETWORK_TIMEOUT = 4.0  # seconds to find out that the vocabulary cannot be fetched; tiktoken itself waits for ever

# What tiktoken reads for "gpt2" (tiktoken_ext/openai_public.py), with the sha256 that it holds each file to; it stores
# a file under the sha1 of its address.
_BASE = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
_CONTENT = {
    f"{_BASE}/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    f"{_BASE}/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
GPT2_FILES = {hashlib.sha1(url.encode()).hexdigest(): url for url in _CONTENT}


@cache
def load_tokenizer(name: TokenizerName) -> tiktoken.Encoding:
    """The encoding called `name`; `n_vocab` is 50,257 for gpt2 and 257 for bytes, `eot_token` 50,256 and 256.

    Raises:
        UserError: GPT-2's vocabulary is neither in tiktoken's cache nor to be had from the network.
    """
    return _bytes_encoding() if name == "bytes" else _gpt2_encoding()


def encode(encoding: tiktoken.Encoding, text: str) -> Tokens:
    """The ids of `text` as uint16 [n]. `text` must be valid unicode (no lone surrogates)."""
    if encoding.name == "bytes":  # the same ids as `encoding` gives, at the speed of a copy
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
    return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)


def fingerprint(encoding: tiktoken.Encoding) -> str:
    """A sha256 over the name, every token with its id, and the special tokens: what makes two encodings the same."""
    digest = hashlib.sha256(encoding.name.encode())
    for token in encoding.token_byte_values():  # sorted by bytes
        digest.update(b"%d:%d:" % (encoding.encode_single_token(token), len(token)) + token)
    for special in sorted(encoding.special_tokens_set):
        digest.update(b"%d=" % encoding.encode_single_token(special) + special.encode())
    return digest.hexdigest()


def _bytes_encoding() -> tiktoken.Encoding:
    import tiktoken

    return tiktoken.Encoding(
        name="bytes",
        pat_str=r"[\s\S]{1,64}",  # any cut will do where nothing merges
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={END_OF_TEXT: 256},
    )


def _gpt2_encoding() -> tiktoken.Encoding:
    import requests  # tiktoken's own client
    import tiktoken

    try:
        if not all(_is_whole(_cache_dir() / name, _CONTENT[url]) for name, url in GPT2_FILES.items()):
            requests.head(next(iter(GPT2_FILES.values())), timeout=NETWORK_TIMEOUT).raise_for_status()
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: what came has another hash
        reason = str(error).split("(Caused by")[0].strip() or type(error).__name__
        files = ", ".join(f"{url} as {name}" for name, url in GPT2_FILES.items())
        raise UserError.of(
            f"the GPT-2 vocabulary is not on this machine and cannot be fetched: {reason[:200]}",
            f"fetch {files} on a machine with a network, put both into one folder here and set TIKTOKEN_CACHE_DIR "
            "to it; or train on bytes: data.tokenizer=bytes",
        ) from error


def _is_whole(path: Path, sha256: str) -> bool:
    """Whether a file of the vocabulary is there as it should be. Another file tiktoken would remove, and then wait for
    the network without an end."""
    size = path.stat().st_size if path.is_file() else 0
    return 0 < size < 1 << 24 and hashlib.sha256(path.read_bytes()).hexdigest() == sha256


def _cache_dir() -> Path:
    """Where tiktoken looks (tiktoken/load.py): the same variables in the same order."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    return Path(os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default)))
