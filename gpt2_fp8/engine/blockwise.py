"""Numbers in 8 bits: a code a number, and a float32 scale a block of 256. Plain torch.

Dettmers et al. 2022 (arXiv 2110.02861) call it block-wise dynamic quantization. A code stands for a value of a map
from -1 to 1, or from 0 to 1 for what has no sign. The map's values lie closer to each other near 0: decade i below 1
has 2^i equal steps. A block's scale is its largest magnitude, which its code gives back exactly.

Codes are rounded to nearest. Stochastic rounding adds more error here than it takes away, since neighbouring values
are up to a tenth apart: docs/optimizers.md has the figures. A positive number without sign never becomes 0, since an
update is divided by its root.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gpt2_fp8.model.optimizer_bytes import BLOCK

_DECADES = 7


def blocks(count: int) -> int:
    """Return how many blocks `count` numbers have. The last may be shorter."""
    return -(-count // BLOCK)


@cache
def map_values(signed: bool, device: torch.device) -> Tensor:
    """Return the 256 values that codes stand for, float32 in rising order."""
    values = [0.0, 1.0]
    for i in range(_DECADES):
        edges = torch.linspace(0.1, 1, (2**i if signed else 2 ** (i + 1)) + 1, dtype=torch.float64)
        middles = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (i - _DECADES + 1)).tolist()
        values += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32, device=device)


@cache
def map_edges(signed: bool, device: torch.device) -> Tensor:
    """Return the 255 numbers half-way between the map's neighbours, float32."""
    values = map_values(signed, device)
    return ((values[1:] + values[:-1]) / 2).contiguous()


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 [count], and scales, float32 [blocks], of finite float32 [count]."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1)
    parts = padded / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = torch.bucketize(parts, map_edges(signed, values.device))
    if not signed:
        codes = torch.where(parts > 0, codes.clamp_min(1), codes)
    return codes.view(-1)[: len(values)].to(torch.uint8), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return the numbers, float32 [count], that codes and scales stand for."""
    values = map_values(signed, codes.device)[codes.long()]
    return values * scales.repeat_interleave(BLOCK)[: len(codes)]
