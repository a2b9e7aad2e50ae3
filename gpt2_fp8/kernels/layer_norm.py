"""Layer normalisation (Ba et al. 2016) fused with the cast of its output to FP8, and its backward fused with the
residual stream's gradient and that one's cast.

A program owns a block of rows, walks over their columns twice, and finds them in the cache the second time. Sums are of
each row less its own first value: that one lies within sqrt(N) standard deviations of the mean (Samuelson 1968), so a
large mean costs no precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels.cast import empty_pair, largest4, load_row, store_both
from gpt2_fp8.kernels.slot import Slot

COLUMNS, WARPS, STAGES = 64, 4, 3  # a program walks over blocks of COLUMNS, the next two on their way


def _groups(m: int) -> int:
    """How many groups of four rows a program owns: fewer where that would leave processors without work."""
    return 16 if m >= 16384 else 8 if m >= 8192 else 4


class Statistics(NamedTuple):
    """Of each row: its mean and the reciprocal of its standard deviation, float32 [M]."""

    mean: Tensor
    rstd: Tensor


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
def _normalised(x, mean, rstd, w, b, groups, columns, number: tl.constexpr, M, N):
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
        y0 = _normalised(x, mean0, rstd0, w, b, groups, columns, 0, M, N)
        y1 = _normalised(x, mean1, rstd1, w, b, groups, columns, 1, M, N)
        y2 = _normalised(x, mean2, rstd2, w, b, groups, columns, 2, M, N)
        y3 = _normalised(x, mean3, rstd3, w, b, groups, columns, 3, M, N)
        largest = tl.maximum(largest, largest4(y0, y1, y2, y3))
        store_both(q, qt, y0, y1, y2, y3, groups, columns, M, N, factor, BOTH)
    tl.atomic_max(amax, tl.max(largest))


@triton.jit
def _of_rows(statistics, groups, number: tl.constexpr, M):
    return tl.load(statistics + groups * 4 + number, mask=groups < M // 4, other=0.0)[:, None]


@triton.jit
def _add_gradient(dy, x, along, total, w, mean, groups, columns, number: tl.constexpr, M, N):
    """Add a tile to the running sums of dy w and of dy w (x - mean)."""
    gradient = load_row(dy, groups, columns, number, M, N) * w
    return along + gradient * (load_row(x, groups, columns, number, M, N) - mean), total + gradient


@triton.jit
def _dx(
    dy, x, residual, dx_out, w, mean, rstd, along, total, groups, columns, number: tl.constexpr, M, N,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    """A tile of dx, written; with dy times the normalised x, and dy."""
    normalised = (load_row(x, groups, columns, number, M, N) - mean) * rstd
    gradient = load_row(dy, groups, columns, number, M, N)
    dx = (gradient * w - normalised * along - total) * rstd
    if RESIDUAL:
        dx += load_row(residual, groups, columns, number, M, N)
    inside = (groups < M // 4)[:, None] & (columns < N)[None, :]
    dx = tl.where(inside, dx, 0.0)
    tl.store(dx_out + (groups.to(tl.int64) * 4 + number)[:, None] * N + columns[None, :], dx, mask=inside)
    return dx, gradient * normalised, gradient


@triton.jit
def _backward(
    dy, x, mean, rstd, weight, residual, dx_out, q, qt, sums, scale, amax, M, N,
    CAST: tl.constexpr, RESIDUAL: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    mean0, mean1 = _of_rows(mean, groups, 0, M), _of_rows(mean, groups, 1, M)
    mean2, mean3 = _of_rows(mean, groups, 2, M), _of_rows(mean, groups, 3, M)
    rstd0, rstd1 = _of_rows(rstd, groups, 0, M), _of_rows(rstd, groups, 1, M)
    rstd2, rstd3 = _of_rows(rstd, groups, 2, M), _of_rows(rstd, groups, 3, M)
    zeros = tl.zeros([GROUPS, COLUMNS], tl.float32)
    a0, a1, a2, a3, t0, t1, t2, t3 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
    for start in tl.range(0, N, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        w = tl.load(weight + columns, mask=columns < N, other=0.0)[None, :]
        a0, t0 = _add_gradient(dy, x, a0, t0, w, mean0, groups, columns, 0, M, N)
        a1, t1 = _add_gradient(dy, x, a1, t1, w, mean1, groups, columns, 1, M, N)
        a2, t2 = _add_gradient(dy, x, a2, t2, w, mean2, groups, columns, 2, M, N)
        a3, t3 = _add_gradient(dy, x, a3, t3, w, mean3, groups, columns, 3, M, N)
    along0, total0 = tl.sum(a0, axis=1)[:, None] * rstd0 / N, tl.sum(t0, axis=1)[:, None] / N
    along1, total1 = tl.sum(a1, axis=1)[:, None] * rstd1 / N, tl.sum(t1, axis=1)[:, None] / N
    along2, total2 = tl.sum(a2, axis=1)[:, None] * rstd2 / N, tl.sum(t2, axis=1)[:, None] / N
    along3, total3 = tl.sum(a3, axis=1)[:, None] * rstd3 / N, tl.sum(t3, axis=1)[:, None] / N
    sums += tl.program_id(0).to(tl.int64) * 3 * N
    if CAST:
        factor = tl.load(scale)
        largest = tl.zeros([GROUPS, COLUMNS], tl.float32)
    for start in tl.range(0, N, COLUMNS, num_stages=STAGES):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < N
        w = tl.load(weight + columns, mask=inside, other=0.0)[None, :]
        d0, g0, b0 = _dx(dy, x, residual, dx_out, w, mean0, rstd0, along0, total0, groups, columns, 0, M, N, RESIDUAL)
        d1, g1, b1 = _dx(dy, x, residual, dx_out, w, mean1, rstd1, along1, total1, groups, columns, 1, M, N, RESIDUAL)
        d2, g2, b2 = _dx(dy, x, residual, dx_out, w, mean2, rstd2, along2, total2, groups, columns, 2, M, N, RESIDUAL)
        d3, g3, b3 = _dx(dy, x, residual, dx_out, w, mean3, rstd3, along3, total3, groups, columns, 3, M, N, RESIDUAL)
        tl.store(sums + columns, tl.sum((g0 + g1) + (g2 + g3), axis=0), mask=inside)
        tl.store(sums + N + columns, tl.sum((b0 + b1) + (b2 + b3), axis=0), mask=inside)
        if CAST:
            tl.store(sums + 2 * N + columns, tl.sum((d0 + d1) + (d2 + d3), axis=0), mask=inside)
            largest = tl.maximum(largest, largest4(d0, d1, d2, d3))
            store_both(q, qt, d0, d1, d2, d3, groups, columns, M, N, factor, True)
    if CAST:
        tl.atomic_max(amax, tl.max(largest))


def layer_norm_cast(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, slot: Slot, both: bool = True
) -> tuple[Tensor, Tensor, Statistics]:
    """x [M, N] bfloat16, weight and bias [N] float32 -> FP8 [M, N] and [N, M] of the normalised rows times the slot's
    scale (the second empty unless `both`), and what the backward needs."""
    assert x.is_contiguous()
    m, n = x.shape
    q, qt = empty_pair(m, n, slot.dtype, x.device, both)
    mean, rstd = (torch.empty(m, dtype=torch.float32, device=x.device) for _ in range(2))
    groups = _groups(m)
    _forward[(triton.cdiv(m, 4 * groups),)](
        x, weight, bias, q, qt, mean, rstd, slot.scale, slot.amax, m, n, epsilon,
        BOTH=both, GROUPS=groups, COLUMNS=COLUMNS, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return q, qt, Statistics(mean, rstd)


class Gradient(NamedTuple):
    """What `layer_norm_backward` gives. `sums` [P, 3, N] float32: partial column sums of the gradients of weight, of
    bias, and of dx itself (the bias gradient of the product that wrote x; undefined without a slot)."""

    dx: Tensor  # [M, N] bfloat16
    q: Tensor  # FP8 [M, N] and [N, M] of dx times the slot's scale; empty without a slot
    qt: Tensor
    sums: Tensor


def layer_norm_backward(
    dy: Tensor, x: Tensor, statistics: Statistics, weight: Tensor, residual: Tensor | None, slot: Slot | None
) -> Gradient:
    """The gradient of x from that of its normalised rows, `dy`, and of x's other use, `residual` (None: there is none);
    all [M, N] bfloat16."""
    assert dy.is_contiguous() and x.is_contiguous() and (residual is None or residual.is_contiguous())
    m, n = x.shape
    groups = _groups(m)
    programs = triton.cdiv(m, 4 * groups)
    dx = torch.empty_like(x)
    sums = torch.empty(programs, 3, n, dtype=torch.float32, device=x.device)
    if slot is None:
        q = qt = torch.empty(0, dtype=torch.float8_e5m2, device=x.device)
        scale = amax = statistics.mean
    else:
        q, qt = empty_pair(m, n, slot.dtype, x.device)
        scale, amax = slot.scale, slot.amax
    mean, rstd = statistics
    _backward[(programs,)](
        dy, x, mean, rstd, weight, dx if residual is None else residual, dx, q, qt, sums, scale, amax, m, n,
        CAST=slot is not None, RESIDUAL=residual is not None, GROUPS=groups, COLUMNS=COLUMNS,
        STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return Gradient(dx, q, qt, sums)
