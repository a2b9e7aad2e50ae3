"""Softmax cross-entropy whose gradient is written as FP8 in both layouts, for a head with FP8 GEMMs.

There are two kernels over a chunk of logits. The first reads it for each row's log-sum-exp. The second reads it again
and writes (softmax - onehot) times 2^15. No scale must be found, since these values always lie in [-1, 1]. The factor
keeps them below E5M2's largest number (57,344) and resolves probabilities down to 2^-31. The loss's divisor goes into
the GEMMs' scale instead.

Between the kernels a row is described by two numbers: its largest logit and the logarithm of its sum. Added into one
number, they would be rounded to the precision of the larger, and with them every probability of the row.

Where the head's GEMM fits (`kernels.product`), the first kernel is its epilogue (`product_logits`,
`cuda/product_logits.cu`): while a tile of logits is still in registers, each row's largest logit is found, and the sum
of the exponentials relative to it.

With z-loss the gradient is softmax (1 + 2 z lse) - onehot. The factor stays. A value saturates beyond 1.75, so only
where a probability is near 1 and z |lse| above 0.375. Nothing bounds lse by itself, but z-loss pulls it towards 0: at
the usual z of 1e-4 it would have to be beyond 3,750. Saturation keeps the direction.

The second kernel is CUDA C++ (`cuda/softmax_gradient.cu`), or Triton if that cannot be compiled.
"""

from __future__ import annotations

from math import log

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.cast import empty_pair, store_both
from gpt2_fp8.kernels.cross_entropy import LANE, LANES, LOG2E, WARPS, row_statistics
from gpt2_fp8.kernels.formats import HEAD_GRADIENT, LOGITS_EXPONENT
from gpt2_fp8.kernels.product import COLUMNS as SLAB
from gpt2_fp8.kernels.product import Operands, product_kernel, tensor_map

