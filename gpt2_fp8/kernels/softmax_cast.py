"""Softmax cross-entropy whose gradient leaves the kernel as FP8 in both layouts, for a head whose products are FP8.

Two kernels over a chunk of logits: one reads it for each row's logarithm of the sum of exponentials, the other reads it
again and writes (softmax - onehot) times 2^15. No scale has to be found: these values lie in [-1, 1] whatever the model
does, so 2^15 keeps them below E5M2's largest number (57,344) and resolves probabilities down to 2^-31. What the loss is
divided by goes into the products' scale instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels.cast import empty_pair, store_both
from gpt2_fp8.kernels.cross_entropy import LANE, LANES, LOG2E, WARPS, row_statistics
from gpt2_fp8.kernels.slot import LARGEST

# Values in [-1, 1] are multiplied by this before the cast.
GRADIENT_SCALE = {torch.float8_e5m2: 2.0**15, torch.float8_e4m3fn: 2.0**8}
GROUPS, COLUMNS, TILE_WARPS = 8, 128, 4


@triton.jit
def _statistics(
    logits, targets, losses, exponents, vocab_size, columns,
    LANES: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    target = tl.load(targets + row)
    if target < 0:
        tl.store(losses + row, 0.0)
        tl.store(exponents + row, float("inf"))  # every probability of the row is then 2^-inf = 0
        return
    maximum, total = row_statistics(logits, vocab_size, LANES, LANE)
    picked = tl.load(logits + target).to(tl.float32)
    tl.store(losses + row, total / LOG2E + (maximum - picked))
    tl.store(exponents + row, total + maximum * LOG2E)


@triton.jit
def _difference(
    logits, targets, exponents, groups, columns, number: tl.constexpr, M, N, vocab_size, SCALE: tl.constexpr
):
    """A tile of softmax - onehot, times SCALE."""
    inside = groups < M // 4
    rows = groups * 4 + number
    at = logits + rows.to(tl.int64)[:, None] * N + columns[None, :]
    target = tl.load(targets + rows, mask=inside, other=-1).to(tl.int32)[:, None]
    mask = (target >= 0) & (columns < vocab_size)[None, :]
    x = tl.load(at, mask=mask, other=-float("inf")).to(tl.float32)
    exponent = tl.load(exponents + rows, mask=inside, other=float("inf"))[:, None]
    p = tl.exp2(x * LOG2E - exponent) * SCALE
    return tl.where(columns[None, :] == target, p - SCALE, p)


@triton.jit
def _gradient(
    logits, targets, exponents, q, qt, M, N, vocab_size,
    SCALE: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p0 = _difference(logits, targets, exponents, groups, columns, 0, M, N, vocab_size, SCALE)
    p1 = _difference(logits, targets, exponents, groups, columns, 1, M, N, vocab_size, SCALE)
    p2 = _difference(logits, targets, exponents, groups, columns, 2, M, N, vocab_size, SCALE)
    p3 = _difference(logits, targets, exponents, groups, columns, 3, M, N, vocab_size, SCALE)
    store_both(q, qt, p0, p1, p2, p3, groups, columns, M, N, 1.0, True)


def softmax_statistics(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Of each row of logits [M, N] (bfloat16, contiguous): its cross-entropy (0 where the target is negative), and the
    base-2 logarithm of the sum of its exponentials (inf there). Both float32 [M]. targets: int64 [M]. Columns from
    `vocab_size` on take no part."""
    assert logits.is_contiguous()
    m, n = logits.shape
    losses, exponents = (torch.empty(m, dtype=torch.float32, device=logits.device) for _ in range(2))
    _statistics[(m,)](logits, targets, losses, exponents, vocab_size, n, LANES=LANES, LANE=LANE, num_warps=WARPS)
    return losses, exponents


def softmax_gradient_cast(
    logits: Tensor, targets: Tensor, exponents: Tensor, vocab_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """FP8 [M, N] and [N, M] of (softmax(logits) - onehot(targets)) times GRADIENT_SCALE[dtype]; 0 in rows whose target
    is negative and in columns from `vocab_size` on. `exponents` are those of `softmax_statistics`."""
    assert logits.is_contiguous()
    m, n = logits.shape
    assert GRADIENT_SCALE[dtype] < LARGEST[dtype]
    q, qt = empty_pair(m, n, dtype, logits.device)
    _gradient[(triton.cdiv(n, COLUMNS), triton.cdiv(m, 4 * GROUPS))](
        logits, targets, exponents, q, qt, m, n, vocab_size,
        SCALE=GRADIENT_SCALE[dtype], GROUPS=GROUPS, COLUMNS=COLUMNS, num_warps=TILE_WARPS,
    )  # fmt: skip
    return q, qt
