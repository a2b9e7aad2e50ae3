"""Red flags of a run in any precision: a spike or a plateau of the loss, and waiting for data. Plain Python.

It sees the rows of the training log, an interval each. Statistics are medians, so one odd interval moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

SIGMAS = 8.0  # a spike is so many standard deviations above the intervals before it
RECENT = 20  # intervals that a loss is compared with
LEAST = 0.02  # the least rise that is a spike, relative to the loss: a fitted run hardly varies
NORMAL = 1.4826  # of a normal distribution: its standard deviation over its median absolute deviation
QUARTER = 25  # intervals that are compared with as many before them, at least; later a quarter of the run
WAIT, WAITS = 0.05, 5  # waiting for data: a part of the time, in each of so many intervals
QUIET = 100  # intervals after which a flag is said again


@dataclass
class RunWatch:
    """Looks at each row of the training log; calls `say` with each line.

    `warm_up`: steps of the learning rate's warm-up, in which the loss is not judged. `workers`: `data.num_workers`.
    """

    warm_up: int
    workers: int
    say: Callable[[str], object]
    _losses: list[float] = field(default_factory=list)
    _waits: int = 0  # intervals in a row
    _rows: int = 0
    _said: dict[str, int] = field(default_factory=dict)

    def see(self, step: int, row: Mapping[str, float]) -> None:
        """Judge one row, of the interval that ends with `step`: `train_loss`, and `data_wait` from the second on."""
        self._rows += 1
        self._loss(step, row["train_loss"])
        self._wait(step, row.get("data_wait", 0.0))

    def _loss(self, step: int, loss: float) -> None:
        if not math.isfinite(loss) or step <= self.warm_up:  # every step was skipped: `engine.divergence` says it
            return
        if (limit := spike_limit(self._losses)) is not None and loss > limit:
            usual = median(self._losses[-RECENT:])
            advice = "a lower optim.lr or optim.max_grad_norm, or a longer optim.warmup_steps"
            self._flag("spike", f"step {step}: the loss has risen to {loss:.4g}, from about {usual:.4g}; "
                                f"if it does not come down: {advice}")  # fmt: skip
        self._losses.append(loss)
        if len(self._losses) % QUARTER == 0 and (levels := plateau(self._losses)) is not None:
            text = f"the loss has not fallen for {len(self._losses) // 4} intervals, {levels[0]:.4g} to {levels[1]:.4g}"
            self._flag("plateau", f"step {step}: {text}; compare with precision=bf16, or with another optim.lr")

    def _wait(self, step: int, wait: float) -> None:
        self._waits = self._waits + 1 if wait > WAIT else 0
        if self._waits >= WAITS:
            text = f"step {step}: {wait:.0%} of the time is spent waiting for data"
            self._flag("wait", f"{text}; data.num_workers={max(2, 2 * self.workers)} (now {self.workers})")

    def _flag(self, kind: str, line: str) -> None:
        if self._rows - self._said.get(kind, -QUIET) >= QUIET:
            self._said[kind] = self._rows
            self.say(line)


def spike_limit(losses: Sequence[float]) -> float | None:
    """Return the loss above which the next one is a spike; None until `RECENT` are known.

    It is the median of the last `RECENT`, plus `SIGMAS` times their standard deviation, at least `LEAST` of the median.
    The standard deviation is that of a normal distribution of the same median absolute deviation (Rousseeuw and Croux
    1993, "Alternatives to the Median Absolute Deviation").
    """
    recent = losses[-RECENT:]
    if len(recent) < RECENT:
        return None
    middle = median(recent)
    deviation = NORMAL * median(abs(loss - middle) for loss in recent)
    return middle + max(SIGMAS * deviation, LEAST * abs(middle))


def plateau(losses: Sequence[float]) -> tuple[float, float] | None:
    """Return the median of the last quarter but one and of the last quarter, if that is not lower; else None.

    A quarter of a run is long enough that a loss which still falls has fallen, however slowly; and so at least
    `QUARTER` intervals.
    """
    window = len(losses) // 4
    if window < QUARTER:
        return None
    before, now = median(losses[-2 * window : -window]), median(losses[-window:])
    return (before, now) if now >= before else None
