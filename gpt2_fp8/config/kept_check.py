"""What is wrong with the layers that `precision.keep_bf16` names."""

from __future__ import annotations

from collections.abc import Iterator

from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.kept_layers import KEY, every_layer, fits_nothing, kept
from gpt2_fp8.config.keys import finding, show
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig
from gpt2_fp8.config.schema import RunConfig


def check(config: RunConfig) -> Iterator[Finding]:
    """Find names that are of no layer, and names that leave no layer in FP8."""
    precision, n_layer = config.precision, config.model.n_layer
    if not isinstance(precision, FP8PrecisionConfig):
        return
    for name in precision.keep_bf16:
        if fits_nothing(name, n_layer):
            reason = f"there is no layer {show(name)} in a model of {n_layer} blocks"
            remedy = f"head, first, last, first:2, blocks.0 to blocks.{n_layer - 1}, or a part such as blocks.*.mlp"
            yield finding(config, KEY, reason, remedy)
    if every_layer(kept(precision.keep_bf16, n_layer)):
        yield finding(config, KEY, f"it keeps every layer in bf16; precision={precision.name} needs one in FP8")
