"""Which kernels compute the fused layers at a run's shapes, and why not the faster ones.

Each answer follows the function that decides: `product_gelu.fits`, `head_chunks.has_probabilities`,
`layer_norm_rows.fits`, `cast_lines.fits`. Attention's kernels are told by `layers.attention`.
"""

from __future__ import annotations

from gpt2_fp8.compat.flash_attn import NOT_INSTALLED
from gpt2_fp8.config.block_spec import BlockSpec
from gpt2_fp8.kernels import nvrtc, shapes
from gpt2_fp8.kernels.probability_grid import EXPONENT, GRADIENT, GRADIENT_SCALE
from gpt2_fp8.layers import attention


def chosen(rows: int, spec: BlockSpec, padded_vocab_size: int) -> dict[str, str]:
    """Describe the kernel of each part of the fused layers but attention, by the part.

    `rows`: of a micro-batch, sequences times tokens. `padded_vocab_size`: rows of the embedding.
    """
    missing, n_embd = nvrtc.missing() is not None, spec.n_embd
    gelu = shapes.why_no_product(rows, spec.mlp.width, n_embd)
    if missing or n_embd > shapes.WIDEST_COLUMNS:
        norm = "in Triton, over tiles" + ("" if missing else f" (rows are wider than {shapes.WIDEST_COLUMNS:,})")
    else:
        norm = "in CUDA C++, over rows"
    return {
        "gelu": _product("inside its GEMMs", "outside its GEMMs, in Triton", gelu, missing),
        "logits": _logits(rows, padded_vocab_size, n_embd, missing),
        "normalisation": norm,
        "casts": f"in {'Triton' if missing else 'CUDA C++'}",
    }


def head_factor(rows: int, padded_vocab_size: int, n_embd: int) -> float:
    """Return what multiplies the gradient of the logits before its cast: see `fp8.base.Backend.head_factor`."""
    has_logits = nvrtc.missing() is not None or shapes.why_logits(rows, padded_vocab_size, n_embd) is not None
    return GRADIENT_SCALE[GRADIENT] if has_logits else 2.0**EXPONENT


def slower() -> list[str]:
    """List what is missing or broken on this machine, so that slower kernels do its work."""
    flash = attention.why_no_flash()
    return [reason for reason in (nvrtc.missing(), None if flash == NOT_INSTALLED else flash) if reason]


def _logits(rows: int, padded_vocab_size: int, n_embd: int, missing: bool) -> str:
    """Describe training's logits. Those of an evaluation are in bfloat16, and stored."""
    why_no_statistics = shapes.why_no_product(rows, padded_vocab_size, n_embd)
    if missing or why_no_statistics:
        return _because("without their statistics", why_no_statistics)
    why_stored = shapes.why_logits(rows, padded_vocab_size, n_embd)
    return _product("never in memory", "with their statistics", why_stored, missing)


def _product(fused: str, otherwise: str, why_not: str | None, missing: bool) -> str:
    if why_not is None and not missing:
        return fused
    return _because(otherwise, why_not)


def _because(what: str, why: str | None) -> str:
    return what + (f" ({why})" if why else "")
