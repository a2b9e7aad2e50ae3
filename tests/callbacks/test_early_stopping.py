"""Early stopping by a key: what ends a run, what it says, and that a resume counts every validation once.

Under several ranks: tests/train/test_fsdp.py.
"""

import json
import os
import re
import signal

import pytest

from gpt2_fp8.checkpoint.files import read
from gpt2_fp8.config.errors import Stopped
from gpt2_fp8.reports import sweep
from gpt2_fp8.train import ranking
from tests.runs import checkpoint, metrics, record_steps, summary, train, train_until

PATIENCE = "callbacks.early_stopping_patience"
# No loss is lower by so much but the first; it validates every second step, and stops at the third validation.
WORDS = ["trainer.val_check_interval=2", "callbacks.early_stopping_min_delta=99", f"{PATIENCE}=2"]
COUNTED = ("wait_count", "best_score", "patience", "step")


def state(folder, step):
    (found,) = (value for name, value in read(checkpoint(folder, step))["callbacks"].items() if "EarlyStop" in name)
    return found


def test_a_run_ends_and_says_why_and_goes_on_with_more_patience(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    steps, folder = record_steps(monkeypatch), tmp_path / "sweep/0"
    train(folder, *WORDS)
    told = summary(folder)
    assert (told["status"], told["exit_code"], told["ended_by"], told["steps"]) == ("completed", 0, PATIENCE, 6)
    assert list(metrics(folder)["val_loss"]) == [2, 4, 6]
    assert any(PATIENCE in line and "step 6 is the last" in line for line in caplog.messages)
    assert any(re.match(rf"completed 6 steps in .*, ended by {PATIENCE}:", line) for line in caplog.messages)
    (job,) = sweep.read(tmp_path / "sweep")
    assert (job.status, f"ended by {PATIENCE}" in job.message) == ("completed", True)
    train(folder, *WORDS, "ckpt_path=last")
    assert (len(steps), summary(folder)["ended_by"]) == (6, PATIENCE), "nothing is left of its patience"
    train(folder, *WORDS, "ckpt_path=last", f"{PATIENCE}=3")
    assert (summary(folder)["steps"], summary(folder)["ended_by"]) == (8, PATIENCE)
    train(tmp_path / "whole", *WORDS, f"{PATIENCE}=3")
    assert steps[:8] == steps[8:]
    train(tmp_path / "both", *WORDS, "trainer.max_steps=6")
    assert summary(tmp_path / "both")["ended_by"] == PATIENCE, "more steps alone would end at once"
    own, whole = state(folder, 8), state(tmp_path / "whole", 8)
    assert [own[name] for name in COUNTED] == [whole[name] for name in COUNTED]


def test_a_validation_that_only_a_note_tells_of_is_counted(tmp_path):
    """Step 4 is saved, then validated without being the best, and the run is killed in step 6."""
    train_until(5, tmp_path, *WORDS)
    assert state(tmp_path, 4)["step"] == 2
    train(tmp_path, *WORDS, "ckpt_path=last")
    assert (summary(tmp_path)["steps"], summary(tmp_path)["ended_by"]) == (6, PATIENCE)
    assert state(tmp_path, 6)["wait_count"] == 2


def test_a_validation_that_a_signal_leaves_in_its_ranking_is_made_again_and_counted_once(tmp_path, monkeypatch):
    """The step was not saved before; the validation's loss is noted only after all that follows it."""
    (tmp_path / "items.jsonl").write_text(json.dumps({"ctx": "import", "endings": ["os", "x"], "label": 0}))
    words = [*WORDS, f"callbacks.ranking={tmp_path / 'items.jsonl'}", "callbacks.checkpoint_every_n_steps=9"]
    original, count = ranking.log_likelihoods, iter(range(9))

    def interrupted(*arguments, **options):
        if next(count) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **options)

    monkeypatch.setattr(ranking, "log_likelihoods", interrupted)
    with pytest.raises(Stopped):
        train(tmp_path / "run", *words)
    assert (state(tmp_path / "run", 4)["wait_count"], summary(tmp_path / "run")["steps"]) == (1, 4)
    train(tmp_path / "run", *words, "ckpt_path=last")
    assert (state(tmp_path / "run", 6)["wait_count"], summary(tmp_path / "run")["steps"]) == (2, 6)
    assert list(metrics(tmp_path / "run")["ranking/acc"]) == [2, 4, 6]
