"""A tokenizer's files for Hugging Face: the same ids as in training, whatever the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import tokenizer_export
from gpt2_fp8.data.tokenizer import END_OF_TEXT, load_file, load_tokenizer
from tests.data.tokenizers_made import KINDS, RANKS, write_ranks, write_trained

# GPT-2's (Radford et al. 2019, encoder.py)
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
# "abc" can be had as a + bc alone: "ab" is a later merge
MERGED = [*RANKS, b"bc", b"abc", b"ab", b" in", b"he", b"hehe", "日".encode()[:2], "日".encode(), b"  "]
CORPUS = Path(json.__file__).read_text() + Path(json.decoder.__file__).read_text()
TEXTS = [
    "The thing, 12345 things...\n\n  in the café's\r\n 日本 \U0001f600 \t x",
    "", " ", "abcab hehehe  in   in", "a\u0301é\x00\x7f\xa0\xad end ", "don't DON'T we'll  \n \n\n",
]  # fmt: skip


@pytest.fixture(scope="module", params=["bytes", "gpt2", "llama3"])
def both(request, tmp_path_factory):
    """The ids of training, and the tokenizer that transformers loads from the exported files."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        name = request.param
        if name == "gpt2":
            ranks = {token: rank for rank, token in enumerate(MERGED)}
            made = tiktoken.Encoding(
                "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)}
            )
            patch.setattr(tokenizer_export, "load_tokenizer", lambda name: made)
        else:
            name = str(write_ranks(folder / "tokenizer.model", MERGED)) if name == "llama3" else name
            made = load_tokenizer(name)
        for file, content in tokenizer_export.files_of(name, 64).items():
            (folder / file).write_bytes(content)
    return made, AutoTokenizer.from_pretrained(folder)


@settings(max_examples=60, deadline=None)
@given(drawn=st.text(alphabet=st.one_of(st.sampled_from("abche in12'\n\t日é"), st.characters(codec="utf-8"))))
def test_ids_are_those_of_training(both, drawn):
    assume("<|" not in drawn)  # theirs takes the name of a special token for the token
    ours, theirs = both
    for text in (drawn, *TEXTS):
        ids = ours.encode_ordinary(text)
        assert (theirs(text).input_ids, theirs.decode(ids)) == (ids, text)


def test_what_ends_a_text_and_how_many_ids_there_are(both):
    ours, theirs = both
    assert (theirs.eos_token_id, len(theirs)) == (ours.eot_token, ours.n_vocab)
    assert theirs.model_max_length == 64


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_ones_own_gives_the_ids_of_training(tmp_path: Path, kind):
    """Whatever its post-processor, its truncation and the configuration beside it say."""
    folder = write_trained(tmp_path / "t", kind, CORPUS)
    ours = load_file(str(folder))
    (tmp_path / "out").mkdir()
    for file, content in tokenizer_export.files_of(str(folder), 64).items():
        (tmp_path / "out" / file).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*TEXTS, " Hello  world", CORPUS[:5000]]:
        ids = ours.encode_ordinary(text)
        assert (theirs(text).input_ids, theirs.decode(ids)) == (ids, ours.decode(ids))
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|endoftext|>", ours.eot_token)
    assert (theirs.bos_token_id, theirs.model_max_length, len(theirs)) == (ours.eot_token, 64, ours.n_vocab)


def test_a_tokenizer_that_is_gone_is_an_error(tmp_path: Path):
    with pytest.raises(UserError, match="it is no file"):
        tokenizer_export.files_of(str(tmp_path / "gone"), 64)
