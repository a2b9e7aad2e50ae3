"""What the tests here need: a CUDA device; for FP8 also Transformer Engine and a GPU with FP8 units.

Of several processes (`pytest -n`) each has one GPU, in turn. Those of several ranks need all, and a call of their own.
"""

import os

import pytest
import torch

from gpt2_fp8.fp8.support import why_not_te_fp8
from gpt2_fp8.kernels import nvrtc

_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
_GPUS = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))).split(",")
if _WORKER.isdecimal() and torch.cuda.device_count():  # before CUDA starts, and before the tests' modules count GPUs
    os.environ["CUDA_VISIBLE_DEVICES"] = _GPUS[int(_WORKER) % len(_GPUS)]


def pytest_collection_modifyitems(items):
    here = [item for item in items if "tests/gpu" in str(item.path)]
    reason = None if torch.cuda.is_available() else "no CUDA device"
    no_fp8 = why_not_te_fp8()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif item.get_closest_marker("fp8") and no_fp8:
            item.add_marker(pytest.mark.skip(reason=no_fp8))


@pytest.fixture
def hopper_kernels():
    """For kernels in CUDA C++ that are made for Hopper."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for Hopper")
    if reason := nvrtc.why_missing():
        pytest.skip(reason)


@pytest.fixture
def poison(monkeypatch):
    """Memory that is asked for without values is full of NaN, so that what is not written shows."""
    empty = torch.empty

    def poisoned(*size, **options):
        out = empty(*size, **options)
        if out.is_cuda and out.dim():
            out.view(torch.uint8).fill_(0xFF)
        return out

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture
def deterministic():
    from tests.gpu.common import determinism  # it looks at the GPU when it is imported

    with determinism():
        yield