GROUPS, COLUMNS, TILE_WARPS = 8, 128, 4  # in Triton: a program has 4 * GROUPS rows
TILE, THREADS = 128, 256  # in CUDA C++: a block has TILE rows and TILE columns
BLOCKS = 4  # for each multiprocessor
JOIN_ROWS, JOIN_SLABS = 32, 64  # of `product_logits`: what a program of its second kernel holds at once


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
    logits, targets, exponents, groups, columns, number: tl.constexpr, M, N, vocab_size, z_loss,
    EXPONENT: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    """Compute a tile of softmax - onehot, times 2^EXPONENT; with Z, of softmax (1 + 2 z lse) - onehot."""
    inside = groups < M // 4
    rows = groups * 4 + number
    target = tl.load(targets + rows, mask=inside, other=-1).to(tl.int32)[:, None]
    mask = (target >= 0) & (columns < vocab_size)[None, :]
    at = logits + rows.to(tl.int64)[:, None] * N + columns[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    maximum = tl.load(exponents + rows * 2, mask=inside, other=0.0)[:, None]
    total = tl.load(exponents + rows * 2 + 1, mask=inside, other=0.0)[:, None]
    shift = EXPONENT - total
    p = tl.exp2((x - maximum) * LOG2E + shift)
    if Z:
        p *= 1.0 + 2.0 * z_loss * (maximum + total / LOG2E)
    p = tl.where(mask, p, 0.0)
    return tl.where(columns[None, :] == target, p - 2.0**EXPONENT, p)


@triton.jit
def _gradient(
    logits, targets, exponents, q, qt, M, N, vocab_size, z_loss,
    EXPONENT: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, Z: tl.constexpr,
):  # fmt: skip
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    p0 = _difference(logits, targets, exponents, groups, columns, 0, M, N, vocab_size, z_loss, EXPONENT, Z)
    p1 = _difference(logits, targets, exponents, groups, columns, 1, M, N, vocab_size, z_loss, EXPONENT, Z)
    p2 = _difference(logits, targets, exponents, groups, columns, 2, M, N, vocab_size, z_loss, EXPONENT, Z)
    p3 = _difference(logits, targets, exponents, groups, columns, 3, M, N, vocab_size, z_loss, EXPONENT, Z)
    store_both(q, qt, p0, p1, p2, p3, groups, columns, M, N, 1.0, True)


@triton.jit
def _combine(parts, logits, targets, losses, exponents, slabs, M, N, ROWS: tl.constexpr, SLABS: tl.constexpr):
    """Combine each slab's largest logit and sum into the row's."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < M
    maximum = tl.full([ROWS], -3.4e38, tl.float32)
    for start in range(0, slabs, SLABS):
        slab = start + tl.arange(0, SLABS)
        at = parts + (slab.to(tl.int64)[:, None] * M + rows[None, :]) * 2
        mask = (slab < slabs)[:, None] & inside[None, :]
        maximum = tl.maximum(maximum, tl.max(tl.load(at, mask=mask, other=-3.4e38), axis=0))
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, slabs, SLABS):
        slab = start + tl.arange(0, SLABS)
        at = parts + (slab.to(tl.int64)[:, None] * M + rows[None, :]) * 2
        mask = (slab < slabs)[:, None] & inside[None, :]
        largest = tl.load(at, mask=mask, other=-3.4e38)
        total += tl.sum(tl.load(at + 1, mask=mask, other=0.0) * tl.exp2((largest - maximum[None, :]) * LOG2E), axis=0)
    target = tl.load(targets + rows, mask=inside, other=-1)
    counted = inside & (target >= 0)
    picked = tl.load(logits + rows.to(tl.int64) * N + target, mask=counted, other=0.0).to(tl.float32)
    binary = tl.log2(total)
    tl.store(losses + rows, tl.where(counted, binary / LOG2E + (maximum - picked), 0.0), mask=inside)
    tl.store(exponents + rows * 2, tl.where(counted, maximum, 0.0), mask=inside)
    tl.store(exponents + rows * 2 + 1, tl.where(counted, binary, float("inf")), mask=inside)


def softmax_statistics(logits: Tensor, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Compute each row's cross-entropy, float32 [M], and its exponents, float32 [M, 2].

    The exponents are the row's largest logit, and log2 of the sum of the exponentials of logits relative to it. If the
    target is negative, the loss is 0 and the exponents are 0 and inf. logits: bfloat16 [M, N], contiguous; columns from
    `vocab_size` on are ignored. targets: int64 [M].
    """
    assert logits.is_contiguous()
    m, n = logits.shape
    losses = torch.empty(m, dtype=torch.float32, device=logits.device)
    exponents = torch.empty(m, 2, dtype=torch.float32, device=logits.device)
    _statistics[(m,)](logits, targets, losses, exponents, vocab_size, n, LANES=LANES, LANE=LANE, num_warps=WARPS)
    return losses, exponents


def product_logits(operands: Operands, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the logits a b^T, bfloat16 [M, N], and their losses and exponents, as `softmax_statistics`.

    Only for operands that `product.fits`.
    """
    a, b, *scales = operands
    m, n = a.shape[0], b.shape[0]
    slabs = n // SLAB
    logits = torch.empty(m, n, dtype=torch.bfloat16, device=a.device)
    parts = torch.empty(slabs, m, 2, dtype=torch.float32, device=a.device)
    kernel, grid = product_kernel("product_logits", operands)
    kernel(grid, tensor_map(a), b, logits, parts, *scales, m, n, vocab_size)
    losses = torch.empty(m, dtype=torch.float32, device=a.device)
    exponents = torch.empty(m, 2, dtype=torch.float32, device=a.device)
    _combine[(triton.cdiv(m, JOIN_ROWS),)](
        parts, logits, targets, losses, exponents, slabs, m, n, ROWS=JOIN_ROWS, SLABS=JOIN_SLABS, num_warps=4
    )  # fmt: skip
    return logits, losses, exponents


def log_sums(exponents: Tensor) -> Tensor:
    """Compute the logarithm of each row's sum of exponentials from its exponents [M, 2]; 0 where there is no target."""
    counted = exponents[:, 1].isfinite()
    return torch.where(counted, exponents[:, 0] + exponents[:, 1] * log(2), 0.0)


def softmax_gradient_cast(
    logits: Tensor, targets: Tensor, exponents: Tensor, vocab_size: int, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute (softmax(logits) - onehot(targets)) times 2^15, E5M2 [M, N] and its transpose [N, M].

    M and N are multiples of 16. It is 0 in rows whose target is negative and in columns from `vocab_size` on, whatever
    their logits. With `z_loss`, softmax is multiplied by 1 + 2 z_loss lse. `exponents` are those of
    `softmax_statistics`.
    """
    assert all(t.is_contiguous() for t in (logits, targets, exponents))
    assert (logits.dtype, targets.dtype, exponents.dtype) == (torch.bfloat16, torch.int64, torch.float32)
    m, n = logits.shape
    assert m % 16 == n % 16 == 0, (m, n)
    q, qt = empty_pair(m, n, HEAD_GRADIENT, logits.device)
    if nvrtc.why_missing() is None:
        given = {"E4M3": False, "EXPONENT": LOGITS_EXPONENT, "BLOCKS": BLOCKS}
        given |= {"TILE": TILE, "THREADS": THREADS} | ({"Z_LOSS": 1} if z_loss else {})
        gradient = nvrtc.kernel("softmax_gradient", given, logits.device, THREADS, shared_bytes=0)
        blocks = triton.cdiv(m, TILE) * triton.cdiv(n, TILE)
        gradient(blocks, logits, targets, exponents, q, qt, m, n, vocab_size, *([z_loss] if z_loss else []))
    else:
        _gradient[(triton.cdiv(n, COLUMNS), triton.cdiv(m, 4 * GROUPS))](
            logits, targets, exponents, q, qt, m, n, vocab_size, z_loss,
            EXPONENT=LOGITS_EXPONENT, GROUPS=GROUPS, COLUMNS=COLUMNS, Z=z_loss > 0, num_warps=TILE_WARPS,
        )  # fmt: skip
    return q, qt
