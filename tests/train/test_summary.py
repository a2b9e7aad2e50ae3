"""summary.json: every end has one, and it is JSON."""

import json
import os
import subprocess
import sys
import time
from datetime import datetime

import pytest

from gpt2_fp8.config.errors import DataSourceLost, Diverged, RunError, Stopped, UserError
from gpt2_fp8.train.summary import DivergenceReport, Precision, Summary

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


def summary():
    return Summary(precision=Precision(asked="fp8_hybrid", ran="bf16", reason="no FP8 on sm_80"), recipe="delayed")


def strict(text):
    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(("error", "status", "code", "message"), ENDS, ids=[end[1] for end in ENDS])
def test_every_end(tmp_path, error, status, code, message):
    report = summary()
    assert report.finish(error) == code
    written = strict(report.write(tmp_path).read_text())
    assert (written["status"], written["exit_code"], written["message"]) == (status, code, message)
    assert datetime.fromisoformat(written["started"]) <= datetime.fromisoformat(written["ended"])
    assert written["started"].endswith("+00:00")
    assert 0 <= written["duration_s"] < 60


def test_fields(tmp_path):
    report = summary()
    report.last_val_loss = float("nan")
    report.data["lanes"] = ({"loss": float("-inf")}, 1.5)
    report.divergence = DivergenceReport(events=[{"step": 3, "what": "skip", "reason": "why"}], skipped=1)
    report.checkpoint.last = "outputs/a/checkpoints/step-00000003"
    written = strict(report.write(tmp_path).read_text())
    assert written["last_val_loss"] is None
    assert written["data"] == {"lanes": [{"loss": None}, 1.5]}
    told = {"asked": "fp8_hybrid", "ran": "bf16", "reason": "no FP8 on sm_80", "last_in_bf16": 0}
    assert written["precision"] == told
    event = {"step": 3, "what": "skip", "reason": "why"}
    assert written["divergence"] == {"events": [event], "reruns": 0, "skipped": 1, "rollbacks": 0}
    assert written["checkpoint"] == {"last": "outputs/a/checkpoints/step-00000003", "best": None}
    assert written["versions"].keys() == {"gpt2_fp8", "code", "python", "torch", "lightning", "transformer_engine"}
    assert written["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert written["command"] == sys.argv
    assert written["status"] == "failed"  # nobody said that it ended well
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_failed_write_leaves_the_former_one(tmp_path, monkeypatch):
    summary().write(tmp_path)
    before = (tmp_path / "summary.json").read_text()

    def full(*_):
        raise OSError("full")

    monkeypatch.setattr(os, "replace", full)
    report = summary()
    report.finish()
    with pytest.raises(OSError, match="full"):
        report.write(tmp_path)
    assert (tmp_path / "summary.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_the_duration_does_not_follow_the_wall_clock(monkeypatch):
    report = summary()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    report.finish()
    assert 0 <= report.duration_s < 60


def test_it_imports_neither_torch_nor_lightning():
    code = "import sys, gpt2_fp8.train.summary; print([m for m in ('torch', 'lightning', 'hydra') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
