"""Fault 77: a killed run is continued, and each step stands once in its logs."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt2_fp8.config.schema import LoggerConfig
from gpt2_fp8.loggers import build_loggers
from tests.data.hub_runs import ROOT
from tests.runs import SMALL

BOTH = LoggerConfig(tensorboard=True, csv=True)
# Killed in step 11, of which the last checkpoint is that of step 8.
KILLED = """
import os, signal, sys
from gpt2_fp8 import run
from gpt2_fp8.module import GPT2Module

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
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return table, [event.step for event in events.Scalars("train_loss")]


def test_77_a_killed_run_logs_each_step_once(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(KILLED)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [*SMALL, "run_name=run", "logger=default", "callbacks.async_checkpoints=false"]
    codes, seen = [], []
    for more in ([], ["ckpt_path=last"]):
        done = subprocess.run([sys.executable, "script.py", *words, *more], cwd=tmp_path, env=environment,
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
        events = max((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        with events.open("ab") as file:
            file.write(torn)
        with (tmp_path / "metrics.csv").open("ab") as file:
            file.write(b"7,0.")
        assert logged(tmp_path)[1][-1] == steps[-1], "nobody closed the logger: a kill does not either"
    assert logged(tmp_path)[1] == list(range(1, 10))
