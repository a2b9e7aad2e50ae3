"""Reading and tokenising units ahead of need, in worker processes or in this one.

Workers get units and return tokens. The use of the tokens is decided elsewhere, so neither the number of workers nor
their death can change the order of samples.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

from gpt2_fp8.data.documents import TokenisedUnit
from gpt2_fp8.data.reader import Reader, WorkCounts
from gpt2_fp8.data.units import Unit
from gpt2_fp8.data.workers import WorkerPool
from gpt2_fp8.runtime.signals import interruptible

log = logging.getLogger(__name__)

KEEP_BYTES = 64 << 20  # of tokens: a corpus below 32 M tokens is tokenised once, and not in every epoch


@dataclass(eq=False)
class Ticket:
    """A unit that was asked for."""

    unit: Unit
    future: Future[tuple[TokenisedUnit, WorkCounts]] | None = None  # None: read when taken


@dataclass
class UnitPool:
    """Tokenised units, read by `num_workers` processes (0: by this one, when they are taken)."""

    reader: Reader
    num_workers: int
    on_read: Callable[[Unit, TokenisedUnit], None] | None = None  # is given each unit that was read
    counts: WorkCounts = field(default_factory=WorkCounts)
    _workers: WorkerPool | None = None
    _kept: OrderedDict[Unit, TokenisedUnit] = field(default_factory=OrderedDict)

    def ask(self, unit: Unit) -> Ticket:
        """Have `unit` read, without waiting. Every ticket must be taken or dropped once."""
        if not self.num_workers or unit in self._kept:
            return Ticket(unit)
        self._workers = self._workers or WorkerPool(self.reader, self.num_workers, self.counts)
        return Ticket(unit, self._workers.submit(unit))

    def take(self, ticket: Ticket) -> TokenisedUnit:
        """Return the tokens of the ticket's unit. It waits for them, and a signal may end the wait (Interrupted).

        Raises what the reader and `on_read` do, and RunError if workers died repeatedly while reading it.
        """
        unit = ticket.unit
        if ticket.future is None and unit in self._kept:
            return self._keep(unit, self._kept[unit])
        with interruptible():
            tokenised, counts = ticket.future.result() if ticket.future is not None else self.reader(unit)
        self.counts.units += counts.units
        self.counts.cache_hits += counts.cache_hits
        self.counts.retries += counts.retries
        if self.on_read is not None:
            self.on_read(unit, tokenised)
        return self._keep(unit, tokenised)

    def read(self, units: list[Unit], what: str) -> Iterator[TokenisedUnit]:
        """Yield the tokens of `units` in turn, reading ahead for all workers. `what`: for the log, if it takes long."""
        progress = ProgressLog(what, len(units))
        rest = iter(units)
        ahead: deque[Ticket] = deque()
        try:
            for done in range(len(units)):
                ahead.extend(map(self.ask, islice(rest, self.num_workers + 1 - len(ahead))))
                progress.at(done)
                yield self.take(ahead.popleft())
        finally:
            for ticket in ahead:
                self.drop(ticket)

    def drop(self, ticket: Ticket) -> None:
        """Cancel the ticket: its unit is not needed."""
        if ticket.future is not None:
            ticket.future.cancel()

    def close(self) -> None:
        """End the worker processes, without waiting for their reads. The pool can be used again."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def _keep(self, unit: Unit, tokenised: TokenisedUnit) -> TokenisedUnit:
        """Keep the units that were used last, up to `KEEP_BYTES`."""
        self._kept[unit] = tokenised
        self._kept.move_to_end(unit)
        while sum(u.tokens.nbytes for u in self._kept.values()) > KEEP_BYTES:
            self._kept.popitem(last=False)
        return tokenised


class ProgressLog:
    """Logs how many of `total` are done: after `FIRST_SECONDS`, and then every `EVERY_SECONDS`."""

    FIRST_SECONDS, EVERY_SECONDS = 3.0, 15.0

    def __init__(self, what: str, total: int):
        self.what, self.total = what, total
        self._next = time.monotonic() + self.FIRST_SECONDS

    def at(self, done: int) -> None:
        """Log that `done` are done, if a line is due."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + self.EVERY_SECONDS
            log.info("data: %s: %s of %s", self.what, f"{done:,}", f"{self.total:,}")
