"""`trainer.max_time`, by a clock on which every step takes a second. Real runs, in this process."""

from types import SimpleNamespace

import pytest

from gpt2_fp8.callbacks import graceful_stop
from gpt2_fp8.callbacks.graceful_stop import TimeLimit
from gpt2_fp8.checkpoint.files import read
from gpt2_fp8.runtime import collectives
from tests.runs import assert_same_checkpoint, checkpoint, metrics, record_steps, summary, train

FEW = ["trainer.val_check_interval=100", "callbacks.checkpoint_every_n_steps=0", "trainer.log_every_n_steps=12"]


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by a second whenever a step of a run has ended."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    ended = TimeLimit.on_train_batch_end

    def on_train_batch_end(self, *arguments):
        clock.now += 1
        ended(self, *arguments)

    monkeypatch.setattr(graceful_stop, "time", clock)
    monkeypatch.setattr(TimeLimit, "on_train_batch_end", on_train_batch_end)
    return clock


def test_a_run_ends_with_its_time_and_goes_on_with_more(tmp_path, clock, monkeypatch, caplog):
    """It ends as a last step does; time counts over resumes; the rates and the result are those of an undivided run."""
    steps = record_steps(monkeypatch)
    train(tmp_path / "run", *FEW, "trainer.max_time=00:00:00:05")
    told = summary(tmp_path / "run")
    assert (told["status"], told["exit_code"], told["ended_by"]) == ("completed", 0, "trainer.max_time")
    assert told["steps"] == 5
    assert told["checkpoint"]["last"].endswith("step-00000005")
    assert told["last_val_loss"] == metrics(tmp_path / "run")["val_loss"][5]
    assert list(metrics(tmp_path / "run")["train_loss"]) == [1, 5], "the last step is logged"

    caplog.set_level("INFO")
    train(tmp_path / "run", *FEW, "trainer.max_time=00:00:00:05", "ckpt_path=last")
    assert len(steps) == 5, "nothing is left of its time"
    assert summary(tmp_path / "run")["ended_by"] == "trainer.max_time"
    assert "already complete: 5 s of trainer.max_time were over at the checkpoint" in caplog.messages

    train(tmp_path / "run", *FEW, "trainer.max_time=00:00:00:08", "ckpt_path=last")
    assert [step for step, *_ in steps] == list(range(1, 9)), "three seconds more, and not eight"
    train(tmp_path / "whole", *FEW, "callbacks.checkpoint_every_n_steps=8")
    assert summary(tmp_path / "whole")["ended_by"] == "trainer.max_steps"
    assert steps[8:16] == steps[:8]
    assert_same_checkpoint(checkpoint(tmp_path / "run", 8), checkpoint(tmp_path / "whole", 8))
    assert read(checkpoint(tmp_path / "whole", 8))["callbacks"]["TimeLimit"] == {"seconds": 8.0}, "without a limit too"


def trainer():
    return SimpleNamespace(should_stop=False, is_global_zero=True, global_step=1)


def test_a_rank_stops_where_another_finds_the_time_over(clock, monkeypatch):
    limit, stopped = TimeLimit(100), trainer()
    limit.on_train_start(stopped, None)
    limit.on_train_batch_end(stopped)
    assert not stopped.should_stop
    monkeypatch.setattr(collectives, "largest", lambda own: max(own, 1))
    limit.on_train_batch_end(stopped)
    assert stopped.should_stop


def test_time_counts_before_anyone_limits_it(clock):
    before, after = TimeLimit(None), TimeLimit(6)
    before.on_train_start(trainer(), None)
    clock.now += 4
    after.load_state_dict(before.state_dict())
    after.on_train_start(trainer(), None)
    clock.now += 1
    assert after.trained == 5


def test_a_rollback_does_not_give_time_back(clock):
    limit = TimeLimit(100)
    limit.load_state_dict({"seconds": 10.0})
    limit.on_train_start(trainer(), None)
    saved = limit.state_dict()
    clock.now += 30
    limit.load_state_dict(saved)
    limit.on_train_start(trainer(), None)
    assert limit.trained == 40
