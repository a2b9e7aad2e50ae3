"""The study of FP8's gap: its arithmetic against planted effects, and real runs that stop, continue and are skipped."""

import importlib
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

import pytest
import torch

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.reports import spread
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
        "none: precision.emulate=[]\nb: model.n_embd=64": "b: model.n_embd: a row changes neither",
        "none: precision.emulate=[]\nb: data.seed=3 optim.lr=7": "b: data.seed, optim.lr: a row changes neither",
        "none: seed=3\nb: precision.emulate=[]": "none: seed: a row changes neither",
    }.items():
        rows.write_text(text)
        assert study("gradient_bias").main(asked) == 2, text
        assert cause in capsys.readouterr().err
    rows.write_text("none: precision.emulate=[]\nall:\n")
    for more, error in {
        (
            "--batches",
            "13",
            "--",
        ): "none: --batches 13, and the run has 12: one a step\n  fix: --batches 12, or",
        ("--batches", "4", "--", "trainer.max_tokens=800"): "and the run has 3: one a step\n  fix: --batches 3\n",
        ("--", "trainer.max_steps=null", "trainer.max_epochs=1"): "none: trainer.max_epochs=1: the run alone counts",
        ("--batches", "3", "--", "model.dropout=0.1"): "none: model.dropout=0.1: each condition would",
        ("--batches", "3", "--", "trainer.overfit_batches=1"): "none: trainer.overfit_batches=1: equal batches",
        ("--batches", "3", "--", "model.n_head=4"): "model.n_head is 2 there, 4 here",
        ("--batches", "3", "--", "data.tokenizer=gpt2"): "the checkpoint does not fit the model",
    }.items():
        mark = more.index("--")
        given = [str(tmp_path / "run"), "--conditions", str(rows), *more[:mark], "--", *words, *more[mark + 1 :]]
        assert study("gradient_bias").main(given) == 2, more
        assert error in capsys.readouterr().err
    assert study("gradient_bias").main(["run", "--conditions", str(tmp_path / "none.txt"), "--", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_penalties_are_in_the_gradients_that_are_compared(study, tmp_path, capsys):
    """With no weight they are nothing; with some, the loss has them too."""
    words = [*SMALL, "precision=fp32"]
    train(tmp_path / "run", *words)
    (tmp_path / "rows.txt").write_text("none:\nno weight: penalty.z_loss=0\nz: penalty=z_loss penalty.z_loss=1\n")
    asked = [str(tmp_path / "run"), "--conditions", str(tmp_path / "rows.txt"), "--batches", "2", "--", *words]
    assert study("gradient_bias").main(asked) == 0
    without, weighed = capsys.readouterr().out.split("\n\n")
    assert without.startswith("no weight: loss +0.00000\n")
    assert set(re.findall(r" (\d\.\d+)", without)) == {"0.0000", "1.0000"}
    loss, error = re.search(r"^z: loss \+([\d.]+)\n.*\nall +([\d.]+)", weighed).groups()
    assert float(loss) > 1  # the square of log(320), about
    assert float(error) > 0.1
    assert study("gradient_bias").main([*asked, "penalty=z_loss"]) == 0
    without, weighed = capsys.readouterr().out.split("\n\n")
    assert without.startswith("no weight: loss -0.00")


def test_gradients_are_of_a_text_of_ones_own(study, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", "precision=fp32")
    (tmp_path / "text_of_the_bias.py").write_text(
        "from gpt2_fp8.data.stdlib import StdlibSource\nfrom gpt2_fp8.runtime import registry\n"
        "registry.data_source('text_of_the_bias')(lambda config: StdlibSource())\n"
    )
    (tmp_path / "rows.txt").write_text("fp32: precision=fp32\nagain: precision=fp32\n")
    words = [
        *SMALL,
        "plugins=[text_of_the_bias]",
        "data=registered",
        "data.source=text_of_the_bias",
        "data.tokenizer=bytes",
    ]
    assert study("gradient_bias").main(["run", "--conditions", "rows.txt", "--batches", "1", "--", *words]) == 0
    assert capsys.readouterr().out.startswith("again: loss +0.00000\n")


def test_a_gradient_that_is_nothing_has_no_ratios(study):
    bias = study("gradient_bias")
    first, other = bias.Errors(), bias.Errors()
    for errors in (first, other):
        errors.add(0.0, {"bias": torch.zeros(2)})
    assert bias._table("b", other, first, 1).splitlines()[-1].split() == ["bias", *("nan",) * 4]


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


def test_a_contrast_of_single_runs_has_no_error(study):
    statistics = study("statistics_of")
    assert math.isnan(statistics.contrast([[1.0], [2.0]], [-1, 1]).error)
    assert statistics.contrast([[1.0], [2.0]], [-1, 1]).value == 1


def test_equal_seeds_are_compared_without_what_they_have_in_common(study):
    paired = study("statistics_of").paired
    effect, count = paired({1: 5.2, 2: 4.2, 9: 1.0}, {2: 4.1, 1: 5.0, 3: 7.0})
    assert (effect.value, count) == (pytest.approx(0.15), 2)
    assert effect.error == pytest.approx(0.05)
    assert paired({1: 5.0}, {2: 4.0}) is None


def test_the_table_compares_with_the_first_condition(study):
    """The bounds are those of `gpt2_fp8.compare`."""
    losses = {"bf16": {1: 4.0, 2: 4.2}, "fused": {1: 4.1, 2: 4.5, 3: 4.3}, "late": {}, "one": {1: 4.1}}
    lines = study("gap_table").table(losses).splitlines()
    assert "at most (95 %)" in lines[0]
    assert lines[1].split() == ["bf16", "2", "4.1000", "0.1414"]
    bound = spread.welch([4.1, 4.5, 4.3], [4.0, 4.2]).above
    assert bound > 0.2 + 0.1528 * 1.645
    row = f"fused 3 4.3000 0.2000 +0.2000 (0.1528), at most {bound:+.4f} +4.88 %"
    assert " ".join(lines[2].split()) == f"{row}; on 2 equal seeds +0.2000 (0.1000), at most +0.8314"
    assert lines[3].split() == ["late", "0"]
    assert lines[4].endswith("+0.0000 (of one seed)  +0.00 %; on 1 equal seeds +0.1000 (of one seed)")


# Jobs


def test_a_condition_with_a_change_of_precision_has_two_legs(study, tmp_path):
    (tmp_path / "rows.txt").write_text("# two legs\na: precision=bf16 @350 'notes=a b' precision=fp8_hybrid\n")
    (legs,) = study("rows").read(str(tmp_path / "rows.txt")).values()
    assert [(leg.words, leg.until) for leg in legs] == [
        (("precision=bf16",), 350),
        (("notes=a b", "precision=fp8_hybrid"), None),
    ]


@pytest.fixture
def planned(study, tmp_path):
    """The jobs of a study with these rows, of 300 steps unless they say otherwise."""

    def planned(lines, *argv, words=()):
        (tmp_path / "rows.txt").write_bytes(lines if isinstance(lines, bytes) else lines.encode())
        rows = "--conditions", str(tmp_path / "rows.txt")
        return study("fp8_gap").read([str(tmp_path / "study"), *rows, *argv, "--", "trainer=cpu", *words])[1].jobs()

    return planned


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ["callbacks.checkpoint_every_n_steps=30"]),
        (("callbacks.checkpoint_every_n_steps=7",), ["callbacks.checkpoint_every_n_steps=7"]),
        (("callbacks=none",), []),
        (("trainer.max_steps=4",), ["callbacks.checkpoint_every_n_steps=1"]),
    ],
)
def test_a_tenth_of_a_run_ends_with_a_checkpoint_unless_the_words_say_otherwise(planned, words, expected):
    (job,) = planned("a: precision=bf16", "--seeds", "5", words=words)
    assert [word for word in job.command() if word.startswith("callbacks.checkpoint_every_n_steps")] == expected


