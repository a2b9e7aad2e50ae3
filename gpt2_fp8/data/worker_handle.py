"""A worker process as its parent sees it: start it, give it a job, listen to it, end it."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.context import SpawnProcess

from gpt2_fp8.config.errors import RunError
from gpt2_fp8.data.units import Unit
from gpt2_fp8.data.worker_process import READY, Done, Failed, run


@dataclass(eq=False)
class Job:
    """A unit to be read. `deaths`: how many workers died while they had it."""

    unit: Unit
    future: Future[Done] = field(default_factory=Future)
    deaths: int = 0


@dataclass(eq=False)
class Worker:
    """A process, the parent's end of its pipe, and its job."""

    process: SpawnProcess
    pipe: connection.Connection
    job: Job | None = None
    ready: bool = False
    silence: float = 0.0  # seconds since its last message, while it has something to do

    @classmethod
    def start(cls, reader: bytes, spool: str) -> Worker:
        """Start a process, with `reader` and `spool` for `worker_process.run`. It is `ready` once it says so."""
        context = multiprocessing.get_context("spawn")  # never fork: CUDA and threads do not survive it
        ours, its = context.Pipe()
        process = context.Process(target=run, args=(its, reader, spool), daemon=True)
        process.start()
        its.close()  # with this copy open, the end of the process would not be noticed
        return cls(process, ours)

    def give(self, job: Job) -> None:
        """Have it read a job, unless that was cancelled. It must be ready and without a job."""
        if job.deaths == 0 and not job.future.set_running_or_notify_cancel():
            return
        self.job, self.silence = job, 0.0
        with suppress(OSError):  # the process has ended, which `listen` notices soon
            self.pipe.send(job.unit)

    def listen(self, passed: float) -> str | None:
        """Take the messages that it has sent; one may end its job. Returns how its process ended, or None if it runs.

        `passed`: seconds since the last call.
        """
        silence = self.silence + passed
        try:
            while self.pipe.poll():
                silence = 0.0
                self._hear(self.pipe.recv())
        except (EOFError, OSError):
            self.process.join(1.0)
            return self._how()
        busy = self.job is not None or not self.ready
        self.silence = silence if busy else 0.0
        return None

    def end(self, seconds: float) -> None:
        """Kill it, and wait at most `seconds`: in an uninterruptible read it stays until that ends."""
        self.process.kill()
        self.process.join(seconds)
        self.pipe.close()

    def _hear(self, message: object) -> None:
        if message == READY:
            self.ready = True
        elif isinstance(message, Done | Failed):
            assert self.job is not None
            future, self.job = self.job.future, None
            if isinstance(message, Done):
                future.set_result(message)
            else:
                if not isinstance(message.error, RunError):
                    message.error.add_note(f"in a worker process:\n{message.where}")
                future.set_exception(message.error)

    def _how(self) -> str:
        code = self.process.exitcode
        if code is None:
            return "closed its pipe"
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
