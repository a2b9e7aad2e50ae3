"""The benchmark program with cases that are made up, and once with real ones."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_fp8 import bench
from gpt2_fp8.measure.case import Result
from tests.measure.test_subprocesses import gone

TWO = ["trainer=cpu", "bench.precision=[fp32,bf16]", "bench.micro_batch_size=2"]
GOOD = {"status": "ok", "ran": "bf16", "tokens_per_second": 100.0, "slowest": 90.0, "fastest": 110.0, "losses": [2.5]}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def results(monkeypatch):
    """What the cases come to, in turn: results, or errors to raise."""
    given = []

    def measure(case, timeout_s, log=None):
        result = given.pop(0)
        if isinstance(result, BaseException):
            raise result
        return Result(**result)

    monkeypatch.setattr(bench, "measure", measure)
    return given


def written():
    (folder,) = Path("outputs/bench").iterdir()
    return json.loads((folder / "bench.json").read_text()), (folder / "bench.md").read_text()


def test_a_case_that_fails_is_a_row_and_the_others_go_on(results, capsys):
    results += [{"status": "out of memory", "message": "wanted 9 GiB more"}, GOOD]
    assert bench.main(TWO) == 0
    out = capsys.readouterr().out
    assert "this measures the CPU" in out
    assert "[1/2] tiny, micro-batch 2, fp32 ... out of memory: wanted 9 GiB more" in out
    assert "[2/2] tiny, micro-batch 2, bf16 ... 100 tokens/s" in out
    data, text = written()
    assert [case["result"]["status"] for case in data["cases"]] == ["out of memory", "ok"]
    assert [case["ratio_to_bf16"] for case in data["cases"]] == [None, 1.0]
    assert data["complete"]
    assert "| out of memory: wanted 9 GiB more |" in text
    assert "python -m gpt2_fp8.bench trainer=cpu" in text


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_what_was_measured_before_a_stop_is_written(signum, code, results, monkeypatch, capsys):
    results += [GOOD | {"losses": [float("nan")]}, GOOD]
    real = bench.measure
    monkeypatch.setattr(
        bench, "measure", lambda *case: os.kill(os.getpid(), signum) if len(results) < 2 else real(*case)
    )
    assert bench.main(TWO) == code
    data, _ = written()
    assert len(data["cases"]) == 1
    assert data["cases"][0]["result"]["losses"] == [None]
    assert not data["complete"]
    assert "Training steps" in capsys.readouterr().out


def test_bad_input_leaves_nothing_behind(capsys):
    assert bench.main(["bench.steps=0", "bench.modl=x"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
    assert not Path("outputs").exists()


def test_ctrl_c_in_the_middle_of_a_case():
    words = ["bench.micro_batch_size=2", "bench.steps=100000", "trainer.accelerator=cpu"]
    program = [sys.executable, "-u", "-m", "gpt2_fp8.bench", *words]
    process = subprocess.Popen(
        program, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    read = ""
    while "..." not in read:
        read += process.stdout.read(1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (pids := children.read_text().split()):
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert all(map(gone, pids))
