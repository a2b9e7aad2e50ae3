"""Which tensors of a run are in FP8, as its settings say."""

import pytest

from gpt2_fp8 import compose
from gpt2_fp8.backends.resolve import BACKENDS


def tensors(*words, backend="emulated"):
    (config,) = compose.preflight(["model.n_layer=2", f"precision.backend={backend}", *words])
    return BACKENDS[backend](config, config.precision.name, "cpu").fp8_tensors()


def kinds(found, layer):
    return "".join(tensor.kind[0] for tensor in found if tensor.layer == layer)


def test_every_layer_has_three_and_gradients_a_format_of_their_own():
    found = tensors()
    assert len(found) == 3 * (2 * 4 + 1)
    assert [str(tensor) for tensor in found[:2]] == ["the input of blocks.0.qkv", "the weight of blocks.0.qkv"]
    assert {tensor.format for tensor in found if tensor.kind != "gradient"} == {"e4m3"}
    assert {tensor.format for tensor in found if tensor.kind == "gradient"} == {"e5m2"}
    e4m3 = tensors("precision=fp8_e4m3")
    assert {tensor.layer for tensor in e4m3 if tensor.format == "e5m2"} == {"head"}


def test_kept_layers_have_none():
    layers = {tensor.layer for tensor in tensors("precision.keep_bf16=[first,blocks.1.mlp,head]")}
    assert layers == {"blocks.1.qkv", "blocks.1.projection"}


@pytest.mark.parametrize(
    ("words", "blocks", "head"),
    [
        (["precision.emulate=[weight]"], "w", ""),
        (["precision.emulate=[wgrad_input,dgrad_gradient,head]"], "ig", "iwg"),
        (["precision.emulate=[head_dgrad_gradient]"], "", "g"),
        (["precision.emulate=[weight,head_weight,head_wgrad_input]"], "w", "iw"),
        (["precision.backward=bf16"], "iw", "iw"),
        (["precision.backward=bf16_wgrad"], "iwg", "iwg"),
    ],
    ids=str,
)
def test_operands_that_stay_in_bf16(words, blocks, head):
    found = tensors(*words)
    assert (kinds(found, "blocks.0.fc1"), kinds(found, "head")) == (blocks, head)


def test_a_run_without_fp8_has_none():
    (config,) = compose.preflight(["precision=bf16"])
    assert BACKENDS["reference"](config, "bf16", "cpu").fp8_tensors() == []
