"""What the processes of a parallel sweep know of each other: places, threads, and whether somebody asked for an end.

The first process opens the room. It is a temporary folder, which the workers find by a variable. Ctrl-C reaches a whole
process group, and would tear down the workers while their jobs save. So the first process alone acts on signals. The
workers read from the room that they are to stop. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpt2_fp8.runtime import process_end, ranks, signals, slots, slurm
from gpt2_fp8.runtime.spool import Spool

VARIABLE = "GPT2_FP8_SWEEP"  # the room's folder, for the workers
_PLAN, _STOP = "room.json", "stop"
LOOK_SECONDS = 0.2  # between two looks for a request to stop


@dataclass(frozen=True)
class Plan:
    """What holds for all jobs of a parallel sweep."""

    gpus: dict[str, str]  # as CUDA_VISIBLE_DEVICES names them, and as people do
    at_once: int  # jobs at the same time
    threads: int  # CPU threads of each
    first: int  # the process that has opened the room
    shared: list[str] = field(default_factory=list)  # words that do not tell jobs apart
    devices: dict[str, str] = field(default_factory=dict)  # GPUs as nvidia-smi tells them apart, where it does


@dataclass(frozen=True)
class Room:
    """A room that is open."""

    folder: Path
    plan: Plan

    def slot(self, on_cpu: bool) -> slots.Slot | None:
        """Take a free place for a job, or return None if there is none now. Raises OSError."""
        if on_cpu or not self.plan.gpus:
            return slots.take([f"CPU {number}" for number in range(self.plan.at_once)], self.folder)
        return slots.take(list(self.plan.gpus), slots.shared_folder(), self.plan.devices)

    def stop(self, signum: int) -> None:
        """Ask all jobs to save and end, as `signum` would. Raises OSError."""
        temporary = self.folder / f".{_STOP}"
        temporary.write_text(str(signum))
        temporary.replace(self.folder / _STOP)

    def stopped_by(self) -> int | None:
        """Return the signal for which jobs are to end; None if none is. A first process that is gone is SIGTERM."""
        with suppress(OSError, ValueError):
            return int((self.folder / _STOP).read_text())
        return signal.SIGTERM if self.is_orphan() else None

    def is_orphan(self) -> bool:
        """Return whether the first process has ended without this worker of its own."""
        return self.plan.first not in (os.getpid(), os.getppid())


def entered() -> Room | None:
    """Return the room that this process is a worker of; None if it is in no parallel sweep.

    A worker does nothing on a signal from then on. What it starts has the usual handlers.
    """
    if VARIABLE not in os.environ:
        return None
    folder = Path(os.environ[VARIABLE])
    plan = Plan({}, 1, 1, -1)  # of a room that is closed, since the first process has left at once
    with suppress(OSError, ValueError, TypeError):
        plan = Plan(**json.loads((folder / _PLAN).read_text()))
    if plan.first != os.getpid():
        for number in process_end.SIGNALS:
            signal.signal(number, lambda *_: None)  # not SIG_IGN, which would be inherited
    return Room(folder, plan)


class OpenRoom:
    """The room of this process' sweep, until it is closed. Raises OSError.

    A signal no longer interrupts this process. It is noted, and passed on to the jobs. SLURM sends its signal before a
    time limit to every process of a job, and joblib's would die of it: they are started with it blocked.
    """

    def __init__(self, gpus: dict[str, str], at_once: int, threads: int, shared: list[str]):
        self._spool = Spool()
        plan = Plan(gpus, at_once, threads, os.getpid(), shared, slots.devices(list(gpus)) if gpus else {})
        self.room = Room(Path(self._spool.path), plan)
        (self.room.folder / _PLAN).write_text(json.dumps(asdict(self.room.plan)))
        os.environ[VARIABLE] = str(self.room.folder)
        self._closing = threading.Event()
        signals.hold()
        self._watcher = threading.Thread(target=self._watch, name="sweep", daemon=True)
        self._watcher.start()
        if ranks.is_batch_job():  # what is started from here on inherits it, the watcher does not
            signal.pthread_sigmask(signal.SIG_BLOCK, slurm.REQUEUE_SIGNALS)

    def close(self) -> None:
        """End the room. Raises nothing."""
        self._closing.set()
        if ranks.is_batch_job():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, slurm.REQUEUE_SIGNALS)
        self._watcher.join()
        os.environ.pop(VARIABLE, None)
        self._spool.remove()

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_SECONDS):
            if (signum := signals.received()) is not None:
                with suppress(OSError):  # a full disk: what is removed at the end makes room
                    self.room.stop(signum if signum == signal.SIGINT else signal.SIGTERM)
                    return
