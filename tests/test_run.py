"""The command line as users type it: what it prints, leaves and returns, for runs, mistakes, signals and sweeps."""

import csv
import json
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from tests import forkserver
from tests.runs import SMALL, checkpoint, command, forked, metrics, summary

ALONE = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def script(text, cwd, *arguments, **environment):
    """A Python program that calls `run.main` itself; returns its process, ended."""
    (cwd / "script.py").write_text(text)
    return forkserver.python("script.py", *arguments, cwd=cwd, **environment)


def assert_refused(done, key, problems=1):
    """Exit 2, and at most two lines a problem; nothing else on stderr."""
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert sum(line.startswith("error: ") for line in lines) == problems, done.stderr
    assert all(line.startswith(("error: ", "  fix: ")) for line in lines)
    assert key in done.stderr


BAD = [
    "optim.learing_rate=1e-3",
    "data=text_files data.train_files=[nope.txt]",
    "hydra.run.dir=file/run",
]


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_costs_no_time(tmp_path, line):
    (tmp_path / "file").write_text("")
    before = _cpu_seconds()
    done = command(*line.split(), cwd=tmp_path, **ALONE)
    assert _cpu_seconds() - before < 5  # of the CPU: the machine may have other things to do
    assert_refused(done, line.split()[-1].partition("=")[0])
    assert os.listdir(tmp_path) == ["file"], "no folder for a run that does not start"


def _cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_all_mistakes_are_told_at_once(tmp_path):
    done = command("lr=1", "seed=-1", "precision=fp16", "global_batch_size=12", cwd=tmp_path, **ALONE)
    for cause in ("there is no key lr", "seed=-1", "precision=fp16", "global_batch_size=12"):
        assert_refused(done, cause, problems=4)


MAINS = """
import contextlib, io, json, sys
from gpt2_fp8 import run

for words in json.loads(sys.argv[1]):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = run.main(words)
    print("\\n@", json.dumps([code, stderr.getvalue()]), flush=True)
"""
FILES = "data=text_files data.tokenizer=bytes data.num_workers=0 data.val_fraction=0 data.val_sequences=0"
LATE = [  # known only once torch is imported, or the text is read
    (f"{FILES} data.train_files=[short.txt]", "the training text is too short: 22 tokens"),
    ("trainer=auto precision.fallback=error", "precision=fp8_hybrid cannot run here: "),
    ("data.tokenizer=gpt2", "the GPT-2 vocabulary is not on this machine"),
]


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    """How each line of LATE ends: all in one process, where each alone would import torch."""
    cwd = tmp_path_factory.mktemp("late")
    (cwd / "short.txt").write_text("x" * 21)  # and an end of text
    (cwd / "vocabulary").mkdir()
    nowhere = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    lines = [[*SMALL, *line.split()] for line, _ in LATE]
    done = script(MAINS, cwd, json.dumps(lines), TIKTOKEN_CACHE_DIR=str(cwd / "vocabulary"), **nowhere)
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@ ")]
    return [
        subprocess.CompletedProcess(line, code, None, stderr) for line, (code, stderr) in zip(LATE, ends, strict=True)
    ]


@pytest.mark.parametrize("number", range(len(LATE)), ids=[line for line, _ in LATE])
def test_a_mistake_that_shows_late_is_told_as_well(late, number):
    assert_refused(late[number], LATE[number][1])


LONG = [*SMALL, "run_name=run", "trainer.max_steps=400", "trainer.val_check_interval=200", "logger=csv",
        "callbacks.checkpoint_every_n_steps=200"]  # fmt: skip


