"""Quantization from bfloat16 or float32 to FP8 in both layouts, with amax and column sums in the same pass.

Hopper's FP8 GEMMs read both operands along the summed dimension. So a tensor that takes part in a forward GEMM and in a
weight gradient is stored twice: as it is [M, N] and transposed [N, M]. One kernel reads it once and writes both.

`cast_transpose` is in CUDA C++ (`cuda/cast.cu`): its blocks read and write whole lines of memory.

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

LINES, THREADS = 128, 256  # a block has LINES rows and LINES columns
BLOCKS = {torch.bfloat16: 4, torch.float32: 3}  # for each multiprocessor, limited by its registers


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
