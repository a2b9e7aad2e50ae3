"""Trying again: growing waits with jitter, each one logged, and a clear end."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from gpt2_fp8.config.errors import DataSourceLost, RunError
from gpt2_fp8.config.shown import printable

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_jitter = random.SystemRandom()  # not the seeded generator, which is the same on every rank

LOCAL_WAITS = (0.5, 2.0)  # seconds: a disk or a network mount that hiccups
HUB_WAITS = (2.0, 5.0, 15.0, 30.0, 60.0, 120.0, 240.0)  # on top of the hub client's own five tries of 1 to 8 s each

# Errors that waiting does not mend: the user's, ours, and memory. Everything else (OSError, the HTTP client's and
# Arrow's errors, a decompressor's) may be the source's passing trouble.
_FINAL = (RunError, AssertionError, LookupError, TypeError, AttributeError, NameError, ImportError, MemoryError)


_waiting = False


def is_waiting() -> bool:
    """Whether this process waits before another attempt: it is alive then, although it does nothing."""
    return _waiting


def with_retries(action: Callable[[], Result], what: str, waits: tuple[float, ...]) -> tuple[Result, int]:
    """`action()` and how many attempts failed before it worked; each attempt starts from nothing.

    Raises:
        DataSourceLost: it still fails after the last of `waits` (seconds, each with up to a quarter of jitter, so that
            the ranks and workers of a large run do not come back all at once).
    """
    failures = 0
    while True:
        try:
            return action(), failures
        except _FINAL:
            raise
        except Exception as error:
            if failures == len(waits):
                raise DataSourceLost(
                    f"cannot read {what}, after {failures + 1} attempts: {type(error).__name__}: {_said(error)}"
                ) from error
            wait = waits[failures] * (1 + _jitter.random() / 4)
            failures += 1
            log.warning("cannot read %s (%s: %s); attempt %d in %.1f s", what, type(error).__name__, _said(error),
                        failures + 1, wait)  # fmt: skip
            sleep(wait)


def sleep(seconds: float) -> None:
    """Wait so that `is_waiting` tells of it."""
    global _waiting
    _waiting = True
    try:
        time.sleep(seconds)
    finally:
        _waiting = False


def _said(error: Exception) -> str:
    """A server's words, without what a terminal would obey."""
    return printable(str(error))[:300]
