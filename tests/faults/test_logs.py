"""Logs that a kill tore, that are damaged, or that cannot be written; temporary files that a kill left."""

import csv
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpt2_fp8.config.schema import LoggerConfig
from gpt2_fp8.train.loggers import MetricsFile, build_files
from tests import forkserver, ranks
from tests.data.hub_runs import ROOT
from tests.runs import SMALL, summary

BOTH = LoggerConfig(tensorboard=True, csv=True)
PLAIN = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def logged(folder: Path) -> tuple[list[int], list[int]]:
    with (folder / "metrics.csv").open() as file:
        table = [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return table, [event.step for event in events.Scalars("loss/train")]


def test_a_killed_run_logs_each_step_once(tmp_path: Path) -> None:
    """Killed in step 11, of which the last checkpoint is that of step 8."""
    words = [*SMALL, "run_name=run", "logger=default", "callbacks.async_checkpoints=false"]
    seen = []
    for code, more in ((-signal.SIGKILL, []), (0, ["ckpt_path=last"])):
        ranks.run(tmp_path, *words, *more, patch=ranks.fault(0, 10, "SIGKILL"), code=code)
        seen.append(logged(tmp_path / "outputs/run"))
    assert seen[0] == (list(range(1, 11)), list(range(1, 11))), "all that was logged before the kill is in the files"
    assert seen[1] == (list(range(1, 13)), list(range(1, 13)))


def test_a_row_that_the_kill_tore_is_dropped(tmp_path: Path) -> None:
    for resume, steps in ((None, range(1, 8)), (4, range(5, 10))):
        time.sleep(1 if resume else 0)  # files are read in the order of their names, which have the second in them
        loggers = build_files(BOTH, tmp_path, resume)
        for step in steps:
            for logger in loggers:
                logger.log_metrics({"train_loss": 1 / step}, step=step)
        events = max((tmp_path / "tensorboard").glob("events.*"), key=lambda path: path.stat().st_mtime_ns)
        with events.open("ab") as file:
            file.write(b"\x18\x00\x00\x00\x00\x00\x00\x00\xa3")
        with (tmp_path / "metrics.csv").open("ab") as file:
            file.write(b"7,0.")
        assert logged(tmp_path)[1][-1] == steps[-1], "nobody closed the logger: a kill does not either"
    assert logged(tmp_path)[1] == list(range(1, 10))


HEADER = b"step,train_loss,val_loss\r\n"
ROWS = b"1,2.5,\r\n2,2.25,2.0\r\n"
DAMAGES = {
    "another table": b"a,b\n1,2\n",
    "zeros, as a power cut leaves": HEADER + ROWS + bytes(4096) + b"\r\n",
    "a field too many": HEADER + ROWS + b"3,1,2,3\r\n",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_log_is_put_aside_whole(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.csv").write_bytes(DAMAGES[damage])
    MetricsFile(tmp_path, 5).log_metrics({"train_loss": 0.5}, step=6)
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,train_loss", "6,0.5"]
    assert (tmp_path / "metrics.csv.aside-1").read_bytes() == DAMAGES[damage]
    assert "is damaged (" in caplog.text


def test_a_log_on_the_terminal_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    words = [*SMALL, "callbacks.progress_bar=true", "hydra.run.dir=run"]
    there, here = os.pipe()
    os.close(there)  # a pipe whose reader has left
    command = [sys.executable, "-m", "gpt2_fp8.run", *words]
    process = forkserver.Popen(command, cwd=tmp_path, env=PLAIN, stdout=here, stderr=here)
    os.close(here)
    assert process.wait(120) in (0, 1, 141)
    assert summary(tmp_path / "run")["steps"] == 12
    assert "completed" in (tmp_path / "run/run.log").read_text()
