"""The signals of this process, as other rooms ask for them: has one come, may it end the current work.

What a signal does is in `signal_handlers`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gpt2_fp8.runtime.signal_handlers import Signals

_active: Signals | None = None


@contextmanager
def handled() -> Iterator[Signals]:
    """Handle signals in this context, held at first; inside another such context use the same `Signals`.

    Off the main thread it does nothing.
    """
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
    """Declare a wait of the main thread in which nothing is half done: a signal may raise `Interrupted` in it."""
    if _active is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    with _active.at_once():
        yield


def pending() -> bool:
    """Return whether a signal was received, so that unneeded work can be skipped."""
    return received() is not None


def received() -> int | None:
    """Return the number of the first signal that was received; None before it."""
    return None if _active is None else _active.received


def hold() -> None:
    """Only record signals, up to the end of the context that raises an error for them (`Signals.at_once`)."""
    if _active is not None:
        _active.hold()


def look() -> None:
    """Declare a place where the current work can be given up.

    Raises `Interrupted` if a signal was received and this process may give up (`Signals.gives_up`).
    """
    if _active is not None and _active.gives_up and _active.received is not None:
        _active.throw()
