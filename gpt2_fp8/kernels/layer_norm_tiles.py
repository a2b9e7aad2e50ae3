"""Layer normalisation over tiles, in Triton, for rows of any width.

In the forward a program owns a block of rows and goes over their columns twice; the second time they are in the cache.
Each row's first value is subtracted before summing. It lies within sqrt(N) standard deviations of the mean (Samuelson
1968), so a large mean costs no precision. The backward is two kernels: one for each row's two sums, and one over tiles,
whose column sums stay in registers from tile to tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels.cast import COLUMNS, GROUPS, WARPS, largest4, load_row, store_both, tile_grid
from gpt2_fp8.kernels.formats import Slot

STAGES = 3  # a program goes over blocks of columns, and in the backward over tiles, while the next two are loaded


def _groups(m: int) -> int:
    """Return how many groups of four rows a program owns: fewer if multiprocessors would have no work."""
    return 16 if m >= 16384 else 8 if m >= 8192 else 4


@triton.jit
def _shift(x, groups, number: tl.constexpr, M, N):
    return tl.load(x + (groups.to(tl.int64) * 4 + number) * N, mask=groups < M // 4, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _add(x, total, squares, shift, groups, columns, number: tl.constexpr, M, N):
    """Add a tile of x, less each row's `shift`, to running sums of values and of squares."""
    deviation = tl.where((columns < N)[None, :], load_row(x, groups, columns, number, M, N) - shift, 0.0)
    return total + deviation, squares + deviation * deviation


