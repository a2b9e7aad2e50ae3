"""Faults 55 to 63: text that is broken, empty, enormous or too little; and files that are damaged or odd."""

import json
import logging
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import formats
from gpt2_fp8.data.units import MAX_BROKEN, DocumentCounts, Unit
from tests.data.corpora import files_config, items, module, write_jsonl

TEXT = "some words of a document, and some more; "


def refusal(config: Any, **changes: Any) -> str:
    with pytest.raises(UserError) as told:
        items(module(config, **changes), 3)
    assert all(part.isprintable() for problem in told.value.problems for part in problem[:2])
    return str(told.value)


def lines(n: int) -> bytes:
    return "".join(json.dumps({"text": f"{i} {TEXT}"}) + "\n" for i in range(n)).encode()


def compressed(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.zst", "a.parquet"])
def test_55_a_document_that_is_empty_broken_or_no_text_is_skipped_and_counted(tmp_path: Path, name: str) -> None:
    bad = b"caf\xe9 and more"
    rows = [b'{"text": "good <|endoftext|> text"}', b'{"text": ', b"[1]", b"", b'{"text": null}', b'{"text": 5}',
            b'{"text": "  \\n"}', b'{"text": "' + bad + b'"}', b'{"text": "\\ud800"}', b'{"other": 1}']  # fmt: skip
    values = pa.array([b"good" * 9, None, b"", b" \n", bad], pa.binary())
    text = pa.StringArray.from_buffers(len(values), values.buffers()[1], values.buffers()[2], values.buffers()[0])
    (tmp_path / "a.txt").write_bytes(bad + b" " + TEXT.encode() * 99)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(rows))
    (tmp_path / "a.jsonl.zst").write_bytes(compressed(b"\n".join(rows)))
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    lines = DocumentCounts(read=3, empty=1, not_text=3, broken=2, invalid_utf8=2)
    of_parquet = DocumentCounts(read=2, empty=2, not_text=1, invalid_utf8=1)
    expected = {"a.txt": DocumentCounts(read=1, invalid_utf8=1), "a.parquet": of_parquet}
    made = module(files_config(tmp_path / name))
    (unit,) = made.text.corpus.train
    read = made.text.pool.take(made.text.pool.ask(unit))
    assert read.counts == expected.get(name, lines)
    tokens = read.tokens
    assert "caf\ufffd and more" in bytes(np.where(tokens == 256, 0, tokens).astype(np.uint8)).decode()


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_57_text_in_another_encoding_is_refused_with_the_share(tmp_path: Path, ending: str) -> None:
    path, text = tmp_path / f"a.{ending}", "Die größte Überraschung für alle Köpfe. " * 30
    row = text if ending == "txt" else '{"text": "' + text + '"}\n'
    path.write_bytes(row.encode("latin-1"))
    config = files_config(path, cache_dir=str(tmp_path / "cache"))
    for _ in range(2):  # the second time from the cache
        told = refusal(config)
        assert "12.50%" in told
        assert path.name in told
    path.write_bytes(row.encode())
    assert items(module(config), 3)
    for encoding in ("utf-16", "utf-32-le"):
        path.write_bytes(row.encode(encoding))
        assert f"{path} is no text" in refusal(config)


def test_58_a_broken_line_is_skipped_and_too_many_are_refused(tmp_path: Path) -> None:
    good, bad = json.dumps({"text": TEXT}), '{"text": "cut in the midd'
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join([*[good] * 30, *[bad] * 20]))
    made = module(files_config(few))
    items(made, 1)
    assert made.report()["documents"]["broken"] == 20
    many = tmp_path / "many.jsonl"
    many.write_text("\n".join([*[good] * 500, *[bad] * (MAX_BROKEN + 1)]))
    assert f"{MAX_BROKEN + 1} of {501 + MAX_BROKEN} lines are no JSON objects" in refusal(files_config(many))


