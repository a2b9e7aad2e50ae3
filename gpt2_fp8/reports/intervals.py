"""Speed, memory and gradient norms of a condition's runs, over the intervals that they have logged."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gpt2_fp8.reports import spread
from gpt2_fp8.reports.comparison import Gradients, Speed
from gpt2_fp8.reports.runs import Run

_SLOW = 0.8  # of the median speed: slower intervals are counted


def speed(runs: Sequence[Run]) -> Speed:
    """Return the speed and memory of a condition's runs."""
    rates = [run.curve.rates for run in runs if run.curve.rates]
    medians = [statistics.median(each) for each in rates]
    shares = [
        sum(rate < _SLOW * middle for rate in each) / len(each) for each, middle in zip(rates, medians, strict=True)
    ]
    return Speed(
        tokens_per_second=spread.spread(medians) if medians else None,
        lowest=_mean([_percentile(each, 0.05) for each in rates]),
        highest=_mean([_percentile(each, 0.95) for each in rates]),
        slow=_mean(shares),
        waiting=_mean([statistics.fmean(run.curve.waits) for run in runs if run.curve.waits]),
        mfu_bf16=_mean([statistics.median(run.curve.utilisations) for run in runs if run.curve.utilisations]),
        memory_gb=_mean([run.memory_gb for run in runs if run.memory_gb is not None]),
        seconds=statistics.fmean(run.curve.time for run in runs),
    )


def gradients(runs: Sequence[Run]) -> Gradients:
    """Return the gradient norms of a condition's runs."""
    norms = [run.curve.grad_norms for run in runs if run.curve.grad_norms]
    return Gradients(
        median=_mean([statistics.median(each[len(each) // 2 :]) for each in norms]),
        largest=max((max(each[len(each) // 10 :]) for each in norms), default=None),
        clipped=_mean([statistics.fmean(run.curve.clipped) for run in runs if run.curve.clipped]),
    )


def _percentile(values: Sequence[float], share: float) -> float:
    """Return the value at a share of the sorted values, between two of them if need be."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
