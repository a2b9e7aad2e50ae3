"""Reading a run's folder, which may be damaged or a stranger's."""

import json
import os

import pytest

from gpt2_fp8.reports import find_runs, runs
from tests.reports.made import rows, run, settings

LOGGED = rows(lambda step: 2.0, validations={100: 3.0})


def read(folder):
    return runs.read(folder, folder.name)


def found(*folders):
    return find_runs.below(folders, lambda *_: None)


def test_what_a_run_left_is_read(tmp_path):
    text = 'it\'s "so"\n<b> ` \x1b[31m'
    one = read(run(tmp_path / "a", LOGGED, settings("fp8_hybrid", 3), samples={50: "early", 100: text}))
    assert (one.asked, one.ran, one.fp8, one.seed) == ("fp8_hybrid", "fp8_hybrid", True, "3")
    assert one.samples == {50: "early", 100: text}
    assert (one.steps, one.memory_gb, one.saved, one.event_file, one.resumed) == (100, 20.0, True, True, False)
    assert one.settings["optim.lr"] == 1e-3
    assert one.curve.validations == [(10_000, 3.0)]


def test_another_seed_of_the_text_is_another_repetition(tmp_path):
    assert read(run(tmp_path / "a", LOGGED, settings(data__seed=7))).seed == "1 (text 7)"


def test_a_damaged_log_is_read_as_far_as_it_is_good_and_noted(tmp_path):
    folder = run(tmp_path / "a", LOGGED)
    lines = (folder / "metrics.csv").read_text().splitlines()
    (folder / "metrics.csv").write_text("\n".join([*lines[:40], "41,garbage", *lines[50:], "101,7"]))
    one = read(folder)
    assert one.curve.mean(10_000, 10_000) == 2.0
    assert "1 lines, the first of them line 41" in one.notes[0]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: (folder / "summary.json").unlink(), "neither summary.json nor .hydra/config.yaml"),
        (lambda folder: (folder / "summary.json").write_text("{"), "summary.json cannot be read"),
        (lambda folder: (folder / "summary.json").write_text("[]"), "summary.json is not a run's"),
        (lambda folder: (folder / "summary.json").write_text("{}"), "holds no configuration"),
        (lambda folder: (folder / "metrics.csv").unlink(), "no training loss (the run's status is completed)"),
        (lambda folder: (folder / "metrics.csv").write_text("a,b\n1,2\n"), "names no columns"),
        (lambda folder: link(folder / "metrics.csv"), "links are not followed"),
        (lambda folder: link(folder / "summary.json"), "links are not followed"),
    ],
)
def test_what_cannot_be_read_is_left_out_with_the_reason(spoil, why, tmp_path):
    run(tmp_path / "good", LOGGED)
    spoil(run(tmp_path / "bad", LOGGED))
    result = found(tmp_path)
    assert [one.name for one in result.runs] == ["good"]
    (line,) = result.left_out
    assert line.startswith("bad: ")
    assert why in line


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def test_values_of_other_forms_count_as_missing(tmp_path):
    folder = run(tmp_path / "a", LOGGED)
    forged = {
        "status": 7, "precision": [1], "kernels": None, "steps": -4, "skipped_steps": "many",
        "divergence": {"reruns": 1.5}, "peak_memory_gb": "all", "versions": 3, "checkpoint": [], "device": {},
        "config": {"seed": ["x"], "a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": 1}}}}}}}},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(forged))
    one = read(folder)
    assert (one.status, one.asked, one.layers, one.steps, one.skipped_steps, one.reruns) == (
        "unknown",
        None,
        None,
        0,
        0,
        0,
    )
    assert (one.memory_gb, one.saved, one.device) == (None, False, None)


@pytest.mark.parametrize("line", ["'unclosed", "__import__('os')", "5", "b'x'", "(" * 5000])
def test_a_sample_is_a_literal_or_none(line, tmp_path):
    folder = run(tmp_path / "a", LOGGED)
    (folder / "run.log").write_text(f"[01:02:03] sample at step 4: {line}\n[01:02:03] sample at step 5: 'x'\n")
    assert read(folder).samples == {5: "x"}


def test_a_folder_that_is_named_twice_is_read_once(tmp_path):
    run(tmp_path / "a", LOGGED)
    run(tmp_path / "b", LOGGED)
    assert len(found(tmp_path, tmp_path / "a", tmp_path / "b" / ".." / "b").runs) == 2


def test_a_pipe_in_a_runs_folder_is_not_waited_for(tmp_path):
    folder = run(tmp_path / "a", LOGGED)
    for name in ("run.log", "metrics.csv"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    assert "metrics.csv has no training loss" in found(folder).left_out[0]
