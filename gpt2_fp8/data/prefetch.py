"""Reading and tokenising units ahead of need, in worker processes or in this one.

Workers get units and return tokens. The use of the tokens is decided elsewhere, so neither the number of workers nor
their death can change the order of samples.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from gpt2_fp8.data.digests import Digests
from gpt2_fp8.data.documents import TokenisedUnit, said_replaced
from gpt2_fp8.data.reader import Reader, WorkCounts
from gpt2_fp8.data.units import Unit
from gpt2_fp8.data.worker_pool import WorkerPool
from gpt2_fp8.data.worker_process import Done, SpoolLost
from gpt2_fp8.runtime.signals import interruptible

log = logging.getLogger(__name__)

KEEP_BYTES = 64 << 20  # of tokens: a corpus below 32 M tokens is tokenised once, and not in every epoch


@dataclass(eq=False)
class Ticket:
    """A unit that was asked for."""

    unit: Unit
    future: Future[Done] | None = None  # None: read when taken


@dataclass
class UnitPool:
    """Tokenised units, read by `num_workers` processes (0: by this one, when they are taken)."""

    reader: Reader
    num_workers: int
    digests: Digests | None = None  # the units' earlier digests; None: nothing to compare
    counts: WorkCounts = field(default_factory=WorkCounts)
    _workers: WorkerPool | None = None
    _kept: OrderedDict[Unit, TokenisedUnit] = field(default_factory=OrderedDict)
    _said_lost: bool = False
    _said_replaced: bool = False

    def ask(self, unit: Unit) -> Ticket:
        """Have `unit` read, without waiting. Every ticket must be taken or dropped once."""
        if not self.num_workers or unit in self._kept:
            return Ticket(unit)
        self._workers = self._workers or WorkerPool(self.reader, self.num_workers, self.counts)
        return Ticket(unit, self._workers.submit(unit))

    def take(self, ticket: Ticket) -> TokenisedUnit:
        """Return the tokens of the ticket's unit. It waits for them, and a signal may end the wait.

        Raises:
            UserError: the unit cannot be read, or differs from what was read before.
            DataSourceLost: its source does not answer.
            RunError: workers died repeatedly while reading it.
            Interrupted: a signal came.
        """
        unit = ticket.unit
        if ticket.future is not None:
            tokenised, counts = self._received(unit, ticket.future)
        elif unit in self._kept:
            return self._keep(unit, self._kept[unit])
        else:
            with interruptible():
                tokenised, counts = self.reader(unit)
        self.counts.units += counts.units
        self.counts.cache_hits += counts.cache_hits
        self.counts.retries += counts.retries
        if self.digests is not None:
            self.digests.check(unit, tokenised.sha256)
        if tokenised.replaced and self.counts.units > 1 and not self._said_replaced:  # the first is refused elsewhere
            self._said_replaced = True
            log.warning("data: %s", said_replaced(unit, tokenised))
        return self._keep(unit, tokenised)

    def _received(self, unit: Unit, future: Future[Done]) -> tuple[TokenisedUnit, WorkCounts]:
        """Return what a worker has read. If the temporary folder did not hold it, read the unit again here."""
        try:
            with interruptible():
                done = future.result()
            with np.load(done.name) as arrays:
                tokenised = TokenisedUnit(arrays["tokens"], arrays["ends"], done.documents, done.sha256, done.replaced)
            os.unlink(done.name)
            return tokenised, done.work
        except (SpoolLost, OSError, zipfile.BadZipFile) as error:
            if isinstance(error, OSError) and future.exception() is error:
                raise  # the reader's error
            if not self._said_lost:
                log.warning(
                    "data: the workers' temporary folder loses tokens, and this process reads them again, which is "
                    "slower: %s; TMPDIR=FOLDER names another",
                    error,
                )
            self._said_lost = True
        with interruptible():
            return self.reader(unit)

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
