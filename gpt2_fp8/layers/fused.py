"""GPT-2's block as one chain of FP8 products and our own kernels, for delayed scaling on Hopper.

What a chain of modules cannot do and this does: the residual additions happen inside the products, the gradient of the
residual stream is cast where the normalisation's backward computes it, and weight gradients are accumulated by the
products themselves. Parameters have the names, shapes and initial values of the other layers.

A block's backward is written out by hand (`_BlockFunction`), in the order of the chain rule, with one exception:
attention is differentiated by autograd, whatever kernel it is.

Shapes: M = batch * tokens rows, d = n_embd, f = the perceptron's hidden channels. `x8` is x in FP8 [M, d], `x8t` its
transpose [d, M].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.kernels.cast import cast_transpose
from gpt2_fp8.kernels.layer_norm import LayerNormGradient, Statistics, layer_norm_backward, layer_norm_cast
from gpt2_fp8.layers import reference
from gpt2_fp8.layers.attention import attention
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.layers.fp8_linear import Product, add_vector_gradient
from gpt2_fp8.layers.received import Received


class Block(nn.Module):
    """Attention and a perceptron, each added to the residual stream; the FP8 twin of `layers.block.Block`.

    `recompute`: the perceptron's hidden layer is computed again in the backward, and does not wait in memory.
    `below`: the block whose output this one's input is. Its backward needs the gradient of that in FP8, and this one's
    last kernel casts it on the way out.
    """

    def __init__(self, spec: BlockSpec, scales: Scales, recompute: bool, below: Block | None):
        super().__init__()
        d, heads, norm, bias, self.recompute = spec.n_embd, spec.heads, spec.norm, spec.bias, recompute
        self.qkv = reference.LayerNormLinear(d, heads.packed, norm, bias)
        self.attention = attention(heads)
        self.projection = reference.Linear(heads.queries, d, bias)
        self.mlp = reference.LayerNormMLP(d, spec.mlp, norm, bias)
        self.products = Products(*(Product(scales) for _ in range(4)))
        self.below = [below]  # in a list: it is no part of this module
        self.received: Received | None = None  # the gradient of the output, cast

    def discard(self) -> None:
        """Let go of what a backward that did not come to its end has left here."""
        self.received = None

    def refresh(self) -> None:
        """Cast the weights to FP8."""
        qkv, projection, fc1, fc2 = self.products
        qkv.refresh(self.qkv.weight, self.qkv.bias)
        projection.refresh(self.projection.weight, self.projection.bias)
        fc1.refresh(self.mlp.fc1_weight, self.mlp.fc1_bias)
        fc2.refresh(self.mlp.fc2_weight, self.mlp.fc2_bias)

    def hidden(self, middle: Tensor, again: bool = False) -> tuple[Tensor | None, Hidden]:
        """The perceptron's GELU, [M, f] in FP8, and what its backward needs: that alone when it is made `again`."""
        fc1, mlp = self.products.fc1, self.mlp
        y8, y8t, statistics = layer_norm_cast(
            middle, mlp.layer_norm_weight, mlp.layer_norm_bias, mlp.epsilon, fc1.slot("input")
        )
        h, z8 = fc1.forward_gelu(y8, self.products.fc2.slot("input"), h_alone=again)
        return z8, Hidden(h, y8t, statistics)

    def forward(self, x: Tensor, is_first_microbatch: bool | None) -> Tensor:
        """x: bfloat16 [batch, tokens, d]; returns the same."""
        if is_first_microbatch is not False:
            self.refresh()
        # inside of a Function gradients are always off, and parameters always want theirs
        return _BlockFunction.apply(x, self, torch.is_grad_enabled(), *self.parameters())


class Products(NamedTuple):
    """A block's four."""

    qkv: Product
    projection: Product
    fc1: Product
    fc2: Product


class Hidden(NamedTuple):
    """What a block's backward needs of its perceptron's hidden layer."""

    h: Tensor  # what GELU was taken of: bfloat16 [M, f]
    y8t: Tensor  # the transposed input of its product
    statistics: Statistics  # of the normalisation before it


