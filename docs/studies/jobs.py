"""The runs of a study: which words each leg has, what is left to do, and several processes at a time."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gpt2_fp8.checkpoint import pointers

HERE = Path(__file__).resolve().parent
STOP = "plugins=[stop_at]", "callbacks.extra=[stop_at]"  # stop_at.py
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Leg:
    """A part of a run with its own words. `until`: the step after which the next leg continues; None: its end."""

    words: tuple[str, ...]
    until: int | None = None

    @classmethod
    def parse(cls, text: str) -> tuple[Leg, ...]:
        """Return the legs of a condition: `WORDS @STEP WORDS ...`."""
        parts: list[list[str]] = [[]]
        marks: list[int | None] = []
        for word in shlex.split(text):
            if re.fullmatch(r"@\d+", word):
                marks.append(int(word[1:]))
                parts.append([])
            else:
                parts[-1].append(word)
        return tuple(cls(tuple(words), until) for words, until in zip(parts, [*marks, None], strict=True))


@dataclass(frozen=True)
class Job:
    """One run of a study: a condition with one seed, of `steps` optimizer steps.

    `after`: its figure is the mean training loss of the steps after this one; None: the last validation loss.
    """

    study: Path
    name: str
    seed: int
    legs: tuple[Leg, ...]
    words: tuple[str, ...]
    steps: int
    after: int | None = None

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.study / re.sub(r"[^\w+.-]+", "_", self.name) / f"seed-{self.seed}"

    @property
    def loss(self) -> float | None:
        """The run's figure; None unless the run is done."""
        summary = self._summary()
        done = summary.get("status") == "completed" and summary.get("steps") == self.steps
        if self.after is None or not done:
            return summary.get("last_val_loss") if done else None
        with (self.folder / "metrics.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["train_loss"]]
        return fmean(float(row["train_loss"]) for row in rows if self.after < int(row["step"]) <= self.steps)

    @property
    def step(self) -> int:
        """The optimizer step of its last checkpoint."""
        last = pointers.read(self.folder / "checkpoints", "last")
        return last.step if last else 0

    def command(self) -> list[str]:
        """Return the command of the leg that is next, which continues what is there."""
        leg = next(leg for leg in self.legs if leg.until is None or self.step < leg.until)
        stop = () if leg.until is None else (*STOP, f"+tags.stop_at={leg.until}")
        own = f"hydra.run.dir={self.folder}", f"seed={self.seed}", "ckpt_path=last", "callbacks.progress_bar=false"
        return [sys.executable, "-m", "gpt2_fp8.run", *self.words, *leg.words, *own, *stop]

    def _summary(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return json.loads((self.folder / "summary.json").read_text())
        return {}


class Queue:
    """Runs jobs that are not done, some at a time, each on one GPU of the list.

    Args:
        jobs: in the order in which they begin.
        gpus: names for CUDA_VISIBLE_DEVICES, given out in turn; none: the processes see what this one sees.
        at_once: how many at a time; None: one for each GPU.
    """

    def __init__(self, jobs: Sequence[Job], gpus: Sequence[str], at_once: int | None):
        places = at_once or len(gpus) or 1
        self._free = deque(gpus[i % len(gpus)] if gpus else None for i in range(places))
        self._waiting = deque(job for job in jobs if job.loss is None)
        self._running: dict[Job, tuple[subprocess.Popen[bytes], str | None]] = {}
        self._failed: list[Job] = []
        print(f"{len(jobs)} runs, {len(jobs) - len(self._waiting)} of them done", flush=True)

    def run(self) -> int:
        """Run everything. Returns 0, 1 if a run has failed, or 130 if interrupted, once all processes have ended."""
        try:
            with _interrupts():
                while self._waiting or self._running:
                    while self._free and self._waiting:
                        self._start(self._waiting.popleft(), self._free.popleft())
                    self._collect()
                    time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            print("interrupted: the runs save what they have; the same command continues", flush=True)
            return 130
        finally:
            for process, _ in self._running.values():
                process.send_signal(signal.SIGTERM)
            for process, _ in self._running.values():
                while process.poll() is None:  # a second Ctrl-C reaches the runs too, which then leave at once
                    with suppress(KeyboardInterrupt):
                        process.wait()
        return 1 if self._failed else 0

    def _start(self, job: Job, gpu: str | None) -> None:
        paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpu
        job.folder.mkdir(parents=True, exist_ok=True)
        with (job.folder / "output.txt").open("ab") as output:  # also what a run says before it has a log
            process = subprocess.Popen(job.command(), stdout=output, stderr=output, env=environment)
        self._running[job] = process, gpu

    def _collect(self) -> None:
        """Take the processes that have ended; start the next leg of their runs, or note how they ended."""
        for job, (process, gpu) in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[job]
            if process.returncode == 0 and job.step < job.steps:  # a leg is done, and not the run
                self._start(job, gpu)
                continue
            self._free.append(gpu)
            failed = process.returncode != 0 or job.loss is None
            if failed:
                self._failed.append(job)
            ended = f"failed, see {job.folder / 'output.txt'}" if failed else f"{job.loss:.4f}"
            print(f"{job.name}, seed {job.seed}: {ended}", flush=True)


@contextmanager
def _interrupts() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
