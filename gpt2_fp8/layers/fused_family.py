"""The family of the fused layers: FP8 block and head, and the embedding in one kernel."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.block_spec import FUSED_OPTIONS, BlockSpec, why_not
from gpt2_fp8.config.kept_layers import ALL_PARTS, NO_PARTS, Part
from gpt2_fp8.config.schema import AttentionKernel, Recompute
from gpt2_fp8.kernels import embedding
from gpt2_fp8.layers import te
from gpt2_fp8.layers.block import Composed
from gpt2_fp8.layers.delayed_scaling import DelayedScaling, Scales
from gpt2_fp8.layers.fused import Block
from gpt2_fp8.layers.head import Head


def fused_embed(ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Compute `block.embed` in one kernel, to bfloat16, for learned positions and tokens that are tied to the head.

    The token gradient is added row by row to what the head's backward has left in `tokens.grad`. No dense gradient is
    made.
    """
    assert positions is not None, "these layers have learned positions alone"
    return _Embedding.apply(ids.contiguous(), tokens, positions)


class _Embedding(torch.autograd.Function):
    """The fused embedding. Its backward writes the parameters' `.grad` itself.

    The head's backward, which runs first, writes `tokens.grad` itself too; this one runs last and adds to it. Both take
    the table as an argument, so its hooks are called once, after both.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
        ctx.parameters = tokens, positions
        ctx.save_for_backward(ids)
        return embedding.embed(ids, tokens, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, None, None]:
        (ids,), (tokens, positions), dx = ctx.saved_tensors, ctx.parameters, upstream[0].contiguous()
        if tokens.grad is None:
            tokens.grad = torch.zeros_like(tokens)
        embedding.embedding_gradient(dx, ids, tokens.grad)
        add = positions.grad is not None
        if positions.grad is None:
            positions.grad = torch.empty_like(positions)
        embedding.positions_gradient(dx, positions.grad, add)
        return None, None, None


class Fused:
    """The fused layers. A block or head that must stay in bf16 is built from Transformer Engine's layers."""

    embed = staticmethod(fused_embed)

    def __init__(self, settings: DelayedScaling, recompute: Recompute, kernel: AttentionKernel = "auto"):
        self.scales: Scales | None = Scales(settings)
        self.recompute, self.kernel = recompute, kernel
        self._bf16 = Composed(te, recompute, kernel)
        self._below: Block | None = None  # the last block built, if it is a fused one

    def why_not(self, spec: BlockSpec) -> str | None:
        """See `layers.Family`."""
        return why_not(spec, "the fused layers", FUSED_OPTIONS)

    def block(self, spec: BlockSpec, fp8: Set[Part]) -> nn.Module:
        """See `layers.Family`. Blocks are in FP8 or not: `config.backend_support` refuses parts."""
        assert fp8 in (ALL_PARTS, NO_PARTS)
        assert self.scales is not None
        if not fp8:
            self._below = None
            return self._bf16.block(spec, NO_PARTS)
        self._below = Block(spec, self.scales, self.recompute, self.kernel, self._below)
        return self._below

    def head(self, spec: BlockSpec, padded_vocab_size: int, fp8: bool) -> nn.Module:
        """See `layers.Family`."""
        assert self.scales is not None
        return (
            Head(spec, padded_vocab_size, self.scales) if fp8 else self._bf16.head(spec, padded_vocab_size, fp8=False)
        )
