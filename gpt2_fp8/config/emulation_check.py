"""Which words of `precision.emulate` have no effect, and which words beside it, in a run with the emulated layers.

A mistake may have several ways out. One is named if it mends that mistake and makes no new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpt2_fp8.config import emulation, kept_layers
from gpt2_fp8.config.errors import Finding, Problem
from gpt2_fp8.config.kept_layers import every_layer, fits_nothing, kept
from gpt2_fp8.config.keys import show
from gpt2_fp8.config.precision_schema import IN_BACKWARD, OF_HEAD, Emulate, FP8PrecisionConfig

_EMULATE, _BACKWARD, _KEEP = "precision.emulate", "precision.backward", kept_layers.KEY
_HEAD = ["head"]


class _Wrong(NamedTuple):
    """What has no effect, by the other word of which that follows."""

    in_backward: Sequence[str]  # operands, by `backward`
    idle_backward: Sequence[str]  # `backward` itself
    twice: Sequence[str]  # operands of the head, by `head`
    in_vain: Sequence[str]  # operands, by `keep_bf16`
    idle_kept: Sequence[str]  # names of layers, by `emulate`


class _Way(NamedTuple):
    """What to type or to leave out, and what comes of it."""

    typed: str
    precision: FP8PrecisionConfig


def check(precision: FP8PrecisionConfig, n_layer: int) -> Iterator[Finding]:
    """Find words that another word of a run with the emulated layers leaves without effect. `emulate` is a list."""
    wrong = _wrong(precision, n_layer)
    in_fp8 = _Way(f"add {_BACKWARD}=fp8", replace(precision, backward="fp8"))
    if wrong.in_backward:
        ways = [_without(precision, n_layer, wrong.in_backward), in_fp8]
        remedy = ", or ".join(_accepted(precision, n_layer, ways))
        yield _finding((_EMULATE, _BACKWARD), _in_backward(wrong.in_backward[0], precision.backward), remedy)
    if wrong.idle_backward:
        cause = f"{_BACKWARD}={precision.backward} changes no operand of {_EMULATE}={show(precision.emulate)}"
        yield _finding((_BACKWARD, _EMULATE), cause, in_fp8.typed)
    if wrong.twice:
        cause = f"{_EMULATE} names head and {wrong.twice[0]}, and head is all operands of the head"
        ways = [_without(precision, n_layer, names, ", ".join(names)) for names in (_HEAD, wrong.twice)]
        yield _finding((_EMULATE,), cause, f"leave out {', or '.join(_accepted(precision, n_layer, ways))}")
    if wrong.in_vain:
        what = "the head" if emulation.is_of_head(wrong.in_vain[0]) else "every block"
        cause = f"{_EMULATE} names {wrong.in_vain[0]}, and {_KEEP}={show(precision.keep_bf16)} keeps {what} in bf16"
        ways = [_without(precision, n_layer, wrong.in_vain), _keeping_less(precision, n_layer)]
        yield _finding((_EMULATE, _KEEP), cause, ", or ".join(_accepted(precision, n_layer, ways)))
    elif wrong.idle_kept:
        cause = f"{_KEEP} names {wrong.idle_kept[0]}, where {_EMULATE}={show(precision.emulate)} has no operand"
        way = _keeping_less(precision, n_layer)
        yield _finding((_KEEP, _EMULATE), cause, way.typed if way.precision.keep_bf16 else f"leave {_KEEP} out")


def _wrong(precision: FP8PrecisionConfig, n_layer: int) -> _Wrong:
    names, keep, backward = _names(precision), precision.keep_bf16, precision.backward
    in_backward = emulation.without_backward(names, backward)
    idle = not in_backward and not emulation.is_changed_by(backward, names)
    twice = [name for name in names if name.startswith(OF_HEAD)] if "head" in names else []
    in_vain = emulation.in_vain(names, kept(keep, n_layer)) if _is_known(precision, n_layer) else []
    idle_kept = emulation.idle(names, keep, n_layer) if _is_known(precision, n_layer) else []
    return _Wrong(in_backward, [backward] if idle else [], twice, in_vain, idle_kept)


def _is_known(precision: FP8PrecisionConfig, n_layer: int) -> bool:
    """Return whether `keep_bf16` is right by itself. Else `kept_check` says it."""
    names = precision.keep_bf16
    return not every_layer(kept(names, n_layer)) and not any(fits_nothing(name, n_layer) for name in names)


def _accepted(precision: FP8PrecisionConfig, n_layer: int, ways: Sequence[_Way]) -> Iterator[str]:
    """Yield what is typed for those ways that leave less wrong than there was, and nothing new."""
    before = _kinds(precision, n_layer)
    yield from (way.typed for way in ways if _kinds(way.precision, n_layer) < before)


def _kinds(precision: FP8PrecisionConfig, n_layer: int) -> set[str]:
    return {kind for kind, found in _wrong(precision, n_layer)._asdict().items() if found}


def _without(precision: FP8PrecisionConfig, n_layer: int, names: Sequence[str], typed: str | None = None) -> _Way:
    """Return the way that leaves operands out, and the names of layers that are idle without these."""
    rest, keep = [name for name in _names(precision) if name not in names], precision.keep_bf16
    wrong = _wrong(precision, n_layer)
    typed = typed or f"leave {', '.join(names)} out of {_EMULATE}"
    told = [] if wrong.in_vain else wrong.idle_kept
    less = [name for name in keep if name in told or name not in emulation.idle(rest, keep, n_layer)]
    if _is_known(precision, n_layer) and less != keep:
        typed, keep = f"{typed} and add {kept_layers.typed(less)}", less
    return _Way(typed, replace(precision, emulate=rest, keep_bf16=keep))


def _keeping_less(precision: FP8PrecisionConfig, n_layer: int) -> _Way:
    less = emulation.kept_beside(_names(precision), precision.keep_bf16, n_layer)
    return _Way(kept_layers.typed(less), replace(precision, keep_bf16=less))


def _names(precision: FP8PrecisionConfig) -> list[Emulate]:
    return list(dict.fromkeys(precision.emulate or []))


def _in_backward(name: str, backward: str) -> str:
    if name in IN_BACKWARD[backward]:
        return f"{_EMULATE} names {name}, which {_BACKWARD}={backward} keeps in bf16"
    return f"{_EMULATE} names {name}, and {_BACKWARD}={backward} takes that operand as the forward has it"


def _finding(keys: tuple[str, ...], cause: str, remedy: str) -> Finding:
    return Finding(keys, Problem(cause, remedy))
