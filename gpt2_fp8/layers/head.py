"""The head of the fused layers: the last normalisation, the GEMM with the embedding, and the loss, in FP8.

The rows of a micro-batch go through it in chunks of `CHUNK_ROWS`, from input to losses and gradients, in two ways:

- With logits: the GEMM writes logits. Two kernels read them: for the losses, and for the logits' gradient in FP8.
- Without: the GEMM writes that gradient itself. A row's sum of exponentials is known only afterwards, so its numbers
  are relative to a reference (`kernels.probabilities`). The few rows that are too far from theirs are a chunk of logits
  at the end, up to `ROOM` of each chunk. With more of them numbers in the gradient have saturated: the loss is NaN
  then, and the step is run again in bf16. It takes training's larger micro-batches: the references have their price.

Shapes: M = batch * tokens rows, m rows of a chunk, d = n_embd, N = padded_vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.config.schema import PenaltyConfig
from gpt2_fp8.kernels import product
from gpt2_fp8.kernels.cast import reduce_columns
from gpt2_fp8.kernels.cross_entropy import of_trained, scale_, with_penalty
from gpt2_fp8.kernels.embedding import embedding_gradient
from gpt2_fp8.kernels.formats import EXPONENT, HEAD_GRADIENT, LOGITS_EXPONENT, Slot, mean_of_rounded
from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.kernels.layer_norm import Statistics, layer_norm_backward, layer_norm_cast, layer_norm_transposed
from gpt2_fp8.kernels.probabilities import (
    Frequent,
    choose_frequent,
    compute_references,
    probability_rows,
    product_probabilities,
)
from gpt2_fp8.kernels.softmax_cast import log_sums, softmax_gradient_cast, softmax_statistics
from gpt2_fp8.kernels.target_rows import add_target_rows, target_rows
from gpt2_fp8.layers.delayed_scaling import Scales
from gpt2_fp8.layers.fp8_linear import FP8Linear
from gpt2_fp8.layers.reference import LayerNormLinear

CHUNK_ROWS = 16384  # with GPT-2's vocabulary: 1.6 GB of the logits' gradient in FP8, and as much if there are logits
ROOM = 64  # rows of a chunk that can be set aside; 47 at most were, in 12,480 steps of seven runs of gpt2_modern


class Head(LayerNormLinear):
    """The last normalisation and the GEMM with the embedding, or with a weight of its own.

    `loss` trains in FP8, with `linear`, the weight's FP8 side.

    Logits without gradients, of `forward`, are computed in bfloat16: what is rounded to FP8 has a higher loss, and an
    evaluation gains nothing by it.
    """

    def __init__(self, spec: BlockSpec, padded_vocab_size: int, scales: Scales):
        super().__init__(spec.n_embd, padded_vocab_size, spec.norm, bias=False)
        self.linear = FP8Linear(scales, own_gradient=False)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """Compute logits, bfloat16 [batch, tokens, padded_vocab_size], without gradients.

        x: bfloat16 [batch, tokens, d].
        """
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
            return super().forward(x)

    def gradient_factor(self, rows: int) -> float:
        """Return what multiplies the logits' gradient of a micro-batch before its cast, the loss's divisor left out.

        Without logits it is that of a row whose reference is exact; others have a larger one.
        """
        has_logits = product.why_logits(rows, *self.weight.shape)
        return 2.0 ** (LOGITS_EXPONENT if has_logits else EXPONENT)

    def norm_parameters(self) -> list[Tensor]:
        """Return the normalisation's weight and, if it has one, its bias."""
        return [vector for vector in (self.layer_norm_weight, self.layer_norm_bias) if vector is not None]

    def normalisation(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, float, Slot]:
        """Return what the kernels that normalise x [M, d] are called with."""
        return x, self.layer_norm_weight, self.layer_norm_bias, self.epsilon, self.linear.slot("input")

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
        return _HeadFunction.apply(
            x, targets.reshape(-1), self, vocab_size, scale, training, z_loss, self.weight, *self.norm_parameters()
        )