def interrupt(number, started, *arguments, cwd):
    """Send a signal once the file `started` is there; returns the exit code and what was printed."""
    process = forkserver.Popen(
        [sys.executable, "-m", "gpt2_fp8.run", *arguments],
        cwd=cwd, env=os.environ | ALONE, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        until = time.monotonic() + 90
        while not started.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(number)
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    return process.returncode, output


def test_a_signal_saves_and_the_run_goes_on_later(tmp_path):
    folder = tmp_path / "outputs/run"
    ended, output = interrupt(signal.SIGTERM, folder / "metrics.csv", *LONG, cwd=tmp_path)
    assert ended == 143, output
    assert "; run_name=run ckpt_path=last continues" in output
    assert "Traceback" not in output
    report = summary(folder)
    assert (report["status"], report["exit_code"]) == ("stopped", 143)
    assert 0 < report["steps"] < 400
    assert checkpoint(folder, report["steps"]).is_dir()
    done = forked(*LONG, "ckpt_path=last", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"(step {report['steps']})" in done.stdout
    assert list(metrics(folder)["train_loss"]) == list(range(1, 401))


def test_a_signal_ends_a_whole_sweep(tmp_path):
    words = [word for word in LONG if word != "run_name=run"]
    started = tmp_path / "outputs/sweep/0/metrics.csv"
    code, output = interrupt(signal.SIGINT, started, "-m", *words, "run_name=sweep", "seed=1,2", cwd=tmp_path)
    assert code == 130, output
    assert summary(tmp_path / "outputs/sweep/0")["status"] == "stopped"
    assert not (tmp_path / "outputs/sweep/1").exists()
    assert [(row["seed"], row["status"]) for row in rows_of(tmp_path / "outputs/sweep")] == [
        ("1", "stopped"), ("2", "not run"),
    ]  # fmt: skip
    assert "Sweep of 2 jobs: 1 stopped, 1 not run" in output


# What each job left in the process for the next, and what Hydra hands to a sweeper.
SWEEP = """
import json, os, signal, sys, warnings
import hydra.core.utils

states, values = [], []
run_job = hydra.core.utils.run_job

def watched_job(*arguments, **options):
    result = run_job(*arguments, **options)
    values.append(result.return_value)
    return result

hydra.core.utils.run_job = watched_job  # before Hydra loads its launchers, which take it from there

import torch
from gpt2_fp8 import run
from gpt2_fp8.train import fit

train_run = fit.run

def state():
    return {
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "warnings": len(warnings.filters),
        "environment": sorted(item for item in os.environ.items() if item[0] != "PL_GLOBAL_SEED"),
    }

def watched(*arguments):
    states.append(state())
    try:
        return train_run(*arguments)
    finally:
        states.append(state())

fit.run = watched
code = run.main(sys.argv[1:])
print("\\n@", json.dumps([code, states, values]))
"""
KINDS = [("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2)]
# dropout: with it a run draws random numbers, and what one job has drawn must not show in the next.
SWEPT = [*SMALL, "model.dropout=0.1", "trainer.deterministic=true"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("sweep")
    (cwd / "script.py").write_text(SWEEP)
    words = ["-m", *SWEPT, "run_name=sweep", "precision=fp32,bf16", "seed=1,2"]
    done = subprocess.run(
        [sys.executable, "script.py", *words],
        cwd=cwd, env=os.environ | ALONE, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("@ ")]
    return cwd / "outputs/sweep", *json.loads(line[2:])


def test_a_sweep_leaves_a_run_for_each_job(sweep):
    folder, code, _, values = sweep
    assert code == 0
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "1", "2", "3"]
    reports = [summary(folder / str(job)) for job in range(4)]
    assert [(report["status"], report["precision"]["ran"]) for report in reports] == [
        ("completed", precision) for precision, _ in KINDS
    ]
    assert len(set(values)) == 4
    assert values == [report["last_val_loss"] for report in reports], "what a sweeper optimises"


def rows_of(folder):
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_sweep_ends_with_its_table(sweep):
    folder, *_ = sweep
    rows = rows_of(folder)
    losses = [float(row["best_val_loss"]) for row in rows]
    assert losses == sorted(losses)
    assert sorted((row["precision"], int(row["seed"])) for row in rows) == sorted(KINDS)
    assert set(rows[0]) & {"model.dropout", "run_name"} == set(), "they do not differ"
    for row in rows:
        report = summary(folder / row["job"])
        assert float(row["best_val_loss"]) == report["best_val_loss"]
        assert f"seed={row['seed']}" in report["overrides"]
        assert report["config"]["seed"] == int(row["seed"])
        assert report["config"]["precision"]["name"] == row["precision"]
    assert (folder / "sweep.md").read_text().startswith("4 jobs: 4 completed")


def test_a_job_leaves_nothing_to_the_next(sweep):
    _, _, states, _ = sweep
    before, after = states[2::2], states[3::2]  # the first job's imports change things for good
    for state in [*before, *after]:
        assert state == states[1]
    for key in ("dtype", "deterministic", "autocast", "grad", "threads", "handlers"):
        assert states[0][key] == states[1][key]


def test_a_job_is_the_run_by_itself_bit_for_bit(sweep, tmp_path):
    precision, seed = KINDS[3]
    done = forked(*SWEPT, "run_name=single", f"precision={precision}", f"seed={seed}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder, single = sweep[0] / "3", tmp_path / "outputs/single"
    for column in ("train_loss", "val_loss", "grad_norm"):
        assert metrics(folder)[column] == metrics(single)[column]
    weights = [checkpoint(run, 12) / "model.safetensors" for run in (folder, single)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
