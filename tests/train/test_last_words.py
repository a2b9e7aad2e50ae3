"""What the log says at the end, from summaries that are known."""

from pathlib import Path

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.own_words import Typed
from gpt2_fp8.runtime import programs
from gpt2_fp8.train.last_words import lines, result
from gpt2_fp8.train.summary import Checkpoints, Precision, Summary


def ended(**values):
    known = {
        "status": "completed", "steps": 300, "duration_s": 83.4, "last_train_loss": 2.23118, "last_val_loss": 2.48709,
        "best_val_loss": 2.48709, "best_val_loss_step": 300, "tokens_per_second": 12_345.4,
        "ended_by": "trainer.max_steps", "checkpoint": Checkpoints(last="somewhere"),
    }  # fmt: skip
    return Summary(precision=Precision(asked="fp32"), recipe=None, **(known | values))


RESULT = (
    "completed 300 steps in 1 min 23 s: train loss 2.2312, validation 2.4871 (best 2.4871 at step 300), 12,345 tok/s"
)
KEPT = "optim.lr=0.0002 optim.schedule=constant optim.min_lr_ratio=1"
NONE = dict.fromkeys(("last_train_loss", "last_val_loss", "best_val_loss", "tokens_per_second"))


@pytest.mark.parametrize(
    ("values", "first_step", "said"),
    [
        ({}, 0, RESULT),
        ({}, 200, RESULT.replace("steps in", "steps, 100 of them in")),
        (
            {"best_val_loss": 2.4, "best_val_loss_step": 1200},
            0,
            RESULT.replace("2.4871 at step 300", "2.4000 at step 1,200"),
        ),
        ({"best_val_loss": None}, 0, RESULT.replace(" (best 2.4871 at step 300)", "")),
        ({"last_val_loss": None}, 0, RESULT.replace("validation 2.4871 (best 2.4871 at step 300), ", "")),
        ({**NONE, "status": "failed", "steps": 0, "duration_s": 0.52}, 0, "failed: 0 steps in 0.5 s"),
        (
            {"status": "stopped", "steps": 19_073, "duration_s": 9060},
            0,
            RESULT.replace("completed 300 steps in 1 min 23 s", "stopped 19,073 steps in 2 h 31 min"),
        ),
    ],
)
def test_the_result(values, first_step, said):
    assert result(ended(**values), first_step) == said


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(place, summary, *words, typed=True, folder="outputs/x", first_step=0):
    (config,) = preflight(list(words))
    line = Typed(words, place) if typed else None
    return list(lines(summary, config, place / folder, line, first_step))[1:]


def test_a_completed_run_says_where_its_curves_are_and_what_is_next(place, monkeypatch):
    monkeypatch.setattr(programs, "names", lambda: ["run", "export", "generate"])
    assert said(place, ended(), "seed=1", "run_name=x") == [
        "summary: outputs/x/summary.json",
        "curves: tensorboard --logdir outputs/x",
        "next: python -m gpt2_fp8.run seed=1 run_name=x ckpt_path=last trainer.max_steps=600 " + KEPT,
        "next: python -m gpt2_fp8.export outputs/x exported",
        'next: python -m gpt2_fp8.generate ckpt_path=outputs/x prompt="Once upon a time"',
    ]


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "line of torchrun",
        ),
        ({}, "line"),  # what sets the variables is not known
    ],
)
def test_a_run_of_several_processes_goes_on_by_the_line_that_has_started_them(place, monkeypatch, variables, line):
    """python -m gpt2_fp8.run would go on in a single one."""
    known = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (known | variables).items():
        monkeypatch.setenv(name, value)
    words = ["seed=1", "micro_batch_size=1", "trainer.accelerator=cpu"]
    assert said(place, ended(), *words)[2] == (
        f"next: the same {line}, with run_name=x ckpt_path=last trainer.max_steps=600 {KEPT}"
    )
    assert said(place, ended(status="stopped", steps=7), *words)[2:] == [
        f"next: the same {line}, with run_name=x ckpt_path=last"
    ]


def test_only_programs_that_exist_are_named(place, monkeypatch):
    monkeypatch.setattr(programs, "names", lambda: ["run"])
    assert len(said(place, ended())) == 3


def test_a_model_that_no_class_of_hugging_faces_computes_is_not_exported(place):
    assert not any("export" in line for line in said(place, ended(), "model.mlp=swiglu"))


@pytest.mark.parametrize("status", ["stopped", "failed", "data_lost", "diverged"])
def test_a_run_that_was_not_completed_is_continued(place, status):
    *_, last = said(place, ended(status=status, steps=7), "seed=1")
    assert last == "next: python -m gpt2_fp8.run seed=1 run_name=x ckpt_path=last"
    assert len(said(place, ended(status=status, steps=7))) == 3


def test_without_a_checkpoint_nothing_is_next(place):
    assert len(said(place, ended(checkpoint=Checkpoints()))) == 2


def test_a_job_of_a_sweep_has_no_command_of_its_own(place):
    assert len(said(place, ended(), typed=False)) == 2


def test_a_run_that_did_nothing_has_no_curves(place):
    assert said(place, ended(status="refused", steps=0)) == ["summary: outputs/x/summary.json"]
    assert len(said(place, ended(status="stopped", steps=200), first_step=200)) == 1


def test_curves_only_where_they_are(place):
    assert not any("curves" in line for line in said(place, ended(), "logger=csv"))
    assert said(place, ended(), "debug=fdr") == ["summary: outputs/x/summary.json"]


def test_a_folder_elsewhere_is_quoted(place):
    found = said(place, ended(), folder="my runs/x")
    assert found[1] == "curves: tensorboard --logdir 'my runs/x'"
    assert "'hydra.run.dir=my runs/x'" in found[2]
    far = said(place, ended(), folder=Path("/far/x"))
    assert far[1] == "curves: tensorboard --logdir /far/x"
