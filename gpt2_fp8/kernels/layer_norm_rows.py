"""Layer normalisation over whole rows that stay in a multiprocessor, in CUDA C++ (`cuda/layer_norm_*.cu`).

The input is read from memory once. The transposed layout is written in runs of as many bytes as there is room for.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.cast import empty_pair
from gpt2_fp8.kernels.shapes import SHARED_BYTES, WIDEST_COLUMNS
from gpt2_fp8.kernels.slot import Slot

MOST_STAGES = 6


class _Shape(NamedTuple):
    """How rows of one width are divided; see the constants of the kernels."""

    rows: int  # in a piece
    blocks: int  # for each multiprocessor
    tile: int  # rows whose transpose is written together
    stages: int  # pieces being loaded
    shared_bytes: int  # for each block


def fits(n: int) -> bool:
    """Return whether this kernel can normalise rows of `n` columns."""
    return n <= WIDEST_COLUMNS and nvrtc.missing() is None


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
    """Choose a forward's shape: two blocks of eight rows, with the larger tile that fits.

    Measured on an H200 at 768, 1,280 and 1,600 columns. The larger tile is better even if it leaves room for only one
    piece: the other block computes meanwhile.
    """
    wanted = _tile(m, processors, 64)
    found = (_shape(n, 1, 8, 2, tile) for tile in (64, 32, 16) if tile <= wanted)
    return next(shape for shape in found if shape)


@cache
def _backward_shape(n: int, m: int, processors: int, tensors: int) -> _Shape:
    """Choose a backward's shape: one block of four rows, with many stages for short rows and long runs for others.

    Measured as in `_forward_shape`.
    """
    wanted = _tile(m, processors, 32 if n <= 1024 else 128)
    found = (_shape(n, tensors, 4, 1, tile) for tile in (128, 64, 32, 16) if tile <= wanted)
    return next(shape for shape in found if shape and shape.stages > 1)


def _tile(m: int, processors: int, most: int) -> int:
    """Return `most`, or less if multiprocessors would have no work."""
    while most > 16 and -(-m // most) < processors:
        most //= 2
    return most


def _kernel(name: str, n: int, shape: _Shape, device: torch.device, **constants: bool) -> nvrtc.Kernel:
    given = {"N": n, "ROWS": shape.rows, "BLOCKS": shape.blocks, "TILE": shape.tile, "STAGES": shape.stages}
    given |= {"THREADS": _threads(n), **constants}
    return nvrtc.kernel(name, given, device, _threads(n), shape.shared_bytes)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, slot: Slot, both: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute both layouts, mean and rstd: see `layer_norm.layer_norm_cast`."""
    m, n = x.shape
    q, qt = empty_pair(m, n, slot.dtype, x.device, both)
    mean, rstd = (torch.empty(m, dtype=torch.float32, device=x.device) for _ in range(2))
    _normalise(x, weight, bias, epsilon, slot, (q, qt, mean, rstd), both)
    return q, qt, mean, rstd


def transposed(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, slot: Slot, factors: Tensor) -> Tensor:
    """Compute the second layout alone, of rows times their factors: see `layer_norm.layer_norm_transposed`."""
    m, n = x.shape
    qt = torch.empty(n, m, dtype=slot.dtype, device=x.device)
    _normalise(x, weight, bias, epsilon, slot, (None, qt, None, None), True, factors)
    return qt


def _normalise(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, slot: Slot, results: tuple[Tensor | None, ...], both: bool,
    factors: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the results: both layouts, mean and rstd; with factors, float32 [M], the second alone."""
    m, n = x.shape
    processors = nvrtc.processors(x.device)
    shape = _forward_shape(n, m, processors)
    e4m3 = slot.dtype == torch.float8_e4m3fn
    launch = _kernel("layer_norm_forward", n, shape, x.device, E4M3=e4m3, BOTH=both, FACTORS=factors is not None)
    grid = min(-(-m // shape.tile), processors * shape.blocks)
    more = () if factors is None else (factors,)
    launch(grid, x, weight, bias, *results, slot.scale, slot.amax, m, float(epsilon), *more)


def backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None, slot: Slot | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute dx, both layouts, and the sums: see `layer_norm.layer_norm_backward`."""
    m, n = x.shape
    processors = nvrtc.processors(x.device)
    shape = _backward_shape(n, m, processors, 2 if residual is None else 3)
    grid = min(-(-m // shape.tile), processors * shape.blocks)
    dx = torch.empty_like(x)
    sums = torch.empty(grid, 3, n, dtype=torch.float32, device=x.device)
    if slot is None:
        q = qt = torch.empty(0, dtype=torch.float8_e5m2, device=x.device)
        scale, amax, e4m3 = mean, mean, False
    else:
        q, qt = empty_pair(m, n, slot.dtype, x.device)
        scale, amax, e4m3 = slot.scale, slot.amax, slot.dtype == torch.float8_e4m3fn
    launch = _kernel(
        "layer_norm_backward", n, shape, x.device, E4M3=e4m3, CAST=slot is not None, RESIDUAL=residual is not None
    )
    launch(grid, dy, x, dx if residual is None else residual, mean, rstd, weight, dx, q, qt, sums, scale, amax, m)
    return dx, q, qt, sums
