"""Reading and tokenising units ahead of need, in processes of their own or in this one.

Workers are asked for units and give back tokens; what is done with them is decided elsewhere, so that neither their
number nor their death can change the order of samples.
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
from gpt2_fp8.data.documents import TokenisedUnit
from gpt2_fp8.data.reader import UnitReader, WorkCounts
from gpt2_fp8.data.units import Unit
from gpt2_fp8.data.worker_pool import Crew
from gpt2_fp8.data.worker_process import Done, SpoolLost
from gpt2_fp8.runtime.signals import interruptible

log = logging.getLogger(__name__)

KEEP_BYTES = 64 << 20  # of tokens: a corpus below 32 M tokens is tokenised once and not every epoch


@dataclass(eq=False)
class Ticket:
    """A unit that was asked for."""

    unit: Unit
    future: Future[Done] | None = None  # None: read when taken


@dataclass
class UnitPool:
    """Tokenised units, read by `num_workers` processes (0: by this one, when they are taken)."""

    reader: UnitReader
    num_workers: int
    digests: Digests | None = None  # what each unit was before; None: nothing to compare
    counts: WorkCounts = field(default_factory=WorkCounts)
    _crew: Crew | None = None
    _kept: OrderedDict[Unit, TokenisedUnit] = field(default_factory=OrderedDict)
    _said_lost: bool = False

    def ask(self, unit: Unit) -> Ticket:
        """Have `unit` read; does not wait for it. Every ticket is to be taken or dropped, once."""
        if not self.num_workers or unit in self._kept:
            return Ticket(unit)
        self._crew = self._crew or Crew(self.reader, self.num_workers, self.counts)
        return Ticket(unit, self._crew.submit(unit))

    def take(self, ticket: Ticket) -> TokenisedUnit:
        """The tokens of the ticket's unit; waits for them, and a signal may end that wait.

        Raises:
            UserError: the unit cannot be read, or is not what it was when it was read before.
            DataSourceLost: its source does not answer.
            RunError: workers die of it, time and again.
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
        return self._keep(unit, tokenised)

    def _received(self, unit: Unit, future: Future[Done]) -> tuple[TokenisedUnit, WorkCounts]:
        """What a worker has read; read once more here where the temporary folder did not hold it."""
        try:
            with interruptible():
                done = future.result()
            with np.load(done.name) as arrays:
                tokenised = TokenisedUnit(arrays["tokens"], arrays["ends"], done.documents, done.sha256)
            os.unlink(done.name)
            return tokenised, done.work
        except (SpoolLost, OSError, zipfile.BadZipFile) as error:
            if isinstance(error, OSError) and future.exception() is error:
                raise  # the reader's
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
        """The unit is not needed after all."""
        if ticket.future is not None:
            ticket.future.cancel()

    def close(self) -> None:
        """End the worker processes, without waiting for what they are reading. The pool can be used again."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def _keep(self, unit: Unit, tokenised: TokenisedUnit) -> TokenisedUnit:
        """Remember the units that were used last, up to `KEEP_BYTES`."""
        self._kept[unit] = tokenised
        self._kept.move_to_end(unit)
        while sum(u.tokens.nbytes for u in self._kept.values()) > KEEP_BYTES:
            self._kept.popitem(last=False)
        return tokenised
