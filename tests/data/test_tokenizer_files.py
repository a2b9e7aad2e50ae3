"""Tokenizers from files: their ids against Hugging Face's, what ends a document, and what a cache goes by."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2_fp8 import compose
from gpt2_fp8.config import checks, tokenizer_file
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import RunConfig
from gpt2_fp8.config.tokenizer_file import FILES
from gpt2_fp8.data import units
from gpt2_fp8.data.tokenizer import encode, fingerprint, llama3_special_tokens, load_file, load_tokenizer
from gpt2_fp8.data.units import DocumentCounts, Unit, tokenise
from tests.data.corpora import files_config, items, module, write_jsonl
from tests.data.hub import Hub
from tests.data.tokenizers_made import RANKS, write_json, write_ranks, write_trained

TEXT = "The thing, 12345 things...\n\n  in the café's\r\n<|end_of_text|> 日本 \U0001f600 \t x"
WORDS = ["?", "a", "b", "c", "."]


def test_llama3s_ranks_give_the_ids_of_hugging_faces_own_conversion(tmp_path: Path) -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converted = TikTokenConverter(vocab_file=str(write_ranks(tmp_path / "tokenizer.model"))).converted()
    tokenizer = load_file(str(tmp_path))
    assert tokenizer.encode_ordinary(TEXT) == converted.encode(TEXT, add_special_tokens=False).ids
    assert set(tokenizer.encode_ordinary(TEXT)) & set(range(256, len(RANKS))), "tokens are merged"
    assert tokenizer.decode(tokenizer.encode_ordinary(TEXT)) == TEXT
    converted.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    converted.save(str(tmp_path / "tokenizer.json"))
    same = load_file(str(tmp_path))
    assert (same.name, same.eot_token) == ("tokenizer.json", tokenizer.eot_token)
    assert encode(same, TEXT).tolist() == encode(tokenizer, TEXT).tolist()


def test_llama3s_special_tokens_are_the_published_ones() -> None:
    tokens = llama3_special_tokens(128_000)
    assert sorted(tokens.values()) == list(range(128_000, 128_256))
    published = {
        "<|begin_of_text|>": 128_000, "<|end_of_text|>": 128_001, "<|reserved_special_token_0|>": 128_002,
        "<|finetune_right_pad_id|>": 128_004, "<|start_header_id|>": 128_006, "<|end_header_id|>": 128_007,
        "<|eom_id|>": 128_008, "<|eot_id|>": 128_009, "<|python_tag|>": 128_010,
        "<|reserved_special_token_247|>": 128_255,
    }  # fmt: skip
    assert {name: tokens[name] for name in published} == published


def test_a_file_decides_ids_separator_and_fingerprint(tmp_path: Path) -> None:
    folders = {
        "one": write_json(tmp_path / "one", WORDS, ["<s>", "</s>"], "</s>"),
        "other end": write_json(tmp_path / "two", WORDS, ["<s>", "</s>"], {"content": "<s>"}),
        "known end": write_json(tmp_path / "three", WORDS, ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
        "other word": write_json(tmp_path / "four", [*WORDS[:-1], "d"], ["<s>", "</s>"], "</s>"),
        "ranks": write_ranks(tmp_path / "five" / "original" / "tokenizer.model").parents[1],
    }
    found = {name: load_file(str(folder)) for name, folder in folders.items()}
    assert [one.eot_token for one in found.values()] == [6, 5, 6, 6, len(RANKS) + 1]
    assert [one.n_vocab for one in found.values()] == [7, 7, 7, 7, len(RANKS) + 256]
    assert [tokenizer_file.number_of_ids(str(f)) for f in folders.values()] == [one.n_vocab for one in found.values()]
    assert len({fingerprint(one) for one in found.values()}) == len(found)
    again = load_file(str(write_json(tmp_path / "six", WORDS, ["<s>", "</s>"], "</s>")))
    assert fingerprint(again) == fingerprint(found["one"]), "the content decides, not its place"


CODE = "\n".join(Path(module.__file__ or "").read_text() for module in (json, importlib.util, json.decoder)) * 4


def test_a_document_cannot_end_itself_and_has_no_token_added(tmp_path: Path) -> None:
    """Whatever the file says of tokens at the begin, of truncation and of padding."""
    tokenizer, text = load_file(str(write_trained(tmp_path, "bytes", CODE))), "a b<|endoftext|>c, of ten tokens or more"
    made = tokenise([text, "b"], Unit("u", "a.txt", 0, 1), tokenizer, DocumentCounts())
    assert made.tokens.tolist().count(tokenizer.eot_token) == 2
    assert tokenizer.decode(made.tokens[: made.ends[0] - 1].tolist()) == text
    assert made.tokens.dtype == np.uint16


@pytest.mark.parametrize("kind", ["llama", "unigram", "bytes, with a blank in front"])
def test_a_long_document_has_the_ids_of_one_go(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run of blanks, or of what no token has, is longer than a piece and what is read around it."""
    tokenizer = load_file(str(write_trained(tmp_path, kind, CODE)))
    for text in (CODE, "a" + " " * 20_000 + "b\n\n" + CODE[:9000] + "\u2603" * 20_000 + CODE[:9000]):
        monkeypatch.setattr(units, "PIECE_CHARACTERS", 300)
        made = tokenise([text], Unit("u", "a.txt", 0, 1), tokenizer, DocumentCounts())
        whole = tokenizer.encode_ordinary(text)
        if text is CODE:
            assert made.tokens.tolist() == [*whole, tokenizer.eot_token]
        assert tokenizer.decode(made.tokens[:-1].tolist()).count("def") == tokenizer.decode(whole).count("def") > 10


