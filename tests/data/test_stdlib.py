"""The standard library as a corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2_fp8.config.data_schema import StdlibData
from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.stdlib import TRAIN_MODULES, VAL_MODULES, StdlibSource
from tests.data.corpora import items, module


def test_every_module_is_here_once() -> None:
    corpus = StdlibSource().corpus()
    assert (len(corpus.train), len(corpus.val)) == (len(TRAIN_MODULES), len(VAL_MODULES))
    assert len({*TRAIN_MODULES, *VAL_MODULES}) == len(TRAIN_MODULES) + len(VAL_MODULES)


def test_it_trains_and_validates() -> None:
    config = StdlibData(
        name="stdlib", kind="stdlib", tokenizer="bytes", num_workers=0, seed=7, val_sequences=64, cache_dir=None
    )
    made = module(config, n_positions=256, global_batch_size=16)
    assert made.vocab_size == 257
    assert made.tokenizer.eot_token == 256
    assert [item.shape for item in items(made)] == [(16, 257)] * 20
    assert sum(len(batch["ids"]) for batch in made.val_dataloader()) == 64
    assert made.wait_seconds > 0


def test_a_python_without_its_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no source of its standard library"):
        StdlibSource(str(tmp_path)).corpus()
