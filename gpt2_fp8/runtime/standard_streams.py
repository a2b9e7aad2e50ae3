"""The three standard streams: always there, and what cannot be written to them costs no run. Standard library only."""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any, cast

NAMES = {1: "the log on the terminal", 2: "stderr"}


def open_closed() -> None:
    """Put /dev/null where a shell has closed 0, 1 or 2 (`>&-`): the next file that is opened would get that number,
    and with it whatever is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115


def forgive(pipe_ends: bool = False) -> None:
    """Have what stdout and stderr do not take be lost, and what a terminal cannot show be escaped. A progress bar, a
    log or a library that prints would fail for a full disk, or where nobody reads on (`| head`).

    `pipe_ends`: the latter is to reach the program as BrokenPipeError, for stdout.
    """
    sys.stdout = _text(1, sys.stdout, pipe_ends)
    sys.stderr = _text(2, sys.stderr, False)


def say_losses() -> None:
    """From now on, say once of each stream that it is not written. Before, there is nothing that goes on without it."""
    _Output.says = True


def _text(number: int, before: Any, pipe_ends: bool) -> io.TextIOWrapper:
    """A stream like `before`; None where it was closed."""
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
    """A file that takes everything."""

    says = False

    def __init__(self, number: int, pipe_ends: bool) -> None:
        super().__init__(number, "w", closefd=False)
        self._pipe_ends = pipe_ends
        self._said = False

    def write(self, data: Any, /) -> int:
        """All of `data`, as far as anybody can tell."""
        try:
            while (written := super().write(data)) is None:  # somebody has made the pipe one that does not wait
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
            with suppress(OSError):  # on the other one
                os.write(3 - number, f"{NAMES[number]} is not written, training goes on: {error}\n".encode())
