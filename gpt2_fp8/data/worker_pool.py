"""Several workers, and the thread that manages them: it hands out units, takes answers, and replaces dead workers.

A worker may be killed, end, or show no life for `LIFE_SECONDS`. A new one then reads its unit again, and nothing else
is lost. A unit on which several workers died is given up, with the cause of the last death.
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
from gpt2_fp8.data.reader import Reader, WorkCounts
from gpt2_fp8.data.units import Unit
from gpt2_fp8.data.worker_handle import Job, Worker
from gpt2_fp8.data.worker_process import Done
from gpt2_fp8.runtime.spool import Spool

log = logging.getLogger(__name__)

LIFE_SECONDS = 60.0  # without a message, after which a worker counts as dead
START_SECONDS = 300.0  # the same until it is ready: its imports may come over a slow network
MAX_DEATHS = 3  # of workers on one unit
_TICK_SECONDS = 1.0


class WorkerPool:
    """Up to `number` workers, started when there is work. `counts.worker_deaths` counts the replaced ones.

    Call `close` at the end; the interpreter's exit does it too.
    """

    def __init__(self, reader: Reader, number: int, counts: WorkCounts):
        self.number, self.counts = number, counts
        self._spool = _spool()
        self.spool = self._spool.path  # the folder where workers put the tokens
        self.workers: list[Worker] = []
        self._reader = pickle.dumps(reader)
        self._jobs: deque[Job] = deque()  # the jobs that no worker has
        self._wake_receiver, self._wake_sender = multiprocessing.Pipe(duplex=False)
        self._closing = False
        self._refused: RunError | None = None  # why no worker can be started
        self._failed_starts = 0
        resource_tracker.ensure_running()  # in this thread: starting it unblocks signals in the thread that does so
        self._thread = threading.Thread(target=self._manage, name="data workers", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # runs before multiprocessing's own, which would wait for the workers

    def submit(self, unit: Unit) -> Future[Done]:
        """Have `unit` read. The future raises the reader's errors, and RunError if workers die of the unit."""
        job = Job(unit)
        self._jobs.append(job)
        self._wake_sender.send_bytes(b"!")
        return job.future

    def close(self) -> None:
        """End the processes without waiting for their reads."""
        if self._closing:
            return
        self._closing = True
        atexit.unregister(self.close)
        self._wake_sender.send_bytes(b"!")
        self._thread.join()
        self._refuse(RunError("the worker processes were ended"))
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.end(5.0)
        self._spool.remove()

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _manage(self) -> None:
        # The processes that this thread starts inherit the mask. A Ctrl-C, or a scheduler's signal to the whole group,
        # must not reach them, even before they can ignore it themselves.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
        before = time.monotonic()
        try:
            while not self._closing:
                self._hand_out()
                connection.wait([self._wake_receiver, *(w.pipe for w in self.workers)], timeout=_TICK_SECONDS)
                while self._wake_receiver.poll():
                    self._wake_receiver.recv_bytes()
                now = time.monotonic()
                passed = min(now - before, 2 * _TICK_SECONDS)  # without the hours for which a whole job may be stopped
                before = now
                for worker in list(self.workers):
                    self._listen_to(worker, passed)
        except Exception as error:  # a fault of this file: the waiting futures must get it
            log.exception("data: the workers cannot be managed")
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

    def _listen_to(self, worker: Worker, passed: float) -> None:
        was_ready = worker.ready
        lost = worker.listen(passed)
        if worker.ready and not was_ready:
            self._failed_starts = 0
        if lost is None and worker.silence > (LIFE_SECONDS if worker.ready else START_SECONDS):
            lost = f"showed no life for {worker.silence:.0f} s"
        if lost is not None:
            self._after_death(worker, lost)

    def _after_death(self, worker: Worker, how: str) -> None:
        """Clean up after the end of a worker: log it, and have its unit read again, unless that is hopeless."""
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
        """Refuse all jobs, now and later: no worker can be started."""
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