class _HeadFunction(torch.autograd.Function):
    """Loss and gradients, computed in the forward, one chunk of rows after the other.

    The backward only hands out the finished gradients. That of the weight, which may be the embedding's too, it adds to
    `.grad` itself: see `kernels.embedding.fused_embed`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, targets: Tensor, head: Head, vocab_size: int, scale: float, training: bool, z_loss: float,
        *_: Tensor,
    ) -> Tensor:  # fmt: skip
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        weight = scale / (targets >= 0).sum().clamp_min(1).to(torch.float32)
        gradients = _Gradients(head, x, weight, z_loss) if training else None
        parts = [slice(start, start + CHUNK_ROWS) for start in range(0, len(x), CHUNK_ROWS)]
        chunks = [Chunk(head, x[part], targets[part], vocab_size, part) for part in parts]
        if gradients is None:
            losses = [softmax_statistics(head(chunk.x), chunk.targets, vocab_size)[0] for chunk in chunks]
            known = _Known(torch.cat(losses), None)
        elif fit_without_logits(chunks):
            known = _train_without_logits(chunks, x, targets, gradients)
        else:
            known = _concatenate([_train_with_logits(chunk, gradients) for chunk in chunks])
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
        return g.dx.view(ctx.shape), None, None, None, None, None, None, None, *g.norm


class Chunk(NamedTuple):
    """Some rows of a head's input: x, bfloat16 [m, d], and their targets, int64 [m]."""

    head: Head
    x: Tensor
    targets: Tensor
    vocab_size: int
    rows: slice | Tensor  # which of all rows they are; int64 [m]


class _Known(NamedTuple):
    """The losses of rows, and the logarithms of their sums of exponentials, float32 [m]; 0 without a target.

    The latter are there if the gradient of a z-loss needs them.
    """

    losses: Tensor
    log_sums: Tensor | None


def _concatenate(parts: Sequence[_Known]) -> _Known:
    """Join what is known of the rows of several chunks."""
    of_sums = [part.log_sums for part in parts if part.log_sums is not None]
    return _Known(torch.cat([part.losses for part in parts]), torch.cat(of_sums) if of_sums else None)


def _train_with_logits(chunk: Chunk, gradients: _Gradients) -> _Known:
    """Compute a chunk's losses, and add its share to `gradients`. Its logits are freed here."""
    head, x, targets, vocab_size, rows = chunk
    y8, y8t, statistics = layer_norm_cast(*head.normalisation(x))
    z_loss, linear = gradients.z_loss, head.linear
    logits = linear(y8)
    losses, exponents = softmax_statistics(logits, targets, vocab_size)
    g8, g8t = softmax_gradient_cast(logits, targets, exponents, vocab_size, z_loss)
    scale_inv, of_weight = gradients.scale_inv(2.0**LOGITS_EXPONENT), linear.slot("weight").scale_inv
    dy, at_targets = target_rows(
        logits, targets, exponents, (g8, scale_inv), gradients.loss_weight, (linear.w8, of_weight),
        (y8, linear.slot("input").scale_inv), z_loss,
    )  # fmt: skip
    del logits, y8
    matmul(g8, linear.w8t, dy, scale_inv, of_weight, add=dy)
    dx = gradients.add(x, statistics, dy, (g8t, scale_inv), y8t, targets, at_targets)
    if isinstance(rows, slice):
        gradients.dx[rows] = dx
    else:
        gradients.dx.index_add_(0, rows, dx)  # as in `_train_without_logits`
    return _Known(losses, log_sums(exponents) if z_loss else None)


def fit_without_logits(chunks: Sequence[Chunk]) -> bool:
    """Return whether a micro-batch's rows can be, and are worth, chunks of probabilities: see `product.why_logits`.

    The kernel must fit each chunk, a shorter last one too.
    """
    rows, w8 = sum(len(chunk.x) for chunk in chunks), chunks[0].head.linear.w8
    if product.why_logits(rows, *w8.shape):
        return False
    return all(product.fits(chunk.x, w8, product.STAGED) for chunk in chunks)