def test_a_run_that_was_refused_says_why(planned):
    (job,) = planned("a: precision=bf16", "--seeds", "5")
    assert job.why_failed(2) == f"failed; see {job.folder}/output.txt"
    job.folder.mkdir(parents=True)
    (job.folder / "output.txt").write_text("error: an old one\nerror: another run is at work in x\n  fix: wait\n")
    assert job.why_failed(2) == f"failed: another run is at work in x; see {job.folder}/output.txt"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_that_end_a_program_interrupt_a_study_unless_they_are_ignored(study, number):
    before = signal.getsignal(number)
    try:
        with study("queue_of")._interrupts(), pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert signal.getsignal(number) is before
        signal.signal(number, signal.SIG_IGN)
        with study("queue_of")._interrupts():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(("step", "words", "stops"), [(0, "one", 3), (2, "one", 3), (3, "two", None), (7, "two", None)])
def test_a_run_goes_on_with_the_leg_of_its_step(study, monkeypatch, planned, tmp_path, step, words, stops):
    lines = "a - b/c: notes=one plugins=[json,stop_at] @3 notes=two precision=fp8_hybrid"
    (job,) = planned(lines, "--seeds", "5")
    monkeypatch.setattr(study("jobs").Job, "step", step)
    command = job.command()
    assert f"notes={words}" in command
    assert ("callbacks.extra=['stop_at']" in command) == (stops is not None)
    assert ("plugins=['json','stop_at']" in command) == (stops is not None)
    assert ("+tags.stop_at=3" in command) == (stops is not None)
    assert "precision.fallback=error" in command
    assert f"hydra.run.dir='{tmp_path}/study/a_-_b_c/seed-5'" in command
    assert {"seed=5", "ckpt_path=last"} < set(command)


def test_a_run_begins_from_the_start_of_its_seed_until_it_has_a_checkpoint(planned, tmp_path):
    lines = f"a: precision=bf16\nb: precision=bf16 @9 {FP8}"
    jobs = planned(lines, "--from", "4", "--seeds", "1", "2")
    assert [(str(job), str(job.start), job.step) for job in jobs[1:3]] == [
        ("b, seed 1", "start, seed 1", 4),
        ("a, seed 2", "start, seed 2", 4),
    ]
    job, start = jobs[1], tmp_path / "study/start/seed-1"
    assert job.start is jobs[0].start is not jobs[3].start
    assert {f"ckpt_path='{start}/checkpoints/step-00000004'", "+tags.stop_at=9"} < set(job.command())
    assert {"ckpt_path=last", "+tags.stop_at=4", "precision=bf16"} < set(job.start.command())
    own = job.folder / "checkpoints/step-00000009"
    own.mkdir(parents=True)
    (own / "manifest.json").write_text("{}")
    assert job.began
    assert job.step == 9
    assert "ckpt_path=last" in job.command()
    assert "+tags.stop_at=9" not in job.command()


