"""Faults 113 to 117: files that are too many or endless, of another encoding, damaged, or odd in their own way."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import formats, parquet, progress_log
from gpt2_fp8.data.files import FilesSource
from gpt2_fp8.data.units import DocumentCounts, TextFile, Unit
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


# Start-up, bounded and said


def test_113_a_file_of_a_hole_is_refused_at_once(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.jsonl.zst", "a.parquet"):
        path = tmp_path / name
        path.touch()
        os.truncate(path, 200 << 30)
        before = time.process_time()
        assert str(path) in refusal(files_config(path))
        assert time.process_time() - before < 20
    for name in ("b.txt", "b.jsonl"):
        path = tmp_path / name
        path.write_bytes(lines(100))
        os.truncate(path, 200 << 30)
        told = refusal(files_config(path))
        assert f"{path} has only NUL bytes in the MiB from byte 8,388,608 on" in told


def test_113_a_line_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "LINE_BYTES", 1 << 20)
    monkeypatch.setattr(formats, "RANGE_BYTES", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(10) + b"x" * (20 << 20))
    told = refusal(files_config(path))
    assert f"{path} has no line's end in the 8 MiB from byte 1,048,576 on" in told


def test_113_a_footer_is_read_once_however_many_row_groups_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"{i} {TEXT}" for i in range(300)]}), path, row_group_size=1)
    read, times = pq.read_metadata, []
    monkeypatch.setattr(pq, "read_metadata", lambda where: (times.append(where), read(where))[1])
    made = module(files_config(path))
    items(made, 10)
    assert len(made.text.corpus.train) == 300
    assert len(times) == 1
    path.write_bytes(path.read_bytes())  # another version of it
    parquet.metadata(TextFile.local(path))
    assert len(times) == 2


def test_113_a_footer_of_any_size_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [TEXT] * 300}), path, row_group_size=1)
    monkeypatch.setattr(parquet, "ANNOUNCED_BYTES", 1)
    with caplog.at_level(logging.INFO):
        module(files_config(path))
    assert caplog.text.count("reading the footer of") == 1
    monkeypatch.setattr(parquet, "FOOTER_BYTES", 10_000)
    parquet._footers.clear()
    assert "has a footer of" in refusal(files_config(path))
    huge = tmp_path / "b.parquet"
    huge.write_bytes(b"PAR1" + b"x" * 100 + (0xF0000000).to_bytes(4, "little") + b"PAR1")
    assert "has a footer of 3840 MiB" in refusal(files_config(huge))


def test_113_footers_that_are_kept_take_bounded_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet._footers.clear()
    monkeypatch.setattr(parquet, "KEPT_BYTES", 3000)
    for i in range(20):
        pq.write_table(pa.table({"text": [TEXT] * 3}), tmp_path / f"{i}.parquet")
        parquet.metadata(TextFile.local(tmp_path / f"{i}.parquet"))
        assert len(parquet._footers) == 1 or sum(f.serialized_size for f in parquet._footers.values()) <= 3000


def test_113_what_takes_long_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(progress_log, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress_log, "EVERY_SECONDS", 0.0)
    for i in range(20):
        write_jsonl(tmp_path / f"{i}.jsonl", [f"{i}.{j} {TEXT}" for j in range(4)])
    with caplog.at_level(logging.INFO):
        module(files_config(f"{tmp_path}/*.jsonl", val_fraction=0.5, val_sequences=1))
    for said in (
        "looking into files: 19 of 20",
        "cutting files into units: 19 of 20",
        "looking for text to train on, units: 0 of 20",
        "reading 1 validation sequences, units: 0 of 20",
    ):
        assert f"data: {said}" in caplog.text


MANY = """
import logging, sys
from gpt2_fp8.data import file_check, progress_log
from gpt2_fp8.runtime import signals
from gpt2_fp8.runtime.signal_handlers import Interrupted
from tests.data.corpora import files_config, module
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
progress_log.FIRST_SECONDS = 0.1
sound = file_check.problems
def slow(*arguments):
    import time; time.sleep(0.02)
    return sound(*arguments)
file_check.problems = slow
try:
    with signals.handled() as handlers, handlers.at_once():  # as in a run's start-up
        module(files_config(sys.argv[1]))
except Interrupted as ended:
    sys.exit(128 + ended.signum)
