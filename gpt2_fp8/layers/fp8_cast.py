"""FP8 casts in plain torch, as Transformer Engine and the fused layers make them, on any device.

A cast multiplies by a scale, saturates, and rounds to nearest even. NaN stays NaN. Three recipes give the scale:

- `delayed`: the caller brings it;
- `current`: it comes from the tensor's own largest absolute value;
- `block`: each block of 128 values along the summed dimension has one, or each square of 128 x 128 of a weight. It is
  rounded down to a power of two.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_fp8.kernels.formats import LARGEST

Recipe = Literal["delayed", "current", "block"]
BLOCK = 128


class Operand(NamedTuple):
    """One side of a GEMM. Its numbers are `values` times `scale_inv`."""

    values: Tensor  # FP8, or bfloat16: both hold their numbers exactly in bfloat16
    scale_inv: Tensor | None  # float32 of one element; None means 1

    def t(self) -> Operand:
        """Return its transpose."""
        return Operand(self.values.t(), self.scale_inv)


def uncast(x: Tensor) -> Operand:
    """Return `x` in bfloat16: an operand that stays out of FP8."""
    return Operand(x.to(torch.bfloat16), None)


def cast(
    x: Tensor, recipe: Recipe, dtype: torch.dtype, rows: int, columns: int, scale: Tensor | None = None
) -> Operand:
    """Cast `x` [M, N] to a float8 dtype. `rows`, `columns`: of a block. `scale`: float32, for `delayed` only."""
    if recipe == "block":
        return Operand(_by_blocks(x, dtype, rows, columns), None)
    if recipe == "current":
        scale = scale_of(amax(x), dtype)
    assert scale is not None, "delayed scaling has a scale"
    return Operand(cast_saturating(x.float() * scale, dtype), 1 / scale)


def amax(x: Tensor) -> Tensor:
    """Return the largest absolute value of `x`, float32 of no dimension."""
    return x.detach().abs().amax().float()


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale that takes `amax` to the largest number of `dtype`, float32.

    It is 1 if `amax` is 0 or not finite. It is float32's largest number if the quotient is infinite.
    """
    largest = torch.full_like(amax, LARGEST[dtype])  # number / tensor is a multiplication by the rounded reciprocal
    fresh = (largest / amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(torch.isfinite(amax) & (amax > 0), fresh, 1.0)


def cast_saturating(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert to FP8, rounding to nearest even. What is beyond the largest number, infinity too, becomes that number.

    torch's own conversion to E4M3 makes NaN of it instead.
    """
    largest = LARGEST[dtype]
    return x.clamp(-largest, largest).to(dtype)


def _by_blocks(x: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Cast every block with a scale of its own; return what its numbers mean, in bfloat16.

    That is exact: scales are powers of two. Blocks at the edges are smaller.
    """
    padded = F.pad(x.float(), (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = scale_of(tiles.abs().amax((1, 3), keepdim=True), dtype)
    scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)  # down to a power of two: no mantissa
    values = cast_saturating(tiles * scale, dtype).float() / scale
    return values.view(padded.shape)[: x.shape[0], : x.shape[1]].to(torch.bfloat16)
