"""The program that trains a tokenizer, and a run on what it has written, from the hub's cache."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from gpt2_fp8 import export, generate, tokenizer
from gpt2_fp8.data.tokenizer import fingerprint, load_file
from gpt2_fp8.data.tokenizer_training import TrainingText
from tests.data.corpora import letters, mixture, write_jsonl
from tests.data.token_files_made import nano, some_ids
from tests.runs import train

TEXTS = [f"Document {i} of naïve words: the thing, {i * 37} times. 日本 <|end|>\n\n" * 9 for i in range(60)]
DATA = ["data=text_files", "data.train_files=train.jsonl", "data.val_files=val.jsonl"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", [*TEXTS, " ", None])
    write_jsonl(tmp_path / "val.jsonl", ["qqqqqqqq " * 400])
    nano(tmp_path / "ids.bin", some_ids(500))
    return tmp_path


def test_a_run_takes_what_was_trained_also_by_a_name_of_the_hub(here, monkeypatch, capsys):
    from huggingface_hub import constants

    for folder in ("mine", "again"):
        assert tokenizer.main(["train", "--out", folder, "--vocab-size", "400", "--end", "<|end|>", *DATA]) == 0
    said = capsys.readouterr().out
    assert f"400 ids, stored as uint16; trained on {len(''.join(TEXTS).encode()) / 1e6:.1f} MB of text, 60 doc" in said
    assert (here / "mine/tokenizer.json").read_bytes() == (here / "again/tokenizer.json").read_bytes()
    ours, theirs = load_file("mine"), AutoTokenizer.from_pretrained(here / "mine")
    assert (ours.n_vocab, ours.decode([ours.eot_token]), theirs.eos_token) == (400, "<|end|>", "<|end|>")
    for text in ("\x00 é\n\n  \t the thing\U0001f600", TEXTS[0].replace("<|end|>", "")):
        assert theirs(text).input_ids == ours.encode_ordinary(text)
        assert ours.decode(ours.encode_ordinary(text)) == text
    assert len(ours.encode_ordinary(" the thing")) == 2
    assert len(ours.encode_ordinary("qqqqqqqq")) == 8, "held-out text is not looked at"

    cache = here / "hub/models--Org--mine"
    shutil.copytree(here / "mine", cache / "snapshots/abc")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(here / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    train(here / "run", *DATA, "data.num_workers=0", "data.tokenizer=Org/mine", "trainer.max_steps=2")
    assert export.main(["run", "exported"]) == 0
    assert json.loads((here / "exported/config.json").read_text())["eos_token_id"] == ours.eot_token
    assert fingerprint(load_file("exported")) != fingerprint(ours) == fingerprint(load_file("Org/mine"))
    assert load_file("exported").encode_ordinary(TEXTS[1]) == ours.encode_ordinary(TEXTS[1])
    assert generate.main(["ckpt_path=run", "prompt=the", "tokens=4", "device=cpu"]) == 0


def test_what_cannot_be_trained_is_refused_and_nothing_is_written(here, capsys):
    (here / "full").mkdir()
    (here / "full/x").touch()
    ids = ["data=token_files", "data.train_files=ids.bin", "data.val_files=ids.bin"]
    for words, said in {
        ("--out", "mine", "--vocab-size", "400", "--end", "words", *DATA): "--end words",
        ("--out", "mine", "--vocab-size", "4000", *DATA): "--vocab-size 4000",
        ("--out", "mine", "--vocab-size", "256", *DATA): "has 257 ids",
        ("--out", "mine", "--vocab-size", "9" * 30, *DATA): "1,048,576",
        ("--out", "mine", "--vocab-size", "300", *DATA, "data.text_column=no"): "data.text_column",
        ("--out", "full", "--vocab-size", "400", *DATA): "full is there already",
        ("--out", "mine", "--vocab-size", "400", *ids): "data=token_files",
        ("--out", "mine", "--vocab-size", "400", "-m", "seed=1,2", *DATA): "-m",
        ("--out", "mine", "--vocab-size", "400", *DATA, "data.train_file=x"): "data.train_files",
    }.items():
        assert tokenizer.main(["train", *words]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.startswith("error: ")
    for words in (["--out", "mine", "--vocab-size", "0"], ["--vocab-size", "400", *DATA]):
        with pytest.raises(SystemExit) as ended:
            tokenizer.main(["train", *words])
        assert ended.value.code == 2
    assert not Path("mine").exists()


def test_a_part_of_a_text_is_of_all_its_files_and_of_a_mixtures_sources_by_their_weights(here):
    sources = {name: letters(here, name, 30, seed=3) for name in "ab"}
    text = TrainingText(mixture(sources, {"a": 3, "b": 1}), 1)
    text.most = 12_000
    read = list(text)
    of = {name: [len(part) for part in read if part[0] == name] for name in "ab"}
    assert sum(of["a"]) == pytest.approx(9000, abs=220)
    assert sum(of["b"]) == pytest.approx(3000, abs=220)
    assert (text.size, text.documents) == (sum(map(len, read)), len(read))
    assert {length // 35 for length in of["a"]} >= {0, 1, 2, 3, 4, 5}, "of files in any place"
