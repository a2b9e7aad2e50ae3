"""Rotary positions (Su et al. 2021): how far each channel pair of a head is turned at each position.

A pair is channel i of a head's first half and channel i of its second, as in GPT-NeoX and in Hugging Face's weights.
Meta's own Llama files pair neighbours instead: the same model, with the rows of its projections in another order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gpt2_fp8.config.block_spec import Bands, RoPE


def angles(rope: RoPE, size: int, tokens: int, device: torch.device) -> Tensor:
    """Compute by how much positions 0 to `tokens` - 1 turn the pairs of a head of `size` channels.

    Returns radians from 0 to 2 pi, float64 [tokens, size / 2]. Float32 would be wrong by 5e-4 at position 8,192.
    """
    pair = torch.arange(size // 2, device=device, dtype=torch.float64)
    frequency = rope.base ** (-pair / (size / 2.0))  # radians a token
    kept = 0.0 if rope.bands is None else _kept(frequency, rope.bands)
    frequency = frequency * (kept + (1.0 - kept) / rope.scaling)
    position = torch.arange(tokens, device=device, dtype=torch.float64)
    return (position[:, None] * frequency).remainder(math.tau)


def _kept(frequency: Tensor, bands: Bands) -> Tensor:
    """Compute which part of each frequency is not scaled, from 0 to 1."""
    turns = bands.original_positions * frequency / math.tau
    return ((turns - bands.low) / (bands.high - bands.low)).clamp(0.0, 1.0)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turn the pairs of `x`, [batch, tokens, heads, size], by `angle`, [tokens, size / 2]. Computes in x's dtype."""
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
