"""The shape of a model: its heads, and what FP8 and cuDNN ask of them."""

from __future__ import annotations

import math
from dataclasses import replace

from gpt2_fp8.config.schema import ModelConfig

_CUDNN_STEP, _CUDNN_LARGEST = 8, 256  # sizes of heads, on Hopper (TE fused_attn.cpp; other GPUs: up to 128)


def cudnn_takes(size: int) -> bool:
    """Return whether cuDNN's fused attention can train with heads of a size. Other heads have slower kernels."""
    return size % _CUDNN_STEP == 0 and size <= _CUDNN_LARGEST


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor up to `most`; of a number beyond 10^12, of those with a factor up to a million."""
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    return max(d for one in small for d in (one, number // one) if d <= most)


def head_size(model: ModelConfig) -> int | None:
    """Return the channels of a head; None if the heads do not share n_embd, which is told by itself."""
    return model.head_size or (None if model.n_embd % model.n_head else model.n_embd // model.n_head)


def in_any_shape(model: ModelConfig) -> ModelConfig:
    """Return a model whose keys fit, with the options of one whose keys may not: grouped heads, heads of another size.

    More key-value heads than heads are taken for as many.
    """
    grouped = model.n_kv_head is not None and model.n_kv_head < model.n_head
    size = 4 if model.head_size is None or model.head_size * model.n_head == model.n_embd else 2
    fitting = replace(model, n_embd=8, n_head=2, n_kv_head=1 if grouped else 2, head_size=size)
    return replace(fitting, rope_low_freq_factor=None, rope_high_freq_factor=None, rope_original_positions=None)
