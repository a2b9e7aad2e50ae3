"""The ends of jobs on a cluster that keeps no accounts, with commands that stand for SLURM's."""

import os

import pytest
from submitit import SlurmJob
from submitit.slurm.slurm import SlurmInfoWatcher

from gpt2_fp8.compose import slurm_ends


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """What `squeue` lists, in a file."""
    listed = tmp_path / "listed"
    listed.write_text("7_0 RUNNING\n7_1 CONFIGURING\n9 PENDING\n")
    commands = {"squeue": f"cat {listed}", "sacct": "echo Slurm accounting storage is disabled >&2; exit 1"}
    for name, does in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(SlurmJob, "watcher", SlurmJob.watcher)  # put back at the end
    return listed


def test_a_job_that_has_left_the_queue_is_over(squeue):
    said = slurm_ends.watch()
    assert said == "sacct: Slurm accounting storage is disabled; so the ends of jobs are seen by squeue"
    watcher = SlurmJob.watcher
    assert not any(watcher.is_done(job, "force") for job in ("7_0", "7_1", "9"))
    squeue.write_text("7_1 CANCELLED\n9 PENDING\n")
    assert not watcher.is_done("7_0"), "the queue is not asked all the time"
    assert [watcher.is_done(job, "force") for job in ("7_0", "7_1", "9")] == [True, True, False]


def test_a_queue_that_cannot_be_seen_says_nothing(squeue):
    slurm_ends.watch()
    (squeue.parent / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert SlurmJob.watcher.get_state("7_0") == "UNKNOWN"
    assert not SlurmJob.watcher.is_done("7_0", "force")


def test_a_cluster_with_accounts_is_asked_as_ever(squeue):
    (squeue.parent / "sacct").write_text("#!/bin/sh\nexit 0\n")
    assert slurm_ends.watch() is None
    assert type(SlurmJob.watcher) is SlurmInfoWatcher
