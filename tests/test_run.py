"""The command line as users type it: what it prints, leaves and returns, for runs, mistakes, signals and sweeps."""

import csv
import os
import resource
import signal
import time

import pytest

from tests.ranks import ALONE, finish, start
from tests.runs import SMALL, checkpoint, command, forked, metrics, summary

BAD = ["lr=1 seed=-1 precision=fp16 optim.learing_rate=1e-3", "data=text_files data.train_files=[nope.txt]"]
BAD += ["hydra.run.dir=file/run"]


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_costs_no_time(tmp_path, line):
    (tmp_path / "file").write_text("")
    before = _cpu_seconds()
    done = command(*line.split(), cwd=tmp_path, **ALONE)
    assert _cpu_seconds() - before < 5  # of the CPU: the machine may have other things to do
    assert done.returncode == 2, done.stderr
    told = done.stderr.splitlines()
    assert all(line.startswith(("error: ", "  fix: ")) for line in told)
    keys = [word.partition("=")[0] for word in line.split() if word != "data=text_files"]
    assert sum(line.startswith("error: ") for line in told) == len(keys), "all at once"
    assert all(key in done.stderr for key in keys)
    assert os.listdir(tmp_path) == ["file"], "no folder for a run that does not start"


def _cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


LONG = [*SMALL, "trainer.max_steps=150", "trainer.val_check_interval=75", "logger=csv",
        "callbacks.checkpoint_every_n_steps=75"]  # fmt: skip


def test_a_signal_ends_a_whole_sweep(tmp_path):
    process = start(tmp_path, "-m", "gpt2_fp8.run", "-m", *LONG, "run_name=sweep", "seed=1,2", ranks=False)
    until = time.monotonic() + 90
    while not (tmp_path / "outputs/sweep/0/metrics.csv").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert summary(tmp_path / "outputs/sweep/0")["status"] == "stopped"
    assert not (tmp_path / "outputs/sweep/1").exists()
    rows = [(row["seed"], row["status"]) for row in rows_of(tmp_path / "outputs/sweep")]
    assert rows == [("1", "stopped"), ("2", "not run")]
    assert "Sweep of 2 jobs: 1 stopped, 1 not run" in output


KINDS = [("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2)]
# dropout: with it a run draws random numbers, and what one job has drawn must not show in the next.
SWEPT = [*SMALL, "model.dropout=0.1", "trainer.deterministic=true"]


def rows_of(folder):
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_leaves_a_run_for_each_job_bit_for_bit_and_their_table(tmp_path):
    forked("-m", *SWEPT, "run_name=sweep", "precision=fp32,bf16", "seed=1,2", cwd=tmp_path, code=0)
    sweep = tmp_path / "outputs/sweep"
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == ["0", "1", "2", "3"]
    reports = [summary(sweep / str(job)) for job in range(4)]
    ends = [(report["status"], report["precision"]["ran"], report["config"]["seed"]) for report in reports]
    assert ends == [("completed", *kind) for kind in KINDS]
    rows = rows_of(sweep)
    losses = [float(row["best_val_loss"]) for row in rows]
    assert losses == sorted(set(losses))
    assert sorted((row["precision"], int(row["seed"])) for row in rows) == sorted(KINDS)
    assert set(rows[0]) & {"model.dropout", "run_name"} == set(), "they do not differ"
    assert all(float(row["best_val_loss"]) == reports[int(row["job"])]["best_val_loss"] for row in rows)
    assert (sweep / "sweep.md").read_text().startswith("4 jobs: 4 completed")
    precision, seed = KINDS[3]
    forked(*SWEPT, "run_name=single", f"precision={precision}", f"seed={seed}", cwd=tmp_path, code=0)
    folder, single = sweep / "3", tmp_path / "outputs/single"
    for column in ("train_loss", "val_loss", "grad_norm"):
        assert metrics(folder)[column] == metrics(single)[column]
    weights = [checkpoint(run, 12) / "model.safetensors" for run in (folder, single)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
