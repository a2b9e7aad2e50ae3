"""SIGINT and SIGTERM (under SLURM also SIGUSR1) from a process's first moment to its last.

What a signal does depends on where it comes:

- In start-up, and in a wait that is declared `interruptible`, nothing is half done: `Interrupted` is raised at once.
- In training it is held: the handler only notes it, and `GracefulStop` looks between steps. Saving inside a handler can
  fall into the middle of a backward pass (https://github.com/Lightning-AI/pytorch-lightning/issues/21406, open in
  2.6.6).
- A second one, wherever it comes, ends the process at once. What is on the disk is whole at every moment.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gpt2_fp8 import slurm

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A terminal's Ctrl-C reaches the whole process group, and launchers (torchrun, srun) pass it on: one wish, two signals.
ECHO_SECONDS = 0.5


class Interrupted(BaseException):
    """A signal ends this process where it stands.

    Not an Exception: those are caught by whatever tries something again, or tries whether something is there.
    """

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(f"signal {signum}")


class Signals:
    """The handlers of a process, and what they have received."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._held = False
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals; again where somebody else, as Lightning, has taken them meanwhile."""
        for number in (*SIGNALS, slurm.REQUEUE_SIGNAL) if slurm.is_batch_job() else SIGNALS:
            handler = signal.signal(number, self._receive)
            self._previous.setdefault(number, handler)

    def uninstall(self) -> None:
        """Put back what was there before."""
        for number, handler in self._previous.items():
            # None: it was set by something other than Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    @property
    def installed(self) -> bool:
        """Whether the handlers are there: not off the main thread."""
        return bool(self._previous)

    def hold(self) -> None:
        """From now on only note signals."""
        self._held = True

    def release(self) -> None:
        """From now on raise `Interrupted`."""
        self._held = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In here a signal raises `Interrupted`, one that was noted before too."""
        held, self._held = self._held, False
        try:
            if self.received is not None and held:
                raise Interrupted(self.received)
            yield
        finally:
            self._held = held

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signum, now
            if not self._held:
                raise Interrupted(signum)
            name = signal.Signals(signum).name
            # Not print(): it may be the very call that the signal interrupted.
            os.write(2, f"\n{name}: stopping after this step; once more to leave at once\n".encode())
        elif self.received == slurm.REQUEUE_SIGNAL and signum != signal.SIGINT:
            return  # SLURM's own next ones: it ends a job that it requeues
        elif now - self._received_at > ECHO_SECONDS:
            os._exit(128 + signum)


_active: Signals | None = None


@contextmanager
def handled() -> Iterator[Signals]:
    """Handle signals in here; within another such context, by the same `Signals`. Off the main thread: do nothing."""
    global _active
    if _active is not None or threading.current_thread() is not threading.main_thread():
        yield _active if threading.current_thread() is threading.main_thread() and _active else Signals()
        return
    _active = Signals()
    _active.install()
    try:
        yield _active
    finally:
        _active.uninstall()
        _active = None


@contextmanager
def interruptible() -> Iterator[None]:
    """Declares a wait of the main thread during which nothing is half done: a signal may raise `Interrupted` in it."""
    if _active is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    with _active.at_once():
        yield
