"""What is prepared is what a run asks for, no more and no less; and what cannot be kept is told."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data import cache as cache_module
from gpt2_fp8.data import formats, preparation
from gpt2_fp8.data.cache import UnitCache
from gpt2_fp8.data.prefetch import UnitPool
from gpt2_fp8.data.preparation import Job, Preparation
from gpt2_fp8.data.units import Unit
from tests.data.corpora import files_config, items, module, write_jsonl
from tests.data.mixtures import letters, mixture, three

N, SIZE = 16, 8  # tokens of context, sequences of a step


def job(config: Any, steps: int | None) -> Job:
    return Job(config, N, SIZE, steps)


def prepared(config: Any, steps: int | None) -> Preparation:
    made = Preparation(job(config, steps))
    made.run()
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[Unit]:
    """The units that pools were asked for."""
    found: set[Unit] = set()
    ask = UnitPool.ask
    monkeypatch.setattr(UnitPool, "ask", lambda self, unit: (found.add(unit), ask(self, unit))[1])
    return found


def taken(asked: set[Unit]) -> set[Unit]:
    """What was asked for since the last call."""
    found = set(asked)
    asked.clear()
    return found


def cached(tmp_path: Path, name: str, config: Any) -> Any:
    """A mixture's source, or one alone, with a cache."""
    return replace(config, cache_dir=str(tmp_path / f"cache-{name}"))


def mixed(tmp_path: Path) -> Any:
    config = three(tmp_path)
    sources = {name: cached(tmp_path, name, config.sources[name]) for name in "ab"}
    return replace(config, sources=config.sources | sources)


@pytest.mark.parametrize("steps", [1, 2, 7, 20, 200])
@pytest.mark.parametrize("val_sequences", [0, 9])
def test_it_reads_the_units_of_so_many_steps(
    tmp_path: Path, many_units: Path, asked: set[Unit], steps: int, val_sequences: int
) -> None:
    config = files_config(many_units, val_fraction=0.3 if val_sequences else 0.0, val_sequences=val_sequences)
    items(module(config, max_steps=steps))
    of_a_run = taken(asked)
    made = prepared(cached(tmp_path, "x", config), steps)
    assert taken(asked) == of_a_run
    kept = list(made.kept.values())
    assert sum(one.units for one in kept) == len(of_a_run) == made.tokenised
    assert sum(one.size for one in kept) == sum(path.stat().st_size for path in (tmp_path / "cache-x").iterdir())


@pytest.mark.parametrize("steps", [1, 5, 60])
def test_it_reads_the_units_of_a_mixture(tmp_path: Path, asked: set[Unit], steps: int) -> None:
    config = mixed(tmp_path)
    items(module(three(tmp_path), max_steps=steps))
    of_a_run = {unit for unit in taken(asked) if unit.source != "c"}
    made = prepared(config, steps)
    assert {unit for unit in taken(asked) if unit.source != "c"} == of_a_run
    assert {name for name, _ in made.kept} == {"a", "b"}, "token files are read as they are"


def test_a_source_with_hardly_a_turn_reads_ahead_as_in_a_run(tmp_path: Path, asked: set[Unit]) -> None:
    sources = {name: letters(tmp_path, name, 40) for name in "ab"}
    weights = {"a": 100.0, "b": 1.0}
    items(module(mixture(sources, weights), max_steps=1))
    of_a_run = taken(asked)
    prepared(mixture({name: cached(tmp_path, name, one) for name, one in sources.items()}, weights), 1)
    assert taken(asked) == of_a_run