def _train_without_logits(chunks: Sequence[Chunk], x: Tensor, targets: Tensor, gradients: _Gradients) -> _Known:
    """Compute the losses of all rows x [M, d], which are in `chunks`, and their gradients."""
    head, *_, vocab_size, _ = chunks[0]
    ids = choose_frequent(targets, head.linear.w8, vocab_size)
    done = [_train_chunk_without_logits(chunk, ids, gradients) for chunk in chunks]
    known = _concatenate([part for part, _, _ in done])
    rows, left = torch.cat([rows for _, rows, _ in done]), torch.cat([left for _, _, left in done])
    again = _train_with_logits(Chunk(head, x[rows], left, vocab_size, rows), gradients)
    for whole, more in zip(known, again, strict=True):
        if whole is not None and more is not None:
            whole.index_add_(0, rows, more)  # 0 in these rows until now; an unused place adds 0 to a row
    return known


def _train_chunk_without_logits(chunk: Chunk, ids: Frequent, gradients: _Gradients) -> tuple[_Known, Tensor, Tensor]:
    """Compute what is known of a chunk's rows, and add their share to `gradients`.

    The other results: which of all rows were set aside, and their targets, int64 [ROOM].
    """
    head, x, targets, vocab_size, part = chunk
    assert isinstance(part, slice)
    linear, normalisation = head.linear, head.normalisation(x)
    y8, _, statistics = layer_norm_cast(*normalisation, both=False)
    operands = linear.operands(y8)
    of_rows = compute_references(operands, targets, ids)
    made = product_probabilities(operands, of_rows, targets, vocab_size)
    scale_inv = gradients.scale_inv(2.0**EXPONENT)
    known, aside = probability_rows(made, of_rows, targets, gradients.loss_weight, scale_inv, ROOM, gradients.z_loss)
    weight, inputs = (linear.w8, operands.b_scale_inv), (y8, operands.a_scale_inv)
    dy = torch.empty_like(x)
    matmul(made.q, linear.w8t, dy, scale_inv, operands.b_scale_inv)
    at_targets = add_target_rows(dy, known.factors, known.rest, targets, weight, inputs)
    y8t = layer_norm_transposed(*normalisation, known.factors)
    gradients.dx[part] = gradients.add(x, statistics, dy, (made.qt, scale_inv), y8t, targets, at_targets)
    losses = torch.where(aside.found > ROOM, torch.nan, known.losses)
    return _Known(losses, known.log_sums if gradients.z_loss else None), aside.rows + part.start, aside.targets


class _Gradients:
    """The gradients of the input [M, d], of the weight [N, d], and of the normalisation's one or two vectors.

    `weight`: what the loss of a row counts, float32 of one element.
    """

    def __init__(self, head: Head, x: Tensor, weight: Tensor, z_loss: float):
        self.head, self.z_loss, self.begun = head, z_loss, False
        self.loss_weight = weight.reshape(1)
        self.dx = torch.empty_like(x)
        self.weight = torch.empty_like(head.weight)
        self.norm = torch.empty(len(head.norm_parameters()), x.shape[1], dtype=torch.float32, device=x.device)

    def scale_inv(self, factor: float) -> Tensor:
        """Return the inverse scale of a softmax in E5M2 that was multiplied by `factor`, float32 of one element."""
        return self.loss_weight / (factor * mean_of_rounded(HEAD_GRADIENT))

    def add(
        self, x: Tensor, statistics: Statistics, dy: Tensor, of_logits: tuple[Tensor, Tensor], y8t: Tensor,
        targets: Tensor, at_targets: Tensor,
    ) -> Tensor:  # fmt: skip
        """Add a chunk's share to the parameters' gradients; return the gradient of its input x [m, d].

        dy: that of its normalised rows, bfloat16 [m, d]. of_logits: E5M2 [N, m], and its inverse scale; it lacks a part
        at the targets. y8t: the normalised rows, times what of_logits is off by, FP8 [d, m]. at_targets: what the rows
        add to the weight's gradient of their targets, bfloat16 [m, d].
        """
        weight, input_scale = self.weight, self.head.linear.slot("input").scale_inv
        g8t, scale_inv = of_logits
        matmul(g8t, y8t, weight, scale_inv, input_scale, add=weight if self.begun else None)
        embedding_gradient(at_targets[None], targets.clamp_min(0)[None], weight)
        result = layer_norm_backward(dy, x, statistics, self.head.layer_norm_weight, None, None)
        for i, gradient in enumerate(self.norm):
            reduce_columns(result.sums[:, i], gradient, add=self.begun)
        self.begun = True
        return result.dx
