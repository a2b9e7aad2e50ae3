"""Which units a run needs: lane by lane in its own order, until the lanes have the tokens of its steps.

How far a lane comes depends on how many tokens its units have, which is known only once they are read. So a walk is
asked again after every unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpt2_fp8.data.order import Place
from gpt2_fp8.data.strands import Strand
from gpt2_fp8.data.token_stream import TokenStream
from gpt2_fp8.data.units import Unit


@dataclass
class Walk:
    """The units that one lane reads, or a validation, and those that it asks for ahead of need.

    Attributes:
        strand: the source.
        side: "training" or "validation".
        order: the units in the order in which they are read.
        rest: those of the source's units that no walk has asked for; the lanes of a source share it.
        tokens: after so many the walk is over; None: at the end of `order`.
        ahead: units that are asked for before they are needed.
        length: tokens of the units that were passed.
    """

    strand: Strand
    side: str
    order: Iterator[Unit]
    rest: set[Unit]
    tokens: int | None
    ahead: int
    length: int = 0
    _asked: deque[Unit] = field(default_factory=deque)

    def next(self, lengths: Mapping[Unit, int]) -> list[Unit]:
        """Go on over the units whose tokens are known, by `lengths`; returns what is to be read for the first time."""
        found: list[Unit] = []
        while self.rest:
            while self._asked and self._asked[0] in lengths and not self._enough():
                self.length += lengths[self._asked.popleft()]
            # As `Lane` has it: the one that it needs, and those ahead. A lane without a turn asks too.
            if len(self._asked) >= self.ahead + (not self.length or not self._enough()):
                break
            if (unit := next(self.order, None)) is None:
                break
            self._asked.append(unit)
            if unit in self.rest:
                self.rest.remove(unit)
                found.append(unit)
        return found

    def _enough(self) -> bool:
        return self.tokens is not None and self.length >= self.tokens

    @property
    def part(self) -> float:
        """Return how much of the needed tokens was passed, from 0 to 1; 0 if the whole text is read."""
        return min(self.length / self.tokens, 1.0) if self.tokens else 0.0


def walks(text: TokenStream, steps: int | None) -> list[Walk]:
    """Return what the first `steps` steps of a run in one process read, and its validation. None: all of the text.

    A source of token ids has no walk: it is read as it is.
    """
    lanes = [None] * text.deal.lanes if steps is None else text.deal.by_lane(steps)
    ahead, n_positions = text.ahead(text.deal.lanes), text.shape.n_positions
    found = []
    for strand in text.strands:
        if strand.part.reader.cache is None:
            continue
        train, val = set(strand.corpus.train), strand.corpus.val
        if strand.part.val_sequences:
            tokens = None if steps is None else strand.part.val_sequences * n_positions + 1
            found.append(Walk(strand, "validation", iter(val), set(val), tokens, text.pool.num_workers + 1))
        for number in strand.numbers():
            sequences, own = lanes[number], number - strand.first_lane
            # A lane of T tokens has (T - 1) // n_positions sequences (`packing`).
            tokens = None if sequences is None else sequences * n_positions + 1 if sequences else 0
            found.append(Walk(strand, "training", _lane(strand, own, steps is not None), train, tokens, ahead))
    return found


def _lane(strand: Strand, lane: int, without_end: bool) -> Iterator[Unit]:
    """Yield the units of a lane in their order: those of a pass, or of one pass after another."""
    place = Place(0, 0)
    while not place.epoch or without_end:
        yield strand.corpus.train[strand.order.unit(lane, place)]
        place = strand.order.after(lane, place)
