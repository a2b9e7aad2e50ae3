"""Text as people have it: kinds of file, folders, a single small file, and what is refused by a name."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import formats
from gpt2_fp8.data.files import FilesSource
from gpt2_fp8.data.preparation import tokens_a_pass
from gpt2_fp8.data.units import Unit
from tests.data.corpora import files_config, module, write_jsonl
from tests.data.test_files import read
from tests.runs import SMALL, forked

TEXTS = [f'row {i}, "said"\nwörd ' + "long " * (40_000 if i == 7 else i % 5) for i in range(120)]
ROWS = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def table(delimiter: str) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, ["id", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return b"\xef\xbb\xbf" + out.getvalue().encode()


def arrow(new: Callable[..., pa.RecordBatchWriter]) -> bytes:
    out, rows = io.BytesIO(), pa.table({"text": TEXTS})
    with new(out, rows.schema) as writer:
        writer.write_table(rows, max_chunksize=10)
    return out.getvalue()


KINDS = {
    "a.json": json.dumps(ROWS, indent=1).encode(), "b.json": LINES, "a.ndjson": LINES,
    "mark.json": b"\xef\xbb\xbf" + json.dumps(ROWS).encode(),
    "a.JSONL.gz": gzip.compress(LINES),
    "a.jsonl.zstd": pa.Codec("zstd").compress(LINES, asbytes=True), "a.json.bz2": bz2.compress(LINES),
    "a.csv": table(","), "a.tsv.gz": gzip.compress(table("\t")),
    "stream.arrow": arrow(pa.ipc.new_stream), "file.arrow": arrow(pa.ipc.new_file),
}  # fmt: skip


@pytest.mark.parametrize("name", [*KINDS, "saved"])
def test_every_kind_gives_the_documents_of_its_rows(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "RANGE_BYTES", 1000)
    if name == "saved":
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / name), num_shards=3)
    else:
        (tmp_path / name).write_bytes(KINDS[name])
    whole = FilesSource([str(tmp_path / name)], [], 0.0)
    units = whole.corpus().train
    documents, counts = read(whole, units)
    assert documents == TEXTS
    assert (counts.not_text, counts.broken) == (0, 0)
    assert (len(units) > 1) == (name.endswith("arrow") or name in ("saved", "a.ndjson"))
    held = FilesSource([str(tmp_path / name)], [], 0.2)
    train, val = (read(held, side)[0] for side in (held.corpus().train, held.corpus().val))
    assert sorted([*train, *val]) == sorted(TEXTS)
    assert 5 < len(val) < 60


@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_compressed_txt_is_cut_and_held_out_as_txt_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    monkeypatch.setattr(formats, "RANGE_BYTES", 1000)
    text = b"\xef\xbb\xbf" + "".join(f"{i} line ö\n" for i in range(999)).encode()
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text))
    sides = []
    for name in ("a.txt", "b.txt.gz"):
        source = FilesSource([str(tmp_path / name)], [], fraction)
        corpus = source.corpus()
        sides.append(["".join(read(source, units)[0]) for units in (corpus.train, corpus.val)])
        assert len(read(source, corpus.train)[0]) > 5
    assert sides[0] == sides[1]
    assert bool(sides[0][1]) == bool(fraction)


ABOUT = ["dataset_info.json", "tokenizer.json", "tokenizer_config.json"]


def test_a_folder_is_its_files_of_known_kinds_and_a_glob_takes_no_folder(tmp_path: Path) -> None:
    for name in ("b.md", "sub/a.txt", "sub/c.jsonl", ".git/x.txt", "image.png", "sub/.hidden.txt", *ABOUT):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "words"}\n')

    def names(pattern: str) -> list[str]:
        return [Path(unit.path).name for unit in FilesSource([pattern], [], 0.0).corpus().train]

    assert names(str(tmp_path)) == ["b.md", "a.txt", "c.jsonl"]
    assert names(f"{tmp_path}/s*") == ["a.txt", "c.jsonl"]
    assert names(f"{tmp_path}/*.md") == ["b.md"]
    (tmp_path / "image.png").unlink()
    for name in ABOUT:
        (tmp_path / name).unlink()
    assert names(f"{tmp_path}/*") == ["b.md"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_of_a_small_file_as_much_is_held_out_as_a_validation_takes(tmp_path: Path, name: str) -> None:
    texts = [f"{i} " + "some words " * 6 + "\n" for i in range(28)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "a.txt").write_text("".join(texts))
    config = files_config(tmp_path / name, val_fraction=0.01, val_sequences=4)
    made = module(config, n_positions=32)
    text = made.text
    assert text is not None

    def tokens(units: list[Unit]) -> int:
        return sum(len(text.pool.take(text.pool.ask(unit)).tokens) for unit in units)

    assert 32 < tokens(text.corpus.val) < 0.5 * tokens(text.corpus.train)
    assert tokens_a_pass(config, 32) == tokens(text.corpus.train), "an epoch is of what is left to train on"
    assert module(config, n_positions=32).identity() == made.identity()
    with pytest.raises(UserError, match="validation text is too short"):
        module(files_config(tmp_path / name, val_fraction=0.01, val_sequences=4), n_positions=1500)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("void", "no file to read in the folder void"), ("none/*.txt", "none/*.txt is no file"),
        ("x.odd", "x.odd is of an unknown kind"), ("three", "DatasetDict of the splits train, validation, test"),
        ("[good.txt,gone.txt]", "gone.txt is no file"),
    ],
)  # fmt: skip
def test_a_name_that_is_wrong_is_refused_before_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "void").mkdir()
    for name in ("x.odd", "good.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "three").mkdir()
    (tmp_path / "three/dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    with pytest.raises(UserError) as told:
        preflight(["data=text_files", f"data.train_files={word}"])
    (problem,) = told.value.problems
    assert said in problem.cause
    assert problem.keys == ("data.train_files",)
    assert word != "three" or problem.remedy == "data.train_files=three/train data.val_files=three/validation"
    (config,) = preflight(["data=text_files", "data.train_files=good.txt"])
    assert config.data.train_files == ["good.txt"]


@pytest.mark.whole
def test_a_runs_log_has_the_reason_of_its_refusal(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,body\n1,words\n")
    done = forked(
        *SMALL, "data=text_files", "data.train_files=a.csv", "data.tokenizer=bytes", "run_name=x", cwd=tmp_path
    )
    assert done.returncode == 2
    reason = "a.csv has no text column 'text'"
    assert reason in done.stderr
    assert reason not in done.stdout
    assert (tmp_path / "outputs/x/run.log").read_text().count(reason) == 1
