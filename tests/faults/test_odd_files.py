"""Data files of another encoding, damaged, or odd in their own way."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import formats
from gpt2_fp8.data.files import FilesSource
from gpt2_fp8.data.units import DocumentCounts, Unit
from tests.data.corpora import files_config, items, module, write_jsonl

TEXT = "some words of a document, and some more; "
BOM = b"\xef\xbb\xbf"


def refusal(config: Any, **changes: Any) -> str:
    """What is said, in two lines a problem."""
    with pytest.raises(UserError) as told:
        items(module(config, **changes), 3)
    assert all(str(problem).count("\n") == 1 for problem in told.value.problems)
    assert all(part.isprintable() for problem in told.value.problems for part in problem)
    return str(told.value)


def documents(path: Path) -> list[Any]:
    """All documents of a file, as they are read."""
    counts = DocumentCounts()
    return [document for unit in formats.units(path) for document in formats.read(unit, "text", counts)]


def lines(n: int) -> bytes:
    return "".join(json.dumps({"text": f"{i} {TEXT}"}) + "\n" for i in range(n)).encode()


def compressed(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


# Other encodings


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".txt"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, ending: str) -> None:
    plain, marked = tmp_path / f"plain{ending}", tmp_path / f"marked{ending}"
    content = lines(20)
    plain.write_bytes(compressed(content) if "zst" in ending else content)
    marked.write_bytes(compressed(BOM + content) if "zst" in ending else BOM + content)
    assert documents(marked) == documents(plain)
    assert len(documents(marked)) == (1 if ending == ".txt" else 20)
    ids = [items(module(files_config(path)), 3) for path in (plain, marked)]
    assert all(np.array_equal(a, b) for a, b in zip(*ids, strict=True))


@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32-le"])
def test_another_encoding_is_refused_with_what_converts_it(tmp_path: Path, ending: str, encoding: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(lines(3).decode().encode(encoding))
    told = refusal(files_config(path))
    assert f"{path} is no text" in told
    assert "iconv -f UTF-" in told


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# Damage


@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
def test_a_compressed_file_under_a_texts_name(tmp_path: Path, ending: str) -> None:
    for name, content in (("gz", gzip.compress(lines(9))), ("zst", compressed(lines(9))), ("pdf", b"%PDF-1.7\n")):
        path = write(tmp_path / f"{name}{ending}", content)
        assert f"{path} is no text: it is" in refusal(files_config(path))


def test_a_truncated_zst_is_the_files_fault_and_not_the_networks(tmp_path: Path) -> None:
    rng = random.Random(0)
    rows = [json.dumps({"text": f"{rng.random()} {TEXT}"}) for _ in range(20_000)]
    whole = compressed("\n".join(rows).encode())
    for cut in (len(whole) // 2, len(whole) - 1):
        path = write(tmp_path / f"{cut}.jsonl.zst", whole[:cut])
        told = refusal(files_config(path))
        assert f"cannot read {path}: " in told
        assert "repair the file or leave it out" in told
    path = write(tmp_path / "tail.jsonl.zst", whole + b"\0" * 100_000)
    assert f"cannot read {path}: " in refusal(files_config(path))


def test_a_network_mount_that_hiccups_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", lines(100))
    whole = items(module(files_config(path)), 3)
    read, left = formats.lines, [2]

    def stale(unit: Unit) -> Any:
        if unit.version and left[0]:
            left[0] -= 1
            raise OSError(116, "Stale file handle")
        return read(unit)

    monkeypatch.setattr(formats, "lines", stale)
    monkeypatch.setattr(FilesSource, "waits", (0.0, 0.0))
    made = module(files_config(path))
    made.text.pool.reader.source.waits = (0.0, 0.0)  # type: ignore[misc]
    assert all(np.array_equal(a, b) for a, b in zip(items(made, 3), whole, strict=True))


def outcome(path: Path) -> str:
    """How the reading of a hostile file ends: read or refused; anything else is a failure."""
    try:
        made = module(files_config(path))
        items(made, 4)
        for unit in made.text.corpus.train:
            made.text.pool.take(made.text.pool.ask(unit))
    except UserError as error:
        problems = error.problems
    else:
        return "read"
    assert all(str(problem).count("\n") == 1 for problem in problems)
    assert all(part.isprintable() for problem in problems for part in problem)
    return "refused"


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_damage_anywhere_in_a_parquet_file_is_read_or_refused(tmp_path: Path, codec: str) -> None:
    rng = random.Random(codec)
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [f"{rng.random()} {TEXT}" for _ in range(300)], "n": list(range(300))})
    pq.write_table(table, path, row_group_size=100, compression=codec)
    whole = path.read_bytes()
    ends = []
    for _ in range(40):
        content = bytearray(whole)
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        else:
            at, size = rng.randrange(len(content)), rng.choice([1, 1, 8, 200])
            content[at : at + size] = rng.randbytes(size)
        ends.append(outcome(write(path, bytes(content))))
    assert "refused" in ends


@pytest.mark.parametrize("ending", [".jsonl.zst", ".jsonl", ".txt"])
def test_damage_anywhere_in_a_text_file_is_read_or_refused(tmp_path: Path, ending: str) -> None:
    rng = random.Random(ending)
    whole = compressed(lines(400)) if "zst" in ending else lines(400)
    for _ in range(40):
        content = bytearray(whole)
        at, size = rng.randrange(len(content)), rng.choice([1, 1, 8, 200])
        content[at : at + size] = rng.randbytes(size)
        if rng.random() < 0.3:
            del content[rng.randrange(len(content)) :]
        outcome(write(tmp_path / f"a{ending}", bytes(content)))


# Odd files

STRINGS = [f"{i} {TEXT}" for i in range(60)]
COLUMNS: dict[str, Any] = {
    "string": pa.array(STRINGS),
    "large_string": pa.array(STRINGS, pa.large_string()),
    "view": pa.array(STRINGS, pa.string_view()),
    "binary": pa.array([text.encode() for text in STRINGS], pa.binary()),
    "large_binary": pa.array([text.encode() for text in STRINGS], pa.large_binary()),
    "dictionary": pa.array(STRINGS).dictionary_encode(),
    "large_dictionary": pa.array(STRINGS, pa.large_string()).dictionary_encode(),
    "with_nulls": pa.array([*STRINGS, None, None]),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_text_of_every_type_of_arrow_gives_the_same_tokens(tmp_path: Path, kind: str) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", STRINGS)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"n": pa.nulls(len(COLUMNS[kind])), "text": COLUMNS[kind]}), path)
    ids = [items(module(files_config(each)), 3) for each in (path, plain)]
    assert all(np.array_equal(a, b) for a, b in zip(*ids, strict=True))


DEEP = '{"a":' * 20_000 + "1" + "}" * 20_000


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ('{"text": "T", "n": ' + "1" * 5000 + "}", "T"),  # more digits than Python takes
        ('{"text": "T", "n": -' + "1" * 5000 + "}", "T"),
        ('{"text": "T", "n": 1e999999}', "T"),
        ('{"text": "T", "n": [NaN, Infinity, -0]}', "T"),
        ('{"text": "S", "text": "T"}', "T"),  # the last one counts, as for every reader of JSON
        ('{"text": "\\ud83d\\ude00"}', "\U0001f600"),
        ('{"text": "\\u0000T"}', "\0T"),
        ('{"text": "T\\ufeff"}', "T\ufeff"),
        ('  {"text": "T"}\t\r', "T"),
        ('{"text": "T"}, ', None),
        ('[{"text": "T"}]', None),
        ('"T"', None),
        ("NaN", None),
        ("{'text': 'T'}", None),
        (DEEP, None),
        ("[" * 50_000, None),
        ('{"text": "T', None),
    ],
)
def test_an_odd_line_is_read_or_counted(tmp_path: Path, line: str, read: str | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(row + "\n" for row in [json.dumps({"text": TEXT * 9}), line, json.dumps({"text": TEXT})]))
    counts = DocumentCounts()
    found = list(formats.read(formats.units(path)[0], "text", counts))
    assert found == [TEXT * 9, *([] if read is None else [read]), TEXT]
    assert counts.broken == (read is None)
    assert items(module(files_config(path)), 1)


def test_a_file_without_a_column_of_text_says_which_it_has(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(range(60)), "n": pa.array([[1]] * 60)}), path)
    assert "data.text_column" in refusal(files_config(path))
    lines = write(tmp_path / "b.jsonl", b'{"id": 1, "body": "x"}\n' * 50)
    assert "body" in refusal(files_config(lines))
