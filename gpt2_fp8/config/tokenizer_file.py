"""What a tokenizer's own file says without any library: its kind, how many ids it has, and what ends a document.

Two kinds are read. `tokenizer.json` is that of the library `tokenizers`, as Hugging Face's folders have it. The other
is the rank file of Llama 3 (`tokenizer.model`): a token in base64 and its rank on each line. A name `org/name` is the
`tokenizer.json` of the hub's repository, as the cache of the hub's client has it; what is not there is fetched once.
"""

from __future__ import annotations

import base64
import json
import os
import re
from contextlib import suppress
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.keys import show

NAMES = {"bytes": 257, "gpt2": 50257}  # tokenizers that need no path, and their numbers of ids
FILES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")  # in a folder, the first that is there
INSTALL = 'pip install -e ".[hf]"'
SPECIAL = 256  # special tokens of Llama 3, after its ranks
END_OF_TEXT = "<|end_of_text|>"  # the second of them
SEPARATORS = ("<|endoftext|>", END_OF_TEXT)  # they end a document, also where a chat's turn ends with another one
CONFIG = "tokenizer_config.json"  # beside a tokenizer.json
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_TIMEOUT_SECONDS = 10.0  # until the hub counts as out of reach
_MOST_IDS = 1 << 31  # a batch has ids as int32


class Described(NamedTuple):
    """A tokenizer's file."""

    path: Path
    kind: Literal["tokenizer.json", "llama3"]
    ids: int  # how many a model needs: one more than the largest
    separator: int  # the id that ends a document
    ranks: dict[bytes, int] | None = None  # of Llama 3's file, each token's rank


def number_of_ids(name: str) -> int:
    """Return how many ids the tokenizer `data.tokenizer=name` has. Raises UserError for a file that is of no use."""
    if name in NAMES:
        return NAMES[name]
    path = find(name)
    about = path.stat()
    return _count_ids(path, about.st_mtime_ns, about.st_size)


def separator(name: str) -> int | None:
    """Return the id that ends a document; None if the tokenizer's file is gone, or of no use now."""
    if name in NAMES:
        return NAMES[name] - 1
    try:
        path = find(name)
        return describe(path, read(path)).separator
    except UserError:
        return None


def find(name: str) -> Path:
    """Return the file that `data.tokenizer=name` means. Raises UserError if there is none."""
    path = Path(name).expanduser()
    found = next((path / file for file in FILES if os.path.isfile(path / file)), path)
    if _HUB_NAME.fullmatch(name) and not os.path.lexists(path):
        found, reason = _fetch(name)
        if reason:
            cause = f"data.tokenizer={name}: no file or folder here, and not to be had from the hub: {reason}"
            before = f"without a network, first: hf download {name} {FILES[0]} {CONFIG}"
            raise UserError.of(cause, f"check the name, and HF_TOKEN if it is gated; {before}")
        return found
    if not name.strip() or not os.path.isfile(found):
        what = f"the folder has no {' and no '.join(FILES[:2])}" if path.is_dir() else "it is no file"
        cause = f"data.tokenizer={show(name)}: neither gpt2 nor bytes, and {what} (looked in {Path.cwd()})"
        raise UserError.of(cause, "data.tokenizer=gpt2, bytes, FOLDER with a tokenizer.json, or ORG/NAME of the hub")
    return found


@cache
def _fetch(name: str) -> tuple[Path, str]:
    """Return where the hub's client keeps the tokenizer.json of a repository, and why it does not ("": it does)."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        if not isinstance(path := try_to_load_from_cache(name, FILES[0]), str):
            HfApi().model_info(name, timeout=_TIMEOUT_SECONDS)  # a download would try for half a minute
            with suppress(RemoteEntryNotFoundError):  # not every repository has one
                hf_hub_download(name, CONFIG)
            path = hf_hub_download(name, FILES[0])
    except Exception as error:  # the client's own, and those of its HTTP library
        reason = " ".join(str(error).split())
        return Path(name), reason[:200] or type(error).__name__
    return Path(path), ""


def read(path: Path) -> bytes:
    """Return a tokenizer's file. Raises UserError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise tokenizer_error(path, str(error.strerror or error)) from None


def describe(path: Path, content: bytes) -> Described:
    """Describe a tokenizer's file. Raises UserError if it is none, or nothing ends a document."""
    try:
        if content.lstrip()[:1] == b"{":
            return _json(path, json.loads(content))
        return _ranks(path, content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"it is neither a tokenizer.json nor Llama 3's rank file ({error!r:.100})"
        raise tokenizer_error(path, why) from None


def tokenizer_error(path: Path, why: str) -> UserError:
    """Return the error that says why a file is of no use as a tokenizer."""
    return UserError.of(f"data.tokenizer={path}: {why}", "name another file, or data.tokenizer=gpt2 or bytes")


@lru_cache(maxsize=64)
def _count_ids(path: Path, mtime_ns: int, size: int) -> int:
    described = describe(path, read(path))
    if described.kind == "tokenizer.json" and find_spec("tokenizers") is None:
        raise UserError.of(f"data.tokenizer={path}: the library tokenizers, which reads it, is not installed", INSTALL)
    return described.ids


def _json(path: Path, content: dict[str, Any]) -> Described:
    vocabulary = content["model"]["vocab"]
    known = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()  # a list: of Unigram
    tokens = content.get("added_tokens") or []
    added = {str(token["content"]): token["id"] for token in tokens if token["special"]}
    every = [*known, *(token["id"] for token in tokens)]
    if not every or any(type(i) is not int or not 0 <= i < _MOST_IDS for i in every):
        raise ValueError("its ids are not whole numbers from 0 on")
    name = next((name for name in SEPARATORS if name in added), None) or _eos_token(path)
    if name not in added:
        said = f"{name!a:.60}, which ends a document, is none of them" if name else "none is known to end a document"
        cause = f"data.tokenizer={path}: it has {len(added)} special tokens, and {said}"
        raise UserError.of(cause, 'name one of them in tokenizer_config.json beside it: {"eos_token": "TOKEN"}')
    return Described(path, "tokenizer.json", max(every) + 1, added[name])


def _eos_token(path: Path) -> str | None:
    beside = path.with_name(CONFIG)
    token = json.loads(read(beside)).get("eos_token") if beside.is_file() else None
    return token.get("content") if isinstance(token, dict) else token


def _ranks(path: Path, content: bytes) -> Described:
    pairs = [line.split() for line in content.splitlines() if line]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([value]) not in ranks for value in range(256)):
        raise ValueError("its ranks are not those of all bytes and their merges")
    return Described(path, "llama3", len(ranks) + SPECIAL, len(ranks) + 1, ranks)
