"""The tokens of a pass, counted before training, against what training uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.pass_length import tokens_a_pass
from tests.data.corpora import files_config, items, module, write_jsonl


def test_it_is_every_token_of_every_unit(many_units: Path) -> None:
    made = module(files_config(many_units))
    units = made.text.corpus.train
    lengths = [len(made.text.pool.take(made.text.pool.ask(unit)).tokens) for unit in units]
    assert tokens_a_pass(made.config, 16) == sum(lengths)


def test_training_comes_to_the_second_pass_after_as_many_steps(tmp_path: Path) -> None:
    """One lane, so that nothing of it is ahead of the rest: 128 tokens a step."""
    path = write_jsonl(tmp_path / "text.jsonl", [f"<{i}>" + "x" * 50 for i in range(40)])
    tokens = tokens_a_pass(files_config(path), 16)
    made = module(files_config(path), max_steps=100)
    assert made.text.strands[0].order.lanes == 1
    steps = -(-tokens // 128)
    items(made, steps - 1)
    assert made.report()["documents"]["read"] == 40
    items(made, 1)
    assert made.report()["documents"]["read"] == 80


def test_a_cache_keeps_what_was_counted(tmp_path: Path, many_units: Path) -> None:
    config = files_config(many_units, cache_dir=str(tmp_path / "cache"))
    tokens = tokens_a_pass(config, 16)
    made = module(config)
    items(made, 5)
    assert made.report()["reading"]["cache_hits"] == made.report()["reading"]["units"] > 0
    assert tokens_a_pass(config, 16) == tokens


def test_a_text_without_a_sequence_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "short.jsonl", ["short"])
    with pytest.raises(UserError, match="the training text is too short: 6 tokens"):
        tokens_a_pass(files_config(path), 16)
