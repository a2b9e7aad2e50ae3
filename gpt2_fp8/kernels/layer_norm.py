"""Layer normalisation (Ba et al. 2016) fused with the cast of its output to FP8, and its backward fused with the
residual stream's gradient and that one's cast.

Two implementations: `layer_norm_rows` where rows are short enough for it and CUDA C++ can be compiled, which reads its
input once, and `layer_norm_tiles` elsewhere. Their results differ by the order of sums.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from gpt2_fp8.kernels import layer_norm_rows, layer_norm_tiles
from gpt2_fp8.kernels.slot import Slot


class Statistics(NamedTuple):
    """Of each row: its mean and the reciprocal of its standard deviation, float32 [M]."""

    mean: Tensor
    rstd: Tensor


class LayerNormGradient(NamedTuple):
    """What `layer_norm_backward` gives. `sums` [P, 3, N] float32: partial column sums of the gradients of weight, of
    bias, and of dx itself (the bias gradient of the product that wrote x; undefined without a slot)."""

    dx: Tensor  # [M, N] bfloat16
    q: Tensor  # FP8 [M, N] and [N, M] of dx times the slot's scale; empty without a slot
    qt: Tensor
    sums: Tensor


def _implementation(x: Tensor) -> ModuleType:
    return layer_norm_rows if layer_norm_rows.fits(x.shape[1]) else layer_norm_tiles


def layer_norm_cast(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, slot: Slot, both: bool = True
) -> tuple[Tensor, Tensor, Statistics]:
    """x [M, N] bfloat16, weight and bias [N] float32 -> FP8 [M, N] and [N, M] of the normalised rows times the slot's
    scale (the second empty unless `both`), and what the backward needs. M and N are multiples of 16."""
    assert x.is_contiguous()
    q, qt, mean, rstd = _implementation(x).forward(x, weight, bias, epsilon, slot, both)
    return q, qt, Statistics(mean, rstd)


def layer_norm_backward(
    dy: Tensor, x: Tensor, statistics: Statistics, weight: Tensor, residual: Tensor | None, slot: Slot | None
) -> LayerNormGradient:
    """The gradient of x from that of its normalised rows, `dy`, and of x's other use, `residual` (None: there is none);
    all [M, N] bfloat16."""
    assert all(t.is_contiguous() for t in (dy, x, residual) if t is not None)
    return LayerNormGradient(*_implementation(x).backward(dy, x, *statistics, weight, residual, slot))
