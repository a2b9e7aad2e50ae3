"""The MLP's GEMMs with GELU in their epilogue, in CUDA C++ (`cuda/product_gelu*.cu`).

The GEMM's result passes GELU, or is multiplied by its derivative, and is quantized to FP8 while it is still in
registers. See `kernels.gelu` for the arithmetic. GELU's input h is never in memory. The backward needs only gelu'(h),
which the forward leaves as a code of one byte: linear, with an RMS error of 0.21 %, and exact where it is 0 or 1.

A separate kernel would write and read the result once more: 2 + 2 bytes a number. n_embd up to 1,024 fits, and those
are the GEMMs for which the saving matters (`kernels.product`).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels.formats import Slot
from gpt2_fp8.kernels.product import COLUMNS, ROWS, Operands, product_kernel, tensor_map

CODES, CODE_OF_ZERO = 202, 26  # a code is CODES gelu' + CODE_OF_ZERO, rounded; as in `cuda/gelu.cuh`


class Activated(NamedTuple):
    """The result of `product_gelu`."""

    q: Tensor  # FP8 [M, N] of gelu(h) times its slot's scale
    slopes: Tensor  # uint8 [M, N]: the codes of gelu'(h)


class ActivatedGradient(NamedTuple):
    """The result of `product_gelu_backward`."""

    q: Tensor  # FP8 [M, N] of the gradient of h times its slot's scale
    sums: Tensor  # partial column sums of the gradient, float32 [P, N]


@cache
def _parts(grid: int, tiles_down: int, slabs: int) -> int:
    """Return the largest number of blocks that have tiles of one slab; see `block_of` in `cuda/product.cuh`."""
    tiles = tiles_down * slabs

    def block_of(tile: int) -> int:
        return ((tile + 1) * grid - 1) // tiles

    return max(block_of((s + 1) * tiles_down - 1) - block_of(s * tiles_down) + 1 for s in range(slabs))


def product_gelu(operands: Operands, bias: Tensor | None, slot: Slot) -> Activated:
    """Compute gelu(h) for h = a b^T [+ bias] rounded to bfloat16, quantized with the slot's scale, and gelu'(h).

    bias: bfloat16 [N].
    """
    a, b, *scales = operands
    m, n = a.shape[0], b.shape[0]
    assert slot.dtype == torch.float8_e4m3fn, slot.dtype
    assert bias is None or (bias.dtype, bias.shape) == (torch.bfloat16, (n,)), (bias.dtype, bias.shape)
    q = torch.empty(m, n, dtype=slot.dtype, device=a.device)
    slopes = torch.empty(m, n, dtype=torch.uint8, device=a.device)
    kernel, grid = product_kernel("product_gelu", operands)
    kernel(grid, tensor_map(a), b, bias, q, slopes, *scales, slot.scale, slot.amax, m, n)
    return Activated(q, slopes)


def product_gelu_backward(operands: Operands, slopes: Tensor, slot: Slot) -> ActivatedGradient:
    """Compute g gelu'(h), quantized with the slot's scale, from g = a b^T, the gradient of gelu(h) [M, N].

    slopes: uint8 [M, N], of `product_gelu`. g itself is not rounded in between.
    """
    a, b, *scales = operands
    m, n = slopes.shape
    assert slopes.is_contiguous()
    assert (slopes.dtype, m, n) == (torch.uint8, a.shape[0], b.shape[0]), (slopes.dtype, slopes.shape)
    q = torch.empty(m, n, dtype=slot.dtype, device=a.device)
    kernel, grid = product_kernel("product_gelu_backward", operands, e4m3=slot.dtype == torch.float8_e4m3fn)
    parts = _parts(grid, m // ROWS, n // COLUMNS)
    sums = torch.empty(parts, n, dtype=torch.float32, device=a.device)
    kernel(grid, tensor_map(a), b, slopes, q, sums, *scales, slot.scale, slot.amax, m, n, parts)
    return ActivatedGradient(q, sums)
