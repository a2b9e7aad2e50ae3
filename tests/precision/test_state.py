"""Delayed scaling's state, on stand-ins for Transformer Engine's layers (tests/gpu has the real ones)."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpt2_fp8.precision import state
from gpt2_fp8.precision.plugin import FP8Precision


class Layer(nn.Module):
    """A layer of one product, which allocates its state when it is told to."""

    def __init__(self):
        super().__init__()
        self.fp8_meta = {}

    def init_fp8_metadata(self, num_gemms):
        for direction, n in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            scales = SimpleNamespace(scale=torch.ones(n * num_gemms), amax_history=torch.zeros(4, n * num_gemms))
            self.fp8_meta[direction] = scales


def model(ran):
    layers = nn.ModuleDict({"qkv": Layer(), "mlp": Layer(), "norm": nn.LayerNorm(4)})
    for i, name in enumerate(("qkv", "mlp")):
        if ran:
            layers[name].init_fp8_metadata(i + 1)
            for scales in layers[name].fp8_meta.values():
                scales.scale.uniform_(1, 9)
                scales.amax_history.uniform_(1, 9)
    return layers


def plugin(of, scaling="delayed"):
    made = FP8Precision(recipe=None, scaling=scaling)
    made.forward_context = nullcontext
    made.convert_module(of)
    return made


def test_scales_go_through_a_checkpoint_into_layers_that_have_not_run():
    trained, fresh = model(ran=True), model(ran=False)
    saved = plugin(trained).state_dict()
    again = plugin(fresh)
    again.load_state_dict(saved)
    assert again.restore_scales()
    before, after = state.capture(trained), state.capture(fresh)
    assert before.keys() == after.keys()
    assert len(before) == 8
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("scaling", ["in another format", None])
def test_scales_of_other_settings_are_not_taken(scaling):
    again = plugin(model(ran=False), scaling)
    again.load_state_dict(plugin(model(ran=True)).state_dict())
    assert not again.restore_scales()
    assert state.capture(again._model) == {}


def test_a_checkpoint_without_scales_asks_for_calibration():
    again = plugin(model(ran=False))
    again.load_state_dict({})
    assert not again.restore_scales()


def test_scales_loaded_and_not_yet_used_are_saved_again():
    saved = plugin(model(ran=True)).state_dict()
    again = plugin(model(ran=False))
    again.load_state_dict(saved)
    assert again.state_dict().keys() == saved.keys()


def test_unchanged_puts_histories_back_and_leaves_scales():
    of = model(ran=True)
    before = state.capture(of)
    with state.unchanged(of):
        state.clear_histories(of)
        assert all(torch.count_nonzero(t) == 0 for name, t in state.capture(of).items() if "history" in name)
    after = state.capture(of)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_gradient_amaxes_are_divided_exactly_and_alone():
    of = model(ran=True)
    before = state.capture(of)
    state.divide_gradient_amaxes(of, 2.0**16)
    for name, tensor in state.capture(of).items():
        factor = 1.0 if "fwd" in name else 2.0**16 if name.endswith("scale") else 2.0**-16
        assert torch.equal(tensor, before[name] * factor), name
