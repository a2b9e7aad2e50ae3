"""Keys of `model` that must fit each other, and its widths that must fit FP8. Nothing here looks at the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpt2_fp8.config import bf16_instead, model_fits
from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.keys import finding
from gpt2_fp8.config.model_fits import head_size, key_value_heads, nearest
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
        yield _finding(model, "n_head n_kv_head", reason, f"model.n_kv_head={key_value_heads(model, multiple)}")
    yield from _rope(model, multiple)
    yield from _widths(config, multiple)


def _unequal_heads(model: ModelConfig, multiple: int) -> Finding:
    ways = [_width(model, multiple)]
    if (fitting := model_fits.heads(model, multiple)) and model.n_embd % multiple == 0:
        ways.append(f"model.n_head={fitting}")
    return _finding(model, "n_embd n_head", "the heads share n_embd in equal parts", ", or ".join(ways))


def _width(model: ModelConfig, multiple: int) -> str:
    """Return the words of the nearest width. A head size that says what the width says goes with it."""
    width = model_fits.width(model, multiple)
    goes_with_it = model.head_size is not None and model_fits.shares_width(model)
    return f"model.n_embd={width}" + (f" model.head_size={width // model.n_head}" if goes_with_it else "")


def _rope(model: ModelConfig, multiple: int) -> Iterator[Finding]:
    """Find keys of RoPE that do nothing, or not enough."""
    if model.positions != "rope":
        yield from _no_rotations(model, multiple)
        return
    size = head_size(model)
    if size and size % 2:
        keys = "positions n_embd n_head" if model.head_size is None else "positions head_size"
        reason = f"RoPE turns pairs of channels, and a head has {size}"
        yield _finding(model, keys, reason, f"model.head_size={model_fits.size(model, multiple, size)}")
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
        yield _finding(model, "n_embd", reason, or_in_bf16(config, _width(model, multiple)))
    if (model.mlp_width or multiple) % multiple:
        assert model.mlp_width is not None
        remedy = or_in_bf16(config, f"model.mlp_width={nearest(model.mlp_width, multiple)}")
        yield _finding(model, "mlp_width", reason, remedy)
    if model.n_embd % multiple and model_fits.shares_width(model):  # which decides the size of a head
        return
    size = head_size(model)
    if not size or (size % 2 and model.positions == "rope"):
        return
    for heads, of in ((model.n_head, "queries"), (2 * key_value_heads(model, multiple), "keys and values")):
        if heads * size % multiple:
            keys = "n_head head_size" if of == "queries" else "n_kv_head head_size"
            remedy = or_in_bf16(config, f"model.head_size={model_fits.size(model, multiple, size)}")
            yield _finding(model, keys, f"{reason}, and the {of} have {heads * size} channels", remedy)
            return


def width_multiple(config: RunConfig) -> int:
    """Return what every width, and the tokens of a sequence, must be a multiple of."""
    in_fp8 = isinstance(config.precision, FP8PrecisionConfig)
    return _MULTIPLES.get(config.recipe.name, FP8_MULTIPLE) if in_fp8 else 1


def products(config: RunConfig) -> str:
    """Name the matrix products of a run in FP8, with the recipe if it needs more than the others."""
    name = config.recipe.name
    return f"the FP8 matrix products of recipe={name}" if name in _MULTIPLES else "FP8 matrix products"


def or_in_bf16(config: RunConfig, words: str) -> str:
    """Return what is typed for a shape that fits FP8, and for bf16 if that is another way out."""
    return ", or ".join(filter(None, [words, bf16_instead.words(config)]))


def _finding(model: ModelConfig, keys: str, reason: str, remedy: str) -> Finding:
    return finding(model, keys, reason, remedy, "model.")
