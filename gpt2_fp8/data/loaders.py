"""What Lightning iterates over: the steps of a run, and the validation sequences. Both are sized and iterable.

Sized: Lightning fetches one item ahead of an unsized loader to know which item is the last. A checkpoint would then be
one item ahead. Iterable: Lightning then does not distribute the items over the ranks a second time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from gpt2_fp8.config.errors import DataSourceLost, RunError
from gpt2_fp8.data.ids import Tokens, check_batch
from gpt2_fp8.data.lane import LaneState
from gpt2_fp8.data.packing import Batches
from gpt2_fp8.runtime.collectives import rank_and_world

PADDING = -1  # the id of every token of a row that only fills up a validation batch; the loss ignores its targets


class Cursor(TypedDict):
    """Where the order stands after a step. It goes into JSON, and to `TokenDataModule.advance`."""

    step: int
    lanes: dict[str, LaneState]  # the lanes that this rank reads
    units: list[int]  # the units whose first text is in this step


class Steps(IterableDataset[dict[str, Any]]):
    """The remaining steps of a run. `len` is of the whole run, since Lightning continues its count after a resume.

    Args:
        start: called when iteration starts; returns the number of steps done, and the batches from there on.
        max_steps: the step after which the run ends.
        overfit_batches: repeat the first N batches without end (then `start` gives the very first ones); 0: off.
    """

    def __init__(self, start: Callable[[], tuple[int, Batches]], max_steps: int, overfit_batches: int):
        self.start, self.max_steps, self.overfit_batches = start, max_steps, overfit_batches
        self.wait_seconds = 0.0  # spent in here, while training waits

    def __len__(self) -> int:
        return self.max_steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        items = self._items()
        while True:
            before = time.perf_counter()
            item = next(items, None)
            self.wait_seconds += time.perf_counter() - before
            if item is None:
                return
            yield item

    def _items(self) -> Iterator[dict[str, Any]]:
        step, batches = self.start()
        assert step < self.max_steps, "nothing is left to train on"  # Lightning would ask again without end
        try:
            kept = [torch.from_numpy(batches.next()) for _ in range(self.overfit_batches)]
            while step < self.max_steps:
                ids = kept[step % len(kept)] if kept else torch.from_numpy(batches.next())
                step += 1
                cursor: Cursor = {"step": step, "lanes": {} if kept else batches.state(), "units": batches.begun()}
                yield {"ids": ids, "cursor": cursor}
        except DataSourceLost as error:
            batches.close()
            raise DataSourceLost(str(error), lead="\nwhen it answers again: ") from error
        except RunError:  # otherwise the exit would wait for workers that are in the middle of their own retries
            batches.close()
            raise


class Validation(IterableDataset[dict[str, Any]]):
    """One rank's rows of the validation sequences of each source, uint16 or uint32 [n, n_positions + 1].

    Every rank has the same number of items, all of one shape: rows of `PADDING` take the place of missing sequences. An
    item is of one source. The only source of a run has the name "".
    """

    def __init__(self, sources: dict[str, Tokens], micro_batch_size: int, vocab_size: int):
        self.vocab_size = vocab_size
        self.named = "" not in sources
        self.rows = min(micro_batch_size, max(_a_rank(blocks) for blocks in sources.values()))
        self.ids = [self._mine(blocks) for blocks in sources.values()]

    def _mine(self, blocks: Tokens) -> Tensor:
        """Return this rank's rows of a source, int32 [items * rows, n_positions + 1], with its padding."""
        rank, world = rank_and_world()
        items = -(-_a_rank(blocks) // self.rows)
        mine = torch.from_numpy(blocks[rank::world].astype("int32"))
        padding = torch.full((items * self.rows - len(mine), mine.shape[1]), PADDING, dtype=torch.int32)
        return torch.cat([mine, padding])

    def __len__(self) -> int:
        return sum(len(ids) for ids in self.ids) // self.rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for source, rows in enumerate(self.ids):
            for ids in rows.split(self.rows):
                check_batch(ids.numpy(), self.vocab_size, lowest=PADDING)
                yield {"ids": ids, "source": source} if self.named else {"ids": ids}


def _a_rank(blocks: Tokens) -> int:
    """Return how many rows of a source's blocks each rank has, padding included."""
    return -(-len(blocks) // rank_and_world()[1])