BF16 = {"asked": "bf16", "ran": "bf16", "reason": None}
FELL = {"asked": "fp8_hybrid", "ran": "bf16", "reason": "no FP8 units"}


@pytest.mark.parametrize(
    ("found", "loss"),
    [
        ({"status": "completed", "steps": 8, "last_val_loss": 2.5}, 2.5),
        ({"status": "completed", "steps": 8, "last_val_loss": 2.5, "precision": BF16}, 2.5),
        ({"status": "completed", "steps": 8, "last_val_loss": 2.5, "precision": FELL | {"asked": "auto"}}, 2.5),
        ({"status": "completed", "steps": 8, "last_val_loss": 2.5, "precision": FELL}, None),
        ({"status": "completed", "steps": 4, "last_val_loss": 2.5}, None),  # a leg's end
        ({"status": "stopped", "steps": 8, "last_val_loss": 2.5}, None),
        ({"status": "diverged", "steps": 8, "last_val_loss": None}, None),
        ([], None),
        (None, None),
    ],
)
def test_only_a_whole_run_in_its_precision_has_a_result(study, tmp_path, found, loss):
    job = study("jobs").Job(tmp_path, "bf16", 1, (study("rows").Leg(("precision=bf16",)),), (), 8)
    job.folder.mkdir(parents=True)
    if found is not None:
        (job.folder / "summary.json").write_text(json.dumps(found))
    assert job.loss == loss


def test_a_run_is_evaluated_once_it_is_trained(study, planned):
    (job,) = planned("a: notes=a", "--seeds", "1", "--evaluate", "bf16")
    assert job.command()[2] == "gpt2_fp8.run"
    assert not job.goes_on(0), "nothing is done yet"
    job.folder.mkdir(parents=True)
    ended = {"status": "completed", "steps": 300, "last_val_loss": 2.5}
    (job.folder / "summary.json").write_text(json.dumps(ended))
    (job.folder / "checkpoints/step-00000300").mkdir(parents=True)
    assert (job.trained, job.loss, job.goes_on(0), job.goes_on(300)) == (True, None, True, False)
    command = job.command()
    assert command[2:5] == ["gpt2_fp8.evaluate", f"ckpt_path='{job.folder}'", "precision=bf16"]
    results = job.folder / "evaluated-bf16.json"
    assert command[5] == f"out='{results}'"
    for text, loss in (("{", None), ("[]", None), ('{"precision": "fp32", "loss": 2.25}', None)):
        results.write_text(text)
        assert job.loss is loss
    results.write_text('{"precision": "bf16", "loss": 2.25}')
    assert (job.loss, job.done) == (2.25, True)
    (job.folder / "summary.json").write_text(json.dumps(ended | {"status": "stopped"}))
    assert job.loss is None


