"""Units, read and tokenised ahead of need by worker processes, or by this one.

Workers get units and return tokens. The use of the tokens is decided elsewhere, so neither the number of workers nor
their death can change the order of samples. If a worker ends, its executor ends with it. The units that were asked for
are then read by new ones, each when it is taken. A unit on which workers end repeatedly is given up.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path

from gpt2_fp8.config.errors import Problem, RunError
from gpt2_fp8.data.reader import Readers, WorkCounts
from gpt2_fp8.data.units import TokenisedUnit, Unit
from gpt2_fp8.runtime import registry, signals
from gpt2_fp8.runtime.signals import allow_interrupt

log = logging.getLogger(__name__)

KEEP_BYTES = 64 << 20  # of tokens: a corpus below 32 M tokens is tokenised once, and not in every epoch
MAX_DEATHS = 3  # of workers on one unit
# They go to the whole process group: a terminal's Ctrl-C, a scheduler's signal. Only the parent ends its workers.
_OF_THE_GROUP = {signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}

Answer = tuple[TokenisedUnit, WorkCounts]


@dataclass(eq=False)
class Ticket:
    """A unit that was asked for."""

    unit: Unit
    future: Future[Answer] | None = None  # None: read when taken


@dataclass
class UnitPool:
    """Tokenised units, read by `num_workers` processes (0: by this one, when they are taken)."""

    readers: Readers
    num_workers: int
    on_read: Callable[[Unit, TokenisedUnit], None] | None = None  # is given each unit that was read
    counts: WorkCounts = field(default_factory=WorkCounts)
    _workers: Workers | None = None
    _kept: OrderedDict[Unit, TokenisedUnit] = field(default_factory=OrderedDict)

    def ask(self, unit: Unit) -> Ticket:
        """Have `unit` read, without waiting."""
        if not self.num_workers or unit in self._kept:
            return Ticket(unit)
        return Ticket(unit, self._submit(unit))

    def take(self, ticket: Ticket) -> TokenisedUnit:
        """Return the tokens of the ticket's unit. It waits for them, and a signal may end the wait (Interrupted).

        Raises what the reader and `on_read` do, and RunError if workers died repeatedly while reading it.
        """
        unit = ticket.unit
        if ticket.future is None and unit in self._kept:
            return self._keep(unit, self._kept[unit])
        with allow_interrupt():
            tokenised, counts = self.readers(unit) if ticket.future is None else self._wait(unit, ticket.future)
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
        for done in range(len(units)):
            ahead.extend(map(self.ask, islice(rest, self.num_workers + 1 - len(ahead))))
            progress.at(done)
            yield self.take(ahead.popleft())

    def close(self) -> None:
        """End the worker processes, without waiting for their reads. The pool can be used again."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def _submit(self, unit: Unit) -> Future[Answer]:
        """Have a worker read `unit`. New ones take the place of workers that have ended."""
        self._workers = self._workers or Workers(self.readers, self.num_workers)
        try:
            return self._workers.submit(unit)
        except BrokenExecutor:
            if not signals.is_pending():  # else they have ended with the process group
                log.warning("data: a worker process ended; new ones take the place of all")
                self.counts.worker_deaths += 1
            self.close()
            return self._submit(unit)

    def _wait(self, unit: Unit, future: Future[Answer]) -> Answer:
        """Wait for a unit. It is read again, then alone, if a worker has ended."""
        for _ in range(MAX_DEATHS):
            try:
                return future.result()
            except BrokenExecutor:
                future = self._submit(unit)
        try:
            return future.result()
        except BrokenExecutor:
            cause = f"{MAX_DEATHS + 1} worker processes ended while reading {unit.name}"
            remedy = "data.num_workers=0 reads without workers, and shows where it happens"
            raise RunError(str(Problem(cause, remedy))) from None

    def _keep(self, unit: Unit, tokenised: TokenisedUnit) -> TokenisedUnit:
        """Keep the units that were used last, up to `KEEP_BYTES`."""
        self._kept[unit] = tokenised
        self._kept.move_to_end(unit)
        while sum(u.tokens.nbytes for u in self._kept.values()) > KEEP_BYTES:
            self._kept.popitem(last=False)
        return tokenised


class Workers:
    """Up to `number` processes. They end with this one, and when the pipe that they wait at is closed."""

    def __init__(self, readers: Readers, number: int):
        context = multiprocessing.get_context("spawn")  # never fork: CUDA and threads do not survive it
        theirs, self._lifeline = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(number, context, _begin, (theirs, readers))
        resource_tracker.ensure_running()  # starting it unblocks signals

    def submit(self, unit: Unit) -> Future[Answer]:
        """Have a unit read. Raises BrokenExecutor if a process has ended."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_THE_GROUP)  # processes that it starts inherit the mask
        try:
            return self._executor.submit(_read, unit)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """End the processes in the midst of their work."""
        self._lifeline.close()
        self._executor.shutdown(wait=False, cancel_futures=True)


# ---- in a worker process ---------------------------------------------------------------------------------------------

_readers: Readers


def _begin(lifeline: Connection, readers: Readers) -> None:
    global _readers
    _readers = readers
    registry.load(readers.plugins, Path.cwd())
    threading.Thread(target=_exit_with_parent, args=[lifeline], daemon=True).start()


def _exit_with_parent(lifeline: Connection) -> None:
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()  # nothing is sent: it waits for the end of the pipe
    os._exit(1)


def _read(unit: Unit) -> Answer:
    try:
        return _readers(unit)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # a plug-in's: the parent could not build it, and the pool would break
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise


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
