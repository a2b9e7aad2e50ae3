"""The head's forward GEMM with the softmax's statistics in its epilogue, in CUDA C++ (`cuda/product_logits.cu`).

While a tile of logits is still in registers, each row's largest logit is found, and the sum of the exponentials
relative to it. So nothing reads the logits (100 kB a row) between the GEMM and the gradient. See
`kernels.softmax_cast`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpt2_fp8.kernels.cross_entropy import LOG2E
from gpt2_fp8.kernels.product_gelu import COLUMNS, Operands, product_kernel, tensor_map

ROWS, SLABS = 32, 64  # what a program of the second kernel holds at once


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


def product_logits(operands: Operands, targets: Tensor, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the logits a b^T, bfloat16 [M, N], and their losses and exponents, as `softmax_cast.softmax_statistics`.

    Only for operands that `product_gelu.fits`.
    """
    a, b, *scales = operands
    m, n = a.shape[0], b.shape[0]
    slabs = n // COLUMNS
    logits = torch.empty(m, n, dtype=torch.bfloat16, device=a.device)
    parts = torch.empty(slabs, m, 2, dtype=torch.float32, device=a.device)
    kernel, grid = product_kernel("product_logits", operands)
    kernel(grid, tensor_map(a), b, logits, parts, *scales, m, n, vocab_size)
    losses = torch.empty(m, dtype=torch.float32, device=a.device)
    exponents = torch.empty(m, 2, dtype=torch.float32, device=a.device)
    _combine[(triton.cdiv(m, ROWS),)](
        parts, logits, targets, losses, exponents, slabs, m, n, ROWS=ROWS, SLABS=SLABS, num_warps=4
    )  # fmt: skip
    return logits, losses, exponents
