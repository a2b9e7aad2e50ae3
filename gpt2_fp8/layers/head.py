"""The head of the fused layers: the last normalisation, the product with the embedding, and the loss, in FP8.

Logits never exist for more than `CHUNK` rows. M = batch * tokens rows, d = n_embd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.kernels.cast import reduce_columns
from gpt2_fp8.kernels.cross_entropy import scale_
from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.kernels.layer_norm import layer_norm_backward, layer_norm_cast
from gpt2_fp8.kernels.product_gelu import Operands, fits
from gpt2_fp8.kernels.product_logits import product_logits
from gpt2_fp8.kernels.softmax_cast import GRADIENT_SCALE, softmax_gradient_cast, softmax_statistics
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.layers.fp8_linear import Product
from gpt2_fp8.layers.reference import LayerNormLinear

# Of the logits' gradient, whatever the blocks' is: it reaches from 1 down to the probabilities of rare tokens. E4M3
# casts to 0 what is below 2^-18, half of a vocabulary and more, and nothing would push those tokens down.
GRADIENT = torch.float8_e5m2
CHUNK = 16384  # of GPT-2's vocabulary: 1.6 GB in bf16, and as much in FP8


class Head(LayerNormLinear):
    """The last normalisation and the product with the embedding, in FP8. `loss` trains; `forward` gives logits."""

    def __init__(self, spec: BlockSpec, rows: int, scales: Scales):
        super().__init__(spec.n_embd, rows, spec.norm, bias=False)
        self.product = Product(scales, own_gradient=False)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """x: bfloat16 [batch, tokens, d]. Returns logits, bfloat16 [batch, tokens, rows]; no gradient flows through."""
        if is_first_microbatch is not False:
            self.product.refresh(self.weight, None)
        with torch.no_grad():
            rows = x.reshape(-1, x.shape[-1])
            y8, _, _ = self._normalise(rows, both=False)
            return self.product(y8).view(*x.shape[:-1], -1)

    def loss(
        self, x: Tensor, targets: Tensor, vocab_size: int, scale: float, is_first_microbatch: bool | None
    ) -> Tensor:
        """`scale` times the mean cross-entropy over the targets [batch, tokens] that are not negative; float32."""
        if is_first_microbatch is not False:
            self.product.refresh(self.weight, None)
        parameters = self.layer_norm_weight, self.layer_norm_bias, self.weight
        # inside of a Function gradients are always off, and parameters always want theirs
        training = torch.is_grad_enabled()
        return _HeadFunction.apply(x, targets.reshape(-1), self, vocab_size, scale, training, *parameters)

    def logits(self, y8: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """y8 [rows, d] -> logits, bfloat16 [rows, N], and their losses and exponents: see `softmax_statistics`."""
        product = self.product
        if fits(y8, product.w8):
            scales = product.slot("input").scale_inv, product.slot("weight").scale_inv
            return product_logits(Operands(y8, product.w8, *scales), targets, vocab_size)
        logits = product(y8)
        return logits, *softmax_statistics(logits, targets, vocab_size)

    def _normalise(self, x: Tensor, both: bool) -> Any:
        slot = self.product.slot("input")
        return layer_norm_cast(x, self.layer_norm_weight, self.layer_norm_bias, self.epsilon, slot, both)


class _HeadFunction(torch.autograd.Function):
    """Loss and gradients, a chunk of rows after the other, in the forward: a chunk's logits are gone when the next one
    comes. The backward only hands out what is ready."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: Tensor, head: Head, vocab_size: int, scale: float, training: bool, *_: Tensor
    ) -> Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        weight = scale / (targets >= 0).sum().clamp_min(1).to(torch.float32)
        gradients = _HeadGradients(head, x, weight) if training else None
        parts = [slice(start, start + CHUNK) for start in range(0, len(x), CHUNK)]
        losses = [_chunk(head, x, part, targets[part], vocab_size, gradients) for part in parts]
        ctx.shape, ctx.gradients = shape, gradients
        return torch.cat(losses).sum() * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        assert ctx.gradients is not None, "one backward only"
        g, ctx.gradients = ctx.gradients, None  # the graph outlives its backward
        for gradient in (g.dx, g.norm, g.weight):
            scale_(gradient, upstream[0])
        return g.dx.view(ctx.shape), None, None, None, None, None, g.norm[0], g.norm[1], g.weight


def _chunk(
    head: Head, x: Tensor, part: slice, targets: Tensor, vocab_size: int, gradients: _HeadGradients | None
) -> Tensor:
    """The losses [rows] of one chunk; its share of the gradients goes to `gradients`. Its logits end here."""
    y8, y8t, statistics = head._normalise(x[part], both=gradients is not None)
    logits, losses, exponents = head.logits(y8, targets, vocab_size)
    if gradients is not None:
        g8, g8t = softmax_gradient_cast(logits, targets, exponents, vocab_size, GRADIENT)
        del logits
        gradients.add(part, g8, g8t, y8t, statistics)
    return losses


class _HeadGradients:
    """The gradients of the head's input and parameters, as they come in."""

    def __init__(self, head: Head, x: Tensor, weight: Tensor):
        self.head, self.x, self.dx = head, x, torch.empty_like(x)
        self.scale_inv = (weight / GRADIENT_SCALE[GRADIENT]).reshape(1)
        self.weight = torch.empty_like(head.weight)
        self.norm = torch.empty(2, x.shape[1], dtype=torch.float32, device=x.device)

    def add(self, part: slice, g8: Tensor, g8t: Tensor, y8t: Tensor, statistics: Any) -> None:
        """The chunk's share: g8 [rows, N] FP8 gradient of its logits, y8t [d, rows] the normalised rows."""
        product, first = self.head.product, part.start == 0
        dy = torch.empty(g8.shape[0], y8t.shape[0], dtype=torch.bfloat16, device=g8.device)
        matmul(g8, product.w8t, dy, self.scale_inv, product.slot("weight").scale_inv)
        input_scale = product.slot("input").scale_inv
        matmul(g8t, y8t, self.weight, self.scale_inv, input_scale, add=None if first else self.weight)
        result = layer_norm_backward(dy, self.x[part], statistics, self.head.layer_norm_weight, None, None)
        self.dx[part] = result.dx
        for i in range(2):
            reduce_columns(result.sums[:, i], self.norm[i], add=not first)
