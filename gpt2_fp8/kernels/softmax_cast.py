"""Softmax cross-entropy whose gradient leaves the kernel as FP8 in both layouts, for a head whose products are FP8.

Two kernels over a chunk of logits: one reads it for each row's logarithm of the sum of exponentials, the other reads it
again and writes (softmax - onehot) times 2^15. No scale has to be found: these values lie in [-1, 1] whatever the model
does, so 2^15 keeps them below E5M2's largest number (57,344) and resolves probabilities down to 2^-31. What the loss is
divided by goes into the products' scale instead.

Between the two a row is known by its largest logit and the logarithm of its sum, as two numbers: in one they would
round to the precision of the larger, and every probability of the row with them.

The second kernel is CUDA C++ (`cuda/softmax_gradient.cu`), or Triton where that cannot be compiled.
"""

from __future__ import annotations

from math import log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.cast import empty_pair, store_both
from gpt2_fp8.kernels.cross_entropy import LANE, LANES, LOG2E, WARPS, row_statistics
from gpt2_fp8.kernels.slot import LARGEST

# Values in [-1, 1] are multiplied by this before the cast.
GRADIENT_SCALE = {torch.float8_e5m2: 2.0**15, torch.float8_e4m3fn: 2.0**8}
GROUPS, COLUMNS, TILE_WARPS = 8, 128, 4  # in Triton: a program has 4 * GROUPS rows
TILE, THREADS = 128, 256  # in CUDA C++: a block has TILE rows and as many columns
BLOCKS = 4  # a multiprocessor


@triton.jit
def _statistics(
    logits, targets, losses, exponents, vocab_size, columns,
    LANES: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * columns
    exponents += row * 2
    target = tl.load(targets + row)
    if target < 0:
        tl.store(losses + row, 0.0)
        tl.store(exponents, 0.0)
        tl.store(exponents + 1, float("inf"))  # every probability of the row is then 2^-inf = 0
        return
    maximum, total = row_statistics(logits, vocab_size, LANES, LANE)
    picked = tl.load(logits + target).to(tl.float32)
    tl.store(losses + row, total / LOG2E + (maximum - picked))
    tl.store(exponents, maximum)
    tl.store(exponents + 1, total)


@triton.jit
def _difference(
    logits, targets, exponents, groups, columns, number: tl.constexpr, M, N, vocab_size, EXPONENT: tl.constexpr
):
    """A tile of softmax - onehot, times 2^EXPONENT."""
    inside = groups < M // 4
    rows = groups * 4 + number
    target = tl.load(targets + rows, mask=inside, other=-1).to(tl.int32)[:, None]
    mask = (target >= 0) & (columns < vocab_size)[None, :]
    at = logits + rows.to(tl.int64)[:, None] * N + columns[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    maximum = tl.load(exponents + rows * 2, mask=inside, other=0.0)[:, None]
    shift = EXPONENT - tl.load(exponents + rows * 2 + 1, mask=inside, other=0.0)[:, None]
    p = tl.where(mask, tl.exp2((x - maximum) * LOG2E + shift), 0.0)
    return tl.where(columns[None, :] == target, p - 2.0**EXPONENT, p)


@triton.jit
def _gradient(
    logits, targets, exponents, q, qt, M, N, vocab_size,
    EXPONENT: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p0 = _difference(logits, targets, exponents, groups, columns, 0, M, N, vocab_size, EXPONENT)
    p1 = _difference(logits, targets, exponents, groups, columns, 1, M, N, vocab_size, EXPONENT)
    p2 = _difference(logits, targets, exponents, groups, columns, 2, M, N, vocab_size, EXPONENT)
    p3 = _difference(logits, targets, exponents, groups, columns, 3, M, N, vocab_size, EXPONENT)
    store_both(q, qt, p0, p1, p2, p3, groups, columns, M, N, 1.0, True)


def softmax_statistics(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Of each row of logits [M, N] (bfloat16, contiguous): its cross-entropy, float32 [M] (0 where the target is
    negative), and float32 [M, 2]: its largest logit, and the base-2 logarithm of the sum of the exponentials of logits
    less that one (0 and inf there). targets: int64 [M]. Columns from `vocab_size` on take no part."""
    assert logits.is_contiguous()
    m, n = logits.shape
    losses = torch.empty(m, dtype=torch.float32, device=logits.device)
    exponents = torch.empty(m, 2, dtype=torch.float32, device=logits.device)
    _statistics[(m,)](logits, targets, losses, exponents, vocab_size, n, LANES=LANES, LANE=LANE, num_warps=WARPS)
    return losses, exponents


def softmax_gradient_cast(
    logits: Tensor, targets: Tensor, exponents: Tensor, vocab_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """FP8 [M, N] and [N, M], both multiples of 16, of (softmax(logits) - onehot(targets)) times GRADIENT_SCALE[dtype];
    0 in rows whose target is negative and in columns from `vocab_size` on, whatever their logits. `exponents` are those
    of `softmax_statistics`."""
    assert all(t.is_contiguous() for t in (logits, targets, exponents))
    assert (logits.dtype, targets.dtype, exponents.dtype) == (torch.bfloat16, torch.int64, torch.float32)
    m, n = logits.shape
    assert m % 16 == n % 16 == 0, (m, n)
    assert GRADIENT_SCALE[dtype] < LARGEST[dtype]
    q, qt = empty_pair(m, n, dtype, logits.device)
    launch = _in_cuda if nvrtc.missing() is None else _in_triton
    launch(logits, targets, exponents, q, qt, vocab_size, int(log2(GRADIENT_SCALE[dtype])))
    return q, qt


def _in_cuda(
    logits: Tensor, targets: Tensor, exponents: Tensor, q: Tensor, qt: Tensor, vocab_size: int, exponent: int
) -> None:
    m, n = logits.shape
    given = {"E4M3": q.dtype == torch.float8_e4m3fn, "EXPONENT": exponent, "BLOCKS": BLOCKS}
    given |= {"TILE": TILE, "THREADS": THREADS}
    gradient = nvrtc.kernel("softmax_gradient", given, logits.device, THREADS, shared_bytes=0)
    blocks = triton.cdiv(m, TILE) * triton.cdiv(n, TILE)
    gradient(blocks, logits, targets, exponents, q, qt, m, n, vocab_size)


def _in_triton(
    logits: Tensor, targets: Tensor, exponents: Tensor, q: Tensor, qt: Tensor, vocab_size: int, exponent: int
) -> None:
    m, n = logits.shape
    _gradient[(triton.cdiv(n, COLUMNS), triton.cdiv(m, 4 * GROUPS))](
        logits, targets, exponents, q, qt, m, n, vocab_size,
        EXPONENT=exponent, GROUPS=GROUPS, COLUMNS=COLUMNS, num_warps=TILE_WARPS,
    )  # fmt: skip
