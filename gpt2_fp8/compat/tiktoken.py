"""Where tiktoken keeps GPT-2's vocabulary. It shows in advance whether tiktoken will use the network.

Holds for `tiktoken>=0.14`: its files `tiktoken/load.py` and `tiktoken_ext/openai_public.py`. It has no function that
looks without fetching, and its fetching has no time limit.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

# The files that it reads for "gpt2", with the sha256 that it requires of each.
_BASE = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
_CONTENT = {
    f"{_BASE}/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    f"{_BASE}/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
GPT2_FILES = {hashlib.sha1(url.encode()).hexdigest(): url for url in _CONTENT}  # {file name in the cache: address}


def has_gpt2() -> bool:
    """Return whether `get_encoding("gpt2")` finds whole files.

    tiktoken would remove any other file, and then wait for the network without an end.
    """
    return all(_is_whole(cache_dir() / name, _CONTENT[url]) for name, url in GPT2_FILES.items())


def cache_dir() -> Path:
    """Return the folder where tiktoken looks: the same variables in the same order."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    return Path(os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default)))


def _is_whole(path: Path, sha256: str) -> bool:
    size = path.stat().st_size if path.is_file() else 0
    return 0 < size < 1 << 24 and hashlib.sha256(path.read_bytes()).hexdigest() == sha256
