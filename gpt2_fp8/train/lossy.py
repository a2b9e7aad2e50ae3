"""A logger that loses rows rather than end a run."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class Lossy:
    """A logger that loses a row if the disk does not take it. The first of several in a row logs a warning."""

    _failing = False
    _recovers = True  # whether a row that is written means that later ones are

    @contextmanager
    def losing_rows(self, what: str, unless: Container[int | None] = ()) -> Iterator[None]:
        """Log a warning if `what` cannot be written. Raises OSError for the error numbers `unless`."""
        try:
            yield
        except (OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error, ValueError) else error  # Lightning turns it into a ValueError
            if not isinstance(cause, OSError) or cause.errno in unless:
                raise
            if not self._failing:
                log.warning("%s is not written, training goes on: %s", what, cause)
            self._failing = True
        else:
            self._failing = self._failing and not self._recovers
