"""The MLP's activations and their derivatives, fused with the quantization of their results.

GELU (tanh form, Hendrycks & Gimpel 2016): with u = sqrt(2/pi) (x + 0.044715 x^3) and s = sigmoid(2u) it is x s, since
tanh(u) = 2 sigmoid(2u) - 1. Squared ReLU (So et al. 2021): r^2 with r = max(x, 0), and 2 r its derivative.

A weight gradient needs the result transposed. The backward writes it, because it has x anyway. That costs the same as
in the forward, and needs no memory in between.

Moving single bytes between threads is slow. So a program handles rows in groups of four. It loads the first, second,
third and fourth rows of all groups as four tiles. Then it packs the four bytes of a group and column into one word.
Threads exchange words, a quarter as many.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels.cast import empty_pair
from gpt2_fp8.kernels.formats import Slot
from gpt2_fp8.kernels.product import Kind

GROUPS, COLUMNS, WARPS = 16, 64, 4  # a tile is 4 * GROUPS rows by COLUMNS
TILES = 8  # below each other for one program, if there are enough rows
STAGES = 3  # loads of the next tiles run while one is computed

# -2 sqrt(2/pi) log2(e): the exponent of sigmoid(2u) in base 2
FACTOR = tl.constexpr(-2.302208198144325)
CUBIC = tl.constexpr(0.044715)
TWICE_ROOT = tl.constexpr(1.5957691216057308)  # 2 sqrt(2/pi)

_E4M3 = tl.constexpr(
    "{.reg .b16 a,b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b};}"
)
_E5M2 = tl.constexpr(
    "{.reg .b16 a,b; cvt.rn.satfinite.e5m2x2.f32 a, $2, $1; cvt.rn.satfinite.e5m2x2.f32 b, $4, $3; mov.b32 $0, {a, b};}"
)


@triton.jit
def _pack(x0, x1, x2, x3, dtype: tl.constexpr):
    """Pack four float32 tiles into one tile of words: their FP8 bytes, the first in the lowest."""
    if dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(_E4M3, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1)
    return tl.inline_asm_elementwise(_E5M2, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _store_transposed(qt, x0, x1, x2, x3, groups, columns, M, N):
    """Write rows 4 groups + (0, 1, 2, 3), each x [groups, columns], to qt [N, M]. M is a multiple of 4."""
    inside = (columns < N)[:, None] & (groups < M // 4)[None, :]
    words = tl.trans(_pack(x0, x1, x2, x3, qt.dtype.element_ty))
    at = qt.to(tl.pointer_type(tl.int32)) + columns.to(tl.int64)[:, None] * (M // 4) + groups[None, :]
    tl.store(at, words, mask=inside)


@triton.jit
def _store(q, x0, x1, x2, x3, groups, columns, M, N):
    """Write rows 4 groups + (0, 1, 2, 3), each x [groups, columns], to q [M, N]. M is a multiple of 4."""
    inside = (groups < M // 4)[:, None] & (columns < N)[None, :]
    at = q + (groups.to(tl.int64) * 4)[:, None] * N + columns[None, :]
    tl.store(at, x0.to(q.dtype.element_ty), mask=inside)
    tl.store(at + N, x1.to(q.dtype.element_ty), mask=inside)
    tl.store(at + 2 * N, x2.to(q.dtype.element_ty), mask=inside)
    tl.store(at + 3 * N, x3.to(q.dtype.element_ty), mask=inside)


@triton.jit
def _load_row(x, groups, columns, number: tl.constexpr, M, N):
    """Load rows 4 groups + `number` of x [M, N] as a float32 tile [groups, columns]; 0 outside."""
    inside = (groups < M // 4)[:, None] & (columns < N)[None, :]
    at = x + (groups.to(tl.int64) * 4 + number)[:, None] * N + columns[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _largest4(x0, x1, x2, x3):
    """Compute the largest absolute value at each place of four tiles."""
    return tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))


@triton.jit
def _sigmoid(x, square):
    return 1.0 / (1.0 + tl.exp2(x * (FACTOR + FACTOR * CUBIC * square)))


@triton.jit
def _activate(h, groups, columns, number: tl.constexpr, M, N, SQUARED: tl.constexpr):
    x = _load_row(h, groups, columns, number, M, N)
    if SQUARED:
        r = tl.where(x < 0.0, 0.0, x)  # NaN stays
        y = r * r
    else:
        y = x * _sigmoid(x, x * x)
    return y


@triton.jit
def _activate_backward(dy, h, groups, columns, number: tl.constexpr, M, N, SQUARED: tl.constexpr):
    """Compute the gradient of h, and its activation again."""
    x = _load_row(h, groups, columns, number, M, N)
    if SQUARED:
        r = tl.where(x < 0.0, 0.0, x)
        y = r * r
        gradient = _load_row(dy, groups, columns, number, M, N) * (2.0 * r)
    else:
        square = tl.minimum(x * x, 1e6)  # s is 0 or 1 long before this, and an infinite square would give 0 * inf
        s = _sigmoid(x, square)
        y = x * s
        slope = TWICE_ROOT + 3.0 * CUBIC * TWICE_ROOT * square
        gradient = _load_row(dy, groups, columns, number, M, N) * (s + y * (1.0 - s) * slope)
    return gradient, y


@triton.jit
def _forward(
    h, q, scale, amax, M, N, tiles,
    SQUARED: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    factor = tl.load(scale)
    largest = tl.zeros([GROUPS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(1) * tiles, (tl.program_id(1) + 1) * tiles, num_stages=STAGES):
        groups = tile * GROUPS + tl.arange(0, GROUPS)
        y0 = _activate(h, groups, columns, 0, M, N, SQUARED)
        y1 = _activate(h, groups, columns, 1, M, N, SQUARED)
        y2 = _activate(h, groups, columns, 2, M, N, SQUARED)
        y3 = _activate(h, groups, columns, 3, M, N, SQUARED)
        _store(q, y0 * factor, y1 * factor, y2 * factor, y3 * factor, groups, columns, M, N)
        largest = tl.maximum(largest, _largest4(y0, y1, y2, y3))
    tl.atomic_max(amax, tl.max(largest))


@triton.jit
def _backward(
    dy, h, q, qt, yt, sums, scale, scale_y, amax, M, N, tiles,
    SQUARED: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    factor, factor_y = tl.load(scale), tl.load(scale_y)
    largest = tl.zeros([GROUPS, COLUMNS], tl.float32)
    total = tl.zeros([GROUPS, COLUMNS], tl.float32)
    for tile in tl.range(tl.program_id(1) * tiles, (tl.program_id(1) + 1) * tiles, num_stages=STAGES):
        groups = tile * GROUPS + tl.arange(0, GROUPS)
        d0, y0 = _activate_backward(dy, h, groups, columns, 0, M, N, SQUARED)
        d1, y1 = _activate_backward(dy, h, groups, columns, 1, M, N, SQUARED)
        d2, y2 = _activate_backward(dy, h, groups, columns, 2, M, N, SQUARED)
        d3, y3 = _activate_backward(dy, h, groups, columns, 3, M, N, SQUARED)
        _store_transposed(yt, y0 * factor_y, y1 * factor_y, y2 * factor_y, y3 * factor_y, groups, columns, M, N)
        _store(q, d0 * factor, d1 * factor, d2 * factor, d3 * factor, groups, columns, M, N)
        _store_transposed(qt, d0 * factor, d1 * factor, d2 * factor, d3 * factor, groups, columns, M, N)
        largest = tl.maximum(largest, _largest4(d0, d1, d2, d3))
        total += (d0 + d1) + (d2 + d3)
    tl.atomic_max(amax, tl.max(largest))
    tl.store(sums + tl.program_id(1).to(tl.int64) * N + columns, tl.sum(total, axis=0), mask=columns < N)


def _tile_grid(m: int, n: int) -> tuple[tuple[int, int], int]:
    """Compute the grid of a kernel over tiles of 4 `GROUPS` by `COLUMNS`, and how many tiles a program handles.

    A program handles fewer tiles if otherwise multiprocessors would have no work.
    """
    down, across = triton.cdiv(m, 4 * GROUPS), triton.cdiv(n, COLUMNS)
    tiles = max(1, min(TILES, down * across // 1024))
    return (across, triton.cdiv(down, tiles)), tiles


def activation_cast(kind: Kind, h: Tensor, slot: Slot) -> Tensor:
    """Quantize the activation of h [M, N], bfloat16, with the slot's scale to FP8 [M, N]. M is a multiple of 4."""
    assert h.is_contiguous()
    m, n = h.shape
    q, _ = empty_pair(m, n, slot.dtype, h.device, both=False)
    grid, tiles = _tile_grid(m, n)
    _forward[grid](
        h, q, slot.scale, slot.amax, m, n, tiles,
        SQUARED=kind == "relu_squared", GROUPS=GROUPS, COLUMNS=COLUMNS, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return q


class ActivationGradient(NamedTuple):
    """The result of `activation_backward_cast`."""

    q: Tensor  # FP8 [M, N] and [N, M] of the gradient times its slot's scale
    qt: Tensor
    yt: Tensor  # FP8 [N, M] of the activation times its slot's scale
    sums: Tensor  # partial column sums of the gradient, float32 [P, N]


def activation_backward_cast(kind: Kind, dy: Tensor, h: Tensor, slot: Slot, slot_y: Slot) -> ActivationGradient:
    """Compute dy y'(h), y the activation, quantized with `slot`, and y(h) again, quantized with `slot_y`.

    dy, h: bfloat16 [M, N]. The amax of y was already recorded by `activation_cast`.
    """
    assert all(t.is_contiguous() for t in (dy, h))
    m, n = h.shape
    q, qt = empty_pair(m, n, slot.dtype, h.device)
    yt = torch.empty(n, m, dtype=slot_y.dtype, device=h.device)
    grid, tiles = _tile_grid(m, n)
    sums = torch.empty(grid[1], n, dtype=torch.float32, device=h.device)
    _backward[grid](
        dy, h, q, qt, yt, sums, slot.scale, slot_y.scale, slot.amax, m, n, tiles,
        SQUARED=kind == "relu_squared", GROUPS=GROUPS, COLUMNS=COLUMNS, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return ActivationGradient(q, qt, yt, sums)
