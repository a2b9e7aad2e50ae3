"""The head of the fused layers: the last normalisation, the GEMM with the embedding, and the loss, in FP8.

Logits never exist for more than `CHUNK_ROWS` rows. M = batch * tokens rows, d = n_embd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.config.schema import PenaltyConfig
from gpt2_fp8.kernels.cast import reduce_columns
from gpt2_fp8.kernels.cross_entropy import of_trained, scale_, with_penalty
from gpt2_fp8.kernels.embedding import embedding_gradient
from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.kernels.layer_norm import layer_norm_backward, layer_norm_cast
from gpt2_fp8.kernels.product_gelu import fits
from gpt2_fp8.kernels.product_logits import product_logits
from gpt2_fp8.kernels.rounding import mean_of_rounded
from gpt2_fp8.kernels.softmax_cast import GRADIENT_SCALE, log_sums, softmax_gradient_cast, softmax_statistics
from gpt2_fp8.kernels.target_rows import target_rows
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.layers.fp8_linear import FP8Linear
from gpt2_fp8.layers.reference import LayerNormLinear

# The format of the logits' gradient, whatever the blocks' is. Its values reach from 1 down to the probabilities of rare
# tokens. E4M3 rounds values below 2^-18 to 0: half of a vocabulary or more. Nothing would then push those tokens down.
GRADIENT = torch.float8_e5m2
CHUNK_ROWS = 16384  # with GPT-2's vocabulary: 1.6 GB of logits in bf16, and as much for their gradient in FP8


class Head(LayerNormLinear):
    """The last normalisation and the GEMM with the embedding, in FP8. `loss` trains; `forward` gives logits."""

    def __init__(self, spec: BlockSpec, padded_vocab_size: int, scales: Scales):
        super().__init__(spec.n_embd, padded_vocab_size, spec.norm, bias=False)
        self.linear = FP8Linear(scales, own_gradient=False)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute logits, bfloat16 [batch, tokens, padded_vocab_size], without gradients.

        x: bfloat16 [batch, tokens, d].
        """
        if is_first_microbatch is not False:
            self.linear.refresh(self.weight, None)
        with torch.no_grad():
            rows = x.reshape(-1, x.shape[-1])
            y8, _, _ = self._normalise(rows, both=False)
            return self.linear(y8).view(*x.shape[:-1], -1)

    def loss(
        self, x: Tensor, targets: Tensor, vocab_size: int, scale: float, is_first_microbatch: bool | None,
        penalty: PenaltyConfig | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute `scale` times the mean cross-entropy over targets [batch, tokens] that are not negative; float32.

        With z-loss, the one penalty that these layers have, it is [3]: see `kernels.cross_entropy.with_penalty`.
        """
        z_loss = penalty.z_loss if penalty else 0.0
        if is_first_microbatch is not False:
            self.linear.refresh(self.weight, None)
        parameters = self.layer_norm_weight, self.layer_norm_bias, self.weight
        # Inside a Function gradients are always off and parameters always require theirs, so the mode is passed in.
        training = torch.is_grad_enabled()
        return _HeadFunction.apply(x, targets.reshape(-1), self, vocab_size, scale, training, z_loss, *parameters)

    def logits(self, y8: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute logits, bfloat16 [rows, N], and their losses and exponents, from y8 [rows, d].

        See `softmax_statistics`.
        """
        linear = self.linear
        if fits(y8, linear.w8):
            return product_logits(linear.operands(y8), targets, vocab_size)
        logits = linear(y8)
        return logits, *softmax_statistics(logits, targets, vocab_size)

    def _normalise(self, x: Tensor, both: bool) -> Any:
        slot = self.linear.slot("input")
        return layer_norm_cast(x, self.layer_norm_weight, self.layer_norm_bias, self.epsilon, slot, both)


class _HeadFunction(torch.autograd.Function):
    """Loss and gradients, computed in the forward, one chunk of rows after the other.

    A chunk's logits are freed before the next chunk. The backward only hands out the finished gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: Tensor, head: Head, vocab_size: int, scale: float, training: bool, z_loss: float,
        *_: Tensor,
    ) -> Tensor:  # fmt: skip
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        weight = scale / (targets >= 0).sum().clamp_min(1).to(torch.float32)
        gradients = _HeadGradients(head, x, weight, z_loss) if training else None
        parts = [slice(start, start + CHUNK_ROWS) for start in range(0, len(x), CHUNK_ROWS)]
        losses = [_chunk(head, x, part, targets[part], vocab_size, gradients) for part in parts]
        ctx.shape, ctx.gradients = shape, gradients
        loss = torch.cat(losses).sum() * weight
        if gradients is None or not z_loss:
            return loss
        return with_penalty(loss, torch.cat(gradients.log_sums).square().sum() * weight * z_loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        assert ctx.gradients is not None, "one backward only"
        g, ctx.gradients = ctx.gradients, None  # freed here: autograd's graph lives longer than its backward
        for gradient in (g.dx, g.norm, g.weight):
            scale_(gradient, of_trained(upstream[0]))
        return g.dx.view(ctx.shape), None, None, None, None, None, None, g.norm[0], g.norm[1], g.weight


def _chunk(
    head: Head, x: Tensor, part: slice, targets: Tensor, vocab_size: int, gradients: _HeadGradients | None
) -> Tensor:
    """Compute the losses [rows] of one chunk, and add its share of the gradients to `gradients`.

    Its logits are freed here.
    """
    y8, y8t, statistics = head._normalise(x[part], both=gradients is not None)
    logits, losses, exponents = head.logits(y8, targets, vocab_size)
    if gradients is not None:
        g8, g8t = softmax_gradient_cast(logits, targets, exponents, vocab_size, GRADIENT, gradients.z_loss)
        if gradients.z_loss:
            gradients.log_sums.append(log_sums(exponents))
        rest = gradients.of_targets(logits, targets, exponents, g8, y8)
        del logits, y8
        gradients.add(part, g8, g8t, y8t, statistics, targets, rest)
    return losses


class _HeadGradients:
    """The gradients of the head's input and parameters, accumulated chunk by chunk."""

    def __init__(self, head: Head, x: Tensor, weight: Tensor, z_loss: float):
        self.z_loss = z_loss
        self.log_sums: list[Tensor] = []  # of each chunk's rows, for the penalty
        self.head, self.x, self.dx = head, x, torch.empty_like(x)
        self.loss_weight = weight.reshape(1)
        self.scale_inv = self.loss_weight / (GRADIENT_SCALE[GRADIENT] * mean_of_rounded(GRADIENT))
        self.weight = torch.empty_like(head.weight)
        self.norm = torch.empty(2, x.shape[1], dtype=torch.float32, device=x.device)

    def of_targets(
        self, logits: Tensor, targets: Tensor, exponents: Tensor, g8: Tensor, y8: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute what `g8` lacks at the targets of one chunk: see `kernels.target_rows`."""
        linear = self.head.linear
        gradient, weight = (g8, self.scale_inv), (linear.w8, linear.slot("weight").scale_inv)
        inputs = y8, linear.slot("input").scale_inv
        return target_rows(logits, targets, exponents, gradient, self.loss_weight, weight, inputs, self.z_loss)

    def add(
        self, part: slice, g8: Tensor, g8t: Tensor, y8t: Tensor, statistics: Any, targets: Tensor,
        rest: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Add one chunk's share: g8 [rows, N] is the FP8 gradient of its logits, y8t [d, rows] its normalised rows.

        `rest`: what `of_targets` has returned for it. It is overwritten.
        """
        linear, first = self.head.linear, part.start == 0
        dy, of_weight = rest
        matmul(g8, linear.w8t, dy, self.scale_inv, linear.slot("weight").scale_inv, add=dy)
        input_scale = linear.slot("input").scale_inv
        matmul(g8t, y8t, self.weight, self.scale_inv, input_scale, add=None if first else self.weight)
        embedding_gradient(of_weight[None], targets.clamp_min(0)[None], self.weight)
        result = layer_norm_backward(dy, self.x[part], statistics, self.head.layer_norm_weight, None, None)
        self.dx[part] = result.dx
        for i in range(2):
            reduce_columns(result.sums[:, i], self.norm[i], add=not first)
