"""Faults 55 to 63: text that is broken, empty, enormous or too little; and files that want to do harm.

The hostile files, each read in the real way with a canary beside it: a pickle under every ending, a zip bomb in long
and in short lines, a value that a .parquet repeats, a row group and a column larger than their file, a line of 100 MB,
a pipe, a device, links in circles, names with terminal escapes, a cache of another's tokens, another's vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gpt2_fp8.callbacks.samples import Samples
from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import DataSourceLost, UserError
from gpt2_fp8.data import formats, parquet, token_stream, tokenizer
from gpt2_fp8.data.documents import MAX_BROKEN
from gpt2_fp8.data.files import FilesSource
from gpt2_fp8.data.loaders import Steps
from gpt2_fp8.data.tokenizer import encode, load_tokenizer
from gpt2_fp8.data.units import Unit
from gpt2_fp8.model import generate
from tests.data.corpora import files_config, items, module, rank_batches, write_jsonl

TEXT = "some words of a document, and some more; "
MEGABYTE = 1 << 20


def refusal(config: Any, **changes: Any) -> str:
    """What is said, in two lines a problem, where a configuration's text is refused."""
    with pytest.raises(UserError) as told:
        items(module(config, **changes), 1)
    assert all(str(problem).count("\n") == 1 for problem in told.value.problems)
    assert all(part.isprintable() for problem in told.value.problems for part in problem)
    return str(told.value)


# The text


def test_55_a_document_that_is_empty_or_no_text_is_skipped_and_counted(tmp_path: Path) -> None:
    texts = [TEXT * 20, "", "  \n\t", None, 5, ["x"], {"a": 1}, True, TEXT * 20]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    with path.open("a") as file:
        file.write('{"other": "x"}\n')
    made = module(files_config(path))
    items(made, 1)
    assert made.report()["documents"] == {
        "read": 2, "empty": 2, "not_text": 6, "broken": 0, "invalid_utf8": 0, "long": 0
    }  # fmt: skip


LONG = """
import json, resource, sys
from gpt2_fp8.data.datamodule import TokenDataModule  # imports what every run does
from tests.data.corpora import files_config, items, module

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
told, counts = "", {}
try:
    made = module(files_config(sys.argv[1]))
    items(made, 1)
    counts = made.report()["documents"]
except Exception as error:
    told = f"{type(error).__name__} {error}"
print(json.dumps([told, counts, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10]))
"""


def read_elsewhere(path: Path) -> tuple[str, dict[str, int], int]:
    """How the reading of a file ends in a process of its own, the counts, and by how many MB that process grew."""
    done = subprocess.run([sys.executable, "-c", LONG, str(path)], capture_output=True, text=True, check=True)
    told, counts, grown = json.loads(done.stdout)
    return told, counts, grown


@pytest.mark.parametrize("size", [24, pytest.param(100, marks=pytest.mark.slow)])
def test_56_a_document_of_100_mb_in_one_line_is_read_in_pieces(tmp_path: Path, size: int) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"text": TEXT * (size * MEGABYTE // len(TEXT))}))
    told, counts, grown = read_elsewhere(path)
    assert told == ""
    assert (counts["read"], counts["long"]) == (1, 1)
    assert grown < 200 + 7 * size  # the line, the document, and two bytes a token, twice


def test_56_a_longer_line_is_passed_over_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "LINE_BYTES", 5000)
    monkeypatch.setattr(formats, "RANGE_BYTES", 2000)
    good = [json.dumps({"text": f"{i} {TEXT}"}) for i in range(40)]
    lines = [*good[:20], json.dumps({"text": "x" * 20_000}), *good[20:]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.jsonl.zst").write_bytes(pa.Codec("zstd").compress("\n".join(lines).encode(), asbytes=True))
    for name in ("a.jsonl", "a.jsonl.zst"):
        made = module(files_config(tmp_path / name), max_steps=200)
        items(made, 40)
        counts = [made.text.pool.take(made.text.pool.ask(unit)).counts for unit in made.text.corpus.train]
        assert (sum(c.read for c in counts), sum(c.broken for c in counts)) == (40, 1), name


def test_57_bytes_that_are_no_utf_8_are_replaced_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "caf\xe9 ' + TEXT.encode() * 20 + b'"}\n{"text": "\\ud800 lone"}\n')
    made = module(files_config(path))
    items(made, 1)
    assert made.report()["documents"]["invalid_utf8"] == 2
    tokens = made.text.pool.take(made.text.pool.ask(made.text.corpus.train[0])).tokens
    assert bytes(tokens[:7].astype(np.uint8)).decode() == "caf\ufffd "[:4] + " "


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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_57_later_text_in_another_encoding_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_workers: int
) -> None:
    good = [f"{i} {TEXT} größte" for i in range(60)]
    for i in range(6):
        path = tmp_path / f"{i}.jsonl"
        rows = "".join(json.dumps({"text": f"{i} {text}"}, ensure_ascii=False) + "\n" for text in good)
        path.write_bytes(rows.encode("utf-8" if i == 3 else "latin-1"))  # the order of seed 7 begins with the fourth
    with caplog.at_level(logging.WARNING):
        made = module(files_config(f"{tmp_path}/*.jsonl", num_workers=num_workers), max_steps=400)
        items(made, 400)
        made.teardown()
    assert caplog.text.count("U+FFFD") == 1
    assert made.report()["documents"]["invalid_utf8"] > 60


