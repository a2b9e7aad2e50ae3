"""A fused block and a fused head of each true width against float64: what goes out, and every gradient.

How far they may lie from exact results is computed, not chosen: the same block in float64 (`Rounded`), where nothing is
rounded but the tensors that ours casts to FP8, by the same scales. What ours rounds to bfloat16 besides moves some
numbers over the border between two of FP8, so the errors are not the same; but they are as large, and lean as little to
one side. (A copy of the block with bfloat16's roundings, on a CPU: within 8 % as large, and 0.7 % as far to a side.)
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from gpt2_fp8.config.block_spec import block_spec
from gpt2_fp8.config.schema import ModelConfig
from gpt2_fp8.kernels.formats import LOGITS_EXPONENT
from gpt2_fp8.kernels.product import fits
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.layers.reference import causal_attention
from tests.config.conf_files import merged
from tests.gpu.common import VOCAB, hopper, scaling
from tests.gpu.kernels import DEVICE, to_fp8

pytestmark = [pytest.mark.fp8, hopper]

MODELS = ["gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl", "gpt2_wide"]
TOKENS = 2048
EPSILON = 1e-5  # GPT-2's
LARGER = 1.2  # than FP8's rounding alone
ALONG = 0.01  # of a result's own length: how much more or less than FP8's rounding an error may point along it
ELSE = 2.0**-9  # bfloat16's rounding, where FP8 takes no part


def config_of(model):
    return ModelConfig(**merged(Path("model", f"{model}.yaml")))


def normal(*shape, seed, dtype=torch.float32):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=generator).to(dtype)


def fill(module):
    """Values by which every part counts: a product's outputs, and so a branch's, are of order 1."""
    for seed, (name, parameter) in enumerate(module.named_parameters(), 10):
        value = normal(*parameter.shape, seed=seed)
        if parameter.dim() == 2:
            value /= parameter.shape[1] ** 0.5
        elif name.endswith("layer_norm_weight"):
            value = 1 + value / 5
        else:
            value /= 10
        parameter.data = value


class _Product(torch.autograd.Function):
    """y = x W^T in float64, of operands rounded to FP8 by the scales of an `FP8Linear`; so is y's gradient, by its
    slot's scale or by the fixed one that a head's gradient has."""

    @staticmethod
    def forward(ctx, x, weight, product, of_gradient=None):
        x8, w8 = rounded(x, product.slot("input")), rounded(weight, product.slot("weight"))
        ctx.save_for_backward(x8, w8)
        ctx.slot = of_gradient or product.slot("gradient")
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, g):
        (x8, w8), g8 = ctx.saved_tensors, rounded(g, ctx.slot)
        return g8 @ w8, g8.t() @ x8, None, None


def rounded(x, slot):
    scale = slot.scale.double()
    return to_fp8(x, scale, slot.dtype).double() / scale


def block_in_float64(block, p, x, heads, products):
    """What `fused.Block` computes; with `products`, as these round. p: parameters by name, x: [batch, tokens, d]."""

    def times(name, y, number):
        weight, bias = p[name + "weight"], p[name + "bias"]
        flat = y.flatten(0, -2)
        y8 = flat @ weight.t() if products is None else _Product.apply(flat, weight, products[number])
        return (y8 + bias).view(*y.shape[:-1], -1)

    def norm(y, name):
        return F.layer_norm(y, y.shape[-1:], p[name + "layer_norm_weight"], p[name + "layer_norm_bias"], EPSILON)

    attended = causal_attention(times("qkv.", norm(x, "qkv."), 0), heads)
    middle = times("projection.", attended, 1) + x
    z = F.gelu(times("mlp.fc1_", norm(middle, "mlp."), 2), approximate="tanh")
    return times("mlp.fc2_", z, 3) + middle


def head_in_float64(p, x, targets, product):
    """The loss that `head.Head` computes; with `product`, as it rounds."""
    y = F.layer_norm(x, x.shape[-1:], p["layer_norm_weight"], p["layer_norm_bias"], EPSILON).flatten(0, 1)
    scale = 2.0**LOGITS_EXPONENT * (targets >= 0).sum()  # of the sum of the losses, which is divided by their number
    slot = SimpleNamespace(scale=scale, dtype=torch.float8_e5m2)
    logits = y @ p["weight"].t() if product is None else _Product.apply(y, p["weight"], product, slot)
    return F.cross_entropy(logits[:, :VOCAB], targets.flatten(), ignore_index=-1)


def exact_of(module, x, compute, upstream):
    """What `compute(parameters, x)` gives in float64, and the gradients of x and of each parameter."""
    p = {name: value.detach().double().requires_grad_() for name, value in module.named_parameters()}
    given = x.detach().double().requires_grad_()
    out = compute(p, given)
    out.backward(upstream.double().expand_as(out))
    return out.detach(), {"input": given.grad, **{name: value.grad for name, value in p.items()}}


def ours_of(module, scales, x, compute, upstream, passes=3):
    """The same of a fused module, once its scales are found."""
    for _ in range(passes):
        module.zero_grad(set_to_none=True)
        given = x.detach().clone().requires_grad_()
        scales.begin(True)
        out = compute(given)
        out.backward(upstream.to(out.dtype).expand_as(out))
    return out.detach(), {"input": given.grad, **{name: value.grad for name, value in module.named_parameters()}}


def assert_rounds_as_fp8_does(name, ours, rounds, exact):
    """See the module. All are of one shape; `rounds` is what FP8's rounding alone makes of `exact`."""
    assert torch.isfinite(ours).all(), name
    ours, length = ours.double(), exact.norm()
    off, expected = ((value - exact).norm() / length for value in (ours, rounds))
    assert off <= LARGER * expected + ELSE, (name, off.item(), expected.item())
    along = ((ours - rounds) * exact).sum() / length**2
    assert along.abs() <= ALONG, (name, along.item())


