"""At which steps a run is saved, and which of these checkpoints are kept for good."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class Stall:
    """Measures how long training waits for a checkpoint, over all `fit`s of a run.

    It waits for the GPU to finish the step, for the ranks, for the checkpoint before it and for the copy. Without a
    thread it also waits for the disk.

    Attributes:
        longest: the most seconds of all waits so far, or None before one.
    """

    def __init__(self) -> None:
        self.longest: float | None = None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the block as a wait. One that raises does not count."""
        began = time.perf_counter()
        yield
        self.longest = max(self.longest or 0.0, time.perf_counter() - began)


_CLOCK_STEPS = 10  # the ranks compare the time at every multiple of this step


class KeptSteps:
    """The steps whose checkpoints stay: multiples of `every_n_steps` (0: none), and those that are added."""

    def __init__(self, every_n_steps: int = 0) -> None:
        self.every_n_steps = every_n_steps
        self._added: frozenset[int] = frozenset()

    def add(self, steps: Iterable[int]) -> None:
        """Keep these steps too: the ends of epochs."""
        self._added |= frozenset(steps)

    def __contains__(self, step: int) -> bool:
        return step in self._added or _is_multiple(step, self.every_n_steps)


class Intervals:
    """Says when a checkpoint is due.

    Args:
        every_n_steps: the interval in steps; 0: not by steps.
        every_minutes: also this long after the last checkpoint; 0: not by the clock.
        kept: these steps are saved too.
    """

    def __init__(self, every_n_steps: int, every_minutes: float, kept: KeptSteps) -> None:
        self.every_n_steps, self.every_minutes, self.kept = every_n_steps, every_minutes, kept
        self._began = time.monotonic()

    def begin(self) -> None:
        """Count the minutes from now on."""
        self._began = time.monotonic()

    def is_due(self, step: int, agree: Callable[[bool], bool]) -> bool:
        """Return whether `step` is to be saved.

        `agree` gets whether the minutes are over by this process's clock, and returns rank 0's answer on every rank. It
        is a collective, so it is called seldom.
        """
        if step in self.kept or _is_multiple(step, self.every_n_steps):
            return True
        return bool(self.every_minutes) and step % _CLOCK_STEPS == 0 and agree(self._is_late())

    def _is_late(self) -> bool:
        return time.monotonic() - self._began >= 60 * self.every_minutes


def _is_multiple(step: int, of: int) -> bool:
    return of > 0 and step % of == 0
