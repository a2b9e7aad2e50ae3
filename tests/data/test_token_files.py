"""Files of token ids: what is trained on is what is in them, and what is no such file is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import files
from gpt2_fp8.data.files import TokenFilesSource
from gpt2_fp8.data.preparation import tokens_a_pass
from tests.data.corpora import items, module
from tests.data.token_files_made import LLAMA_3, LLM_C, ids_config, llm_c, nano, some_ids


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "UNIT_IDS", 100)


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


def test_every_form_gives_the_same_steps(tmp_path: Path, small_units: None) -> None:
    ids = some_ids(4000)
    configs = [
        ids_config(nano(tmp_path / "nano.bin", ids)),
        ids_config(llm_c(tmp_path / "llm_c.bin", ids)),
        ids_config(llm_c(tmp_path / "llama.bin", ids, LLAMA_3)),
        ids_config(nano(tmp_path / "wide.bin", ids, "<u4"), headerless="uint32"),
    ]
    first, *others = (items(module(config)) for config in configs)
    assert all(np.array_equal(first, other) for other in others)


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


def refusal(path: Path, **changes: str) -> str:
    with pytest.raises(UserError) as told:
        items(module(ids_config(path, **changes)))
    (problem,) = told.value.problems
    return problem.cause


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"\1\0" * 500 + b"\1", "1,001 bytes, which are no whole number of uint16 ids"),
        (some_ids(1000).astype("<u4").tobytes(), "ids of 32 bits"),
        (np.array([20240520, 2, 10] + [0] * 258, "<i4").tobytes(), "version 2, which is unknown"),
        (np.array([20240520, 1, 11] + [0] * 258, "<i4").tobytes(), "11 uint16 ids, and 20 bytes"),
    ],
)
def test_what_is_no_file_of_ids_is_refused(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    said = refusal(path)
    assert said.startswith(str(path))
    assert cause in said


def test_an_id_outside_the_vocabulary_is_refused_with_its_place(tmp_path: Path, small_units: None) -> None:
    ids = some_ids(1000)
    ids[777] = 50256
    assert "the id at place 777, counted from 0, is 50,256" in refusal(llm_c(tmp_path / "a.bin", ids))


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
    source = TokenFilesSource([str(path)], [], headerless)
    try:
        units = source.corpus().train
    except UserError:
        return
    form = files.read_layout(path, headerless)
    known = tuple(numbers[:2]) in (LLM_C, LLAMA_3)
    assert known if form.start else numbers[0] not in (20240520, 20240801) or cut < 4
    if any(np.frombuffer(content[form.start :], form.dtype) >= 1 << 31):
        assert "the id at place" in refusal(path, headerless=headerless)
        return
    read = [source.read_ids(unit, 1 << 31) for unit in units]
    assert b"".join(ids.astype(form.dtype).tobytes() for ids in read) == content[form.start :]
