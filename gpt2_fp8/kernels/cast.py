"""Quantization from bfloat16 or float32 to FP8 in both layouts, with amax and column sums in the same pass.

Hopper's FP8 GEMMs read both operands along the summed dimension. So a tensor that takes part in a forward GEMM and in a
weight gradient is stored twice: as it is [M, N] and transposed [N, M]. One kernel reads it once and writes both.

`cast_transpose` is in CUDA C++ (`cuda/cast.cu`): its blocks read and write whole lines of memory.

What kernels in Triton need for both layouts is here too (`store_both`). Moving single bytes between threads is slow. So
a program handles rows in groups of four. It loads the first, second, third and fourth rows of all groups as four tiles.
Then it packs the four bytes of a group and column into one word. Threads exchange words, a quarter as many.

Every kernel takes a `Slot`: the scale to multiply by, and where to record the amax. Delayed scaling turns the amax into
the scale of later steps. Conversion saturates; NaN stays NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.formats import Slot

GROUPS, COLUMNS, WARPS = 16, 64, 4  # in Triton: a tile is 4 * GROUPS rows by COLUMNS
TILES = 8  # below each other for one program, if there are enough rows
LINES, THREADS = 128, 256  # in CUDA C++: a block has LINES rows and LINES columns
BLOCKS = {torch.bfloat16: 4, torch.float32: 3}  # for each multiprocessor, limited by its registers

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
def store_transposed(qt, x0, x1, x2, x3, groups, columns, M, N):
    """Write rows 4 groups + (0, 1, 2, 3), each x [groups, columns], to qt [N, M]. M is a multiple of 4."""
    inside = (columns < N)[:, None] & (groups < M // 4)[None, :]
    words = tl.trans(_pack(x0, x1, x2, x3, qt.dtype.element_ty))
    at = qt.to(tl.pointer_type(tl.int32)) + columns.to(tl.int64)[:, None] * (M // 4) + groups[None, :]
    tl.store(at, words, mask=inside)


@triton.jit
def store_both(q, qt, x0, x1, x2, x3, groups, columns, M, N, scale, BOTH: tl.constexpr):
    """Write rows 4 groups + (0, 1, 2, 3), each x [groups, columns], times `scale`, to q [M, N].

    If `BOTH`, they are also written transposed to qt [N, M]. M is a multiple of 4.
    """
    inside = (groups < M // 4)[:, None] & (columns < N)[None, :]
    x0, x1, x2, x3 = x0 * scale, x1 * scale, x2 * scale, x3 * scale
    at = q + (groups.to(tl.int64) * 4)[:, None] * N + columns[None, :]
    tl.store(at, x0.to(q.dtype.element_ty), mask=inside)
    tl.store(at + N, x1.to(q.dtype.element_ty), mask=inside)
    tl.store(at + 2 * N, x2.to(q.dtype.element_ty), mask=inside)
    tl.store(at + 3 * N, x3.to(q.dtype.element_ty), mask=inside)
    if BOTH:
        store_transposed(qt, x0, x1, x2, x3, groups, columns, M, N)


@triton.jit
def load_row(x, groups, columns, number: tl.constexpr, M, N):
    """Load rows 4 groups + `number` of x [M, N] as a float32 tile [groups, columns]; 0 outside."""
    inside = (groups < M // 4)[:, None] & (columns < N)[None, :]
    at = x + (groups.to(tl.int64) * 4 + number)[:, None] * N + columns[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def largest4(x0, x1, x2, x3):
    """Compute the largest absolute value at each place of four tiles."""
    return tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))


@triton.jit
def _reduce(partial, out, count, N, stride, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < count)[:, None] & (columns < N)[None, :]
        total += tl.load(partial + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)
    result = tl.sum(total, axis=0)
    if ADD:
        result += tl.load(out + columns, mask=columns < N, other=0.0)
    tl.store(out + columns, result, mask=columns < N)


def reduce_columns(partial: Tensor, out: Tensor, add: bool) -> None:
    """Sum the columns of `partial` [P, N] into `out` [N], both float32; if `add`, add to what `out` holds.

    Rows of `partial` need not be contiguous to each other. The order of summation is fixed, so every call gives the
    same bits.
    """
    count, n = partial.shape
    _reduce[(triton.cdiv(n, 16),)](
        partial, out, count, n, partial.stride(0), ADD=add, ROWS=64, COLUMNS=16, num_warps=4
    )  # fmt: skip


def empty_pair(m: int, n: int, dtype: torch.dtype, device: torch.device, both: bool = True) -> tuple[Tensor, Tensor]:
    """Allocate uninitialised FP8 tensors [m, n] and [n, m]; the second is empty unless `both`."""
    assert m % 4 == 0, "rows go in groups of four"
    q = torch.empty(m, n, dtype=dtype, device=device)
    return q, torch.empty((n, m) if both else 0, dtype=dtype, device=device)


def tile_grid(m: int, n: int) -> tuple[tuple[int, int], int]:
    """Compute the grid of a kernel over tiles of 4 `GROUPS` by `COLUMNS`, and how many tiles a program handles.

    A program handles fewer tiles if otherwise multiprocessors would have no work.
    """
    down, across = triton.cdiv(m, 4 * GROUPS), triton.cdiv(n, COLUMNS)
    tiles = max(1, min(TILES, down * across // 1024))
    return (across, triton.cdiv(down, tiles)), tiles


def cast_transpose(
    x: Tensor, slot: Slot, sums: bool = False, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [M, N], bfloat16 or float32, with the slot's scale to FP8 [M, N] and its transpose [N, M].

    They are written into `out` if given. The third result is partial column sums of x, float32 [P, N], which
    `reduce_columns` finishes; empty unless `sums`. M and N are multiples of 16, and x is at one of 16 bytes.
    """
    assert x.dim() == 2, x.shape
    assert x.is_contiguous()
    assert x.data_ptr() % 16 == 0, "16 bytes are read at a time"
    m, n = x.shape
    assert m % 16 == n % 16 == 0, (m, n)
    q, qt = out or empty_pair(m, n, slot.dtype, x.device)
    down = -(-m // LINES)
    partial = torch.empty((down, n) if sums else 0, dtype=torch.float32, device=x.device)
    given = {"TILE": LINES, "THREADS": THREADS, "BLOCKS": BLOCKS[x.dtype], "E4M3": slot.dtype == torch.float8_e4m3fn}
    given |= {"FLOAT32": x.dtype == torch.float32, "SUMS": sums}
    launch = nvrtc.kernel("cast", given, x.device, THREADS, shared_bytes=0)
    launch(down * -(-n // LINES), x, q, qt, partial, slot.scale, slot.amax, m, n)
    return q, qt, partial
