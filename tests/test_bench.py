"""The benchmark program with cases that are made up, and once with real ones."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpt2_fp8 import bench, compose
from gpt2_fp8.config.shown import table
from gpt2_fp8.measure.case import WAITS, Case, Kernel, Result
from tests import forkserver
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


def test_output_that_nobody_reads_ends_it_quietly():
    """As under `| head -1`; the pipe has no reader from the start, so that it does not depend on who is faster."""
    there, here = os.pipe()
    os.close(there)
    code = (
        "import signal, sys\nfrom gpt2_fp8 import bench\nfrom gpt2_fp8.measure.case import Result\n"
        f"bench.measure = lambda *_: Result(**{GOOD})\nsys.exit(bench.main({TWO}))"
    )
    process = forkserver.Popen([sys.executable, "-c", code], stdout=here, stderr=subprocess.PIPE, text=True)
    os.close(here)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 141)


def test_bad_input_leaves_nothing_behind(capsys):
    assert bench.main(["bench.steps=0", "bench.modl=x"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
    assert not Path("outputs").exists()


def test_ctrl_c_in_the_middle_of_a_case():
    words = ["bench.micro_batch_size=2", "bench.steps=100000", "trainer.accelerator=cpu"]
    process = forkserver.Popen(
        [sys.executable, "-u", "-m", "gpt2_fp8.bench", *words], stdout=subprocess.PIPE, text=True
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


# ---- the tables ------------------------------------------------------------------------------------------------------


def measured(precision="bf16", size=4, rate=100.0, compiled=True, **result):
    (config,) = compose.preflight([f"precision={precision}", f"micro_batch_size={size}", f"global_batch_size={size}"])
    values = {
        "status": "ok", "ran": precision, "tokens_per_second": rate, "slowest": rate, "fastest": rate,
        "backend": "reference" if precision == "bf16" else "te",
        "layers": "te" if precision != "bf16" else "compiled" if compiled else "plain",
        "compiled": compiled and precision == "bf16",
    } | result  # fmt: skip
    return bench.Measured(Case(config=config, steps=2, warmup=1), Result(**values))


def test_columns_are_aligned_and_stand_if_they_hold_anything():
    rows = [{"a b": "x", "n": "1,234", "empty": None}, {"a b": "long|er", "n": "0.5", "more": 2}]
    assert table(rows).splitlines() == [
        "| a b      |     n | more |",
        "| -------- | ----: | ---: |",
        "| x        | 1,234 |      |",
        "| long\\|er |   0.5 |    2 |",
    ]
    assert table([]) == ""


def test_the_kernel_of_attention_is_shown_where_one_was_asked_for():
    cases = [measured(attention="torch's cuDNN kernel") for _ in range(2)]
    config = replace(cases[1].config, attention="cudnn")
    asked = bench.Measured(replace(cases[1].case, config=config), cases[1].result)
    assert [row["attention"] for row in bench.case_rows([cases[0], asked])] == ["", "torch's cuDNN kernel"]
    assert "attention" not in table(bench.case_rows([cases[0]]))


def test_the_ratio_is_to_compiled_bf16_on_the_same_work():
    plain, compiled, other = measured(rate=50, compiled=False), measured(rate=100), measured(size=8, rate=1)
    fp8, alone = measured("fp8_hybrid", rate=150), measured("fp8_hybrid", size=2)
    every = [plain, compiled, other, fp8, alone]
    assert [bench.ratio(m, every) for m in every] == [0.5, 1.0, 1.0, 1.5, None]


def test_bf16_in_place_of_fp8_is_no_baseline():
    fell_back = measured("fp8_hybrid", ran="bf16", reason="no FP8 here")
    assert bench.ratio(fell_back, [fell_back]) is None
    assert bench.case_rows([fell_back])[0]["note"] == "ran bf16: no FP8 here"


def test_kernels_beyond_the_first_are_one_row_and_waits_another():
    kernels = [Kernel(name=f"k{i}", milliseconds=4 - i, share=(4 - i) / 10, calls=1) for i in range(4)]
    kernels.insert(1, Kernel(name=WAITS, milliseconds=2, share=0.25, calls=3))
    rows = bench.kernel_rows(Result(status="ok", profile=kernels), count=2)
    assert [(row["kernel"], row["calls"]) for row in rows] == [("k0", 1), ("k1", 1), ("2 others", 2), (WAITS, 3)]
    assert (rows[2]["ms"], rows[2]["share"]) == ("3.000", "30.0%")
