"""How wide token ids are: in memory, in the cache, in digests, and up to the batch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.reader import FORMAT
from gpt2_fp8.data.tokenizer import dtype_of, narrow_ids
from gpt2_fp8.data.units import Unit, checksum
from tests.data.corpora import files_config, items, module, write_jsonl
from tests.data.tokenizers_made import write_json

TEXTS = [f"{i} Ein Satz, ünd noch einer: 日本語. " * 8 for i in range(60)]


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
def test_a_vocabulary_above_65_536_goes_whole_through_cache_workers_validation_and_resume(tmp_path: Path) -> None:
    """Against a small one: the same text in the same order, every id larger by the same number."""
    words, shift = [f"w{i}" for i in range(50)], 66_000
    small = write_json(tmp_path / "small", ["?", *words], ["</s>"], "</s>")
    large = write_json(tmp_path / "large", ["?", *(f"x{i}" for i in range(shift)), *words], ["</s>"], "</s>")
    texts = [" ".join(words[(i * j) % 50] for j in range(1, 60)) for i in range(1, 61)]
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", texts[i::3]) for i, name in enumerate("abc")]
    changes: dict[str, Any] = {"val_fraction": 0.2, "val_sequences": 4}
    narrow = module(files_config(paths, tokenizer=str(small), **changes))
    expected = [ids + shift for ids in items(narrow)]
    validation = [item["ids"].numpy() + shift for item in narrow.val_dataloader()]
    changes |= {"tokenizer": str(large), "num_workers": 2, "cache_dir": str(tmp_path / "cache")}
    first = module(files_config(paths, **changes))
    batches = items(first, 7)
    state = json.loads(json.dumps(first.state_dict()))
    first.teardown()
    assert {json.loads(path.read_bytes())["dtype"] for path in (tmp_path / "cache").glob("*.json")} == {"uint32"}
    resumed = module(files_config(paths, **changes))
    resumed.load_state_dict(state)
    batches += items(resumed)
    assert {ids.dtype for ids in batches} == {np.dtype(np.int32)}
    assert np.array_equal(batches, expected)
    assert np.array_equal([item["ids"].numpy() for item in resumed.val_dataloader()], validation)
    assert resumed.report()["reading"]["cache_hits"] > 0
    resumed.teardown()
