"""Stochastic rounding to bfloat16, by random bits that are a function of what is rounded. Plain torch.

A moment that changes by less than half of its last bit never changes if it is rounded to nearest. With `beta2` = 0.999,
`exp_avg_sq` changes by a thousandth a step, and bfloat16 has eight bits: it never falls. Stochastic rounding goes up
with the probability of the distance from below, so its mean is exact (Croci et al. 2022).

The bits depend on the run's seed, the parameter's name, the number of updates and the element's index. So they need no
state, and are the same after a resume, on every rank and on every device. They come from MurmurHash3's 32-bit finalizer
(Appleby 2011), applied twice with two keys. `kernels.adamw` computes the same in Triton.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_LOW = 0xFFFF  # the bits of a float32 that a bfloat16 does not have


class Keys(NamedTuple):
    """Two keys of 32 bits each."""

    first: int
    second: int

    @classmethod
    def of(cls, seed: int, name: str) -> Keys:
        """Return the keys of a parameter in a run."""
        digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
        return cls(int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little"))

    def at(self, update: int) -> Keys:
        """Return the keys of one update, which is counted from 1."""
        return Keys(mixed(self.first ^ mixed(update)), mixed((self.second + update * 0x9E3779B9) & _WORD))


def mixed(x: int) -> int:
    """Compute MurmurHash3's finalizer of a 32-bit number."""
    x = ((x ^ x >> 16) * 0x85EBCA6B) & _WORD
    x = ((x ^ x >> 13) * 0xC2B2AE35) & _WORD
    return x ^ x >> 16


def random_bits(keys: Keys, start: int, count: int, device: torch.device) -> Tensor:
    """Compute the random words of the elements from `start` on: int64 [count], each from 0 to 2^32 - 1.

    They repeat after 2^32 elements.
    """
    x = torch.arange(start, start + count, dtype=torch.int64, device=device) & _WORD
    return _mix_(_mix_(x ^ keys.first).add_(keys.second).bitwise_and_(_WORD))


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16 by the low 16 of the random `bits`, int64 of the same shape. Values must be finite."""
    noise = (bits & _LOW).to(torch.int32)
    return ((values.view(torch.int32) + noise) & ~_LOW).view(torch.float32).to(torch.bfloat16)


def _mix_(x: Tensor) -> Tensor:
    """Compute `mixed` of int64 numbers below 2^32, in place. A product that overflows keeps its low 32 bits."""
    x.bitwise_xor_(x >> 16).mul_(0x85EBCA6B).bitwise_and_(_WORD)
    x.bitwise_xor_(x >> 13).mul_(0xC2B2AE35).bitwise_and_(_WORD)
    return x.bitwise_xor_(x >> 16)
