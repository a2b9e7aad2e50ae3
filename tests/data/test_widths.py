"""How wide token ids are: in memory, in the cache, in digests, and up to the batch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import datamodule, sources
from gpt2_fp8.data.reader import FORMAT
from gpt2_fp8.data.tokenizer import dtype_of, narrow_ids
from gpt2_fp8.data.units import Unit, checksum
from tests.data.corpora import files_config, items, module, write_jsonl
from tests.data.wide import SHIFT, WideReader, wide

TEXTS = [f"{i} Ein Satz, ünd noch einer: 日本語. " * 8 for i in range(60)]


def widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every data module has the made-up tokenizer."""
    monkeypatch.setattr(datamodule, "load_tokenizer", lambda name: wide())
    monkeypatch.setattr(sources, "UnitReader", WideReader)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32"), (2**31, "uint32")])
def test_the_dtype_follows_from_the_vocabulary(vocab_size: int, dtype: str) -> None:
    assert dtype_of(vocab_size) == dtype
    largest = narrow_ids(np.array([vocab_size - 1], np.int64), vocab_size, "a")
    assert (largest.dtype, largest.tolist()) == (dtype, [vocab_size - 1])


@pytest.mark.parametrize("odd", [257, 65_536 + 65, -1])
def test_an_id_that_does_not_fit_is_an_error_and_never_another_id(odd: int) -> None:
    """65,536 + 65 would become 65, the letter A, of the vocabulary."""
    with pytest.raises(UserError, match=rf"a\.txt: its tokens have the id {odd} of a vocabulary of 257"):
        narrow_ids(np.array([65, odd, 66], np.int64), 257, "a.txt")


def test_digests_of_narrow_corpora_are_those_of_earlier_versions() -> None:
    """Checkpoints and caches have them. The bytes are written out here, as they have always been."""
    ends = (3).to_bytes(8, "little")
    narrow = checksum(np.array([1, 2, 65_535], np.uint16), np.array([3], np.int64))
    assert narrow == hashlib.sha256(b"\x01\0\x02\0\xff\xff" + ends).hexdigest()
    wider = checksum(np.array([1, 2, 65_536], np.uint32), np.array([3], np.int64))
    assert wider == hashlib.sha256(b"\x01\0\0\0\x02\0\0\0\0\0\x01\0" + ends).hexdigest()


def test_keys_of_the_cache_are_those_of_earlier_versions() -> None:
    assert FORMAT == "1"
    assert Unit("a.txt 10", "a.txt", 0, 10).digest("a tokenizer", FORMAT)[:32] == "f4419d874dacc72811228968d25e2999"


def test_a_cache_states_its_dtype_and_one_of_before_that_is_read_as_uint16(tmp_path: Path) -> None:
    config = files_config(write_jsonl(tmp_path / "a.jsonl", TEXTS), cache_dir=str(tmp_path / "cache"))
    whole = items(module(config), 5)
    (stored,) = (tmp_path / "cache").glob("*.json")
    about = json.loads(stored.read_bytes())
    assert about.pop("dtype") == "uint16"
    stored.write_text(json.dumps(about))
    before = stored.with_suffix(".u16").stat().st_mtime_ns
    again = module(config)
    assert all(np.array_equal(a, b) for a, b in zip(items(again, 5), whole, strict=True))
    assert again.report()["reading"] | {"units": 0} == {"units": 0, "cache_hits": 1, "retries": 0, "worker_deaths": 0}
    assert stored.with_suffix(".u16").stat().st_mtime_ns == before


@pytest.mark.whole
def test_a_vocabulary_of_128_256_goes_whole_through_cache_workers_validation_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against bytes: the same text in the same order, every id larger by the same number."""
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", TEXTS[i::3]) for i, name in enumerate("abc")]
    changes: dict[str, Any] = {"val_fraction": 0.2, "val_sequences": 4, "num_workers": 2}
    narrow = module(files_config(paths, **changes))
    expected = [ids + SHIFT for ids in items(narrow)]
    validation = [item["ids"].numpy() + SHIFT for item in narrow.val_dataloader()]
    narrow.teardown()
    widen(monkeypatch)
    config = files_config(paths, **changes, cache_dir=str(tmp_path / "cache"))

    first = module(config)
    begun = items(first, 7)
    state = json.loads(json.dumps(first.state_dict()))
    first.teardown()
    stored = {path.suffix for path in (tmp_path / "cache").iterdir()}
    assert stored - {".tmp"} == {".u32", ".json"}, "a worker that is ended while it writes leaves a temporary file"
    assert {json.loads(path.read_bytes())["dtype"] for path in (tmp_path / "cache").glob("*.json")} == {"uint32"}

    resumed = module(config)
    resumed.load_state_dict(state)
    batches = [*begun, *items(resumed)]
    assert {ids.dtype for ids in batches} == {np.dtype(np.int32)}
    assert min(int(ids.min()) for ids in batches) >= SHIFT > 65_535
    assert len(batches) == len(expected)
    assert all(np.array_equal(a, b) for a, b in zip(batches, expected, strict=True))
    found = [item["ids"].numpy() for item in resumed.val_dataloader()]
    assert all(np.array_equal(a, b) for a, b in zip(found, validation, strict=True))
    assert resumed.report()["reading"]["cache_hits"] > 0
    resumed.teardown()
