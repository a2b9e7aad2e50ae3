"""The end of a run, as its summary and its error tell it."""

import pytest

from gpt2_fp8.compose import preflight
from gpt2_fp8.config.errors import DataSourceLost, RunError, Stopped
from gpt2_fp8.config.own_words import Typed
from gpt2_fp8.runtime.slurm import LeftToRankZero, Requeued
from gpt2_fp8.train.context import RunContext
from tests.runs import summary

NOTHING = "nothing was saved, and the same command begins again"
QUEUED = "stopped by signal 10; SLURM job 4242 is in the queue again"
NAMED = "run_name=2026-11-23_07 ckpt_path=last continues"


@pytest.mark.parametrize(
    ("error", "saved", "said"),
    [
        (Stopped(2), False, f"stopped by signal 2; {NOTHING}"),
        (Stopped(2), True, f"stopped by signal 2; {NAMED}"),
        (DataSourceLost("gone", lead="\nwhen it answers: "), True, f"gone\nwhen it answers: {NAMED}"),
        (RunError("a fault"), True, "a fault"),
        (Requeued(10, "4242"), False, f"{QUEUED}: {NOTHING}"),
        (Requeued(10, "4242"), True, f"{QUEUED}: {NAMED}"),
        (LeftToRankZero(10), False, "stopped by signal 10; rank 0 says how it goes on"),
    ],
    ids=["nothing", "saved", "lost", "a fault", "requeued, nothing", "requeued, saved", "another rank"],
)  # fmt: skip
def test_an_early_end_says_what_was_saved_and_of_which_run(tmp_path, monkeypatch, error, saved, said):
    """The run has no name of its own: its folder has one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs/2026-11-23_07"
    (folder / "checkpoints").mkdir(parents=True)
    if saved:
        (folder / "checkpoints/step-00000004").mkdir()
    (config,) = preflight([])
    RunContext(config, folder, [], Typed((), tmp_path)).close(error)
    assert str(error) == said
    assert summary(folder)["message"] == said