def test_57_a_few_replaced_characters_of_a_short_text_are_no_other_encoding(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode() * 9 + b"\xe9" * 10)
    assert items(module(files_config(path)), 3)


def test_58_a_broken_line_is_skipped_and_too_many_are_refused(tmp_path: Path) -> None:
    good, bad = json.dumps({"text": TEXT}), '{"text": "cut in the midd'
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join([*[good] * 30, *[bad] * 20]))
    made = module(files_config(few))
    items(made, 1)
    assert made.report()["documents"]["broken"] == 20
    many = tmp_path / "many.jsonl"
    many.write_text("\n".join([*[good] * 500, *[bad] * (MAX_BROKEN + 1)]))
    told = refusal(files_config(many))
    assert f"{MAX_BROKEN + 1} of {501 + MAX_BROKEN} lines are no JSON objects" in told
    assert "repair the file" in told


@pytest.mark.parametrize("ending", formats.ENDINGS)
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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_61_fewer_shards_than_ranks_times_workers(
    tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "one.jsonl", [f"{i} " * 40 for i in range(100)])
    alone = module(files_config(path))
    whole = items(alone, 5)
    monkeypatch.setattr(token_stream, "rank_and_world", lambda: (0, 2))
    with caplog.at_level(logging.WARNING):
        made = module(files_config(path, num_workers=num_workers))
    assert "1 units are few for 2 ranks" in caplog.text
    ranks = [rank_batches(made, rank, 2) for rank in (0, 1)]
    shares = [[batches.next() for _ in range(5)] for batches in ranks]
    made.teardown()
    for step, batch in enumerate(whole):
        for rank in (0, 1):
            assert np.array_equal(shares[rank][step], batch[rank::2])


def test_62_special_text_in_a_document_is_text(tmp_path: Path) -> None:
    for name in ("bytes", "gpt2"):
        try:
            encoding = load_tokenizer(name)  # type: ignore[arg-type]
        except UserError:
            continue
        ids = encode(encoding, "one<|endoftext|>two")
        assert encoding.eot_token not in ids
        assert encoding.decode(ids.tolist()) == "one<|endoftext|>two"


def rewrite(stem: Path, tokens: np.ndarray, ends: list[int]) -> None:
    """Put these tokens into a unit of a cache, with a checksum that is right."""
    content = tokens.astype("<u2").tobytes() + np.array(ends, "<i8").tobytes()
    about = json.loads(stem.with_suffix(".json").read_bytes())
    about |= {"tokens": len(tokens), "documents": len(ends), "sha256": hashlib.sha256(content).hexdigest()}
    stem.with_suffix(".u16").write_bytes(content)
    stem.with_suffix(".json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("tokens", "ends", "reason"),
    [
        ([65, 257, 256], [3], "the token 257 of a vocabulary of 257"),
        ([65, 50256, 256], [3], "the token 50256"),
        ([65, 66, 256], [2], "do not make up its tokens"),
        ([65, 66, 256], [2, 2, 3], "do not make up its tokens"),
        ([65, 66, 256], [-1, 3], "do not make up its tokens"),
        ([65, 66, 256], [1 << 40], "do not make up its tokens"),
    ],
)
def test_62_a_cache_that_this_tokenizer_cannot_have_written_is_made_anew(
    tmp_path: Path, tokens: list[int], ends: list[int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"{i} {TEXT}" for i in range(20)])
    whole = items(module(files_config(path)), 5)
    config = files_config(path, cache_dir=str(tmp_path / "cache"))
    items(module(config), 5)
    (stored,) = (tmp_path / "cache").glob("*.u16")
    rewrite(stored, np.array(tokens), ends)
    with caplog.at_level(logging.WARNING):
        again = items(module(config), 5)
    assert reason in caplog.text
    assert all(np.array_equal(a, b) for a, b in zip(again, whole, strict=True))


