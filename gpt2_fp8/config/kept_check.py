"""What is wrong with the layers that `precision.keep_bf16` names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from gpt2_fp8.config.errors import Finding
from gpt2_fp8.config.kept_layers import KEY, every_layer, fits_nothing, keeping_less, kept, meant, typed
from gpt2_fp8.config.keys import finding, show
from gpt2_fp8.config.precision_schema import FP8PrecisionConfig
from gpt2_fp8.config.schema import RunConfig


def check(config: RunConfig) -> Iterator[Finding]:
    """Find names that are of no layer, and names that leave no layer in FP8."""
    precision, n_layer = config.precision, config.model.n_layer
    if not isinstance(precision, FP8PrecisionConfig):
        return
    names = precision.keep_bf16
    for name in names:
        if fits_nothing(name, n_layer):
            reason = f"there is no layer {show(name)} in a model of {n_layer} blocks"
            blocks = f"blocks.0 to blocks.{n_layer - 1}"
            ways = f"name head, first, last, first:2, {blocks}, or a part such as blocks.*.mlp"
            likely = _instead(names, n_layer)
            yield finding(config, KEY, reason, f"{ways}: {typed(likely)}" if likely else f"leave {KEY} out")
    if every_layer(kept(names, n_layer)):
        reason = f"it keeps every layer in bf16, as precision=bf16 does; precision={precision.name} needs one in FP8"
        yield finding(config, KEY, reason, f"leave {KEY} out")


def _instead(names: list[str], n_layer: int) -> list[str]:
    """Return the list with names that fit nothing as what they most likely mean; an example if that is not known."""
    likely = [[name] if not fits_nothing(name, n_layer) else meant(name, n_layer) for name in names]
    found = list(dict.fromkeys(chain.from_iterable(likely))) if all(likely) else ["head", "last"]
    return keeping_less(found, n_layer, blocks=True, head=False) if every_layer(kept(found, n_layer)) else found
