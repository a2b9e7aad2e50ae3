"""Runs the jobs of a study, several processes at a time."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from jobs import Job

HERE = Path(__file__).resolve().parent
POLL_SECONDS = 0.2
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Running(NamedTuple):
    """A process of a job: its GPU, and the step that it has gone on from."""

    process: subprocess.Popen[bytes]
    gpu: str | None
    step: int


class Queue:
    """Runs jobs that are not done, some at a time, each on one GPU of the list.

    A job whose `start` is not done waits for it, and those behind it go on. A start comes right before who needs it.

    Args:
        jobs: in the order in which they begin.
        gpus: names for CUDA_VISIBLE_DEVICES, given out in turn; none: the processes see what this one sees.
        at_once: how many at a time; None: one for each GPU.
    """

    def __init__(self, jobs: Sequence[Job], gpus: Sequence[str], at_once: int | None):
        places = at_once or len(gpus) or 1
        self._free = deque(gpus[i % len(gpus)] if gpus else None for i in range(places))
        left = [job for job in jobs if not job.done]
        self._starts: set[Job] = set()
        self._waiting: list[Job] = []
        for job in left:
            if job.start is not None and not job.began and job.start not in self._starts and not job.start.done:
                self._starts.add(job.start)
                self._waiting.append(job.start)
            self._waiting.append(job)
        self._running: dict[Job, Running] = {}
        self._failed: list[Job] = []
        first = f"; common starts to train first: {len(self._starts)}" if self._starts else ""
        print(f"{len(jobs)} runs, {len(jobs) - len(left)} of them done{first}", flush=True)

    def run(self) -> int:
        """Run everything. Returns 0, 1 if a run has failed, or 130 if interrupted, once all processes have ended."""
        try:
            with _interrupts():
                while self._waiting or self._running:
                    while self._free and (job := self._next()) is not None:
                        self._start(job, self._free.popleft())
                    self._collect()
                    time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            print("interrupted: the runs save what they have; the same command continues", flush=True)
            return 130
        finally:
            for process, *_ in self._running.values():
                process.send_signal(signal.SIGTERM)
            for process, *_ in self._running.values():
                while process.poll() is None:  # a second Ctrl-C reaches the runs too, which then leave at once
                    with suppress(KeyboardInterrupt):
                        process.wait()
        return 1 if self._failed else 0

    def _next(self) -> Job | None:
        """Take the first job that need not wait; None if there is none."""
        found = next((job for job in self._waiting if job.start not in self._starts or job.began), None)
        if found is not None:
            self._waiting.remove(found)
        return found

    def _start(self, job: Job, gpu: str | None) -> None:
        if job.fell_back:  # going on would not mend what it has computed
            self._end(job, gpu, 0)
            return
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        try:
            job.folder.mkdir(parents=True, exist_ok=True)
            with (job.folder / "output.txt").open("ab") as output:  # also what a run says before it has a log
                process = subprocess.Popen(
                    job.command(), stdout=output, stderr=output, env=environment, preexec_fn=_end_with_parent
                )
        except OSError as error:
            self._end(job, gpu, 1, f"failed: it cannot be started: {error}")
            return
        self._running[job] = Running(process, gpu, job.step)

    def _collect(self) -> None:
        """Take the processes that have ended; start what is next of their runs, or note how they ended."""
        for job, (process, gpu, step) in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[job]
            if process.returncode == 0 and job.goes_on(step):
                self._start(job, gpu)
            else:
                self._end(job, gpu, process.returncode)

    def _end(self, job: Job, gpu: str | None, code: int, why: str | None = None) -> None:
        """Free a job's place, and say how it ended. What waits for a start that has failed, fails with it."""
        self._free.append(gpu)
        self._starts.discard(job)
        if code == 0 and job.done:
            print(f"{job}: {job.told}", flush=True)
            return
        others = [other for other in self._waiting if other.start == job and not other.began]
        self._waiting = [other for other in self._waiting if other not in others]
        self._failed += [job, *others]
        also = f"; {len(others)} runs that begin from it are not trained" if others else ""
        print(f"{job}: {why or job.why_failed(code)}{also}", flush=True)


@contextmanager
def _interrupts() -> Iterator[None]:
    """Treat the other signals that ask a program to end as Ctrl-C; not one that is ignored, as under nohup."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    asked = [number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in asked}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Have this process saved and ended when the study is killed, on Linux: its GPU would not be free for others."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM.value)
