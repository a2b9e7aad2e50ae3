"""Text piece by piece: in whole characters, and in all the text of all ids."""

import pytest
import torch

from gpt2_fp8.data.text_stream import TextStream
from gpt2_fp8.data.tokenizer import load_tokenizer
from gpt2_fp8.data.tokenizer_files import load
from tests.data.tokenizers_made import KINDS, write_json, write_ranks, write_trained

TEXT = "To be 🙂 or — né 12345, the thing.\n\n.. 世界"


def pieces(tokenizer, ids):
    stream = TextStream(tokenizer)
    return [*(stream.add([i]) for i in ids), stream.end()]


@pytest.fixture(params=["bytes", "ranks", "words"])
def tokenizer(request, tmp_path):
    if request.param == "bytes":
        return load_tokenizer("bytes")
    if request.param == "ranks":
        return load(str(write_ranks(tmp_path / "tokenizer.model")))
    return load(str(write_json(tmp_path, ["?", "To", "be", "or", "thing"], ["</s>"], "</s>")))


def test_the_pieces_are_the_text(tokenizer):
    ids = tokenizer.encode_ordinary(TEXT)
    assert len(ids) > 5
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_no_piece_ends_within_a_character():
    tokenizer = load_tokenizer("bytes")
    found = pieces(tokenizer, tokenizer.encode_ordinary(TEXT))
    assert "".join(found) == TEXT
    assert "🙂" in found
    assert "界" in found
    assert found.count("") > 8, "while a character is incomplete"
    assert not any("\ufffd" in piece for piece in found)


def test_bytes_that_are_no_text_are_marked_as_in_the_whole():
    generator, tokenizer = torch.Generator().manual_seed(0), load_tokenizer("bytes")
    for length in range(1, 120, 7):
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_what_is_incomplete_at_the_end_is_given_then():
    assert pieces(load_tokenizer("bytes"), [65, 195]) == ["A", "", "\ufffd"]
    assert pieces(load_tokenizer("bytes"), []) == [""]


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_after_a_prompt_keeps_its_first_blank(tmp_path, kind):
    text = "the thing  and in the thing and the other thing"
    tokenizer = load(str(write_trained(tmp_path, kind, text)))
    ids = tokenizer.encode_ordinary(text)
    for cut in range(len(ids)):
        prompt = tokenizer.decode(ids[:cut])
        stream = TextStream(tokenizer, ids[:cut])
        drawn = "".join([*(stream.add([i]) for i in ids[cut:]), stream.end()])
        assert prompt + drawn == tokenizer.decode(ids)