def test_a_byte_level_tokenizer_keeps_the_ids_that_it_gave_to_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_file(str(write_trained(tmp_path, "bytes", CODE)))
    monkeypatch.setattr(units, "PIECE_CHARACTERS", 300)
    made = tokenise([CODE], Unit("u", "a.txt", 0, 1), tokenizer, DocumentCounts())
    pieces = [i for piece in units.cut(CODE) for i in tokenizer.encode_ordinary(piece)]
    assert made.tokens.tolist() == [*pieces, tokenizer.eot_token]


def test_text_goes_through_data_and_cache_by_the_files_content(tmp_path: Path) -> None:
    corpus = write_jsonl(tmp_path / "a.jsonl", ["a b c . " * 40 for _ in range(20)])
    folder = write_json(tmp_path / "t", WORDS, ["</s>"], "</s>")

    def batches() -> list[Any]:
        config = files_config(corpus, tokenizer=str(folder), cache_dir=str(tmp_path / "cache"))
        return [ids.tolist() for ids in items(module(config), 4)]

    first = batches()
    assert {i for batch in first for row in batch for i in row} == {1, 2, 3, 4, 5}
    kept = {path.name for path in (tmp_path / "cache").iterdir()}
    write_json(folder, ["?", "b", "a", "c", "."], ["</s>"], "</s>")
    load_tokenizer.cache_clear()
    swapped = {1: 2, 2: 1}
    assert batches() == [[[swapped.get(i, i) for i in row] for row in batch] for batch in first]
    assert kept < {path.name for path in (tmp_path / "cache").iterdir()}, "another tokenizer has units of its own"


def test_a_name_of_the_hub_is_fetched_once_and_then_read_without_a_network(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = write_json(tmp_path / "t", WORDS, ["<s>", "</s>"], "</s>")
    for name, files in {"Org/whole": ("tokenizer.json", "tokenizer_config.json"), "Org/endless": FILES[:1]}.items():
        hub.repos[name] = {file: (folder / file).read_bytes() for file in files}
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "refuse", None)
    monkeypatch.chdir(tmp_path)
    assert fingerprint(load_file("Org/whole")) == fingerprint(load_file(str(folder)))
    for name, reason in {"Org/endless": "none is known to end", "Org/nobody": "401"}.items():
        with pytest.raises(UserError, match=reason) as told:
            tokenizer_file.number_of_ids(name)
        assert str(told.value).count("\n") == 1
    tokenizer_file._fetch.cache_clear()
    hub.requests.clear()
    assert tokenizer_file.number_of_ids("Org/whole") == 7
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"data\.tokenizer=Org/other: no file or folder here"):
        tokenizer_file.number_of_ids("Org/other")
    (tmp_path / "Org/whole").mkdir(parents=True)
    with pytest.raises(UserError, match="the folder has no tokenizer"):  # what is here comes first
        tokenizer_file.number_of_ids("Org/whole")
    assert hub.requests == []


@pytest.fixture(scope="module")
def base() -> RunConfig:
    (config,) = compose.preflight(["run_name=r"])
    return config


REFUSED = [
    ("gpt3", "neither gpt2 nor bytes, and it is no file"),
    ("empty", "the folder has no tokenizer.json and no tokenizer.model"),
    ("/dev/zero", "it is no file"),
    ("gap.model", "its ranks are not those of all bytes"),
    ("endless", "2 special tokens, and none is known to end a document"),
    ("wrong", "'<end>', which ends a document, is none of them"),
    ("fits.model model.vocab_size=300", "the tokenizer has 523 tokens"),
]


@pytest.mark.parametrize(("word", "cause"), REFUSED, ids=[word[:20] for word, _ in REFUSED])
def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: RunConfig, word: str, cause: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_ranks(tmp_path / "gap.model", RANKS[1:])
    write_ranks(tmp_path / "fits.model")
    write_json(tmp_path / "endless", WORDS, ["<s>", "</s>"])
    write_json(tmp_path / "wrong", WORDS, ["<s>", "</s>"], "<end>")
    name, _, vocab_size = word.partition(" model.vocab_size=")
    data = replace(base.data, tokenizer=name.strip("'").replace("\\t", "\t"))
    model = replace(base.model, vocab_size=int(vocab_size) if vocab_size else None)
    (problem,) = checks.check(replace(base, data=data, model=model))
    assert cause in problem.cause
