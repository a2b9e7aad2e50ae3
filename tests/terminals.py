"""A program in a pseudo-terminal, and what a person would see there: pyte is the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte

from tests.forkserver import Popen

LINES = 200  # of the screen; nothing scrolls away


class Terminal:
    """`python WORDS` in a terminal of `columns`."""

    def __init__(self, *words: object, cwd: Path, columns: int = 120):
        self.screen = pyte.Screen(columns, LINES)
        self._stream = pyte.ByteStream(self.screen)
        self._fd, terminal = pty.openpty()
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = Popen(
            [sys.executable, *map(str, words)], cwd=cwd, env=clean | {"TERM": "xterm-256color"},
            start_new_session=True, stdin=terminal, stdout=terminal, stderr=terminal,
        )  # fmt: skip
        os.close(terminal)

    @property
    def text(self) -> list[str]:
        """The rows of the screen that have something on them."""
        return [row.rstrip() for row in self.screen.display if row.strip()]

    def press(self, keys: bytes) -> None:
        os.write(self._fd, keys)

    def read_until(self, there: Callable[[Terminal], bool], seconds: float = 120.0) -> None:
        """Show what is written until `there` holds. Fails after `seconds`, or if the program ends before."""
        until = time.monotonic() + seconds
        while not there(self):
            assert time.monotonic() < until, "\n".join(self.text)
            assert self._read(), "the program has ended: " + "\n".join(self.text)

    def end(self, seconds: float = 120.0) -> int:
        """Show the rest; returns the exit code. Kills the program after `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self._read():
                break
        else:
            self.process.kill()
        return self.hang_up()

    def hang_up(self) -> int:
        """Close the terminal; returns the exit code."""
        os.close(self._fd)
        return self.process.wait(120)

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], 0.2)[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self._stream.feed(data)
        return bool(data)
