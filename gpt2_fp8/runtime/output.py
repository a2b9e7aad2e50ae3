"""A process's text: names in UTF-8 whatever the locale is, and output that cannot end a run.

File names, settings and log lines are UTF-8 here. Otherwise Python would decode them as the locale says.
"""

from __future__ import annotations

import copy
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import standard_streams

_MODE = "PYTHONUTF8"


def begin(pipe_ends: bool = False) -> None:
    """Prepare text input and output; call it first in a program.

    Standard streams that were closed are opened, and all take every character. If the locale is not UTF-8, the program
    is started again in Python's UTF-8 mode: as the same process, whose children inherit the mode. `pipe_ends`: see
    `standard_streams.forgive`.
    """
    standard_streams.open_closed()
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_MODE) != "1":
        os.environ[_MODE] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    standard_streams.forgive(pipe_ends)


def end() -> None:
    """Flush the output at the end of a program. What cannot be written does not change the exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # otherwise Python flushes once more, and exits with 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def without_reader() -> int:
    """Drop what is still to be printed, since the reader of the output has ended; returns the exit code, 141."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
    return 128 + signal.SIGPIPE


def forgive_outputs() -> None:
    """Make a log line that cannot be written cost one warning; logging would print a traceback for each.

    Control characters in log lines are escaped: a terminal would obey them, and a folder's name may contain them.
    """
    standard_streams.say_losses()
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler.handleError, _Forgiving):
            handler.handleError = _Forgiving(handler)  # type: ignore[method-assign]
            handler.setFormatter(_Harmless(handler.formatter or logging.Formatter()))
    if not isinstance(threading.excepthook, _Threads):
        threading.excepthook = _Threads(threading.excepthook)


class _Harmless(logging.Formatter):
    """Another formatter's lines, with control characters escaped except the formatter's own."""

    def __init__(self, otherwise: logging.Formatter) -> None:
        super().__init__()
        self._otherwise = otherwise

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as the other formatter does."""
        record.message = record.getMessage()  # every formatter sets it
        escaped = copy.copy(record)  # other handlers use the original
        escaped.msg, escaped.args = harmless(record.message), None
        if record.exc_info:
            escaped.exc_text = harmless(self._otherwise.formatException(record.exc_info))
        return self._otherwise.format(escaped)


class _Forgiving:
    """Handles a log line that a handler could not write."""

    def __init__(self, handler: logging.StreamHandler) -> None:
        self._name = getattr(handler, "baseFilename", "the log on the terminal")
        self._otherwise = handler.handleError
        self._said = False

    def __call__(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, (OSError, UnicodeError)):
            self._otherwise(record)  # our own mistake
        elif not self._said:
            self._said = True
            with suppress(OSError):
                os.write(2, f"{self._name} is not written, training goes on: {error}\n".encode())


class _Threads:
    """`threading.excepthook` that ignores TensorBoard's writer on a full disk: the logger that feeds it warns once."""

    def __init__(self, otherwise: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._otherwise = otherwise

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__name__ == "_AsyncWriterThread"):
            self._otherwise(args)
