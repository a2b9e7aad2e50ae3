"""A case trains what a run trains, and tells how it went whatever happens."""

from dataclasses import replace

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.measure import worker
from gpt2_fp8.measure.case import Case, measure
from tests.runs import SMALL, record_steps, train


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def case(*words, **settings):
    (config,) = compose.preflight([*SMALL, "precision=fp32", *words])
    return Case(config=config, **({"steps": 3, "warmup": 2} | settings))


def test_its_losses_are_those_of_a_run(tmp_path, monkeypatch):
    steps = record_steps(monkeypatch)
    train(tmp_path / "run", "precision=fp32")
    assert [loss.hex() for loss in worker.run(case()).losses] == [loss for _, _, loss in steps[:5]]


def test_what_it_tells():
    result = worker.run(case(profile=True))
    assert (result.status, result.ran, result.reason, result.backend) == ("ok", "fp32", None, "reference")
    assert (result.device, result.compiled, result.peak_memory_gb, result.mfu_bf16) == ("the CPU", False, None, None)
    assert result.attention == "torch's flash kernel"
    assert result.slowest <= result.tokens_per_second <= result.fastest
    assert len(result.losses) == len(result.grad_norms) == 5, "without the profiled step"
    assert result.versions["torch"] == torch.__version__
    assert sum(kernel.share for kernel in result.profile) == pytest.approx(1)
    assert any(kernel.name == "aten::addmm" for kernel in result.profile)
    assert result.profile[0].milliseconds == max(kernel.milliseconds for kernel in result.profile)


def test_a_fallback_has_its_reason():
    result = worker.run(case("precision=fp8_hybrid"))
    assert (result.status, result.ran) == ("ok", "fp32")
    assert "FP8" in result.reason


def test_what_cannot_run_here_is_refused():
    result = worker.run(case("precision=fp8_hybrid", "precision.fallback=error"))
    assert result.status == "refused"
    assert "precision=fp8_hybrid cannot run here" in result.message
    assert result.remedy == "precision.fallback=allow trains in fp32"


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("CUDA out of memory."), "out of memory"), (RuntimeError("shapes do not\n fit"), "failed")],
)
def test_errors_in_the_middle(error, status, monkeypatch):
    def step(self, ids):
        raise error

    monkeypatch.setattr(worker.TrainingStep, "__call__", step)
    result = worker.run(case())
    assert result.status == status
    assert result.message
    assert "\n" not in result.message
    assert result.ran == "fp32", "what was known by then"


def test_in_a_process_of_its_own():
    result = measure(case(steps=1, warmup=0, profile=True), 300)
    assert (result.status, result.message) == ("ok", None)
    assert result == replace(result, losses=worker.run(case(steps=1, warmup=0)).losses)
    assert result.profile[0].calls
    assert measure(case(), 0.2).message == "took longer than 0.2 seconds"


@pytest.mark.parametrize(
    ("ranges", "gaps"),
    [
        ([], []),
        ([(3, 5)], []),
        ([(3, 5), (0, 2), (5, 6), (9, 10)], [1, 3]),
        ([(0, 10), (1, 2), (4, 11), (12, 13)], [1]),  # kernels that overlap
    ],
)
def test_what_a_gpu_waits_between_kernels(ranges, gaps):
    assert worker.waits(ranges) == gaps
