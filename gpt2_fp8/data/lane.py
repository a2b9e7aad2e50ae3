"""A lane: an endless row of tokens, cut into blocks. And batches, whose sequences are taken from lanes in turn.

A lane is consumed in *segments*: the tokens of a unit from some offset on, and whole further units until there is at
least one block. A segment is cut into blocks of n_positions + 1 tokens that start n_positions apart, so every token is
an input once, and a target once. The blocks are permuted, and the tokens that are left begin the next segment. Four
integers therefore say where a lane stands.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from gpt2_fp8.data.order import Deal, Numbers, Order, Place
from gpt2_fp8.data.tokenizer import Tokens
from gpt2_fp8.data.units import DocumentCounts, Unit
from gpt2_fp8.data.workers import Ticket, UnitPool
from gpt2_fp8.runtime.signals import allow_interrupt


class LaneState(TypedDict):
    """Where a lane stands, for JSON."""

    epoch: int
    position: int  # in the lane's list of units
    offset: int  # of the segment's first token in that unit
    block: int  # the index of the segment's next block
    documents: dict[str, int]  # counts of the units whose first token is in a segment that was begun


class Cursor(TypedDict):
    """Where the order stands after a step. It goes into JSON, and to `TokenDataModule.advance`."""

    step: int
    lanes: dict[str, LaneState]  # the lanes that this rank reads
    units: list[int]  # the units whose first text is in this step


def lane_start() -> LaneState:
    """Return the state of a lane that was not read yet."""
    return {"epoch": 0, "position": 0, "offset": 0, "block": 0, "documents": DocumentCounts().as_dict()}


class Segment(NamedTuple):
    """Some blocks of a lane, and what comes after them."""

    tokens: Tokens
    blocks: Numbers  # their order
    next: tuple[Place, int]  # place and offset of the next segment
    counts: DocumentCounts
    units: list[int]  # the units that it is made of


@dataclass
class Lane:
    """Lane `index` of `order`, from the state `start` on. It asks for units before they are needed."""

    index: int
    order: Order
    units: list[Unit]
    pool: UnitPool
    n_positions: int
    start: LaneState
    ahead: int = 1  # units asked for before they are needed
    first_unit: int = 0  # where `units` begin among the units of all sources
    _asked: deque[tuple[Place, Ticket]] = field(default_factory=deque)
    _last: tuple[Place, Tokens, DocumentCounts] | None = None  # the unit in which the next segment starts
    _segment: Segment | None = None
    _begun: list[int] = field(default_factory=list)  # units since the last call of `begun`

    def __post_init__(self) -> None:
        self._place = Place(self.start["epoch"], self.start["position"])
        self._offset, self._block = self.start["offset"], self.start["block"]
        self._documents = DocumentCounts(**self.start["documents"])

    def ask(self) -> None:
        """Have one more unit read ahead."""
        last = self._asked[-1][0] if self._asked else self._last and self._last[0]
        place = self.order.after(self.index, last) if last else self._place
        self._asked.append((place, self.pool.ask(self.units[self.order.unit(self.index, place)])))

    def next(self) -> Tokens:
        """Return the next block: uint16 or uint32 [n_positions + 1], a view."""
        if self._segment is None:
            self._segment = self._load()
            self._begun += [self.first_unit + unit for unit in self._segment.units]
        segment = self._segment
        if self._block == 0:
            self._documents += segment.counts
        start = int(segment.blocks[self._block]) * self.n_positions
        self._block += 1
        if self._block == len(segment.blocks):
            (self._place, self._offset), self._block = segment.next, 0
            self._segment = None
        return segment.tokens[start : start + self.n_positions + 1]

    def state(self) -> LaneState:
        """Return the state from which a lane can continue here."""
        return {
            "epoch": self._place.epoch,
            "position": self._place.position,
            "offset": self._offset,
            "block": self._block,
            "documents": self._documents.as_dict(),
        }

    def begun(self) -> list[int]:
        """Return the units from which a first block was dealt out since the last call."""
        begun, self._begun = self._begun, []
        return begun

    def finish(self) -> None:
        """Take what was asked for. It is then in the cache."""
        while self._asked:
            self.pool.take(self._asked.popleft()[1])

    def _load(self) -> Segment:
        parts: list[Tokens] = []
        counts: list[DocumentCounts] = []
        units: list[int] = []
        place, length, before = self._place, 0, 0
        while length <= self.n_positions:
            if parts:
                place = self.order.after(self.index, place)
            tokens, unit_counts = self._read(place)
            parts.append(tokens if parts else tokens[self._offset :])
            counts.append(unit_counts)
            units.append(self.order.unit(self.index, place))
            before, length = length, length + len(parts[-1])
        while len(self._asked) < self.ahead:
            self.ask()
        n_blocks = (length - 1) // self.n_positions
        assert self._block < n_blocks, "the unit is shorter than it was when it was read first"
        # All units but the last have n_positions tokens together at most: the next segment starts in the last one.
        offset = n_blocks * self.n_positions - before + (self._offset if len(parts) == 1 else 0)
        # A unit is counted by the segment in which its first token is an input.
        counted = counts[1 if self._offset else 0 : -1 if offset == 0 else None]
        return Segment(
            parts[0] if len(parts) == 1 else np.concatenate(parts),
            self.order.blocks(self.index, self._place, n_blocks),
            (place, offset),
            sum(counted, DocumentCounts()),
            units,
        )

    def _read(self, place: Place) -> tuple[Tokens, DocumentCounts]:
        """Return the unit at `place`, with its documents in the epoch's order."""
        if self._last is None or self._last[0] != place:
            if not self._asked:
                self.ask()
            asked, ticket = self._asked.popleft()
            assert asked == place
            unit = self.pool.take(ticket)
            index = self.order.unit(self.index, place)
            order = self.order.documents(place.epoch, index, len(unit.ends))
            self._last = place, unit.permute(order), unit.counts
        return self._last[1:]


class Batches:
    """One rank's shares of the global batches: their sequences j with j mod `world` = `rank`.

    If `world` divides the number of lanes, a rank reads only its own lanes. Otherwise several ranks read the same lane,
    and each of them skips the others' sequences. `step`: how many global batches were dealt out before.
    """

    def __init__(self, lanes: dict[int, Lane], deal: Deal, n_positions: int, rank: int, world: int, step: int = 0):
        assert deal.global_batch_size % world == 0
        self.lanes, self.deal, self.step = lanes, deal, step
        self.n_positions, self.rank, self.world = n_positions, rank, world
        for depth in range(1 + max(lane.ahead for lane in lanes.values())):
            for lane in lanes.values():  # first what every lane needs now, then what they need next
                if depth <= lane.ahead:
                    lane.ask()

    def next(self) -> npt.NDArray[np.int32]:
        """Return the next share: int32 [global_batch_size // world, n_positions + 1]."""
        with allow_interrupt():  # the state of a step that was not trained on is not kept
            size = self.deal.global_batch_size
            ids = np.empty((size // self.world, self.n_positions + 1), dtype=np.int32)
            for j, number in enumerate(self.deal.of_step(self.step).tolist()):
                if lane := self.lanes.get(number):
                    block = lane.next()
                    if j % self.world == self.rank:
                        ids[j // self.world] = block
            self.step += 1
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
