"""What the emulated layers cast to FP8: which words of `precision.emulate` have an effect, and which beside it."""

from __future__ import annotations

from collections.abc import Iterable

from gpt2_fp8.config.kept_layers import Kept, every_block, kept
from gpt2_fp8.config.precision_schema import EMULATABLE, EMULATED, IN_BACKWARD, OF_HEAD, FP8PrecisionConfig

_OF_NO_LAYER = "residual"  # it casts nothing by itself, and has an effect wherever layers are kept
_FORWARD, _FOLLOWS = "fprop_input", "wgrad_input"  # under backward=bf16 the second is what the first has made


def switches(precision: FP8PrecisionConfig) -> list[str]:
    """Return the operands that are asked for, less those of a backward in bf16; each once, in their own order."""
    wanted = EMULATED if precision.emulate is None else precision.emulate
    in_bf16 = IN_BACKWARD[precision.backward]
    return [name for name in EMULATABLE if name in wanted and name not in in_bf16]


def effective(precision: FP8PrecisionConfig, n_layer: int) -> list[str]:
    """Return those of `switches` that have a layer, in a model of `n_layer` blocks: some layers are kept in bf16."""
    without = in_vain(switches(precision), kept(precision.keep_bf16, n_layer))
    return [name for name in switches(precision) if name not in without]


def in_vain(names: Iterable[str], kept: Kept) -> list[str]:
    """Return the operands of which no layer is left that computes in FP8."""
    blocks = every_block(kept)
    return [name for name in names if name != _OF_NO_LAYER and (kept.head if is_of_head(name) else blocks)]


def without_backward(names: Iterable[str], backward: str) -> list[str]:
    """Return the operands that a backward leaves without effect: those in bf16, and those that follow another one."""
    followers = (_FOLLOWS, OF_HEAD + _FOLLOWS) if backward == "bf16" else ()
    return [name for name in names if name in IN_BACKWARD[backward] or name in followers]


def is_changed_by(backward: str, names: Iterable[str]) -> bool:
    """Return whether a backward makes a difference to operands of which it leaves none without effect."""
    asked = set(names)
    return backward == "fp8" or "head" in asked or (backward == "bf16" and bool({_FORWARD, OF_HEAD + _FORWARD} & asked))


def is_of_head(name: str) -> bool:
    """Return whether an operand is the head's."""
    return name == "head" or name.startswith(OF_HEAD)
