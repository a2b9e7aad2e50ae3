"""SIGINT, SIGTERM, SIGHUP and SIGQUIT (under SLURM also SIGUSR1) from a process's first moment to its last.

What a signal does depends on where it comes:

- In start-up, and in a wait that is declared `interruptible`, nothing is half done: `Interrupted` is raised at once.
- In training it is held: the handler only notes it. `look` gives up what is under way, where that leaves nothing half
  done, and `GracefulStop` looks between steps. Saving inside a handler can fall into the middle of a backward pass
  (https://github.com/Lightning-AI/pytorch-lightning/issues/21406, open in 2.6.6).
- A second one, wherever it comes, ends the process at once. What is on the disk is whole at every moment.

An exception out of nowhere can get lost: in a `__del__`, whose errors Python prints and drops, in a library that
catches everything, or it leaves a library half done that then fails in words of its own. So it is only the messenger.
The signal stays noted; as long as nobody has ended for it, it is thrown again; and whoever ends with another error
after it was `thrown` ends for the signal. SIGHUP (a closed terminal) and SIGQUIT are taken for SIGTERM. What was
ignored when the process began (`nohup`) stays ignored.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from gpt2_fp8.runtime import slurm

LIKE_SIGTERM = (signal.SIGHUP, signal.SIGQUIT)
SIGNALS = (signal.SIGINT, signal.SIGTERM, *LIKE_SIGTERM)
# A terminal's Ctrl-C reaches the whole process group, and launchers (torchrun, srun) pass it on: one wish, two signals.
ECHO_SECONDS = 0.5
IMPORT_SECONDS = 3.0  # that a signal waits for an import, or a library's cleanup, to come to its end
_AGAIN = signal.SIGURG  # by which a thread of our own asks the main thread to look; where nobody handles it, nothing
_AGAIN_SECONDS = 0.1


class Interrupted(BaseException):
    """A signal ends this process where it stands.

    Not an Exception: those are caught by whatever tries something again, or tries whether something is there.
    """

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(f"signal {signum}")


class Signals:
    """The handlers of a process, and what they have received.

    Attributes: `received`, the first signal's number, None before it; `thrown`, whether `Interrupted` was raised for
    it; `gives_up`, whether `look` may raise.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.thrown = False
        self.gives_up = False
        self._received_at = 0.0
        self._held = True
        self._asks = False  # again, until the signal's exception has arrived
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals, but for those that are ignored; again where somebody else, as Lightning, has taken them."""
        for number in (*SIGNALS, slurm.REQUEUE_SIGNAL) if slurm.is_batch_job() else SIGNALS:
            before = self._previous.setdefault(number, signal.getsignal(number))
            signal.signal(number, signal.SIG_IGN if before == signal.SIG_IGN else self._receive)
        self._previous.setdefault(_AGAIN, signal.signal(_AGAIN, self._look_again))

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
        """From now on raise `Interrupted`; for what was noted before, in a moment."""
        self._held = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """In here a signal raises `Interrupted`, one that was noted before too."""
        held = self._held
        try:
            if self.received is not None and held:
                self.throw()
            self._held = False
            yield
        finally:
            self._held = held

    def throw(self) -> None:
        """Raise `Interrupted` for what was received."""
        assert self.received is not None
        self.thrown = True
        raise Interrupted(self.received)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.SIGTERM if signum in LIKE_SIGTERM else signum, now
            if signum == signal.SIGHUP:
                leave_terminal()
            with suppress(RuntimeError, MemoryError):  # no thread can be started
                threading.Thread(target=self._ask_again, name="signals", daemon=True).start()
                self._asks = True
            if not self._held:
                self._throw_from(frame)
                return
            say(f"\n{signal.Signals(signum).name}: stopping and saving; once more to leave at once\n")
        elif signum == signal.SIGHUP:
            return  # a terminal's end is told by more than one
        elif self.received == slurm.REQUEUE_SIGNAL and signum != signal.SIGINT:
            return  # SLURM's own next ones: it ends a job that it requeues
        elif now - self._received_at > ECHO_SECONDS:
            os._exit(128 + (signal.SIGTERM if signum in LIKE_SIGTERM else signum))

    def _ask_again(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while self.installed:
            time.sleep(_AGAIN_SECONDS)
            if not self._held and self.installed:
                signal.pthread_kill(main, _AGAIN)

    def _look_again(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None and not self._held and not _is_ending(sys.exc_info()[1]):
            self._throw_from(frame)

    def _throw_from(self, frame: FrameType | None) -> None:
        """Raise, but not in the midst of what it would leave half done: from there in a moment, if somebody asks."""
        if not self._asks or time.monotonic() > self._received_at + IMPORT_SECONDS or not _is_delicate(frame):
            self.throw()


def _is_ending(handled: BaseException | None) -> bool:
    """Whether the main thread is on its way out for a signal already: what it handles came of `Interrupted`."""
    while handled is not None:
        if isinstance(handled, Interrupted):
            return True
        handled = handled.__context__
    return False


def _is_delicate(frame: FrameType | None) -> bool:
    """Whether the main thread is in an import, which would leave modules half made, or where errors get lost."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name in ("__del__", "__exit__"):
            return True
        frame = frame.f_back
    return False


def leave_terminal() -> None:
    """Let output go nowhere where the terminal is gone: whoever writes to it would fail."""
    for number in (1, 2):
        try:
            os.write(number, b"")
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def say(text: str) -> None:
    """Write to stderr, if it can be written. Not print(): it may be the very call that a signal interrupted."""
    with suppress(OSError):
        os.write(2, text.encode())


_active: Signals | None = None


@contextmanager
def handled() -> Iterator[Signals]:
    """Handle signals in here, held at first; within another such context, by the same `Signals`. Off the main thread:
    do nothing."""
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


def pending() -> bool:
    """Whether a signal was received: for what is not needed then."""
    return _active is not None and _active.received is not None


def look() -> None:
    """Declares a place where what is under way can be given up: raises `Interrupted` where a signal was received and
    this process may (`Signals.gives_up`)."""
    if _active is not None and _active.gives_up and _active.received is not None:
        _active.throw()


def leave_with(code: int) -> None:
    """The process has come to its end: from now on a signal makes it leave at once, with the exit code that it has.
    In its very last moment, when Python takes its handlers away, a signal is ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(code))


def ignore_at_the_end() -> None:
    """Call this before anything registers with `atexit`, which calls the first to register last: Python then resets
    handlers to what ends the process by the signal, whatever its exit code was to be, and leaves ignored ones alone."""
    atexit.register(_ignore)


def _ignore() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
