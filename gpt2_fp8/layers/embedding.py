"""Token embeddings, and a table of positions added to them: [batch, tokens] -> [batch, tokens, d]."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def embed(ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Compute tokens[ids] + positions in plain torch, in the autocast dtype or else the parameters'.

    ids: integers [batch, T]; tokens [padded_vocab_size, d]; positions [P, d], T <= P, or None: there is no such table.
    """
    x = F.embedding(ids, tokens)
    if positions is not None:
        x = x + positions[: ids.shape[1]]
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


def fused_embed(ids: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """Compute the same in one kernel, to bfloat16, for learned positions and tokens that are tied to the head.

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
        from gpt2_fp8.kernels import embedding

        ctx.parameters = tokens, positions
        ctx.save_for_backward(ids)
        return embedding.embed(ids, tokens, positions)

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
