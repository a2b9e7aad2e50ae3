"""A sweep over GPUs that the machine does not have: CUDA_VISIBLE_DEVICES=0,1 stands for two; jobs train on the CPU."""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpt2_fp8.runtime import gpu_locks
from tests import forkserver
from tests.runs import SMALL, checkpoint, forked, metrics, summary

WORDS = [word for word in SMALL if word != "trainer=cpu"]
FILES = ["data=text_files", "data.tokenizer=bytes", "data.num_workers=0", "plugins=[spy]", "callbacks.extra=[spy]"]
# It notes which GPU a job sees, before CUDA is touched and at the job's end; one job is killed in the middle.
SPY = """
import atexit, json, os, signal, time
import lightning.pytorch as pl
import torch
from gpt2_fp8.runtime import registry

def note(what):
    text = [time.time(), what, os.environ["CUDA_VISIBLE_DEVICES"], os.getpid(), torch.get_num_threads(),
            torch.cuda.is_initialized()]
    with open("notes", "a") as file:
        file.write(json.dumps(text) + "\\n")

note("begins")
atexit.register(note, "ends")

@registry.callback("spy")
class Spy(pl.Callback):
    def __init__(self, config):
        self.killed = config.data.train_files == ["killed.txt"]
        note(config.data.train_files[0])

    def on_train_batch_end(self, trainer, *_):
        if self.killed and trainer.global_step == 6:
            until = time.monotonic() + 120
            while "one.txt" not in open("notes").read() and time.monotonic() < until:
                time.sleep(0.1)  # until another job trains, on the other GPU
            note("ends")
            os.kill(os.getpid(), signal.SIGKILL)
"""


def rows_of(folder):
    with (folder / "sweep.csv").open() as file:
        return {row["job"]: row for row in csv.DictReader(file)}


def start(cwd, *words):
    command = [sys.executable, "-m", "gpt2_fp8.run", "-m", "hydra/launcher=joblib", *words, "run_name=sweep"]
    two = {"CUDA_VISIBLE_DEVICES": "0,1", "TMPDIR": str(cwd), "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    return forkserver.Popen(
        command, cwd=cwd, env=os.environ | two, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Three jobs on two GPUs: one is refused when it reads its text, one is killed, one completes."""
    cwd = tmp_path_factory.mktemp("sweep")
    (cwd / "spy.py").write_text(SPY)
    for name in ("killed", "one"):
        (cwd / f"{name}.txt").write_text("To be, or not to be, that is the question.\n" * 100)
    (cwd / "short.txt").write_text("To be")
    process = start(cwd, *WORDS, *FILES, "data.train_files=[short.txt],[killed.txt],[one.txt]")
    output, _ = process.communicate(timeout=300)
    return cwd, process.returncode, output


def test_each_job_has_its_gpu_and_no_two_one(swept):
    cwd, _, output = swept
    notes = [json.loads(line) for line in (cwd / "notes").read_text().splitlines()]
    jobs = {}
    for at, what, gpu, process, threads, initialized in notes:
        jobs.setdefault((process, gpu), []).append((at, what))
        assert not initialized, "CUDA is not touched before the GPU is named"
        assert threads == 1  # of OMP_NUM_THREADS
    assert len(jobs) == 3, output
    spans = {gpu: sorted((seen[0][0], seen[-1][0]) for (_, on), seen in jobs.items() if on == gpu) for gpu in "01"}
    assert sum(map(len, spans.values())) == 3, "a job sees one GPU"
    for of_gpu in spans.values():
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(of_gpu))
    (killed,) = [seen for seen in jobs.values() if "killed.txt" in dict(map(reversed, seen))]
    (one,) = [seen for seen in jobs.values() if "one.txt" in dict(map(reversed, seen))]
    assert one[0][0] < killed[-1][0], "at the same time"


def test_what_became_of_each_is_a_row(swept):
    cwd, code, output = swept
    rows = rows_of(cwd / "outputs/sweep")
    statuses = {job: row["status"] for job, row in rows.items()}
    assert statuses == {"0": "refused", "1": "failed", "2": "completed"}, output
    assert "killed by SIGKILL" in rows["1"]["note"]
    assert "the training text is too short" in rows["0"]["note"]
    assert code == 2, "of the first job that failed, as when they run one after the other"
    assert "loss" not in output.partition("Sweep of")[0].replace("validation", ""), output
    assert (cwd / "outputs/sweep/2/run.log").read_text().count("completed 12 steps") == 1


def test_a_job_is_the_run_by_itself_bit_for_bit(swept):
    cwd, *_ = swept
    assert forked(*WORDS, *FILES[:3], "data.train_files=[one.txt]", "run_name=alone", cwd=cwd).returncode == 0
    job, alone = cwd / "outputs/sweep/2", cwd / "outputs/alone"
    assert metrics(job)["train_loss"] == metrics(alone)["train_loss"]
    weights = [checkpoint(run, 12) / "model.safetensors" for run in (job, alone)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def alive(cwd):
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(path / "cwd") == str(cwd):
                found.append((path / "cmdline").read_bytes())
        except OSError:
            continue
    return found


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
    assert condition()


LONG = ["trainer.max_steps=4000", "callbacks.checkpoint_every_n_steps=2000", "trainer.val_check_interval=4000"]


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["killed", "interrupted"])
def test_jobs_save_when_the_sweep_is_stopped_or_killed(tmp_path, monkeypatch, killed):
    folder = tmp_path / "outputs/sweep"
    process = start(tmp_path, *WORDS, *LONG, "seed=1,2,3", "hydra.launcher.n_jobs=2")
    try:
        wait_for(lambda: all((folder / f"{job}/metrics.csv").exists() for job in (0, 1)) or process.poll() is not None)
        if killed:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everything in the foreground
        output, _ = process.communicate(timeout=90)
        wait_for(lambda: not alive(tmp_path), 30)
    finally:
        for command in alive(tmp_path):
            print(command)
        process.kill()
    for job in (0, 1):
        report = summary(folder / str(job))
        assert report["status"] == "stopped", output
        assert 0 < report["steps"] < 4000
        assert checkpoint(folder / str(job), report["steps"]).is_dir()
    monkeypatch.setattr(gpu_locks.tempfile, "gettempdir", lambda: str(tmp_path))
    assert gpu_locks.lock_gpu({"CUDA_VISIBLE_DEVICES": "0"})[0] == "0", "nobody has it"
    if not killed:
        assert process.returncode == 130, output
        assert "Traceback" not in output
        rows = rows_of(folder)
        assert {row["status"] for row in rows.values()} == {"stopped"}
        assert rows["2"]["steps"] == "0"
