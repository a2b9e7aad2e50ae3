"""The table of a study: losses over seeds, and how far each condition is from the first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean

from factorial import FACTORS, main_effects
from statistics_of import paired

from gpt2_fp8.reports import spread
from gpt2_fp8.reports.spread import Difference

Losses = Mapping[str, Mapping[int, float]]  # by condition and seed


def table(losses: Losses) -> str:
    """Describe every condition by the losses of its seeds, and how far it is from the first.

    A difference has its standard error, and the bound that it is below with 95 % confidence.
    """
    first, *_ = losses
    width = max(map(len, [*losses, "condition"]))
    title = f"difference from {first} (standard error), at most (95 %)"
    lines = [f"{'condition':{width}}  runs    loss  deviation  {title}"]
    base = list(losses[first].values())
    for name, by_seed in losses.items():
        values = list(by_seed.values())
        if not values:
            lines.append(f"{name:{width}}  {0:4}")
            continue
        own = spread.spread(values)
        deviation = math.nan if own.deviation is None else own.deviation
        line = f"{name:{width}}  {len(values):4}  {own.mean:.4f}  {deviation:9.4f}"
        if name != first and base:
            found = spread.welch(values, base)
            line += f"  {_told(found)}  {100 * found.value / fmean(base):+.2f} %"
            equal = paired(by_seed, losses[first])
            line += f"; on {equal[1]} equal seeds {_told(equal[0])}" if equal else ""
        lines.append(line)
    return "\n".join(lines)


def effects(losses: Losses) -> str:
    """Describe the main effect of every operand: what its FP8 adds to the loss."""
    if missing := [name for name, values in losses.items() if not values]:
        return f"no table yet: {len(missing)} of {len(losses)} conditions have no run that is done"
    seeds = {name: list(values.values()) for name, values in losses.items()}
    grand = fmean(map(fmean, seeds.values()))
    lines = [table(losses), "", "operand          effect of FP8 on the loss (standard error)"]
    for name, effect in zip(FACTORS, main_effects(seeds), strict=True):
        lines.append(f"{name:15}  {effect.value:+.4f} ({effect.error:.4f})  {100 * effect.value / grand:+.2f} %")
    return "\n".join(lines)


def _told(found: Difference) -> str:
    if found.error is None or found.above is None:
        return f"{found.value:+.4f} (of one seed)"
    return f"{found.value:+.4f} ({found.error:.4f}), at most {found.above:+.4f}"
