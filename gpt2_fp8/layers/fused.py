"""A block as one chain of FP8 GEMMs and our own kernels, for delayed scaling on Hopper.

The chain does three things that separate modules cannot. Residual additions happen inside the GEMMs. The gradient of
the residual stream is quantized in the kernel that computes it, the normalisation's backward. Weight gradients are
accumulated by the GEMMs themselves. Parameters have the names, shapes and initial values of the other layers.

A block's backward is written by hand (`_BlockFunction`), in the order of the chain rule, with one exception: autograd
differentiates attention, whatever kernel computes it.

Shapes: M = batch * tokens rows, d = n_embd, f = hidden channels of the MLP. `x8` is x in FP8 [M, d], `x8t` its
transpose [d, M].
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.config.kept_layers import ALL_PARTS, NO_PARTS, Part
from gpt2_fp8.config.schema import AttentionKernel, Recompute
from gpt2_fp8.kernels.cast import cast_transpose
from gpt2_fp8.kernels.embedding import fused_embed
from gpt2_fp8.kernels.layer_norm import LayerNormGradient, Statistics, layer_norm_backward, layer_norm_cast
from gpt2_fp8.kernels.product import Activated, Kind
from gpt2_fp8.kernels.rotary import Turns
from gpt2_fp8.layers import fp8_linear, reference, te
from gpt2_fp8.layers.attention import attention
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Scales
from gpt2_fp8.layers.fp8_linear import FP8Linear, add_vector_gradient
from gpt2_fp8.layers.head import Head


class FP8Linears(NamedTuple):
    """The four linear layers of a block."""

    qkv: FP8Linear
    projection: FP8Linear
    fc1: FP8Linear
    fc2: FP8Linear


class Attended(NamedTuple):
    """What a block's backward needs of its first half."""

    middle: Tensor  # the residual stream after attention: bfloat16 [M, d]
    packed: Tensor  # attention's input [batch, tokens, heads.packed] and its result, with autograd's graph between them
    attended: Tensor
    y8t: Tensor  # the transposed inputs of the two GEMMs, FP8 [d, M]
    o8t: Tensor
    statistics: Statistics  # of the normalisation before them


class Hidden(NamedTuple):
    """What a block's backward needs of its MLP's hidden layer."""

    activated: Tensor | Activated  # see `fp8_linear.mlp_forward`
    y8t: Tensor  # the transposed input of its GEMM, FP8 [d, M]
    statistics: Statistics  # of the normalisation before it


class Received:
    """A gradient as the block above computed and quantized it.

    Autograd may hand on another gradient: the sum with that of a second use, or what a hook made of it, even in place.
    """

    def __init__(self, gradient: LayerNormGradient):
        self.gradient, self._version = gradient, gradient.dx._version

    def is_of(self, dout: Tensor) -> bool:
        """Return whether this is the gradient `dout` [M, d]: the same memory, whole, and not written to since."""
        dx = self.gradient.dx
        same = (dx.data_ptr(), dx.shape, self._version) == (dout.data_ptr(), dout.shape, dout._version)
        return same and dx._version == self._version


