"""Reading and tokenising units ahead of need, in processes of their own or in this one.

Workers are asked for units and give back tokens; what is done with them is decided elsewhere, so that neither their
number nor their death can change the order of samples.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from gpt2_fp8.config.errors import RunError, UserError
from gpt2_fp8.data.documents import DocumentCounts, TokenisedUnit
from gpt2_fp8.data.reader import UnitReader, WorkCounts
from gpt2_fp8.data.units import Unit

log = logging.getLogger(__name__)

MAX_DEATHS = 3  # of workers that were to read one and the same unit
KEEP_BYTES = 64 << 20  # of tokens: a corpus below 32 M tokens is tokenised once and not every epoch


@dataclass(eq=False)
class Ticket:
    """A unit that was asked for."""

    unit: Unit
    future: Future[tuple[str, DocumentCounts, WorkCounts]] | None = None  # None: read when taken
    deaths: int = 0


@dataclass
class UnitPool:
    """Tokenised units, read by `num_workers` processes (0: by this one, when they are taken)."""

    reader: UnitReader
    num_workers: int
    counts: WorkCounts = field(default_factory=WorkCounts)
    _executor: ProcessPoolExecutor | None = None
    _spool: tempfile.TemporaryDirectory[str] | None = None  # where workers put the tokens
    _waiting: list[Ticket] = field(default_factory=list)
    _kept: OrderedDict[Unit, TokenisedUnit] = field(default_factory=OrderedDict)

    def ask(self, unit: Unit) -> Ticket:
        """Have `unit` read; does not wait for it. Every ticket is to be taken or dropped, once."""
        ticket = Ticket(unit)
        if self.num_workers and unit not in self._kept:
            self._waiting.append(ticket)
            self._submit(ticket)
        return ticket

    def take(self, ticket: Ticket) -> TokenisedUnit:
        """The tokens of the ticket's unit; waits for them.

        Raises:
            UserError, DataSourceLost: the unit cannot be read.
            RunError: workers die of it, time and again.
        """
        unit = ticket.unit
        if ticket.future is None:
            if unit in self._kept:
                return self._keep(unit, self._kept[unit])
            tokenised, counts = self.reader(unit)
        else:
            tokenised, counts = self._result(ticket)
        self.counts.units += counts.units
        self.counts.cache_hits += counts.cache_hits
        self.counts.retries += counts.retries
        return self._keep(unit, tokenised)

    def drop(self, ticket: Ticket) -> None:
        """The unit is not needed after all."""
        if ticket.future is not None:
            ticket.future.cancel()
            self._waiting.remove(ticket)

    def close(self) -> None:
        """End the worker processes, without waiting for what they are reading. The pool can be used again."""
        executor, self._executor = self._executor, None
        self._waiting.clear()
        if executor is None:
            return
        processes = list((executor._processes or {}).values())  # `terminate_workers` exists from Python 3.14 on
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
        assert self._spool is not None
        self._spool.cleanup()

    def _keep(self, unit: Unit, tokenised: TokenisedUnit) -> TokenisedUnit:
        """Remember the units that were used last, up to `KEEP_BYTES`."""
        self._kept[unit] = tokenised
        self._kept.move_to_end(unit)
        while sum(u.tokens.nbytes for u in self._kept.values()) > KEEP_BYTES:
            self._kept.popitem(last=False)
        return tokenised

    def _result(self, ticket: Ticket) -> tuple[TokenisedUnit, WorkCounts]:
        while True:
            assert ticket.future is not None
            try:
                name, counts, work = ticket.future.result()
                self._waiting.remove(ticket)
                with np.load(name) as arrays:
                    tokenised = TokenisedUnit(arrays["tokens"], arrays["ends"], counts)
                os.unlink(name)
                return tokenised, work
            except BrokenProcessPool:
                self._replace_workers()
            except UserError as error:  # an exception of several arguments comes out of a pickle with its message torn
                raise UserError(error.problems) from None

    def _submit(self, ticket: Ticket) -> None:
        if self._executor is None:
            self._spool = tempfile.TemporaryDirectory(prefix="gpt2_fp8-")
            context = multiprocessing.get_context("spawn")  # never fork: CUDA and threads do not survive it
            self._executor = ProcessPoolExecutor(
                self.num_workers, context, _start_worker, (pickle.dumps(self.reader), self._spool.name)
            )
        try:
            with _interrupts_held():  # a worker is started in here, and must not be ended by the terminal's Ctrl-C
                ticket.future = self._executor.submit(_read_in_worker, ticket.unit)
        except BrokenProcessPool:
            self._replace_workers()

    def _replace_workers(self) -> None:
        """After a worker was killed (all others are ended with it): start again and ask for everything once more."""
        waiting = list(self._waiting)
        self.close()
        self.counts.worker_deaths += 1
        log.warning("data: a worker process was killed; starting %d new ones", self.num_workers)
        for ticket in waiting:
            ticket.deaths += 1
            if ticket.deaths > MAX_DEATHS:
                raise RunError(
                    f"worker processes were killed {ticket.deaths} times while reading {ticket.unit.name}, as happens "
                    "when memory runs out; fewer of them (data.num_workers) need less, and 0 shows the error itself"
                )
        self._waiting = waiting
        for ticket in waiting:
            self._submit(ticket)


_reader: UnitReader | None = None  # in a worker process
_spool = ""


def _start_worker(reader: bytes, spool: str) -> None:
    global _reader, _spool
    os.environ["USE_TORCH"] = "0"  # for `datasets`, see `hub._import_datasets`; hence the inner pickle
    _reader, _spool = pickle.loads(reader), spool
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _read_in_worker(unit: Unit) -> tuple[str, DocumentCounts, WorkCounts]:
    """The tokens go by a file: a process that is killed while megabytes are in the executor's pipe leaves half a
    message there, for the rest of which the executor waits for ever."""
    assert _reader is not None
    tokenised, work = _reader(unit)
    handle, name = tempfile.mkstemp(dir=_spool, suffix=".npz")
    with os.fdopen(handle, "wb") as file:
        np.savez(file, tokens=tokenised.tokens, ends=tokenised.ends)
    return name, tokenised.counts, work


def _end_with_parent() -> None:
    """A parent that is killed leaves no one to end its workers: they wait for it and go."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(_spool, ignore_errors=True)
    os._exit(1)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started in here have SIGINT blocked for good; in this one it is held back until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
