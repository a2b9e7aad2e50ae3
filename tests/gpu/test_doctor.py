"""The environment check on a GPU: what it says of a backend is what a run of it does."""

import json
import subprocess
import sys

import pytest
import torch

from gpt2_fp8.measure import machine, worker
from gpt2_fp8.measure.case import Case
from gpt2_fp8.measure.machine import RUNS
from tests.gpu.common import HOPPER, composed

pytestmark = pytest.mark.fp8


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, "-m", "gpt2_fp8.doctor", "--quick", "--json"],
        cwd=tmp_path_factory.mktemp("doctor"), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    print(done.stdout[:20000], done.stderr)
    assert done.returncode == 0, done.stdout[:2000] + done.stderr
    return json.loads(done.stdout)


def test_fp8_works_here(report):
    facts = report["facts"]
    assert report["fp8_works"]
    assert ("the fused layers" if HOPPER else "Transformer Engine") in report["verdict"]
    assert (facts["errors"], facts["torch_cuda"]) == ({}, torch.version.cuda)
    assert facts["gpus"][0][1] == facts["capability"] == ".".join(map(str, torch.cuda.get_device_capability(0)))
    assert facts["driver_cuda"], "read from the header of nvidia-smi"
    assert facts["cudnn"]
    assert facts["nccl"]
    assert [finding for finding in report["findings"] if finding["status"] == "fail"] == []


@pytest.mark.parametrize("run", RUNS)
def test_what_is_said_is_what_a_run_does(report, run):
    """Three small steps of each, or a refusal for the same reason."""
    why, (recipe, backend) = report["facts"]["runs"][run], run.split()
    if backend == "torchao" and why is None:
        pytest.skip("it compiles for long; tests/gpu/test_torchao.py trains it")
    config = composed("precision=fp8_hybrid", f"recipe={recipe}", f"precision.backend={backend}")
    result = worker.run(Case(config=config, steps=2, warmup=1))
    if why is None:
        assert (result.status, result.message, result.backend) == ("ok", None, backend)
    else:
        assert (result.status, result.message) == ("refused", why)


def test_a_step_in_fp8_has_a_time():
    step = machine.measure_steps(print)["fp8_hybrid"]
    assert step.problem is None
    assert step.backend == ("fused" if HOPPER else "te")
    assert step.milliseconds
    assert step.tokens_per_second == pytest.approx(16 * 1024 * 1e3 / step.milliseconds)
