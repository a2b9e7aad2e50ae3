"""What a process hears and says: names in UTF-8 whatever the locale, and output that costs no run.

Names of files, settings and log lines are UTF-8 here. Elsewhere Python would take them for what the locale says.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from gpt2_fp8.config.shown import harmless
from gpt2_fp8.runtime import standard_streams

_MODE = "PYTHONUTF8"


def begin(pipe_ends: bool = False) -> None:
    """Of a program's first moment: open what was closed of its standard streams, and have them take everything; start
    it again in Python's UTF-8 mode where the locale is another's. Its process stays the same one; those that it starts
    inherit the mode. `pipe_ends`: as `streams.forgive` has it."""
    standard_streams.open_closed()
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_MODE) != "1":
        os.environ[_MODE] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    standard_streams.forgive(pipe_ends)


def end() -> None:
    """Of its last moment: what cannot be written does not change the exit code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):  # or Python tries once more, and ends with 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def forgive_outputs() -> None:
    """Have a log line that cannot be written cost one warning, where logging prints a traceback for each; and escape
    in each what a terminal would obey: a folder's own name may hold it."""
    standard_streams.say_losses()
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler.handleError, _Forgiving):
            handler.handleError = _Forgiving(handler)  # type: ignore[method-assign]
            handler.setFormatter(_Harmless(handler.formatter or logging.Formatter()))
    if not isinstance(threading.excepthook, _Threads):
        threading.excepthook = _Threads(threading.excepthook)


class _Harmless(logging.Formatter):
    """Another formatter's lines, with nothing that a terminal would obey but what is that formatter's own."""

    def __init__(self, otherwise: logging.Formatter) -> None:
        super().__init__()
        self._otherwise = otherwise

    def format(self, record: logging.LogRecord) -> str:
        """As it is to be written."""
        record.message = record.getMessage()  # as every formatter leaves it
        told = copy.copy(record)  # other handlers have theirs
        told.msg, told.args = harmless(record.message), None
        if record.exc_info:
            told.exc_text = harmless(self._otherwise.formatException(record.exc_info))
        return self._otherwise.format(told)


class _Forgiving:
    """What a handler does about a line that it could not write."""

    def __init__(self, handler: logging.StreamHandler) -> None:
        self._name = getattr(handler, "baseFilename", "the log on the terminal")
        self._otherwise = handler.handleError
        self._said = False

    def __call__(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, (OSError, UnicodeError)):
            self._otherwise(record)  # a mistake of ours
        elif not self._said:
            self._said = True
            with suppress(OSError):
                os.write(2, f"{self._name} is not written, training goes on: {error}\n".encode())


class _Threads:
    """`threading.excepthook`, without TensorBoard's writer on a full disk: the logger that feeds it says so once."""

    def __init__(self, otherwise: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._otherwise = otherwise

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__name__ == "_AsyncWriterThread"):
            self._otherwise(args)
