"""Runs and sweeps on a real SLURM of two nodes on this machine, where it is installed (`.ci/extras`)."""

import csv
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runs import assert_same_checkpoint, checkpoint, metrics
from tests.slurm import cluster

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm"), pytest.mark.timeout(1800)]
pytestmark += [pytest.mark.skipif(cluster.missing() is not None, reason=str(cluster.missing()))]
PATIENCE = 300.0  # seconds that a job may take to get anywhere, on a machine that has other work
SMALL = [
    "model=tiny", "model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.n_positions=64", "data.num_workers=0",
    "global_batch_size=4", "micro_batch_size=2", "data.val_sequences=4", "trainer.val_check_interval=500",
    "callbacks.checkpoint_every_n_steps=500", "callbacks.sample_tokens=0", "trainer.log_every_n_steps=1",
    "optim.warmup_steps=2",
]  # fmt: skip
SCRIPT = Path(__file__).parents[2] / "docs/slurm/train.sh"
LONG = 3000  # steps: SLURM looks for jobs near their limits every 30 seconds
TWO_TASKS = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster, and the environment in which its commands find it."""
    with cluster.started(tmp_path_factory.mktemp("cluster")) as environment:
        yield environment | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}  # the nodes' names are nobody else's


def said(slurm, *command, cwd=None):
    told = subprocess.run(command, env=slurm, cwd=cwd, capture_output=True, text=True, check=True, timeout=PATIENCE)
    return told.stdout


def until(true, what, patience=PATIENCE):
    ends = time.monotonic() + patience
    while not (found := true()):
        assert time.monotonic() < ends, f"{what} takes too long"
        time.sleep(0.3)
    return found


def shown(slurm, job):
    text = said(slurm, "scontrol", "show", "job", "--oneliner", job)
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def sent(slurm, folder, *words, tasks=1, nodes=1, options=()):
    """Send the script of docs/slurm.md with the words of a run; returns the job's number and its log."""
    asked = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--gpus-per-node=0", "--cpus-per-task=1", "--time=30"]
    job = said(slurm, "sbatch", "--parsable", *asked, *options, str(SCRIPT), *words, cwd=folder).strip()
    return job, folder / f"gpt2_fp8-{job}.out"


def start_again_now(slurm, job, *changes):
    """Let a requeued job begin: SLURM waits two minutes before a second turn."""
    until(lambda: shown(slurm, job)["JobState"] == "PENDING", "the job's return to the queue")
    assert shown(slurm, job)["Restarts"] == "1", "requeued once"
    said(slurm, "scontrol", "update", f"jobid={job}", "StartTime=now", *changes)


def completed(slurm, job, log):
    until(lambda: shown(slurm, job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), f"job {job}")
    assert shown(slurm, job)["JobState"] == "COMPLETED", log.read_text()


def steps_logged(folder):
    return max(metrics(folder)["train_loss"], default=0) if (folder / "metrics.csv").exists() else 0


def assert_as_uninterrupted(folder, whole, steps):
    for column in ("train_loss", "val_loss", "grad_norm", "lr"):
        assert metrics(folder)[column] == metrics(whole)[column], column
    assert len(metrics(folder)["train_loss"]) == steps
    assert_same_checkpoint(checkpoint(folder, steps), checkpoint(whole, steps))


def test_a_run_of_two_tasks_is_requeued_before_its_limit_and_resumes_exactly(slurm, tmp_path):
    """SLURM itself sends the signal, when the limit that the job has is less than two minutes away."""
    words = [*TWO_TASKS, *SMALL, f"trainer.max_steps={LONG}"]
    job, log = sent(slurm, tmp_path, *words, "run_name=cut", tasks=2)
    until(lambda: steps_logged(tmp_path / "outputs/cut") > 20, "the run")
    hours, minutes, _ = map(int, shown(slurm, job)["RunTime"].split(":"))
    said(slurm, "scontrol", "update", f"jobid={job}", f"TimeLimit={60 * hours + minutes + 2}")
    until(lambda: log.exists() and f"SLURM job {job} is requeued" in log.read_text(), "the signal before the limit")
    start_again_now(slurm, job, "TimeLimit=30")
    completed(slurm, job, log)
    text = log.read_text()
    assert text.count("is requeued") == 1
    assert "SIGUSR1: stopping and saving" in text
    assert "continues  " in text
    assert "Traceback" not in text
    assert steps_logged(tmp_path / "outputs/cut") == LONG
    whole, other = sent(slurm, tmp_path, *words, "run_name=whole", tasks=2)
    completed(slurm, whole, other)
    assert_as_uninterrupted(tmp_path / "outputs/cut", tmp_path / "outputs/whole", LONG)


def launched(slurm, folder, *words):
    command = [sys.executable, "-m", "gpt2_fp8.run", "-m", "hydra/launcher=slurm", "run_name=sweep", *SMALL, *words]
    with (folder / "said.txt").open("w") as file:
        return subprocess.Popen(command, cwd=folder, env=slurm, stdout=file, stderr=file)


def numbers(folder):
    found = [path.parent.name for path in (folder / "outputs/sweep/.submitit").glob("*_*/*_submitted.pkl")]
    return sorted(found, key=lambda name: int(name.partition("_")[2]))


def test_a_sweep_of_four_jobs_has_its_table_whatever_becomes_of_them(slurm, tmp_path):
    """The first is requeued by submitit's signal in the middle, the third is cancelled, two diverge."""
    steps = 600
    words = ["trainer=cpu", f"trainer.max_steps={steps}", "seed=1,2", "optim.lr=1e-3,1e30"]
    sweep = launched(slurm, tmp_path, *words, "hydra.launcher.timeout_min=30")
    jobs = until(lambda: len(found := numbers(tmp_path)) == 4 and found, "the four jobs")
    top = tmp_path / "outputs/sweep"
    until(lambda: steps_logged(top / "0") > 20, "the first job")
    said(slurm, "scancel", "--signal=USR2", jobs[0])
    until(lambda: steps_logged(top / "2") > 20, "the third job")
    said(slurm, "scancel", jobs[2])
    start_again_now(slurm, jobs[0])
    assert sweep.wait(PATIENCE) == 1
    text = (tmp_path / "said.txt").read_text()
    assert "Sweep of 4 jobs: 1 completed, 1 stopped, 2 diverged" in text
    assert f"error: Job {jobs[2]} (task: 0)" in text
    assert "Traceback" not in text
    rows = list(csv.DictReader((top / "sweep.csv").open()))
    assert [row["status"] for row in rows] == ["completed", "stopped", "diverged", "diverged"]
    log = (top / f".submitit/{jobs[0]}/{jobs[0]}_0_log.out").read_text()
    assert log.count("is requeued") == 1
    assert "it continues as by ckpt_path=last" in log
    alone = ["trainer=cpu", f"trainer.max_steps={steps}", "seed=1", "optim.lr=1e-3", "run_name=whole"]
    said(slurm, sys.executable, "-m", "gpt2_fp8.run", *SMALL, *alone, cwd=tmp_path)
    assert_as_uninterrupted(top / "0", tmp_path / "outputs/whole", steps)
