"""Keys of `model` that must fit each other, and its widths that must fit FP8. Nothing here looks at the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.keys import finding
from gpt2_fp8.config.schema import FP8PrecisionConfig, ModelConfig, RunConfig

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


FP8_MULTIPLE = 16  # cuBLASLt's FP8 products need every leading dimension to be a multiple of 16 (TE cublaslt_gemm.cu)
_MULTIPLES = {"mxfp8": 32}  # its casts want whole blocks of 32, along rows and columns (TE mxfp8_tensor.py)
_BANDS = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_positions")


def check(config: RunConfig) -> Iterator[Finding]:
    """Find what is wrong with a model whose keys have the right types and ranges."""
    model = config.model
    if model.n_embd % model.n_head and model.head_size is None:
        yield _finding(model, "n_embd n_head", "n_embd must be a multiple of n_head")
    if model.n_head % (model.n_kv_head or model.n_head):
        yield _finding(model, "n_head n_kv_head", "n_head must be a multiple of n_kv_head")
    yield from _rope(model)
    yield from _widths(config)


def _rope(model: ModelConfig) -> Iterator[Finding]:
    """Find keys of RoPE that do nothing, or not enough."""
    if model.positions != "rope":
        given = [key for key in ("rope_base", "rope_scaling", *_BANDS) if getattr(model, key) is not None]
        if given:
            yield _finding(model, " ".join(given), f"model.positions={model.positions} has no rotations")
        return
    size = head_size(model)
    if size and size % 2:
        keys = "positions n_embd n_head" if model.head_size is None else "positions head_size"
        yield _finding(model, keys, f"RoPE turns pairs of channels, and a head has {size}")
    given = [key for key in _BANDS if getattr(model, key) is not None]
    missing = [key for key in (*_BANDS, "rope_scaling") if given and getattr(model, key) is None]
    if missing:
        needed = " and ".join(f"model.{key}" for key in missing)
        yield _finding(model, " ".join(given), f"Llama 3's scaling also needs {needed}")
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if low is not None and high is not None and low >= high:
        yield _finding(model, "rope_low_freq_factor rope_high_freq_factor", "the low factor is below the high one")


def _widths(config: RunConfig) -> Iterator[Finding]:
    """Find widths that FP8 cannot multiply, unless another finding is the cause."""
    model, multiple = config.model, width_multiple(config)
    reason = f"{products(config)} need a multiple of {multiple}"
    if model.n_embd % multiple:
        yield _finding(model, "n_embd", reason)
    if (model.mlp_width or multiple) % multiple:
        yield _finding(model, "mlp_width", reason)
    size = head_size(model)
    if model.n_embd % multiple or not size or (size % 2 and model.positions == "rope"):
        return
    for heads, key, of in (
        (model.n_head, "n_head", "queries"), (2 * (model.n_kv_head or model.n_head), "n_kv_head", "keys and values")
    ):  # fmt: skip
        if heads * size % multiple:
            yield _finding(model, f"{key} head_size", f"{reason}, and the {of} have {heads * size} channels")
            return


def width_multiple(config: RunConfig) -> int:
    """Return what every width, and the tokens of a sequence, must be a multiple of."""
    in_fp8 = isinstance(config.precision, FP8PrecisionConfig)
    return _MULTIPLES.get(config.recipe.name, FP8_MULTIPLE) if in_fp8 else 1


def products(config: RunConfig) -> str:
    """Name the matrix products of a run in FP8, with the recipe if it needs more than the others."""
    name = config.recipe.name
    return f"the FP8 matrix products of recipe={name}" if name in _MULTIPLES else "FP8 matrix products"


def _finding(model: ModelConfig, keys: str, reason: str) -> Finding:
    return finding(model, keys, reason, prefix="model.")
