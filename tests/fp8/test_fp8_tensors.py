"""Which tensors of a run are in FP8, as its settings say."""

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.fp8.fp8_tensors import fp8_tensors


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
