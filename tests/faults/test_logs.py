"""Faults 77, 96 and 99: logs that a kill tore, that are damaged, or that cannot be written."""

from __future__ import annotations

import csv
import logging
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt2_fp8.config.schema import LoggerConfig
from gpt2_fp8.train import metrics_csv
from gpt2_fp8.train.loggers import MetricsFile, build_loggers
from tests import forkserver
from tests.data.hub_runs import ROOT
from tests.runs import SMALL, forked, summary, train

BOTH = LoggerConfig(tensorboard=True, csv=True)
# Killed in step 11, of which the last checkpoint is that of step 8.
KILLED = """
import os, signal, sys
from gpt2_fp8 import run
from gpt2_fp8.train.module import GPT2Module

original = GPT2Module.training_step

def training_step(self, batch, batch_idx):
    if self.global_step == 10 and "ckpt_path=last" not in words:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, batch, batch_idx)

GPT2Module.training_step = training_step
words = sys.argv[1:]
sys.exit(run.main(words))
"""


def logged(folder: Path) -> tuple[list[int], list[int]]:
    """The steps of the training loss, in the order of both logs."""
    with (folder / "metrics.csv").open() as file:
        table = [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]
    events = EventAccumulator(str(folder / "tensorboard/train")).Reload()
    return table, [event.step for event in events.Scalars("loss")]


def test_77_a_killed_run_logs_each_step_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KILLED)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [*SMALL, "run_name=run", "logger=default", "callbacks.async_checkpoints=false"]
    codes, seen = [], []
    for more in ([], ["ckpt_path=last"]):
        done = forkserver.run([sys.executable, "script.py", *words, *more], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, timeout=180)  # fmt: skip
        codes.append(done.returncode)
        seen.append(logged(tmp_path / "outputs/run"))
    assert codes == [-signal.SIGKILL, 0], done.stderr
    assert seen[0] == (list(range(1, 11)), list(range(1, 11))), "all that was logged before the kill is in the files"
    assert seen[1] == (list(range(1, 13)), list(range(1, 13)))


