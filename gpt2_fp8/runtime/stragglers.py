"""Which rank keeps the others waiting in the middle of a step. Plain Python; once a second it gets each rank's place.

Time does not tell a main thread that hangs from one that compiles. But another rank may have waited for long in a
collective of the same step that this rank has not entered. Within a step nothing waits for data, disk or network. So
the reason can only be computing or compiling, and all ranks do the same of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank's main thread is. `step` is 0 between two steps."""

    step: int
    collectives: int  # entered so far in the whole run (`runtime.collectives.entered`)


class Stragglers:
    """Measures for how long each of `world_size` ranks has been behind another one."""

    def __init__(self, world_size: int, seconds: float):
        self.seconds = seconds
        self._behind = [0.0] * world_size
        self._places: list[Place] = [Place(0, 0)] * world_size

    def look(self, places: Sequence[Place], seconds: float) -> int | None:
        """Return the rank that has been behind for longer than allowed; None if there is none.

        `seconds`: the time since the last look.
        """
        for rank, place in enumerate(places):
            others = (other.collectives for other in places if other.step == place.step)
            waited_for = place.step > 0 and place == self._places[rank] and place.collectives < max(others)
            self._behind[rank] = self._behind[rank] + seconds if waited_for else 0.0
        self._places = list(places)
        longest = max(self._behind)
        return self._behind.index(longest) if longest > self.seconds else None
