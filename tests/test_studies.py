"""The study of FP8's gap: its arithmetic against planted effects, and real runs that stop, continue and are skipped."""

import importlib
import json
import math
import signal
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

import pytest

from tests.runs import SMALL, metrics, summary, train

STUDIES = Path(__file__).resolve().parents[1] / "docs/studies"
WORDS = [*SMALL, "trainer.max_steps=8", "trainer.val_check_interval=8", "callbacks.checkpoint_every_n_steps=2"]
WORDS = [word for word in WORDS if word not in ("trainer.max_steps=12", "trainer.val_check_interval=5")]
WORDS.remove("callbacks.checkpoint_every_n_steps=4")
WORDS.remove("callbacks.progress_bar=false")
FP8 = "precision=fp8_hybrid precision.backend=emulated"


@pytest.fixture
def study(monkeypatch):
    """The study's modules, by name."""
    monkeypatch.syspath_prepend(str(STUDIES))
    return importlib.import_module


def test_the_gradients_bias_is_told_by_kind_of_parameter(study, tmp_path, capsys):
    """A condition equal to the first has none. FP8's forward alone has less than the whole."""
    words = [*SMALL, "precision.backend=emulated", "recipe=delayed"]
    train(tmp_path / "run", *words)
    rows = tmp_path / "rows.txt"
    rows.write_text("none: precision.emulate=[]\nagain: precision.emulate=[]\nhead: precision.emulate=[head]\nall:\n")
    asked = [str(tmp_path / "run"), "--conditions", str(rows), "--batches", "3", "--", *words]
    assert study("gradient_bias").main(asked) == 0
    tables = dict(table.split(":", 1) for table in capsys.readouterr().out.strip().split("\n\n"))
    assert list(tables) == ["again", "head", "all"]
    found = {
        name: {line.split()[0]: line.split()[1:] for line in table.splitlines()[2:]} for name, table in tables.items()
    }
    assert set(map(tuple, found["again"].values())) == {(*("0.0000",) * 3, "1.0000")}
    assert {"all", "tokens.weight", "blocks.*.mlp.fc1_weight", "head.layer_norm_weight"} <= found["all"].keys()
    errors = {name: [float(number) for number in rows["all"]] for name, rows in found.items()}
    assert all(0 < one < whole < 0.2 for one, whole in zip(errors["head"][:3], errors["all"][:3], strict=True))
    for error, bias, noise, slope in (errors["head"], errors["all"]):
        assert noise < error
        assert noise / 2 < bias < 2 * error
        assert abs(slope - 1) <= bias
    for text, cause in {
        "nothing\n": "write NAME: WORDS",
        "one: precision.emulate=[]": "has one row",
        "none: precision.emulate=[]\nb: precision.backend=fused": "b: precision=fp8_hybrid would run in fp32",
        "none: precision.emulate=[]\nb: @3 precision.emulate=[]": "b: @STEP changes a run's words",
        "none: precision.emulate=[]\nb: -m": "b: -m asks for several runs",
        "none: precision.emulate=[]\nb: model.n_embd=64": "the checkpoint does not fit the model",
    }.items():
        rows.write_text(text)
        assert study("gradient_bias").main(asked) == 2, text
        assert cause in capsys.readouterr().err
    assert study("gradient_bias").main(["run", "--conditions", str(tmp_path / "none.txt"), "--", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 2


# Arithmetic


def test_the_design_is_a_quarter_of_all_combinations_and_of_resolution_4(study):
    """Every factor is in FP8 in half of the conditions; no main effect is another one or an interaction of two."""
    signs = study("factorial").SIGNS
    columns = list(zip(*signs, strict=True))
    assert len(set(signs)) == 16
    assert len(columns) == 6
    products = [tuple(a * b for a, b in zip(one, two, strict=True)) for one, two in combinations(columns, 2)]
    for i, column in enumerate(columns):
        assert sum(column) == 0
        others = [*columns[:i], *columns[i + 1 :], *products]
        assert [sum(a * b for a, b in zip(column, other, strict=True)) for other in others] == [0] * len(others)


def test_every_condition_asks_for_its_operands(study):
    factorial = study("factorial")
    words = {factorial.condition(on): factorial.settings(on)[1] for on in factorial.EMULATED}
    assert len(words) == 16
    assert words["none"] == "precision.emulate=[residual]"
    assert words["fprop_input+wgrad_input"] == "precision.emulate=[fprop_input,wgrad_input,residual]"


def test_planted_effects_are_found_whatever_interactions_of_two_there_are(study):
    factorial = study("factorial")
    planted = [0.003, 0.0, -0.001, 0.007, 0.0005, 0.002]
    losses = {}
    for on, signs in zip(factorial.EMULATED, factorial.SIGNS, strict=True):
        mean = 4.3 + sum(effect * sign / 2 for effect, sign in zip(planted, signs, strict=True))
        mean += sum(0.01 * signs[i] * signs[j] for i, j in combinations(range(6), 2))
        losses[factorial.condition(on)] = [mean - 0.004, mean, mean + 0.004]
    found = factorial.main_effects(losses)
    assert [effect.value for effect in found] == pytest.approx(planted, abs=1e-12)
    # each half's mean is over 24 runs, and a run deviates by 0.004
    assert [effect.error for effect in found] == pytest.approx([0.004 * math.sqrt(1 / 24 + 1 / 24)] * 6)


def test_a_difference_has_the_error_of_both_means(study):
    statistics = study("statistics_of")
    found = statistics.difference([1.0, 2.0, 3.0], [5.0, 9.0])
    assert found.value == 2 - 7
    assert found.error == pytest.approx(math.sqrt(1 / 3 + 8 / 2))
    assert math.isnan(statistics.difference([1.0], [2.0, 3.0]).error)
    assert math.isnan(statistics.contrast([[1.0], [2.0]], [-1, 1]).error)
    assert statistics.contrast([[1.0], [2.0]], [-1, 1]).value == 1


def test_equal_seeds_are_compared_without_what_they_have_in_common(study):
    paired = study("statistics_of").paired
    effect, count = paired({1: 5.2, 2: 4.2, 9: 1.0}, {2: 4.1, 1: 5.0, 3: 7.0})
    assert (effect.value, count) == (pytest.approx(0.15), 2)
    assert effect.error == pytest.approx(0.05)
    assert paired({1: 5.0}, {2: 4.0})[1] == 0


def test_the_table_compares_with_the_first_condition(study):
    table = study("fp8_gap")._table({"bf16": {1: 4.0, 2: 4.2}, "fused": {1: 4.1, 2: 4.5, 3: 4.3}, "late": {}})
    lines = table.splitlines()
    assert lines[1].split() == ["bf16", "2", "4.1000", "0.1414"]
    row = "fused 3 4.3000 0.2000 +0.2000 (0.1528) +4.88 %; on 2 equal seeds +0.2000 (0.1000)"
    assert " ".join(lines[2].split()) == row
    assert lines[3].split() == ["late", "0"]


# Jobs


def test_a_condition_with_a_change_of_precision_has_two_legs(study):
    legs = study("jobs").Leg.parse("precision=bf16 @350 'notes=a b' precision=fp8_hybrid")
    assert [(leg.words, leg.until) for leg in legs] == [
        (("precision=bf16",), 350),
        (("notes=a b", "precision=fp8_hybrid"), None),
    ]


@pytest.mark.parametrize(("step", "words", "stops"), [(0, "one", 3), (2, "one", 3), (3, "two", None), (7, "two", None)])
def test_a_run_goes_on_with_the_leg_of_its_step(study, monkeypatch, tmp_path, step, words, stops):
    jobs = study("jobs")
    job = jobs.Job(tmp_path, "a: b/c", 5, jobs.Leg.parse("notes=one @3 notes=two"), ("seed=0",), 8)
    monkeypatch.setattr(jobs.Job, "step", step)
    command = job.command()
    assert f"notes={words}" in command
    assert ("callbacks.extra=[stop_at]" in command) == (stops is not None)
    assert ("+tags.stop_at=3" in command) == (stops is not None)
    assert f"hydra.run.dir={tmp_path}/a_b_c/seed-5" in command
    assert command.index("seed=5") > command.index("seed=0")


@pytest.mark.parametrize(
    ("found", "loss"),
    [
        ({"status": "completed", "steps": 8, "last_val_loss": 2.5}, 2.5),
        ({"status": "completed", "steps": 4, "last_val_loss": 2.5}, None),  # a leg's end
        ({"status": "stopped", "steps": 8, "last_val_loss": 2.5}, None),
        ({"status": "diverged", "steps": 8, "last_val_loss": None}, None),
        (None, None),
    ],
)
def test_only_a_whole_run_has_a_result(study, tmp_path, found, loss):
    jobs = study("jobs")
    job = jobs.Job(tmp_path, "bf16", 1, jobs.Leg.parse("precision=bf16"), (), 8)
    job.folder.mkdir(parents=True)
    if found is not None:
        (job.folder / "summary.json").write_text(json.dumps(found))
    assert job.loss == loss


def test_the_figure_of_a_window_is_its_mean_training_loss(study, tmp_path):
    jobs = study("jobs")
    job = jobs.Job(tmp_path, "bf16", 1, jobs.Leg.parse("precision=bf16"), (), 8, after=2)
    job.folder.mkdir(parents=True)
    rows = ["step,train_loss", "2,9.0", "4,3.0", "5,", "6,2.0", "8,1.0", "10,9.0"]
    (job.folder / "metrics.csv").write_text("\n".join(rows))
    (job.folder / "summary.json").write_text(json.dumps({"status": "completed", "steps": 6}))
    assert job.loss is None
    (job.folder / "summary.json").write_text(json.dumps({"status": "completed", "steps": 8}))
    assert job.loss == 2.0


@pytest.mark.parametrize("steps", [("5", "5"), ("100", "400"), ("-1", "20"), ("100", "105")])
def test_a_window_lies_in_the_run_and_has_a_row(study, tmp_path, capsys, steps):
    (tmp_path / "rows.txt").write_text("a: precision=bf16")
    argv = [str(tmp_path / "study"), "--conditions", str(tmp_path / "rows.txt"), "--steps", *steps, "--", "trainer=cpu"]
    assert study("fp8_gap").main(argv) == 2
    assert f"error: a: --steps {' '.join(steps)} of 300" in capsys.readouterr().err


WRONG = {
    "no colon": ("precision=bf16", [], "is no new condition"),
    "twice": ("a: precision=bf16\na: precision=fp32", [], "is no new condition"),
    "bad word": ("a: precision=bf17", [], "there is no such choice"),
    "no validation": ("a: precision=bf16", ["data.val_sequences=0"], "the table is of validation losses"),
    "change after the end": ("a: precision=bf16 @300 precision=fp32", [], "@[300] of 300 steps"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_run_is_refused_before_anything_is(study, tmp_path, capsys, what):
    lines, words, cause = WRONG[what]
    (tmp_path / "rows.txt").write_text(lines)
    argv = [str(tmp_path / "study"), "--conditions", str(tmp_path / "rows.txt"), "--", "trainer=cpu", *words]
    assert study("fp8_gap").main(argv) == 2
    error = capsys.readouterr().err
    assert cause in error
    assert "fix: " in error
    assert not (tmp_path / "study").exists()


# Real runs


def start(folder, rows, *words, options=()):
    (folder / "rows.txt").write_text(rows)
    command = [sys.executable, str(STUDIES / "fp8_gap.py"), str(folder / "study"), "--at-once", "2"]
    command += ["--conditions", str(folder / "rows.txt"), "--seeds", "1", *options, "--", *WORDS, *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow  # a dozen real runs
@pytest.mark.whole
def test_runs_are_done_once_and_may_change_their_precision(tmp_path):
    rows = f"bf16: precision=bf16\nbf16 until 4: precision=bf16 @4 {FP8}"
    first = start(tmp_path, rows)
    out, _ = first.communicate(timeout=200)
    assert first.returncode == 0, out
    plain, changed = (tmp_path / "study" / name / "seed-1" for name in ("bf16", "bf16_until_4"))
    assert [summary(folder)["steps"] for folder in (plain, changed)] == [8, 8]
    assert summary(changed)["precision"]["ran"] == "fp8_hybrid"
    logged, other = metrics(plain), metrics(changed)
    until = [step for step in logged["train_loss"] if step <= 4]
    assert len(until) == 4
    for column in ("train_loss", "lr"):
        assert [logged[column][step] for step in until] == [other[column][step] for step in until]
    assert logged["lr"] == other["lr"], "the schedule is the whole run's"
    assert logged["train_loss"][8] != other["train_loss"][8]

    ended = summary(plain)["ended"]
    again = start(tmp_path, rows)
    told, _ = again.communicate(timeout=100)
    assert again.returncode == 0
    assert "2 runs, 2 of them done" in told
    assert told.splitlines()[-3:] == out.splitlines()[-3:], "the same table"
    assert summary(plain)["ended"] == ended


@pytest.mark.slow  # a dozen real runs
@pytest.mark.whole
def test_a_study_that_was_stopped_continues(tmp_path):
    words = ["trainer.max_steps=60", "trainer.val_check_interval=60"]
    stopped = start(tmp_path, f"fp8: {FP8}", *words)
    folder = tmp_path / "study/fp8/seed-1"
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints/last.json").exists():
        assert stopped.poll() is None, stopped.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    stopped.send_signal(signal.SIGINT)  # while it waits for the run to save
    out, _ = stopped.communicate(timeout=100)
    assert (stopped.returncode, "the same command continues" in out) == (130, True), out
    assert "Traceback" not in out
    assert summary(folder)["status"] == "stopped"
    saved = summary(folder)["steps"]
    assert 0 < saved < 60

    done = start(tmp_path, f"fp8: {FP8}", *words)
    out, _ = done.communicate(timeout=200)
    assert done.returncode == 0, out
    assert summary(folder)["steps"] == 60
    assert sorted(metrics(folder)["train_loss"]) == list(range(1, 61))

    other = start(tmp_path, f"fp8: {FP8}", *words, "optim.lr=1e-4")
    out, _ = other.communicate(timeout=100)
    assert (other.returncode, "holds runs that were given other words" in out) == (2, True), out


@pytest.mark.whole
def test_a_window_ends_runs_before_their_schedule(tmp_path):
    rows = "fp32: precision=fp32\nchanged: precision=fp32 @3 precision=bf16"
    study = start(tmp_path, rows, "data.val_sequences=0", options=["--steps", "2", "6"])
    out, _ = study.communicate(timeout=200)
    assert study.returncode == 0, out
    plain, changed = (metrics(tmp_path / "study" / name / "seed-1") for name in ("fp32", "changed"))
    assert list(plain["train_loss"]) == list(changed["train_loss"]) == list(range(1, 7))
    assert plain["lr"] == changed["lr"]
    assert plain["lr"][6] > 0.2 * max(plain["lr"].values()), "the schedule is that of 8 steps"
    means = [sum(run["train_loss"][step] for step in range(3, 7)) / 4 for run in (plain, changed)]
    assert f"fp32, seed 1: {means[0]:.4f}" in out
    assert f"changed, seed 1: {means[1]:.4f}" in out


@pytest.mark.whole
def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path):
    study = start(tmp_path, "bad: init_from=weights\ngood: precision=fp32")
    (tmp_path / "weights").mkdir()
    out, _ = study.communicate(timeout=200)
    assert study.returncode == 1, out
    assert "bad, seed 1: failed, see " in out
    assert "error: " in (tmp_path / "study/bad/seed-1/output.txt").read_text()
    assert summary(tmp_path / "study/good/seed-1")["status"] == "completed"
