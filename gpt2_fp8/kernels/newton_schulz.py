"""Muon's Newton-Schulz iteration of many matrices, with products that are known to be symmetric computed by half.

With X of n rows, no more than it has columns, an iteration is

    A = X Xᵀ        P = a I + b A + c A²        X <- P X

A, P and their products are symmetric: only tiles on and below the diagonal are multiplied, and stored twice. A tall
matrix has its columns in the place of rows. The first A has the norm that X is divided by, so X itself never is: the
first P is multiplied by what makes up for it.

Where X is at least twice as long as it is wide, the first two iterations need X but once, since the second A is P A P,
and X is multiplied by both P's product. That is Gram Newton-Schulz (Zhang, Amsel, Chen and Dao 2026,
https://tridao.me/blog/2026/gram-newton-schulz/), begun anew after two iterations. In bfloat16 more of it loses small
singular values. Where those fall to 1e-5, the error is 0.008 by this, 0.009 by torch's, 0.013 with the last two
together as well, 0.3 with all five.

Products are accumulated in float32 and rounded to bfloat16, as torch's are. It adds a X to (b A + c A²) X.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpt2_fp8.compat.torch_private import MUON_COEFFICIENTS, MUON_EPS

_describe = TensorDescriptor.from_tensor
BLOCK, DEPTH = 128, 64  # of a tile, and of what is multiplied at once
_HOW = {"BLOCK": BLOCK, "DEPTH": DEPTH, "num_warps": 4, "num_stages": 3}
_ALIGNMENT = 8  # elements of bfloat16 in the 16 bytes that a tensor map's strides are multiples of


@triton.jit
def _tile(pair):
    """Return row and column, no larger than the row, of a tile: pairs are counted row by row."""
    row = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > pair, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= pair, row + 1, row)
    return row, pair - row * (row + 1) // 2


@triton.jit
def _product(left, right, matrix, row, column, depth, TALL: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Compute a tile of left rightᵀ, or of leftᵀ right where they are TALL: float32."""
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, depth, DEPTH):
        if TALL:
            l = left.load([matrix, k, row * BLOCK]).reshape(DEPTH, BLOCK).T  # noqa: E741
            r = right.load([matrix, k, column * BLOCK]).reshape(DEPTH, BLOCK)
        else:
            l = left.load([matrix, row * BLOCK, k]).reshape(BLOCK, DEPTH)  # noqa: E741
            r = right.load([matrix, column * BLOCK, k]).reshape(BLOCK, DEPTH).T
        total = tl.dot(l, r, total)
    return total


@triton.jit
def _store(out, matrix, row, column, value, BLOCK: tl.constexpr):
    value = value.to(tl.bfloat16)
    out.store([matrix, row * BLOCK, column * BLOCK], value.reshape(1, BLOCK, BLOCK))
    if row != column:
        out.store([matrix, column * BLOCK, row * BLOCK], value.T.reshape(1, BLOCK, BLOCK))


@triton.jit
def _symmetric(left, right, out, depth, tiles, TALL: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    matrix = tl.program_id(0) // tiles
    row, column = _tile(tl.program_id(0) % tiles)
    _store(out, matrix, row, column, _product(left, right, matrix, row, column, depth, TALL, BLOCK, DEPTH), BLOCK)


@triton.jit
def _polynomial(gram, tile, out, norms, size, tiles, a, b, c, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    matrix = tl.program_id(0) // tiles
    row, column = _tile(tl.program_id(0) % tiles)
    square = _product(gram, gram, matrix, row, column, size, False, BLOCK, DEPTH)
    first = tile.load([matrix, row * BLOCK, column * BLOCK]).reshape(BLOCK, BLOCK).to(tl.float32)
    each = 1 / tl.load(norms + matrix)
    value = b * (first * each * each) + c * (square * each * each * each * each)
    index = tl.arange(0, BLOCK)
    diagonal = (row == column) & (index[:, None] == index[None, :])
    _store(out, matrix, row, column, (value + tl.where(diagonal, a, 0.0)) * each, BLOCK)


def takes(shape: torch.Size) -> bool:
    """Return whether matrices of this shape can be iterated here."""
    return all(size % _ALIGNMENT == 0 for size in shape)


def orthogonalize_batch(matrices: Tensor, steps: int) -> Tensor:
    """Compute `compat.torch_private.orthogonalize` of each of `matrices`, whose sizes `takes` takes.

    matrices: contiguous bfloat16 [number, rows, columns], on a GPU. So is what it returns; singular values are near 1.
    """
    number, rows, columns = matrices.shape
    is_tall, is_long = rows > columns, max(rows, columns) >= 2 * min(rows, columns)
    x, ones, done = matrices, torch.ones(number, device=matrices.device), 0
    with torch.cuda.device_of(matrices):
        while done < steps:
            gram = _multiply(x, x, is_tall)
            norms = ones if done else gram.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float32).sqrt()
            factor = _compute_polynomial(gram, norms.clamp(min=MUON_EPS))
            done += 1
            if is_long and done == 1 < steps:
                gram = _multiply(_multiply(factor, gram), factor)
                factor = _multiply(_compute_polynomial(gram, ones), factor)
                done += 1
            x = x @ factor if is_tall else factor @ x
    return x


def _multiply(left: Tensor, right: Tensor, is_tall: bool = False) -> Tensor:
    """Compute left rightᵀ, or leftᵀ right of tall ones, which is symmetric: bfloat16 [number, size, size]."""
    number, rows, columns = left.shape
    out = left.new_empty(number, *[columns if is_tall else rows] * 2)
    operand, tiles = [1, DEPTH, BLOCK] if is_tall else [1, BLOCK, DEPTH], _count_tiles(out)
    _symmetric[(number * tiles,)](
        _describe(left, operand), _describe(right, operand), _describe(out, [1, BLOCK, BLOCK]),
        rows if is_tall else columns, tiles, TALL=is_tall, **_HOW,
    )  # fmt: skip
    return out


def _compute_polynomial(gram: Tensor, norms: Tensor) -> Tensor:
    """Compute P of A = gram / norms², divided by norms: bfloat16 like gram, [number, size, size]. norms: float32."""
    number, size, _ = gram.shape
    out, tiles = torch.empty_like(gram), _count_tiles(gram)
    _polynomial[(number * tiles,)](
        _describe(gram, [1, BLOCK, DEPTH]), _describe(gram, [1, BLOCK, BLOCK]), _describe(out, [1, BLOCK, BLOCK]),
        norms, size, tiles, *MUON_COEFFICIENTS, **_HOW,
    )  # fmt: skip
    return out


def _count_tiles(symmetric: Tensor) -> int:
    """Count the tiles on and below the diagonal of a matrix."""
    side = triton.cdiv(symmetric.shape[1], BLOCK)
    return int(side * (side + 1) // 2)
