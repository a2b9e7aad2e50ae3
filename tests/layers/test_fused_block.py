"""The fused block's chain of forward and backward on a CPU: its kernels replaced by what they compute, in float64.

What is tested is the order of the chain and what it keeps; tests/gpu has the kernels.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpt2_fp8.config.block_spec import MLP, BlockSpec, Heads, Norm, RoPE, gpt2_heads
from gpt2_fp8.layers import block, reference
from tests.layers.standins import SCALING, families

SPEC = BlockSpec(
    n_embd=16, norm=Norm("layer_norm", 1e-5), heads=gpt2_heads(2, 16), mlp=MLP("gelu", 32), positions="learned",
    bias=True, dropout=0.0, tied=True,
)  # fmt: skip
ROPE = RoPE(100.0)
MODERN = replace(
    SPEC, norm=Norm("rms_norm", 1e-2), heads=Heads(2, 2, 12, qk_norm=True), positions=ROPE, bias=False, tied=False,
    mlp=MLP("relu_squared", 32),
)  # fmt: skip
SPECS = {
    "GPT-2": SPEC, "RMSNorm": replace(SPEC, norm=Norm("rms_norm", 1e-2)), "RoPE": replace(SPEC, positions=ROPE),
    "QK-norm": replace(SPEC, heads=Heads(2, 2, 8, qk_norm=True)), "no biases": replace(SPEC, bias=False),
    "larger heads": replace(SPEC, heads=Heads(2, 2, 12)),
    "squared ReLU": replace(SPEC, mlp=MLP("relu_squared", 32)), "all": MODERN,
}  # fmt: skip

ACTIVATIONS = {"gelu": lambda h: F.gelu(h, approximate="tanh"), "relu_squared": lambda h: h.relu().square()}


def add(parameter, gradient):
    if parameter is not None:
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient


class Linear(nn.Module):
    """What `FP8Linear` computes, without FP8."""

    def __init__(self, scales, own_gradient=True):
        super().__init__()

    def slot(self, name):
        return SimpleNamespace(scale_inv=name)

    def refresh(self, weight, bias):
        self.w, self.bias = weight.detach(), 0 if bias is None else bias.detach()
        self.w8 = self.w

    def forward(self, x, add=None):
        y = x @ self.w.T + self.bias
        return y if add is None else y + add

    def input_gradient(self, g):
        return g @ self.w

    def operands(self, x):
        return x, self.w.T

    def gradient_operands(self, g):
        return g, self.w

    def add_weight_gradient(self, weight, gt, xt, as_is=None):
        gt, xt = gt.T if as_is == "gradient" else gt, xt.T if as_is == "input" else xt
        add(weight, gt @ xt.T)


class Activated(NamedTuple):
    """z, and z'(h) as it is."""

    q: torch.Tensor
    slopes: torch.Tensor


def product_activation(kind, operands, bias, slot):
    h = operands[0] @ operands[1] + bias
    with torch.enable_grad():
        h = h.requires_grad_()
        z = ACTIVATIONS[kind](h)
        (slopes,) = torch.autograd.grad(z.sum(), h)
    return Activated(z.detach(), slopes)


def product_activation_backward(kind, operands, slopes, z_scale_inv, slot):
    assert (z_scale_inv, slot.scale_inv) == ("input", "gradient")
    gradient = operands[0] @ operands[1] * slopes
    return gradient, gradient


def activation_backward_cast(kind, g, h, slot, slot_y):
    with torch.enable_grad():
        h = h.detach().requires_grad_()
        z = ACTIVATIONS[kind](h)
        (dh,) = torch.autograd.grad(z, h, g)
    return dh, dh.T, z.detach().T, dh


def layer_norm_cast(x, weight, bias, epsilon, slot, both=True):
    y = reference.normalise(x, weight, bias, epsilon).detach()
    mean = None if bias is None else x.mean(1)
    variance = (x if mean is None else x - mean[:, None]).square().mean(1)
    return y, y.T, SimpleNamespace(mean=mean, rstd=(variance + epsilon).rsqrt())


def layer_norm_backward(dy, x, statistics, weight, residual, slot):
    mean, g = statistics.mean, dy * weight
    normalised = (x if mean is None else x - mean[:, None]) * statistics.rstd[:, None]
    total = 0 if mean is None else g.mean(1, True)
    dx = (g - total - normalised * (g * normalised).mean(1, True)) * statistics.rstd[:, None]
    dx = (dx if residual is None else dx + residual).detach()
    return SimpleNamespace(dx=dx, q=dx, qt=dx.T, sums=torch.stack((dy * normalised, dy, dx), 1).detach())


