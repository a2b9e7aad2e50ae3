"""How fast a run moves on, by the host's clock alone: no device is read or waited for. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Tells the seconds that a step takes and the run up to `last_step` will take, with validations and checkpoints.

    The first step is left out: it compiles and calibrates. A step's end is noted when the host comes to it, at most a
    step ahead of the GPU. `time_left` returns the seconds that `trainer.max_time` leaves, None without such a limit.
    """

    def __init__(
        self,
        last_step: int,
        time_left: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.last_step = last_step
        self._time_left, self._clock = time_left, clock
        self.begin()

    def begin(self) -> None:
        """Forget the steps so far: training begins, or begins again after a rollback."""
        self._first: tuple[int, float] | None = None
        self._newest: tuple[int, float] | None = None

    def step_ended(self, step: int) -> None:
        """Note the end of an optimizer step; steps come in order."""
        self._newest = step, self._clock()
        self._first = self._first or self._newest

    @property
    def steps(self) -> int:
        """Return how many steps were measured."""
        return 0 if self._first is None or self._newest is None else self._newest[0] - self._first[0]

    @property
    def seconds(self) -> float:
        """Return how long they took."""
        return 0.0 if self._first is None or self._newest is None else self._newest[1] - self._first[1]

    def left(self, step: int) -> float | None:
        """Return the seconds from `step` to the end of the run, or None before two steps have ended."""
        if not self.steps:
            return None
        seconds = (self.last_step - step) * self.seconds / self.steps
        limit = self._time_left()
        return seconds if limit is None else max(min(seconds, limit), 0.0)
