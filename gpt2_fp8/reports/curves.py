"""A run's losses over tokens and over training time, so that runs that logged at different steps can be compared.

A logged training loss is the mean of an interval of steps. So the mean over whole intervals is exact, and the loss at a
point is the mean of the tokens before it. If that range is as wide as an interval or wider, it has the logged losses at
the ends of intervals, and between them straight lines. Validations are points, with straight lines between them.

Training time is what the log measures: it leaves out validation, samples, and a process's first step (compilation).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Points = Sequence[tuple[float, float]]
_ABSURD = 1e15


@dataclass(frozen=True)
class Curve:
    """What a run has logged of its training. Sequences of the same length have an entry for each logged interval."""

    tokens: list[float]  # at the end of the interval
    seconds: list[float]  # of training, until then
    losses: list[float]  # nats a token; NaN if the log has no finite number above 0
    rates: list[float]  # tokens per second of each interval that has a time
    waits: list[float]  # the share of the time spent waiting for data
    utilisations: list[float]  # `mfu_bf16`
    grad_norms: list[float]  # at the end of each interval
    clipped: list[bool]  # whether that gradient was clipped
    validations: list[tuple[float, float]]  # tokens, loss
    not_finite: int  # intervals or validations whose loss is not finite
    resumes: int  # how often the run was continued

    @property
    def end(self) -> float:
        """Tokens at the end of the last logged interval."""
        return self.tokens[-1]

    @property
    def interval(self) -> float:
        """Tokens of a usual logged interval: the median, for a first one may be a step, and a damaged log has gaps."""
        return statistics.median_high([end - start for start, end in pairwise([0.0, *self.tokens])])

    @property
    def time(self) -> float:
        """Seconds of training in all."""
        return self.seconds[-1]

    def mean(self, at: float, width: float) -> float | None:
        """Return the mean training loss of the last `width` tokens before `at`; None if nothing finite was logged."""
        before, after = self._sums(max(0.0, at - width)), self._sums(at)
        weight = after[0] - before[0]
        return (after[1] - before[1]) / weight if weight > 0 else None

    def seconds_at(self, tokens: float) -> float | None:
        """Return the training time at which so many tokens were trained on; None if they never were."""
        return between(self._by_tokens, tokens)

    def tokens_at(self, seconds: float) -> float | None:
        """Return the tokens after so much training time; None after the run's end."""
        return between(self._by_seconds, seconds)

    def validation(self, at: float) -> float | None:
        """Return the validation loss after `at` tokens, between two validations if need be; None outside of them."""
        return between(self.validations, at)

    def _sums(self, at: float) -> tuple[float, float]:
        """Return how many tokens up to `at` have a loss, and the sum of their losses."""
        weight = total = start = 0.0
        place = min(bisect_left(self.tokens, at), len(self.tokens) - 1)
        if place > 0:
            weight, total = self._cumulated[place - 1]
            start = self.tokens[place - 1]
        loss, length = self.losses[place], min(at, self.tokens[place]) - start
        return (weight + length, total + length * loss) if math.isfinite(loss) else (weight, total)

    @cached_property
    def _by_tokens(self) -> Points:
        return [(0.0, 0.0), *zip(self.tokens, self.seconds, strict=True)]

    @cached_property
    def _by_seconds(self) -> Points:
        return [(0.0, 0.0), *zip(self.seconds, self.tokens, strict=True)]

    @cached_property
    def _cumulated(self) -> list[tuple[float, float]]:
        known, weight, total, start = [], 0.0, 0.0, 0.0
        for end, loss in zip(self.tokens, self.losses, strict=True):
            if math.isfinite(loss):
                weight, total = weight + end - start, total + (end - start) * loss
            known.append((weight, total))
            start = end
        return known


def of(rows: Sequence[Mapping[str, float]]) -> Curve:
    """Return the curve of a `metrics.csv`'s rows, in the order of their steps. It is empty if no training was logged.

    A row that repeats a step, which a resumed run may have logged again, replaces the earlier one.
    """
    trained = {int(row["step"]): row for row in rows if "train_loss" in row and row["step"] > 0}
    ordered = [trained[step] for step in sorted(trained)]
    each = next((row["tokens"] / row["step"] for row in reversed(ordered) if _usable(row, "tokens")), 1.0)
    times = [row["step_time"] for row in ordered if _usable(row, "step_time")]
    usual = statistics.median(times) if times else 0.0
    seconds, steps = [0.0], [0, *(int(row["step"]) for row in ordered)]
    for row, (before, step) in zip(ordered, pairwise(steps), strict=True):
        took = (step - before) * row["step_time"] if _usable(row, "step_time") else (step - before - 1) * usual
        seconds.append(seconds[-1] + took)
    checked = {row["step"] * each: row["val_loss"] for row in rows if "val_loss" in row}
    losses = [row["train_loss"] if _usable(row, "train_loss") else math.nan for row in ordered]
    return Curve(
        tokens=[step * each for step in steps[1:]],
        seconds=seconds[1:],
        losses=losses,
        rates=[row["tokens_per_second"] for row in ordered if _usable(row, "tokens_per_second")],
        waits=[row["data_wait"] for row in ordered if _plain(row.get("data_wait", math.nan))],
        utilisations=[row["mfu_bf16"] for row in ordered if _usable(row, "mfu_bf16")],
        grad_norms=[row["grad_norm"] for row in ordered if _plain(row.get("grad_norm", math.nan))],
        clipped=[row["clip_ratio"] < 1 for row in ordered if "clip_ratio" in row],
        validations=sorted((at, loss) for at, loss in checked.items() if _plain(loss) and loss > 0),
        not_finite=sum(not _plain(loss) or loss <= 0 for loss in [*losses, *checked.values()]),
        resumes=sum("step_time" not in row for row in ordered[1:]),
    )


def between(points: Points, at: float) -> float | None:
    """Return the value at `at` on the straight lines between points, in ascending order; None outside of them."""
    if not points or not points[0][0] <= at <= points[-1][0]:
        return None
    place = bisect_left(points, at, key=lambda point: point[0])
    (right, above) = points[place]
    if right == at:
        return above
    left, below = points[place - 1]
    return below + (above - below) * (at - left) / (right - left)


def first_below(points: Points, value: float) -> float | None:
    """Return where the straight lines between points first come down to `value`; None if they never do."""
    if points and points[0][1] <= value:
        return points[0][0]
    for (left, above), (right, below) in pairwise(points):
        if below <= value < above:
            return left + (right - left) * (above - value) / (above - below)
    return None


def _plain(value: float) -> bool:
    """Return whether a number is finite, and none of a damaged or forged file's that no mean can take."""
    return math.isfinite(value) and abs(value) < _ABSURD


def _usable(row: Mapping[str, float], name: str) -> bool:
    return name in row and _plain(row[name]) and row[name] > 0
