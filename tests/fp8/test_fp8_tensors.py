"""Which tensors of a run are in FP8, as its settings say, and what is read of delayed scaling's state."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpt2_fp8 import compose
from gpt2_fp8.fp8.fp8_tensors import FP8Tensor, Stored, StoredScales, at_limit, fp8_tensors, headroom

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
    return scales.receive(scales.send(micro_batches))


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
    made.head.fp8_meta["scaling_fwd"].amax_history = torch.zeros(1, 3)
    (stored,) = read(made, [FP8Tensor("head", "weight", E4M3)], 1).values()
    assert (stored.scale, stored.amax, stored.age) == (320.0, pytest.approx(448 / 320), 0)


def test_layers_that_have_not_run_have_nothing_yet():
    made = model()
    made.head.fp8_meta = {}
    tensors = [FP8Tensor("head", "input", E4M3), FP8Tensor("blocks.0.qkv", "input", E4M3)]
    assert [tensor.layer for tensor in StoredScales(made, tensors).found] == ["blocks.0.qkv"]
    assert StoredScales(made, tensors[:1]).found == []


@pytest.mark.parametrize(
    ("amax", "scale", "left"),
    [(7.0, 64.0, 0), (7.0, 32.0, 1), (14.0, 64.0, -1), (0.0, 64.0, math.inf), (math.inf, 1.0, math.nan)],
)
def test_headroom_is_in_powers_of_two(amax, scale, left):
    assert headroom(FP8Tensor("head", "input", E4M3), Stored(amax, scale, 0)) == pytest.approx(left, nan_ok=True)


def test_no_run_needs_a_scale_at_the_limit():
    assert [at_limit(scale) for scale in (0.0, math.inf, math.nan, 2.0**60, 1.0, 1e12)] == [True] * 4 + [False] * 2


def tensors(*words, backend="emulated"):
    (config,) = compose.preflight(["model.n_layer=2", f"precision.backend={backend}", *words])
    return fp8_tensors(config.precision, config.model.n_layer)


def kinds(found, layer):
    return "".join(tensor.kind[0] for tensor in found if tensor.layer == layer)


def test_every_layer_has_three_and_gradients_a_format_of_their_own():
    found = tensors("recipe=current", backend="torchao")
    assert len(found) == 3 * (2 * 4 + 1)
    assert [str(tensor) for tensor in found[:2]] == ["the input of blocks.0.qkv", "the weight of blocks.0.qkv"]
    assert {tensor.format for tensor in found if tensor.kind != "gradient"} == {"e4m3"}
    assert {tensor.format for tensor in found if tensor.kind == "gradient"} == {"e5m2"}
    e4m3 = tensors("precision=fp8_e4m3", "recipe=current", backend="torchao")
    assert {tensor.layer for tensor in e4m3 if tensor.format == "e5m2"} == {"head"}


def test_kept_layers_have_none():
    layers = {tensor.layer for tensor in tensors("precision.keep_bf16=[first,blocks.1.mlp,head]")}
    assert layers == {"blocks.1.qkv", "blocks.1.projection"}


@pytest.mark.parametrize(("backward", "blocks"), [("fp8", "iwg"), ("bf16", "iw"), ("bf16_wgrad", "iwg")])
def test_operands_that_stay_in_bf16(backward, blocks):
    """The head of the emulated layers is in bf16."""
    found = tensors(f"precision.backward={backward}")
    assert (kinds(found, "blocks.0.fc1"), kinds(found, "head")) == (blocks, "")
    found = tensors(f"precision.backward={backward}", "recipe=current", backend="torchao")
    assert (kinds(found, "blocks.0.fc1"), kinds(found, "head")) == (blocks, blocks)