"""


def test_113_start_up_over_many_files_answers_a_signal(tmp_path: Path) -> None:
    for i in range(2000):
        (tmp_path / f"{i}.txt").write_text(TEXT)
    child = subprocess.Popen([sys.executable, "-c", MANY, f"{tmp_path}/*.txt"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert "looking into files" in child.stdout.readline()
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=20) == 143
    child.stdout.close()


# Other encodings


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.zst", ".txt"])
def test_114_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, ending: str) -> None:
    plain, marked = tmp_path / f"plain{ending}", tmp_path / f"marked{ending}"
    content = lines(20)
    plain.write_bytes(compressed(content) if "zst" in ending else content)
    marked.write_bytes(compressed(BOM + content) if "zst" in ending else BOM + content)
    assert documents(marked) == documents(plain)
    assert len(documents(marked)) == (1 if ending == ".txt" else 20)
    ids = [items(module(files_config(path)), 3) for path in (plain, marked)]
    assert all(np.array_equal(a, b) for a, b in zip(*ids, strict=True))


def test_114_marks_between_files_that_were_put_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(BOM + lines(3) + BOM + lines(3))
    assert len(documents(tmp_path / "a.jsonl")) == 6
    (tmp_path / "only.jsonl").write_bytes(BOM)
    assert formats.units(tmp_path / "only.jsonl") == []


@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_114_another_encoding_is_refused_with_what_converts_it(tmp_path: Path, ending: str, encoding: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(lines(3).decode().encode(encoding))
    told = refusal(files_config(path))
    assert f"{path} is no text" in told
    assert "iconv -f UTF-" in told


def test_114_carriage_returns_and_nul_bytes(tmp_path: Path) -> None:
    (tmp_path / "crlf.jsonl").write_bytes(lines(20).replace(b"\n", b"\r\n"))
    assert documents(tmp_path / "crlf.jsonl") == documents(write(tmp_path / "lf.jsonl", lines(20)))
    made = module(files_config(write(tmp_path / "crashed.jsonl", lines(20) + b"\0" * 3000)))
    items(made, 1)
    assert made.report()["documents"]["read"] == 20
    assert made.report()["documents"]["broken"] == 1


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


# Damage


@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
def test_115_a_compressed_file_under_a_texts_name(tmp_path: Path, ending: str) -> None:
    for name, content in (("gz", gzip.compress(lines(9))), ("zst", compressed(lines(9))), ("pdf", b"%PDF-1.7\n")):
        path = write(tmp_path / f"{name}{ending}", content)
        assert f"{path} is no text: it is" in refusal(files_config(path))


def test_115_a_truncated_zst_is_the_files_fault_and_not_the_networks(tmp_path: Path) -> None:
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


def test_115_a_network_mount_that_hiccups_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip"])
def test_115_damage_anywhere_in_a_parquet_file_is_read_or_refused(tmp_path: Path, codec: str) -> None:
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
def test_115_damage_anywhere_in_a_text_file_is_read_or_refused(tmp_path: Path, ending: str) -> None:
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
NO_TEXT: dict[str, Any] = {
    "null": pa.nulls(60),
    "all_null": pa.array([None] * 60, pa.string()),
    "list": pa.array([[text] for text in STRINGS]),
    "struct": pa.array([{"text": text} for text in STRINGS]),
    "map": pa.array([[("text", text)] for text in STRINGS], pa.map_(pa.string(), pa.string())),
    "fixed": pa.array([b"12345678"] * 60, pa.binary(8)),
    "number": pa.array(range(60)),
    "decimal": pa.array([1] * 60).cast(pa.decimal128(38, 2)),
    "boolean": pa.array([True] * 60),
    "number_dictionary": pa.array([1, 2] * 30).dictionary_encode(),
    "whitespace": pa.array([" \n\t"] * 60),
    "none": pa.array([], pa.string()),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("beside", ["alone", "nested", "twice"])
def test_116_text_of_every_type_of_arrow_gives_the_same_tokens(tmp_path: Path, kind: str, beside: str) -> None:
    plain = write_jsonl(tmp_path / "a.jsonl", STRINGS)
    column = COLUMNS[kind]
    arrays, names = [column], ["text"]
    if beside == "nested":
        arrays, names = [pa.array([{"text": "other"}] * len(column)), column, pa.nulls(len(column))], ["a", "text", "b"]
    elif beside == "twice":
        arrays, names = [column, pa.array(["other"] * len(column))], ["text", "Text"]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(arrays, names=names), path)
    ids = [items(module(files_config(each)), 3) for each in (path, plain)]
    assert all(np.array_equal(a, b) for a, b in zip(*ids, strict=True))


@pytest.mark.parametrize("kind", NO_TEXT)
def test_116_a_column_that_is_no_text_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": NO_TEXT[kind]}), path)
    told = refusal(files_config(path))
    assert "has no text column 'text'" in told or "the training text is too short: 0 tokens" in told
    assert "its own: none" not in told
    good = write_jsonl(tmp_path / "good.jsonl", STRINGS)  # and among others that are good, it is named or passed over
    if "no text column" in told:
        assert str(path) in refusal(files_config([path, good]))
    else:
        assert items(module(files_config([path, good])), 3)


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
def test_116_an_odd_line_is_read_or_counted(tmp_path: Path, line: str, read: str | None) -> None:
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
    told = refusal(files_config(path))
    assert "data.text_column" in told
    assert "n (list<element: int64>), text (int64)" in told
    lines = write(tmp_path / "a.jsonl", b'{"id": 1, "n": 2}\n' * 50)
    assert "data.text_column to one of its own: id, n" in refusal(files_config(lines))
    lines = write(tmp_path / "b.jsonl", b'{"id": 1, "body": "x"}\n' * 50)
    assert "fix: set data.text_column to one of its own: body" in refusal(files_config(lines))
    assert "data.text_column" in refusal(files_config(write(tmp_path / "c.jsonl", b"{}\n" * 50)))


@pytest.mark.parametrize("content", [b" ", b"\n" * 5000, b"\t \r\n" * 999, b"\xe2\x80\x83" * 500, BOM, BOM + b"\n\n"])
def test_116_a_text_of_white_space_is_no_text(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "a.txt", content)
    assert "the training text is too short: 0 tokens" in refusal(files_config(path))
    good = write_jsonl(tmp_path / "good.jsonl", STRINGS)
    assert items(module(files_config([path, good])), 3)
