"""Several workers, and the thread that looks after them: it hands out units, has answers taken, and replaces the dead.

A worker that is killed, ends, or shows no life for `LIFE_SECONDS` costs no more than the unit that it was reading being
read again, by a new one. A unit that this happens to time and again is given up, with what it died of.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import pickle
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future
from multiprocessing import connection, resource_tracker

from gpt2_fp8.config.errors import Problem, RunError, UserError
from gpt2_fp8.data.reader import UnitReader, WorkCounts
from gpt2_fp8.data.units import Unit
from gpt2_fp8.data.worker_handle import Job, Worker
from gpt2_fp8.data.worker_process import Done
from gpt2_fp8.runtime.spool import Spool

log = logging.getLogger(__name__)

LIFE_SECONDS = 60.0  # that a worker may show no life
START_SECONDS = 300.0  # likewise, until it is ready: its imports may come over a slow network
MAX_DEATHS = 3  # of workers that were to read one and the same unit
_TICK = 1.0


class Crew:
    """Up to `number` workers, started as there is work; `counts.worker_deaths` counts those that were replaced.

    `close` is to be called in the end; the interpreter's exit does, if nobody has.
    """

    def __init__(self, reader: UnitReader, number: int, counts: WorkCounts):
        self.number, self.counts = number, counts
        self._spool = _spool()
        self.spool = self._spool.path  # where workers put the tokens
        self.workers: list[Worker] = []
        self._reader = pickle.dumps(reader)
        self._jobs: deque[Job] = deque()  # those that no worker has
        self._bell, self._ring = multiprocessing.Pipe(duplex=False)
        self._closing = False
        self._refused: RunError | None = None  # why no worker can be had
        self._failed_starts = 0
        resource_tracker.ensure_running()  # by this thread: it unblocks signals in the one that starts it
        self._thread = threading.Thread(target=self._manage, name="data workers", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # before multiprocessing's own, which would wait for the workers

    def submit(self, unit: Unit) -> Future[Done]:
        """Have `unit` read. The future's exceptions: those of the reader, and RunError where workers die of it."""
        job = Job(unit)
        self._jobs.append(job)
        self._ring.send_bytes(b"!")
        return job.future

    def close(self) -> None:
        """End the processes, whatever they are reading."""
        if self._closing:
            return
        self._closing = True
        atexit.unregister(self.close)
        self._ring.send_bytes(b"!")
        self._thread.join()
        self._refuse(RunError("the worker processes were ended"))
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.end(5.0)
        self._spool.remove()

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _manage(self) -> None:
        # Inherited by the processes that this thread starts: a terminal's Ctrl-C, or a scheduler's signal to the whole
        # group, is not for them, not even before they can say so themselves.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
        before = time.monotonic()
        try:
            while not self._closing:
                self._hand_out()
                connection.wait([self._bell, *(w.pipe for w in self.workers)], timeout=_TICK)
                while self._bell.poll():
                    self._bell.recv_bytes()
                now = time.monotonic()
                passed = min(now - before, 2 * _TICK)  # and not the night that a whole job was stopped
                before = now
                for worker in list(self.workers):
                    self._look_after(worker, passed)
        except Exception as error:  # ours: whoever waits for an answer is to have it
            log.exception("data: the workers cannot be looked after")
            self._refuse(RunError(f"the data workers' thread failed: {type(error).__name__}: {error}"))

    def _hand_out(self) -> None:
        while self._jobs and (self._refused or self._jobs[0].future.cancelled()):
            job = self._jobs.popleft()
            if not job.future.cancelled():
                job.future.set_exception(self._refused)
        idle = [worker for worker in self.workers if worker.job is None]
        for _ in range(min(self.number - len(self.workers), len(self._jobs) - len(idle))):
            self.workers.append(Worker.start(self._reader, self.spool))
        for worker in idle:
            if worker.ready and self._jobs:
                worker.give(self._jobs.popleft())

    def _look_after(self, worker: Worker, passed: float) -> None:
        was_ready = worker.ready
        lost = worker.listen(passed)
        if worker.ready and not was_ready:
            self._failed_starts = 0
        if lost is None and worker.silence > (LIFE_SECONDS if worker.ready else START_SECONDS):
            lost = f"showed no life for {worker.silence:.0f} s"
        if lost is not None:
            self._bury(worker, lost)

    def _bury(self, worker: Worker, how: str) -> None:
        """After the end of a worker: say so, and have its unit read again, unless that is hopeless."""
        worker.end(1.0)
        self.workers.remove(worker)
        self.counts.worker_deaths += 1
        job = worker.job
        if not worker.ready:
            self._failed_starts += 1
            if "exit code" in how or self._failed_starts > MAX_DEATHS:
                self._refuse(RunError(str(_no_start(how))))
                return
        log.warning("data: a worker process %s; another one takes its place", how)
        if job is not None:
            job.deaths += 1
            if job.deaths > MAX_DEATHS:
                job.future.set_exception(RunError(str(_no_life(job, how))))
            else:
                self._jobs.appendleft(job)

    def _refuse(self, error: RunError) -> None:
        """There will be no workers: tell whoever waits, now and later."""
        self._refused = error
        for job in [worker.job for worker in self.workers if worker.job] + list(self._jobs):
            if not job.future.done():
                job.future.set_exception(error)
        self._jobs.clear()


def _spool() -> Spool:
    try:
        return Spool()
    except OSError as error:
        raise UserError.of(
            f"the data's worker processes need a temporary folder: {error.strerror or error}",
            "name one that can be written: TMPDIR=FOLDER before the command; or data.num_workers=0, which needs none",
        ) from None


def _no_start(how: str) -> Problem:
    return Problem(
        f"a worker process that reads the data {how} before it was ready",
        "a script of your own that starts a run needs `if __name__ == \"__main__\":` around it, since workers import "
        "it; data.num_workers=0 goes without workers",
    )  # fmt: skip


def _no_life(job: Job, how: str) -> Problem:
    memory = "SIGKILL" in how
    return Problem(
        f"{job.deaths} worker processes ended while reading {job.unit.name}; the last one {how}"
        + (", as happens when memory runs out" if memory else ""),
        "fewer workers (data.num_workers) need less memory, and 0 shows the error itself"
        if memory
        else "data.num_workers=0 shows where it happens",
    )
