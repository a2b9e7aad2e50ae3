"""Tokens and positions to the residual stream: [batch, tokens] -> [batch, tokens, d]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def embed(ids: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """tokens[ids] + positions, in plain torch; in the autocast dtype, or the parameters' without autocast.

    ids: integers [batch, T]; tokens [rows, d]; positions [P, d], T <= P.
    """
    x = F.embedding(ids, tokens) + positions[: ids.shape[1]]
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


def fused_embed(ids: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """The same in one kernel, to bfloat16, for tokens that are tied to the head. Their gradient here is added to what
    the head's backward has left in `tokens.grad`, row by row: no dense gradient is made for it."""
    return _Embedding.apply(ids.contiguous(), [tokens], positions)


class _Embedding(torch.autograd.Function):
    """`tokens` come in a list, which autograd does not look into. The head's gradient then waits for nothing, and is
    there when this backward, the last of all, adds to it."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, tokens: list[Tensor], positions: Tensor) -> Tensor:
        from gpt2_fp8.kernels import embedding

        ctx.parameters = *tokens, positions
        ctx.save_for_backward(ids)
        return embedding.embed(ids, tokens[0], positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[None, None, None]:
        from gpt2_fp8.kernels.embedding import embedding_gradient, positions_gradient

        (ids,), (tokens, positions), dx = ctx.saved_tensors, ctx.parameters, upstream[0].contiguous()
        if tokens.grad is None:
            tokens.grad = torch.zeros_like(tokens)
        embedding_gradient(dx, ids, tokens.grad)
        add = positions.grad is not None
        if positions.grad is None:
            positions.grad = torch.empty_like(positions)
        positions_gradient(dx, positions.grad, add)
        return None, None, None
