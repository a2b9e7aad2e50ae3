"""Mixtures of sources: each sequence is of the source whose turn it is, whatever the ranks, workers and resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.datamodule import PADDING
from tests.data.corpora import files_config, items, letters, mixture, module, sources_of, three, write_jsonl


def test_each_sequence_is_of_the_source_whose_turn_it_is(tmp_path: Path) -> None:
    made = module(three(tmp_path), max_steps=100)
    steps = items(made)
    turns = np.concatenate([made.text.deal.mixing.sources(step, 1)[0] for step in range(100)])
    assert sources_of(np.concatenate(steps)).tolist() == [("a", "b", "c")[turn] for turn in turns]
    found = sources_of(np.concatenate(steps))
    assert [float((found == letter).mean()) for letter in "abc"] == pytest.approx([0.5, 0.3, 0.2], abs=0.01)


def test_each_source_has_its_own_order_and_its_own_passes(tmp_path: Path) -> None:
    """The sequences of a source follow each other as they would if it were the only one with as many lanes."""
    config = three(tmp_path)
    made = module(config, max_steps=100)
    mixed = np.concatenate(items(made))
    alone = np.concatenate(items(module(config.sources["b"], global_batch_size=1, max_steps=240)))
    assert np.array_equal(mixed[sources_of(mixed) == "b"][:230], alone[:230])
    report = made.report()["sources"]
    assert report["a"]["share"] == 0.5
    counts = {name: int((sources_of(mixed) == name).sum()) for name in "abc"}
    assert {name: report[name]["tokens"] for name in "abc"} == {name: 16 * n for name, n in counts.items()}
    tokens = sum(3 + j + 1 for j in range(5))
    assert report["b"]["epochs"] == pytest.approx(counts["b"] * 16 / tokens, abs=2)
    assert report["a"]["epochs"] < report["c"]["epochs"] < report["b"]["epochs"]
    metrics = made.source_metrics()
    assert (metrics["tokens/a"], metrics["epochs/b"]) == (report["a"]["tokens"], report["b"]["epochs"])


def resumed(config, stops: list[int], steps: int = 30) -> tuple[list[np.ndarray], dict]:
    """The items of a run that is stopped after each of `stops`, and its state at the end."""
    legs, state = [], None
    for stop in [*stops, steps]:
        made = module(config, max_steps=steps)
        if state is not None:
            made.load_state_dict(json.loads(state))
        legs += items(made, stop - len(legs))
        state = json.dumps(made.state_dict())
        made.teardown()
    return legs, json.loads(state)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.sets(st.integers(1, 29), min_size=1, max_size=3))
def test_a_resume_at_any_step_goes_on_where_it_stood(tmp_path: Path, stops: set[int]) -> None:
    config = three(tmp_path)
    whole, end = resumed(config, [])
    legs, state = resumed(config, sorted(stops))
    assert np.array_equal(legs, whole)
    assert state == end


@pytest.mark.whole
def test_workers_change_nothing(tmp_path: Path) -> None:
    here, there = resumed(three(tmp_path), []), resumed(three(tmp_path, workers=2), [7])
    assert np.array_equal(here[0], there[0])
    assert here[1] == there[1]


def test_what_changed_is_refused_by_name(tmp_path: Path) -> None:
    config = three(tmp_path)
    made = module(config)
    items(made, 3)
    state = made.state_dict()

    def causes(other) -> str:
        with pytest.raises(UserError) as told:
            module(other).load_state_dict(state)
        return "\n".join(map(str, told.value.problems))

    assert "data.weights.b was 3" in causes(replace(config, weights={"a": 0.5, "b": 0.2, "c": 0.3}))
    less = causes(replace(config, sources={name: config.sources[name] for name in "ab"}, weights=None))
    assert "data.sources.c was" in less
    reseeded = replace(config, sources=config.sources | {"b": replace(config.sources["b"], seed=8)})
    assert "data.sources.b.seed was 7" in causes(reseeded)
    assert "seed was 7, and is now 8" in causes(replace(config, seed=8))
    assert "was" in causes(config.sources["a"])
    module(replace(config, weights={"a": 5, "b": 3, "c": 2})).load_state_dict(state)  # the same proportion


def test_validation_tells_the_sources_apart(tmp_path: Path) -> None:
    sources = {
        "a": letters(tmp_path, "a", 20, val_files=[str(tmp_path / "a" / "0*.jsonl")], val_sequences=7),
        "b": letters(tmp_path, "b", 20, val_files=[str(tmp_path / "b" / "0*.jsonl")], val_sequences=2),
        "c": letters(tmp_path, "c", 20),
    }
    made = module(mixture(sources))
    assert made.val_sources == ["a", "b"]
    loader = made.val_dataloader()
    found = list(loader)
    assert len(found) == len(loader) == 3
    assert [item["source"] for item in found] == [0, 0, 1]
    assert all(item["ids"].shape == (4, 17) for item in found)
    rows = np.concatenate([item["ids"].numpy() for item in found])
    rows = rows[rows[:, 0] != PADDING]
    assert sources_of(rows).tolist() == ["a"] * 7 + ["b"] * 2


def test_a_part_that_another_source_trains_on_is_refused_and_an_equal_split_is_not(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [f"document {i} of some words" for i in range(200)])
    more = tmp_path / "more.txt"
    more.write_text("another text\n" * 40)
    link = tmp_path / "ln.jsonl"
    link.symlink_to(path)
    held = files_config([path, more], val_fraction=0.2, val_sequences=1)

    def set_up(fraction: float) -> None:
        module(mixture({"a": held, "b": files_config(link, val_fraction=fraction)}))

    for fraction in (0.2, 0.3):
        set_up(fraction)
    for fraction in (0.0, 0.1):
        with pytest.raises(UserError, match=rf"source b trains on {link}, and source a validates with it"):
            set_up(fraction)
