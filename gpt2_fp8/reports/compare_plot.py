"""The picture of a comparison: losses over tokens and over time, the distance from the base, speed, gradient norms."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt2_fp8.config.shown import line
from gpt2_fp8.reports import compare_conditions
from gpt2_fp8.reports.comparison import Comparison, Result
from gpt2_fp8.reports.spread import Spread

Style = dict[str, Any]  # of a line, as matplotlib names its parts
MOST = 10  # conditions that are drawn: the colours of one cycle
_LONGEST = 40  # characters of a label
# Of lines that coincide, the one below shows through the gaps of the next.
_DASHES: tuple[Any, ...] = ("-", (0, (6, 4)), (0, (2, 4)), (0, (6, 2, 1, 2)))


def plot(found: Comparison, path: Path) -> None:
    """Write a PNG of the first `MOST` conditions. Raises ImportError if matplotlib is not installed, and OSError."""
    from matplotlib.figure import Figure  # no pyplot: no display, and no state that stays

    figure = Figure(figsize=(11.0, 10.5), layout="constrained")
    axes = figure.subplots(3, 2)
    shown = found.results[:MOST]
    for place, result in enumerate(shown):
        kind = place % len(_DASHES)
        style = {"color": f"C{place}", "linestyle": _DASHES[kind], "zorder": 2 + kind / 10}
        _losses(axes[0][0], result, found, style, by_time=False)
        _losses(axes[0][1], result, found, style, by_time=True)
        _distance(axes[1][0], result, found, style)
        _validations(axes[1][1], result, found, style)
        _norms(axes[2][1], result, style)
    _speeds(axes[2][0], shown)
    titles = (
        ("training loss, at equal tokens", "tokens", "nats a token"),
        ("training loss, at equal time", "seconds of training", "nats a token"),
        ("training loss above the base's (bands: seeds' deviation)", "tokens", "%"),
        ("validation loss", "tokens", "nats a token"),
        ("speed", "tokens per second", ""),
        ("gradient norm, seed by seed", "tokens", ""),
    )
    for each, (title, across, up) in zip(axes.flat, titles, strict=True):
        each.set(title=title, xlabel=across, ylabel=up)
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        legend = figure.legend(handles, labels, loc="outside upper center", ncols=min(3, len(labels)), frameon=False)
        for label in legend.get_texts():
            label.set_parse_math(False)  # a label is text from a folder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter that the font does not have
        figure.savefig(path, dpi=120)


def _losses(axes: Any, result: Result, found: Comparison, style: Style, by_time: bool) -> None:
    points = compare_conditions.curve(result, found, by_time)
    _band(axes, points, style, None if by_time else line(result.condition.name, _LONGEST))


def _distance(axes: Any, result: Result, found: Comparison, style: Style) -> None:
    base = dict(compare_conditions.curve(found.results[0], found, by_time=False))
    points = [
        (at, _percent(own, base[at].mean))
        for at, own in compare_conditions.curve(result, found, by_time=False)
        if at in base
    ]
    _band(axes, points, style, None)


def _percent(own: Spread, base: float) -> Spread:
    deviation = None if own.deviation is None else 100 * own.deviation / base
    return Spread(100 * (own.mean / base - 1), deviation, ())


def _band(axes: Any, points: Sequence[tuple[float, Spread]], style: Style, label: str | None) -> None:
    """Draw means, and a standard deviation of the seeds on both sides of them."""
    where, means = [at for at, _ in points], [own.mean for _, own in points]
    axes.plot(where, means, label=label, **style)
    spreads = [own.deviation or 0.0 for _, own in points]
    low, high = ([m + sign * s for m, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
    axes.fill_between(where, low, high, color=style["color"], alpha=0.2, linewidth=0)


def _validations(axes: Any, result: Result, found: Comparison, style: Style) -> None:
    for run in () if result.not_comparable else found.compared[result.condition.name]:
        points = run.curve.validations
        axes.plot([at for at, _ in points], [loss for _, loss in points], marker="o", markersize=3, alpha=0.7, **style)


def _norms(axes: Any, result: Result, style: Style) -> None:
    for run in result.condition.runs:
        curve = run.curve
        if len(curve.grad_norms) == len(curve.tokens):
            axes.plot(curve.tokens, curve.grad_norms, linewidth=0.8, alpha=0.7, **style)
    axes.set_yscale("log")


def _speeds(axes: Any, results: Sequence[Result]) -> None:
    """Draw a bar for each condition, with the fifth and the ninety-fifth percentile of its intervals."""
    for place, result in enumerate(results):
        speed = result.speed
        if speed.tokens_per_second is None:
            continue
        middle = speed.tokens_per_second.mean
        low, high = speed.lowest or middle, speed.highest or middle
        reach = [[max(0.0, middle - low)], [max(0.0, high - middle)]]
        axes.barh(place, middle, xerr=reach, color=f"C{place}", alpha=0.8)
    names = [line(result.condition.name, _LONGEST) for result in results]
    axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    axes.invert_yaxis()
