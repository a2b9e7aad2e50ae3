"""Delayed scaling's state, on stand-ins for Transformer Engine's layers (tests/gpu has the real ones)."""

import sys
from collections import deque
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from gpt2_fp8 import compose
from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.backends import Fused, Reference, TransformerEngine
from gpt2_fp8.fp8.scaling import FP8Scaling


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


def scaling(of, settings="delayed"):
    made = FP8Scaling(of, settings, 8, nullcontext)
    made.ready = bool(state.capture(of))
    return made


def test_scales_go_through_a_checkpoint_into_layers_that_have_not_run():
    trained, fresh = model(ran=True), model(ran=False)
    saved = scaling(trained).state_dict()
    again = scaling(fresh)
    again.load_state_dict(saved)
    assert again.take()
    before, after = state.capture(trained), state.capture(fresh)
    assert before.keys() == after.keys()
    assert len(before) == 8
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("settings", ["in another format", None])
def test_scales_of_other_settings_are_not_taken(settings):
    again = scaling(model(ran=False), settings)
    again.load_state_dict(scaling(model(ran=True)).state_dict())
    assert again.take() == (settings is None), "where nothing is stored, nothing is lacking"
    assert state.capture(again.model) == {}


def test_a_checkpoint_without_scales_asks_for_calibration():
    again = scaling(model(ran=False))
    again.load_state_dict({})
    assert not again.take()


def test_scales_loaded_and_not_yet_used_are_saved_again():
    saved = scaling(model(ran=True)).state_dict()
    again = scaling(model(ran=False))
    again.load_state_dict(saved)
    assert again.state_dict().keys() == saved.keys()


def test_unchanged_puts_histories_back_and_leaves_scales():
    of = model(ran=True)
    before = state.capture(of)
    with state.unchanged(of):
        for each in state.scaling_states(of):
            each.amax_history.zero_()
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

    class Phase:
        _is_first_fp8_module: ClassVar = [True]

    package = "transformer_engine.pytorch"
    names = "transformer_engine", package, f"{package}.distributed", f"{package}.quantization"
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].FP8GlobalStateManager = Manager
    sys.modules[names[-2]].activation_recompute_forward = Phase
    begin_again = scaling(model(ran=True)).remember()
    Manager.quantization_state.fp8_tensors_recompute_buffer[1].append("scales")
    Manager.region = "inside"
    begin_again()
    assert not any(Manager.quantization_state.fp8_tensors_recompute_buffer)
    assert Manager.region == "outside"
    assert not Phase._is_first_fp8_module


OTHER = ["precision=fp8_e4m3", "recipe=delayed recipe.margin=1", "recipe=delayed recipe.amax_history_len=8",
         "precision.keep_bf16=[head]"]  # fmt: skip


def settings(backend, *words):
    (config,) = compose.preflight([*words])
    return backend(config, config.precision.name, "cuda").scaling(None).settings


def test_scales_are_taken_under_the_settings_that_they_were_found_under_alone():
    own = settings(Fused)
    assert own == (
        "fp8_hybrid, DelayedRecipe(name='delayed', margin=0, amax_history_len=16, amax_compute_algo='max'), [], fused"
    ), "as earlier checkpoints have it"
    assert settings(Fused, "precision.backend=fused", "recipe=delayed", "optim.lr=1e-3") == own
    others = [settings(Fused, *words.split()) for words in OTHER]
    assert len({own, *others, settings(TransformerEngine)}) == 2 + len(OTHER)


def test_stateless_recipes_have_no_scales_to_save():
    assert settings(TransformerEngine, "recipe=current") is None


@pytest.mark.parametrize("ran", ["bf16", "fp32"])
def test_a_run_that_fell_back_has_no_scales(ran):
    (config,) = compose.preflight([])
    made = Reference(config, ran, "cpu").scaling(None)
    made.load_state_dict({"settings": "delayed"})
    assert made.state_dict() == {}
    assert made.ready
