"""The lanes of a mixture: each source has its own, and the mixing says whose turn it is."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np

from gpt2_fp8.data.deal import Numbers, lanes_of
from gpt2_fp8.data.mixing import Mixing
from gpt2_fp8.data.order import MAX_LANES, lane_count


class MixedDeal:
    """The deal of several sources. Sequence j of a global batch comes from lane j mod L of its source.

    L is a source's own number of lanes. It divides the number of columns, so a column always reads the same lane of a
    source. All lanes of a source then have about the same share of it.

    Args:
        mixing: whose columns divide the global batch.
        lanes: how many lanes each source has.
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

    def by_lane(self, steps: int) -> list[int]:
        """Return how many sequences each lane gives to the first `steps` steps."""
        counts = self.mixing.counts(steps * self._rows)
        return [int(counts[source, lane::own].sum()) for source, own in enumerate(self.own) for lane in range(own)]

    def sequences(self, steps: int, repeated: int = 0) -> list[int]:
        """Return how many sequences each source gives to the first `steps` steps.

        `repeated`: the batches of the first so many steps are used again and again; 0: none is.
        """
        rounds, rest = divmod(steps, repeated) if repeated else (0, steps)
        counts = self.mixing.counts(rest * self._rows)
        if rounds:
            counts = counts + rounds * self.mixing.counts(repeated * self._rows)
        return counts.sum(axis=1).tolist()


def column_count(global_batch_size: int) -> int:
    """Return C: the largest divisor of the global batch up to `MAX_LANES`."""
    return max(n for n in range(1, MAX_LANES + 1) if global_batch_size % n == 0)


def lanes_of_share(columns: int, n_units: int, weight: int, whole: int) -> int:
    """Return L of a source: as `order.lane_count`, and of `MAX_LANES` lanes not more than its share, rounded up."""
    most = math.ceil(MAX_LANES * weight / whole)
    most = max(n for n in range(1, columns + 1) if columns % n == 0 and n <= most)
    return lane_count(most, n_units)
