"""A gradient that was cast for the block below counts only for what that one is really given."""

from typing import NamedTuple

import pytest
import torch

from gpt2_fp8.layers.received import Received


class Gradient(NamedTuple):
    """As far as it matters here."""

    dx: torch.Tensor


class Above(torch.autograd.Function):
    """What a block's backward does: it keeps what it returns, by its rows."""

    kept: Received

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x * 1

    @staticmethod
    def backward(ctx, upstream):
        dx = upstream.reshape(-1, upstream.shape[-1]) * 2
        Above.kept = Received(Gradient(dx))
        return dx.view(ctx.shape)


def handed_on(use=lambda x: Above.apply(x).sum(), hook=None):
    """Whether the block below takes the cast for that of its own output's gradient."""
    seen = []

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
def test_whose_gradient_it_is(options, expected):
    assert handed_on(**options) == [expected]


def test_part_of_it_is_another():
    dx = torch.ones(6, 4)
    received = Received(Gradient(dx))
    assert received.is_of(dx.view(2, 3, 4).reshape(6, 4))
    assert not received.is_of(dx[:3])
    assert not received.is_of(dx.view(3, 8))
