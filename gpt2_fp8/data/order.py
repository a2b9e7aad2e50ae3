"""The one order of samples, as pure arithmetic of seed and position: nothing here reads text or depends on the machine.

The units of an epoch are permuted and dealt to L lanes. Lane j mod L gives the sequence at position j of every global
batch. So the order depends only on the seed, the units, the global batch and L, and not on the number of ranks or
workers. A run keeps its L: up to 16, or up to the number of ranks that begin it, so that each can read its own lanes.

In a mixture each source has lanes of its own, and `Mixing` says whose turn it is. A single source always has it.

The sequences of a run lie in columns: sequence j of a global batch is in column j mod C. In each column the sources
follow each other by themselves. A binary tree splits them, each node by Bresenham's line. A node gives item n of its
own to its left half if floor(((n + 1) a + t) / b) > floor((n a + t) / b). Here a / b is the left half's part of the
node's weight. t, below b, is the node's phase in this column. Such a count differs from its part by less than 1 over
any window. So in any window of a column the sequences of a source differ from its share by less than the tree's depth.

The phases of the columns are spread evenly over b and permuted by the seed, so that a global batch is balanced too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpt2_fp8.config.run_length import largest_divisor

MAX_LANES = 16  # of a run that no more ranks begin; each holds about two tokenised units in memory
UNITS_A_LANE = 16  # at least, so that all lanes have about the same share of an epoch

LARGEST = 1 << 30  # the sum of the weights as integers: products of two fit into 64 bits

Numbers = npt.NDArray[np.int64]


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
        # every unit of an epoch, int64 [n_units]: lane l owns [l::lanes]
        self.epoch = lru_cache(maxsize=4)(lambda epoch: permutation(n_units, seed, 0, epoch))

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

    def documents(self, epoch: int, unit: int, n: int) -> Numbers:
        """Return the order of a unit's `n` documents in an epoch."""
        return permutation(n, self.seed, 1, epoch, unit)

    def blocks(self, lane: int, place: Place, n: int) -> Numbers:
        """Return the order of the `n` blocks of the segment that starts at `place`."""
        return permutation(n, self.seed, 2, lane, place.epoch, place.position)


def permutation(n: int, *key: int) -> Numbers:
    """Return a permutation of n by `key`, int64 [n].

    It sorts raw 64-bit draws: numpy keeps these the same in every release, but not `Generator.permutation`.
    """
    draws = np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(draws, kind="stable")


