"""The one order of samples, as pure arithmetic: nothing here reads text or depends on the machine.

The units of an epoch are permuted and dealt to L lanes. Lane j mod L gives the sequence at position j of every global
batch. So the order depends only on the seed, the units, the global batch and L, and not on the number of ranks or
workers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_LANES = 16  # each holds about two tokenised units in memory
UNITS_A_LANE = 16  # at least, so that all lanes have about the same share of an epoch

Permutation = npt.NDArray[np.int64]


class Place(NamedTuple):
    """A unit's place in a lane: the epoch, and the position in the lane's list of that epoch's units."""

    epoch: int
    position: int


class Order:
    """The order of `n_units` units in `lanes` lanes under `seed`."""

    def __init__(self, seed: int, n_units: int, lanes: int):
        assert seed >= 0
        assert 1 <= lanes <= n_units
        self.seed, self.n_units, self.lanes = seed, n_units, lanes
        self._units = lru_cache(maxsize=4)(lambda epoch: permutation(n_units, seed, 0, epoch))

    def epoch(self, epoch: int) -> Permutation:
        """Return every unit of an epoch, int64 [n_units]: lane l owns [l::lanes]."""
        return self._units(epoch)

    def length(self, lane: int) -> int:
        """Return how many units a lane has in an epoch."""
        return len(range(lane, self.n_units, self.lanes))

    def unit(self, lane: int, place: Place) -> int:
        """Return the index of the unit at `place` of `lane`."""
        return int(self.epoch(place.epoch)[lane :: self.lanes][place.position])

    def after(self, lane: int, place: Place) -> Place:
        """Return the next place of `lane`, in the next epoch if this one is over."""
        epoch, position = place.epoch, place.position + 1
        return Place(epoch, position) if position < self.length(lane) else Place(epoch + 1, 0)

    def documents(self, epoch: int, unit: int, n: int) -> Permutation:
        """Return the order of a unit's `n` documents in an epoch."""
        return permutation(n, self.seed, 1, epoch, unit)

    def blocks(self, lane: int, place: Place, n: int) -> Permutation:
        """Return the order of the `n` blocks of the segment that starts at `place`."""
        return permutation(n, self.seed, 2, lane, place.epoch, place.position)


def permutation(n: int, *key: int) -> Permutation:
    """Return a permutation of n by `key`, int64 [n].

    It sorts raw 64-bit draws: numpy keeps these the same in every release, but not `Generator.permutation`.
    """
    draws = np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(draws, kind="stable")


def lane_count(global_batch_size: int, n_units: int) -> int:
    """Return L: the largest divisor of the global batch up to `MAX_LANES` that gives a lane `UNITS_A_LANE` units."""
    most = min(MAX_LANES, n_units // UNITS_A_LANE)
    return max((lanes for lanes in range(1, most + 1) if global_batch_size % lanes == 0), default=1)
