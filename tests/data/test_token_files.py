"""Files of token ids: what is trained on is what is in them, and what is no such file is refused."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import token_format
from gpt2_fp8.data.datamodule import TokenDataModule
from gpt2_fp8.data.pass_length import tokens_a_pass
from gpt2_fp8.data.sources import TokenFilesSource
from tests.data.corpora import items, module, rank_batches
from tests.data.token_files_made import LLAMA_3, LLM_C, ids_config, llm_c, nano, some_ids


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_format, "UNIT_IDS", 100)


def test_training_has_every_id_of_nanogpts_file_in_its_place(tmp_path: Path) -> None:
    """A pass deals out the file's blocks of 16 inputs, each once: all ids but those that fill no block at its end."""
    ids = some_ids(5000)
    made = module(ids_config(nano(tmp_path / "train.bin", ids)), max_steps=39)
    blocks = (len(ids) - 1) // 16
    rows = np.concatenate(items(made))
    assert len(rows) == blocks
    wanted = [ids[16 * k : 16 * k + 17].tobytes() for k in range(blocks)]
    assert Counter(row.tobytes() for row in rows.astype(ids.dtype)) == Counter(wanted)
    assert made.state_dict()["lanes"]["0"]["epoch"] == 0
    assert made.report()["documents"]["read"] == np.count_nonzero(ids == 256)


def test_the_order_is_that_of_the_units_and_blocks(tmp_path: Path, small_units: None) -> None:
    """The ids are those of the file, unit by unit in the order of the epoch, without a gap between two."""
    ids = some_ids(4037)
    made = module(ids_config(nano(tmp_path / "train.bin", ids)), max_steps=40)
    order, units = made.text.strands[0].order, made.text.corpus.train
    assert (order.lanes, len(units)) == (2, 40)
    assert [(u.start, u.stop) for u in units] == [(200 * i, 200 * i + 200) for i in range(39)] + [(7800, 8074)]
    for lane in range(2):
        text = np.concatenate([ids[units[i].start // 2 : units[i].stop // 2] for i in order.epoch(0)[lane::2]])
        reader, at = rank_batches(made, 0, 1).lanes[lane], 0
        while at < len(text) - 200:
            segment: list[tuple[int, np.ndarray]] = []
            while not segment or reader._segment is not None:
                block, place = reader.next(), len(segment)
                segment.append((place, block[:-1]))
                places = reader._segment.blocks if reader._segment is not None else places  # noqa: F821
            inputs = [
                block for _, block in sorted(zip(places, [b for _, b in segment], strict=True), key=lambda p: p[0])
            ]
            assert np.array_equal(np.concatenate(inputs), text[at : at + 16 * len(inputs)])
            at += 16 * len(inputs)


def test_every_form_gives_the_same_steps(tmp_path: Path, small_units: None) -> None:
    ids = some_ids(4000)
    files = [
        ids_config(nano(tmp_path / "nano.bin", ids)),
        ids_config(llm_c(tmp_path / "llm_c.bin", ids)),
        ids_config(llm_c(tmp_path / "llama.bin", ids, LLAMA_3)),
        ids_config(nano(tmp_path / "wide.bin", ids, "<u4"), headerless="uint32"),
    ]
    first, *others = (items(module(config)) for config in files)
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.whole)])
def test_a_resume_goes_on_where_it_stood(tmp_path: Path, small_units: None, workers: int) -> None:
    config = ids_config(llm_c(tmp_path / "a.bin", some_ids(4000)), num_workers=workers)
    through = module(config, max_steps=12)
    whole = items(through)
    through.teardown()
    for stop in (1, 5, 11):
        made = module(config, max_steps=12)
        legs = items(made, stop)
        state = json.dumps(made.state_dict())
        made.teardown()
        made = module(config, max_steps=12)
        made.load_state_dict(json.loads(state))
        legs += items(made)
        assert np.array_equal(legs, whole)
        assert made.state_dict() == through.state_dict()
        made.teardown()


