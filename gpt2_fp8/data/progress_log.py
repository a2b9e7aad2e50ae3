"""A log line for parts of the start-up that take more than moments: a corpus may have a million files."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

FIRST_SECONDS = 3.0  # before the first line
EVERY_SECONDS = 15.0  # between two lines


class ProgressLog:
    """Logs how many of `total` are done; nothing if all are done within `FIRST_SECONDS`."""

    def __init__(self, what: str, total: int):
        self.what, self.total = what, total
        self._next = time.monotonic() + FIRST_SECONDS

    def at(self, done: int) -> None:
        """Log that `done` are done, if a line is due."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY_SECONDS
            log.info("data: %s: %s of %s", self.what, f"{done:,}", f"{self.total:,}")
