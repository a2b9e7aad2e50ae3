"""The tokenizers: round trips, special text, and what is said when GPT-2's vocabulary is missing."""

from __future__ import annotations

import hashlib
import inspect
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tiktoken_ext import openai_public

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.tokenizer import GPT2_FILES, TextStream, encode, load_file, load_tokenizer
from tests.data.tokenizers_made import KINDS, write_json, write_ranks, write_trained

TEXT = "Hällo\x00 wörld\n\t<|endoftext|> 日本 \U0001f600"


def test_bytes_round_trip() -> None:
    encoding = load_tokenizer("bytes")
    ids = encode(encoding, TEXT)
    assert (encoding.n_vocab, encoding.eot_token) == (257, 256)
    assert (ids.dtype, ids.tolist()) == (np.uint16, list(TEXT.encode()))
    assert ids.tolist() == encoding.encode_ordinary(TEXT)  # the short cut gives what the encoding itself gives
    assert encoding.decode(ids.tolist()) == TEXT


def test_missing_vocabulary_is_said_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name, value in {"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(name.lower(), value)
    load_tokenizer.cache_clear()
    start = time.monotonic()
    with pytest.raises(UserError, match="the GPT-2 vocabulary is not on this machine") as told:
        load_tokenizer("gpt2")
    assert time.monotonic() - start < 15
    assert "TIKTOKEN_CACHE_DIR" in str(told.value)
    assert all(name in str(told.value) for name in GPT2_FILES)


def test_tiktoken_keeps_the_vocabulary_under_the_names_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.load.read_file", str.encode)
    for url in GPT2_FILES.values():
        tiktoken.load.read_file_cached(url, hashlib.sha256(url.encode()).hexdigest())
        assert url in inspect.getsource(openai_public.gpt2)
    assert {path.name for path in tmp_path.iterdir()} == set(GPT2_FILES)


# ---- text piece by piece: in whole characters, and in all the text of all ids ----------------------------------------

STREAMED = "To be 🙂 or — né 12345, the thing.\n\n.. 世界"


def pieces(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [*(stream.add([i]) for i in ids), stream.end()]


@pytest.fixture(params=["bytes", "ranks", "words"])
def tokenizer(request, tmp_path):
    if request.param == "bytes":
        return load_tokenizer("bytes")
    if request.param == "ranks":
        return load_file(str(write_ranks(tmp_path / "tokenizer.model")))
    return load_file(str(write_json(tmp_path, ["?", "To", "be", "or", "thing"], ["</s>"], "</s>")))


def test_the_pieces_are_the_text(tokenizer):
    ids = tokenizer.encode_ordinary(STREAMED)
    assert len(ids) > 5
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_no_piece_ends_within_a_character():
    tokenizer = load_tokenizer("bytes")
    found = pieces(tokenizer, tokenizer.encode_ordinary(STREAMED))
    assert "".join(found) == STREAMED
    assert "🙂" in found
    assert "界" in found
    assert found.count("") > 8, "while a character is incomplete"
    assert not any("\ufffd" in piece for piece in found)


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_after_a_prompt_keeps_its_first_blank(tmp_path, kind):
    text = "the thing  and in the thing and the other thing"
    tokenizer = load_file(str(write_trained(tmp_path, kind, text)))
    ids = tokenizer.encode_ordinary(text)
    for cut in range(len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        stream = TextStream(tokenizer, ids[:cut])
        drawn = "".join([*(stream.add([i]) for i in ids[cut:]), stream.end()])
        assert prompt + drawn == tokenizer.decode(ids)