def test_an_evaluation_and_a_window_are_two_figures(study, tmp_path, capsys):
    (tmp_path / "rows.txt").write_text("a: notes=a\n")
    argv = [str(tmp_path / "study"), "--conditions", str(tmp_path / "rows.txt")]
    assert study("fp8_gap").main([*argv, "--evaluate", "bf16", "--steps", "100", "200", "--", "trainer=cpu"]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_the_figure_of_a_window_is_its_mean_training_loss(study, tmp_path):
    job = study("jobs").Job(tmp_path, "bf16", 1, (study("rows").Leg(("precision=bf16",), 8),), (), 8, after=2)
    job.folder.mkdir(parents=True)
    rows = ["step,train_loss", "2,9.0", "4,3.0", "5,", "6,2.0", "8,1.0", "10,9.0", ""]
    for steps, loss in ((6, None), (8, 2.0), (10, 2.0)):  # the last: a window of a run that went further
        (job.folder / "metrics.csv").write_text("\n".join(rows))
        (job.folder / "summary.json").write_text(json.dumps({"status": "completed", "steps": steps}))
        assert job.loss == loss
    (job.folder / "metrics.csv").unlink()
    assert job.loss is None


def test_a_row_of_a_window_weighs_as_much_as_its_steps(study, tmp_path):
    """The first row of a process is of one step: here of step 11, after a start of 10 steps."""
    jobs = study("jobs")
    start = jobs.Start(tmp_path, "start", 1, (), (), 10)
    job = jobs.Job(tmp_path, "bf16", 1, (), (), 30, after=10, start=start)
    job.folder.mkdir(parents=True)
    (job.folder / "metrics.csv").write_text("step,train_loss\n11,9.0\n20,3.0\n30,2.0\n")
    (job.folder / "summary.json").write_text(json.dumps({"status": "completed", "steps": 30}))
    assert job.loss == pytest.approx((9 + 9 * 3 + 10 * 2) / 20)


@pytest.mark.parametrize("after", [2, None])
def test_a_figure_that_is_not_finite_is_a_failed_run(study, tmp_path, after):
    job = study("jobs").Job(tmp_path, "bf16", 1, (), (), 4, after=after)
    job.folder.mkdir(parents=True)
    (job.folder / "metrics.csv").write_text("step,train_loss\n3,1.0\n4,nan\n")
    (job.folder / "summary.json").write_text('{"status": "completed", "steps": 4, "last_val_loss": NaN}')
    assert (job.trained, job.loss, job.done) == (True, None, False)
    assert "of 4, and its figure is nan; see " in job.why_failed(0)


@pytest.mark.parametrize("name", ["Job", "Start"])
def test_a_figure_is_of_one_reading_of_the_summary(study, tmp_path, monkeypatch, name):
    """Otherwise a run that ends meanwhile would be judged by two of its states."""
    jobs, read = study("jobs"), []
    job = getattr(jobs, name)(tmp_path, "bf16", 1, (), (), 4)
    job.folder.mkdir(parents=True)
    (job.folder / "summary.json").write_text('{"status": "completed", "steps": 4, "last_val_loss": 2.5}')
    read_json = jobs.bounded.read_json
    monkeypatch.setattr(jobs.bounded, "read_json", lambda path: [read.append(path), read_json(path)][1])
    assert (job.loss, len(read)) == (2.5, 1)
    assert (job.trained, len(read)) == (True, 2)


@pytest.mark.parametrize("steps", [("5", "5"), ("100", "400"), ("-1", "20"), ("100", "105")])
def test_a_window_lies_in_the_run_and_has_a_row(study, tmp_path, capsys, steps):
    (tmp_path / "rows.txt").write_text("a: precision=bf16")
    argv = [str(tmp_path / "study"), "--conditions", str(tmp_path / "rows.txt"), "--steps", *steps, "--", "trainer=cpu"]
    assert study("fp8_gap").main(argv) == 2
    assert f"error: a: --steps {' '.join(steps)} of 300" in capsys.readouterr().err


A = "a: precision=bf16"
WRONG = {  # rows, words behind `--`, options, and the cause
    "no colon": ("precision=bf16", [], [], "it has no name before a colon"),
    "no name": (": precision=bf16", [], [], "it has no name before a colon"),
    "twice": (f"{A}\na: precision=fp32", [], [], "a row above has the name a"),
    "nothing": ("", [], [], "holds no row"),
    "no text": (b"\xff: precision=bf16", [], [], "cannot be read"),
    "open quote": ("a: 'notes=b", [], [], "its words cannot be read"),
    "bad word": ("a: precision=bf17", [], [], "a: precision=bf17: there is no such choice"),
    "one folder": ("a b: precision=bf16\na_b: precision=fp32", [], [], "a_b: its folder a_b is that of a b too"),
    "folder above": ("..: precision=bf16", [], [], "is the study's own folder, or one above it"),
    "folder of the note": ("study.json: precision=bf16", [], [], "is the study's note"),
    "no validation": (A, ["data.val_sequences=0"], [], "the table is of validation losses"),
    "change after the end": ("a: precision=bf16 @300 precision=fp32", [], [], "@[300] of 300 steps"),
    "another model": ("a: precision=bf16 @3 model.n_head=2", [], [], "model.n_head=2 cannot go on from"),
    "its own seed": (A, ["seed=5"], [], "seed=5: the study sets seed itself"),
    "its own folder": (A, ["++hydra.run.dir=x"], [], "the study sets hydra.run.dir itself"),
    "may fall back": ("a: precision=fp8_hybrid precision.fallback=allow", [], [], "the study sets precision.fallback"),
    "weights": (A, ["init_from=weights"], [], "init_from=weights, and runs begin from a seed"),
    "no steps": (A, ["trainer.fast_dev_run=true"], [], "leaves nothing to compare"),
    "a time": (A, ["trainer.max_time=00:01:00:00"], [], "are compared after equal steps"),
    "epochs": (A, ["trainer.max_steps=null", "trainer.max_epochs=1"], [], "no epochs are counted"),
    "several runs": (A, ["-m"], [], "a: -m asks for several runs"),
    "several values": (A, ["optim.lr=1e-3,1e-4"], [], "optim.lr=1e-3,1e-4 is several values"),
    "help": (A, ["--help"], [], "ask for help or settings"),
    "late flag": (A, ["-cd", "/tmp"], [], "-cd stands behind other words"),
    "no seed": (A, [], ["--seeds", "-1"], "seed=-1: must be from 0"),
    "none at once": (A, [], ["--at-once", "0"], "--at-once 0 is less than 1"),
    "no option": (A, [], ["--form", "3"], "did you mean --from?"),
    "start 0": (A, [], ["--from", "0"], "--from 0 of 300 steps"),
    "start below 0": (A, [], ["--from", "-3"], "--from -3 of 300 steps"),
    "start at the end": (A, [], ["--from", "300"], "--from 300 of 300 steps"),
    "start at the window's end": (A, [], ["--from", "200", "--steps", "100", "200"], "--from 200 of 200 steps"),
    "window before the start": (A, [], ["--from", "150", "--steps", "100", "200"], "one run up to --from 150"),
    "a tail before the start": (
        "a: precision=fp8_hybrid precision.bf16_last_steps=20", [], ["--from", "290"],
        "precision.bf16_last_steps=20 begins after step 280, and the row's steps after step 290\n"
        "  fix: precision.bf16_last_steps=10, or an earlier --from or @STEP",
    ),
    "a tail before the leg": (
        "a: precision=bf16 @290 precision=fp8_hybrid precision.bf16_last_steps=20", [], [], "begins after step 280",
    ),
    "a tail after the leg": (
        "a: precision=fp8_hybrid precision.bf16_last_steps=20 @200 precision=bf16", [], [], "steps end at 200",
    ),
    "a tail after the window": (
        f"{A}\nb: precision=fp8_hybrid precision.bf16_last_steps=20", [], ["--steps", "100", "200"], "end at 200",
    ),
    "change before the start": (f"{A} @20 precision=fp32", [], ["--from", "20"], "@[20] of 300 steps from 20"),
    "folder of the start": (f"start{A[1:]}", [], ["--from", "20"], "start is that of the common start"),
    "start of another model": (f"{A}\nb: optimizer=muon", [], ["--from", "20"], "b: optimizer=muon cannot go on from"),
    "start of another validation": (
        f"{A}\nb: data.val_sequences=2", [], ["--from", "20"], "b: data.val_sequences=2 cannot go on from",
    ),
    "start of another order": (f"{A}\nb: data.seed=9", [], ["--from", "20"], "b: data.seed=9 cannot go on from"),
    "start of another order, but for a seed": (
        f"{A}\nb: data.seed=1", [], ["--from", "20"], "b: data.seed=1 cannot go on from a checkpoint of data.seed=3",
    ),
    "start of another tokenizer": (
        f"{A}\nb: data.tokenizer=gpt2", [], ["--from", "20"], "b: data.tokenizer=gpt2 cannot go on from",
    ),
    "another text in the middle": (f"{A} @3 data.seed=9", [], [], "a: data.seed=9 cannot go on from"),
    "two validations": (f"{A}\nb: data.val_sequences=2", [], [], "b: data.val_sequences=2, and the first"),
    "two contexts": (f"{A}\nb: model.n_positions=64", [], [], "b: model.n_positions=64, and the first condition has"),
    "two texts": (f"{A}\nb: data=tinyshakespeare", [], [], "b: data=tinyshakespeare, and the first condition has"),
    "two orders of training losses": (f"{A}\nb: data.seed=9", [], ["--steps", "10", "20"], "of two training texts"),
    "two steps of training losses": (
        f"{A}\nb: global_batch_size=64", [], ["--steps", "10", "20"], "b: global_batch_size=64, and the first",
    ),
    "a window without a log": (A, ["logger=none"], ["--steps", "10", "20"], "read from metrics.csv\n  fix: logger.csv"),
    "a window that cuts a row": (A, [], ["--steps", "105", "120"], "of which one is cut\n  fix: trainer.log_every"),
    "one step": (A, ["trainer.max_steps=1"], ["--from", "1"], "--from 1 of 1 steps\n  fix: leave --from out"),
    "no file": (A, [], ["--conditions", ""], "--conditions"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_run_is_refused_before_anything_is(study, planned, tmp_path, monkeypatch, capsys, what):
    lines, words, options, cause = WRONG[what]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    with pytest.raises(UserError) as refused:
        planned(lines, *options, words=words)
    assert cause in str(refused.value)
    argv = [str(tmp_path / "study"), "--conditions", str(tmp_path / "rows.txt"), *options, "--", "trainer=cpu", *words]
    assert study("fp8_gap").main(argv) == 2
    assert capsys.readouterr().err == f"{refused.value}\n"
    assert not (tmp_path / "study").exists()


def test_conditions_may_order_their_training_text_as_they_like(planned):
    """The validation text is that of all, and a leg may stop validating."""
    assert planned(f"{A}\nb: data.seed=9 global_batch_size=64")
    assert planned(f"{A} data.val_sequences=2 @20 data.val_sequences=0", "--steps", "10", "30")


def test_text_that_is_held_out_of_training_files_is_chosen_by_them(planned, tmp_path):
    for name in ("one", "two", "three"):
        (tmp_path / f"{name}.txt").write_text("a text " * 999)
    files = f"data=text_files data.train_files=[{tmp_path}/one.txt]", f"data.train_files=[{tmp_path}/two.txt]"
    words = files[0].split()
    with pytest.raises(UserError, match=r"data\.train_files=.*two.* of two validation texts"):
        planned(f"a: notes=a\nb: {files[1]}", words=words)
    assert planned(f"a: notes=a\nb: {files[1]}", words=[*words, f"data.val_files=[{tmp_path}/three.txt]"])


def test_runs_that_were_made_differently_are_named_under_the_table(study, planned, tmp_path, capsys):
    argv = [str(tmp_path / "study"), "--conditions", str(tmp_path / "rows.txt"), "--seeds", "1", "2"]
    jobs = planned(A, "--seeds", "1", "2")
    made_by = {"code": "0123456789ab", "torch": "2.11.0"}

    def told(versions, device):
        """What the table ends with, once the second seed's runs have these."""
        for job in jobs:
            here = (made_by, "NVIDIA H200") if job.seed == 1 else (versions, device)
            found = {"status": "completed", "steps": job.steps, "last_val_loss": 2.0}
            found |= dict(zip(("versions", "device"), here, strict=True))
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / "summary.json").write_text(json.dumps(found))
        assert study("fp8_gap").main([*argv, "--", "trainer=cpu"]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("not of one")]

    assert told(made_by, "NVIDIA H200") == []
    (name,) = {job.name for job in jobs}
    assert told(made_by | {"code": "ba9876543210"}, "NVIDIA H100") == [
        f"not of one code: 0123456789ab: {name} 1; ba9876543210: {name} 2",
        f"not of one device: NVIDIA H200: {name} 1; NVIDIA H100: {name} 2",
    ]
    assert told({"torch": "2.11.0"}, "NVIDIA H200") == [f"not of one code: 0123456789ab: {name} 1; unknown: {name} 2"]
    assert told(3, "NVIDIA H200")[-1] == f"not of one torch: 2.11.0: {name} 1; unknown: {name} 2"


def test_runs_that_were_validated_in_two_ways_are_named_under_the_table(study, planned, tmp_path, capsys):
    rows = f"{A}\nb: notes=b precision.backend=emulated\nc: precision=bf16\nd: precision.evaluation=fp8"
    argv = [str(tmp_path / "study"), "--conditions", str(tmp_path / "rows.txt"), "--seeds", "1", "2"]

    def told(*options, ran="fp8_hybrid", **evaluation):
        """What the table says. `evaluation`: by the condition and the seed; else it is of before there was a choice."""
        for job in planned(rows, "--seeds", "1", "2", *options):
            of_job = "bf16" if job.name == "c" else ran
            known = evaluation.get(f"{job.name}{job.seed}")
            precision = {"name": of_job} | ({} if known is None else {"evaluation": known})
            found = {"status": "completed", "steps": job.steps, "last_val_loss": 2.0}
            found |= {"config": {"precision": precision}, "precision": {"asked": of_job, "ran": of_job}}
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / "summary.json").write_text(json.dumps(found))
            (job.folder / "evaluated-bf16.json").write_text(json.dumps({"precision": "bf16", "loss": 2.0}))
        assert study("fp8_gap").main([*argv, *options, "--", "trainer=cpu"]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("not of one validation")]

    assert told(a2="bf16", b1="bf16", b2="bf16") == ["not of one validation: fp8: a 1; bf16: b 1 2, a 2"]
    assert told(b1="bf16", b2="bf16") == ["not of one validation: fp8: a 1 2; bf16: b 1 2"]
    assert told() == told(a1="fp8") == []
    assert told(a2="bf16", ran="bf16") == []
    assert told("--evaluate", "bf16", a2="bf16") == [], "all are evaluated alike"


def test_a_studys_folder_is_named(study, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert study("fp8_gap").main(["", "--", "trainer=cpu"]) == 2
    assert capsys.readouterr().err.startswith("error: FOLDER is an empty word\n  fix: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("first", "then"),
    [(["--from", "0"], ["--from", "75"]), (["--from", "400"], ["--from", "75"]),
     (["--from", "150", "--steps", "100", "200"], ["--from", "150", "--steps", "150", "200"])],
)  # fmt: skip
def test_the_fix_of_a_start_can_be_typed(planned, first, then):
    with pytest.raises(UserError) as refused:
        planned(A, *first)
    assert str(refused.value).endswith(f"fix: {' '.join(then[-3:] if '--steps' in then else then)}")
    assert planned(A, *then)


def test_the_factorials_own_keys_are_not_for_its_runs(study, tmp_path, capsys):
    argv = [str(tmp_path / "study"), "--", "trainer=cpu", "precision.emulate=[weight]"]
    assert study("fp8_gap").main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: precision.emulate=[weight]: the study sets precision.emulate itself\n  fix: ")
    assert error.count("\n") == 2


def test_a_studys_folder_keeps_the_meaning_of_its_runs(study, tmp_path):
    """Other words, other words of a condition, another start, a folder of two conditions. New conditions may come."""
    rows, jobs, keep = study("rows"), study("gap_jobs"), study("gap_note").keep
    one, two = ((rows.Leg((f"precision={name}",)),) for name in ("bf16", "fp32"))

    def note(conditions, words=("notes=a",), start=None):
        keep(jobs.Study(tmp_path / "study", conditions, [1], list(words), None, start))

    note({"a": one})
    note({"b c": two, "a": one})
    for conditions, words, start, cause in (
        ({"a": one}, ("notes=b",), None, "holds runs that were given other words"),
        ({"a": two}, ("notes=a",), None, "a: .* holds runs of that name"),
        ({"a": rows.Leg.parse(["precision=bf16", "@3"])}, ("notes=a",), None, "a: .* holds runs of that name"),
        ({"a": one}, ("notes=a",), 3, "holds runs that began elsewhere"),
        ({"b_c": two}, ("notes=a",), None, "its folder b_c is that of b c too"),
    ):
        with pytest.raises(UserError, match=cause):
            note(conditions, words, start)
    note({"a": one, "b c": two})


@pytest.mark.parametrize("text", ["[]", "{", "", '{"conditions": {}}', '{"words": [], "conditions": 3}'])
def test_a_note_that_cannot_be_read_is_said(study, tmp_path, text):
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(UserError, match=r"study\.json cannot be read"):
        study("gap_note").keep(study("gap_jobs").Study(tmp_path, {}, [1], []))


@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/study"])
def test_a_folder_that_cannot_be_made_is_said(study, tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="FOLDER="):
        study("gap_note").keep(study("gap_jobs").Study(tmp_path / folder, {}, [1], []))


def test_a_note_of_an_earlier_version_goes_on(study, tmp_path):
    (tmp_path / "study.json").write_text('{"words": ["notes=a"]}')
    given = {"a": (study("rows").Leg(("precision=bf16",)),)}
    study("gap_note").keep(study("gap_jobs").Study(tmp_path, given, [1], ["notes=a"]))
    assert json.loads((tmp_path / "study.json").read_text())["conditions"] == {"a": ["precision=bf16"]}


# The queue, with processes that leave what a run does


RUN = """
import json, pathlib, sys
folder, step, ran, code = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
(folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
(folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").touch()
precision = {"asked": "fp8", "ran": ran, "reason": "no units"}
summary = {"status": "failed" if code else "completed", "steps": step, "last_val_loss": 2.5, "precision": precision}
(folder / "summary.json").write_text(json.dumps(summary | {"exit_code": code, "message": "it broke" if code else ""}))
sys.exit(code)
"""


@pytest.fixture
def queue(study, planned, monkeypatch, capsys):
    """Runs a study's queue. `ends`: by condition and seed the step, the precision and the exit code of a process."""
    begun = []

    def queue(ends, *argv, places=2):
        def command(job):
            begun.append(str(job))
            assert job.start is None or job.start.done or job.began, f"{job} has not waited"
            leg = next((leg for leg in job.legs if leg.until is None or job.step < leg.until), job.legs[-1])
            step, ran, code = ends.get(str(job), (leg.until or job.steps, "fp8", 0))
            return [sys.executable, "-c", RUN, str(job.folder), str(step), ran, str(code)]

        monkeypatch.setattr(study("jobs").Job, "command", command)
        monkeypatch.setattr(study("queue_of"), "POLL_SECONDS", 0.01)
        begun.clear()
        code = study("queue_of").Queue(planned("a: notes=a\nb: notes=b @9 notes=c", *argv), [], places).run()
        return code, begun[:], capsys.readouterr().out

    return queue


def test_conditions_wait_for_the_start_of_their_seed(queue, tmp_path):
    code, begun, out = queue({}, "--from", "4", "--seeds", "1", "2")
    assert code == 0, out
    assert "4 runs, 0 of them done; common starts to train first: 2" in out
    assert begun[:2] == ["start, seed 1", "start, seed 2"]
    assert sorted(begun[2:]) == ["a, seed 1", "a, seed 2", "b, seed 1", "b, seed 1", "b, seed 2", "b, seed 2"]
    assert queue({}, "--from", "4", "--seeds", "1", "2")[:2] == (0, [])
    shutil.rmtree(tmp_path / "study/start")  # what has begun needs it no more
    (tmp_path / "study/a/seed-1/summary.json").unlink()
    assert queue({}, "--from", "4", "--seeds", "1", "2")[:2] == (0, ["a, seed 1"])
    assert queue({}, "--from", "4", "--seeds", "3")[0] == 0, "beside a start, with a place left"


def test_a_study_that_is_stopped_has_equal_seeds_of_all_conditions(queue):
    code, begun, out = queue({}, "--from", "4", "--seeds", "2", "1", places=1)
    assert code == 0, out
    assert begun == [f"{name}, seed {seed}" for seed in (2, 1) for name in ("start", "a", "b", "b")]


def test_a_start_that_fails_fails_its_conditions_and_no_others(queue, tmp_path):
    code, begun, out = queue({"start, seed 2": (4, "bf16", 0)}, "--from", "4", "--seeds", "2", "1")
    assert code == 1
    assert f"start, seed 2: failed: bf16 instead of fp8: no units; see {tmp_path}/study/start/seed-2" in out
    assert "; 2 runs that begin from it are not trained" in out
    assert sum("failed" in line for line in out.splitlines()) == 1
    assert sorted(begun) == ["a, seed 1", "b, seed 1", "b, seed 1", "start, seed 1", "start, seed 2"]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ((9, "bf16", 0), "failed: bf16 instead of fp8: no units"),  # the first leg, whose words the summary then loses
        ((5, "fp8", 1), "failed: it broke"),
        ((5, "fp8", 0), "failed: it ended at step 5 of 300"),  # without a step more when started again
    ],
)
def test_a_run_that_fails_says_why(queue, end, why):
    code, begun, out = queue({"b, seed 1": end}, "--seeds", "1")
    assert code == 1
    assert f"b, seed 1: {why}" in out
    assert "a, seed 1: 2.5000" in out
    assert begun.count("b, seed 1") == (2 if end == (5, "fp8", 0) else 1)
    if end[1] == "bf16":
        assert queue({}, "--seeds", "1")[:2] == (1, []), "going on would not mend it"


