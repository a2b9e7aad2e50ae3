"""Which rank keeps the others waiting in the midst of a step. Plain Python: it is told once a second where each stands.

By time alone, a main thread that hangs cannot be told from one that compiles: what tells is that another rank has
entered an exchange which this one has not, in the same step, and has waited there for long. Within a step there is no
waiting for data, disk or network; so nothing but computing and compiling can be the reason, and all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank's main thread is. `step` is 0 between two steps."""

    step: int
    exchanges: int  # entered so far, in the whole run (`exchange.entered`)


class Stragglers:
    """Counts for how long each of `world_size` ranks has been behind another one."""

    def __init__(self, world_size: int, seconds: float):
        self.seconds = seconds
        self._behind = [0.0] * world_size
        self._places: list[Place] = [Place(0, 0)] * world_size

    def look(self, places: Sequence[Place], seconds: float) -> int | None:
        """`seconds` after the last look, the rank that has been behind for longer than it may; None: there is none."""
        for rank, place in enumerate(places):
            others = (other.exchanges for other in places if other.step == place.step)
            waited_for = place.step > 0 and place == self._places[rank] and place.exchanges < max(others)
            self._behind[rank] = self._behind[rank] + seconds if waited_for else 0.0
        self._places = list(places)
        longest = max(self._behind)
        return self._behind.index(longest) if longest > self.seconds else None
