"""How long training has waited for its checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stall:
    """Measures how long training waits for a checkpoint, over all `fit`s of a run.

    It waits for the GPU to finish the step, for the ranks, for the checkpoint before it and for the copy. Without a
    thread it also waits for the disk.

    Attributes:
        longest: the most seconds of all waits so far, or None before one.
    """

    def __init__(self) -> None:
        self.longest: float | None = None

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the block as a wait. One that raises does not count."""
        began = time.perf_counter()
        yield
        self.longest = max(self.longest or 0.0, time.perf_counter() - began)
