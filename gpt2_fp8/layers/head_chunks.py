"""A chunk of the fused head's rows, from its input to its losses and its share of the gradients, in two ways.

`of_logits`: the GEMM writes logits, and a second kernel reads them and writes their gradient in FP8.

`of_probabilities`: the GEMM writes that gradient itself. A row's sum of exponentials is known only afterwards, so its
numbers are relative to a reference (`kernels.product_probabilities`). The few rows that are too far from theirs are a
chunk of logits at the end, up to `ROOM` of each chunk. With more of them numbers in the gradient have saturated: the
loss is NaN then, and the step is run again in bf16. It takes training's larger micro-batches, since the references have
their price.

m rows, d = n_embd, N = padded_vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels import product_gelu, product_probabilities, shapes
from gpt2_fp8.kernels.gemm import matmul
from gpt2_fp8.kernels.layer_norm import layer_norm_cast, layer_norm_transposed
from gpt2_fp8.kernels.probability_grid import EXPONENT, GRADIENT, GRADIENT_SCALE
from gpt2_fp8.kernels.probability_rows import probability_rows
from gpt2_fp8.kernels.product_logits import product_logits
from gpt2_fp8.kernels.references import Frequent, frequent, references
from gpt2_fp8.kernels.softmax_cast import log_sums, softmax_gradient_cast, softmax_statistics
from gpt2_fp8.kernels.target_rows import add_target_rows, target_rows
from gpt2_fp8.layers.head_gradients import HeadGradients, Share
from gpt2_fp8.layers.head_layer import HeadLayer

ROOM = 64  # rows of a chunk that can be set aside; 17 at most were, in 3,128 chunks of three runs


class Chunk(NamedTuple):
    """Some rows of a head's input: x, bfloat16 [m, d], and their targets, int64 [m]."""

    head: HeadLayer
    x: Tensor
    targets: Tensor
    vocab_size: int
    rows: slice | Tensor  # which of all rows they are; int64 [m]


class Known(NamedTuple):
    """The losses of rows, and the logarithms of their sums of exponentials, float32 [m]; 0 without a target.

    The latter are there if the gradient of a z-loss needs them.
    """

    losses: Tensor
    log_sums: Tensor | None


def joined(parts: Sequence[Known]) -> Known:
    """Join what is known of the rows of several chunks."""
    of_sums = [part.log_sums for part in parts if part.log_sums is not None]
    return Known(torch.cat([part.losses for part in parts]), torch.cat(of_sums) if of_sums else None)


def of_evaluation(chunk: Chunk) -> Known:
    """Compute a chunk's losses, of logits in bfloat16."""
    return Known(softmax_statistics(chunk.head(chunk.x), chunk.targets, chunk.vocab_size)[0], None)


def of_logits(chunk: Chunk, gradients: HeadGradients) -> Known:
    """Compute a chunk's losses, and add its share to `gradients`. Its logits are freed here."""
    head, x, targets, vocab_size, rows = chunk
    y8, y8t, statistics = layer_norm_cast(*head.normalisation(x))
    logits, losses, exponents = _logits(chunk, y8)
    z_loss, linear = gradients.z_loss, head.linear
    g8, g8t = softmax_gradient_cast(logits, targets, exponents, vocab_size, GRADIENT, z_loss)
    scale_inv, of_weight = gradients.scale_inv(GRADIENT_SCALE[GRADIENT]), linear.slot("weight").scale_inv
    dy, at_targets = target_rows(
        logits, targets, exponents, (g8, scale_inv), gradients.loss_weight, (linear.w8, of_weight),
        (y8, linear.slot("input").scale_inv), z_loss,
    )  # fmt: skip
    del logits, y8
    matmul(g8, linear.w8t, dy, scale_inv, of_weight, add=dy)
    dx = gradients.add(Share(dy, g8t, scale_inv, y8t, targets, at_targets), x, statistics)
    if isinstance(rows, slice):
        gradients.dx[rows] = dx
    else:
        gradients.dx.index_add_(0, rows, dx)  # as in `of_probabilities`
    return Known(losses, log_sums(exponents) if z_loss else None)


def _logits(chunk: Chunk, y8: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute logits, bfloat16 [m, N], and their losses and exponents: see `softmax_statistics`."""
    linear = chunk.head.linear
    if product_gelu.fits(y8, linear.w8):
        return product_logits(linear.operands(y8), chunk.targets, chunk.vocab_size)
    logits = linear(y8)
    return logits, *softmax_statistics(logits, chunk.targets, chunk.vocab_size)


def has_probabilities(chunks: Sequence[Chunk]) -> bool:
    """Return whether a micro-batch's rows can be, and are worth, chunks of probabilities: see `shapes.why_logits`.

    The kernel must fit each chunk, a shorter last one too, and be there on this device.
    """
    rows, w8 = sum(len(chunk.x) for chunk in chunks), chunks[0].head.linear.w8
    if shapes.why_logits(rows, *w8.shape):
        return False
    return all(product_gelu.fits(chunk.x, w8, shapes.STAGED) for chunk in chunks)


def of_probabilities(chunks: Sequence[Chunk], x: Tensor, targets: Tensor, gradients: HeadGradients) -> Known:
    """Compute the losses of all rows x [M, d], which are in `chunks`, and their gradients."""
    head, *_, vocab_size, _ = chunks[0]
    ids = frequent(targets, head.linear.w8, vocab_size)
    done = [_of_probabilities(chunk, ids, gradients) for chunk in chunks]
    known = joined([part for part, _, _ in done])
    rows, left = torch.cat([rows for _, rows, _ in done]), torch.cat([left for _, _, left in done])
    again = of_logits(Chunk(head, x[rows], left, vocab_size, rows), gradients)
    for whole, more in zip(known, again, strict=True):
        if whole is not None and more is not None:
            whole.index_add_(0, rows, more)  # 0 in these rows until now; an unused place adds 0 to a row
    return known


def _of_probabilities(chunk: Chunk, ids: Frequent, gradients: HeadGradients) -> tuple[Known, Tensor, Tensor]:
    """Compute what is known of a chunk's rows, and add their share to `gradients`.

    The other results: which of all rows were set aside, and their targets, int64 [ROOM].
    """
    head, x, targets, vocab_size, part = chunk
    assert isinstance(part, slice)
    linear, normalisation = head.linear, head.normalisation(x)
    y8, _, statistics = layer_norm_cast(*normalisation, both=False)
    operands = linear.operands(y8)
    of_rows = references(operands, targets, ids)
    made = product_probabilities.product_probabilities(operands, of_rows, targets, vocab_size)
    scale_inv = gradients.scale_inv(2.0**EXPONENT)
    known, aside = probability_rows(made, of_rows, targets, gradients.loss_weight, scale_inv, ROOM, gradients.z_loss)
    weight, inputs = (linear.w8, operands.b_scale_inv), (y8, operands.a_scale_inv)
    dy = torch.empty_like(x)
    matmul(made.q, linear.w8t, dy, scale_inv, operands.b_scale_inv)
    at_targets = add_target_rows(dy, known.factors, known.rest, targets, weight, inputs)
    y8t = layer_norm_transposed(*normalisation, known.factors)
    gradients.dx[part] = gradients.add(Share(dy, made.qt, scale_inv, y8t, targets, at_targets), x, statistics)
    losses = torch.where(aside.found > ROOM, torch.nan, known.losses)
    return Known(losses, known.log_sums if gradients.z_loss else None), aside.rows + part.start, aside.targets
