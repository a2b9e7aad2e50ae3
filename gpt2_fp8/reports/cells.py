"""Figures as a table of a comparison shows them; a cell without a figure is empty."""

from __future__ import annotations

from collections.abc import Sequence

from gpt2_fp8.reports.comparison import Gap
from gpt2_fp8.reports.spread import percent


def loss(gap: Gap) -> str:
    """Return a loss and, in brackets, its deviation between seeds."""
    return f"{gap.loss.mean:.4f}" + ("" if gap.loss.deviation is None else f" ({gap.loss.deviation:.4f})")


def relative(gap: Gap) -> str:
    """Return how far a loss is above the base's as a share of it, and the standard error."""
    error = gap.difference.error
    return percent(gap.relative, sign=True) + ("" if error is None else f" ({percent(error / gap.base.mean)})")


def difference(gap: Gap) -> str:
    """Return how far a loss is above the base's, and the standard error."""
    error = gap.difference.error
    return f"{gap.difference.value:+.4f}" + (" (one seed)" if error is None else f" ({error:.4f})")


def bound(gap: Gap) -> str:
    """Return the one-sided upper bound of that share; nothing for single seeds."""
    above = gap.difference.above
    return "" if above is None else percent(above / gap.base.mean, sign=True)


def paired(gap: Gap) -> str:
    """Return the mean difference of equal seeds, and its standard error; nothing without pairs."""
    if gap.paired is None or gap.paired.error is None:
        return ""
    return f"{gap.paired.value:+.4f} ({gap.paired.error:.4f})"


def share(value: float | None) -> str:
    """Return a share in per cent; nothing for None."""
    return "" if value is None else percent(value, 1)


def between(values: Sequence[int]) -> str:
    """Return the range of some whole numbers, or the number that they all are."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def time(seconds: float) -> str:
    """Return a duration: `12.3 s`, `4 min 05 s`, `3 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