@pytest.mark.parametrize("what", ["pipe", "folder", "deep", "numbers"])
def test_62_a_cache_that_is_no_cache_is_made_anew_or_left(tmp_path: Path, what: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"{i} {TEXT}" for i in range(20)])
    config = files_config(path, cache_dir=str(tmp_path / "cache"))
    whole = items(module(config), 5)
    (stored,) = (tmp_path / "cache").glob("*.json")
    about = stored.read_text()
    stored.unlink()
    if what == "pipe":
        os.mkfifo(stored)
    elif what == "folder":
        stored.mkdir()
    elif what == "deep":
        stored.write_text("[" * 100_000)
    else:
        stored.write_text(about.replace('"tokens": ', '"tokens": 9999999999999'))
    assert all(np.array_equal(a, b) for a, b in zip(items(module(config), 5), whole, strict=True))


def test_63_no_text_to_validate_on_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [TEXT * 20] * 20)
    for changes in ({}, {"val_files": [str(write_jsonl(tmp_path / "empty.jsonl", ["", None]))]}):
        told = refusal(files_config(path, val_sequences=4, **changes))
        assert "the validation text is too short: 0 tokens" in told
        assert "data.val_sequences=0" in told
    assert "file does not exist" in refusal(files_config(path, val_files=["gone.jsonl"], val_sequences=4))
    assert module(files_config(path)).val_dataloader() == []  # none was wanted


# Files that want to do harm


class Payload:
    """Unpickled, it makes the canary."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["CANARY"],)


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    path = tmp_path / "canary"
    monkeypatch.setenv("CANARY", str(path))
    yield path
    assert not path.exists()


@pytest.mark.parametrize("ending", formats.ENDINGS)
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_hostile_a_pickle_is_no_text(tmp_path: Path, canary: Path, ending: str, how: str) -> None:
    path = tmp_path / f"a{ending}"
    if how == "torch":
        torch.save(Payload(), path)
    else:
        path.write_bytes(pickle.dumps([Payload(), "\n" + TEXT]))
    with pytest.raises((UserError, DataSourceLost), match=r"cannot read|is no text|are no UTF-8|too short: 0 tokens"):
        items(module(files_config(path)), 1)


def bomb(path: Path, piece: bytes, times: int) -> Path:
    with pa.OSFile(str(path), "wb") as raw, pa.CompressedOutputStream(raw, "zstd") as stream:
        for _ in range(times):
            stream.write(piece)
    return path


def repeated(path: Path, text: str, rows: int) -> Path:
    """A .parquet in which a text stands once, and `rows` times when it is read."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    schema = pa.schema([("text", texts.type)])
    with pq.ParquetWriter(path, schema, compression="zstd", write_statistics=False) as writer:
        writer.write_table(pa.table({"text": texts}, schema))
    return path


UNFOLDS = "unpacks to more than 200 times its size"


@pytest.mark.parametrize("line", ["\n", '{"text": "aaaa"}\n'], ids=["blank", "short"])
def test_hostile_a_zip_bomb_of_many_lines(
    tmp_path: Path, canary: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "FREE_BYTES", 4 * MEGABYTE)
    path = bomb(tmp_path / "bomb.jsonl.zst", line.encode() * (MEGABYTE // len(line)), 200)
    assert UNFOLDS in refusal(files_config(path))


@pytest.mark.parametrize("kind", ["zst", "parquet"])
def test_hostile_a_zip_bomb_is_left_before_it_unfolds(tmp_path: Path, canary: Path, kind: str) -> None:
    if kind == "zst":  # 2 GB in one line
        path = bomb(tmp_path / "bomb.jsonl.zst", b"a" * MEGABYTE, 2000)
    else:  # 12 GB
        path = repeated(tmp_path / "bomb.parquet", "a" * (4 * MEGABYTE), 3000)
    assert path.stat().st_size < MEGABYTE
    told, _, grown = read_elsewhere(path)
    assert UNFOLDS in told
    assert grown < 700


def declare(path: Path, was: int, now: int) -> None:
    """Write another number into a .parquet's footer: a zigzag varint of the same length."""

    def varint(number: int) -> bytes:
        number, out = number << 1, b""
        while number >= 0x80:
            out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
        return out + bytes([number])

    content = path.read_bytes()
    footer = content.rindex(varint(was))
    assert len(varint(was)) == len(varint(now))
    while footer > 0:  # wherever it stands
        content = content[:footer] + varint(now) + content[footer + len(varint(now)) :]
        footer = content.rfind(varint(was), len(content) - int.from_bytes(content[-8:-4], "little") - 8, footer)
    path.write_bytes(content)


def test_hostile_a_row_group_larger_than_its_file(tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = 34_000_000  # of the same few bytes: a varint of 4, and the largest of 4 is 134 million
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array([""]))
    pq.write_table(pa.table({"text": texts}), path, row_group_size=rows, compression="zstd")
    declare(path, rows, 130_000_000)
    assert path.stat().st_size < 100_000
    assert pq.read_metadata(path).row_group(0).num_rows == 130_000_000
    assert "unpacks to more than 200 times its size" in refusal(files_config(path))


def test_hostile_a_column_larger_than_its_file(tmp_path: Path, canary: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [TEXT * 20 + str(i) for i in range(500)]}), path, compression="none")
    size = pq.read_metadata(path).row_group(0).column(0).total_compressed_size
    declare(path, size, 1_000_000)
    assert "unpacks to more than" in refusal(files_config(path))


