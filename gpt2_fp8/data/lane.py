"""A lane: an endless row of tokens, cut into blocks.

A lane is consumed in *segments*. A segment has the tokens of a unit from some offset on, and whole further units until
there is at least one block. It is cut into blocks of n_positions + 1 tokens that start n_positions apart. So every
token is an input once, and a target once. The blocks are permuted, and the tokens that are left begin the next segment.
Four integers therefore say where a lane stands.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from gpt2_fp8.config.errors import UserError
from gpt2_fp8.data.ids import Tokens
from gpt2_fp8.data.order import Order, Permutation, Place
from gpt2_fp8.data.prefetch import Ticket, UnitPool
from gpt2_fp8.data.units import DocumentCounts, Unit


class LaneState(TypedDict):
    """Where a lane stands, for JSON."""

    epoch: int
    position: int  # in the lane's list of units
    offset: int  # of the segment's first token in that unit
    block: int  # the index of the segment's next block
    documents: dict[str, int]  # counts of the units whose first token is in a segment that was begun


def lane_start() -> LaneState:
    """Return the state of a lane that was not read yet."""
    return {"epoch": 0, "position": 0, "offset": 0, "block": 0, "documents": DocumentCounts().as_dict()}


@dataclass
class Segment:
    """Some blocks of a lane, and what comes after them."""

    tokens: Tokens
    blocks: Permutation
    next: tuple[Place, int]  # place and offset of the next segment
    counts: DocumentCounts
    units: list[int]  # the units that it is made of


@dataclass
class Lane:
    """Lane `index` of `order`, from the state `start` on. Asks for its next unit while it still deals out this one."""

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
        place = self.order.after(self.index, self._asked[-1][0]) if self._asked else self._first_unread()
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

    def _load(self) -> Segment:
        parts: list[Tokens] = []
        counts: list[DocumentCounts] = []
        units: list[int] = []
        place, length, before = self._place, 0, 0
        while length <= self.n_positions:
            if parts:
                place = self.order.after(self.index, place)
            tokens, unit_counts = self._read(place)
            if not parts:
                tokens = self._from_offset(tokens)
            parts.append(tokens)
            counts.append(unit_counts)
            units.append(self.order.unit(self.index, place))
            before, length = length, length + len(tokens)
        while len(self._asked) < self.ahead:
            self.ask()
        n_blocks = (length - 1) // self.n_positions
        if self._block >= n_blocks:
            raise self._changed(f"{self._block} sequences", str(n_blocks))
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

    def _from_offset(self, tokens: Tokens) -> Tokens:
        if self._offset <= len(tokens):
            return tokens[self._offset :]
        raise self._changed(f"{self._offset} tokens", str(len(tokens)))

    def _changed(self, read: str, there: str) -> UserError:
        return UserError.of(
            "the text changed under this run, or its checkpoint was: "
            f"a unit of which {read} were read has only {there}",
            "restore the text, name another checkpoint, or start a new run",
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
            self._last = place, unit.permuted(order), unit.counts
        return self._last[1:]

    def _first_unread(self) -> Place:
        return self.order.after(self.index, self._last[0]) if self._last else self._place
