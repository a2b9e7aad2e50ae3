"""Worker processes that read units. A thread of the parent serves each: it sends a unit and waits for the tokens.

A worker may be killed, end, or hang: for `LIFE_SECONDS` it neither answers nor uses CPU time. A new one then reads its
unit again, and nothing else is lost. A unit on which several workers died is given up.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import pickle
import signal
import threading
import time
import traceback
from concurrent.futures import Future
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from gpt2_fp8.config.errors import Problem, RunError
from gpt2_fp8.data.documents import TokenisedUnit
from gpt2_fp8.data.reader import Reader, WorkCounts
from gpt2_fp8.data.units import Unit
from gpt2_fp8.runtime import registry

log = logging.getLogger(__name__)

LIFE_SECONDS = 600.0  # longer than any wait before a retry, shorter than the process group's timeout
MAX_DEATHS = 3  # of workers on one unit
_POLL_SECONDS = 1.0

Answer = tuple[TokenisedUnit, WorkCounts]


class WorkerLost(Exception):
    """A worker process has ended, or hangs; the message says how."""


class WorkerPool:
    """Up to `number` workers, started when there is work. `counts.worker_deaths` counts the replaced ones.

    Call `close` at the end; the interpreter's exit does it too.
    """

    def __init__(self, reader: Reader, number: int, counts: WorkCounts):
        self.number, self.counts = number, counts
        self.workers: list[Worker] = []
        self._reader = pickle.dumps(reader)
        self._jobs: SimpleQueue[tuple[Unit, Future[Answer]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that wait for a job
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # of `workers`, `counts` and `_closing`
        self._closing = False
        resource_tracker.ensure_running()  # in this thread: starting it unblocks signals in the thread that does so
        atexit.register(self.close)  # runs before multiprocessing's own, which would wait for the workers

    def submit(self, unit: Unit) -> Future[Answer]:
        """Have `unit` read. The future raises the reader's errors, and RunError if workers die of the unit."""
        future: Future[Answer] = Future()
        self._jobs.put((unit, future))
        if not self._idle.acquire(blocking=False) and len(self._threads) < self.number:
            thread = threading.Thread(target=self._serve, name="data worker", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def close(self) -> None:
        """End the processes without waiting for their reads."""
        atexit.unregister(self.close)
        with self._lock:
            self._closing = True
            for worker in self.workers:
                worker.process.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Run one thread: have jobs read by a worker of its own, and replace that when it is lost."""
        # The worker inherits the mask. A Ctrl-C, or a scheduler's signal to the whole group, must not reach it, even
        # before it can ignore it itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
        worker: Worker | None = None
        while (job := self._jobs.get()) is not None:
            unit, future = job
            if future.set_running_or_notify_cancel():
                worker = self._read(worker, unit, future)
            self._idle.release()
        self._bury(worker)

    def _read(self, worker: Worker | None, unit: Unit, future: Future[Answer]) -> Worker | None:
        """Have a unit read, by another worker when one is lost. Returns the worker that is left, if any."""
        for _ in range(MAX_DEATHS + 1):
            try:
                worker = worker or self._start()
                future.set_result(worker.read(unit))
                return worker
            except WorkerLost as lost:
                self._bury(worker)
                worker, how = None, str(lost)
                if self._closing:
                    future.set_exception(RunError("the worker processes were ended"))
                    return None
                log.warning("data: a worker process %s while it read %s", how, unit.name)
            except Exception as error:
                future.set_exception(error)
                return worker
        cause = f"{MAX_DEATHS + 1} worker processes ended while reading {unit.name}; the last one {how}"
        remedy = "data.num_workers=0 reads without workers, and shows where it happens"
        future.set_exception(RunError(str(Problem(cause, remedy))))
        return None

    def _start(self) -> Worker:
        with self._lock:
            if self._closing:
                raise WorkerLost("was ended")
            worker = Worker(self._reader)
            self.workers.append(worker)
            return worker

    def _bury(self, worker: Worker | None) -> None:
        """End a worker, and count its death unless this pool ends."""
        if worker is not None:
            worker.end()
            with self._lock:
                self.workers.remove(worker)
                self.counts.worker_deaths += not self._closing


class Worker:
    """A process, and the parent's end of its pipe."""

    def __init__(self, reader: bytes):
        context = multiprocessing.get_context("spawn")  # never fork: CUDA and threads do not survive it
        self._pipe, its = context.Pipe()
        self.process = context.Process(target=serve, args=(its, reader), daemon=True)
        self.process.start()
        its.close()  # with this copy open, the end of the process would not be noticed

    def read(self, unit: Unit) -> Answer:
        """Have a unit read, and wait for it. Raises what the reader raises, and WorkerLost."""
        try:
            self._pipe.send(unit)
            used, since = -1, 0.0
            while not self._pipe.poll(_POLL_SECONDS):
                if (now := _cpu_time(self.process.pid)) != used:
                    used, since = now, time.monotonic()
                elif time.monotonic() - since > LIFE_SECONDS:
                    raise WorkerLost(f"showed no life for {LIFE_SECONDS:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self.process.join(1.0)
            raise WorkerLost(self._how_it_ended()) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Kill it, and wait a moment: in an uninterruptible read it stays until that ends."""
        self.process.kill()
        self.process.join(5.0)
        self._pipe.close()

    def _how_it_ended(self) -> str:
        code = self.process.exitcode
        if code is None:
            return "closed its pipe"
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def _cpu_time(pid: int | None) -> int:
    """Return the CPU time that a process has used, in the kernel's ticks; 0 where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def serve(pipe: Connection, reader: bytes) -> None:
    """Run a worker process: read units until the pipe closes. `reader`: a pickled Reader."""
    # These signals go to the whole process group. Only the parent ends its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    read: Reader = pickle.loads(reader)
    registry.load(read.plugins, Path.cwd())
    try:
        while True:
            pipe.send(_answer(read, pipe.recv()))
    except (EOFError, OSError):  # the parent has ended
        pass


def _answer(read: Reader, unit: Unit) -> Answer | Exception:
    try:
        return read(unit)
    except Exception as error:
        if not isinstance(error, RunError):
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
        error.__cause__ = error.__context__ = None
        try:
            copy: Exception = pickle.loads(pickle.dumps(error))
            return copy
        except Exception:  # an exception is built again from its text, which not every class accepts
            return RuntimeError(f"{type(error).__name__}: {error}")
