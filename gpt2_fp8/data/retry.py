"""Trying again: growing waits with jitter, each one logged, and a clear end."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from gpt2_fp8.config.errors import DataSourceLost, RunError
from gpt2_fp8.config.shown import printable

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_jitter = random.SystemRandom()  # the seeded generator would give every rank the same jitter

LOCAL_WAITS = (0.5, 2.0)  # seconds: for a passing error of a disk or a network mount
HUB_WAITS = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0)  # seconds, in addition to the client's five tries of 1 to 8 s

# Errors that waiting cannot solve: the user's, ours, and lack of memory. All others (OSError, the errors of the HTTP
# client, of Arrow or of a decompressor) may pass.
_FINAL = (RunError, AssertionError, LookupError, TypeError, AttributeError, NameError, ImportError, MemoryError)

_WITHOUT_HUB = (
    "\n  fix: try again later, with ckpt_path=last and the run_name if there is a checkpoint; without a network: "
    "data=stdlib, or data=text_files data.train_files='[FILE]'"
)

_waiting = False


def is_waiting() -> bool:
    """Return whether this process waits before another attempt: it is then alive, although it does nothing."""
    return _waiting


def with_retries(
    action: Callable[[], Result], what: str, waits: tuple[float, ...], first_contact: bool = False
) -> tuple[Result, int]:
    """Return the result of `action` and the number of failed attempts before it. Each attempt starts from nothing.

    `first_contact`: nothing has come from this server yet. Where its name does not even resolve, there is most likely
    no network, so one more attempt has to do.

    Raises:
        DataSourceLost: it still fails after the last of `waits`. These are in seconds. Each gets up to a quarter of
            jitter, so that the ranks and workers of a large run do not all try again at once.
    """
    failures = 0
    while True:
        try:
            return action(), failures
        except _FINAL:
            raise
        except Exception as error:
            nameless = first_contact and is_unresolved(error)
            if failures == (min(1, len(waits)) if nameless else len(waits)):
                cause = f"cannot read {what}, after {failures + 1} attempts: {type(error).__name__}: {_said(error)}"
                cause += "; the server's name does not resolve: is there a network, and a DNS?" if nameless else ""
                raise DataSourceLost(cause + (_WITHOUT_HUB if waits == HUB_WAITS or first_contact else "")) from error
            wait = waits[failures] * (1 + _jitter.random() / 4)
            failures += 1
            log.warning("cannot read %s (%s: %s); attempt %d in %.1f s", what, type(error).__name__, _said(error),
                        failures + 1, wait)  # fmt: skip
            sleep(wait)


def is_unresolved(error: BaseException | None) -> bool:
    """Return whether an error comes from a name for which DNS gave no address."""
    while error is not None:
        if isinstance(error, socket.gaierror):
            return True
        error = error.__cause__ or error.__context__
    return False


def sleep(seconds: float) -> None:
    """Wait, with `is_waiting` true."""
    global _waiting
    _waiting = True
    try:
        time.sleep(seconds)
    finally:
        _waiting = False


def _said(error: Exception) -> str:
    """Return a server's words in printable characters, at most 300."""
    return printable(str(error))[:300]
