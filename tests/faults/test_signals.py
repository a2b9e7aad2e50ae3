"""Faults 44 to 46: SLURM's signals, those in a wait for text and in a save, and Ctrl-C: what is saved, and resumed."""

import os
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from gpt2_fp8.checkpoint import files, pointers
from gpt2_fp8.config.errors import Stopped
from gpt2_fp8.data import workers as workers_module
from gpt2_fp8.data.workers import UnitPool
from gpt2_fp8.runtime import slurm
from tests import ranks
from tests.callbacks.test_resume import assert_same
from tests.callbacks.tiny_run import At, kill, run
from tests.data.corpora import write_jsonl
from tests.runs import (
    SMALL,
    assert_same_checkpoint,
    checkpoint,
    forked,
    metrics,
    record_steps,
    summary,
    train,
    train_until,
)

SLURM = {
    "SLURM_NTASKS": "1", "SLURM_JOB_ID": "4242", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_JOB_NAME": "train",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


def continues_like(whole, folder):
    """Continue, and compare: every logged value, the pointers, and the last checkpoint bit for bit."""
    run(folder)
    assert_same(folder, whole)


def last_step(folder):
    """The step that `last` names, once everything that a thread is writing is there."""
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoints"):
            thread.join(0.5)  # it waits for more when it is done
    return files.read(pointers.resolve("last", folder / "checkpoints"))["global_step"]


# ---- SLURM -------------------------------------------------------------------------------------------------------


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A job of SLURM's, with a `scontrol` that writes down how it is called; returns where."""
    folder = tmp_path / "bin"
    folder.mkdir()
    calls = tmp_path / "calls"
    (folder / "scontrol").write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\nls {tmp_path}/checkpoints >> {calls}.saved || true\n'
    )
    (folder / "scontrol").chmod(0o755)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_has_trained", False)
    return calls


def requeue_at(step, folder):
    return run(folder, callbacks=[At("on_train_batch_start", step, kill(signal.SIGUSR1))])


def test_44_slurm_requeues_once_what_is_saved(tmp_path, whole, scontrol):
    with pytest.raises(slurm.Requeued) as stopped:
        requeue_at(5, tmp_path)
    assert stopped.value.exit_code == 0
    assert scontrol.read_text() == "requeue 4242\n"
    assert "step-00000006" in Path(f"{scontrol}.saved").read_text()
    assert not list(tmp_path.glob("hpc_ckpt*")), "Lightning's own handler ran too"
    continues_like(whole, tmp_path)
    assert scontrol.read_text() == "requeue 4242\n"


def test_44_a_job_that_comes_to_its_limit_again_before_a_step_is_not_requeued(tmp_path, scontrol, monkeypatch):
    """It would do so for ever. Its first turn may have been slow: it had to compile, or to read text."""
    early = At("on_train_start", 0, kill(signal.SIGUSR1))
    with pytest.raises(slurm.Requeued):
        run(tmp_path, callbacks=[early])
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(Stopped) as stopped:
        run(tmp_path, callbacks=[early])
    assert stopped.value.exit_code == 128 + signal.SIGUSR1
    assert scontrol.read_text() == "requeue 4242\n"
    with pytest.raises(slurm.Requeued):
        requeue_at(1, tmp_path)
    assert scontrol.read_text() == "requeue 4242\n" * 2


PREEMPTED = "JobId=4242 JobState=RUNNING Requeue=1 Restarts=0 PreemptTime=2026-11-23T06:32:51 Command=/job.sh"


def says(scontrol, text):
    """`scontrol show` prints this; other calls are written down."""
    script = f'#!/bin/sh\n[ "$1" = show ] && echo "{text}" && exit\necho "$@" >> {scontrol}\n'
    (scontrol.parent / "bin/scontrol").write_text(script)


def test_44_a_preempted_job_is_requeued_with_its_last_step_saved(tmp_path, whole, scontrol):
    """In its grace time it gets SIGTERM, and SLURM does not requeue a job that has ended by then."""
    says(scontrol, PREEMPTED)
    with pytest.raises(slurm.Requeued):
        run(tmp_path, callbacks=[At("on_train_batch_start", 5, kill(signal.SIGTERM))])
    assert scontrol.read_text() == "requeue 4242\n"
    continues_like(whole, tmp_path)


@pytest.mark.parametrize(
    "text", [PREEMPTED.replace("2026-11-23T06:32:51", "None"), PREEMPTED.replace("RUNNING", "CANCELLED"), ""]
)
def test_44_a_job_that_is_not_preempted_is_not_requeued(text, scontrol):
    says(scontrol, text)
    assert slurm.requeue_or_stop(signal.SIGTERM).exit_code == 143
    assert not scontrol.exists()


