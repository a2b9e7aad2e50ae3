"""A run's losses over tokens and training time, so that runs which logged at different steps can be compared.

A logged training loss is the mean of an interval of steps. So the mean over whole intervals is exact, and the loss at a
point is the mean of a window of tokens before it. Training time is what the log measures: it leaves out validation,
samples, and a process's first step (compilation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_ABSURD = 1e15  # a damaged log's


@dataclass(frozen=True, eq=False)
class Curve:
    """What a run has logged of its training. The first three have an entry for each logged interval."""

    tokens: Array  # at the end of the interval
    seconds: Array  # of training, until then
    losses: Array  # nats a token; NaN if the log has no finite number above 0
    rates: Array  # tokens per second of each interval that has a time
    validations: Array  # of shape (2, n): tokens and losses

    @property
    def interval(self) -> float:
        """Tokens of a usual logged interval."""
        return float(np.quantile(np.diff(self.tokens, prepend=0.0), 0.5, method="higher"))

    def mean(self, at: Array, width: float) -> Array:
        """Return the mean training loss of the last `width` tokens before each of `at`; NaN if nothing was logged."""
        ends, known = np.append(0.0, self.tokens), np.isfinite(self.losses)
        lengths = np.diff(ends) * known
        low = np.maximum(0.0, at - width)
        sums = (np.append(0.0, np.cumsum(lengths * each)) for each in (1.0, np.where(known, self.losses, 0.0)))
        weight, total = (np.interp(at, ends, each) - np.interp(low, ends, each) for each in sums)
        return np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), np.nan)

    def seconds_at(self, tokens: Array) -> Array:
        """Return the training time at which so many tokens were trained on."""
        return np.asarray(np.interp(tokens, np.append(0.0, self.tokens), np.append(0.0, self.seconds)))

    def validation(self, at: Array) -> Array:
        """Return the validation loss after `at` tokens, on the straight line between two validations."""
        return np.asarray(np.interp(at, *self.validations))


def of(rows: Sequence[Mapping[str, float]]) -> Curve:
    """Return the curve of the rows of a `metrics.csv`, in the order of their steps. It is empty without training.

    A row that repeats a step, which a resumed run may have logged again, replaces the earlier one.
    """
    trained = {int(row["step"]): row for row in rows if "train_loss" in row and row["step"] > 0}
    ordered = [trained[step] for step in sorted(trained)]
    each = next((row["tokens"] / row["step"] for row in reversed(ordered) if _usable(row, "tokens")), 1.0)
    times = [row["step_time"] for row in ordered if _usable(row, "step_time")]
    usual = float(np.median(times)) if times else 0.0
    steps = [0, *(int(row["step"]) for row in ordered)]
    took = [
        (step - before) * row["step_time"] if _usable(row, "step_time") else (step - before - 1) * usual
        for row, (before, step) in zip(ordered, pairwise(steps), strict=True)
    ]
    checked = {row["step"] * each: row["val_loss"] for row in rows if _usable(row, "val_loss")}
    return Curve(
        tokens=each * np.array(steps[1:], dtype=float),
        seconds=np.cumsum(np.array(took, dtype=float)),
        losses=np.array([row["train_loss"] if _usable(row, "train_loss") else np.nan for row in ordered]),
        rates=np.array([row["tokens_per_second"] for row in ordered if _usable(row, "tokens_per_second")]),
        validations=np.array(sorted(checked.items())).reshape(-1, 2).T,
    )


def first_below(at: Array, values: Array, level: float) -> float:
    """Return where the straight lines between points first come down to `level`; NaN if they never do."""
    under = np.flatnonzero(values <= level)
    if not under.size:
        return float("nan")
    place = int(under[0])
    if place == 0:
        return float(at[0])
    return float(np.interp(-level, -values[[place - 1, place]], at[[place - 1, place]]))


def _usable(row: Mapping[str, float], name: str) -> bool:
    return 0 < row.get(name, -1.0) < _ABSURD
