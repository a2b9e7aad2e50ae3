"""Means of losses over seeds, differences of such means, and their standard errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev, variance
from typing import NamedTuple


class Effect(NamedTuple):
    """A difference of losses and its standard error; NaN if no condition has two seeds."""

    value: float
    error: float


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation; NaN instead of the latter for a single value."""
    return fmean(values), stdev(values) if len(values) > 1 else math.nan


def difference(values: Sequence[float], base: Sequence[float]) -> Effect:
    """Return how far the mean of `values` is above that of `base`; each has its own variance."""
    if min(len(values), len(base)) < 2:
        return Effect(fmean(values) - fmean(base), math.nan)
    error = math.sqrt(variance(values) / len(values) + variance(base) / len(base))
    return Effect(fmean(values) - fmean(base), error)


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> tuple[Effect, int]:
    """Return the mean difference of equal seeds, and how many there are; NaN if there is none.

    Runs of one seed begin with equal weights and read equal batches. As long as they stay close, the seed's own part
    is in both, and the difference has a smaller error than that of two means.
    """
    found = [values[seed] - base[seed] for seed in values.keys() & base.keys()]
    if not found:
        return Effect(math.nan, math.nan), 0
    mean, deviation = mean_and_deviation(found)
    return Effect(mean, deviation / math.sqrt(len(found))), len(found)


def contrast(values: Sequence[Sequence[float]], signs: Sequence[int]) -> Effect:
    """Return the mean over conditions of sign 1 minus that over sign -1.

    `values`: the losses of each condition over its seeds. All conditions are taken to have the same variance.
    """
    half = len(signs) / 2
    effect = sum(sign * fmean(found) for sign, found in zip(signs, values, strict=True)) / half
    freedom = sum(len(found) - 1 for found in values)
    if freedom == 0:
        return Effect(effect, math.nan)
    pooled = sum((len(found) - 1) * variance(found) for found in values if len(found) > 1) / freedom
    return Effect(effect, math.sqrt(pooled * sum(1 / len(found) for found in values)) / half)
