"""The MLP's GEMMs with GELU in their epilogue, in CUDA C++ (`cuda/product_gelu*.cu`).

The GEMM's result passes GELU, or its derivative, and is quantized to FP8 while it is still in registers. See
`kernels.gelu` for the arithmetic.

A separate kernel would write and read the result once more: 2 + 2 bytes a number. Here a block keeps a slab of the
weight in shared memory. So the inner dimension must be short (n_embd up to 1,024), and those are the GEMMs for which
the saving matters. Sums stay in the tensor cores, as with `fast_accumulate` of `kernels.gemm`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels import nvrtc, shapes
from gpt2_fp8.kernels.cast import empty_pair
from gpt2_fp8.kernels.gelu import GeluGradient
from gpt2_fp8.kernels.shapes import COLUMNS, LINE, ROWS, ProductShape, why_no_product
from gpt2_fp8.kernels.slot import Slot


class Operands(NamedTuple):
    """The operands of a b^T: a [M, K] and b [N, K], both FP8, with their inverse scales (float32, one element each)."""

    a: Tensor
    b: Tensor
    a_scale_inv: Tensor
    b_scale_inv: Tensor


def fits(a: Tensor, b: Tensor) -> bool:
    """Return whether these kernels can compute a b^T: see `shapes.why_no_product`."""
    (m, k), n = a.shape, b.shape[0]
    if why_no_product(m, n, k):
        return False
    return torch.cuda.get_device_capability(a.device) == (9, 0) and nvrtc.missing() is None


def tensor_map(a: Tensor) -> Any:
    """Describe one line of a tile of a [M, K] to the copy engine.

    16 rows come as two times eight, the even ones first. So the two rows of a thread are neighbours
    (`cuda/product.cuh`).
    """
    m, k = a.shape
    rows = a.view(torch.uint8).view(m // 16, 8, 2, k).transpose(1, 2)
    return nvrtc.tensor_map(rows, (ROWS // 16, 2, 8, LINE))


def _kernel(name: str, operands: Operands, shape: ProductShape, e4m3: bool) -> tuple[nvrtc.Kernel, int]:
    """Return the kernel and its number of blocks."""
    a, b, *scales = operands
    (m, k), n = a.shape, b.shape[0]
    assert b.shape[1] == k, (a.shape, b.shape)
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (a, b)), "whole lines at multiples of 16 bytes"
    assert all(t.dtype == torch.float32 and t.numel() == 1 for t in scales)
    given = {"K": k, "WARPGROUPS": shape.warpgroups, "STAGES": shape.stages, "E4M3": e4m3}
    given["GRADIENT_E5M2"] = a.dtype == torch.float8_e5m2
    kernel = nvrtc.kernel(name, given, a.device, 128 * (shape.warpgroups + 1), shape.shared_bytes)
    return kernel, min(nvrtc.processors(a.device), m // ROWS * (n // COLUMNS))


def forward_kernel(name: str, operands: Operands) -> tuple[nvrtc.Kernel, int]:
    """Return the kernel of a forward GEMM and its number of blocks."""
    return _kernel(name, operands, shapes.forward(operands.a.shape[1]), e4m3=True)


@cache
def _parts(grid: int, tiles_down: int, slabs: int) -> int:
    """Return the largest number of blocks that have tiles of one slab; see `block_of` in `cuda/product.cuh`."""
    tiles = tiles_down * slabs

    def block_of(tile: int) -> int:
        return ((tile + 1) * grid - 1) // tiles

    return max(block_of((s + 1) * tiles_down - 1) - block_of(s * tiles_down) + 1 for s in range(slabs))


def product_gelu(operands: Operands, bias: Tensor | None, slot: Slot) -> tuple[Tensor, Tensor]:
    """Compute h = a b^T [+ bias], bfloat16 [M, N], and gelu(h) quantized with the slot's scale, FP8 [M, N].

    bias: bfloat16 [N].
    """
    a, b, *scales = operands
    m, n = a.shape[0], b.shape[0]
    assert slot.dtype == torch.float8_e4m3fn, slot.dtype
    assert bias is None or (bias.dtype, bias.shape) == (torch.bfloat16, (n,)), (bias.dtype, bias.shape)
    h = torch.empty(m, n, dtype=torch.bfloat16, device=a.device)
    q, _ = empty_pair(m, n, slot.dtype, a.device, both=False)
    kernel, grid = forward_kernel("product_gelu", operands)
    kernel(grid, tensor_map(a), b, bias, h, q, *scales, slot.scale, slot.amax, m, n)
    return h, q


def product_gelu_backward(operands: Operands, h: Tensor, slot: Slot, slot_y: Slot) -> GeluGradient:
    """Compute `gelu.gelu_backward_cast` of g = a b^T and h, bfloat16 [M, N]; g is the gradient of gelu(h).

    g itself is not rounded to bfloat16 in between.
    """
    a, b, *scales = operands
    m, n = h.shape
    assert h.is_contiguous()
    assert (h.dtype, m, n) == (torch.bfloat16, a.shape[0], b.shape[0]), (h.dtype, h.shape)
    assert slot_y.dtype == torch.float8_e4m3fn, slot_y.dtype
    q, qt = empty_pair(m, n, slot.dtype, h.device)
    yt = torch.empty(n, m, dtype=slot_y.dtype, device=h.device)
    e4m3 = slot.dtype == torch.float8_e4m3fn
    kernel, grid = _kernel("product_gelu_backward", operands, shapes.backward(a.shape[1]), e4m3)
    parts = _parts(grid, m // ROWS, n // COLUMNS)
    sums = torch.empty(parts, n, dtype=torch.float32, device=h.device)
    kernel(
        grid, tensor_map(a), b, h, q, qt, yt, sums, *scales, slot.scale, slot_y.scale, slot.amax, m, n, parts
    )  # fmt: skip
    return GeluGradient(q, qt, yt, sums)