def test_two_ranks_share_the_steps(tmp_path: Path, small_units: None) -> None:
    made = module(ids_config(nano(tmp_path / "a.bin", some_ids(4000))))
    whole, ranks = rank_batches(made, 0, 1), [rank_batches(made, rank, 2) for rank in range(2)]
    for _ in range(20):
        batch = whole.next()
        assert all(np.array_equal(batch[rank::2], ranks[rank].next()) for rank in range(2))


def test_validation_is_the_beginning_of_its_files(tmp_path: Path) -> None:
    train, val = nano(tmp_path / "train.bin", some_ids(1000)), nano(tmp_path / "val.bin", some_ids(500, 1))
    made = module(ids_config(tmp_path / "*.bin", val_files=[str(val)], val_sequences=4))
    assert [unit.path for unit in made.text.corpus.train] == [str(train)]
    assert np.array_equal(made.text.val[""].reshape(-1)[:16], some_ids(500, 1)[:16])
    assert made.text.val[""].shape == (4, 17)


def test_a_pass_is_counted_without_reading(tmp_path: Path, small_units: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = llm_c(tmp_path / "a.bin", some_ids(1234))
    monkeypatch.setattr(TokenFilesSource, "read_ids", lambda *_: pytest.fail("it is read"))
    assert tokens_a_pass(ids_config(path), 16) == 1234


def refusal(path: Path, **changes: str) -> tuple[str, str]:
    with pytest.raises(UserError) as told:
        items(module(ids_config(path, **changes)))
    (problem,) = told.value.problems
    assert "\n" not in problem.cause + problem.remedy
    return problem.cause, problem.remedy


@pytest.mark.parametrize(
    ("content", "cause", "remedy"),
    [
        (b"\1\0" * 500 + b"\1", "1,001 bytes, which are no whole number of uint16 ids", "cut"),
        (b"\0" * 4000, "only zeros in its first 4,000 bytes", "make it again"),
        (b"The quick brown fox. " * 100, "it is text", "data=text_files"),
        (b"\x93NUMPY\1\0" + b"\1\0" * 500, "a NumPy file", "tofile"),
        (b"\x28\xb5\x2f\xfd" + b"\1\0" * 500, "compressed by zstd", "unzstd"),
        (some_ids(1000).astype("<u4").tobytes(), "ids of 32 bits", "data.headerless=uint32"),
        (some_ids(1000).astype("<i8").tobytes(), "ids of 64 bits", "astype"),
        (np.array([20240326, 3, 1024] + [0] * 400, "<i4").tobytes(), "unknown magic number 20240326", "20240801"),
        (np.array([20240520, 2, 10] + [0] * 258, "<i4").tobytes(), "version 2, which is unknown", "version 1"),
        (np.array([20240520, 1, 11] + [0] * 258, "<i4").tobytes(), "11 uint16 ids, and 20 bytes", "cut"),
        (np.array([20240520, 1, -5] + [0] * 258, "<i4").tobytes(), "-5 uint16 ids, and 20 bytes", "cut"),
        (np.array([20240801, 7, 0] + [0] * 253, "<i4").tobytes(), "0 uint32 ids, and 0 bytes", "cut"),
        (np.array([20240520, 1, 900], "<i4").tobytes(), "900 uint16 ids, and 0 bytes", "cut"),
    ],
)
def test_what_is_no_file_of_ids_is_refused(tmp_path: Path, content: bytes, cause: str, remedy: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    said, cure = refusal(path)
    assert said.startswith(str(path))
    assert cause in said
    assert remedy in cure


def test_an_id_outside_the_vocabulary_is_refused_with_its_place(tmp_path: Path, small_units: None) -> None:
    ids = some_ids(1000)
    ids[777] = 50256
    said, cure = refusal(llm_c(tmp_path / "a.bin", ids))
    assert said == f"{tmp_path}/a.bin: the id at place 777, counted from 0, is 50,256, and data.tokenizer has 257 ids"
    assert cure == "name the tokenizer that made the file, data.tokenizer=NAME"
    narrow = nano(tmp_path / "b.bin", some_ids(1000))
    assert "data.headerless=uint16, if its ids are of 16 bits" in refusal(narrow, headerless="uint32")[1]


def test_ids_of_64_bits_are_none_of_32(tmp_path: Path) -> None:
    """Every second one would be 0."""
    path = nano(tmp_path / "long.bin", some_ids(1000), "<i8")
    with pytest.raises(UserError, match="64 bits"):
        module(ids_config(path, headerless="uint32"))


def test_other_names_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    assert "unknown kind of file" in refusal(tmp_path / "a.txt")[0]
    (tmp_path / "folder.bin").mkdir()
    assert "is a folder" in refusal(tmp_path / "folder.bin")[0]
    (tmp_path / "link.bin").symlink_to(tmp_path / "nowhere.bin")
    assert "is no regular file" in refusal(tmp_path / "link.bin")[0]
    os.mkfifo(tmp_path / "pipe.bin")
    assert "is no regular file" in refusal(tmp_path / "pipe.bin")[0]
    (tmp_path / "empty.bin").touch()
    assert "the training text is too short: 0 tokens" in refusal(tmp_path / "empty.bin")[0]
    assert "the training text is too short: 9 tokens" in refusal(nano(tmp_path / "short.bin", some_ids(9)))[0]


@pytest.mark.parametrize("filled", [0, 1 << 20, 10 << 20])
def test_a_file_that_is_a_hole_is_refused_at_once(tmp_path: Path, filled: int) -> None:
    path = nano(tmp_path / "a.bin", some_ids(filled // 2))
    os.truncate(path, 200 << 30)
    assert "only zeros in" in refusal(path)[0]


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path, small_units: None) -> None:
    path = nano(tmp_path / "a.bin", some_ids(4000))
    made = module(ids_config(path), max_steps=200)
    items(made, 20)
    state = made.state_dict()
    about = path.stat()
    nano(path, some_ids(4000, seed=1))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(UserError, match="the text changed under this run"):
        items(_continued(path, state))
    os.truncate(path, 7000)
    with pytest.raises(UserError, match=r"has become shorter|changed under this run"):
        items(made)


def _continued(path: Path, state: dict[str, Any]) -> TokenDataModule:
    made = module(ids_config(path), max_steps=200)
    made.load_state_dict(state)
    return made


_NUMBER = st.integers(-(2**31), 2**31 - 1) | st.sampled_from([20240520, 20240801, 20240522, 1, 7])


@settings(max_examples=200, deadline=None)
@given(
    numbers=st.lists(_NUMBER, min_size=3, max_size=8) | st.sampled_from([[*LLM_C, 40], [*LLAMA_3, 20]]),
    body=st.binary(max_size=200) | st.binary(min_size=80, max_size=80),
    cut=st.integers(0, 1300) | st.just(1300),
    headerless=st.sampled_from(["uint16", "uint32"]),
)
def test_any_header_is_read_exactly_or_refused(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], body: bytes, cut: int, headerless: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.bin"
    header = np.zeros(256, "<i4")
    header[: len(numbers)] = numbers
    content = (header.tobytes() + body)[:cut]
    path.write_bytes(content)
    if found := token_format.problems(path, headerless):
        assert all(p.cause and p.remedy and (p.cause + p.remedy).isprintable() for p in found)
        return
    form = token_format.form_of(path, headerless)
    known = tuple(numbers[:2]) in (LLM_C, LLAMA_3)
    assert known if form.start else numbers[0] not in (20240520, 20240801) or cut < 4
    if any(np.frombuffer(content[form.start :], form.dtype) >= 1 << 31):
        assert "the id at place" in refusal(path, headerless=headerless)[0]
        return
    read = [token_format.read(unit, headerless, 1 << 31) for unit in token_format.units(path, headerless)]
    assert b"".join(ids.astype(form.dtype).tobytes() for ids in read) == content[form.start :]