class Block(nn.Module):
    """Attention and an MLP, each added to the residual stream; the FP8 form of `layers.block.Block`.

    `recompute`: what the backward computes again instead of keeping it: the MLP's hidden layer ("mlp"), or all but the
    block's input ("full"). `below`: the block that feeds this one. Its backward needs its output's gradient in FP8:
    this block's last kernel writes it.
    """

    def __init__(
        self, spec: BlockSpec, scales: Scales, recompute: Recompute, kernel: AttentionKernel, below: Block | None
    ):
        super().__init__()
        d, heads, norm, bias, self.recompute = spec.n_embd, spec.heads, spec.norm, spec.bias, recompute
        self.qkv = reference.LayerNormLinear(d, heads.packed, norm, bias)
        self.attention = attention(heads, kernel, norm.epsilon)
        self.projection = reference.Linear(heads.queries, d, bias)
        self.mlp = reference.LayerNormMLP(d, spec.mlp, norm, bias)
        assert spec.mlp.kind != "swiglu", "`config.backend_support` refuses it"
        self.activation: Kind = spec.mlp.kind
        self.linears = FP8Linears(*(FP8Linear(scales) for _ in range(4)))
        self.below = [below]  # in a list: it is not a submodule of this one
        self.received: Received | None = None  # the gradient of the output, in FP8

    def discard(self) -> None:
        """Drop what an unfinished backward has left here."""
        self.received = None

    def refresh(self) -> None:
        """Quantize the weights to FP8."""
        qkv, projection, fc1, fc2 = self.linears
        qkv.refresh(self.qkv.weight, self.qkv.bias)
        projection.refresh(self.projection.weight, self.projection.bias)
        fc1.refresh(self.mlp.fc1_weight, self.mlp.fc1_bias)
        fc2.refresh(self.mlp.fc2_weight, self.mlp.fc2_bias)

    def attend(self, x: Tensor, shape: torch.Size, turns: Turns | None, training: bool) -> Attended:
        """Compute the block up to its middle. x: bfloat16 [M, d]; `shape`: what it is rows of, [batch, tokens, d]."""
        qkv, projection, _, _ = self.linears
        norm = self.qkv
        y8, y8t, statistics = layer_norm_cast(
            x, norm.layer_norm_weight, norm.layer_norm_bias, norm.epsilon, qkv.slot("input"), training
        )
        packed = qkv.forward(y8).view(*shape[:-1], -1).requires_grad_(training)
        with torch.set_grad_enabled(training):
            attended = self.attention(packed, turns)
        o8, o8t, _ = cast_transpose(attended.detach().reshape(len(x), -1), projection.slot("input"))
        return Attended(projection.forward(o8, add=x), packed, attended, y8t, o8t, statistics)

    def compute_hidden(self, middle: Tensor, again: bool = False) -> tuple[Tensor | None, Hidden]:
        """Compute the MLP's hidden layer, FP8 [M, f], and what its backward needs.

        `again`: only the latter is computed; the first result is None or unused.
        """
        (_, _, fc1, fc2), mlp = self.linears, self.mlp
        y8, y8t, statistics = layer_norm_cast(
            middle, mlp.layer_norm_weight, mlp.layer_norm_bias, mlp.epsilon, fc1.slot("input")
        )
        z8, kept = fp8_linear.mlp_forward(self.activation, fc1, fc2, y8, again)
        return z8, Hidden(kept, y8t, statistics)

    def forward(self, x: Tensor, is_first_microbatch: bool | None, turns: Turns | None = None) -> Tensor:
        """Compute the block. x: bfloat16 [batch, tokens, d]; returns the same shape and dtype. `turns`: of RoPE."""
        if is_first_microbatch is not False:
            self.refresh()
        # Inside a Function gradients are always off and parameters always require theirs, so the mode is passed in.
        return _BlockFunction.apply(x, self, turns, torch.is_grad_enabled(), *self.parameters())


class _BlockFunction(torch.autograd.Function):
    """A block with a backward by hand.

    The parameters are arguments so that autograd runs the backward. It gets None for them: their gradients are added to
    `.grad` here.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, block: Block, turns: Turns | None, training: bool, *parameters: nn.Parameter
    ) -> Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        attended = block.attend(x, shape, turns, training)
        z8, hidden = block.compute_hidden(attended.middle)
        assert z8 is not None
        if training:
            ctx.block, ctx.turns, ctx.nothing, ctx.left = block, turns, [None] * len(parameters), True
            ctx.attended = None if block.recompute == "full" else attended
            ctx.hidden = hidden if block.recompute == "none" else None
            ctx.save_for_backward(x)
        return block.linears.fc2.forward(z8, add=attended.middle).view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        block: Block = ctx.block
        assert ctx.left, "one backward only"
        dout = upstream[0].reshape(x.shape).contiguous()
        # The same kernels under the same scales: what is computed again has the same bits, and so have its amaxes.
        attended = ctx.attended or block.attend(x, upstream[0].shape, ctx.turns, training=True)
        hidden = ctx.hidden or block.compute_hidden(attended.middle, again=True)[1]
        ctx.left, ctx.hidden, ctx.attended = False, None, None  # freed: autograd's graph lives longer than its backward
        into_middle = _mlp_backward(block, dout, attended.middle, hidden)
        del hidden
        dx = _attention_backward(block, into_middle, x, attended)
        return dx.view(upstream[0].shape), None, None, None, *ctx.nothing


def _cast_output_gradient(block: Block, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `dout` [M, d] in FP8 in both layouts, and its partial column sums.

    The block above may have left them (`received`); otherwise they are computed here.
    """
    received, block.received = block.received, None
    if received is not None and received.is_of(dout):
        return received.gradient.q, received.gradient.qt, received.gradient.sums[:, 2]
    return cast_transpose(dout, block.linears.fc2.slot("gradient"), sums=True)


