"""Which rank keeps the others waiting. Plain Python; once a second it gets each rank's place.

Time does not tell a main thread that hangs from one that compiles, saves or waits for data. But another rank may have
waited for long in a collective that this rank has not entered, while nothing here has moved (`runtime.activity`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank's main thread is."""

    collectives: int  # entered so far in the whole run
    moves: int  # changes whenever this rank gets on between two of them
    where: str  # in words, as "in step 12"


class Stragglers:
    """Measures for how long each of `world_size` ranks has kept another one waiting without a move."""

    def __init__(self, world_size: int, seconds: float):
        self.seconds = seconds
        self._behind = [0.0] * world_size
        self._places = [Place(0, 0, "")] * world_size

    def look(self, places: Sequence[Place], seconds: float) -> int | None:
        """Return the rank that has been behind for longer than allowed; None if there is none.

        `seconds`: the time since the last look.
        """
        foremost = max(place.collectives for place in places)
        for rank, place in enumerate(places):
            waited_for = place == self._places[rank] and place.collectives < foremost
            self._behind[rank] = self._behind[rank] + seconds if waited_for else 0.0
        self._places = list(places)
        longest = max(self._behind)
        return self._behind.index(longest) if longest > self.seconds else None
