"""The benchmark's plot: tokens per second, by work and by precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gpt2_fp8.config.shown import line
from gpt2_fp8.measure.table import Measured


def plot(every: Sequence[Measured], path: Path) -> bool:
    """Write a PNG with a bar for each case. Returns False if there is nothing to draw.

    There is a group of bars for each model and micro-batch, and a colour for each precision, recipe and family of
    layers. Thin lines go from the slowest to the fastest step. Raises ImportError if matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # no pyplot: no display, and no state that stays

    done = [measured for measured in every if measured.result.tokens_per_second]
    if not done:
        return False
    works = list(dict.fromkeys(measured.work for measured in done))
    kinds = list(dict.fromkeys(_kind(measured) for measured in done))
    width = 0.8 / len(kinds)
    figure = Figure(figsize=(max(6.0, 1.5 + 0.7 * len(works) * len(kinds)), 4.5), layout="constrained")
    axes = figure.subplots()
    for place, kind in enumerate(kinds):
        group = [measured for measured in done if _kind(measured) == kind]
        x = [works.index(measured.work) + (place - (len(kinds) - 1) / 2) * width for measured in group]
        rates = [measured.result.tokens_per_second or 0.0 for measured in group]
        below = [max(0.0, rate - (m.result.slowest or rate)) for rate, m in zip(rates, group, strict=True)]
        above = [max(0.0, (m.result.fastest or rate) - rate) for rate, m in zip(rates, group, strict=True)]
        bars = axes.bar(x, rates, width * 0.95, yerr=[below, above], capsize=3, label=kind)
        axes.bar_label(
            bars, labels=[_thousands(rate) for rate in rates], label_type="center", fontsize=8
        )  # clear of the lines
    axes.set_xticks(range(len(works)), [f"{model}\nmicro-batch {size}" for model, size in works])
    axes.set_ylabel("tokens per second")
    axes.set_title(f"full training steps on {done[0].result.device}", fontsize=10)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    return True


def _kind(measured: Measured) -> str:
    if measured.config.notes:  # the name of a row
        return line(measured.config.notes)
    return ", ".join(filter(None, [measured.config.precision.name, measured.recipe, measured.layers]))


def _thousands(rate: float) -> str:
    return f"{rate / 1000:,.0f} k" if rate >= 10_000 else f"{rate:,.0f}"
