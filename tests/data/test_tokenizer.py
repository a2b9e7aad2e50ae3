"""The tokenizers: round trips, special text, and what is said when GPT-2's vocabulary is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.tokenizer import GPT2_FILES, encode, fingerprint, load_tokenizer

TEXT = "Hällo\x00 wörld\n\t<|endoftext|> 日本 \U0001f600"


def test_bytes_round_trip() -> None:
    encoding = load_tokenizer("bytes")
    ids = encode(encoding, TEXT)
    assert encoding.n_vocab == 257
    assert encoding.eot_token == 256
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(TEXT.encode())
    assert ids.tolist() == encoding.encode_ordinary(TEXT)  # the short cut gives what the encoding itself gives
    assert encoding.decode(ids.tolist()) == TEXT


def test_gpt2_special_text_is_plain_text() -> None:
    try:
        encoding = load_tokenizer("gpt2")
    except UserError:
        pytest.skip("no GPT-2 vocabulary: set TIKTOKEN_CACHE_DIR")
    ids = encode(encoding, "Hello world<|endoftext|>")
    assert ids.tolist()[:2] == [15496, 995]
    assert encoding.eot_token == 50256
    assert encoding.eot_token not in ids
    assert encoding.decode(ids.tolist()) == "Hello world<|endoftext|>"
    assert fingerprint(encoding) != fingerprint(load_tokenizer("bytes"))


@pytest.mark.whole
def test_missing_vocabulary_is_said_soon(tmp_path: Path) -> None:
    code = (
        "from gpt2_fp8.data.tokenizer import load_tokenizer\n"
        "try: load_tokenizer('gpt2')\n"
        "except Exception as e: print(type(e).__name__, e)"
    )
    unreachable = {
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "NO_PROXY": "",
        "no_proxy": "",
    }
    start = time.monotonic()
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **unreachable, "TIKTOKEN_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    assert time.monotonic() - start < 15
    assert out.startswith("UserError error: the GPT-2 vocabulary is not on this machine")
    assert "TIKTOKEN_CACHE_DIR" in out
    assert "data.tokenizer=bytes" in out
    assert all(name in out for name in GPT2_FILES)