class _BlockFunction(torch.autograd.Function):
    """A block by hand. The parameters are arguments so that autograd asks for their gradients; it is given none, since
    they are added to `.grad` here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block, training: bool, *parameters: nn.Parameter) -> Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        qkv, projection, _, fc2 = block.products
        norm = block.qkv
        y8, y8t, statistics = layer_norm_cast(
            x, norm.layer_norm_weight, norm.layer_norm_bias, norm.epsilon, qkv.slot("input"), training
        )
        packed = qkv.forward(y8).view(*shape[:-1], -1).requires_grad_(training)
        with torch.set_grad_enabled(training):
            attended = block.attention(packed)
        o8, o8t, _ = cast_transpose(attended.detach().reshape(x.shape), projection.slot("input"))
        middle = projection.forward(o8, add=x)
        z8, hidden = block.hidden(middle)
        assert z8 is not None
        if training:
            ctx.block, ctx.attention, ctx.statistics = block, (packed, attended), statistics
            ctx.nothing = [None] * len(parameters)
            ctx.hidden = None if block.recompute else hidden
            ctx.save_for_backward(x, middle, y8t, o8t)
        return fc2.forward(z8, add=middle).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        x, middle, y8t, o8t = ctx.saved_tensors
        block: Block = ctx.block
        assert ctx.attention is not None, "one backward only"
        dout = upstream[0].reshape(x.shape).contiguous()
        hidden = ctx.hidden or block.hidden(middle, again=True)[1]
        attention, ctx.hidden, ctx.attention = ctx.attention, None, None  # the graph outlives its backward
        into_middle = _perceptron_backward(block, dout, middle, hidden)
        dx = _attention_backward(block, into_middle, x, ctx.statistics, y8t, o8t, attention)
        return dx.view(upstream[0].shape), None, None, *ctx.nothing


def _cast_output_gradient(block: Block, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`dout` [M, d] in both layouts, and its partial column sums: as the block above has left them, or made here."""
    received, block.received = block.received, None
    if received is not None and received.is_of(dout):
        return received.gradient.q, received.gradient.qt, received.gradient.sums[:, 2]
    return cast_transpose(dout, block.products.fc2.slot("gradient"), sums=True)


def _perceptron_backward(block: Block, dout: Tensor, middle: Tensor, hidden: Hidden) -> LayerNormGradient:
    """From the gradient of a block's output, [M, d], to that of its middle; the parameters' into `.grad`."""
    mlp, fc1, fc2 = block.mlp, block.products.fc1, block.products.fc2
    g8, g8t, sums = _cast_output_gradient(block, dout)
    add_vector_gradient(mlp.fc2_bias, sums)
    inner = fc2.input_gradient_gelu(g8, hidden.h, fc1.slot("gradient"))
    fc2.add_weight_gradient(mlp.fc2_weight, g8t, inner.yt)
    add_vector_gradient(mlp.fc1_bias, inner.sums)
    fc1.add_weight_gradient(mlp.fc1_weight, inner.qt, hidden.y8t)
    dy = fc1.input_gradient(inner.q)
    slot = block.products.projection.slot("gradient")
    result = layer_norm_backward(dy, middle, hidden.statistics, mlp.layer_norm_weight, dout, slot)
    add_vector_gradient(mlp.layer_norm_weight, result.sums[:, 0])
    add_vector_gradient(mlp.layer_norm_bias, result.sums[:, 1])
    return result


def _attention_backward(
    block: Block, into_middle: LayerNormGradient, x: Tensor, statistics: Statistics, y8t: Tensor, o8t: Tensor,
    attention: tuple[Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """From the gradient of a block's middle to that of its input, [M, d]; the parameters' into `.grad`."""
    qkv, projection = block.products.qkv, block.products.projection
    weight, bias = block.projection.weight, block.projection.bias
    add_vector_gradient(bias, into_middle.sums[:, 2])
    projection.add_weight_gradient(weight, into_middle.qt, o8t)
    packed, attended = attention
    dattended = projection.input_gradient(into_middle.q).view(attended.shape)
    (dpacked,) = torch.autograd.grad(attended, packed, dattended)
    g8, g8t, sums = cast_transpose(dpacked.reshape(x.shape[0], -1), qkv.slot("gradient"), sums=True)
    norm = block.qkv
    add_vector_gradient(norm.bias, sums)
    qkv.add_weight_gradient(norm.weight, g8t, y8t)
    dy = qkv.input_gradient(g8)
    below = block.below[0]
    slot = None if below is None else below.products.fc2.slot("gradient")
    result = layer_norm_backward(dy, x, statistics, norm.layer_norm_weight, into_middle.dx, slot)
    if below is not None:
        below.received = Received(result)
    add_vector_gradient(norm.layer_norm_weight, result.sums[:, 0])
    add_vector_gradient(norm.layer_norm_bias, result.sums[:, 1])
    return result.dx
