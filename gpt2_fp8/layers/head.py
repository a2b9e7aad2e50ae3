"""The head of the fused layers: the last normalisation, the GEMM with the embedding, and the loss, in FP8.

Logits never exist for more than `CHUNK_ROWS` rows, and in training mostly not at all (`layers.head_chunks`).
M = batch * tokens rows, d = n_embd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.schema import PenaltyConfig
from gpt2_fp8.kernels.cross_entropy import of_trained, scale_, with_penalty
from gpt2_fp8.layers.head_chunks import Chunk, has_probabilities, joined, of_evaluation, of_logits, of_probabilities
from gpt2_fp8.layers.head_gradients import HeadGradients
from gpt2_fp8.layers.head_layer import HeadLayer

CHUNK_ROWS = 16384  # with GPT-2's vocabulary: 1.6 GB of the logits' gradient in FP8, and as much if there are logits


class Head(HeadLayer):
    """The last normalisation and the GEMM with the embedding. `loss` trains in FP8; `forward` gives logits."""

    def loss(
        self, x: Tensor, targets: Tensor, vocab_size: int, scale: float, is_first_microbatch: bool | None,
        penalty: PenaltyConfig | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute `scale` times the mean cross-entropy over targets [batch, tokens] that are not negative; float32.

        With z-loss, the one penalty that these layers have, it is [3]: see `kernels.cross_entropy.with_penalty`.
        """
        z_loss = penalty.z_loss if penalty else 0.0
        # Inside a Function gradients are always off and parameters always require theirs, so the mode is passed in.
        training = torch.is_grad_enabled()
        if training and is_first_microbatch is not False:
            self.linear.refresh(self.weight, None)
        parameters = self.layer_norm_weight, self.layer_norm_bias, self.weight
        return _HeadFunction.apply(x, targets.reshape(-1), self, vocab_size, scale, training, z_loss, *parameters)


class _HeadFunction(torch.autograd.Function):
    """Loss and gradients, computed in the forward, one chunk of rows after the other.

    The backward only hands out the finished gradients. That of the table, which is the embedding's too, it adds to
    `.grad` itself: see `layers.embedding`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: Tensor, head: Head, vocab_size: int, scale: float, training: bool, z_loss: float,
        *_: Tensor,
    ) -> Tensor:  # fmt: skip
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        weight = scale / (targets >= 0).sum().clamp_min(1).to(torch.float32)
        gradients = HeadGradients(head, x, weight, z_loss) if training else None
        parts = [slice(start, start + CHUNK_ROWS) for start in range(0, len(x), CHUNK_ROWS)]
        chunks = [Chunk(head, x[part], targets[part], vocab_size, part) for part in parts]
        if gradients is not None and has_probabilities(chunks):
            known = of_probabilities(chunks, x, targets, gradients)
        else:
            known = joined([of_logits(chunk, gradients) if gradients else of_evaluation(chunk) for chunk in chunks])
        ctx.shape, ctx.gradients = shape, gradients
        loss = known.losses.sum() * weight
        if known.log_sums is None:
            return loss
        return with_penalty(loss, known.log_sums.square().sum() * weight * z_loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        assert ctx.gradients is not None, "one backward only"
        g, ctx.gradients = ctx.gradients, None  # freed here: autograd's graph lives longer than its backward
        for gradient in (g.dx, g.norm, g.weight):
            scale_(gradient, of_trained(upstream[0]))
        table = g.head.weight
        table.grad = g.weight if table.grad is None else table.grad.add_(g.weight)
        return g.dx.view(ctx.shape), None, None, None, None, None, None, g.norm[0], g.norm[1], None
