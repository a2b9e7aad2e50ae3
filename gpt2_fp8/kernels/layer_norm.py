"""LayerNorm (Ba et al. 2016) and RMSNorm (Zhang & Sennrich 2019), fused with the quantization of their output to FP8.

The backward is fused with the addition of the residual stream's gradient and the quantization of the sum.

The kernels in CUDA C++ (`cuda/layer_norm_*.cu`) keep whole rows in a multiprocessor: the input is read from memory
once, and the transposed layout is written in runs of as many bytes as there is room for.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.cast import empty_pair
from gpt2_fp8.kernels.formats import Slot
from gpt2_fp8.kernels.nvrtc import SHARED_BYTES

MOST_STAGES = 6
TWO_BLOCKS = 2048  # columns of the widest rows of which a multiprocessor has two blocks in a forward


class Statistics(NamedTuple):
    """Each row's mean and the reciprocal of its standard deviation, float32 [M].

    RMSNorm has no mean (None), and `rstd` is the reciprocal of the root of the mean square.
    """

    mean: Tensor | None
    rstd: Tensor


class LayerNormGradient(NamedTuple):
    """The result of `layer_norm_backward`.

    `sums`: float32 [P, 3, N], partial column sums of three gradients: of weight, of bias, and dx itself. The last is
    the bias gradient of the linear layer that wrote x; it is undefined without a slot. That of bias is undefined with
    RMSNorm, which has none.
    """

    dx: Tensor  # [M, N] bfloat16
    q: Tensor  # FP8 [M, N] and [N, M] of dx times the slot's scale; empty without a slot
    qt: Tensor
    sums: Tensor


def layer_norm_cast(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, slot: Slot, both: bool = True
) -> tuple[Tensor, Tensor, Statistics]:
    """Normalise the rows of x and quantize them with the slot's scale to FP8 [M, N] and its transpose [N, M].

    x: bfloat16 [M, N]; weight and bias: float32 [N], `bias=None` for RMSNorm; M and N are multiples of 16, and N is at
    most 4,096. The transpose is empty unless `both`. The third result is what the backward needs.
    """
    assert x.is_contiguous()
    m, n = x.shape
    assert m % 16 == n % 16 == 0, (m, n)
    q, qt = empty_pair(m, n, slot.dtype, x.device, both)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    mean = None if bias is None else torch.empty_like(rstd)
    _forward(x, weight, bias, epsilon, slot, (q, qt, mean, rstd), both)
    return q, qt, Statistics(mean, rstd)


def layer_norm_transposed(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, slot: Slot, factors: Tensor
) -> Tensor:
    """Normalise the rows of x, multiply each by its factor, and quantize them to FP8, transposed: [N, M].

    factors: float32 [M], at most 1 if nothing shall saturate.
    """
    assert x.is_contiguous()
    assert (factors.dtype, factors.shape) == (torch.float32, x.shape[:1]), (factors.dtype, factors.shape)
    qt = torch.empty(x.shape[::-1], dtype=slot.dtype, device=x.device)
    _forward(x, weight, bias, epsilon, slot, (None, qt, None, None), True, factors)
    return qt


def layer_norm_backward(
    dy: Tensor, x: Tensor, statistics: Statistics, weight: Tensor, residual: Tensor | None, slot: Slot | None
) -> LayerNormGradient:
    """Compute the gradient of x from `dy`, that of its normalised rows, and from `residual`, that of its other use.

    All are bfloat16 [M, N]. `residual=None`: x has no other use.
    """
    assert all(t.is_contiguous() for t in (dy, x, residual) if t is not None)
    (m, n), dx, (mean, rstd) = x.shape, torch.empty_like(x), statistics
    if slot is None:
        q = qt = torch.empty(0, dtype=torch.float8_e5m2, device=x.device)
        scale = amax = rstd  # any address: neither is used
    else:
        (q, qt), scale, amax = empty_pair(m, n, slot.dtype, x.device), slot.scale, slot.amax
    processors = nvrtc.processors(x.device)
    shape = _backward_shape(n, m, processors, 2 if residual is None else 3)
    grid = min(-(-m // shape.tile), processors * shape.blocks)
    sums = torch.empty(grid, 3, n, dtype=torch.float32, device=x.device)
    given = {"E4M3": slot is not None and slot.dtype == torch.float8_e4m3fn, "CAST": slot is not None}
    given |= {"RESIDUAL": residual is not None, "RMS": mean is None}
    launch = _kernel("layer_norm_backward", n, shape, x.device, **given)
    second = dx if residual is None else residual
    launch(grid, dy, x, second, mean, rstd, weight, dx, q, qt, sums, scale, amax, m)
    return LayerNormGradient(dx, q, qt, sums)


class _Shape(NamedTuple):
    """How rows of one width are divided; see the constants of the kernels."""

    rows: int  # in a piece
    blocks: int  # for each multiprocessor
    tile: int  # rows whose transpose is written together
    stages: int  # pieces being loaded
    shared_bytes: int  # for each block


def _threads(n: int) -> int:
    return -(-n // 128) * 32  # four columns each, in whole warps


def _shape(n: int, tensors: int, rows: int, blocks: int, tile: int) -> _Shape | None:
    """Return a shape with as many stages as there is room for; None if there is no room for one.

    `tensors` are read row by row. A backward's pieces (more than one tensor) also hold two numbers a row.
    """
    piece = rows * n * 2 * tensors + (8 * rows if tensors > 1 else 0)
    room = SHARED_BYTES // blocks - 4096 - tile * (-(-n // 32) * 32)  # 4096 bytes: sums, barriers, the system's own
    stages = min(MOST_STAGES, room // piece)
    ring = -(-stages * piece // 128) * 128
    return _Shape(rows, blocks, tile, stages, ring + tile * (-(-n // 32) * 32)) if stages > 0 else None


@cache
def _forward_shape(n: int, m: int, processors: int) -> _Shape:
    """Choose a forward's shape: two blocks of eight rows, or one of four if two had too few registers.

    It has the larger tile that fits. Measured on an H200 at 768, 1,280 and 1,600 columns: that is better even if it
    leaves room for only one piece, since the other block computes meanwhile.
    """
    wanted, (rows, blocks) = _tile(m, processors, 64), (8, 2) if n <= TWO_BLOCKS else (4, 1)
    found = (_shape(n, 1, rows, blocks, tile) for tile in (64, 32, 16) if tile <= wanted)
    return next(shape for shape in found if shape and shape.blocks * shape.stages > 1)


@cache
def _backward_shape(n: int, m: int, processors: int, tensors: int) -> _Shape:
    """Choose a backward's shape: one block of four rows, with many stages for short rows and long runs for others.

    Measured as in `_forward_shape`. The widest rows of three tensors leave room for one stage.
    """
    wanted = _tile(m, processors, 32 if n <= 1024 else 128)
    found = [_shape(n, tensors, 4, 1, tile) for tile in (128, 64, 32, 16) if tile <= wanted]
    fit = [shape for shape in found if shape]
    return next((shape for shape in fit if shape.stages > 1), fit[0])


def _tile(m: int, processors: int, most: int) -> int:
    """Return `most`, or less if multiprocessors would have no work."""
    while most > 16 and -(-m // most) < processors:
        most //= 2
    return most


def _kernel(name: str, n: int, shape: _Shape, device: torch.device, **constants: bool) -> nvrtc.Kernel:
    given = {"N": n, "ROWS": shape.rows, "BLOCKS": shape.blocks, "TILE": shape.tile, "STAGES": shape.stages}
    given |= {"THREADS": _threads(n), **constants}
    return nvrtc.kernel(name, given, device, _threads(n), shape.shared_bytes)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, slot: Slot, results: tuple[Tensor | None, ...],
    both: bool, factors: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the results: both layouts, mean and rstd; with factors, float32 [M], the second alone."""
    m, n = x.shape
    processors = nvrtc.processors(x.device)
    shape = _forward_shape(n, m, processors)
    given = {"E4M3": slot.dtype == torch.float8_e4m3fn, "BOTH": both, "FACTORS": factors is not None}
    launch = _kernel("layer_norm_forward", n, shape, x.device, **given, RMS=bias is None)
    grid = min(-(-m // shape.tile), processors * shape.blocks)
    more = () if factors is None else (factors,)
    launch(grid, x, weight, bias, *results, slot.scale, slot.amax, m, float(epsilon), *more)
