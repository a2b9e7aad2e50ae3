"""What start-up is busy with, said where it takes more than moments: a corpus may have a million files."""

from __future__ import annotations

import logging
import time

log = logging.getLogger(__name__)

FIRST = 3.0  # seconds of silence
EVERY = 15.0


class Looking:
    """Says how far `what` has come of `total`; nothing where it is done in `FIRST` seconds."""

    def __init__(self, what: str, total: int):
        self.what, self.total = what, total
        self._next = time.monotonic() + FIRST

    def at(self, done: int) -> None:
        """So many are done."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY
            log.info("data: %s: %s of %s", self.what, f"{done:,}", f"{self.total:,}")
