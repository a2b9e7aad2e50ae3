"""Our configuration as Transformer Engine's recipe, or as the settings of the fused and emulated layers.

The conversion is strict, because Transformer Engine's constructors ignore unknown keys.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from gpt2_fp8.config.schema import DelayedRecipe, FP8PrecisionConfig, StatelessRecipe
from gpt2_fp8.layers.delayed_scaling import DelayedScaling


def build_recipe(precision: FP8PrecisionConfig, recipe: DelayedRecipe | StatelessRecipe) -> Any:
    """Build the run's `transformer_engine.common.recipe.Recipe`: formats, and how each tensor gets its FP8 scale."""
    from transformer_engine.common import recipe as te

    formats = {"fp8_hybrid": te.Format.HYBRID, "fp8_e4m3": te.Format.E4M3}
    fp8_format = formats[precision.name]
    if isinstance(recipe, DelayedRecipe):
        return te.DelayedScaling(
            margin=recipe.margin,
            fp8_format=fp8_format,
            amax_history_len=recipe.amax_history_len,
            amax_compute_algo=recipe.amax_compute_algo,
            reduce_amax=False,  # ranks agree at the end of a step: see `state.agree`
        )
    classes = {"current": te.Float8CurrentScaling, "block": te.Float8BlockScaling, "mxfp8": te.MXFP8BlockScaling}
    # Its "high_precision" multiplies the weights as they are, and cuBLAS has no float32 x bfloat16 (seen with 2.20.2).
    override = "dequantized" if precision.backward == "bf16" else None
    return classes[recipe.name](fp8_format=fp8_format, backward_override=override)


def region(recipe: Any) -> AbstractContextManager[None]:
    """Return the region in which Transformer Engine's layers compute in FP8 by one of its recipes."""
    import transformer_engine.pytorch

    return transformer_engine.pytorch.autocast(enabled=True, recipe=recipe)


def delayed_scaling(precision: FP8PrecisionConfig, recipe: DelayedRecipe) -> DelayedScaling:
    """Return the settings of delayed scaling for the fused and the emulated layers."""
    forward, gradient = formats(precision)
    return DelayedScaling(
        history=recipe.amax_history_len,
        margin=recipe.margin,
        most_recent=recipe.amax_compute_algo == "most_recent",
        forward=forward,
        gradient=gradient,
        fast_accumulation=precision.fast_accumulation,
    )


def formats(precision: FP8PrecisionConfig) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of activations and weights, and that of gradients."""
    return torch.float8_e4m3fn, torch.float8_e5m2 if precision.name == "fp8_hybrid" else torch.float8_e4m3fn
