"""The last moments of a process: output whose terminal is gone, and signals that must not change the exit code."""

from __future__ import annotations

import atexit
import os
import signal
from contextlib import suppress

redrawn = False  # whether a progress bar is on the terminal: what is written past it must erase it first
_ERASE = "\r\x1b[2K"
LIKE_SIGTERM = (signal.SIGHUP, signal.SIGQUIT)
SIGNALS = (signal.SIGINT, signal.SIGTERM, *LIKE_SIGTERM)


def leave_terminal() -> None:
    """Redirect output to /dev/null if the terminal is gone: writing to it would fail."""
    for number in (1, 2):
        try:
            os.write(number, b"")
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def say(text: str) -> None:
    """Write to stderr, if possible. Not with print(): a signal may have interrupted just that call.

    On a terminal with a progress bar, the text takes the place of the bar, which is drawn again below it.
    """
    with suppress(OSError):
        if redrawn and os.isatty(2):
            text = _ERASE + text.lstrip("\n")
        os.write(2, text.encode())


def leave_with(code: int) -> None:
    """Make a signal end the process at once with exit code `code`, since it has come to its end.

    In its last moment, when Python removes its handlers, a signal is ignored.
    """
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(code))


def ignore_at_the_end() -> None:
    """Ignore signals at the very end of the process.

    Call this before anything registers with `atexit`, which calls what registered first last. Python then resets
    handlers to the default, which ends the process by the signal, whatever its exit code is. It leaves ignored signals
    ignored.
    """
    atexit.register(_ignore)


def _ignore() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
