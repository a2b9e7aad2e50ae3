"""The three standard streams: always open, and a write that fails never ends a run. Standard library only."""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any, cast

NAMES = {1: "the log on the terminal", 2: "stderr"}


def open_closed() -> None:
    """Open /dev/null as 0, 1 or 2 if a shell has closed it (`>&-`).

    Otherwise the next file that is opened would get that number, and with it whatever is printed.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


def forgive(pipe_ends: bool = False) -> None:
    """Drop what stdout and stderr cannot take, and escape what a terminal cannot show.

    Otherwise a progress bar, a log or a library that prints would fail on a full disk, or if the reader is gone (`|
    head`). `pipe_ends`: on stdout the latter reaches the program as BrokenPipeError.
    """
    sys.stdout = _text(1, sys.stdout, pipe_ends)
    sys.stderr = _text(2, sys.stderr, False)


def say_losses() -> None:
    """Report from now on, once for each stream, that it cannot be written.

    Before training there is nothing to report.
    """
    _Output.says = True


def _text(number: int, before: Any, pipe_ends: bool) -> io.TextIOWrapper:
    """Build a stream like `before`; None if that was closed."""
    raw, at_once = _Output(number, pipe_ends), bool(before and before.write_through)
    buffer = raw if at_once else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        cast(io.BufferedWriter, buffer),
        encoding=before.encoding if before else "utf-8",
        errors="backslashreplace",
        line_buffering=before.line_buffering if before else False,
        write_through=at_once,
    )


class _Output(io.FileIO):
    """A file that accepts every write."""

    says = False

    def __init__(self, number: int, pipe_ends: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._pipe_ends = pipe_ends
        self._said = False

    def write(self, data: Any, /) -> int:
        """Write `data`, and report all of it as written even if it is lost."""
        try:
            while (written := super().write(data)) is None:  # another program has made the pipe non-blocking
                select.select([], [self], [])
        except OSError as error:
            if self._pipe_ends and isinstance(error, BrokenPipeError):
                raise
            self._say(error)
            return memoryview(data).nbytes
        return written

    def _say(self, error: OSError) -> None:
        if self.says and not self._said:
            self._said = True
            number = self.fileno()
            with suppress(OSError):  # write to the other stream
                os.write(3 - number, f"{NAMES[number]} is not written, training goes on: {error}\n".encode())
