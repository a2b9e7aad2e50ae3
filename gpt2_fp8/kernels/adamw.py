"""AdamW's whole update of a parameter in one kernel, with moments in bfloat16.

Memory traffic is all it costs: each number is read once and written once. A skipped update writes nothing. The same
arithmetic in plain torch is `engine.small_adamw`, and both give the same bits. So products and sums are not fused
(`enable_fp_fusion`), and roots and quotients are rounded to nearest.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 1024  # elements of a program


@triton.jit
def _murmur3(x):
    """Compute MurmurHash3's finalizer of uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _random_bits(index, update, first, second):
    """Compute the random words, uint32, of elements at one update: `engine.small_adamw`."""
    update = update.to(tl.uint32)
    first = _murmur3(first.to(tl.uint32, bitcast=True) ^ _murmur3(update))
    second = _murmur3(second.to(tl.uint32, bitcast=True) + update * 0x9E3779B9)
    return _murmur3(_murmur3(index.to(tl.uint32) ^ first) + second)


@triton.jit
def _adamw(p, g, m, v, row, decay, beta1, rest1, beta2, rest2, eps):
    """Compute the new weights and moments, all float32. `row`: `engine.small_adamw.Scalars.row`."""
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * g) * rest2
    root = tl.div_rn(tl.sqrt_rn(v), tl.load(row + 1) + tl.zeros_like(v)) + eps
    return p * decay - tl.div_rn(m, root) * tl.load(row), m, v


@triton.jit
def _bf16(x, noise):
    """Round float32 to bfloat16: add `noise`, uint32 below 2^16, and cut."""
    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit(do_not_specialize=["first", "second", "offset"])
def _update_bf16(
    weights, gradients, means, squares, row, skip, count, offset, first, second,
    decay, beta1, rest1, beta2, rest2, eps, SIZE: tl.constexpr,
):  # fmt: skip
    if tl.load(skip) != 0:
        return
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    p = tl.load(weights + index, mask=inside, other=0.0)
    g = tl.load(gradients + index, mask=inside, other=0.0)
    m = tl.load(means + index, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(squares + index, mask=inside, other=0.0).to(tl.float32)
    p, m, v = _adamw(p, g, m, v, row, decay, beta1, rest1, beta2, rest2, eps)
    noise = _random_bits(index + offset, tl.load(row + 2).to(tl.int32), first, second) & 0xFFFF
    to_even = 0x7FFF + ((m.to(tl.uint32, bitcast=True) >> 16) & 1)
    tl.store(weights + index, p, mask=inside)
    tl.store(means + index, _bf16(m, to_even), mask=inside)
    tl.store(squares + index, _bf16(v, noise), mask=inside)


def update(
    weights: Tensor, gradient: Tensor, state: dict[str, Tensor], keys: tuple[int, int], scalars: Any,
    skip: Tensor | None, first: int = 0,
) -> None:  # fmt: skip
    """Update one parameter and its moments in place, unless `skip`, float32 with one element, is not 0.

    Args:
        weights, gradient: float32 of the same shape on CUDA, contiguous.
        state: `exp_avg` and `exp_avg_sq`.
        keys: of the random bits, each of 32 bits.
        scalars: `engine.small_adamw.Scalars`.
        first: the place of the first element, if these are the rows that a rank has of a parameter.
    """
    decay, beta1, beta2, eps, row = scalars
    numbers = (decay, beta1, 1 - beta1, beta2, 1 - beta2, eps)
    mean, squares, count = state["exp_avg"], state["exp_avg_sq"], weights.numel()
    skip = row[3:] if skip is None else skip  # a 0
    with torch.cuda.device(weights.device) if weights.is_cuda else nullcontext():
        _update_bf16[(triton.cdiv(count, SIZE),)](
            weights, gradient, mean, squares, row, skip, count, first, *map(_as_int32, keys), *numbers,
            SIZE=SIZE, enable_fp_fusion=False,
        )  # fmt: skip


def _as_int32(word: int) -> int:
    """Return an int32 with the bits of a 32-bit word: Triton would take a larger number for an int64."""
    return word - (1 << 32) if word >= 1 << 31 else word
