"""What this process is at, and whether it gets on: what tells other ranks that it is slow, and not stuck.

Whatever may keep the other ranks waiting for minutes counts its moves here: a part of a file, a batch, an attempt.
Standard library only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

_numbers = itertools.count(1)  # its next() is atomic
_moves = 0
_where = "before the first step"


def moved() -> None:
    """Count a move of this process, in whatever thread. It takes well under a microsecond."""
    global _moves
    _moves = next(_numbers)


def moves() -> int:
    """Return a number that was not returned before the last move."""
    return _moves


def begin(where: str) -> None:
    """Note what the main thread is at from now on, as words after "stuck": "in step 12". It is a move."""
    global _where
    _where = where
    moved()


@contextmanager
def within(where: str) -> Iterator[None]:
    """Note what the main thread is at for a while."""
    before = _where
    begin(where)
    try:
        yield
    finally:
        begin(before)


def where() -> str:
    """Return what the main thread is at."""
    return _where
