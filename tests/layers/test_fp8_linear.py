"""The FP8 side of a weight: its copies are all there, or none is."""

import importlib

import pytest
import torch

from gpt2_fp8.layers.delayed_scaling import Scales
from tests.layers.standins import SCALING, families

WEIGHT, BIAS = torch.zeros(48, 32), torch.zeros(48)


@pytest.fixture(scope="module")
def fp8_linear():
    with families():
        yield importlib.import_module("gpt2_fp8.layers.fp8_linear")


@pytest.mark.parametrize(("name", "fails"), [("empty", 1), ("empty", 2), ("empty_like", 1)])
def test_64_memory_that_runs_out_between_the_copies_leaves_none(fp8_linear, monkeypatch, name, fails):
    """Else the next attempt, with a smaller micro-batch, would take the first copy for all of them."""
    scales, cast, calls, make = Scales(SCALING), [], [], getattr(torch, name)
    linear = fp8_linear.FP8Linear(scales)
    scales.allocate(torch.device("cpu"))
    monkeypatch.setattr(fp8_linear, "cast_transpose", lambda weight, slot, out: cast.append(out))

    def scarce(*given, **more):
        calls.append(given)
        if len(calls) == fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(*given, **more)

    monkeypatch.setattr(torch, name, scarce)
    with pytest.raises(torch.OutOfMemoryError):
        linear.refresh(WEIGHT, BIAS)
    assert not cast
    linear.refresh(WEIGHT, BIAS)
    ((w8, w8t),) = cast
    assert (w8.shape, w8t.shape) == ((48, 32), (32, 48))
    assert linear.w8 is w8
    assert linear.w8t is w8t
    assert (linear.bias.shape, linear.bias.dtype) == ((48,), torch.bfloat16)
