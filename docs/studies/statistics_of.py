"""Differences of losses on equal seeds, and contrasts of conditions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

from gpt2_fp8.reports import spread
from gpt2_fp8.reports.spread import Difference


class Effect(NamedTuple):
    """A difference of losses and its standard error; NaN if no condition has two seeds."""

    value: float
    error: float


def paired(values: Mapping[int, float], base: Mapping[int, float]) -> tuple[Difference, int] | None:
    """Return the mean difference of equal seeds, and how many there are; None if there is none.

    Runs of one seed begin with equal weights and read equal batches. As long as they stay close, the seed's own part
    is in both, and the difference has a smaller error than that of two means.
    """
    seeds = sorted(values.keys() & base.keys())
    if not seeds:
        return None
    return spread.paired([values[seed] for seed in seeds], [base[seed] for seed in seeds]), len(seeds)


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
