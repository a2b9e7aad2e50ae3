"""Batches: a step's sequences, taken from the lanes in turn. Each rank makes its own share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpt2_fp8.data.deal import Deal
from gpt2_fp8.data.ids import check_batch
from gpt2_fp8.data.lane import Lane, LaneState
from gpt2_fp8.runtime.signals import interruptible


class Batches:
    """One rank's shares of the global batches: their sequences j with j mod `world` = `rank`.

    If `world` divides the number of lanes, a rank reads only its own lanes. Otherwise several ranks read the same lane,
    and each of them skips the others' sequences. `step`: how many global batches were dealt out before.
    """

    def __init__(
        self,
        lanes: dict[int, Lane],
        deal: Deal,
        n_positions: int,
        rank: int,
        world: int,
        vocab_size: int,
        step: int = 0,
    ):
        assert deal.global_batch_size % world == 0
        self.lanes, self.deal, self.step = lanes, deal, step
        self.n_positions, self.rank, self.world, self.vocab_size = n_positions, rank, world, vocab_size
        for depth in range(1 + max(lane.ahead for lane in lanes.values())):
            for lane in lanes.values():  # first what every lane needs now, then what they need next
                if depth <= lane.ahead:
                    lane.ask()

    def next(self) -> npt.NDArray[np.int32]:
        """Return the next share: int32 [global_batch_size // world, n_positions + 1]. Raises RunError for a bad id."""
        with interruptible():  # the state of a step that was not trained on is not kept
            size = self.deal.global_batch_size
            ids = np.empty((size // self.world, self.n_positions + 1), dtype=np.int32)
            for j, number in enumerate(self.deal.of_step(self.step).tolist()):
                if lane := self.lanes.get(number):
                    block = lane.next()
                    if j % self.world == self.rank:
                        ids[j // self.world] = block
            self.step += 1
        check_batch(ids, self.vocab_size)
        return ids

    def close(self) -> None:
        """End the worker processes."""
        for lane in self.lanes.values():
            lane.pool.close()

    def state(self) -> dict[str, LaneState]:
        """Return the state of every lane that this rank reads."""
        return {str(index): lane.state() for index, lane in self.lanes.items()}

    def begun(self) -> list[int]:
        """Return the units that were begun since the last call."""
        return [unit for lane in self.lanes.values() for unit in lane.begun()]
