"""What the tests here need: a CUDA device; for FP8 also Transformer Engine and a GPU with FP8 units."""

import pytest
import torch

from gpt2_fp8.precision.support import why_not_te_fp8


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
