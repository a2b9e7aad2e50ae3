"""What the emulated layers cast to FP8: the words of `precision.emulate` that have an effect, and those that cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.kept_layers import Kept, every_block, every_layer, keeping_less, kept
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.precision_schema import EMULATABLE, EMULATED, IN_BACKWARD, OF_HEAD, FP8PrecisionConfig

EMULATE = "precision.emulate"
_OF_NO_LAYER = "residual"  # it casts nothing by itself, and has an effect wherever layers are kept


def switches(precision: FP8PrecisionConfig) -> list[str]:
    """Return the operands that are asked for, less those of a backward in bf16; each once, in their own order."""
    wanted = EMULATED if precision.emulate is None else precision.emulate
    in_bf16 = IN_BACKWARD[precision.backward]
    return [name for name in EMULATABLE if name in wanted and name not in in_bf16]


def effective(precision: FP8PrecisionConfig, n_layer: int) -> list[str]:
    """Return those of `switches` that have a layer, in a model of `n_layer` blocks: some layers are kept in bf16."""
    without = _in_vain(switches(precision), kept(precision.keep_bf16, n_layer))
    return [name for name in switches(precision) if name not in without]


def check(precision: FP8PrecisionConfig, n_layer: int) -> Iterator[Finding]:
    """Find words of `precision.emulate` that another word of a run with the emulated layers leaves without effect."""
    typed: list[str] = list(dict.fromkeys(precision.emulate or []))
    if in_backward := [name for name in typed if name in IN_BACKWARD[precision.backward]]:
        cause = f"names {in_backward[0]}, which precision.backward={precision.backward} keeps in bf16"
        yield _finding("precision.backward", cause, f"{_leave_out(in_backward)}, or add precision.backward=fp8")
    if "head" in typed and (twice := [name for name in typed if name.startswith(OF_HEAD)]):
        cause = f"names head and {twice[0]}, and head is all operands of the head"
        yield _finding(None, cause, f"leave out head, or {', '.join(twice)}")
    yield from _of_kept_layers([name for name in typed if name not in in_backward], precision.keep_bf16, n_layer)


def _of_kept_layers(names: Sequence[str], keep_bf16: list[str], n_layer: int) -> Iterator[Finding]:
    in_bf16 = kept(keep_bf16, n_layer)
    in_vain = _in_vain(names, in_bf16)
    if not in_vain or every_layer(in_bf16):  # the latter is no matter of `emulate`: see `kept_check`
        return
    of_head = [name for name in in_vain if _is_of_head(name)]
    what = "the head" if in_vain[0] in of_head else "every block"
    cause = f"names {in_vain[0]}, and precision.keep_bf16={show(keep_bf16)} keeps {what} in bf16"
    less = keeping_less(keep_bf16, n_layer, blocks=len(of_head) < len(in_vain), head=bool(of_head))
    yield _finding("precision.keep_bf16", cause, f"{_leave_out(in_vain)}, or precision.keep_bf16='[{','.join(less)}]'")


def _in_vain(names: Sequence[str], kept: Kept) -> list[str]:
    """Return the operands of which no layer is left that computes in FP8."""
    blocks = every_block(kept)
    return [name for name in names if name != _OF_NO_LAYER and (kept.head if _is_of_head(name) else blocks)]


def _is_of_head(name: str) -> bool:
    return name == "head" or name.startswith(OF_HEAD)


def _leave_out(names: Sequence[str]) -> str:
    return f"leave {', '.join(names)} out of {EMULATE}"


def _finding(other: str | None, cause: str, remedy: str) -> Finding:
    keys = (EMULATE, other) if other else (EMULATE,)
    return Finding(keys, Problem(f"{EMULATE} {cause}", remedy))