@pytest.mark.parametrize("ending", [".txt", ".txt.gz", ".jsonl", ".jsonl.zst", ".csv", ".parquet", ".arrow"])
def test_59_an_empty_file_is_passed_over(tmp_path: Path, ending: str, caplog: pytest.LogCaptureFixture) -> None:
    write_jsonl(tmp_path / "a.jsonl", [f"{i} {TEXT}" for i in range(20)])
    whole = items(module(files_config(tmp_path / "a.jsonl")), 3)
    (tmp_path / f"empty{ending}").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        made = module(files_config([tmp_path / "a.jsonl", tmp_path / f"empty{ending}"]))
    assert "1 files are empty and are skipped" in caplog.text
    assert all(np.array_equal(a, b) for a, b in zip(items(made, 3), whole, strict=True))
    assert "the training text is too short: 0 tokens" in refusal(files_config(tmp_path / f"empty{ending}"))


def test_60_a_corpus_shorter_than_one_sequence_is_refused_with_the_numbers(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["0123", "4567"])
    told = refusal(files_config(path))
    assert "10 tokens in 2 documents" in told
    assert "model.n_positions + 1 = 17" in told
    made = module(files_config(path), n_positions=8)  # a sequence longer than any document: they are packed
    assert items(made, 1)[0].shape == (8, 9)


def test_63_no_text_to_validate_on_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [TEXT * 20] * 20)
    for changes in ({}, {"val_files": [str(write_jsonl(tmp_path / "empty.jsonl", ["", None]))]}):
        told = refusal(files_config(path, val_sequences=4, **changes))
        assert "the validation text is too short: 0 tokens" in told
        assert "data.val_sequences=0" in told
    assert "gone.jsonl is no file" in refusal(files_config(path, val_files=["gone.jsonl"], val_sequences=4))
    assert module(files_config(path)).val_dataloader() == []  # none was wanted


def damaged(whole: bytes, rng: random.Random) -> bytes:
    content = bytearray(whole)
    at, size = rng.randrange(len(content)), rng.choice([1, 1, 8, 200])
    content[at : at + size] = rng.randbytes(size)
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    return bytes(content)


@pytest.mark.parametrize("kind", ["a.jsonl.zst", "a.jsonl", "a.txt", "none.parquet", "zstd.parquet"])
def test_damage_anywhere_in_a_file_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    rng, path = random.Random(kind), tmp_path / kind
    if "parquet" in kind:
        table = pa.table({"text": [f"{rng.random()} {TEXT}" for _ in range(300)], "n": list(range(300))})
        pq.write_table(table, path, row_group_size=100, compression=kind.partition(".")[0])
    else:
        path.write_bytes(compressed(lines(400)) if "zst" in kind else lines(400))
    whole = path.read_bytes()
    for _ in range(20):
        with suppress(UserError):  # anything else fails
            made = module(files_config(write(path, damaged(whole, rng))))
            for unit in made.text.corpus.train:
                made.text.pool.take(made.text.pool.ask(unit))


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ('{"text": "T", "n": -' + "1" * 5000 + "}", None),  # more digits than Python takes
        ('{"text": "T", "n": [NaN, Infinity, 1e999999]}', "T"),
        ('{"text": "\\u0000T\\ufeff"}', "\0T\ufeff"),
        ('  {"text": "T"}\t\r', "T"),
        ('{"a":' * 20_000 + "1" + "}" * 20_000, None),
        ('{"text": "T', None),
    ],
)
def test_an_odd_line_is_read_or_counted(tmp_path: Path, line: str, read: str | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(row + "\n" for row in [json.dumps({"text": TEXT * 9}), line, json.dumps({"text": TEXT})]))
    counts = DocumentCounts()
    found = list(formats.read_unit(formats.cut_units(path)[0], "text", counts))
    assert found == [TEXT * 9, *([] if read is None else [read]), TEXT]
    assert counts.broken == (read is None)
    assert items(module(files_config(path)), 1)


def test_cuts_are_the_same_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are what a resumed run is held to: each cut is the first line's start from a multiple of the range on."""
    monkeypatch.setattr(formats, "RANGE_BYTES", 100)
    rng = np.random.default_rng(0)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(b"x" * int(n) + b"\n" for n in rng.integers(0, 260, 80)))
    content = path.read_bytes()
    starts = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10)]
    wanted = {0, len(content)}
    wanted |= {next(s for s in starts if s >= at) for at in range(100, len(content) - 50, 100)}
    units: list[Unit] = formats.cut_units(path)
    assert [unit.start for unit in units] + [len(content)] == sorted(wanted)
