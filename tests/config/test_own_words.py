"""Commands made of what was typed: they compose, and they continue."""

import shlex
from pathlib import Path

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config import own_words
from gpt2_fp8.config.own_words import RUN, Typed, continue_command, twice_as_long
from gpt2_fp8.config.run_length import PATIENCE, limits


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("text\n")


def typed(line):
    return Typed(tuple(shlex.split(line)), Path.cwd())


def test_a_run_is_continued_where_it_is(tmp_path):
    line = typed("model=gpt2 run_name=x init_from=y trainer.max_steps=5")
    folder = tmp_path / "outputs/x"
    assert continue_command(line, folder) == f"{RUN} model=gpt2 trainer.max_steps=5 run_name=x ckpt_path=last"
    longer = continue_command(line, folder, ["trainer.max_steps=10"])
    assert longer == f"{RUN} model=gpt2 run_name=x ckpt_path=last trainer.max_steps=10"
    assert continue_command(typed(""), tmp_path / "own place") == f"{RUN} 'hydra.run.dir=own place' ckpt_path=last"


KEPT = ["optim.lr=0.0002", "optim.schedule=constant", "optim.min_lr_ratio=1"]


@pytest.mark.parametrize(
    ("line", "ended_by", "steps", "words"),
    [
        ("", "trainer.max_steps", 300, ["trainer.max_steps=600", *KEPT]),
        ("trainer.max_time=00:15:40:05", "trainer.max_time", 7, ["trainer.max_time=01:07:20:10"]),
        ("callbacks.early_stopping_patience=2", PATIENCE, 300, ["trainer.max_steps=600", f"{PATIENCE}=4", *KEPT]),
        ("trainer.max_epochs=3 trainer.max_steps=null", "trainer.max_epochs", 50, ["trainer.max_epochs=6", *KEPT]),
        ("optimizer=muon optimizer.matrix_lr=0.02 optim.schedule=warmup_stable_decay optim.decay_steps=30",
         "trainer.max_steps", 300,
         ["trainer.max_steps=600", KEPT[0], "optimizer.matrix_lr=0.002", *KEPT[1:], "optim.decay_steps=null"]),
        ("optim.embedding_lr=0.02 optim.scalar_lr=0.01", "trainer.max_steps", 300,
         ["trainer.max_steps=600", KEPT[0], "optim.embedding_lr=0.002", "optim.scalar_lr=0.001", *KEPT[1:]]),
        ("optim.min_lr_ratio=0", "trainer.max_steps", 300, ["trainer.max_steps=600"]),  # at a rate of 0
    ],
)  # fmt: skip
def test_twice_as_long_goes_on(line, ended_by, steps, words):
    (config,) = preflight(shlex.split(line))
    assert twice_as_long(config, ended_by, steps) == words
    command = continue_command(typed(line), Path.cwd() / "outputs/x", words)
    assert command.startswith(f"{RUN} ")
    (longer,) = preflight(shlex.split(command)[3:])
    assert all(end > steps for end in limits(longer).values())


@pytest.mark.parametrize(
    ("folder", "saved", "in_sweep", "said"),
    [
        ("outputs/x", True, False, "run_name=x ckpt_path=last continues"),
        ("my runs/x", True, False, "'hydra.run.dir=my runs/x' ckpt_path=last continues"),
        ("outputs/x", False, False, "nothing was saved, and the same command begins again"),
        ("outputs/x/3", True, True, "run_name=x ckpt_path=last continues"),
        ("sweeps/x/3", True, True, "hydra.sweep.dir=sweeps/x ckpt_path=last continues"),
        ("outputs/x/of_a", True, True, "hydra.sweep.dir=outputs/x ckpt_path=last continues"),
        ("outputs/planned/a/3", True, True, "hydra.sweep.dir=outputs/planned ckpt_path=last continues"),
    ],
)
def test_how_a_run_that_has_ended_early_goes_on(tmp_path, folder, saved, in_sweep, said):
    own_words.write_plan(tmp_path / "outputs/planned", [["seed=3"]])
    assert own_words.going_on(tmp_path / folder, tmp_path, saved, in_sweep) == said