@pytest.mark.parametrize("torn", [b"", b"\x18\x00\x00\x00\x00\x00\x00\x00\xa3", b"\xff" * 40])
def test_77_a_row_that_the_kill_tore_is_dropped(tmp_path: Path, torn: bytes) -> None:
    for resume, steps in ((None, range(1, 8)), (4, range(5, 10))):
        time.sleep(1 if resume else 0)  # files are read in the order of their names, which have the second in them
        loggers = build_loggers(BOTH, tmp_path, resume)
        for step in steps:
            for logger in loggers:
                logger.log_metrics({"train_loss": 1 / step}, step=step)
        events = max((tmp_path / "tensorboard/train").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        with events.open("ab") as file:
            file.write(torn)
        with (tmp_path / "metrics.csv").open("ab") as file:
            file.write(b"7,0.")
        assert logged(tmp_path)[1][-1] == steps[-1], "nobody closed the logger: a kill does not either"
    assert logged(tmp_path)[1] == list(range(1, 10))


# ---- 96: damage ------------------------------------------------------------------------------------------------------


def flip_high_bit(content: bytes) -> bytes:
    at = content.index(b"\n3,") + 5
    return content[:at] + bytes([content[at] | 0x80]) + content[at + 1 :]


DAMAGE = {
    "a flipped high bit": flip_high_bit,
    "a field beyond csv's limit": lambda content: content.replace(b"\n3,", b"\n3" + b"9" * 200_000 + b",", 1),
    "a step beyond int's limit": lambda content: content.replace(b"\n3,", b"\n" + b"9" * 5000 + b",", 1),
    "zeros, as a power cut leaves": lambda content: content.replace(b"\n3,", b"\n" + bytes(4096) + b"\n3x,", 1),
    "a value that is no number": lambda content: content.replace(b"\n3,0.", b"\n3,0/", 1),
    "a quote that never ends": lambda content: content.replace(b"\n3,", b'\n"3,', 1),
    "a field too many": lambda content: content.replace(b"\n3,", b"\n3,1,", 1),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_96_a_damaged_line_costs_that_line_and_the_file_is_put_aside(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = MetricsFile(tmp_path, None)
    for step in range(1, 8):
        first.log_metrics({"train_loss": 1 / step}, step=step)
    damaged = DAMAGE[how]((tmp_path / "metrics.csv").read_bytes())
    (tmp_path / "metrics.csv").write_bytes(damaged)
    MetricsFile(tmp_path, 5).log_metrics({"train_loss": 0.5}, step=6)
    with (tmp_path / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "4", "5", "6"]
    assert (tmp_path / "metrics.csv.aside-1").read_bytes() == damaged
    (message,) = [record.getMessage() for record in caplog.records]
    assert "is damaged (" in message
    assert "first of them line 4): it is put aside as metrics.csv.aside-1" in message


HEADER = b"step,train_loss,val_loss\n1,2.5,\n"


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 9,
        b"a,b\n1,2\n",
        HEADER.replace(b"train_loss", b"train_moss"),
        HEADER.replace(b"step", b"stdp"),
        HEADER.replace(b"loss,", b"loss "),
        b"step,step\n1,2\n",
        bytes(1 << 20),
    ],
)
def test_96_what_is_no_log_at_all_is_put_aside_each_time(tmp_path: Path, content: bytes) -> None:
    for number in (1, 2):
        (tmp_path / "metrics.csv").write_bytes(content + b"\n")
        MetricsFile(tmp_path, 5).log_metrics({"train_loss": 0.5}, step=6)
        assert (tmp_path / "metrics.csv").read_text() == "step,train_loss\n6,0.5\n"
        assert (tmp_path / f"metrics.csv.aside-{number}").read_bytes() == content + b"\n"


def test_96_a_run_logs_columns_that_its_log_may_have(tmp_path: Path) -> None:
    train(tmp_path / "run", "trainer.max_steps=8")
    with (tmp_path / "run/metrics.csv").open() as file:
        assert metrics_csv.COLUMNS >= set(next(csv.reader(file))) >= {"train_loss", "val_loss", "tokens_per_second"}
    train(tmp_path / "run", "trainer.max_steps=9", "ckpt_path=last")
    assert not list((tmp_path / "run").glob("*.aside-*"))


def test_96_the_end_of_an_endless_line_is_no_row(tmp_path: Path) -> None:
    rest = b"9" * (metrics_csv.LONGEST_LINE_BYTES - 2) + b"3,0.5\n"
    (tmp_path / "metrics.csv").write_bytes(b"step,train_loss\n2," + rest + b"4,0.25\n")
    MetricsFile(tmp_path, 5).log_metrics({"train_loss": 0.5}, step=6)
    assert (tmp_path / "metrics.csv").read_text() == "step,train_loss\n4,0.25\n6,0.5\n"
    assert (tmp_path / "metrics.csv.aside-1").exists()


def test_96_a_long_log_is_copied_in_little_memory_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, n = tmp_path / "metrics.csv", 100_000
    path.write_text("step,train_loss\n" + "".join(f"{step},{1 / step}\n" for step in range(1, n + 1)))
    monkeypatch.setattr(metrics_csv, "SLOW_SECONDS", -1.0)
    tracemalloc.start()
    with caplog.at_level(logging.INFO):
        renewed = metrics_csv.renew(path, ["step", "train_loss", "val_loss"], n - 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 10
    assert (renewed.rows, renewed.at_last) == (n - 1, {"train_loss"})
    assert path.read_text().endswith(f"\n{n - 1},{1 / (n - 1)},\n")
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is long: its rows are being read (16384 so far)"
    ]


def test_96_a_sparse_file_of_any_size_is_put_aside_unread(tmp_path: Path) -> None:
    with (tmp_path / "metrics.csv").open("wb") as file:
        file.truncate(1 << 40)
    MetricsFile(tmp_path, 5).log_metrics({"train_loss": 0.5}, step=6)
    assert (tmp_path / "metrics.csv.aside-1").stat().st_size == 1 << 40


def test_96_a_run_with_a_damaged_log_is_continued(tmp_path: Path) -> None:
    train(tmp_path / "outputs/run", "trainer.max_steps=8")
    path = tmp_path / "outputs/run/metrics.csv"
    path.write_bytes(flip_high_bit(path.read_bytes()))
    done = forked(*SMALL, "run_name=run", "ckpt_path=last", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "is damaged (1 lines, the first of them line" in done.stdout
    assert summary(tmp_path / "outputs/run")["steps"] == 12


# ---- 99: what cannot be written --------------------------------------------------------------------------------------

FULL = """
import resource, sys
from pathlib import Path
from gpt2_fp8 import run
from gpt2_fp8.train.module import GPT2Module

original = GPT2Module.training_step

def training_step(self, batch, batch_idx):
    if self.global_step in (5, 9):
        size = -1 if self.global_step == 9 else Path("run/run.log").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))
    return original(self, batch, batch_idx)

GPT2Module.training_step = training_step
sys.exit(run.main(sys.argv[1:]))
"""


def test_99_a_disk_that_is_full_for_a_while_leaves_no_traceback(tmp_path: Path) -> None:
    """Neither of TensorBoard's thread nor of the log's lines: a line each, once."""
    (tmp_path / "script.py").write_text(FULL)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    words = [*SMALL, "hydra.run.dir=run", "logger=default", "callbacks.async_checkpoints=false"]
    with (tmp_path / "stdout").open("w") as stdout:  # a pipe has no size
        done = forkserver.run([sys.executable, "script.py", *words], cwd=tmp_path, env=environment, stdout=stdout,
                              stderr=subprocess.PIPE, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Logging error" not in done.stderr
    said = [line for line in done.stderr.splitlines() if "is not written, training goes on" in line]
    assert sum("run.log" in line for line in said) == 1
    assert summary(tmp_path / "run")["steps"] == 12


def test_99_a_full_disk_behind_stdout_changes_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "gpt2_fp8.run", *SMALL, "hydra.run.dir=run"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = forkserver.run(words, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True,
                              timeout=300)  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "the log on the terminal is not written, training goes on: [Errno 28] No space left on device"
    ]
    assert "completed" in (tmp_path / "run/run.log").read_text()


LOST = {
    "a full disk": (">/dev/full", "No space left on device"),
    "nobody reads": (">&$gone", "Broken pipe"),
    "nor what is said of it": (">&$gone 2>&1", ""),
    "closed": ("<&- >&- 2>&-", ""),
}


@pytest.mark.parametrize("case", LOST)
def test_99_a_progress_bar_that_cannot_be_written_ends_no_run(tmp_path: Path, case: str) -> None:
    """Nor does any other library that prints. What a run opens never gets the number of a closed stream."""
    redirection, reason = LOST[case]
    words = [*SMALL, "callbacks.progress_bar=true", "data.num_workers=1", "hydra.run.dir=run"]
    script = f'exec {{gone}}> >(:); sleep 0.2; exec "$@" {redirection}'  # a pipe whose reader has left
    done = subprocess.run(["bash", "-c", script, "bash", sys.executable, "-m", "gpt2_fp8.run", *words], cwd=tmp_path,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [f"the log on the terminal is not written, training goes on: [Errno {n}] {reason}" for n in (28, 32)]
    assert done.stderr.splitlines() == ([] if not reason else [line for line in said if line in done.stderr])
    assert bool(done.stderr) == bool(reason)
    assert summary(tmp_path / "run")["steps"] == 12
    log = (tmp_path / "run/run.log").read_text()
    assert all(line.startswith("[") for line in log.splitlines()), "nothing but the log is in it"
    assert "completed" in log


@pytest.mark.parametrize(("module", "closed"), [("run", "2>&-"), ("bench", ">&-"), ("bench", "<&- >&- 2>&-")])
def test_99_a_closed_stream_changes_no_exit_code(tmp_path: Path, module: str, closed: str) -> None:
    words = [sys.executable, "-m", f"gpt2_fp8.{module}", "nonsense=1"]
    done = subprocess.run(["bash", "-c", f'exec "$@" {closed}', "bash", *words], cwd=tmp_path, capture_output=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert ("error: " in done.stderr) == (closed == ">&-")