def arguments(*files: object) -> list[str]:
    names = ",".join(f"'{file}'" for file in files)
    return ["data=text_files", "data.tokenizer=bytes", f"data.train_files=[{names}]"]


def refused(*words: str) -> list[str]:
    with pytest.raises(UserError) as told:
        preflight(list(words))
    for problem in told.value.problems:
        assert str(problem).count("\n") == 1
        assert problem.cause.isprintable()
        assert problem.remedy.isprintable()
    return [problem.cause for problem in told.value.problems]


def test_hostile_a_pipe_or_a_device_is_no_file(tmp_path: Path, canary: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.jsonl", tmp_path / "zero.txt", Path("/dev/zero"), Path("/dev/stdin")):
        reason = "is no regular file"
        with pytest.raises(UserError, match=reason):
            preflight(arguments(path))
        assert reason in refusal(files_config(path))
    write_jsonl(tmp_path / "a.jsonl", [TEXT * 20])  # beside others, a pipe is what a glob does not mean
    assert [Path(u.path).name for u in FilesSource([f"{tmp_path}/*.jsonl"], [], 0.0).corpus().train] == ["a.jsonl"]


def test_hostile_links_in_circles(tmp_path: Path, canary: Path) -> None:
    (tmp_path / "self.txt").symlink_to("self.txt")
    with pytest.raises(UserError, match="is no regular file"):
        preflight(arguments(tmp_path / "self.txt"))
    (tmp_path / "latest").symlink_to(".")  # 40 ways to each file
    (tmp_path / "real").mkdir()
    write_jsonl(tmp_path / "real/x.jsonl", [TEXT * 20])
    preflight(arguments(f"{tmp_path}/**/x.jsonl"))
    corpus = FilesSource([f"{tmp_path}/**/*.jsonl"], [], 0.0).corpus()
    assert [Path(unit.path).resolve() for unit in corpus.train] == [tmp_path / "real/x.jsonl"]


def test_hostile_a_column_of_a_files_own_naming(tmp_path: Path, canary: Path) -> None:
    pq.write_table(pa.table({"\x1b[2Jevil": ["x"]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({"\x1b[2Jevil" * 1000: "x"}))
    assert "no text column" in refusal(files_config(f"{tmp_path}/*"))


def test_hostile_documents_reach_the_terminal_escaped(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202e"
    ids = list(evil.encode())
    monkeypatch.setattr(generate, "generate", lambda *_, **__: ids)
    monkeypatch.setattr("gpt2_fp8.callbacks.samples.generate", lambda *_, **__: ids)

    class Anything:
        tokenizer = load_tokenizer("bytes")

        def __getattr__(self, name: str) -> Any:
            return Anything()

        def __call__(self) -> Any:
            return self

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    trainer = Anything()
    trainer.__dict__.update(is_global_zero=True, sanity_checking=False, global_step=3, loggers=[])
    trainer.__dict__["datamodule"] = Anything()
    with caplog.at_level(logging.INFO):
        Samples("Once ", 8, 0).on_validation_end(trainer, Anything())  # type: ignore[arg-type]
    assert "owned" in caplog.text
    assert all(line.isprintable() for line in caplog.text.splitlines())


def test_hostile_a_vocabulary_of_anothers_merges(tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tokenizer.GPT2_FILES:
        (tmp_path / name).write_bytes(pickle.dumps(Payload()))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    before = load_tokenizer.cache_info().currsize
    load_tokenizer.cache_clear()
    with pytest.raises(UserError, match="the GPT-2 vocabulary is not on this machine"):
        load_tokenizer("gpt2")
    assert before >= 0
    for name in tokenizer.GPT2_FILES:
        assert (tmp_path / name).read_bytes() == pickle.dumps(Payload()), "left as it is"


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
    units: list[Unit] = formats.units(path)
    assert [unit.start for unit in units] + [len(content)] == sorted(wanted)


def test_a_lost_source_says_how_to_go_on() -> None:
    class Batches:
        def next(self) -> Any:
            raise DataSourceLost("cannot read it")

        def close(self) -> None: ...

    with pytest.raises(DataSourceLost) as lost:
        next(iter(Steps(lambda: (3, Batches()), 9, 0)))  # type: ignore[arg-type,return-value]
    lost.value.tell("run_name=x ckpt_path=last continues")
    assert str(lost.value) == "cannot read it\nwhen it answers again: run_name=x ckpt_path=last continues"