def _mlp_backward(block: Block, dout: Tensor, middle: Tensor, hidden: Hidden) -> LayerNormGradient:
    """Compute the gradient at a block's middle from that of its output `dout` [M, d].

    The gradients of the MLP's parameters are added to their `.grad`.
    """
    mlp, fc1, fc2 = block.mlp, block.linears.fc1, block.linears.fc2
    g8, g8t, sums = _cast_output_gradient(block, dout)
    add_vector_gradient(mlp.fc2_bias, sums)
    dy = fp8_linear.mlp_backward(block.activation, fc1, fc2, mlp, (g8, g8t), hidden.activated, hidden.y8t)
    slot = block.linears.projection.slot("gradient")
    result = layer_norm_backward(dy, middle, hidden.statistics, mlp.layer_norm_weight, dout, slot)
    add_vector_gradient(mlp.layer_norm_weight, result.sums[:, 0])
    add_vector_gradient(mlp.layer_norm_bias, result.sums[:, 1])
    return result


def _attention_backward(block: Block, into_middle: LayerNormGradient, x: Tensor, attended: Attended) -> Tensor:
    """Compute the gradient of a block's input, [M, d], from that at its middle.

    The gradients of attention's parameters are added to their `.grad`.
    """
    qkv, projection = block.linears.qkv, block.linears.projection
    weight, bias = block.projection.weight, block.projection.bias
    add_vector_gradient(bias, into_middle.sums[:, 2])
    projection.add_weight_gradient(weight, into_middle.qt, attended.o8t)
    dattended = projection.input_gradient(into_middle.q).view(attended.attended.shape)
    norms = tuple(block.attention.parameters())
    dpacked, *dnorms = torch.autograd.grad(attended.attended, (attended.packed, *norms), dattended)
    for parameter, gradient in zip(norms, dnorms, strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    g8, g8t, sums = cast_transpose(dpacked.reshape(x.shape[0], -1), qkv.slot("gradient"), sums=True)
    norm = block.qkv
    add_vector_gradient(norm.bias, sums)
    qkv.add_weight_gradient(norm.weight, g8t, attended.y8t)
    dy = qkv.input_gradient(g8)
    below = block.below[0]
    slot = None if below is None else below.linears.fc2.slot("gradient")
    result = layer_norm_backward(dy, x, attended.statistics, norm.layer_norm_weight, into_middle.dx, slot)
    if below is not None:
        below.received = Received(result)
    add_vector_gradient(norm.layer_norm_weight, result.sums[:, 0])
    add_vector_gradient(norm.layer_norm_bias, result.sums[:, 1])
    return result.dx


def _angle_alone(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a block of Transformer Engine's the angles of the `Turns` that fused blocks are given."""
    return *given[:2], *(turns.angle for turns in given[2:])


class Fused(Composed):
    """The family of the fused layers. A block or head that must stay in bf16 is one of Transformer Engine's layers."""

    embed, turns = staticmethod(fused_embed), staticmethod(Turns.of)
    scales: Scales

    def __init__(self, settings: DelayedScaling, recompute: Recompute, kernel: AttentionKernel = "auto"):
        super().__init__(te, recompute, kernel)
        self.scales = Scales(settings)
        self._below: Block | None = None  # the last block built, if it is a fused one

    def block(self, spec: BlockSpec, fp8: Set[Part]) -> nn.Module:
        """See `Composed`. Blocks are in FP8 or not: `config.backend_support` refuses parts."""
        assert fp8 in (ALL_PARTS, NO_PARTS)
        if not fp8:
            self._below = None
            kept = super().block(spec, NO_PARTS)
            kept.register_forward_pre_hook(_angle_alone)
            return kept
        self._below = Block(spec, self.scales, self.recompute, self.kernel, self._below)
        return self._below

    def head(self, spec: BlockSpec, padded_vocab_size: int, fp8: bool) -> nn.Module:
        """See `Composed`."""
        return Head(spec, padded_vocab_size, self.scales) if fp8 else super().head(spec, padded_vocab_size, fp8)
