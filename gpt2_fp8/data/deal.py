"""Which lane gives each sequence of a global batch: the lanes of one source take turns."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class Deal(Protocol):
    """Deals the sequences of every global batch to lanes, which are numbered from 0 on over all sources."""

    lanes: int  # how many there are
    global_batch_size: int

    def of_step(self, step: int) -> Numbers:
        """Return the lane of each sequence of the step `step`, counted from 0: int64 [global_batch_size]."""
        ...

    def of_rank(self, rank: int, world: int) -> list[int]:
        """Return the lanes that the sequences j with j mod `world` = `rank` may come from, sorted."""
        ...

    def by_lane(self, steps: int) -> list[int]:
        """Return how many sequences each lane gives to the first `steps` steps."""
        ...


class Turns:
    """The deal of a single source: sequence j of every global batch comes from lane j mod `lanes`."""

    def __init__(self, lanes: int, global_batch_size: int):
        assert global_batch_size % lanes == 0
        self.lanes, self.global_batch_size = lanes, global_batch_size
        self._lanes = np.arange(global_batch_size) % lanes

    def of_step(self, step: int) -> Numbers:
        """Return the lane of each sequence, int64 [global_batch_size]: the same in every step."""
        return self._lanes

    def of_rank(self, rank: int, world: int) -> list[int]:
        """Return the lanes that a rank's sequences come from."""
        return lanes_of(rank, world, self.lanes, self.global_batch_size)

    def by_lane(self, steps: int) -> list[int]:
        """Return how many sequences each lane gives to the first `steps` steps: as many as any other one."""
        return [steps * self.global_batch_size // self.lanes] * self.lanes


def lanes_of(rank: int, world: int, n_lanes: int, global_batch_size: int) -> list[int]:
    """Return the lanes that the sequences of `rank` come from. They repeat after `n_lanes` of its sequences."""
    return sorted({j % n_lanes for j in range(rank, min(global_batch_size, rank + n_lanes * world), world)})
