"""A magnitude that has jumped counts for so much and no more, until it is seen again."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpt2_fp8.fp8 import state
from gpt2_fp8.fp8.scaling import JUMP, FP8Scaling, limit_amaxes
from gpt2_fp8.layers.delayed_scaling import LARGEST_SCALE
from tests.layers.test_delayed_scaling import E4M3, E5M2, Model, assert_reciprocal, step

NEWEST = slice(0, 1)


def owner(model):
    return FP8Scaling(model, "delayed", 8, nullcontext)


def outliers(model, micro_batches):
    return int(owner(model).count_amax_outliers(micro_batches))


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ((3.0, 2.0, 1.0), (3.0, 2.0, 1.0)),
        ((2.0 * JUMP, 2.0, 1.0), (2.0 * JUMP, 2.0, 1.0)),
        ((2.5 * JUMP, 2.0, 1.0), (2.0 * JUMP, 2.0, 1.0)),
        ((1e30, 2.0, 1.0), (2.0 * JUMP, 2.0, 1.0)),
        ((1e30, 1e30, 1.0), (1e30, 1e30, 1.0)),  # seen before
        ((1.0, 1e30, 1.0), (1.0, 1e30, 1.0)),  # not this step's: judged when it was new
        ((1e30, 0.0, 0.0), (1e30, 0.0, 0.0)),  # nothing to compare with
        ((math.inf, 2.0, 1.0), (0.0, 2.0, 1.0)),
        ((math.nan, 2.0, math.inf), (0.0, 2.0, 0.0)),
    ],
)
def test_a_new_magnitude_counts_for_at_most_so_much_of_the_second_largest(history, expected):
    """Beside a column that is judged by itself."""
    given, wanted = (torch.tensor([values, (1e30, 1e29, 2.0)]).T for values in (history, expected))
    assert limit_amaxes(given, NEWEST).tolist() == wanted.tolist()


def seen(*steps):
    """The fused layers' scales after steps of these magnitudes, each judged as a run does; and the outliers of each."""
    model, found = Model(history=4), []
    for magnitudes in steps:
        step(model.scales, *magnitudes)
        found.append(outliers(model, 1))
        if found[-1]:
            owner(model).limit(1)
    model.scales.begin(True)
    return model.scales, found


def test_an_accident_of_one_step_leaves_scales_that_resolve_the_next():
    normal = (2.0, 4.0, 8.0)
    scales, found = seen(normal, normal, (2.0, 1e30, 8.0))
    assert found == [0, 0, 1]
    assert scales.scale[1].item() == E4M3 / (4 * JUMP)
    assert_reciprocal(scales)
    scales, found = seen(normal, normal, (2.0, 1e30, 8.0), *[normal] * 4)
    assert found == [0, 0, 1, 0, 0, 0, 0]
    assert scales.scale[1].item() == E4M3 / 4, "the history has forgotten it"


def test_what_is_real_is_believed_a_step_later():
    scales, found = seen((2, 4, 8), (2, 4, 8), (2, 4e5, 8), (2, 4e5, 8))
    assert found == [0, 0, 1, 0]
    assert scales.scale[1].item() == pytest.approx(E4M3 / 4e5)


def test_a_healthy_run_keeps_every_bit():
    generator = torch.Generator().manual_seed(1)
    judged, plain = Model(history=16), Model(history=16)
    for _ in range(100):
        magnitudes = torch.exp2(torch.rand(3, generator=generator) * 9 - 4).tolist()
        for model in (judged, plain):
            step(model.scales, *magnitudes)
        assert outliers(judged, 1) == 0
    before = state.capture(plain)
    assert all(torch.equal(before[name], tensor) for name, tensor in state.capture(judged).items())


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e30])
def test_scales_stay_within_what_products_of_two_inverses_can_represent(magnitude):
    model = Model(history=4)
    for _ in range(2):
        step(model.scales, magnitude, magnitude, magnitude)
    model.scales.begin(True)
    assert (model.scales.scale <= LARGEST_SCALE).all()
    assert (model.scales.scale >= 1 / LARGEST_SCALE).all()
    inverse = model.scales.scale_inv
    assert (inverse * inverse >= torch.finfo(torch.float32).tiny).all()
    assert torch.isfinite(inverse * inverse).all()


class TransformerEngine(nn.Module):
    """A layer whose state moves on as Transformer Engine's does: a row a micro-batch, and the scale at once."""

    def __init__(self, algorithm="max"):
        super().__init__()
        hybrid = SimpleNamespace(value=SimpleNamespace(max_fwd=E4M3, max_bwd=E5M2))
        recipe = SimpleNamespace(amax_compute_algo=algorithm, fp8_format=hybrid, margin=0)
        self.state = SimpleNamespace(recipe=recipe, scale=torch.ones(2), amax_history=torch.zeros(8, 2))
        self.fp8_meta = {"scaling_fwd": self.state}

    def see(self, *magnitudes):
        history = self.state.amax_history
        history[0] = torch.tensor(magnitudes)
        newest = history[0].clone()
        amax = newest if self.state.recipe.amax_compute_algo == "most_recent" else history.amax(0)
        fresh = torch.where(torch.isfinite(amax), E4M3 / amax, self.state.scale)
        history.copy_(history.roll(-1, 0))
        history[0] = 0
        self.state.scale.copy_(fresh)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("accident", [0, 1])
def test_transformer_engines_scales_follow_at_once(algorithm, accident):
    layer = TransformerEngine(algorithm)
    for _ in range(2):
        layer.see(2.0, 8.0)
    assert outliers(layer, 2) == 0
    for i in range(2):
        layer.see(2.0, 1e30 if i == accident else 8.0)
    assert outliers(layer, 2) == 1
    owner(layer).limit(2)
    forgotten = algorithm == "most_recent" and accident == 0
    expected = E4M3 / 8 if forgotten else E4M3 / (8 * JUMP)
    assert layer.state.scale.tolist() == pytest.approx([E4M3 / 2, expected])
    assert layer.state.amax_history.max().item() == 8 * JUMP
    assert outliers(layer, 2) == 0


def test_a_magnitude_that_is_not_finite_does_not_keep_transformer_engines_scale_as_it_is():
    layer = TransformerEngine()
    layer.see(2.0, 8.0)
    layer.see(2.0, math.inf)
    assert outliers(layer, 1) == 1
    owner(layer).limit(1)
    assert layer.state.scale.tolist() == [E4M3 / 2, E4M3 / 8]
    assert torch.isfinite(layer.state.amax_history).all()
    layer.see(2.0, 4.0)
    layer.see(2.0, 16.0)
    assert layer.state.scale.tolist() == [E4M3 / 2, E4M3 / 16]
