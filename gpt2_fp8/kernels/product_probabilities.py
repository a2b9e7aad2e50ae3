"""A head's probabilities in FP8 straight from its GEMM, in CUDA C++ (`cuda/product_probabilities.cu`).

The logits are never in memory: 4 of the 8 bytes that each of them costs on the way to its gradient are gone. But a
row's sum of exponentials is not known when its first probability is written. A reference stands for it, one number of a
row, which is near the logarithm of that sum and never above it (`kernels.references`). The kernel writes

    u = 2^EXPONENT exp(logit) / exp(reference)

and sums u by row. What a row is off by, its sum, goes into the operands that its gradient is multiplied with
(`kernels.probability_rows`). E5M2 has the same error at every size, so the reference costs no precision. It costs
range: a probability reaches E5M2's largest number if it is 28 times what the reference expects of the whole row.

The logit of each row's target is written too. It has the rounding of the tensor cores' sums, as the others have: so a
row's probabilities are those of one softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.probability_grid import EXPONENT
from gpt2_fp8.kernels.product_gelu import Operands, product_kernel, tensor_map
from gpt2_fp8.kernels.shapes import COLUMNS, ROWS, STAGED


class Probabilities(NamedTuple):
    """The result of `product_probabilities`."""

    q: Tensor  # float8_e5m2 [M, N]: u, 0 in columns that do not count
    qt: Tensor  # float8_e5m2 [N, M]
    sums: Tensor  # float32 [N / COLUMNS, M]: sums of u, before its rounding, over COLUMNS columns of a row
    at_target: Tensor  # float32 [M]: the target's logit in powers of two; undefined without a target


def product_probabilities(operands: Operands, references: Tensor, targets: Tensor, vocab_size: int) -> Probabilities:
    """Compute u of the logits a b^T in both layouts. references: float32 [M], in powers of two. targets: int64 [M].

    Only for operands that `product_gelu.fits` with `shapes.STAGED`. A value above E5M2's largest number saturates; NaN
    stays NaN.
    """
    a, b, *scales = operands
    m, n = a.shape[0], b.shape[0]
    assert references.is_contiguous()
    assert targets.is_contiguous()
    assert (references.dtype, references.shape) == (torch.float32, (m,)), (references.dtype, references.shape)
    assert (targets.dtype, targets.shape) == (torch.int64, (m,)), (targets.dtype, targets.shape)
    if targets.data_ptr() % 16:  # two are read at once, and those of a single sequence begin 8 bytes into its ids
        targets = targets.clone()
    q = torch.empty(m, n, dtype=torch.float8_e5m2, device=a.device)
    qt = torch.empty(n, m, dtype=torch.float8_e5m2, device=a.device)
    sums = torch.empty(n // COLUMNS, m, dtype=torch.float32, device=a.device)
    at_target = torch.empty_like(references)
    kernel, grid = product_kernel("product_probabilities", operands, e4m3=False, staged=STAGED, EXPONENT=EXPONENT)
    kernel(grid, tensor_map(a), _turned(qt), b, q, sums, references, targets, at_target, *scales, m, n, vocab_size)
    return Probabilities(q, qt, sums, at_target)


def _turned(qt: Tensor) -> object:
    """Describe a tile of qt [N, M] to the copy engine, its columns in the order in which the kernel stages them.

    A thread has 16 neighbouring columns of each 64, two at a time (`cuda/product_probabilities.cu`).
    """
    n, m = qt.shape
    columns = qt.view(torch.uint8).view(n // 64, 4, 8, 2, m).transpose(1, 2)
    return nvrtc.tensor_map(columns, (COLUMNS // 64, 8, 4, 2, ROWS))
