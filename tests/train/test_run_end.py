"""The end of a run, as its summary, its error and the log's last lines tell it."""

import json
import logging
import sys
import time
from datetime import datetime

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import DataSourceLost, Diverged, RunError, Stopped, UserError
from gpt2_fp8.config.own_words import Typed
from gpt2_fp8.runtime.slurm import LeftToRankZero, Requeued
from gpt2_fp8.train.run_end import Checkpoints, DivergenceReport, Precision, RunEnd, Summary
from tests.runs import summary

KEPT = "optim.lr=0.0002 optim.schedule=constant optim.min_lr_ratio=1"


def ended(**values):
    known = {
        "status": "completed", "steps": 300, "duration_s": 83.4, "last_train_loss": 2.23118, "last_val_loss": 2.48709,
        "best_val_loss": 2.48709, "best_val_loss_step": 300, "tokens_per_second": 12_345.4,
        "ended_by": "trainer.max_steps", "checkpoint": Checkpoints(last="somewhere"),
    }  # fmt: skip
    return Summary(precision=Precision(asked="fp32"), recipe=None, **(known | values))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---- summary.json ----------------------------------------------------------------------------------------------------

ENDS = [
    (None, "completed", 0, ""),
    (UserError.of("bad lr", "use another"), "refused", 2, "error: bad lr\n  fix: use another"),
    (Diverged("loss is nan"), "diverged", 3, "loss is nan"),
    (DataSourceLost("hub"), "data_lost", 4, "hub"),
    (Stopped(15), "stopped", 143, "stopped by signal 15"),
    (RunError("disk"), "failed", 1, "disk"),
    (KeyboardInterrupt(), "interrupted", 130, "interrupted before it could save"),
    (ZeroDivisionError("x"), "failed", 1, "ZeroDivisionError: x"),
]


@pytest.mark.parametrize(("error", "status", "code", "message"), ENDS, ids=[end[1] for end in ENDS])
def test_every_end(tmp_path, monkeypatch, error, status, code, message):
    report = ended()
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the duration does not follow the wall clock
    assert report.finish(error) == code
    report.write(tmp_path)
    written = summary(tmp_path)
    assert (written["status"], written["exit_code"], written["message"]) == (status, code, message)
    assert datetime.fromisoformat(written["started"]) <= datetime.fromisoformat(written["ended"])
    assert 0 <= written["duration_s"] < 60


def test_it_is_json_without_numbers_that_are_not_finite(tmp_path):
    report = ended(status="failed", last_val_loss=float("nan"), data={"lanes": ({"loss": float("-inf")}, 1.5)})
    report.divergence = DivergenceReport(events=[{"step": 3, "what": "skip", "reason": "why"}], skipped=1)
    text = report.write(tmp_path).read_text()
    written = json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
    assert written["last_val_loss"] is None
    assert written["data"] == {"lanes": [{"loss": None}, 1.5]}
    event = {"step": 3, "what": "skip", "reason": "why"}
    assert written["divergence"] == {"events": [event], "reruns": 0, "skipped": 1, "rollbacks": 0}
    assert written["versions"].keys() == {"gpt2_fp8", "code", "python", "torch", "lightning", "transformer_engine"}
    assert written["command"] == sys.argv


# ---- an early end ----------------------------------------------------------------------------------------------------

NOTHING = "nothing was saved, and the same command begins again"
QUEUED = "stopped by signal 10; SLURM job 4242 is in the queue again"
NAMED = "run_name=2026-11-23_07 ckpt_path=last continues"


@pytest.mark.parametrize(
    ("error", "saved", "said"),
    [
        (Stopped(2), False, f"stopped by signal 2; {NOTHING}"),
        (Stopped(2), True, f"stopped by signal 2; {NAMED}"),
        (DataSourceLost("gone", lead="\nwhen it answers: "), True, f"gone\nwhen it answers: {NAMED}"),
        (Requeued(10, "4242"), True, f"{QUEUED}: {NAMED}"),
        (LeftToRankZero(10), False, "stopped by signal 10; rank 0 says how it goes on"),
    ],
    ids=["nothing", "saved", "lost", "requeued", "another rank"],
)
def test_an_early_end_says_what_was_saved_and_of_which_run(place, error, saved, said):
    """The run has no name of its own: its folder has one."""
    folder = place / "outputs/2026-11-23_07"
    (folder / "checkpoints").mkdir(parents=True)
    if saved:
        (folder / "checkpoints/step-00000004").mkdir()
    (config,) = preflight([])
    RunEnd(config, folder, place, [], Typed((), place)).close(error)
    assert str(error) == said
    assert summary(folder)["message"] == said


# ---- the log's last lines --------------------------------------------------------------------------------------------


def said(place, done, *words, typed=True, folder="outputs/x", first_step=0):
    (config,) = preflight(list(words))
    end = RunEnd(config, place / folder, place, words, Typed(words, place) if typed else None)
    end.summary, end.first_step = done, first_step
    return list(end._last_lines())[1:]


def test_a_completed_run_says_where_its_curves_are_and_what_is_next(place):
    shown = said(place, ended(), "seed=1", "run_name=x")
    assert shown == [
        "summary: outputs/x/summary.json",
        "curves: tensorboard --logdir outputs/x",
        "next: python -m gpt2_fp8.run seed=1 run_name=x ckpt_path=last trainer.max_steps=600 " + KEPT,
        "next: python -m gpt2_fp8.export outputs/x exported",
        'next: python -m gpt2_fp8.generate ckpt_path=outputs/x prompt="Once upon a time"',
    ]
    assert said(place, ended(), "debug=fdr") == shown[:1]
    assert len(said(place, ended(), typed=False)) == 2, "a job of a sweep has no command of its own"
    elsewhere = said(place, ended(), folder="my runs/x")
    assert elsewhere[1] == "curves: tensorboard --logdir 'my runs/x'"
    assert "'hydra.run.dir=my runs/x'" in elsewhere[2]


@pytest.mark.parametrize("status", ["stopped", "diverged"])
def test_a_run_that_was_not_completed_is_continued(place, status):
    assert said(place, ended(status=status, steps=7), "seed=1")[2:] == [
        "next: python -m gpt2_fp8.run seed=1 run_name=x ckpt_path=last"
    ]
    assert len(said(place, ended(status=status, steps=200), first_step=200)) == 1, "it did nothing"


def test_a_run_of_several_processes_goes_on_by_the_line_that_has_started_them(place, monkeypatch):
    """python -m gpt2_fp8.run would go on in a single one."""
    known = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (known | {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    words = ["seed=1", "micro_batch_size=1", "trainer.accelerator=cpu"]
    assert "the same line of torchrun, with run_name=x ckpt_path=last" in said(place, ended(), *words)[2]


def test_a_summary_that_cannot_be_written_changes_no_end(place, monkeypatch, caplog):
    (config,) = preflight([])
    end = RunEnd(config, place / "no/such/folder", place)
    caplog.set_level(logging.INFO)
    end.first_step = 0
    end.close(None)
    assert [message for message in caplog.messages if "the summary cannot be written" in message]
