"""Layer normalisation (Ba et al. 2016), fused with the quantization of its output to FP8.

Its backward is fused with the addition of the residual stream's gradient and the quantization of the sum.

There are two implementations. `layer_norm_rows` reads its input once; it is used if rows are short enough and CUDA C++
can be compiled. Otherwise `layer_norm_tiles` is used. Their results differ by the order of sums.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels import layer_norm_rows, layer_norm_tiles
from gpt2_fp8.kernels.slot import Slot


class Statistics(NamedTuple):
    """Each row's mean and the reciprocal of its standard deviation, float32 [M]."""

    mean: Tensor
    rstd: Tensor


class LayerNormGradient(NamedTuple):
    """The result of `layer_norm_backward`.

    `sums`: float32 [P, 3, N], partial column sums of three gradients: of weight, of bias, and dx itself. The last is
    the bias gradient of the linear layer that wrote x; it is undefined without a slot.
    """

    dx: Tensor  # [M, N] bfloat16
    q: Tensor  # FP8 [M, N] and [N, M] of dx times the slot's scale; empty without a slot
    qt: Tensor
    sums: Tensor


def _implementation(x: Tensor) -> ModuleType:
    return layer_norm_rows if layer_norm_rows.fits(x.shape[1]) else layer_norm_tiles


def layer_norm_cast(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, slot: Slot, both: bool = True
) -> tuple[Tensor, Tensor, Statistics]:
    """Normalise the rows of x and quantize them with the slot's scale to FP8 [M, N] and its transpose [N, M].

    x: bfloat16 [M, N]; weight and bias: float32 [N]; M and N are multiples of 16. The transpose is empty unless `both`.
    The third result is what the backward needs.
    """
    assert x.is_contiguous()
    q, qt, mean, rstd = _implementation(x).forward(x, weight, bias, epsilon, slot, both)
    return q, qt, Statistics(mean, rstd)


def layer_norm_transposed(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, slot: Slot, factors: Tensor
) -> Tensor:
    """Normalise the rows of x, multiply each by its factor, and quantize them to FP8, transposed: [N, M].

    factors: float32 [M], at most 1 if nothing shall saturate. Only for rows that `layer_norm_rows.fits`.
    """
    assert x.is_contiguous()
    assert (factors.dtype, factors.shape) == (torch.float32, x.shape[:1]), (factors.dtype, factors.shape)
    return layer_norm_rows.transposed(x, weight, bias, epsilon, slot, factors)


def layer_norm_backward(
    dy: Tensor, x: Tensor, statistics: Statistics, weight: Tensor, residual: Tensor | None, slot: Slot | None
) -> LayerNormGradient:
    """Compute the gradient of x from `dy`, that of its normalised rows, and from `residual`, that of its other use.

    All are bfloat16 [M, N]. `residual=None`: x has no other use.
    """
    assert all(t.is_contiguous() for t in (dy, x, residual) if t is not None)
    return LayerNormGradient(*_implementation(x).backward(dy, x, *statistics, weight, residual, slot))