@pytest.fixture(params=["activation in the GEMMs", "activation between them"])
def fused(request, monkeypatch):
    with families():
        from gpt2_fp8.layers import fp8_linear
        from gpt2_fp8.layers import fused as module

        fits = request.param == "activation in the GEMMs"
        for name, replacement in {
            "fits": lambda x, w: fits,
            "Activated": Activated,
            "product_activation": product_activation,
            "product_activation_backward": product_activation_backward,
            "activation_cast": lambda kind, h, slot: ACTIVATIONS[kind](h),
            "activation_backward_cast": activation_backward_cast,
            "add_vector_gradient": lambda parameter, partial: add(parameter, partial.sum(0)),
        }.items():
            monkeypatch.setattr(fp8_linear, name, replacement)
        for name, replacement in {
            "FP8Linear": Linear,
            "layer_norm_cast": layer_norm_cast,
            "layer_norm_backward": layer_norm_backward,
            "cast_transpose": lambda x, slot, sums=False: (x, x.T, x),
            "add_vector_gradient": lambda parameter, partial: add(parameter, partial.sum(0)),
            "attention": lambda heads, kernel, epsilon: reference.attention(heads, 0.0, epsilon, kernel),
        }.items():
            monkeypatch.setattr(module, name, replacement)
        yield module


def filled(blocks):
    torch.manual_seed(0)
    blocks = nn.ModuleList(blocks).double()
    for parameter in blocks.parameters():
        nn.init.normal_(parameter, std=0.3)
    return blocks


def passed(blocks, spec=SPEC):
    """The output, the input's gradient and the parameters' of two micro-batches, the second with another text."""
    found, rope = [], spec.positions
    given = () if rope == "learned" else (reference.angles(rope, spec.heads.size, 8, torch.device("cpu")),)
    for seed in (1, 2):
        x = torch.randn(3, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        y = x
        for one in blocks:
            y = one(y, seed == 1, *given)
        y.square().sum().backward()
        found += [y.detach(), x.grad]
    return found + [parameter.grad for _, parameter in sorted(blocks.named_parameters())]


def chain(fused, recompute, spec=SPEC):
    from gpt2_fp8.layers.delayed_scaling import Scales

    below, blocks = None, []
    for _ in range(3):
        below = fused.Block(spec, Scales(SCALING), recompute, "auto", below)
        blocks.append(below)
    return filled(blocks)


@pytest.mark.parametrize("name", SPECS)
def test_the_chain_is_autograds_in_float64(fused, name):
    spec = SPECS[name]
    found = passed(chain(fused, "none", spec), spec)
    expected = passed(filled([block.Block(spec, reference, frozenset(), "none") for _ in range(3)]), spec)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("spec", [SPEC, MODERN], ids=["GPT-2", "all"])
@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("mlp", 1), ("full", 2)])
def test_what_is_computed_again_changes_no_bit(fused, monkeypatch, recompute, times, spec):
    expected, calls, attend = passed(chain(fused, "none", spec), spec), [], reference.Attention.attend

    def counted(self, *parts):
        calls.append(torch.is_grad_enabled())
        return attend(self, *parts)

    monkeypatch.setattr(reference.Attention, "attend", counted)
    blocks = chain(fused, recompute, spec)
    found = passed(blocks, spec)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert calls == [True] * (3 * 2 * times), "three blocks, two micro-batches"
    with torch.no_grad():
        blocks[0](torch.zeros(1, 8, 16, dtype=torch.float64), None)
    assert calls[-1] is False


def test_a_second_backward_is_refused(fused):
    blocks = chain(fused, "full")
    y = blocks[0](torch.randn(1, 8, 16, dtype=torch.float64, requires_grad=True), True).sum()
    y.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward only"):
        y.backward()


# The gradient that was cast for the block below counts only for what that one is really given.


@pytest.fixture(scope="module")
def real():
    with families():
        from gpt2_fp8.layers import fused as module

        yield module


class Gradient(NamedTuple):
    """As far as it matters here."""

    dx: torch.Tensor


class Above(torch.autograd.Function):
    """What a block's backward does: it keeps what it returns, by its rows."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x * 1

    @staticmethod
    def backward(ctx, upstream):
        dx = upstream.reshape(-1, upstream.shape[-1]) * 2
        Above.kept = Above.module.Received(Gradient(dx))
        return dx.view(ctx.shape)


def handed_on(module, use=lambda x: Above.apply(x).sum(), hook=None):
    """Whether the block below takes the cast for that of its own output's gradient."""
    seen, Above.module = [], module

    class Below(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, upstream):
            seen.append(Above.kept.is_of(upstream.reshape(-1, upstream.shape[-1]).contiguous()))
            return upstream

    out = Below.apply(torch.ones(2, 3, 4, requires_grad=True))
    if hook is not None:
        out.register_hook(hook)
    use(out).backward()
    return seen


def in_place(gradient):
    """A hook that says nothing of what it does."""
    gradient.mul_(5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"use": lambda x: Above.apply(x).sum() + x.sum()}, False),
        ({"use": lambda x: x.sum() + Above.apply(x).sum()}, False),
        ({"hook": lambda gradient: gradient * 5}, False),
        ({"hook": in_place}, False),
    ],
    ids=["as it is", "a second use", "a use before", "a hook", "a hook in place"],
)
def test_whose_gradient_it_is(real, options, expected):
    assert handed_on(real, **options) == [expected]
