"""Our precision and recipe as torchao's `Float8LinearConfig`, operand by operand.

torchao's own recipes are three of these: `tensorwise` is current scaling with fp8_hybrid, `rowwise` is row-wise scaling
with fp8_e4m3, and `rowwise_with_gw_hp` is that with `backward=bf16_wgrad`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from gpt2_fp8.config.schema import FP8PrecisionConfig
from gpt2_fp8.precision.recipes import formats


def float8_config(precision: FP8PrecisionConfig, recipe: str, head: bool = False, emulate: bool = False) -> Any:
    """Build the `Float8LinearConfig` of the blocks' products, or of the head's.

    Args:
        recipe: "current" (one scale a tensor) or "rowwise" (one a row of each operand, a power of two).
        head: the head's gradient is E5M2 in either precision.
        emulate: compute the products in high precision from FP8's numbers, on any device; for tests.
    """
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType

    rowwise = {"current": False, "rowwise": True}[recipe]
    forward, gradient = formats(precision)
    gradient = torch.float8_e5m2 if head else gradient
    tensor, row = ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE

    def cast(dtype: torch.dtype, by_row: bool = rowwise, on: bool = True) -> Any:
        kind = ScalingType.DYNAMIC if on else ScalingType.DISABLED
        return CastConfig(scaling_type=kind, scaling_granularity=row if by_row and on else tensor, target_dtype=dtype)

    dgrad, wgrad = precision.backward != "bf16", precision.backward == "fp8"
    return Float8LinearConfig(
        cast_config_input=cast(forward),
        cast_config_weight=cast(forward),
        cast_config_weight_for_grad_input=cast(forward, rowwise and wgrad, on=dgrad),
        cast_config_grad_output=cast(gradient, on=dgrad),
        cast_config_input_for_grad_weight=cast(forward, on=wgrad),
        cast_config_grad_output_for_grad_weight=cast(gradient, on=wgrad),
        round_scales_to_power_of_2=rowwise,
        emulate=emulate,
    )


def weight_dtype(precision: FP8PrecisionConfig) -> torch.dtype | None:
    """Return what weights are converted to before their product; None: they stay float32 until they are cast to FP8.

    A backward in bfloat16 multiplies with the weight itself.
    """
    return torch.bfloat16 if precision.backward == "bf16" else None


def convert_linears(module: nn.Module, config: Any, names: Collection[str]) -> None:
    """Put torchao's float8 layers in the place of the `nn.Linear` of these names. They hold the same parameters."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name in names)
