"""Transformer Engine's layers with every option of a model, in bf16 and FP8, against plain torch in bf16."""

import math
from dataclasses import replace

import pytest
import torch

from gpt2_fp8.config.block_spec import RoPE, block_spec
from gpt2_fp8.layers import reference, te
from gpt2_fp8.layers.reference import angles
from gpt2_fp8.model.generate import generate
from tests.gpu import common
from tests.gpu.common import CONFIG, VOCAB, bf16, build, calibrated, error, gradients, hopper, tokens

pytestmark = pytest.mark.fp8
BANDS = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_positions": 64}
OPTIONS = {
    "grouped-query attention": {"n_kv_head": 2},
    "one key-value head": {"n_kv_head": 1},
    "RMSNorm": {"norm": "rms_norm", "norm_epsilon": 1e-6},
    "RoPE": {"positions": "rope"},
    "Llama 3's scaling": {"positions": "rope", "rope_scaling": 8.0, **BANDS},
    "QK-norm": {"qk_norm": True},
    "SwiGLU": {"mlp": "swiglu", "mlp_width": 640},
    "SwiGLU without biases": {"mlp": "swiglu", "bias": False},
    "squared ReLU": {"mlp": "relu_squared", "mlp_width": 640},
    "a block of 2026": {
        "mlp": "relu_squared", "bias": False, "norm": "rms_norm", "positions": "rope", "qk_norm": True,
        "head_size": 128, "n_head": 2, "tied_head": False,
    },
    "an untied head": {"tied_head": False},
    "heads of 128": {"head_size": 128},
    "heads of 32": {"head_size": 32, "n_head": 8},
    "heads of 48": {"head_size": 48, "n_head": 3},
    "all together": {
        "n_kv_head": 2, "head_size": 128, "qk_norm": True, "norm": "rms_norm", "mlp": "swiglu", "mlp_width": 640,
        "bias": False, "positions": "rope", "rope_scaling": 8.0, **BANDS, "tied_head": False,
        "depth_scaled_init": False,
    },
}  # fmt: skip
WHOLE = ["SwiGLU", "squared ReLU", "all together"]  # what is tried with recomputation
every_option = pytest.mark.parametrize("name", OPTIONS)


def told_apart(model):
    """Make every number of a model count: norms and biases get values of their own, and attention is not uniform."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.empty(parameter.shape).normal_(generator=generator).to(parameter.device)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            elif name.endswith(("qkv.weight", "fc1_weight")):
                parameter.mul_(3.0)
    return model


@every_option
def test_bf16_is_close_to_plain_torch(name):
    config, ids = replace(CONFIG, **OPTIONS[name]), tokens()
    ours, plain = (told_apart(build(backend, config=config)) for backend in ("te", "reference"))
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    loss, found = gradients(ours, ids, True, bf16)
    expected_loss, expected = gradients(plain, ids, False, bf16)
    assert loss == pytest.approx(expected_loss, rel=5e-4)
    assert error(found, expected) < 0.03
    for parameter, gradient in expected.items():
        assert (found[parameter] - gradient).norm() <= 0.1 * gradient.norm() + 1e-6, parameter


@every_option
def test_fp8_is_close_to_plain_torch_in_bf16(name):
    """By every recipe of Hopper, and with the gradients in E4M3 or in bf16."""
    config, ids = replace(CONFIG, **OPTIONS[name]), tokens()
    expected_loss, expected = gradients(build("reference", config=config), ids, False, bf16)
    ways = [{"recipe": recipe} for recipe in ("delayed", "current", "block")]
    for way in (*ways, {"precision": "fp8_e4m3"}, {"recipe": "current", "backward": "bf16"}):
        model, fp8 = calibrated("te", config=config, **way)
        loss, found = gradients(model, ids, True, fp8.forward_context)
        assert loss == pytest.approx(expected_loss, rel=3e-3), way
        assert 0 < error(found, expected) < 0.15, way


@pytest.mark.parametrize("choice", ["mlp", "full"])
@pytest.mark.parametrize("name", WHOLE)
def test_recomputing_changes_nothing(name, choice):
    config, ids = replace(CONFIG, **OPTIONS[name]), tokens()
    found = {}
    for recompute in ("none", choice):
        model, fp8 = calibrated("te", "current", config=config, recompute=recompute)
        found[recompute] = gradients(model, ids, True, fp8.forward_context)
    assert found[choice][0] == found["none"][0]
    assert error(found[choice][1], found["none"][1]) < 1e-2


def test_the_gate_is_the_first_half_of_swiglu():
    """A gate of -20 closes the MLP whatever the other half says; the other half of -20 would not."""
    spec = block_spec(replace(CONFIG, mlp="swiglu", mlp_width=64))
    layer = te.layer_norm_mlp(256, spec.mlp, spec.norm, bias=True, fp8=False, recompute=False).cuda()
    x = torch.randn(2, 16, 256, device="cuda")
    with torch.no_grad(), bf16():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.fc2_weight.fill_(1.0)
        layer.fc1_bias[:64], layer.fc1_bias[64:] = -20.0, 1.0
        assert layer(x).abs().max() < 1e-3
        layer.fc1_bias[:64], layer.fc1_bias[64:] = 1.0, -20.0
        silu = 1 / (1 + math.exp(-1))
        assert layer(x).mean().item() == pytest.approx(-20 * silu * 64, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fused_rotation_is_ours(dtype):
    heads = block_spec(CONFIG).heads
    layer, plain = te.attention(heads, 0.0), reference.attention(heads, 0.0)
    angle = angles(RoPE(500_000.0), heads.size, 256, torch.device("cuda"))
    qkv = torch.randn(2, 256, heads.packed, device="cuda", dtype=dtype)
    for x in layer.split(qkv)[:2]:
        ours, expected = layer.rotate(x, angle), plain.rotate(x, angle).to(dtype)
        assert torch.allclose(ours, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_text_is_drawn_in_fp8():
    config = replace(CONFIG, **OPTIONS["all together"])
    model, fp8 = calibrated("te", config=config)
    with common.evaluating(model, fp8):
        drawn = generate(model, [1, 2, 3], 4, VOCAB, config.n_positions, seed=0)
    assert len(drawn) == 4


@hopper
@pytest.mark.parametrize("config", [replace(CONFIG, mlp_width=640), replace(CONFIG, norm_epsilon=1e-3)])
def test_the_fused_layers_have_an_own_mlp_width_and_epsilon(config):
    """The only options that no layers lack."""
    common.assert_like_bf16("fused", config=config, rel=3e-3, most=0.15)
