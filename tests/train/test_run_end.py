"""The end of a run, as its summary, its error and the log's last lines tell it."""

import json
import sys
import time
from datetime import datetime

import pytest

from gpt2_fp8.callbacks.progress import LogLine
from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import DataSourceLost, Diverged, RunError, Stopped, UserError
from gpt2_fp8.train.run_end import RunEnd, Summary
from tests.runs import summary, train


def ended(**values):
    return Summary(precision={"asked": "fp32"}, **values)


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
    events = [{"step": 3, "what": "skip", "reason": "why"}]
    report.divergence = {"events": events, "reruns": 0, "skipped": 1, "rollbacks": 0}
    text = report.write(tmp_path).read_text()
    written = json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
    assert written["last_val_loss"] is None
    assert written["data"] == {"lanes": [{"loss": None}, 1.5]}
    event = {"step": 3, "what": "skip", "reason": "why"}
    assert written["divergence"] == {"events": [event], "reruns": 0, "skipped": 1, "rollbacks": 0}
    assert written["versions"].keys() == {"gpt2_fp8", "code", "python", "torch", "lightning", "transformer_engine"}
    assert written["command"] == sys.argv


def test_a_summary_that_cannot_be_written_changes_no_end(tmp_path, caplog):
    (config,) = preflight([])
    end = RunEnd(config, tmp_path / "no/such/folder", tmp_path)
    end.first_step = 0
    end.close(None)
    assert [message for message in caplog.messages if "the summary cannot be written" in message]


def test_a_run_that_goes_on_has_no_summary_until_its_end(tmp_path, monkeypatch):
    """A kill would leave it: a comparison would take the run as completed."""
    folder = tmp_path / "a"
    train(folder, "trainer.max_steps=2")
    there = {}

    def look(self, trainer, *_):
        there[trainer.global_step] = (folder / "summary.json").exists()

    monkeypatch.setattr(LogLine, "on_train_batch_start", look)
    train(folder, "ckpt_path=last", "trainer.max_steps=4")
    assert there == {2: True, 3: False}
    assert summary(folder)["steps"] == 4