def test_44_a_task_of_an_array_is_requeued_by_its_own_number_and_by_one_rank(scontrol, monkeypatch):
    """`srun --kill-on-bad-exit` would end rank 0 before it has asked SLURM, were the other's code not 0."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4000")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    assert slurm.requeue_or_stop(signal.SIGUSR1).exit_code == 0
    assert scontrol.read_text() == "requeue 4000_7\n"
    says(scontrol, PREEMPTED)
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        monkeypatch.setenv(name, "1")
    for name in ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "2")
    assert [slurm.requeue_or_stop(number).exit_code for number in (signal.SIGTERM, signal.SIGUSR1)] == [0, 0]
    assert scontrol.read_text() == "requeue 4000_7\n"


def test_44_a_job_that_slurm_starts_again_continues_by_itself(tmp_path):
    """As a job of a sweep, whose words submitit has stored: they have no `ckpt_path`."""
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    train_until(6, tmp_path / "killed")
    again = forked(*SMALL, f"hydra.run.dir={tmp_path / 'killed'}", cwd=tmp_path, code=2, **SLURM)
    assert "already holds a run" in again.stderr
    again = forked(*SMALL, f"hydra.run.dir={tmp_path / 'killed'}", cwd=tmp_path, **SLURM, SLURM_RESTART_COUNT="1")
    assert again.returncode == 0, again.stderr
    assert "SLURM has started this job again: it continues as by ckpt_path=last" in again.stdout
    assert "step-00000005 (step 5)" in again.stdout
    train(tmp_path / "whole")
    assert_same_checkpoint(*(checkpoint(tmp_path / name, 12) for name in ("killed", "whole")))


BATCH = SLURM | {"ENVIRONMENT": "BATCH"}  # what sbatch adds, for everything that its script starts


def test_44_a_run_without_a_name_goes_on_in_the_next_turn_of_its_job(tmp_path):
    first = forked(*SMALL, cwd=tmp_path, code=0, **BATCH)
    (folder,) = (tmp_path / "outputs").iterdir()
    assert f"SLURM may start this job again: run_name={folder.name}, which lasts as long as it" in first.stdout
    again = forked(*SMALL[::-1], cwd=tmp_path, code=0, **BATCH, SLURM_RESTART_COUNT="1")
    assert "already complete: step 12 of 12 is saved" in again.stdout
    assert list((tmp_path / "outputs").iterdir()) == [folder]


# ---- phases ------------------------------------------------------------------------------------------------------


def test_45_in_a_wait_for_a_unit(tmp_path, monkeypatch):
    """The real data: what blocks is the reading of a unit, in this process or in a worker. Nothing of it is lost."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(40):
        write_jsonl(folder / f"{i:02d}.jsonl", [f"<{i}>" + "abc" * 100])
    words = ["data=text_files", f"data.train_files=[{folder}/*.jsonl]", "data.tokenizer=bytes", "data.val_sequences=0",
             "data.cache_dir=null", "logger=none", "callbacks.checkpoint_every_n_steps=0"]  # fmt: skip
    monkeypatch.setattr(workers_module, "KEEP_BYTES", 0)
    steps = record_steps(monkeypatch)
    train(tmp_path / "whole", *words)
    whole = steps[:]
    for workers in (0, 1):
        run, steps[:] = tmp_path / f"run{workers}", []
        with monkeypatch.context() as patched:
            patched.setattr(UnitPool, "take", blocks_after(5, steps, UnitPool.take))
            with pytest.raises(Stopped) as stopped:
                train(run, *words, f"data.num_workers={workers}")
        assert stopped.value.exit_code == 143
        assert summary(run)["steps"] == len(steps) >= 5
        train(run, *words, "ckpt_path=last")
        assert steps == whole


def blocks_after(step, steps, take):
    """`UnitPool.take` that gets no answer from the first unit on that is asked for after `step`."""

    def blocked(self, ticket):
        if len(steps) < step:
            return take(self, ticket)
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()
        if ticket.future is not None:
            ticket.future = Future()
        self._kept.clear()
        self.readers = lambda unit: time.sleep(60)
        return take(self, ticket)

    return blocked


def test_45_in_a_save(tmp_path, whole, monkeypatch):
    write = files.write

    def written(path, *arguments, **options):
        if path.name == "step-00000004":
            os.kill(os.getpid(), signal.SIGTERM)
        return write(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write", written)
        with pytest.raises(Stopped) as stopped:
            run(tmp_path)
    assert stopped.value.exit_code == 143
    assert last_step(tmp_path) >= 4
    continues_like(whole, tmp_path)


# ---- the whole group ---------------------------------------------------------------------------------------------


def test_46_a_signal_to_the_group_leaves_no_traceback_and_no_process_and_the_run_goes_on(tmp_path):
    """Ctrl-C: parent and workers get it alike."""
    folder = tmp_path / "outputs/run"
    words = [*SMALL, "trainer.max_steps=300", "run_name=run", "data.num_workers=2", "logger=csv"]
    process = ranks.start(tmp_path, *ranks.program(tmp_path), *words, ranks=False)
    until = time.monotonic() + 90
    while not (folder / "metrics.csv").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    code, output = ranks.finish(process)  # fails where one is left
    assert code == 130, output
    assert "Traceback" not in output
    assert "worker process" not in output, "a worker has died of it"
    report = summary(folder)
    assert (report["status"], report["exit_code"]) == ("stopped", 130)
    assert 0 < report["steps"] < 300
    assert checkpoint(folder, report["steps"]).is_dir()
    assert "; run_name=run ckpt_path=last continues" in output
    done = forked(*words, "ckpt_path=last", cwd=tmp_path, code=0)
    assert f"(step {report['steps']})" in done.stdout
    assert list(metrics(folder)["train_loss"]) == list(range(1, 301))
