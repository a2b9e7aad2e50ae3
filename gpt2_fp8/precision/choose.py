"""Which of the measured precisions to train in: the fastest one that is safe.

This module only computes; it does not look at the machine.

Safe means: every loss and every gradient norm is finite, no gradient has vanished, and both agree with bf16's. They are
compared at the same steps, with the same text and initial values. Among equal speeds, the more precise candidate is
chosen: FP8 that gains nothing, as on small models, should not cost precision.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

LAST_STEPS = 5  # the last steps, whose mean losses are compared
GRADIENT_TOLERANCE = 0.25  # largest relative difference of the median step's gradient norm from bf16's
LEAST_GAIN = 0.02  # a smaller gain in speed does not count
NOISE = 0.1  # a larger gain in speed cannot be noise


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one candidate. A number is None if the measurement ended before it."""

    precision: str  # bf16 or fp8_hybrid
    recipe: str | None  # None: nothing is scaled
    problem: str | None = None  # why there are no numbers; None: there are
    layers: str | None = None  # what computed them
    tokens_per_second: float | None = None  # of the median step
    fastest: float | None = None  # of the fastest step
    peak_memory_gb: float | None = None
    losses: Sequence[float] = ()  # of each step, from the first
    grad_norms: Sequence[float] = ()

    @property
    def name(self) -> str:
        """The candidate's name in the log."""
        return f"{self.precision}, recipe {self.recipe}" if self.recipe else self.precision


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One candidate, as the summary reports it."""

    precision: str
    recipe: str | None
    layers: str | None
    tokens_per_second: float | None
    peak_memory_gb: float | None
    loss: float | None  # the mean of the last steps
    out: str | None  # why it could not be chosen; None if it could


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What to train in, and why, in one line."""

    precision: str  # fp32, bf16 or fp8_hybrid
    recipe: str | None  # None: nothing is scaled
    reason: str
    measured_on: str | None = None  # the day, as YYYY-MM-DD; None: nothing was measured
    candidates: list[Verdict] = field(default_factory=list)


def choose(bf16: Figures, others: Sequence[Figures], tolerance: float) -> Choice:
    """Choose between bf16 and its competitors, which are ordered from the most precise on.

    `tolerance`: the largest relative difference of the mean of the last losses from bf16's. If bf16 does not fit into
    memory, nothing can be compared with it, and a competitor only has to be finite.
    """
    verdicts = [_judge(figures, bf16, tolerance) for figures in (bf16, *others)]
    able = [f for f, v in zip((bf16, *others), verdicts, strict=True) if v.out is None]
    best = _fastest(able) if able else bf16
    if best is bf16:
        rival = max((f for f in able if f is not bf16), key=_speed, default=None)
        reason = _kept(bf16, verdicts[0].out, rival)
    elif bf16.tokens_per_second:
        reason = f"{_rate(best)} tokens/s against {_rate(bf16)} in bf16"
    else:
        reason = f"{_rate(best)} tokens/s, and bf16 does not run here ({bf16.problem})"
    outs = [f"{f.name} is out: {v.out}" for f, v in zip(others, verdicts[1:], strict=True) if v.out]
    return Choice(precision=best.precision, recipe=best.recipe, reason="; ".join([reason, *outs]), candidates=verdicts)


def _judge(figures: Figures, bf16: Figures, tolerance: float) -> Verdict:
    return Verdict(
        precision=figures.precision,
        recipe=figures.recipe,
        layers=figures.layers,
        tokens_per_second=figures.tokens_per_second,
        peak_memory_gb=figures.peak_memory_gb,
        loss=statistics.fmean(figures.losses[-LAST_STEPS:]) if figures.losses else None,
        out=_not_finite(figures) or (_differs(figures, bf16, tolerance) if figures is not bf16 else None),
    )


def _not_finite(figures: Figures) -> str | None:
    """Return why a candidate's numbers cannot be used, whatever bf16's are; None if they can."""
    if figures.problem or not (figures.tokens_per_second and figures.losses and figures.grad_norms):
        return figures.problem or "it gave no figures"
    for what, values in (("loss", figures.losses), ("gradient norm", figures.grad_norms)):
        for step, value in enumerate(values, start=1):
            if not math.isfinite(value):
                return f"its {what} is not finite in step {step}"
    if not all(figures.grad_norms):
        return f"its gradients are 0 in step {list(figures.grad_norms).index(0) + 1}"
    return None


def _differs(figures: Figures, bf16: Figures, tolerance: float) -> str | None:
    """Return why finite numbers do not agree with those of bf16; None if they do."""
    if bf16.problem == "out of memory":
        return None
    if _not_finite(bf16):
        return "there is nothing of bf16's to compare its numbers with"
    theirs, ours = (statistics.fmean(f.losses[-LAST_STEPS:]) for f in (figures, bf16))
    if (gap := abs(theirs - ours) / max(abs(ours), 1e-9)) > tolerance:
        return f"its losses end {gap:.1%} from bf16's, and {tolerance:.1%} is allowed"
    ratio = statistics.median(a / b for a, b in zip(figures.grad_norms, bf16.grad_norms, strict=False))
    if abs(ratio - 1) > GRADIENT_TOLERANCE:
        return f"its gradient norms are {ratio:.2f} times bf16's"
    return None


def _fastest(able: Sequence[Figures]) -> Figures:
    """Return the most precise of the candidates that are as fast as the fastest, within noise.

    Either their median step nearly reaches the fastest median, or at least their best step does.
    """
    top = max(map(_speed, able))
    ties = [f for f in able if _speed(f) >= (1 - NOISE) * top and (f.fastest or 0) >= top]
    return next(f for f in able if f in ties or _speed(f) >= (1 - LEAST_GAIN) * top)


def _kept(bf16: Figures, out: str | None, rival: Figures | None) -> str:
    """Say why bf16 is kept."""
    if out:
        return f"nothing could be shown to be better; bf16's own measurement: {out}"
    if rival is None:
        return f"{_rate(bf16)} tokens/s, and no FP8 to compare it with"
    clearly = "" if _speed(rival) < _speed(bf16) else ", which is not clearly faster"
    return f"{_rate(bf16)} tokens/s against {_rate(rival)} in {rival.name}{clearly}"


def _speed(figures: Figures) -> float:
    return figures.tokens_per_second or 0.0


def _rate(figures: Figures) -> str:
    return f"{_speed(figures):,.0f}"
