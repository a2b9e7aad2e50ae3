"""FP8 GEMMs with an epilogue, in CUDA C++: which shapes have one, and how its kernel is called.

The result of a GEMM passes through more arithmetic while it is still in registers (here the MLP's activation;
`probabilities`). A separate kernel would write and read the result once more. Here a block keeps a slab of the second
operand in shared memory, so the inner dimension must be short. Sums stay in the tensor cores, as with
`fast_accumulate` of `kernels.gemm`.

The MLP's GEMMs are here (`cuda/product_activation*.cu`; see `kernels.activation` for the arithmetic). The activation's
input h is never in memory. What the backward needs instead, the derivative, is a byte a number with GELU: the forward
leaves a linear code of gelu'(h), with an RMS error of 0.21 %, and exact where it is 0 or 1. With squared ReLU it is no
byte more: 2 max(h, 0) follows from the result in E4M3 itself, with an error of at most 3 % unless that is subnormal.
It is 0 where the result was rounded to 0.

It needs no Triton, so a run can report which kernels it will use.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from gpt2_fp8.kernels import nvrtc
from gpt2_fp8.kernels.formats import Slot
from gpt2_fp8.kernels.nvrtc import SHARED_BYTES

ROWS, COLUMNS, LINE = 64, 128, 128  # of a tile; LINE: bytes copied together
WARPGROUPS = 3  # that multiply, and hide each other's epilogues
FEWEST_STAGES, MOST_STAGES = 4, 7  # with fewer, tensor cores wait for memory: no faster than two kernels
CODES, CODE_OF_ZERO = 202, 26  # a code is CODES gelu' + CODE_OF_ZERO, rounded
Kind = Literal["gelu", "relu_squared"]  # of an activation: GELU in its tanh form, or max(h, 0)^2
_TILE = {"ROWS": ROWS, "COLUMNS": COLUMNS, "LINE": LINE, "WARPGROUPS": WARPGROUPS}
_TILE |= {"CODES": CODES, "CODE_OF_ZERO": CODE_OF_ZERO}

# A head without logits (`probabilities`)
STAGED = ROWS * COLUMNS  # bytes of a tile whose transpose waits in shared memory, for each warp group
FEWEST_STAGED = 3  # stages: what 1,024 channels leave room for
FEWEST_ROWS = 16384  # of a micro-batch; in smaller ones the rows' references cost more than the logits


class Operands(NamedTuple):
    """The operands of a b^T: a [M, K] and b [N, K], both FP8, with their inverse scales (float32, one element each)."""

    a: Tensor
    b: Tensor
    a_scale_inv: Tensor
    b_scale_inv: Tensor


class Shape(NamedTuple):
    """How a GEMM's kernel uses a multiprocessor for one inner dimension."""

    stages: int  # lines of a tile that are loaded or being loaded, for each warp group
    shared_bytes: int


