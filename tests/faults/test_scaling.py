"""Faults 38, 40 and 109: what delayed scaling's state can hold, and how it is kept."""

import json
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gpt2_fp8.layers.scales import DelayedScaling, Scales
from gpt2_fp8.precision import state
from gpt2_fp8.precision.plugin import FP8Precision
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


def fused():
    """The fused layers' state under a plugin, as a checkpoint's is put into it."""
    scales = Scales(DelayedScaling(4, 0, False, torch.float8_e4m3fn, torch.float8_e5m2))
    for direction in ("forward", "gradient"):
        scales.reserve(direction)
    scales.allocate(torch.device("cpu"))
    plugin = FP8Precision(None, "delayed")
    plugin.forward_context = nullcontext
    model = nn.Module()
    model.scales = scales
    plugin.convert_module(model)
    return scales, plugin


SCALE, HISTORY = "scales.scaling_fwd.scale", "scales.scaling_bwd.amax_history"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, 1e38, 1e-38])
def test_109_a_scale_that_no_tensor_has_is_found_anew(value, caplog):
    scales, plugin = fused()
    plugin.load_state_dict({"scaling": "delayed", **state.capture(plugin._model), SCALE: torch.tensor([value])})
    assert not plugin.restore_scales()  # so that the run calibrates
    assert f"scales are not taken, and found anew: {SCALE} has" in caplog.text
    assert (scales.scale == 1).all()


@pytest.mark.parametrize("value", [-1.0, 1e38])
def test_109_nor_is_a_magnitude_that_no_tensor_has(value, caplog):
    _, plugin = fused()
    history = torch.tensor([[0.0], [value], [float("nan")], [2.0]])
    plugin.load_state_dict({"scaling": "delayed", **state.capture(plugin._model), HISTORY: history})
    assert not plugin.restore_scales()
    assert f"{HISTORY} has magnitudes from" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 3.0])
def test_109_what_a_run_may_have_saved_is_taken(value):
    scales, plugin = fused()
    history = torch.full((4, 1), value)
    plugin.load_state_dict({"scaling": "delayed", **state.capture(plugin._model), HISTORY: history})
    assert plugin.restore_scales()
    assert torch.equal(scales.history[:, 1:].nan_to_num(-1), history.nan_to_num(-1))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (SCALE, torch.ones(2)),
        (SCALE, torch.ones(1, dtype=torch.float64)),
        (SCALE, torch.ones(1, dtype=torch.int32)),
        (HISTORY, torch.ones(1, 1)),
        (HISTORY, torch.ones(4, 2)),
    ],
)
def test_109_a_state_of_other_layers_is_refused(name, given):
    """Torch would repeat or cast what it is given."""
    _, plugin = fused()
    plugin.load_state_dict({"scaling": "delayed", **state.capture(plugin._model), name: given})
    with pytest.raises(ValueError, match=f"the FP8 state {name} is {given.dtype}"):
        plugin.restore_scales()


def test_40_nothing_of_fp8_is_pickled(tmp_path):
    """Transformer Engine's `_extra_state` is a pickle, which it refuses to load itself since 2.18."""
    with going_wrong(Faults()):
        train(tmp_path / "run", "trainer.max_steps=2", "trainer.val_check_interval=2", "precision=fp8_hybrid")
    folder = checkpoint(tmp_path / "run", 2)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}
    assert "_extra_state" not in json.dumps(json.loads((folder / "state.json").read_text()))
