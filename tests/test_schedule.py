"""The schedule program: its figures are those of training, and how it ends."""

import csv
import re
import sys

import pytest
from matplotlib.image import imread

from gpt2_fp8 import compose, schedule
from gpt2_fp8.train.setup import resolve_length
from tests.runs import SMALL, train

LONG = ["model=gpt2", "data=fineweb", "trainer.max_steps=1760"]


def said(capsys, *argv, code=0):
    assert schedule.main(list(argv)) == code
    out, err = capsys.readouterr()
    return err if code else out


def rows(text):
    row = re.compile(r"^ +([\d,]+)  +[\d.]+( [kMB])?  +(\S+)  +[\d.]+ %  (.*)$", re.MULTILINE)
    found = {int(m[1].replace(",", "")): (float(m[3]), m[4]) for m in row.finditer(text)}
    assert found
    return found


def test_rates_are_those_that_training_logs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["trainer.max_steps=20", "optim.warmup_steps=5", "trainer.log_every_n_steps=1", "optim.schedule=linear"]
    train(tmp_path / "outputs/r", *words)
    capsys.readouterr()
    with (tmp_path / "outputs/r/metrics.csv").open() as file:
        logged = {int(row["step"]): float(row["lr"]) for row in csv.DictReader(file) if row["lr"]}
    found = rows(said(capsys, *SMALL, "run_name=r", *words))
    assert {1, 2, 6, 10, 20} <= found.keys() <= logged.keys()
    for step, (rate, _) in found.items():
        assert rate == pytest.approx(logged[step], rel=5e-3), "three digits are shown"


@pytest.mark.parametrize("word", ["optim.warmup_steps=2000", "optim.decay_steps=1700 optim.warmup_steps=80"])
def test_what_a_run_refuses_is_refused(word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["optim.schedule=warmup_stable_decay", "optim.decay_steps=10", *word.split()]
    assert "optim.warmup_steps" in said(capsys, *LONG, *words, code=2)


def test_what_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = said(capsys, *LONG, "optim.warmup_steps=500", "optim.lr=3e-3")
    assert "gpt2: 1,760 steps of 524,288 tokens, 922,746,880 tokens in all" in text
    assert "cosine: peak 0.003 after 500 steps, 0.0003 at the end" in text
    assert rows(text)[501] == (3e-3, "cosine begins")
    assert "      1,760     923 M   3.00e-04" in text
    words = ["optim.warmup_steps=0", "optim.schedule=warmup_stable_decay", "optim.decay_steps=760"]
    phases = {step: phase for step, (_, phase) in rows(said(capsys, *LONG, *words)).items()}
    assert [phases[step] for step in (1, 880, 1001, 1760)] == ["stable begins", "stable", "decay begins", "decay"]


def test_epochs_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Some text of few words. " * 2000)
    words = [
        "data=text_files", "data.train_files=[a.txt]", "data.val_fraction=0.1", "data.tokenizer=bytes",
        "trainer.max_steps=null", "trainer.max_epochs=2", "optim.warmup_steps=1",
    ]  # fmt: skip
    (config,) = compose.preflight([*SMALL, "run_name=r", *words])
    steps = resolve_length(config).config.trainer.max_steps
    assert steps > 10
    assert max(rows(said(capsys, *SMALL, "run_name=r", *words))) == steps


def test_a_sweep_has_a_curve_a_job(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = said(capsys, "-m", *LONG, "optim.schedule=cosine,linear", "--picture", "p/a.png")
    assert all(words in text for words in ("\ncosine: peak", "\nlinear: peak", "picture: p/a.png"))
    image = imread(tmp_path / "p" / "a.png")
    assert image.shape[1] == 1200
    assert (image[..., :3] < 0.5).any(), "something is drawn"


def test_ends(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert said(capsys, "optim.lrr=3", "trainer.max_stepz=4", code=2).count("error: ") == 2
    (tmp_path / "file").touch()
    assert "file" in said(capsys, *LONG, "--picture", "file/a.png", code=1)
    with pytest.raises(SystemExit) as ended:
        schedule.main(["--help"])
    assert ended.value.code == 0
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert 'pip install -e ".[bench]"' in said(capsys, *LONG)