@cache
def shape_of(k: int, staged: int = 0) -> Shape:
    """Return a shape with as many stages as there is room for, beside `staged` bytes for each warp group's results."""
    stage, rest = ROWS * LINE + 16, COLUMNS * k + WARPGROUPS * staged  # 16: two barriers
    stages = min((SHARED_BYTES - 1024 - rest) // WARPGROUPS // stage, MOST_STAGES)
    return Shape(stages, rest + WARPGROUPS * stages * stage)


@cache
def why_no_product(m: int, n: int, k: int, staged: int = 0) -> str | None:
    """Return why a GEMM [m, k] times [n, k]^T has no kernel with an epilogue; None if it has one.

    The kernel takes whole tiles, and keeps a slab of its second operand in shared memory. `kernels.weight_gradient`
    takes the gradients of these GEMMs' weights, whatever fits here. `staged`: as in `shape_of`.
    """
    for size, part, name in ((m, ROWS, "rows"), (n, COLUMNS, "columns"), (k, LINE, "channels")):
        if size % part:
            return f"{size:,} {name} are no multiple of {part}"
    if shape_of(k, staged).stages < (FEWEST_STAGED if staged else FEWEST_STAGES):
        return f"{k:,} channels leave too little shared memory"
    return None


def why_logits(rows: int, n: int, k: int) -> str | None:
    """Return why the logits [rows, n] of k channels are stored in training; None if they are never in memory."""
    if rows < FEWEST_ROWS:
        return f"fewer than {FEWEST_ROWS:,} rows"
    return why_no_product(rows, n, k, STAGED)


def fits(a: Tensor, b: Tensor, staged: int = 0) -> bool:
    """Return whether these kernels can compute a b^T: see `why_no_product`."""
    (m, k), n = a.shape, b.shape[0]
    return why_no_product(m, n, k, staged) is None


def tensor_map(a: Tensor) -> Any:
    """Describe one line of a tile of a [M, K] to the copy engine.

    16 rows come as two times eight, the even ones first. So the two rows of a thread are neighbours
    (`cuda/product.cuh`).
    """
    m, k = a.shape
    rows = a.view(torch.uint8).view(m // 16, 8, 2, k).transpose(1, 2)
    return nvrtc.tensor_map(rows, (ROWS // 16, 2, 8, LINE))


def product_kernel(
    name: str, operands: Operands, e4m3: bool = True, staged: int = 0, **constants: int
) -> tuple[nvrtc.Kernel, int]:
    """Return the kernel of a GEMM with an epilogue and its number of blocks. `e4m3`: the format of an FP8 result.

    `staged`: bytes of shared memory that each warp group needs for its results. `constants`: the kernel's own.
    """
    a, b, *scales = operands
    (m, k), n = a.shape, b.shape[0]
    assert b.shape[1] == k, (a.shape, b.shape)
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (a, b)), "whole lines at multiples of 16 bytes"
    assert all(t.dtype == torch.float32 and t.numel() == 1 for t in scales)
    shape = shape_of(k, staged)
    given = _TILE | {"K": k, "STAGES": shape.stages, "E4M3": e4m3, "A_E5M2": a.dtype == torch.float8_e5m2, **constants}
    kernel = nvrtc.kernel(name, given, a.device, 128 * (WARPGROUPS + 1), shape.shared_bytes)
    return kernel, min(nvrtc.processors(a.device), m // ROWS * (n // COLUMNS))


class Activated(NamedTuple):
    """The result of `product_activation`."""

    q: Tensor  # FP8 [M, N] of z times its slot's scale
    slopes: Tensor  # [M, N], what tells z'(h): with GELU uint8, its codes; with squared ReLU `q` itself


class ActivatedGradient(NamedTuple):
    """The result of `product_activation_backward`."""

    q: Tensor  # FP8 [M, N] of the gradient of h times its slot's scale
    sums: Tensor  # partial column sums of the gradient, float32 [P, N]


@cache
def _parts(grid: int, tiles_down: int, slabs: int) -> int:
    """Return the largest number of blocks that have tiles of one slab; see `block_of` in `cuda/product.cuh`."""
    tiles = tiles_down * slabs

    def block_of(tile: int) -> int:
        return ((tile + 1) * grid - 1) // tiles

    return max(block_of((s + 1) * tiles_down - 1) - block_of(s * tiles_down) + 1 for s in range(slabs))


def product_activation(kind: Kind, operands: Operands, bias: Tensor | None, slot: Slot) -> Activated:
    """Compute the activation z of h = a b^T [+ bias] rounded to bfloat16, quantized with the slot's scale, and z'(h).

    bias: bfloat16 [N].
    """
    a, b, *scales = operands
    m, n = a.shape[0], b.shape[0]
    assert slot.dtype == torch.float8_e4m3fn, slot.dtype
    assert bias is None or (bias.dtype, bias.shape) == (torch.bfloat16, (n,)), (bias.dtype, bias.shape)
    q = torch.empty(m, n, dtype=slot.dtype, device=a.device)
    slopes = torch.empty(m, n, dtype=torch.uint8, device=a.device) if kind == "gelu" else q
    kernel, grid = product_kernel("product_activation", operands, RELU_SQUARED=kind == "relu_squared")
    kernel(grid, tensor_map(a), b, bias, q, slopes, *scales, slot.scale, slot.amax, m, n)
    return Activated(q, slopes)


def product_activation_backward(
    kind: Kind, operands: Operands, slopes: Tensor, z_scale_inv: Tensor, slot: Slot
) -> ActivatedGradient:
    """Compute g z'(h), quantized with the slot's scale, from g = a b^T, the gradient of the activation z [M, N].

    slopes: of `product_activation`; z_scale_inv: of its slot. g itself is not rounded in between.
    """
    a, b, *scales = operands
    m, n = slopes.shape
    assert slopes.is_contiguous()
    dtype = torch.uint8 if kind == "gelu" else torch.float8_e4m3fn
    assert (slopes.dtype, m, n) == (dtype, a.shape[0], b.shape[0]), (slopes.dtype, slopes.shape)
    q = torch.empty(m, n, dtype=slot.dtype, device=a.device)
    e4m3, squared = slot.dtype == torch.float8_e4m3fn, kind == "relu_squared"
    kernel, grid = product_kernel("product_activation_backward", operands, e4m3, RELU_SQUARED=squared)
    parts = _parts(grid, m // ROWS, n // COLUMNS)
    sums = torch.empty(parts, n, dtype=torch.float32, device=a.device)
    kernel(grid, tensor_map(a), b, slopes, q, sums, *scales, slot.scale, slot.amax, m, n, parts, z_scale_inv)
    return ActivatedGradient(q, sums)
