"""A benchmark's case on a GPU: in a process of its own, with what only a GPU can tell."""

import pytest
import torch

from gpt2_fp8.compat import torch_private
from gpt2_fp8.measure import worker
from gpt2_fp8.measure.case import WAITS, Case, measure
from gpt2_fp8.model.parameters import peak_bf16_flops
from tests.gpu.common import HOPPER, composed

pytestmark = pytest.mark.fp8


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def assert_figures(result, steps):
    assert (result.status, result.message, result.reason) == ("ok", None, None)
    assert result.device == torch.cuda.get_device_name()
    assert 0 < result.slowest <= result.tokens_per_second <= result.fastest
    assert 0 < result.peak_memory_gb < 8
    peak = peak_bf16_flops(result.device)
    assert (result.mfu_bf16 is None) == (peak is None)
    assert peak is None or 0 < result.mfu_bf16 < 1
    assert len(result.losses) == len(result.grad_norms) == steps
    assert all(3 < loss < 7 for loss in result.losses)
    assert all(0 < norm < 100 for norm in result.grad_norms)


def assert_profile(profile, *names):
    """Its lines are one step's kernels and the waits between them, the longest first."""
    assert len(profile) > 10
    assert sum(kernel.share for kernel in profile) == pytest.approx(1)
    times = [kernel.milliseconds for kernel in profile]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0
    assert all(kernel.calls >= 1 for kernel in profile)
    (waits,) = [kernel for kernel in profile if kernel.name == WAITS]
    assert 10 < waits.calls < sum(kernel.calls for kernel in profile if kernel is not waits)
    for name in names:
        assert any(name in kernel.name for kernel in profile), name


def test_a_case_in_a_process_of_its_own():
    """One child, some fifteen seconds: what a user's benchmark does."""
    result = measure(Case(config=composed("precision.backend=auto"), steps=3, warmup=3, profile=True), 300)
    assert_figures(result, 6)
    assert (result.ran, result.backend, result.compiled) == ("fp8_hybrid", "fused" if HOPPER else "te", False)
    assert {"torch", "transformer_engine", "triton", "cuda"} <= result.versions.keys()
    if HOPPER:
        assert_profile(result.profile, "softmax_gradient", "_statistics", "cast")
        replayed = next(kernel for kernel in result.profile if "softmax_gradient" in kernel.name)
        assert replayed.calls == 3, "three micro-batches, one chunk of the head each: a graph's kernels are counted"
        assert not any(torch_private.MARK in kernel.name for kernel in result.profile)
    else:
        assert_profile(result.profile)


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [(["precision.backend=te"], "te"), (["recipe=current"], "te"), (["precision=bf16", "compile=false"], "reference")],
    ids=" ".join,
)
def test_what_is_measured_is_what_was_asked_for(overrides, backend):
    result = worker.run(Case(config=composed(*overrides), steps=2, warmup=2, profile=True))
    assert_figures(result, 4)
    assert (result.backend, result.compiled) == (backend, False)
    assert_profile(result.profile)
