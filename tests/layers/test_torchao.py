"""torchao's layers against the plain-torch ones, with FP8 products computed on a CPU from FP8's own numbers."""

from dataclasses import replace

import pytest
import torch

from gpt2_fp8 import compose
from gpt2_fp8.compat.torchao import Float8Product
from gpt2_fp8.fp8.recipes import float8_config
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.block import WithProducts
from gpt2_fp8.model.gpt2 import GPT2, initialise
from gpt2_fp8.model.loss import cross_entropy, split
from tests.common import CONFIG, VOCAB, ids
from tests.common import build as plain
from tests.model.options import MODERN

RECIPES = ["current", "rowwise"]
LLAMA = replace(
    CONFIG, norm="rms_norm", mlp="swiglu", positions="rope", n_kv_head=1, qk_norm=True, tied_head=False, bias=False
)


@pytest.fixture(scope="module")
def settings():
    (config,) = compose.preflight(["precision=fp8_hybrid"])
    return config.precision


def products(settings, recipe):
    """Of the blocks and of the head."""
    configs = (float8_config(settings, recipe, head, emulate=True) for head in (False, True))
    dtype = torch.bfloat16 if settings.backward == "bf16" else None
    return [Float8Product(config, dtype) for config in configs]


def build(settings, recipe="current", keep_bf16=(), recompute="none", config=CONFIG):
    model = GPT2(config, VOCAB, WithProducts(*products(settings, recipe), recompute), keep_bf16)
    initialise(model, seed=1)
    return model


def gradients(model):
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    inputs, targets = split(ids())
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy(model(inputs), targets, VOCAB, False)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def error(ours, expected):
    return ((ours - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("config", [CONFIG, LLAMA, replace(CONFIG, **MODERN)], ids=["gpt2", "llama", "2026"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradients_are_near_the_plain_layers(settings, recipe, config):
    ours, theirs = build(settings, recipe, config=config), plain(config)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    (loss, found), (expected_loss, expected) = gradients(ours), gradients(theirs)
    assert loss == pytest.approx(expected_loss, rel=0.01)
    assert loss != expected_loss
    assert all(g.dtype == torch.float32 for g in found.values())
    far = {name: error(found[name], expected[name]) for name in expected}
    assert 1e-3 < max(far.values()) < 0.3, far


@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_that_are_kept_are_the_plain_layers_bit_for_bit(settings, recipe):
    loss, found = gradients(build(settings, recipe, keep_bf16=["*"]))
    expected_loss, expected = gradients(plain())
    assert loss == expected_loss
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("part", ["qkv", "projection", "fc1", "fc2", "head"])
def test_each_part_alone_is_in_fp8_and_can_be_kept(settings, part):
    others = {"qkv", "projection", "fc1", "fc2", "head"} - {part}
    names = [name if name == "head" else f"blocks.*.{name}" for name in sorted(others)]
    alone, none, every = (gradients(build(settings, keep_bf16=kept))[0] for kept in (names, ["*"], []))
    assert len({alone, none, every}) == 3


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("backward", "in_bf16"), [("bf16_wgrad", "weight"), ("bf16", "weight input")])
def test_a_backward_in_bf16_multiplies_the_original_operands(settings, recipe, backward, in_bf16):
    """Against formulas: what is in bf16 differs by bf16's rounding, what is in FP8 by more."""
    settings = replace(settings, backward=backward)
    torch.manual_seed(0)
    linear = reference.Linear(64, 48, bias=True)
    linear.product = products(settings, recipe)[0]
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    x, dy = torch.randn(2, 16, 64, requires_grad=True), torch.randn(2, 16, 48)
    y = linear(x)
    y.backward(dy.to(y.dtype))
    rows, dy = x.detach().flatten(0, 1), dy.flatten(0, 1)
    weight = linear.weight.detach()
    far = {
        "output": error(y.detach().float().flatten(0, 1), rows @ weight.T + linear.bias.detach()),
        "input": error(x.grad.flatten(0, 1), dy @ weight),
        "weight": error(linear.weight.grad, dy.T @ rows),
    }
    assert {name for name, value in far.items() if value < 0.006} == set(in_bf16.split()), far
    assert max(far.values()) < 0.1


@pytest.mark.parametrize(
    ("name", "recipe", "precision", "backward"),
    [
        ("tensorwise", "current", "fp8_hybrid", "fp8"),
        ("rowwise", "rowwise", "fp8_e4m3", "fp8"),
        ("rowwise_with_gw_hp", "rowwise", "fp8_e4m3", "bf16_wgrad"),
    ],
)
def test_torchaos_own_recipes_are_three_of_ours(settings, name, recipe, precision, backward):
    from torchao.float8 import Float8LinearConfig, ScalingType

    ours = float8_config(replace(settings, name=precision, backward=backward), recipe)
    theirs = Float8LinearConfig.from_recipe_name(name)
    for key, value in vars(theirs).items():
        if getattr(value, "scaling_type", None) is ScalingType.DISABLED:
            assert getattr(ours, key).scaling_type is ScalingType.DISABLED
        else:
            assert getattr(ours, key) == value, key


@pytest.mark.parametrize("recompute", ["mlp", "full"])
def test_what_is_computed_again_is_the_same(settings, recompute):
    (loss, found), (expected_loss, expected) = (gradients(build(settings, recompute=r)) for r in (recompute, "none"))
    assert loss == expected_loss
    assert all(torch.equal(found[name], expected[name]) for name in expected)
