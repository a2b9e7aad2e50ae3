"""Each kind of file, what is held out of it, hostile documents, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt2_fp8.config.data_schema import StdlibData
from gpt2_fp8.config.errors import DataSourceLost, UserError
from gpt2_fp8.data import datamodule, formats
from gpt2_fp8.data.files import TRAIN_MODULES, VAL_MODULES, FilesSource, StdlibSource
from gpt2_fp8.data.reader import with_retries
from gpt2_fp8.data.tokenizer import load_tokenizer
from gpt2_fp8.data.units import DocumentCounts, Unit, tokenise
from tests.data.corpora import files_config, items, module, write_jsonl

TEXTS = [f"document {i} " + "word " * (i % 7) for i in range(200)]


def read(source: Any, units: list[Unit]) -> tuple[list[str], DocumentCounts]:
    encoding, documents, total = load_tokenizer("bytes"), [], DocumentCounts()
    for unit in units:
        counts = DocumentCounts()
        tokens = tokenise(source.read(unit, counts), unit, encoding, counts).tokens
        documents += [d.decode() for d in bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).split(b"\0")[:-1]]
        total += counts
    return documents, total


def write(path: Path, texts: list[Any]) -> Path:
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": pa.array(texts), "n": [1] * len(texts)}), path, row_group_size=30)
    elif path.suffix == ".zst":
        half = len(lines) // 2
        compress = pa.Codec("zstd").compress  # two frames, as compressors that work in parallel write
        path.write_bytes(b"".join(compress(part, asbytes=True) for part in (lines[:half], lines[half:])))
    else:
        path.write_bytes(lines)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_rows_and_their_held_out_part(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "RANGE_BYTES", 1000)
    path = write(tmp_path / name, [*TEXTS, *TEXTS[:50]])  # with exact copies
    whole = FilesSource([str(path)], [], 0.0)
    units = whole.corpus().train
    assert len(units) == (1 if name.endswith("zst") else 9 if name.endswith("parquet") else len(units))
    assert name.endswith("zst") or len(units) > 5
    assert read(whole, units)[0] == [*TEXTS, *TEXTS[:50]]
    held = FilesSource([str(path)], [], 0.2)
    corpus = held.corpus()
    train, val = read(held, corpus.train)[0], read(held, corpus.val)[0]
    assert sorted(train + val) == sorted([*TEXTS, *TEXTS[:50]])
    assert not set(train) & set(val)
    assert 20 < len(val) < 90


def test_txt_is_cut_at_newlines_and_its_tail_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "RANGE_BYTES", 1000)
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    source = FilesSource([str(path)], [], 0.1)
    corpus = source.corpus()
    train, val = read(source, corpus.train)[0], read(source, corpus.val)[0]
    assert "".join([*train, *val]) == path.read_text()
    assert len(train) > 3
    assert all(part.endswith("\n") for part in [*train, *val])
    assert 0.05 < len("".join(val)) / path.stat().st_size < 0.15
    path.write_text("é" * 2501)  # no newline: cut between characters
    corpus = source.corpus()
    documents, counts = read(source, corpus.train + corpus.val)
    assert "".join(documents) == "é" * 2501
    assert counts.invalid_utf8 == 0


def test_a_file_with_several_names_is_read_once_as_it_is_named_first(tmp_path: Path) -> None:
    good, link, other = (tmp_path / name for name in ("good.txt", "a_link.txt", "other.txt"))
    good.write_text("text\n" * 9)
    other.write_text("more\n" * 9)
    link.symlink_to(good)
    once = FilesSource([str(good), str(other)], [], 0.0).corpus()
    for words in ([good, link, other], [good, f"{tmp_path}/*.txt"]):
        assert FilesSource(list(map(str, words)), [], 0.0).corpus() == once
    held_out = FilesSource([str(other), str(good)], [str(link)], 0.0).corpus()
    assert [unit.path for unit in held_out.train] == [str(other)]


def test_all_problems_at_once(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n")
    write(tmp_path / "ok.jsonl", TEXTS)
    write(tmp_path / "ok.parquet", TEXTS)
    (tmp_path / "bad.parquet").write_text("no parquet")
    names = ["x.csv", "ok.jsonl", "ok.parquet", "bad.parquet", "gone.txt", "*.none"]
    with pytest.raises(UserError) as told:
        FilesSource([str(tmp_path / n) for n in names], [], 0.0, "content").corpus()
    causes = "\n".join(p.cause for p in told.value.problems)
    assert len(told.value.problems) == 6
    assert all(part in causes for part in ("x.csv", "'content'", "bad.parquet", "gone.txt", "*.none"))
    with pytest.raises(UserError, match="train_files is empty"):
        FilesSource([], [], 0.0).corpus()


def test_validation_is_the_same_on_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    made = module(files_config(path, val_fraction=0.2, val_sequences=10))
    first, second = ([batch["ids"].numpy() for batch in made.val_dataloader()] for _ in range(2))
    assert [b.shape for b in first] == [(4, 17)] * 3
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    rows = np.concatenate(first)
    assert (rows[10:] == -1).all()
    assert (rows[:10] >= 0).all()
    assert np.array_equal(rows[1:10, 0], rows[:9, -1])  # natural order, each starts with the last one's last target
    for rank in (0, 1):
        monkeypatch.setattr(datamodule, "rank_and_world", lambda rank=rank: (rank, 2))
        (one, other) = (batch["ids"].numpy() for batch in made.val_dataloader())
        assert np.array_equal(np.concatenate([one, other])[:5], rows[rank:10:2])
        assert (other[1:] == -1).all(), "every rank has as many items of one shape"
    assert module(files_config(path)).val_dataloader() == []
    with pytest.raises(UserError, match="validation text is too short"):
        module(files_config(path, val_sequences=10))


def test_retries_are_counted_and_end() -> None:
    failures = [OSError("one"), ValueError("two")]

    def action() -> str:
        if failures:
            raise failures.pop(0)
        return "text"

    assert with_retries(action, "it", (0.0, 0.0)) == ("text", 2)
    failures[:] = [OSError("gone")] * 3
    with pytest.raises(DataSourceLost, match=r"cannot read it \(OSError: gone\), after 3 attempts"):
        with_retries(action, "it", (0.0, 0.0))
    failures[:] = [KeyError("ours")]
    with pytest.raises(KeyError):  # a mistake of ours does not pass by waiting
        with_retries(action, "it", (0.0, 0.0))


def test_the_standard_library_trains_and_validates(tmp_path: Path) -> None:
    corpus = StdlibSource().corpus()
    assert (len(corpus.train), len(corpus.val)) == (len(TRAIN_MODULES), len(VAL_MODULES))
    assert len({*TRAIN_MODULES, *VAL_MODULES}) == len(TRAIN_MODULES) + len(VAL_MODULES)
    config = StdlibData(
        name="stdlib", kind="stdlib", tokenizer="bytes", num_workers=0, seed=7, val_sequences=64, cache_dir=None
    )
    made = module(config, n_positions=256, global_batch_size=16)
    assert [item.shape for item in items(made)] == [(16, 257)] * 20
    assert sum(len(batch["ids"]) for batch in made.val_dataloader()) == 64
    assert made.wait_seconds > 0
    with pytest.raises(UserError, match="no source of its standard library"):
        StdlibSource(str(tmp_path)).corpus()
