"""The tokenizers: GPT-2's byte-pair encoding and plain bytes, as `tiktoken.Encoding`s, or a file of the user's.

A special token (`<|endoftext|>`) that is spelled inside a document is encoded as plain text: a document cannot end
itself.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from gpt2_fp8.compat.tiktoken import GPT2_FILES, has_gpt2
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import tokenizer_files
from gpt2_fp8.data.ids import Tokens, dtype_of, narrowed
from gpt2_fp8.data.tokenizer_files import FileTokenizer, Tokenizer

if TYPE_CHECKING:
    import tiktoken

END_OF_TEXT = "<|endoftext|>"
NETWORK_TIMEOUT_SECONDS = 4.0  # until the vocabulary counts as out of reach; tiktoken itself waits without an end


@cache
def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `name`: `gpt2`, `bytes`, or the path of a file or folder. A process reads each once.

    `n_vocab` is 50,257 for gpt2 and 257 for bytes, `eot_token` is 50,256 and 256.

    Raises:
        UserError: GPT-2's vocabulary is not in tiktoken's cache, and cannot be fetched; or the file is of no use.
    """
    if name == "bytes":
        return _bytes_encoding()
    return _gpt2_encoding() if name == "gpt2" else tokenizer_files.load(name)


def encode(encoding: Tokenizer, text: str, unit: str = "the text") -> Tokens:
    """Return the ids of `text`, [n], in the dtype that `ids.dtype_of` gives the vocabulary.

    `text` must be valid unicode (no lone surrogates). Raises UserError, naming `unit`, for an id that the vocabulary
    does not have.
    """
    if encoding.name == "bytes":  # the ids that `encoding` would give, as fast as a copy
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(dtype_of(encoding.n_vocab))
    return narrowed(encoding.encode_to_numpy(text, disallowed_special=()), encoding.n_vocab, unit)


def text_bytes(encoding: Tokenizer, ids: list[int]) -> int:
    """Return how many bytes the text of `ids` has, in UTF-8.

    Of a file's tokenizer, a character that is cut at either end counts as the three bytes of its mark.
    """
    import tiktoken

    if isinstance(encoding, tiktoken.Encoding):
        return len(encoding.decode_bytes(ids))
    return len(encoding.decode(ids).encode())


def fingerprint(encoding: tiktoken.Encoding | FileTokenizer) -> str:
    """Return a sha256 over the name, every token with its id, and the special tokens. Equal encodings share it.

    Of a file it is over the content.
    """
    if isinstance(encoding, FileTokenizer):
        return encoding.sha256
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
        pat_str=r"[\s\S]{1,64}",  # any pattern will do, since nothing is merged
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={END_OF_TEXT: 256},
    )


def _gpt2_encoding() -> tiktoken.Encoding:
    import requests  # tiktoken's own client
    import tiktoken

    try:
        if not has_gpt2():
            requests.head(next(iter(GPT2_FILES.values())), timeout=NETWORK_TIMEOUT_SECONDS).raise_for_status()
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' errors are OSErrors; ValueError: what came has another hash
        reason = str(error).split("(Caused by")[0].strip() or type(error).__name__
        files = ", ".join(f"{url} as {name}" for name, url in GPT2_FILES.items())
        raise UserError.of(
            f"the GPT-2 vocabulary is not on this machine and cannot be fetched: {reason[:200]}",
            f"fetch {files} on a machine with a network, put both into one folder here and set TIKTOKEN_CACHE_DIR "
            "to it; or train on bytes: data.tokenizer=bytes",
        ) from error
