"""What a cast to FP8 does to one tensor: how much of it saturates, and how much becomes 0.

A value saturates if it would be rounded beyond the format's largest number. It is flushed if it is not 0 and becomes 0.
Both are counted over the values that are not 0. Of a large tensor, every n-th value is looked at, or every n-th row.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_fp8.layers.fp8_cast import scale_of

Recipe = Literal["delayed", "current", "rowwise", "block", "mxfp8"]
MOST = 1 << 18  # values of a tensor that are looked at
BLOCKS = {"block": 128, "mxfp8": 32}  # values with a scale of their own, along the summed dimension
# The largest magnitude that is still rounded to the largest number, and the largest that is rounded to 0: half a step
# beyond 448 (E4M3) and 57,344 (E5M2), and half of the smallest numbers 2^-9 and 2^-16. A tie goes to the even number.
_LARGEST_KEPT = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61440.0}
_LARGEST_FLUSHED = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}


@torch.no_grad()
def figures(x: Tensor, dtype: torch.dtype, recipe: Recipe, scale: Tensor | None = None) -> Tensor:
    """Compute amax, scale, the share that saturates, and the share that is flushed; float32 [4] on the device.

    x: any float dtype, [..., channels]. `scale`: float32 scalar, where it is given; None: the recipe takes it from the
    tensor itself. Where the recipe has several scales a tensor, the second figure is that of the block with the amax,
    which is the smallest. The amax is NaN if a value is.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    amax = rows.abs().amax().float()
    if scale is None and recipe in ("rowwise", "block", "mxfp8"):
        rows = rows[:: max(1, rows.numel() // MOST)].float()
        scales = _scales_of_blocks(rows, dtype, BLOCKS.get(recipe, rows.shape[1]))
        return torch.stack([amax, _power_of_two(scale_of(amax, dtype)), *_shares(rows, scales, dtype)])
    scale = scale_of(amax, dtype) if scale is None else scale.float().reshape(())
    values = rows.flatten()[:: _stride(rows)].float()
    return torch.stack([amax, scale, *_shares(values, scale, dtype)])


def _shares(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the shares that saturate and that are flushed, of the values of `x` that are not 0."""
    reached = x.abs() * scale
    there = x != 0
    count = there.sum().clamp_min(1)
    saturated = (reached > _LARGEST_KEPT[dtype]).sum() / count
    flushed = ((reached <= _LARGEST_FLUSHED[dtype]) & there).sum() / count
    return saturated, flushed


def _stride(rows: Tensor) -> int:
    """Return which of the values to take. It shares no divisor with the channels, so that it meets each of them."""
    stride = max(1, rows.numel() // MOST)
    while math.gcd(stride, rows.shape[1]) > 1:
        stride += 1
    return stride


def _scales_of_blocks(rows: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """Return each value's scale: that of its block of `width` values of its row, a power of two."""
    padded = F.pad(rows, (0, -rows.shape[1] % width))
    amax = padded.view(len(rows), -1, width).abs().amax(2)
    return _power_of_two(scale_of(amax, dtype)).repeat_interleave(width, dim=1)[:, : rows.shape[1]]


def _power_of_two(scale: Tensor) -> Tensor:
    """Round down to a power of two."""
    return torch.exp2(torch.log2(scale).floor())