@triton.jit
def _statistics(total, squares, shift, mean_out, rstd_out, groups, number: tl.constexpr, M, N, epsilon):
    offset = tl.sum(total, axis=1) / N
    variance = tl.maximum(tl.sum(squares, axis=1) / N - offset * offset, 0.0)
    rstd = tl.rsqrt(variance + epsilon)[:, None]
    mean = shift + offset[:, None]
    tl.store(mean_out + groups[:, None] * 4 + number, mean, mask=groups[:, None] < M // 4)
    tl.store(rstd_out + groups[:, None] * 4 + number, rstd, mask=groups[:, None] < M // 4)
    return mean, rstd


@triton.jit
def _normalize(x, mean, rstd, w, b, groups, columns, number: tl.constexpr, M, N):
    inside = (groups < M // 4)[:, None] & (columns < N)[None, :]
    y = (load_row(x, groups, columns, number, M, N) - mean) * rstd * w + b
    return tl.where(inside, y, 0.0)


@triton.jit
def _forward(
    x, weight, bias, q, qt, mean_out, rstd_out, scale, amax, M, N, epsilon,
    BOTH: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    shift0, shift1 = _shift(x, groups, 0, M, N), _shift(x, groups, 1, M, N)
    shift2, shift3 = _shift(x, groups, 2, M, N), _shift(x, groups, 3, M, N)
    zeros = tl.zeros([GROUPS, COLUMNS], tl.float32)
    t0, t1, t2, t3, s0, s1, s2, s3 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
    for start in tl.range(0, N, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        t0, s0 = _add(x, t0, s0, shift0, groups, columns, 0, M, N)
        t1, s1 = _add(x, t1, s1, shift1, groups, columns, 1, M, N)
        t2, s2 = _add(x, t2, s2, shift2, groups, columns, 2, M, N)
        t3, s3 = _add(x, t3, s3, shift3, groups, columns, 3, M, N)
    mean0, rstd0 = _statistics(t0, s0, shift0, mean_out, rstd_out, groups, 0, M, N, epsilon)
    mean1, rstd1 = _statistics(t1, s1, shift1, mean_out, rstd_out, groups, 1, M, N, epsilon)
    mean2, rstd2 = _statistics(t2, s2, shift2, mean_out, rstd_out, groups, 2, M, N, epsilon)
    mean3, rstd3 = _statistics(t3, s3, shift3, mean_out, rstd_out, groups, 3, M, N, epsilon)
    factor = tl.load(scale)
    largest = tl.zeros([GROUPS, COLUMNS], tl.float32)
    for start in tl.range(0, N, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        w = tl.load(weight + columns, mask=columns < N, other=0.0)[None, :]
        b = tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
        y0 = _normalize(x, mean0, rstd0, w, b, groups, columns, 0, M, N)
        y1 = _normalize(x, mean1, rstd1, w, b, groups, columns, 1, M, N)
        y2 = _normalize(x, mean2, rstd2, w, b, groups, columns, 2, M, N)
        y3 = _normalize(x, mean3, rstd3, w, b, groups, columns, 3, M, N)
        largest = tl.maximum(largest, largest4(y0, y1, y2, y3))
        store_both(q, qt, y0, y1, y2, y3, groups, columns, M, N, factor, BOTH)
    tl.atomic_max(amax, tl.max(largest))


@triton.jit
def _of_rows(statistics, groups, number: tl.constexpr, M):
    return tl.load(statistics + groups * 4 + number, mask=groups < M // 4, other=0.0)[:, None]


@triton.jit
def _row_sums(dy, x, mean, rstd, weight, along, total, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute what dx subtracts from each row: along = mean(dy w normalised), total = mean(dy w)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    centre = tl.load(mean + rows, mask=rows < M, other=0.0)[:, None]
    sum_along = tl.zeros([ROWS, COLUMNS], tl.float32)
    sum_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, N, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        at = rows.to(tl.int64)[:, None] * N + columns[None, :]
        w = tl.load(weight + columns, mask=columns < N, other=0.0)[None, :]
        gradient = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32) * w
        sum_along += gradient * (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - centre)
        sum_total += gradient
    scale = tl.load(rstd + rows, mask=rows < M, other=0.0) / N
    tl.store(along + rows, tl.sum(sum_along, axis=1) * scale, mask=rows < M)
    tl.store(total + rows, tl.sum(sum_total, axis=1) / N, mask=rows < M)


@triton.jit
def _dx(
    dy, x, residual, dx_out, w, mean, rstd, along, total, groups, columns, number: tl.constexpr, M, N,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Compute and write a tile of dx; return it with dy times the normalised x, and dy."""
    scale = _of_rows(rstd, groups, number, M)
    normalised = (load_row(x, groups, columns, number, M, N) - _of_rows(mean, groups, number, M)) * scale
    gradient = load_row(dy, groups, columns, number, M, N)
    dx = gradient * w - normalised * _of_rows(along, groups, number, M) - _of_rows(total, groups, number, M)
    dx *= scale
    if RESIDUAL:
        dx += load_row(residual, groups, columns, number, M, N)
    inside = (groups < M // 4)[:, None] & (columns < N)[None, :]
    dx = tl.where(inside, dx, 0.0)
    tl.store(dx_out + (groups.to(tl.int64) * 4 + number)[:, None] * N + columns[None, :], dx, mask=inside)
    return dx, gradient * normalised, gradient


@triton.jit
def _backward(
    dy, x, mean, rstd, along, total, weight, residual, dx_out, q, qt, sums, scale, amax, M, N, tiles,
    CAST: tl.constexpr, RESIDUAL: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    w = tl.load(weight + columns, mask=inside, other=0.0)[None, :]
    zeros = tl.zeros([GROUPS, COLUMNS], tl.float32)
    sum_w, sum_b, sum_dx, largest = zeros, zeros, zeros, zeros
    factor = tl.load(scale)
    for tile in tl.range(tl.program_id(1) * tiles, (tl.program_id(1) + 1) * tiles, num_stages=STAGES):
        groups = tile * GROUPS + tl.arange(0, GROUPS)
        d0, w0, b0 = _dx(dy, x, residual, dx_out, w, mean, rstd, along, total, groups, columns, 0, M, N, RESIDUAL)
        d1, w1, b1 = _dx(dy, x, residual, dx_out, w, mean, rstd, along, total, groups, columns, 1, M, N, RESIDUAL)
        d2, w2, b2 = _dx(dy, x, residual, dx_out, w, mean, rstd, along, total, groups, columns, 2, M, N, RESIDUAL)
        d3, w3, b3 = _dx(dy, x, residual, dx_out, w, mean, rstd, along, total, groups, columns, 3, M, N, RESIDUAL)
        sum_w += (w0 + w1) + (w2 + w3)
        sum_b += (b0 + b1) + (b2 + b3)
        if CAST:
            sum_dx += (d0 + d1) + (d2 + d3)
            largest = tl.maximum(largest, largest4(d0, d1, d2, d3))
            store_both(q, qt, d0, d1, d2, d3, groups, columns, M, N, factor, True)
    sums += tl.program_id(1).to(tl.int64) * 3 * N + columns
    tl.store(sums, tl.sum(sum_w, axis=0), mask=inside)
    tl.store(sums + N, tl.sum(sum_b, axis=0), mask=inside)
    if CAST:
        tl.store(sums + 2 * N, tl.sum(sum_dx, axis=0), mask=inside)
        tl.atomic_max(amax, tl.max(largest))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, slot: Slot, results: tuple[Tensor, ...], both: bool
) -> None:
    """Write the results: both layouts, mean and rstd: see `layer_norm.layer_norm_cast`."""
    m, n = x.shape
    groups = _groups(m)
    _forward[(triton.cdiv(m, 4 * groups),)](
        x, weight, bias, *results, slot.scale, slot.amax, m, n, epsilon,
        BOTH=both, GROUPS=groups, COLUMNS=COLUMNS, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip


def backward(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, residual: Tensor | None, slot: Slot | None,
    results: tuple[Tensor, Tensor, Tensor],
) -> Tensor:  # fmt: skip
    """Write the results: dx and both layouts. Return the sums: see `layer_norm.LayerNormGradient`."""
    m, n = x.shape
    along, total = torch.empty_like(mean), torch.empty_like(mean)
    rows, columns = (32, 128) if m >= 16384 else (4, 256)
    _row_sums[(triton.cdiv(m, rows),)](dy, x, mean, rstd, weight, along, total, m, n, ROWS=rows, COLUMNS=columns)
    grid, tiles = tile_grid(m, n)
    sums = torch.empty(grid[1], 3, n, dtype=torch.float32, device=x.device)
    scale, amax = (mean, mean) if slot is None else (slot.scale, slot.amax)
    _backward[grid](
        dy, x, mean, rstd, along, total, weight, results[0] if residual is None else residual, *results, sums,
        scale, amax, m, n, tiles, CAST=slot is not None, RESIDUAL=residual is not None,
        GROUPS=GROUPS, COLUMNS=COLUMNS, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return sums
