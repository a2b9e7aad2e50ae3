"""What is read of delayed scaling's state, on the emulated layers and on stand-ins for Transformer Engine's."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpt2_fp8.fp8.fp8_tensors import FP8Tensor, Stored, StoredScales, at_limit, headroom

E4M3 = torch.float8_e4m3fn


class Layer(nn.Module):
    """A module of Transformer Engine's that has run, with a state for each of its products."""

    def __init__(self, products, start):
        super().__init__()
        forward, back = 3 * products, 2 * products
        self.fp8_meta = {
            "scaling_fwd": self.state(torch.arange(forward) + start),
            "scaling_bwd": self.state(torch.arange(back) + start + 100),
        }

    @staticmethod
    def state(numbers):
        history = torch.zeros(6, len(numbers))
        history[-4:] = numbers / torch.tensor([[1.0], [1.0], [2.0], [4.0]])  # the last row is the newest
        return SimpleNamespace(scale=numbers.float() * 10, amax_history=history, recipe=object())


def model():
    block = nn.Module()
    block.qkv, block.projection, block.mlp = Layer(1, 1), Layer(1, 11), Layer(2, 21)
    whole = nn.Module()
    whole.blocks, whole.head = nn.ModuleList([block]), Layer(1, 31)
    return whole


def read(made, tensors, micro_batches):
    scales = StoredScales(made, tensors)
    return scales.received(scales.send(micro_batches))


WHERE = {
    ("blocks.0.qkv", "input"): 1, ("blocks.0.qkv", "weight"): 2, ("blocks.0.qkv", "gradient"): 101,
    ("blocks.0.fc1", "weight"): 22, ("blocks.0.fc2", "input"): 24, ("blocks.0.fc2", "gradient"): 123,
    ("head", "gradient"): 131,
}  # fmt: skip


def test_each_tensor_has_its_place_in_transformer_engines_state():
    """Three tensors a product forward: input, weight, output; two backward: the result's gradient, the input's."""
    tensors = [FP8Tensor(layer, kind, E4M3) for layer, kind in WHERE]
    found = read(model(), tensors, micro_batches=2)
    assert {(tensor.layer, tensor.kind): stored.scale / 10 for tensor, stored in found.items()} == WHERE
    for (layer, kind), number in WHERE.items():
        stored = found[FP8Tensor(layer, kind, E4M3)]
        assert stored.amax == number / 2, "of the newest step, which has two rows"
        assert stored.age == 1, "the largest is two rows old, and a step has two"


def test_a_history_of_one_row_is_cleared_and_the_scale_tells_the_amax():
    made = model()
    forward = made.head.fp8_meta["scaling_fwd"]
    forward.amax_history = torch.zeros(1, 3)
    (stored,) = read(made, [FP8Tensor("head", "weight", E4M3)], 1).values()
    assert (stored.scale, stored.amax, stored.age) == (320.0, pytest.approx(448 / 320), 0)


def test_layers_that_have_not_run_have_nothing_yet():
    made = model()
    made.head.fp8_meta = {}
    tensors = [FP8Tensor("head", "input", E4M3), FP8Tensor("blocks.0.qkv", "input", E4M3)]
    assert [tensor.layer for tensor in StoredScales(made, tensors).found] == ["blocks.0.qkv"]
    assert StoredScales(made, tensors[:1]).found == []


@pytest.mark.parametrize(
    ("amax", "scale", "left"), [(7.0, 64.0, 0), (7.0, 32.0, 1), (14.0, 64.0, -1), (0.0, 64.0, math.inf)]
)
def test_headroom_is_in_powers_of_two(amax, scale, left):
    assert headroom(FP8Tensor("head", "input", E4M3), Stored(amax, scale, 0)) == left


@pytest.mark.parametrize("amax", [math.nan, math.inf])
def test_headroom_of_an_amax_that_is_not_finite(amax):
    assert math.isnan(headroom(FP8Tensor("head", "input", E4M3), Stored(amax, 1.0, 0)))


def test_no_run_needs_a_scale_at_the_limit():
    assert [at_limit(scale) for scale in (0.0, math.inf, math.nan, 2.0**60, 1.0, 1e12)] == [True] * 4 + [False] * 2
