"""Delayed scaling's state, on stand-ins for Transformer Engine's layers (tests/gpu has the real ones)."""

import sys
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from gpt2_fp8 import compose
from gpt2_fp8.precision import state
from gpt2_fp8.precision.plugin import FP8Precision, build_plugin
from gpt2_fp8.precision.resolve import Plan


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
    made.scales_found = bool(state.capture(of))
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


def test_what_transformer_engine_keeps_of_unfinished_passes_is_forgotten(monkeypatch):
    """On a stand-in of its global state: queues of scales for layers computed again, and a region set by hand."""

    class Manager:
        quantization_state = SimpleNamespace(fp8_tensors_recompute_buffer=[deque(), deque()])
        region = "outside"

        @classmethod
        def get_autocast_state(cls):
            return cls.region

        @classmethod
        def set_autocast_state(cls, region):
            cls.region = region

    names = "transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.quantization"
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].FP8GlobalStateManager = Manager
    begin_again = state.kept(model(ran=True))
    Manager.quantization_state.fp8_tensors_recompute_buffer[1].append("scales")
    Manager.region = "inside"
    begin_again()
    assert not any(Manager.quantization_state.fp8_tensors_recompute_buffer)
    assert Manager.region == "outside"


def test_gradient_amaxes_are_divided_exactly_and_alone():
    of = model(ran=True)
    before = state.capture(of)
    state.divide_gradient_amaxes(of, 2.0**16)
    for name, tensor in state.capture(of).items():
        factor = 1.0 if "fwd" in name else 2.0**16 if name.endswith("scale") else 2.0**-16
        assert torch.equal(tensor, before[name] * factor), name


FUSED = Plan("cuda", "fp8_hybrid", "fp8_hybrid", None, "fused", compile=False)
OTHER = ["precision=fp8_e4m3", "recipe.margin=1", "recipe.amax_history_len=8", "precision.keep_bf16=[head]"]


def test_the_fused_layers_scales_are_taken_under_their_own_settings_alone():
    (config,), (same,) = compose.preflight([]), compose.preflight(["precision.layers=fused", "optim.lr=1e-3"])
    own = build_plugin(config, FUSED)
    assert isinstance(own, FP8Precision)
    assert own.recipe is None, "they need no region of Transformer Engine's"
    assert build_plugin(same, FUSED).scaling == own.scaling
    others = [build_plugin(*compose.preflight([word]), FUSED).scaling for word in OTHER]
    assert len({own.scaling, *others}) == 1 + len(OTHER)


def test_scales_of_transformer_engines_layers_are_not_the_fused_layers(monkeypatch):
    (config,) = compose.preflight([])
    monkeypatch.setattr("gpt2_fp8.precision.plugin.build_recipe", lambda precision, recipe: "a recipe")
    te = build_plugin(config, replace(FUSED, backend="te"))
    assert te.recipe == "a recipe"
    assert te.scaling != build_plugin(config, FUSED).scaling


@pytest.mark.parametrize("ran", ["bf16", "fp32"])
def test_a_run_that_fell_back_has_no_scales(ran):
    (config,) = compose.preflight([])
    made = build_plugin(config, Plan("cpu", "fp8_hybrid", ran, "no GPU", "reference", compile=False))
    assert not isinstance(made, FP8Precision)