def lane_count(global_batch_size: int, n_units: int, most: int = MAX_LANES) -> int:
    """Return L: the largest divisor of the global batch up to `most` that gives a lane `UNITS_A_LANE` units."""
    return largest_divisor(global_batch_size, max(1, min(most, n_units // UNITS_A_LANE)))


# ---- the deal of sequences to lanes ----------------------------------------------------------------------------------


def lanes_of(rank: int, world: int, n_lanes: int, global_batch_size: int) -> list[int]:
    """Return the lanes that the sequences of `rank` come from. They repeat after `n_lanes` of its sequences."""
    return sorted({j % n_lanes for j in range(rank, min(global_batch_size, rank + n_lanes * world), world)})


def whole_numbers(weights: Iterable[float]) -> list[int]:
    """Return integers in the proportion of the weights as they are written, with a sum of `LARGEST` at most.

    If the exact ones have a larger sum, they are rounded, by less than one part in a thousand million of the whole.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    numbers = [int(weight * common) for weight in exact]
    divisor, whole = math.gcd(*numbers), sum(numbers)
    if whole // divisor <= LARGEST:
        return [number // divisor for number in numbers]
    most = LARGEST - len(numbers)
    return [max(1, (2 * number * most + whole) // (2 * whole)) for number in numbers]


class Mixing:
    """The sources of a run's sequences, by row and column, from a whole weight of each source and a seed of phases."""

    def __init__(self, weights: list[int], columns: int, seed: int):
        assert all(weight > 0 for weight in weights)
        assert sum(weights) <= LARGEST
        self.weights, self.columns, self.seed = weights, columns, seed
        self._phases = cache(self._draw_phases)

    def sources(self, first: int, rows: int) -> Numbers:
        """Return the source of every sequence of the rows from `first` on, int64 [rows, columns]."""
        return np.diff(self.counts(np.arange(first, first + rows + 1)), axis=1).argmax(axis=0)

    def counts(self, rows: int | Numbers) -> Numbers:
        """Return how many sequences of the first `rows` rows each source gives to each column.

        It is int64 [sources, columns]; for several numbers of rows [sources, numbers, columns].
        """
        items = np.repeat(np.asarray(rows, dtype=np.int64)[..., None], self.columns, axis=-1)
        found = np.empty((len(self.weights), *items.shape), dtype=np.int64)

        def split(low: int, high: int, items: Numbers) -> None:
            if high - low == 1:
                found[low] = items
                return
            middle = (low + high) // 2
            left, whole = sum(self.weights[low:middle]), sum(self.weights[low:high])
            rounds, rest = np.divmod(items, whole)
            of_left = rounds * left + (rest * left + self._phases(low, high)) // whole
            split(low, middle, of_left)
            split(middle, high, items - of_left)

        split(0, len(self.weights), items)
        return found

    def _draw_phases(self, low: int, high: int) -> Numbers:
        """Return the phase of the node of the sources from `low` to `high` in each column, int64 [columns]."""
        whole = sum(self.weights[low:high])
        places = permutation(self.columns, self.seed, 3, low, high)
        start = int(np.random.PCG64(np.random.SeedSequence((self.seed, 4, low, high))).random_raw()) % whole
        return (start + places * whole // self.columns) % whole


class Deal:
    """The deal of global batches to lanes, numbered over all sources: sequence j is of lane j mod L of its source.

    L is a source's own number of lanes. It divides the number of columns, so a column always reads the same lane of a
    source. All lanes of a source then have about the same share of it.
    """

    def __init__(self, mixing: Mixing, lanes: list[int], global_batch_size: int):
        assert global_batch_size % mixing.columns == 0
        assert all(mixing.columns % own == 0 for own in lanes)
        self.mixing, self.own, self.global_batch_size = mixing, lanes, global_batch_size
        self.first = [0, *accumulate(lanes)][:-1]
        self.lanes = sum(lanes)
        self._rows = global_batch_size // mixing.columns

    def of_step(self, step: int) -> Numbers:
        """Return the lane of each sequence of the step `step`, counted from 0: int64 [global_batch_size]."""
        source = self.mixing.sources(step * self._rows, self._rows).reshape(-1)
        return np.array(self.first)[source] + np.arange(self.global_batch_size) % np.array(self.own)[source]

    def of_rank(self, rank: int, world: int) -> list[int]:
        """Return the lanes that a rank's sequences may come from, of every source."""
        size = self.global_batch_size
        own = zip(self.first, self.own, strict=True)
        return sorted(first + lane for first, lanes in own for lane in lanes_of(rank, world, lanes, size))

    def sequences(self, steps: int, repeated: int = 0) -> list[int]:
        """Return how many sequences each source gives to the first `steps` steps.

        `repeated`: the batches of the first so many steps are used again and again; 0: none is.
        """
        rounds, rest = divmod(steps, repeated) if repeated else (0, steps)
        counts = self.mixing.counts(rest * self._rows)
        if rounds:
            counts = counts + rounds * self.mixing.counts(repeated * self._rows)
        return counts.sum(axis=1).tolist()


def lanes_of_share(columns: int, n_units: int, weight: int, whole: int, most: int = MAX_LANES) -> int:
    """Return L of a source of a mixture: as `lane_count`, and of `most` lanes at most its share, rounded up."""
    return lane_count(largest_divisor(columns, math.ceil(most * weight / whole)), n_units, most)
