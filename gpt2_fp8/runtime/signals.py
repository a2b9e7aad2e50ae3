"""SIGINT, SIGTERM, SIGHUP and SIGQUIT (under SLURM also SIGUSR1 and SIGUSR2), from the start of a process to its end.

What a signal does depends on when it arrives:

- During start-up, and in a wait of `allow_interrupt`, nothing is half done: `Interrupted` is raised at once.
- In training it is held: the handler only records it. `look` gives up the current work where that leaves nothing half
  done, and `GracefulStop` looks between steps.
- A second signal ends the process at once, at any time. A thread does it: a backward on a CPU can keep the main thread,
  and so Python's handlers, from running for minutes.

An asynchronous exception can get lost: Python drops errors in `__del__`, and some libraries catch everything. So the
signal stays recorded, and `Interrupted` is raised again until something ends because of it. Whatever ends with another
error after it was `thrown` ends for the signal.

SIGHUP (a closed terminal) and SIGQUIT are treated as SIGTERM. A signal that was ignored when the process began
(`nohup`) stays ignored.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from gpt2_fp8.runtime import ranks, slurm

LIKE_SIGTERM = (signal.SIGHUP, signal.SIGQUIT)
SIGNALS = (signal.SIGINT, signal.SIGTERM, *LIKE_SIGTERM)
NATIVE_SECONDS = 30.0  # that a rank of torch's agent may be in one native call after a signal
ECHO_SECONDS = 0.5  # Ctrl-C reaches the whole process group, and torchrun passes it on: one request, two signals
IMPORT_SECONDS = 3.0  # the longest that a signal waits for an import, or a library's cleanup, to finish
# Our own thread sends it to make the main thread look again; without a handler it has no effect.
_AGAIN = signal.SIGURG
_AGAIN_SECONDS = 0.1


class Interrupted(BaseException):
    """A signal ends this process where it is. It is no Exception, which code that tries something again catches."""

    def __init__(self, signum: int):
        self.signum = signum
        super().__init__(f"signal {signum}")


class Signals:
    """The signal handlers of a process, and what they have received.

    Attributes:
        received: the first signal's number; None before it.
        thrown: whether `Interrupted` was raised for it.
        gives_up: whether `look` may raise.
        ends: whether the process is ending, so that there is nothing to say of a signal.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.thrown = False
        self.gives_up = False
        self.ends = False
        self._received_at = 0.0
        self._held = True
        self._told = False  # whether stderr says that the run is stopping
        self._watched = False  # whether a thread ends the process, and asks again until the exception has arrived
        self._wakeup: list[int] = []  # a pipe for each signal's number, and where Python wrote them before
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers, except for ignored signals; again if other code, as Lightning's, has replaced them."""
        for number in (*SIGNALS, *slurm.REQUEUE_SIGNALS) if ranks.is_batch_job() else SIGNALS:
            before = self._previous.setdefault(number, signal.getsignal(number))
            signal.signal(number, signal.SIG_IGN if before == signal.SIG_IGN else self._receive)
        self._previous.setdefault(_AGAIN, signal.signal(_AGAIN, self._look_again))
        if not self._wakeup:
            reader, writer = os.pipe()
            os.set_blocking(writer, False)
            self._wakeup = [reader, writer, signal.set_wakeup_fd(writer, warn_on_full_buffer=False)]

    def watch(self) -> None:
        """Have a thread see signals from now on; a first signal does so too. The handlers must be installed."""
        if not self._watched:
            with suppress(RuntimeError, MemoryError):  # if no thread can be started
                threading.Thread(target=self._watch, args=self._wakeup[:1], name="signals", daemon=True).start()
                self._watched = True

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            # None: it was not set from Python, and cannot be restored.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        if self._wakeup:
            reader, writer, before = self._wakeup
            signal.set_wakeup_fd(before)
            os.close(writer)  # the thread then ends, and closes the other end
            if not self._watched:
                os.close(reader)
            self._wakeup, self._watched = [], False

    @property
    def installed(self) -> bool:
        """Whether the handlers are installed. They never are off the main thread."""
        return bool(self._previous)

    def hold(self) -> None:
        """Only record signals from now on."""
        self._held = True

    def release(self) -> None:
        """Raise `Interrupted` for signals from now on, and soon for one that was recorded before."""
        self._held = False

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Enter a context in which a signal raises `Interrupted`, also one that was recorded before."""
        held = self._held
        try:
            if self.received is not None and held:
                self.throw()
            self._held = False
            yield
        finally:
            self._held = held

    def throw(self) -> None:
        """Raise `Interrupted` for the signal that was received."""
        assert self.received is not None
        self.thrown = True
        raise Interrupted(self.received)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            return
        self.received, self._received_at = _translate(signum), time.monotonic()
        if signum == signal.SIGHUP:
            _leave_terminal()
        self.watch()
        if self._held:
            self._tell(signum)
        else:
            self._throw_from(frame)

    def _tell(self, signum: int) -> None:
        if not self._told and not self.ends and ranks.is_first_rank():
            self._told = True
            before = "\r\x1b[2K" if os.isatty(2) else "\n"  # erase the progress bar, which is drawn again below
            text = f"{before}{signal.Signals(signum).name}: stopping and saving; once more to leave at once\n"
            with suppress(OSError):
                os.write(2, text.encode())  # not print(): the signal may have interrupted just that call

    def _watch(self, reader: int) -> None:
        """Read the signals' numbers: end the process at the second one, and have the main thread look again."""
        main, first, first_at = threading.main_thread().ident, 0, 0.0
        assert main is not None
        while True:
            if first and not select.select([reader], [], [], _AGAIN_SECONDS)[0]:
                if not self._held:
                    signal.pthread_kill(main, _AGAIN)
                elif self.received is None:  # the main thread has not come to its handler
                    self._tell(first)
                    if "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - first_at > NATIVE_SECONDS:
                        os._exit(exit_code(first))  # it waits in NCCL for a rank that is gone
                continue
            if not (read := os.read(reader, 1)):
                os.close(reader)
                return
            signum, now = read[0], time.monotonic()
            if signum == _AGAIN or signum not in self._previous:
                continue
            if not first:
                first, first_at = signum, now
            elif signum == signal.SIGHUP:
                continue  # several senders report a terminal's end
            elif ranks.is_batch_job() and signum in (signal.SIGTERM, *slurm.REQUEUE_SIGNALS):
                continue  # SLURM sends more while a job is saved and requeued, and has SIGKILL for one that hangs
            elif now - first_at > ECHO_SECONDS:
                os._exit(exit_code(signum))

    def _look_again(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None and not self._held and not _is_ending(sys.exc_info()[1]):
            self._throw_from(frame)

    def _throw_from(self, frame: FrameType | None) -> None:
        """Raise `Interrupted`; a moment later, by the thread, if the main thread is in code that it would tear."""
        if not self._watched or time.monotonic() > self._received_at + IMPORT_SECONDS or not _is_delicate(frame):
            self.throw()


def _translate(signum: int) -> int:
    return signal.SIGTERM if signum in LIKE_SIGTERM else signum


def exit_code(signum: int) -> int:
    """Return the exit code of a process that a signal ends."""
    return 128 + _translate(signum)


def _leave_terminal() -> None:
    """Redirect output to /dev/null if the terminal is gone: writing to it would fail."""
    for number in (1, 2):
        try:
            os.write(number, b"")
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


# A forked child has the handlers without the thread, and its signals are not the parent's.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _is_ending(handled: BaseException | None) -> bool:
    """Return whether the main thread is ending for a signal: the error it handles came from `Interrupted`."""
    while handled is not None:
        if isinstance(handled, Interrupted):
            return True
        handled = handled.__context__
    return False


def _is_delicate(frame: FrameType | None) -> bool:
    """Return whether the main thread is in an import, which would leave modules half made, or where errors get lost."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib") or code.co_name in ("__del__", "__exit__"):
            return True
        frame = frame.f_back
    return False


# ---- the signals of this process -------------------------------------------------------------------------------------

_active: Signals | None = None


@contextmanager
def handle_signals() -> Iterator[Signals]:
    """Handle signals in this context, held at first; inside another such context use the same `Signals`.

    Off the main thread it does nothing.
    """
    global _active
    if threading.current_thread() is not threading.main_thread():
        yield Signals()
        return
    if _active is not None:
        yield _active
        return
    _active = Signals()
    _active.install()
    try:
        yield _active
    finally:
        _active.uninstall()
        _active = None


@contextmanager
def allow_interrupt() -> Iterator[None]:
    """Declare a wait of the main thread in which nothing is half done: a signal may raise `Interrupted` in it."""
    if _active is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    with _active.at_once():
        yield


def is_pending() -> bool:
    """Return whether a signal was received, so that unneeded work can be skipped."""
    return get_received() is not None


def get_received() -> int | None:
    """Return the number of the first signal that was received; None before it."""
    return None if _active is None else _active.received


def hold() -> None:
    """Only record signals, up to the end of the context that raises an error for them (`Signals.at_once`)."""
    if _active is not None:
        _active.hold()


def look() -> None:
    """Raise `Interrupted` here if a signal was received and this process may give up its work (`Signals.gives_up`)."""
    if _active is not None and _active.gives_up and _active.received is not None:
        _active.throw()
