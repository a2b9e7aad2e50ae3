"""The nearest numbers that fit: widths, heads and their sizes, where those of a model do not fit each other or FP8."""

from __future__ import annotations

import math
from dataclasses import replace

from gpt2_fp8.config.schema import ModelConfig

_CUDNN_STEP, _CUDNN_LARGEST = 8, 256  # sizes of heads, on Hopper (TE fused_attn.cpp; other GPUs: up to 128)
_NEAR = 8  # a number is moved by at most an eighth, so that attention has its fast kernels


def cudnn_takes(size: int) -> bool:
    """Return whether cuDNN's fused attention can train with heads of a size. Other heads have slower kernels."""
    return size % _CUDNN_STEP == 0 and size <= _CUDNN_LARGEST


def nearest(value: int, multiple: int) -> int:
    """Return the multiple that is nearest to a value, and not 0."""
    return max(1, round(value / multiple)) * multiple


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor up to `most`; of a number beyond 10^12, of those with a factor up to a million."""
    return max(_divisors(number, most))


def _divisors(number: int, most: int) -> list[int]:
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    return [d for one in small for d in (one, number // one) if d <= most]


def head_size(model: ModelConfig) -> int | None:
    """Return the channels of a head; None if the heads do not share n_embd, which is told by itself."""
    return model.head_size or (None if model.n_embd % model.n_head else model.n_embd // model.n_head)


def shares_width(model: ModelConfig) -> bool:
    """Return whether the heads are to share n_embd. A head size that says the same goes with a width."""
    return model.head_size is None or model.head_size * model.n_head == model.n_embd


def in_any_shape(model: ModelConfig) -> ModelConfig:
    """Return a model whose keys fit, with the options of one whose keys may not: grouped heads, heads of another size.

    More key-value heads than heads are taken for as many.
    """
    grouped = model.n_kv_head is not None and model.n_kv_head < model.n_head
    size = 4 if shares_width(model) else 2
    fitting = replace(model, n_embd=8, n_head=2, n_kv_head=1 if grouped else 2, head_size=size)
    return replace(fitting, rope_low_freq_factor=None, rope_high_freq_factor=None, rope_original_positions=None)


def key_value_heads(model: ModelConfig, multiple: int) -> int:
    """Return the number of key-value heads that a model has, or the nearest that its heads can share."""
    asked = model.n_kv_head or model.n_head
    if model.n_head % asked == 0:
        return asked
    size = head_size(model)
    able = _divisors(model.n_head, model.n_head)
    turns = size and (size % 2 == 0 or model.positions != "rope")
    if size and turns and model.n_head * size % multiple == 0:  # otherwise the size is what must change
        able = [heads for heads in able if 2 * heads * size % multiple == 0]
    return max((heads for heads in able if heads <= asked), default=min(able))


def size(model: ModelConfig, multiple: int, size: int) -> int:
    """Return the size of a head that is nearest to `size` and fits."""
    step = _size_step(model, multiple, model.n_head, key_value_heads(model, multiple))
    return _near_with_cudnn(size, step, 1)


def width(model: ModelConfig, multiple: int) -> int:
    """Return the nearest width of the residual stream that fits, with heads that share it if they do."""
    if not shares_width(model):
        return nearest(model.n_embd, multiple)
    step = _size_step(model, multiple, model.n_head, key_value_heads(model, multiple))
    return _near_with_cudnn(model.n_embd, math.lcm(multiple, model.n_head * step), model.n_head)


def heads(model: ModelConfig, multiple: int) -> int | None:
    """Return the largest number of heads, up to the model's, that share its width and fit; None if none does."""
    kept = model.n_kv_head and key_value_heads(model, multiple)
    able = [
        heads
        for heads in _divisors(model.n_embd, model.n_head)
        if heads % (kept or heads) == 0 and model.n_embd // heads % _size_step(model, multiple, heads, kept) == 0
    ]
    fast = [heads for heads in able if cudnn_takes(model.n_embd // heads) and 2 * heads >= model.n_head]
    return max(fast or able, default=None)


def _size_step(model: ModelConfig, multiple: int, n_head: int, n_kv_head: int | None) -> int:
    """Return what a head's size must be a multiple of, for RoPE and for the widths that attention projects to."""
    steps = [multiple // math.gcd(multiple, heads) for heads in (n_head, 2 * (n_kv_head or n_head))]
    return math.lcm(*steps, 2 if model.positions == "rope" else 1)


def _near_with_cudnn(value: int, step: int, n_head: int) -> int:
    """Return the nearest multiple of `step`; one that gives each of `n_head` a size of cuDNN's if it is near."""
    fast = nearest(value, math.lcm(step, _CUDNN_STEP * n_head))
    is_near = _NEAR * abs(fast - value) <= value
    return fast if is_near and cudnn_takes(fast // n_head) else nearest(value, step)
