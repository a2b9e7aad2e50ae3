"""Our configuration as Transformer Engine's recipe, as torchao's, or as settings of the fused and emulated layers.

The conversion is strict, because Transformer Engine's constructors ignore unknown keys.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.config.schema import DelayedRecipe, FP8PrecisionConfig, RegisteredRecipe, StatelessRecipe
from gpt2_fp8.kernels.formats import HEAD_GRADIENT
from gpt2_fp8.layers import fp8_cast
from gpt2_fp8.layers.delayed_scaling import DelayedScaling
from gpt2_fp8.layers.emulated import Emulation
from gpt2_fp8.runtime import registry

Recipe = DelayedRecipe | StatelessRecipe | RegisteredRecipe


def build_recipe(precision: FP8PrecisionConfig, recipe: Recipe) -> Any:
    """Build the run's `transformer_engine.common.recipe.Recipe`: formats, and how each tensor gets its FP8 scale."""
    from transformer_engine.common import recipe as te

    if isinstance(recipe, RegisteredRecipe):
        made = registry.make("recipe.factory", recipe.factory, te.Recipe, precision)
        if isinstance(made, te.DelayedScaling):
            raise UserError.of(
                f"recipe.factory={recipe.factory} makes delayed scaling, whose scales would not be saved",
                "recipe=delayed",
            )
        return made
    formats = {"fp8_hybrid": te.Format.HYBRID, "fp8_e4m3": te.Format.E4M3}
    fp8_format = formats[precision.name]
    if isinstance(recipe, DelayedRecipe):
        return te.DelayedScaling(
            margin=recipe.margin,
            fp8_format=fp8_format,
            amax_history_len=recipe.amax_history_len,
            amax_compute_algo=recipe.amax_compute_algo,
            reduce_amax=False,  # ranks agree at the end of a step: see `FP8Scaling.agree`
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


def emulation(precision: FP8PrecisionConfig, recipe: Recipe) -> tuple[Emulation, DelayedScaling | None]:
    """Return how the emulated layers cast their operands, and the settings of delayed scaling if it is their recipe."""
    delayed = delayed_scaling(precision, recipe) if isinstance(recipe, DelayedRecipe) else None
    return Emulation(cast("fp8_cast.Recipe", recipe.name), *formats(precision), precision.backward), delayed


def formats(precision: FP8PrecisionConfig) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of activations and weights, and that of gradients."""
    return torch.float8_e4m3fn, torch.float8_e5m2 if precision.name == "fp8_hybrid" else torch.float8_e4m3fn


def float8_config(precision: FP8PrecisionConfig, recipe: str, head: bool = False, emulate: bool = False) -> Any:
    """Build torchao's `Float8LinearConfig` of the blocks' products, or of the head's, operand by operand.

    torchao's own recipes are three of these: `tensorwise` is current scaling with fp8_hybrid, `rowwise` is row-wise
    scaling with fp8_e4m3, and `rowwise_with_gw_hp` is that with `backward=bf16_wgrad`.

    Args:
        recipe: "current" (one scale a tensor) or "rowwise" (one a row of each operand, a power of two).
        head: the head's gradient is E5M2 in either precision.
        emulate: compute the products in high precision from FP8's numbers, on any device; for tests.
    """
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType

    rowwise = {"current": False, "rowwise": True}[recipe]
    forward, gradient = formats(precision)
    gradient = HEAD_GRADIENT if head else gradient
    tensor, row = ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE

    def operand(dtype: torch.dtype, by_row: bool = rowwise, on: bool = True) -> Any:
        kind = ScalingType.DYNAMIC if on else ScalingType.DISABLED
        return CastConfig(scaling_type=kind, scaling_granularity=row if by_row and on else tensor, target_dtype=dtype)

    dgrad, wgrad = precision.backward != "bf16", precision.backward == "fp8"
    return Float8LinearConfig(
        cast_config_input=operand(forward),
        cast_config_weight=operand(forward),
        cast_config_weight_for_grad_input=operand(forward, rowwise and wgrad, on=dgrad),
        cast_config_grad_output=operand(gradient, on=dgrad),
        cast_config_input_for_grad_weight=operand(forward, on=wgrad),
        cast_config_grad_output_for_grad_weight=operand(gradient, on=wgrad),
        round_scales_to_power_of_2=rowwise,
        emulate=emulate,
    )


def convert_linears(module: nn.Module, config: Any, names: Collection[str]) -> None:
    """Put torchao's float8 layers in the place of the `nn.Linear` of these names. They hold the same parameters."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in names)
