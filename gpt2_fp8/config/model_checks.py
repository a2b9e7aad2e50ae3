"""Keys of `model` that must fit each other, and its widths that must fit FP8. Nothing here looks at the GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpt2_fp8.config.backend_support import asked
from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.keys import finding
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig
from gpt2_fp8.config.schema import ModelConfig, RunConfig

FP8_MULTIPLE = 16  # cuBLASLt's FP8 products need every leading dimension to be a multiple of 16 (TE cublaslt_gemm.cu)
_MULTIPLES = {"mxfp8": 32}  # its casts want whole blocks of 32, along rows and columns (TE mxfp8_tensor.py)
_BANDS = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_positions")
_ORIGINAL, _SCALING = 8192, 32.0  # Llama 3.2's rope_original_positions and rope_scaling


def check(config: RunConfig) -> Iterator[Finding]:
    """Find what is wrong with a model whose keys have the right types and ranges."""
    model, multiple = config.model, width_multiple(config)
    if model.n_embd % model.n_head and model.head_size is None:
        yield _unequal_heads(model, multiple)
    if model.n_head % (model.n_kv_head or model.n_head):
        reason = "each key-value head serves the same number of heads"
        yield _finding(model, "n_head n_kv_head", reason, f"model.n_kv_head={_key_value_heads(model, multiple)}")
    yield from _rope(model, multiple)
    yield from _widths(config, multiple)


def _unequal_heads(model: ModelConfig, multiple: int) -> Finding:
    ways = [f"model.n_embd={_fitting_width(model, multiple)}"]
    kept = model.n_kv_head and _key_value_heads(model, multiple)
    fitting = [
        heads
        for heads in _divisors(model.n_embd, model.n_head)
        if heads % (kept or heads) == 0 and model.n_embd // heads % _size_step(model, multiple, heads, kept) == 0
    ]
    if fitting and model.n_embd % multiple == 0:
        ways.append(f"model.n_head={max(fitting)}")
    return _finding(model, "n_embd n_head", "the heads share n_embd in equal parts", ", or ".join(ways))


def _key_value_heads(model: ModelConfig, multiple: int) -> int:
    """Return the number of key-value heads that a model has, or the nearest that its heads can share."""
    asked = model.n_kv_head or model.n_head
    if model.n_head % asked == 0:
        return asked
    size = _head_size(model)
    able = _divisors(model.n_head, model.n_head)
    turns = size and (size % 2 == 0 or model.positions != "rope")
    if size and turns and model.n_head * size % multiple == 0:  # otherwise the size is what must change
        able = [heads for heads in able if 2 * heads * size % multiple == 0]
    return max((heads for heads in able if heads <= asked), default=min(able))


def _size_step(model: ModelConfig, multiple: int, n_head: int, n_kv_head: int | None) -> int:
    """Return what a head's size must be a multiple of, for RoPE and for the widths that attention projects to."""
    steps = [multiple // math.gcd(multiple, heads) for heads in (n_head, 2 * (n_kv_head or n_head))]
    return math.lcm(*steps, 2 if model.positions == "rope" else 1)


def _fitting_size(model: ModelConfig, multiple: int, size: int) -> int:
    return nearest(size, _size_step(model, multiple, model.n_head, _key_value_heads(model, multiple)))


def _fitting_width(model: ModelConfig, multiple: int) -> int:
    """Return the nearest width of the residual stream that fits, with heads that share it if they do."""
    if model.head_size is not None:
        return nearest(model.n_embd, multiple)
    step = _size_step(model, multiple, model.n_head, _key_value_heads(model, multiple))
    return nearest(model.n_embd, math.lcm(multiple, model.n_head * step))


def _rope(model: ModelConfig, multiple: int) -> Iterator[Finding]:
    """Find keys of RoPE that do nothing, or not enough."""
    if model.positions != "rope":
        yield from _no_rotations(model, multiple)
        return
    size = _head_size(model)
    if size and size % 2:
        keys = "positions n_embd n_head" if model.head_size is None else "positions head_size"
        reason = f"RoPE turns pairs of channels, and a head has {size}"
        yield _finding(model, keys, reason, f"model.head_size={_fitting_size(model, multiple, size)}")
    given = [key for key in _BANDS if getattr(model, key) is not None]
    if missing := _missing(model):
        reason = f"Llama 3's scaling also needs {' and '.join(f'model.{key}' for key in missing)}"
        yield _finding(model, " ".join(given), reason, f"add {_words(missing)}, or {_words(dict.fromkeys(given))}")
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if low is not None and high is not None and low >= high:
        keys, remedy = "rope_low_freq_factor rope_high_freq_factor", f"model.rope_high_freq_factor={4 * low:g}"
        yield _finding(model, keys, "the low factor is below the high one", remedy)


def _no_rotations(model: ModelConfig, multiple: int) -> Iterator[Finding]:
    """Find the keys of RoPE in a model without it. The model's file may have set them, so what unsets them is told."""
    given = [key for key in ("rope_base", "rope_scaling", *_BANDS) if getattr(model, key) is not None]
    if not given:
        return
    missing, ways = _missing(model), [_words(dict.fromkeys(given))]
    if not any(_rope(replace(model, positions="rope", **missing), multiple)):
        ways.insert(0, f"model.positions=rope {_words(missing)}".strip())
    reason = f"model.positions={model.positions} has no rotations"
    yield _finding(model, " ".join(given), reason, ", or ".join(ways))


def _missing(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that Llama 3's scaling lacks, with values that fit the others; none if no other is given."""
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    low = low or (high / 4 if high else 1.0)
    fits = (low, high or 4 * low, _ORIGINAL, _SCALING)
    wanted = dict(zip((*_BANDS, "rope_scaling"), fits, strict=True))
    begun = any(getattr(model, key) is not None for key in _BANDS)
    return {key: value for key, value in wanted.items() if begun and getattr(model, key) is None}


def _words(values: Mapping[str, float | None]) -> str:
    """Return what sets a model's keys to these values; None unsets one."""
    return " ".join(f"model.{key}={'null' if value is None else f'{value:g}'}" for key, value in values.items())


def _widths(config: RunConfig, multiple: int) -> Iterator[Finding]:
    """Find widths that FP8 cannot multiply, unless another finding is the cause."""
    model = config.model
    reason = f"{products(config)} need a multiple of {multiple}"
    if model.n_embd % multiple:
        remedy = f"model.n_embd={_fitting_width(model, multiple)}, or {in_bf16(config)}"
        yield _finding(model, "n_embd", reason, remedy)
    if (model.mlp_width or multiple) % multiple:
        assert model.mlp_width is not None
        remedy = f"model.mlp_width={nearest(model.mlp_width, multiple)}, or {in_bf16(config)}"
        yield _finding(model, "mlp_width", reason, remedy)
    size = model.head_size if model.n_embd % multiple else _head_size(model)  # else the width decides it
    if not size or (size % 2 and model.positions == "rope"):
        return
    for heads, of in ((model.n_head, "queries"), (2 * _key_value_heads(model, multiple), "keys and values")):
        if heads * size % multiple:
            keys = "n_head head_size" if of == "queries" else "n_kv_head head_size"
            remedy = f"model.head_size={_fitting_size(model, multiple, size)}, or {in_bf16(config)}"
            yield _finding(model, keys, f"{reason}, and the {of} have {heads * size} channels", remedy)
            return


def _head_size(model: ModelConfig) -> int | None:
    """Return the channels of a head; None if the heads do not share n_embd, which is told by itself."""
    return model.head_size or (None if model.n_embd % model.n_head else model.n_embd // model.n_head)


def width_multiple(config: RunConfig) -> int:
    """Return what every width, and the tokens of a sequence, must be a multiple of."""
    return recipe_multiple(config.recipe.name) if isinstance(config.precision, FP8PrecisionConfig) else 1


def recipe_multiple(recipe: str) -> int:
    """Return what both dimensions of every matrix in FP8 must be a multiple of under a recipe."""
    return _MULTIPLES.get(recipe, FP8_MULTIPLE)


def products(config: RunConfig) -> str:
    """Name the matrix products of a run in FP8, with the recipe if it needs more than the others."""
    name = config.recipe.name
    return f"the FP8 matrix products of recipe={name}" if name in _MULTIPLES else "FP8 matrix products"


def in_bf16(config: RunConfig) -> str:
    """Return what is typed for bf16 in place of FP8; layers that are for FP8 alone are not kept."""
    only_fp8 = asked(config) in ("fused", "torchao", "emulated")
    return f"precision=bf16{' precision.backend=auto' if only_fp8 else ''}"


def nearest(value: int, multiple: int) -> int:
    """Return the multiple that is nearest to a value, and not 0."""
    return max(1, round(value / multiple)) * multiple


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor up to `most`; of a number beyond 10^12, of those with a factor up to a million."""
    return max(_divisors(number, most))


def _divisors(number: int, most: int) -> list[int]:
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    return [d for one in small for d in (one, number // one) if d <= most]


def _finding(model: ModelConfig, keys: str, reason: str, remedy: str) -> Finding:
    return finding(model, keys, reason, remedy, "model.")
