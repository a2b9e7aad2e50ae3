"""What is prepared is what a run asks for, no more and no less; and the tokens of a pass are counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import order
from gpt2_fp8.data.preparation import Job, Preparation, tokens_a_pass
from gpt2_fp8.data.units import Unit
from gpt2_fp8.data.workers import UnitPool
from tests.data.corpora import files_config, items, module, three, write_jsonl

N, SIZE = 16, 8  # tokens of context, sequences of a step


def prepared(config: Any, steps: int | None) -> Preparation:
    made = Preparation(Job(config, N, SIZE, steps))
    made.run()
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[Unit]:
    found: set[Unit] = set()
    ask = UnitPool.ask
    monkeypatch.setattr(UnitPool, "ask", lambda self, unit: (found.add(unit), ask(self, unit))[1])
    return found


def taken(asked: set[Unit]) -> set[Unit]:
    found = set(asked)
    asked.clear()
    return found


def cached(tmp_path: Path, name: str, config: Any) -> Any:
    return replace(config, cache_dir=str(tmp_path / f"cache-{name}"))


@pytest.mark.parametrize(("steps", "val_sequences"), [(1, 0), (7, 9)])
def test_it_reads_the_units_of_so_many_steps(
    tmp_path: Path, many_units: Path, asked: set[Unit], steps: int, val_sequences: int
) -> None:
    config = files_config(many_units, val_fraction=0.3 if val_sequences else 0.0, val_sequences=val_sequences)
    items(module(config, max_steps=steps))
    of_a_run = taken(asked)
    made = prepared(cached(tmp_path, "x", config), steps)
    assert taken(asked) == of_a_run
    assert sum(kept.units for kept in made.kept.values()) == len(of_a_run) == made.tokenised
    assert len(list((tmp_path / "cache-x").glob("*.u16"))) == len(of_a_run)
    modes = {path.stat().st_mode & 0o666 for path in [tmp_path / "cache-x", *(tmp_path / "cache-x").iterdir()]}
    assert len(modes) == 1, "who may read the folder may read what is in it"


def test_a_run_of_many_ranks_reads_in_more_lanes(
    tmp_path: Path, many_units: Path, asked: set[Unit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "UNITS_A_LANE", 1)
    config = cached(tmp_path, "x", files_config(many_units))
    for ranks in (16, 64):
        Preparation(Job(config, N, 128, 1, ranks=ranks)).run()
        assert ranks <= len(taken(asked)) < 3 * ranks, "a unit of each lane, and what is read ahead"


def test_it_reads_the_units_of_a_mixture(tmp_path: Path, asked: set[Unit]) -> None:
    config = three(tmp_path)
    items(module(config, max_steps=60))
    of_a_run = taken(asked)
    sources = {name: cached(tmp_path, name, config.sources[name]) for name in "ab"}
    made = prepared(replace(config, sources=config.sources | sources), 60)
    assert taken(asked) == of_a_run
    assert {name for name, _ in made.kept} == {"a", "b"}, "token files are read as they are"


def test_all_of_the_text_is_every_unit_once(tmp_path: Path, many_units: Path, asked: set[Unit]) -> None:
    config = cached(tmp_path, "x", files_config(many_units, val_fraction=0.3, val_sequences=1))
    corpus = module(config).text.corpus
    taken(asked)
    made = prepared(config, None)
    assert taken(asked) == {*corpus.train, *corpus.val}
    assert made.tokenised == 140 - 2, "two were read for the first module"
    again = prepared(config, None)
    assert (again.tokenised, again.kept) == (0, made.kept)
    assert again.kept["", "training"].documents.read + again.kept["", "validation"].documents.read == 350


def test_a_pass_is_every_token_of_every_unit_and_is_kept(many_units: Path, tmp_path: Path) -> None:
    made = module(cached(tmp_path, "x", files_config(many_units)))
    tokens = tokens_a_pass(made.config, 16)
    lengths = [len(made.text.pool.take(made.text.pool.ask(unit)).tokens) for unit in made.text.corpus.train]
    assert tokens == sum(lengths)
    assert made.report()["reading"]["cache_hits"] == 69, "one was read in its setup"
    with pytest.raises(UserError, match="the training text is too short: 6 tokens"):
        tokens_a_pass(files_config(write_jsonl(tmp_path / "short.jsonl", ["short"])), 16)
