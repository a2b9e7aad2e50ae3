"""The program `generate`: transformers' texts, each prompt as alone, and all that is wrong at once."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gpt2_fp8 import export, generate
from gpt2_fp8.config.programs import GenerateConfig
from gpt2_fp8.model.decoder import Decoder
from gpt2_fp8.train.generation import Generation
from tests.data.tokenizers_made import write_json
from tests.train.test_huggingface import IDS, THEIRS, built, expressed, write_checkpoint

CLOSE = 1e-4  # of logits in float32
PROMPTS = ["To be", "or not", "é"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> dict[str, Path]:
    """A checkpoint of each of transformers' models that have weights of our own, and the same exported."""
    folders = {}
    for name, config in THEIRS.items():
        folder = tmp_path_factory.mktemp("models")
        config().save_pretrained(folder / "shape")
        (folder / "shape/model.safetensors").touch()
        model = expressed(folder / "shape", name="own")
        torch.manual_seed(4)
        write_checkpoint(folder / "own", model, built(model).state_dict())
        assert export.main([str(folder / "own"), str(folder / "out")]) == 0
        folders[name] = folder
    return folders


@pytest.fixture(scope="module")
def gpt2(models: dict[str, Path]) -> str:
    return f"ckpt_path={models['GPT-2'] / 'own'}"


def written(out: Path, *words: str) -> list[dict[str, Any]]:
    assert generate.main([*words, f"out={out}"]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_logits_through_the_cache_are_transformers(models: dict[str, Path], name: str) -> None:
    """At every position, of two rows, with a first pass of one token and of several."""
    other = transformers.AutoModelForCausalLM.from_pretrained(models[name] / "out").eval()
    ready = Generation(GenerateConfig(ckpt_path=str(models[name] / "own")))
    ids = torch.randint(0, IDS, (2, 64), generator=torch.Generator().manual_seed(1))
    there = other(ids).logits
    assert 0.1 < there.std() < 20
    for first in (1, 30):
        decoder = Decoder(ready.model, 2, 64)
        found = [decoder.begin(ids[:, :first].tolist())]
        found += [decoder.step(ids[:, place].tolist()) for place in range(first, 64)]
        here = torch.stack(found, dim=1)[..., :IDS]
        assert float((here - there[:, first - 1 :]).abs().max()) < CLOSE


def test_each_text_is_as_alone(gpt2: str, tmp_path: Path) -> None:
    """Whatever stands beside it, however many are computed together, and from a file too."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\n")
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    words = [gpt2, "tokens=20", "samples=3", "top_p=0.9", "temperature=0.8", "top_k=100"]
    rows = written(tmp_path / "a", *words, f"prompts={file}")
    assert [(row["prompt"], row["sample"]) for row in rows] == [(text, n) for text in PROMPTS for n in range(3)]
    assert len({row["text"] for row in rows}) == 9
    assert rows == written(tmp_path / "b", *words, f"prompts={tmp_path / 'prompts.jsonl'}", "batch_size=2")
    alone = [row for text in PROMPTS for row in written(tmp_path / "c", *words, f"prompt={text}", "batch_size=1")]
    assert rows == alone
    other = written(tmp_path / "d", *words, f"prompts={file}", "seed=5")
    assert not {row["text"] for row in rows} & {row["text"] for row in other}


def test_a_folder_alone_is_the_model(gpt2: str, tmp_path: Path) -> None:
    """Also one with what a sweep puts into names."""
    folder = tmp_path / "sweep/seed=1,lr=2"
    folder.parent.mkdir()
    folder.symlink_to(gpt2.removeprefix("ckpt_path="))
    rows = [written(tmp_path / "out", *words, "tokens=5") for words in ([gpt2], ["tokens=5", str(folder)])]
    assert [row["text"] for row in rows[0]] == [row["text"] for row in rows[1]]


def test_a_text_ends_with_its_document(gpt2: str, tmp_path: Path) -> None:
    """Of 400 texts that are drawn almost evenly from 257 ids, some end."""
    words = [gpt2, "tokens=20", "samples=400", "temperature=50", "top_k=null", "batch_size=400"]
    rows = written(tmp_path / "out", *words)
    ended = [row for row in rows if row["ended"] == "end of text"]
    assert 5 < len(ended) < 200
    assert all(row["tokens"] < 20 for row in ended)
    assert all(row["tokens"] == 20 for row in rows if row not in ended)
    on = written(tmp_path / "on", *words, "stop=false")
    assert {row["tokens"] for row in on} == {20}
    assert any("<|endoftext|>" in row["text"] for row in on)


def test_past_the_context(gpt2: str, tmp_path: Path, capsys: Any) -> None:
    """The model has 64 positions. What a refusal says to type is accepted."""
    prompt = "x" * 60
    assert generate.main([gpt2, f"prompt={prompt}", "tokens=10"]) == 2
    told = capsys.readouterr().err
    assert "tokens=10: the prompt" in told
    (most,) = re.findall(r"tokens=(\d+) or less", told)
    assert [row["tokens"] for row in written(tmp_path / "a", gpt2, f"prompt={prompt}", f"tokens={most}")] == [5]
    assert [row["tokens"] for row in written(tmp_path / "b", gpt2, f"prompt={prompt}")] == [5], "as many as fit"
    assert generate.main([gpt2, f"prompt={'x' * 70}"]) == 2
    assert "has 70 of the model's 64 positions" in capsys.readouterr().err
    (row,) = written(tmp_path / "c", gpt2, f"prompt={'x' * 70}", "tokens=150", "slide=true", "stop=false")
    assert row["tokens"] == 150


REFUSED = [
    "", "ckpt_path=empty", "ckpt_path=fresh", "ckpt_path=damaged", "MODEL checkpoint=best",
    "MODEL prompt=a prompts=lines", "MODEL prompts=nothing", "MODEL prompts=bad.jsonl", "MODEL tokens=70",
    "MODEL temperature=nan", "MODEL temperature=0 samples=2", "MODEL top_p=1.5", "MODEL samples=1,2",
    "MODEL tempratur=1", "MODEL -m", "MODEL out=lines prompts=lines", "MODEL out=a_file/x", "MODEL tokenizer=gpt2",
    "MODEL precision=fp8_hybrid", "MODEL empty", "MODEL ckpt_path=empty/../fresh", "fresh empty",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "fresh/checkpoints", "damaged"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "a_file").touch()
    (tmp_path / "damaged/manifest.json").write_text("{}")
    (tmp_path / "lines").write_text("one\ntwo\n")
    (tmp_path / "nothing").write_text("\n \n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
    write_json(tmp_path / "words", ["?", "a"], ["</s>"], "</s>")
    return tmp_path


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_wrong_is_refused_by_its_key(here: Path, gpt2: str, capsys: Any, words: str) -> None:
    assert generate.main([gpt2 if word == "MODEL" else word for word in shlex.split(words)]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: .*\n(  fix: .*\n)?", said), said
    keys = [word.lstrip("-~").partition("=")[0] for word in words.split() if word != "MODEL"] or ["ckpt_path"]
    assert any(key in said for key in keys) or "fresh" in said