def test_the_run_then_reads_no_text(tmp_path: Path, many_units: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = cached(tmp_path, "x", files_config(many_units, val_fraction=0.3, val_sequences=9))
    plain = items(module(replace(config, cache_dir=None), max_steps=12))
    prepared(config, 12)

    def gone(*_: Any) -> Any:
        raise AssertionError("the text is read")

    monkeypatch.setattr(formats, "read", gone)
    made = module(config, max_steps=12)
    assert all((one == other).all() for one, other in zip(items(made), plain, strict=True))
    reading = made.report()["reading"]
    assert reading["cache_hits"] == reading["units"] > 0


def test_all_of_the_text_is_every_unit_once(tmp_path: Path, many_units: Path, asked: set[Unit]) -> None:
    config = cached(tmp_path, "x", files_config(many_units, val_fraction=0.3, val_sequences=1))
    corpus = module(config).text.corpus
    taken(asked)
    made = prepared(config, None)
    assert taken(asked) == {*corpus.train, *corpus.val}
    assert made.tokenised == 140 - 2, "two were read for the first module"
    again = prepared(config, None)
    assert again.tokenised == 0
    assert again.kept == made.kept
    assert again.kept["", "training"].documents.read + again.kept["", "validation"].documents.read == 350


def test_documents_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a text " * 20, " ", None, "b" * 40, "\ud800" + "c" * 9])
    with path.open("ab") as file:
        file.write(b"{broken\n")
    made = prepared(cached(tmp_path, "x", files_config(path)), None)
    documents = made.kept["", "training"].documents
    assert documents.as_dict() == {
        "read": 3, "empty": 1, "not_text": 1, "broken": 1, "invalid_utf8": 1, "long": 0
    }  # fmt: skip


def test_what_the_disk_does_not_take_ends_it(tmp_path: Path, many_units: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes on without, since it has the tokens."""
    config = cached(tmp_path, "x", files_config(many_units))
    made = Preparation(job(config, None))
    write, written = cache_module.replace, []

    def until_full(path: Path, content: bytes) -> None:
        written.append(path)
        if len(written) > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(cache_module, "replace", until_full)
    with pytest.raises(OSError, match="No space left") as full:
        made.run()
    assert full.value.filename == str(tmp_path / "cache-x")
    assert made.kept["", "training"].units == 21, "one was read before"
    assert len(items(module(config, max_steps=20))) == 20
    monkeypatch.undo()
    again = prepared(config, None)
    assert (again.tokenised, again.kept["", "training"].units) == (49, 70)


def test_text_that_changes_meanwhile_ends_it(tmp_path: Path, many_units: Path) -> None:
    config = cached(tmp_path, "x", files_config(many_units))
    made = Preparation(job(config, None))
    for path in many_units.parent.iterdir():
        os.utime(path, (1, 1))
    with pytest.raises(UserError, match=r"\.jsonl .* changed while it was read"):
        made.run()
    assert len(items(module(config, max_steps=3))) == 3


def test_it_says_how_far_it_is(
    tmp_path: Path, many_units: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = cached(tmp_path, "x", files_config(many_units))
    prepared(config, 3)
    monkeypatch.setattr(preparation, "FIRST_SECONDS", -1.0)
    monkeypatch.setattr(preparation, "EVERY_SECONDS", -1.0)
    caplog.set_level("INFO", "gpt2_fp8")
    caplog.clear()
    made = prepared(config, None)
    lines = [record.getMessage() for record in caplog.records if "tokens/s" in record.getMessage()]
    form = re.compile(r"data: ([\d,]+) units, ([\d,]+) tokens, (\d+) %, [\d,]+ tokens/s(, left .+)?")
    found = [form.fullmatch(text) for text in lines]
    assert all(found)
    assert [int(one[1]) for one in found if one] == list(range(1, 71))
    assert found[-1]
    assert (found[-1][2], found[-1][3]) == (f"{made.kept['', 'training'].tokens:,}", "100")
    assert found[-1][4] == ", left 0.0 s"


def test_it_says_what_is_needed_and_whether_there_is_room(
    tmp_path: Path, many_units: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = cached(tmp_path, "x", files_config(many_units, val_fraction=0.3, val_sequences=9))
    caplog.set_level("INFO", "gpt2_fp8")
    monkeypatch.setattr(preparation.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100})())
    prepared(config, 3)
    said = [record for record in caplog.records if record.getMessage().startswith("data: ")]
    reads, room = (record for record in said if "the run " in record.getMessage() or " MB in " in record.getMessage())
    val = config.val_sequences * N
    assert reads.getMessage() == f"data: the run trains on {3 * SIZE * N:,} tokens, and validates on {val:,}"
    assert room.levelname == "WARNING"
    assert f" MB in {config.cache_dir}, unless" in room.getMessage()


def test_the_size_of_a_unit_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        UnitCache(tmp_path, "t", 257).size(Unit("a", "a"))
