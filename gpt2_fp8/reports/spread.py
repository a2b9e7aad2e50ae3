"""Means over seeds, and the confidence of their differences.

The quantile of Student's t is integrated here: scipy is a large package for one function. With t = sqrt(n) tan(a), the
density for n degrees of freedom is proportional to cos(a)^(n - 1) on -pi/2 < a < pi/2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
_POINTS = 400_001


@dataclass(frozen=True)
class Spread:
    """A figure of several runs."""

    mean: float
    deviation: float | None  # standard deviation between seeds; None for a single run
    values: tuple[float, ...]


@dataclass(frozen=True)
class Difference:
    """A difference of means. What is uncertain is None if a side has a single run."""

    value: float
    error: float | None = None  # standard error
    freedom: float | None = None  # degrees of freedom
    low: float | None = None  # the two-sided confidence interval
    high: float | None = None
    above: float | None = None  # the one-sided upper bound


def spread(values: Sequence[float]) -> Spread:
    """Return mean and standard deviation of at least one value."""
    deviation = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return Spread(float(np.mean(values)), deviation, tuple(map(float, values)))


def welch(values: Sequence[float], base: Sequence[float]) -> Difference:
    """Return the mean of `values` minus that of `base`; each side has its own variance (Welch, Biometrika 34, 1947)."""
    value = float(np.mean(values) - np.mean(base))
    if min(len(values), len(base)) < 2:
        return Difference(value)
    parts = [(float(np.var(side, ddof=1)) / len(side), len(side) - 1) for side in (values, base)]
    square = sum(part for part, _ in parts)
    if square == 0:
        return Difference(value, 0.0, float(len(values) + len(base) - 2), value, value, value)
    return _bounded(value, math.sqrt(square), square**2 / sum(part**2 / count for part, count in parts))


def paired(values: Sequence[float], base: Sequence[float]) -> Difference:
    """Return the mean difference of values that belong together pair by pair: the same seed on both sides."""
    each = [one - other for one, other in zip(values, base, strict=True)]
    if len(each) < 2:
        return Difference(float(np.mean(each)))
    return _bounded(float(np.mean(each)), float(np.std(each, ddof=1)) / math.sqrt(len(each)), len(each) - 1.0)


@functools.cache
def student(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t: `student(0.95, 5)` is 2.015. `probability` is in (0, 1), `freedom` >= 1."""
    angles = np.linspace(-math.pi / 2, math.pi / 2, _POINTS)
    heights = np.cos(angles).clip(0) ** (freedom - 1)
    sums = np.concatenate([[0], np.cumsum((heights[1:] + heights[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(probability, sums / sums[-1], angles)))


def _bounded(value: float, error: float, freedom: float) -> Difference:
    two, one = (error * student(p, freedom) for p in ((1 + CONFIDENCE) / 2, CONFIDENCE))
    return Difference(value, error, freedom, value - two, value + two, value + one)