def test_a_run_that_cannot_be_started_is_said_and_others_go_on(queue, tmp_path):
    (tmp_path / "study").mkdir()
    (tmp_path / "study/a").touch()
    code, begun, out = queue({}, "--seeds", "1")
    assert (code, "a, seed 1: failed: it cannot be started" in out) == (1, True), out
    assert set(begun) == {"b, seed 1"}


@pytest.mark.parametrize(
    ("words", "cause", "fix"),
    [
        ("model=gpt2_optimized", "they have no RMSNorm", "model.n_kv_head=12 model.norm=layer_norm\n"),
        ("recipe=mxfp8", "not recipe=mxfp8", "recipe=current\n"),
        ("precision.keep_bf16=[head]", "names head", "leave precision.keep_bf16 out\n"),
        ("precision=bf16", "precision.emulate belongs to", "other words after --"),
    ],
)
def test_the_factorial_proposes_no_word_that_its_conditions_set(study, tmp_path, capsys, words, cause, fix):
    assert study("fp8_gap").main([str(tmp_path / "study"), "--", "trainer=cpu", words]) == 2
    lines = capsys.readouterr().err.splitlines(keepends=True)
    assert cause in lines[0]
    assert lines[1].startswith(f"  fix: {fix}")


# Real runs


def start(folder, rows, *words, options=()):
    (folder / "rows.txt").write_text(rows)
    command = [sys.executable, str(STUDIES / "fp8_gap.py"), str(folder / "study"), "--at-once", "2"]
    command += ["--conditions", str(folder / "rows.txt"), "--seeds", "1", *options, "--", *WORDS, *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def under_way(tmp_path):
    """A study of one run of 60 steps that has a checkpoint; returns its process, the run's folder, and its words."""
    words = ["trainer.max_steps=60", "trainer.val_check_interval=60"]
    process = start(tmp_path, f"fp8: {FP8}", *words)
    folder = tmp_path / "study/fp8/seed-1"
    deadline = time.monotonic() + 120
    while not (folder / "checkpoints/last.json").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, folder, words


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
    stopped, folder, words = under_way(tmp_path)
    stopped.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while "stopping and saving" not in (folder / "output.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a run does not notice that its study is gone")
@pytest.mark.whole
def test_a_study_that_was_killed_leaves_no_run_behind_and_continues(tmp_path):
    killed, folder, words = under_way(tmp_path)
    killed.kill()
    killed.communicate()
    deadline = time.monotonic() + 120
    while not (folder / "summary.json").exists() or summary(folder)["status"] != "stopped":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert 0 < summary(folder)["steps"] < 60
    deadline = time.monotonic() + 60
    while (again := start(tmp_path, f"fp8: {FP8}", *words)).wait(200):  # the run may still hold its folder for a moment
        assert time.monotonic() < deadline, again.communicate()[0]
    assert sorted(metrics(folder)["train_loss"]) == list(range(1, 61))


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
def test_fp8_that_is_not_there_fails_and_the_others_go_on(tmp_path):
    """Nothing is trained in another precision, and no table compares it."""
    study = start(tmp_path, "bad: precision=fp8_hybrid\ngood: precision=fp32")
    out, _ = study.communicate(timeout=200)
    assert study.returncode == 1, out
    assert "bad, seed 1: failed: precision=fp8_hybrid cannot run here: the CPU has no FP8 matrix units; see " in out
    assert "error: " in (tmp_path / "study/bad/seed-1/output.txt").read_text()
    assert not (tmp_path / "study/bad/seed-1/metrics.csv").exists()
    assert summary(tmp_path / "study/good/seed-1")["status"] == "completed"


@pytest.mark.whole
def test_conditions_go_on_from_one_checkpoint(tmp_path):
    """A condition with the start's own words is the uninterrupted run, to the bit."""
    whole = tmp_path / "whole"
    train(whole, "precision=fp32", "seed=1", base=[*WORDS, "callbacks.progress_bar=false"])
    study = start(tmp_path, f"fp32: precision=fp32\nfp8: {FP8}", options=["--from", "3", "--steps", "3", "8"])
    out, _ = study.communicate(timeout=200)
    assert study.returncode == 0, out
    first, same, other = (metrics(tmp_path / "study" / name / "seed-1") for name in ("start", "fp32", "fp8"))
    losses = metrics(whole)["train_loss"]
    assert first["train_loss"] == {step: losses[step] for step in (1, 2, 3)}
    assert same["train_loss"] == {step: losses[step] for step in range(4, 9)}
    assert list(other["train_loss"]) == list(same["train_loss"])
    assert other["train_loss"] != same["train_loss"]
    assert other["lr"] == same["lr"], "the schedule is the whole run's"
    assert f"fp32, seed 1: {sum(same['train_loss'].values()) / 5:.4f}" in out
    assert "on 1 equal seeds" in out


@pytest.mark.whole
def test_the_last_weights_are_judged_in_another_precision(tmp_path):
    study = start(tmp_path, f"fp8: {FP8}", options=["--evaluate", "fp32"])
    out, _ = study.communicate(timeout=200)
    assert study.returncode == 0, out
    folder = tmp_path / "study/fp8/seed-1"
    found = json.loads((folder / "evaluated-fp32.json").read_text())
    assert f"fp8, seed 1: {found['loss']:.4f}" in out
    assert found["loss"] != summary(folder)["last_val_loss"], "that one is of FP8"
    trained = (folder / "metrics.csv").read_bytes()
    (folder / "evaluated-fp32.json").unlink()
    again = start(tmp_path, f"fp8: {FP8}", options=["--evaluate", "fp32"])
    assert "1 runs, 0 of them done" in again.communicate(timeout=200)[0]
    assert json.loads((folder / "evaluated-fp32.json").read_text())["loss"] == found["loss"]
    assert (folder / "metrics.csv").read_bytes() == trained
