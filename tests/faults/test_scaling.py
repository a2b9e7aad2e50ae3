"""Faults 38 and 40: what delayed scaling's state can hold, and how it is kept."""

import json

import pytest
import torch

from gpt2_fp8.layers.scales import DelayedScaling, Scales
from tests.faults.pretended import Faults, going_wrong
from tests.runs import checkpoint, train


@pytest.mark.parametrize("amax", [0.0, float("inf"), float("nan"), 1e-45, 3e38])
@pytest.mark.parametrize("before", [0.0, 2.0])
def test_38_whatever_magnitude_is_seen_the_scale_stays_finite(amax, before):
    scales = Scales(DelayedScaling(4, 0, False, torch.float8_e4m3fn, torch.float8_e5m2))
    for direction in ("forward", "gradient"):
        scales.reserve(direction)
    scales.allocate(torch.device("cpu"))
    scales.history[1] = before
    scales.history[0] = amax
    scales.update()
    for _ in range(3):  # and no later step trips over it
        assert torch.isfinite(scales.scale).all()
        assert (scales.scale > 0).all()
        assert torch.isfinite(scales.scale_inv).all()
        assert torch.isfinite(scales.history).all()
        scales.update()


def test_40_nothing_of_fp8_is_pickled(tmp_path):
    """Transformer Engine's `_extra_state` is a pickle, which it refuses to load itself since 2.18."""
    with going_wrong(Faults()):
        train(tmp_path / "run", "trainer.max_steps=2", "trainer.val_check_interval=2", "precision=fp8_hybrid")
    folder = checkpoint(tmp_path / "run", 2)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert "_extra_state" not in json.dumps(json.loads((folder / "state.json").read_text()))