@pytest.mark.parametrize("model", MODELS)
def test_block(model):
    from gpt2_fp8.layers.fused import Block

    config, scales = config_of(model), Scales(scaling())
    with torch.device(DEVICE):
        block = Block(block_spec(config), scales, recompute="none", kernel="auto", below=None)
    scales.allocate(torch.device(DEVICE))
    fill(block)
    d, length = config.n_embd, config.n_positions
    x = normal(TOKENS // length, length, d, seed=1, dtype=torch.bfloat16)
    upstream = normal(*x.shape, seed=2, dtype=torch.bfloat16) / 1024
    out, gradients = ours_of(block, scales, x, lambda x: block(x, True), upstream)

    def float64(products):
        return exact_of(block, x, lambda p, x: block_in_float64(block, p, x, config.n_head, products), upstream)

    (exact, expected), (rounds, as_fp8) = float64(None), float64(block.linears)
    assert gradients.keys() == expected.keys()
    assert len(gradients) == 13
    # what goes past the branches is exact, and would hide their errors
    assert_rounds_as_fp8_does("branches", out.double() - x.double(), rounds - x.double(), exact - x.double())
    for name, gradient in gradients.items():
        past = upstream.double() if name == "input" else 0.0
        assert_rounds_as_fp8_does(name, gradient - past, as_fp8[name] - past, expected[name] - past)
    # which of the two ways this was
    y8, w8 = (torch.empty(rows, d, device=DEVICE, dtype=torch.float8_e4m3fn) for rows in (TOKENS, 4 * d))
    assert fits(y8, w8) == (d <= 1024)


@pytest.mark.parametrize("model", MODELS)
def test_head(model):
    from gpt2_fp8.layers.head import Head
    from gpt2_fp8.model.gpt2 import padded_vocabulary

    config, scales = config_of(model), Scales(scaling())
    with torch.device(DEVICE):
        head = Head(block_spec(config), padded_vocabulary(VOCAB), scales)
    scales.allocate(torch.device(DEVICE))
    fill(head)
    length = config.n_positions
    x = normal(TOKENS // length, length, config.n_embd, seed=1, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    targets = (VOCAB ** torch.rand(x.shape[:2], generator=generator) - 1).long().to(DEVICE)
    targets[0, ::5] = -1
    upstream = torch.ones((), device=DEVICE)
    loss, gradients = ours_of(head, scales, x, lambda x: head.loss(x, targets, VOCAB, 1.0, True), upstream)

    def float64(product):
        return exact_of(head, x, lambda p, x: head_in_float64(p, x, targets, product), upstream)

    (exact, expected), (_, as_fp8) = float64(None), float64(head.linear)
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    assert gradients.keys() == expected.keys() == {"input", "layer_norm_weight", "layer_norm_bias", "weight"}
    for name, gradient in gradients.items():
        assert_rounds_as_fp8_does(name, gradient, as_fp8[name], expected[name])
    assert torch.count_nonzero(gradients["weight"][VOCAB:]) == 0
